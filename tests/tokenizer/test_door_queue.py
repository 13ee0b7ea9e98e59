"""A full queue and priorities, through the real scheduler: who is refused, when to come back, who goes first."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.tokenizer.test_reports_streams import PATHS, body_for
from tests.whole_house import WholeHouse, eventually, open_house

pytestmark = pytest.mark.timeout(120)


def waiting(house: WholeHouse) -> int:
    return len(house.core.waiting)


async def test_a_full_queue_says_when_to_come_back() -> None:
    with tempfile.TemporaryDirectory(prefix="rf") as folder:
        async with open_house(Path(folder), max_slots=1, scheduler={"max_queued_requests": 2}) as house:
            house.workers[0].gate.clear()
            taken = [asyncio.create_task(house.complete("seated", 4))]
            await eventually(lambda: house.core.lifecycle.num_running == 1)
            taken += [asyncio.create_task(house.complete(f"waiting {number}", 4)) for number in range(2)]
            await eventually(lambda: waiting(house) == 2)
            for path in PATHS:
                for stream in (False, True):
                    answer = await house.post(path, {**body_for(path, "too many", max_tokens=4), "stream": stream})
                    assert answer.status_code == 429
                    assert int(answer.headers["retry-after"]) >= 1
                    error = answer.json()["error"]
                    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
            assert (await house.client.get("/ready")).status_code == 200
            house.workers[0].gate.set()
            assert [a["choices"][0]["text"] for a in await asyncio.gather(*taken)] == [
                house.model.text(prompt, 4) for prompt in ("seated", "waiting 0", "waiting 1")
            ]
            await house.check_books()
            await house.check_next()


async def test_higher_priorities_go_first() -> None:
    with tempfile.TemporaryDirectory(prefix="rf") as folder:
        async with open_house(Path(folder), max_slots=1) as house:
            house.workers[0].gate.clear()
            ended: list[int] = []

            async def ask(priority: int, **fields: Any) -> None:
                await house.complete(f"priority {priority}", 3, priority=priority, **fields)
                ended.append(priority)

            tasks = [asyncio.create_task(ask(0))]
            await eventually(lambda: house.core.lifecycle.num_running == 1)
            for number, priority in enumerate((-1, 5, 2)):
                tasks.append(asyncio.create_task(ask(priority)))
                await eventually(lambda wanted=number + 1: waiting(house) == wanted)
            house.workers[0].gate.set()
            await asyncio.gather(*tasks)
            assert ended == [0, 5, 2, -1]
            await house.check_books()
