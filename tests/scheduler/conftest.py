"""What tests of constrained requests have in common."""

from __future__ import annotations

import pytest

from tests.local_fleet import LocalFleet


@pytest.fixture(params=[0.0, 20.0], ids=["quick-steps", "long-steps"])
def pace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where steps take long, the next one waits for the result of the one before."""
    monkeypatch.setattr(LocalFleet, "ms_per_token", request.param)
