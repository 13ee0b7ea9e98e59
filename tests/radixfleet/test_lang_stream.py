"""Text as it appears, for threads and for event loops."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from radixfleet import function, gen, select
from tests.radixfleet.fake_model_server import FakeServer


@function
def story(s: Any) -> None:
    s += "Once" + gen("first", stop=" and", max_tokens=8)
    s += " then" + select("pick", [" a", " b"])
    s += gen("second", max_tokens=3)


@pytest.fixture(params=[False, True], ids=["all", "deltas"])
def streamed(fake: FakeServer, request: pytest.FixtureRequest) -> FakeServer:
    """Servers stream all text so far, or only what is new."""
    fake.deltas = request.param
    fake.answers["Once"] = " upon a time and"
    return fake


def test_all_text_in_order(streamed: FakeServer) -> None:
    state = story.run(stream=True)
    pieces = list(state.text_iter())
    assert "".join(pieces) == state.text() == story.run(temperature=0).text()
    assert pieces[:4] == ["Once", " upon", " a", " time"]
    assert all(body["stream"] for body in streamed.generations()[:1])


def test_one_variable(streamed: FakeServer) -> None:
    state = story.run(stream=True)
    assert list(state.text_iter("second")) == ["".join(state["second"][i : i + 5]) for i in (0, 5, 10)]
    assert list(state.text_iter("first")) == [" upon", " a", " time"]
    assert "".join(state.text_iter("pick")) == state["pick"]


def test_reading_a_value_of_a_running_program(fake: FakeServer) -> None:
    release = threading.Event()
    fake.delay = lambda prompt: release.wait(10) and None if "then" in prompt else None
    state = story.run(stream=True)
    assert state["first"]
    release.set()
    assert state["second"]


def test_looking_at_a_stream_waits_for_its_end(fake: FakeServer) -> None:
    assert story.run(stream=True, temperature=0).text() == story.run(temperature=0).text()
    assert story.run(stream=True).error() is None
    state = story.run(stream=True)
    state.sync()
    assert {"first", "pick", "second"} <= set(state.over(lambda executor: executor.variables))


def test_several_readers(fake: FakeServer) -> None:
    state = story.run(stream=True)
    iterators = [state.text_iter(), state.text_iter()]
    assert next(iterators[0]) == next(iterators[1]) == "Once"
    assert list(iterators[0]) == list(iterators[1])


async def test_in_an_event_loop(streamed: FakeServer) -> None:
    state = story.run(stream=True)
    pieces = [text async for text in state.text_async_iter()]
    assert "".join(pieces) == state.text()
    pairs = [pair async for pair in state.text_async_iter("first", return_meta_data=True)]
    assert "".join(text for text, _ in pairs) == " upon a time"
    assert pairs[-1][1]["finish_reason"] == {"type": "stop", "matched": " and"}


async def test_the_loop_is_not_blocked(fake: FakeServer) -> None:
    release = threading.Event()
    fake.delay = lambda prompt: release.wait(10) and None
    state = story.run(stream=True)

    async def read() -> list[str]:
        return [text async for text in state.text_async_iter("second")]

    task = asyncio.create_task(read())
    await asyncio.sleep(0)
    assert not task.done()
    release.set()
    assert await task


def test_text_of_a_finished_run(fake: FakeServer) -> None:
    state = story.run()
    assert "".join(state.text_iter()) == state.text()
    assert "".join(state.text_iter("first")) == state["first"]


def test_stream_of_a_fork_inside_a_program(fake: FakeServer) -> None:
    seen: list[str] = []

    @function
    def program(s: Any) -> None:
        forks = s.fork(2)
        forks += lambda i: f"{i}" + gen("x", max_tokens=2)
        seen.extend(forks[1].text_iter())

    program.run(stream=True).sync()
    state = program.run(stream=True)
    list(state.text_iter())
    assert "".join(seen).startswith("1")
