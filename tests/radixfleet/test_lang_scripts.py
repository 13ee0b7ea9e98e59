"""Chains of steps as one request: what belongs to a chain, that results stay the same, and what happens in between."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from radixfleet import (
    BackendError,
    Optimizations,
    RuntimeEndpoint,
    assistant,
    function,
    gen,
    greedy_token_selection,
    select,
    separate_reasoning,
    set_default_backend,
    unconditional_likelihood_normalized,
    user,
)
from radixfleet.lang.executor import Executor
from tests.radixfleet.conftest import program_threads
from tests.radixfleet.fake_model_server import END, FakeServer, fake_model_server, wait_until

NO_SCRIPT = Optimizations(script=False)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    """With scripts; an author may take his time between two steps."""
    monkeypatch.setattr("radixfleet.lang.executor.LOOK_AHEAD_S", 20.0)
    with fake_model_server() as fake:
        endpoint = RuntimeEndpoint(fake.url, timeout=20)
        set_default_backend(endpoint)
        yield fake
        wait_until(lambda: not program_threads())
        endpoint.close()


@function
def chained(s: Any, q: str) -> None:
    s += "Q: " + q + gen("a", max_tokens=3)
    s += " and" + gen("b", stop=" the", max_tokens=4) + " so "
    s += select("c", ["yes", "no", "perhaps"])
    s += " then" + gen("d", max_tokens=2)


@function
def conversation(s: Any, q: str) -> None:
    s += user(q)
    s += assistant(gen("a", max_tokens=3))
    s += user(f"You said <|im_end|> {q}?")
    s += assistant("Well," + gen("b", max_tokens=3))


@function
def mentions(s: Any, q: str) -> None:
    dest = gen("dest", max_tokens=2)
    with s.var_scope("all"):
        s += f"{q} {dest} or {dest}" + separate_reasoning(gen("plan", max_tokens=3), "qwen3")
    s["copy"] = dest
    s += gen("end", max_tokens=2)


@pytest.mark.parametrize("program", [chained, conversation, mentions])
def test_one_request_and_the_same_ids(server: FakeServer, program: Any) -> None:
    server.answers[" and"] = " of the world"
    scripted = program.run(q="x", temperature=0)
    assert len(server.calls("/script")) == 1
    steps = [body for body in server.generations() if body.get("step")]
    assert len(steps) == len(server.generations())
    assert server.calls("/tokenize") == server.calls("/detokenize") == []
    prompts = server.prompts()
    server.requests.clear()
    single = program.run(q="x", temperature=0, optimize=NO_SCRIPT)
    assert server.calls("/script") == []
    assert server.prompts() == prompts
    assert scripted.text() == single.text()
    assert scripted.messages() == single.messages()
    variables = scripted.over(lambda executor: executor.variables)
    assert {name: v.value for name, v in variables.items()} == {
        name: v.value for name, v in single.over(lambda executor: executor.variables).items()
    }
    for name in ("a",) if program is chained else ():
        told = scripted.get_meta_info(name)
        assert told["prompt_tokens"] == single.get_meta_info(name)["prompt_tokens"]
    assert all(
        one["input_ids"] == other["input_ids"]
        for one, other in zip(steps, server.generations(), strict=True)
        if "input_ids" in one and "input_ids" in other
    )


def test_streamed_text_comes_part_by_part(server: FakeServer) -> None:
    server.answers[" and"] = " of the world"
    state = chained.run(q="x", stream=True, temperature=0)
    assert "".join(state.text_iter()) == chained.run(q="x", temperature=0).text()
    assert len(list(state.text_iter("a"))) == 3
    assert state.get_meta_info("a")["completion_tokens"] == 3
    assert [body["deltas"] for body in server.calls("/script")] == [True, False]


def test_a_read_in_between_ends_a_chain(server: FakeServer) -> None:
    @function
    def program(s: Any) -> None:
        s += "x" + gen("a") + gen("b")
        if s["a"]:
            s += "y" + gen("c")

    program.run(temperature=0)
    assert len(server.calls("/script")) == 1
    assert len(server.generations()) == 3


@pytest.mark.parametrize(
    "between",
    [
        lambda s: gen("call", api_url=lambda: "called"),
        lambda s: gen("many", n=2),
        lambda s: select("odd", ["a", "b"], choices_method=unconditional_likelihood_normalized),
        lambda s: select("odd", [f"a{gen('m', max_tokens=1)}", "b"]),
    ],
)
def test_what_needs_this_process_ends_a_chain(server: FakeServer, between: Any) -> None:
    @function
    def program(s: Any) -> None:
        s += "x" + gen("a", max_tokens=2) + between(s) + gen("b", max_tokens=2) + "!" + gen("c", max_tokens=2)

    scripted = program.run(temperature=0)
    assert [len([s for s in body["steps"] if "gen" in s]) for body in server.calls("/script")] == [2]
    assert scripted.text() == program.run(temperature=0, optimize=NO_SCRIPT).text()


def test_greedy_selection_and_bound_values_belong_to_a_chain(server: FakeServer) -> None:
    @function
    def program(s: Any) -> None:
        s += "Hi " + gen("name") + ", " + gen("a", max_tokens=2)
        s += select("c", ["x", "y"], choices_method=greedy_token_selection)

    state = program.run(name="Ann", temperature=0)
    [script] = server.calls("/script")
    assert [part["text"] for part in script["prompt_parts"]] == ["Hi ", "Ann", ", "]
    assert "greedy_logprob_matrix" in state.get_meta_info("c")


def test_a_value_can_be_read_while_the_script_goes_on(server: FakeServer) -> None:
    release = threading.Event()
    server.delay = lambda prompt: release.wait(10) and None if "and" in prompt else None

    @function
    def program(s: Any) -> None:
        s += "x" + gen("a") + " and" + gen("b")
        assert s["a"]
        release.set()

    assert program.run()["b"]
    assert len(server.calls("/script")) == 1


def test_an_author_who_takes_his_time_is_not_waited_for(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixfleet.lang.executor.LOOK_AHEAD_S", 0.01)

    @function
    def program(s: Any) -> None:
        s += "x" + gen("a")
        wait_until(lambda: len(server.generations()) == 1)
        s += "y" + gen("b")

    program.run()
    assert server.calls("/script") == []


def test_identical_beginnings_of_a_batch_are_computed_once(server: FakeServer) -> None:
    @function
    def program(s: Any, q: str) -> None:
        s += "Rules." + gen("plan", max_tokens=2) + gen("more", max_tokens=2)
        s += q + gen("a", max_tokens=2)

    items = [{"q": f" question {i % 2}"} for i in range(6)]
    states = program.run_batch(items, temperature=0)
    assert len(server.generations()) == 4
    server.requests.clear()
    plain = program.run_batch(items, temperature=0, optimize=False)
    assert [state.text() for state in states] == [state.text() for state in plain]
    assert len(server.generations()) == 18
    server.requests.clear()
    program.run_batch(items, temperature=1.0)
    assert len(server.calls("/script")) == 6
    assert len(server.generations()) == 18


def test_a_shared_step_that_fails_is_tried_by_each_alone(server: FakeServer) -> None:
    server.refuse["Bad"] = (503, "busy")

    @function
    def program(s: Any, q: str) -> None:
        s += "Bad" + gen("a") + q + gen("b")

    states = program.run_batch([{"q": "x"}, {"q": "x"}, {"q": "y"}], temperature=0, on_error="keep")
    assert [str(state.error()) for state in states] == ["busy"] * 3
    assert len(server.generations()) == 3


def test_errors_in_the_middle(server: FakeServer) -> None:
    server.refuse[" then"] = (400, "no more")
    with pytest.raises(BackendError, match="no more") as failure:
        chained.run(q="x", temperature=0)
    assert failure.value.status == 400
    state = chained.run_batch([{"q": "x"}], temperature=0, on_error="keep")[0]
    assert state.over(lambda executor: executor.variables)["c"].value
    server.refuse.clear()
    server.broken_stream = True
    with pytest.raises(BackendError, match="the worker was lost"):
        chained.run(q="x", temperature=0)


def test_an_exception_of_the_function_ends_the_script(server: FakeServer) -> None:
    release = threading.Event()
    server.delay = lambda prompt: release.wait(20) and None if "two" in prompt else None

    @function
    def program(s: Any) -> None:
        s += "one" + gen("a") + "two" + gen("b") + "three" + gen("c")
        assert s["a"]
        threading.Thread(target=free).start()
        raise ZeroDivisionError("mine")

    def free() -> None:
        wait_until(lambda: len(server.aborted) == 1)
        release.set()

    with pytest.raises(ZeroDivisionError):
        program.run()
    assert len(server.generations()) == 2
    assert not program_threads()


def test_forks_have_chains_of_their_own(server: FakeServer) -> None:
    server.answers["?"] = " fine" + END

    @function
    def program(s: Any) -> None:
        s += "Start?" + gen("first")
        forks = s.fork(3)
        forks += lambda i: f"{i}" + gen("x", max_tokens=2) + "!" + gen("y", max_tokens=2)
        forks.join("concate_and_append")
        s += "End" + gen("end", max_tokens=2)

    state = program.run(temperature=0)
    assert len(server.calls("/script")) == 3
    assert state.text() == program.run(temperature=0, optimize=False).text()


def test_a_server_whose_scripts_are_off(server: FakeServer) -> None:
    server.scripts = False
    state = chained.run(q="x", temperature=0)
    assert server.calls("/script") == []
    assert state["d"]
    with_parts = [body for body in server.calls("/generate") if "prompt_parts" in body]
    assert len(with_parts) == 2  # the select tokenises its options itself


def test_explain_names_the_chains() -> None:
    assert "one request for each chain: a - b - c - d" in chained.compile().text()
    assert "one request for each chain: dest - plan - end" in mentions.compile().text()

    @function
    def program(s: Any) -> None:
        s += gen("a")
        s += f"{s['a']}" + gen("b") + gen("call", api_url="http://x/") + gen("c")

    assert "no generation goes on from another one" in program.compile().text()


def test_a_batch_pins_its_prefix(server: FakeServer) -> None:
    @function
    def program(s: Any, q: str) -> None:
        s += "Rules. " * 60 + q + gen("a", max_tokens=2)

    program.run_batch([{"q": "x"}, {"q": "y"}])
    [prefill] = server.prefills()
    assert prefill["pin"]
    assert server.calls("/unpin") == [{"pin": prefill["pin"]}]
    assert server.requests[-1][0] == "/unpin"
    server.requests.clear()
    states = program.run_batch([{"q": "x"}, {"q": "y"}], generator_style=True, num_threads=1)
    next(states)
    states.close()
    assert len(server.calls("/unpin")) == 1


@pytest.mark.timeout(60)
def test_a_script_left_between_two_steps_keeps_nobody_waiting(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate_next = Executor._evaluate_next
    paused: list[Executor] = []
    left: list[bool] = []

    def and_pause_once(self: Executor) -> None:
        evaluate_next(self)
        if not paused:
            paused.append(self)
            with self.run.changed:
                left.append(self.run.changed.wait_for(lambda: self.run.cancelled, 20))

    monkeypatch.setattr(Executor, "_evaluate_next", and_pause_once)

    @function
    def program(s: Any, leave: bool) -> None:
        s += "x" + gen("a", max_tokens=2)
        s += " y" + gen("b", max_tokens=2)
        if leave:
            raise ValueError(s["a"])

    first, second = program.run_batch([(True,), (False,)], temperature=0, num_threads=1, on_error="keep")
    assert left == [True]
    assert isinstance(first.error(), ValueError)
    assert second["b"]


@pytest.mark.timeout(60)
def test_a_select_that_fails_beside_the_text_keeps_nobody_waiting(server: FakeServer) -> None:
    server.refuse["x"] = (429, "The queue is full.")

    @function
    def program(s: Any) -> None:
        tool = select("tool", ["a", "b"])
        s += "x" + gen("found", api_url=str.upper, params={"self": tool}) + tool

    states = program.run_batch([(), ()], num_threads=1, on_error="keep")
    assert [str(state.error()) for state in states] == ["The queue is full."] * 2
