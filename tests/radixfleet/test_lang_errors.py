"""Failures of programs: each is raised at once where somebody looks, in the server's words; nothing stays behind."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from radixfleet import (
    BackendError,
    BackendTimeout,
    BatchError,
    LanguageError,
    RuntimeEndpoint,
    UnsetVariable,
    function,
    gen,
    set_default_backend,
)
from radixfleet.local_server import free_port
from tests.radixfleet.conftest import program_threads
from tests.radixfleet.fake_model_server import FakeServer, wait_until


@function
def two_steps(s: Any, text: str) -> None:
    s += text + gen("a", max_tokens=2)
    s += " then" + gen("b", max_tokens=2)


def test_server_off() -> None:
    backend = RuntimeEndpoint(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(BackendError, match=r"no server answers at http://127\.0\.0\.1"):
        two_steps.run(text="x", backend=backend)
    assert not program_threads()
    with pytest.raises(BatchError, match="2 of 2 items failed; item 0: BackendError: no server answers"):
        two_steps.run_batch([("x",), ("y",)], backend=backend)
    state = two_steps.run(text="x", backend=backend, stream=True)
    with pytest.raises(BackendError, match="no server answers"):
        list(state.text_iter())
    backend.close()


def test_refusal_in_the_servers_words(fake: FakeServer) -> None:
    fake.refuse["then"] = (400, "regex: unbalanced parenthesis at 3")
    with pytest.raises(BackendError, match="unbalanced parenthesis at 3") as failure:
        two_steps.run(text="x")
    assert failure.value.status == 400
    assert len(fake.generations()) == 2


def test_a_read_raises_what_keeps_the_value_away(fake: FakeServer) -> None:
    fake.refuse["x"] = (429, "The queue is full.")

    @function
    def program(s: Any) -> str:
        s += "x" + gen("a")
        try:
            return str(s["a"])
        except BackendError as error:
            return f"handled {error}"

    state = program.run()
    assert state.ret_value == "handled The queue is full."
    assert str(state.error()) == "The queue is full."
    with pytest.raises(BackendError):
        state.text()
    with pytest.raises(BackendError):
        state += "more"


def test_exception_of_the_function(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixfleet.lang.executor.LOOK_AHEAD_S", 0.01)
    release = threading.Event()
    fake.delay = lambda prompt: release.wait(20) and None

    @function
    def program(s: Any) -> None:
        s += "x" + gen("a")
        wait_until(lambda: fake.running == 1)
        raise ZeroDivisionError("mine")

    def free() -> None:
        wait_until(lambda: len(fake.aborted) == 1)
        release.set()

    helper = threading.Thread(target=free)
    helper.start()
    with pytest.raises(ZeroDivisionError, match="mine"):
        program.run()
    helper.join()
    assert len(fake.aborted) == 1
    assert not program_threads()


def test_unset_variable_is_told_at_once(fake: FakeServer) -> None:
    @function
    def program(s: Any) -> None:
        s += "x" + gen("known")
        assert s["unknown"]

    with pytest.raises(UnsetVariable, match="never set 'unknown'; its variables: known"):
        program.run()
    with pytest.raises(KeyError):
        two_steps.run(text="x")["c"]


def test_unset_variable_in_a_thread_of_the_function(fake: FakeServer) -> None:
    @function
    def program(s: Any) -> None:
        forks = s.fork(2)
        forks += lambda i: f"{i}" + gen("x")
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda fork: fork["y"], forks))

    with pytest.raises(UnsetVariable, match="never set 'y'"):
        program.run()


def test_a_fork_that_fails_is_not_forgotten(fake: FakeServer) -> None:
    fake.refuse["bad"] = (400, "no such thing")

    @function
    def joined(s: Any) -> None:
        forks = s.fork(2)
        forks += [gen("x"), "bad" + gen("x")]
        forks.join()

    @function
    def left(s: Any) -> None:
        forks = s.fork(2)
        forks += ["good" + gen("x"), "bad" + gen("x")]

    for program in (joined, left):
        with pytest.raises(BackendError):
            program.run()


def test_other_items_of_a_batch_finish(fake: FakeServer) -> None:
    fake.refuse["bad"] = (400, "will not")
    items = [{"text": "good one"}, {"text": "bad one"}, {"text": "good two"}]
    with pytest.raises(BatchError, match="1 of 3 items failed; item 1: BackendError: will not") as failure:
        two_steps.run_batch(items)
    states = failure.value.states
    assert states[0]["b"]
    assert states[2]["b"]
    assert list(failure.value.failures) == [1]
    with pytest.raises(BackendError, match="will not"):
        states[1]["a"]
    kept = two_steps.run_batch(items, on_error="keep")
    assert str(kept[1].error()) == "will not"
    seen = []
    with pytest.raises(BatchError):
        for state in two_steps.run_batch(items, generator_style=True):
            seen.append(state)
    assert len(seen) == 3


def test_function_exception_in_a_batch_is_its_items(fake: FakeServer) -> None:
    @function
    def program(s: Any, n: int) -> None:
        s += f"{n}" + gen("a")
        if n == 1:
            raise ValueError("one is bad")

    with pytest.raises(BatchError, match="item 1: ValueError: one is bad") as failure:
        program.run_batch([{"n": n} for n in range(3)])
    assert failure.value.states[2]["a"]


def test_errors_in_streams(fake: FakeServer) -> None:
    fake.broken_stream = True
    state = two_steps.run(text="x", stream=True)
    got = []
    with pytest.raises(BackendError, match="the worker was lost"):
        for text in state.text_iter():
            got.append(text)
    assert got[0] == "x"

    async def read() -> None:
        with pytest.raises(BackendError, match="the worker was lost"):
            async for _ in two_steps.run(text="x", stream=True).text_async_iter("b"):
                pass

    asyncio.run(read())


def test_function_exception_in_a_stream(fake: FakeServer) -> None:
    @function
    def program(s: Any) -> None:
        s += "x" + gen("a")
        s.sync()
        raise ValueError("late")

    state = program.run(stream=True)
    with pytest.raises(ValueError, match="late"):
        list(state.text_iter())
    assert state["a"]
    with pytest.raises(UnsetVariable):
        list(two_steps.run(text="x", stream=True).text_iter("nothing"))


def test_time_out(fake: FakeServer) -> None:
    release = threading.Event()
    fake.delay = lambda prompt: release.wait(20) and None
    with pytest.raises(BackendTimeout, match="did not answer in time"):
        two_steps.run(text="x", backend=RuntimeEndpoint(fake.url, timeout=0.2))
    release.set()


def test_time_out_of_one_item(fake: FakeServer) -> None:
    """The others finish, and no thread is left."""
    release = threading.Event()
    fake.delay = lambda prompt: release.wait(20) and None if "slow" in prompt else None
    backend = RuntimeEndpoint(fake.url, timeout=1.0)
    with pytest.raises(BatchError, match="1 of 3 items failed; item 1: BackendTimeout") as failure:
        two_steps.run_batch([("one",), ("slow",), ("two",)], backend=backend)
    assert failure.value.states[0]["b"]
    assert failure.value.states[2]["b"]
    assert not program_threads()
    release.set()
    backend.close()


def test_no_backend() -> None:
    set_default_backend(None)
    with pytest.raises(LanguageError, match="set_default_backend"):
        two_steps.run(text="x")


def test_arguments_that_do_not_fit(fake: FakeServer) -> None:
    with pytest.raises(TypeError, match="missing a required argument: 'text'"):
        two_steps.run()
    with pytest.raises(TypeError, match="2 values for 1 parameters"):
        two_steps.run_batch([("a", "b")])
    with pytest.raises(TypeError, match="item 1: missing a required argument: 'text'"):
        two_steps.run_batch([("a",), ()])
    with pytest.raises(TypeError, match="neither a mapping"):
        two_steps.run_batch(["a"])  # type: ignore[list-item]
    with pytest.warns(UserWarning, match="no parameter and ran no gen.. named txet"):
        two_steps.run(text="x", txet="y")
    assert fake.calls("/generate")[0]["text"] == "x"


def test_waiting_for_oneself_is_refused(fake: FakeServer) -> None:
    @function
    def program(s: Any) -> None:
        s += "x" + gen("b", api_url=lambda: s["a"]) + gen("a")

    with pytest.raises(LanguageError, match="waits for the program itself"):
        program.run(optimize=False)


def test_cancelled_await_ends_the_program(fake: FakeServer) -> None:
    release = threading.Event()
    fake.delay = lambda prompt: release.wait(20) and None

    async def main() -> None:
        task = asyncio.create_task(two_steps.run_async(text="x"))
        await asyncio.to_thread(wait_until, lambda: fake.running == 1)
        task.cancel()
        await asyncio.to_thread(wait_until, lambda: len(fake.aborted) == 1)
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert len(fake.generations()) == 1


def test_a_forgotten_stream_ends_by_itself(fake: FakeServer) -> None:
    iterator = two_steps.run(text="x", stream=True).text_iter()
    assert next(iterator) == "x"
    del iterator
    wait_until(lambda: not program_threads())


@pytest.mark.parametrize("how", ["stream", "batch"])
def test_an_exception_while_the_model_writes_is_told_not_its_consequence(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr("radixfleet.lang.executor.LOOK_AHEAD_S", 0.01)
    fake.delay = lambda prompt: wait_until(lambda: bool(fake.aborted))

    @function
    def program(s: Any) -> None:
        s += "x" + gen("a")
        wait_until(lambda: fake.running > 0)
        raise ValueError("mine")

    state = program.run(stream=True) if how == "stream" else program.run_batch([()], on_error="keep")[0]
    looks = [lambda: state["a"], state.text, lambda: list(state.text_iter()), lambda: list(state.text_iter("a"))]
    for look in looks:
        with pytest.raises(ValueError, match="mine"):
            look()
    assert isinstance(state.error(), ValueError)
