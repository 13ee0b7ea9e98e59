"""The real small model, for every system test."""

from pathlib import Path

import pytest

from radixfleet.models import resolve


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The small real model as a folder."""
    return resolve(None)
