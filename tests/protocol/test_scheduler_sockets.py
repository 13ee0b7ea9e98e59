"""The scheduler service over real sockets: plain work, and every way a peer can go."""

from __future__ import annotations

from tests.fake_engine import generate
from tests.local_fleet import tokens
from tests.protocol.house import House


async def test_requests_over_sockets_get_their_tokens(house: House) -> None:
    await house.scheduler()
    worker, detokenizer, frontend = await house.worker(), await house.detokenizer(), await house.frontend()
    for index in range(16):
        frontend.submit(f"r{index}", tokens(30 + 7 * index, seed=index), 12)
    rids = [f"r{index}" for index in range(16)]
    await detokenizer.until(lambda: detokenizer.finished(*rids))
    for index in range(16):
        assert detokenizer.streams[f"r{index}"].tokens == generate(tokens(30 + 7 * index, seed=index), 12)
    assert worker.error is None
