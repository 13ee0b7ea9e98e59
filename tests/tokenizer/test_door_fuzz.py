"""A storm of malformed bodies, heads and half-open connections: no server error, no hang, an undisturbed neighbour.

`scripts/fuzz_door.py` sends 10,000 of them to real processes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.door_fuzz import storm
from tests.whole_house import open_house


@pytest.mark.timeout(120)
async def test_a_storm_beside_a_neighbour() -> None:
    with tempfile.TemporaryDirectory(prefix="rf") as folder:
        door = {"max_batch_size": 8, "max_body_bytes": 1 << 20}
        async with open_house(Path(folder), door=door, num_pages=64, max_context=300) as house:
            async with house.trial():
                tally = await storm(house.url, seed=7, count=500)
            assert tally.wrong == []
            assert set(tally.kinds) == {"changed values", "broken JSON", "odd head", "half-open"}
            assert tally.statuses[400] > 100
            assert tally.statuses[200] > 5
