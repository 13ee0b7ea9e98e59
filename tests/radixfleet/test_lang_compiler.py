"""The compiler: graphs, what is found in them, and that each optimisation moves its own count and no result."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from radixfleet import Optimizations, assistant, function, gen, global_config, select, user
from tests.radixfleet.fake_model_server import FakeServer, wait_until

RULES = "You answer questions about cities, briefly and politely, and never invent what you do not know. " * 3


@function
def ask(s: Any, context: str, q: str) -> None:
    s += RULES
    s += "Context: " + context + "\n"
    s += "Q: " + q + "\nA:" + gen("answer", max_tokens=3)
    s += "\nSure? " + select("sure", ["yes", "no"])


ITEMS = [{"context": f"context {i % 3}", "q": f"question {i % 6}"} for i in range(12)]


def test_the_graph(fake: FakeServer) -> None:
    graph = ask.trace()
    assert [node.kind for node in graph.nodes] == [
        "constant",
        "argument",
        "constant",
        "argument",
        "constant",
        "gen",
        "constant",
        "select",
    ]
    assert graph.prefix_text == RULES + "Context: "
    assert graph.arguments == ["context", "q"]
    assert graph.nodes[0].pieces == 2
    assert graph.nodes[7].options == 2
    assert graph.stopped is None
    assert fake.requests == []


def test_given_arguments_are_constants() -> None:
    assert ask.trace(context="Rome").prefix_text == RULES + "Context: Rome\nQ: "
    assert ask.bind(context="Rome").trace().arguments == ["q"]


def test_forks_and_values() -> None:
    @function
    def program(s: Any, n: Any) -> None:
        s += "Start" + gen("plan")
        forks = s.fork(2)
        forks += lambda i: f"tip {i}" + gen("tip")
        forks.join()
        s += f"of {s['plan']} and {s['tip']}" + gen("end", temperature=0)

    graph = program.trace()
    assert [[node.label for node in level] for level in graph.levels()] == [["plan"], ["tip", "tip"], ["end"]]
    assert [node.label for node in graph.of_kind("gen") if node.repeatable] == ["end"]
    values = graph.of_kind("value")
    assert [node.label for node in values] == ["plan", "tip"]
    assert all(node.uses for node in values)


def test_calls_and_values_needed_early() -> None:
    @function
    def program(s: Any, city: str) -> None:
        s += "Hi. "
        day = gen("day")
        s += "Weather: " + gen("weather", api_url="http://x/", params={"city": city, "day": day}) + gen("advice")

    graph = program.trace()
    [call] = graph.of_kind("call")
    assert {graph.nodes[number].label for number in call.uses} == {"city", "day"}
    assert graph.calls_with_text_before() == [call]


@pytest.mark.parametrize(
    ("look", "why"),
    [
        (lambda s, q: s["a"] == "x", "looks at the variable 'a'"),
        (lambda s, q: s["a"].strip(), "looks at the variable 'a'"),
        (lambda s, q: [*q], "looks at the argument 'q'"),
        (lambda s, q: len(q), "looks at the argument 'q'"),
        (lambda s, q: s["none"], "reads 'none', which was not set"),
        (lambda s, q: s.messages(), "reads its messages"),
        (lambda s, q: range(q), "looks at the argument 'q'"),
        (lambda s, q: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_the_trace_ends_where_nobody_can_know(look: Any, why: str) -> None:
    @function
    def program(s: Any, q: Any) -> None:
        s += "first" + gen("a")
        look(s, q)
        s += "second" + gen("b")

    graph = program.trace()
    assert why in (graph.stopped or "")
    assert [node.label for node in graph.nodes] == ["first", "a"]
    assert why in program.compile().text()


def test_explain_names_every_switch(capsys: pytest.CaptureFixture[str]) -> None:
    ask.explain(temperature=0.0)
    text = capsys.readouterr().out
    for name in Optimizations.__dataclass_fields__:
        assert f"[x] {name}" in text
    assert f"a constant prefix of {len(RULES) + 9} characters, computed once before a batch" in text
    assert "repeatable, identical ones of a batch are asked for once: answer, sure" in text
    assert "items of a batch start sorted by context, q" in text
    assert "2 options are scored in 1 requests" in text
    assert "[ ] prefix" in ask.compile(optimize=False).text()


def test_the_picture_is_xml(tmp_path: Path) -> None:
    @function
    def program(s: Any, a: str) -> None:
        s += "x < y & z" + a + gen("g") + select("s", ["a"])
        s.fork(2).join()

    compiled = program.compile()
    compiled.save_picture(tmp_path / "graph.svg")
    root = ElementTree.parse(tmp_path / "graph.svg").getroot()
    boxes = root.findall("{http://www.w3.org/2000/svg}g")
    assert len(boxes) == len(compiled.graph.nodes)
    assert compiled._repr_svg_() == compiled.svg()


def results(states: list[Any]) -> list[tuple[str, str]]:
    return [(state["answer"], state["sure"]) for state in states]


def test_results_never_change(fake: FakeServer) -> None:
    plain = results(ask.run_batch(ITEMS, temperature=0, optimize=False))
    assert results(ask.run_batch(ITEMS, temperature=0)) == plain
    for name in Optimizations.__dataclass_fields__:
        one = Optimizations(**{**Optimizations.none().__dict__, name: True})
        assert results(ask.run_batch(ITEMS, temperature=0, optimize=one)) == plain
    assert results(ask.compile().run_batch(ITEMS, temperature=0)) == plain


def test_prefix_is_computed_once_before_the_batch(fake: FakeServer) -> None:
    ask.run_batch(ITEMS)
    first, *others = fake.calls("/generate")
    assert first["text"] == RULES + "Context: "
    assert first["sampling_params"]["max_new_tokens"] == 0
    assert others
    assert len(fake.prefills()) == 1
    fake.requests.clear()
    ask.run_batch(ITEMS, optimize=Optimizations(prefix=False))
    assert fake.prefills() == []
    ask.run_batch(ITEMS[:1])
    assert fake.prefills() == []


def test_equal_arguments_belong_to_the_prefix(fake: FakeServer) -> None:
    ask.run_batch([{"context": "same", "q": str(i)} for i in range(3)])
    assert fake.prefills()[0]["text"] == RULES + "Context: same\nQ: "


def test_a_prefix_with_turns(fake: FakeServer) -> None:
    @function
    def program(s: Any, q: str) -> None:
        s += user(RULES) + assistant("Fine.")
        s += user("About " + q) + assistant(gen("a"))

    program.run_batch([("x",), ("y",)])
    [prefill] = fake.prefills()
    text = fake.decode(prefill["input_ids"], False)
    assert text.endswith("<|im_start|>user\nAbout ")
    assert all(prompt.startswith(text) for prompt in fake.prompts())
    assert program.cache()


def test_the_setting_of_ported_programs(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(global_config, "enable_precache_with_tracing", False)
    ask.run_batch(ITEMS)
    assert fake.prefills() == []
    assert global_config.default_backend is not None


def test_cache_says_whether_it_was_worth_it(fake: FakeServer) -> None:
    @function
    def short(s: Any) -> None:
        s += "x" + gen("a")

    assert short.cache() is False
    assert ask.cache() is True
    assert len(fake.prefills()) == 1


def test_identical_work_is_done_once(fake: FakeServer) -> None:
    ask.run_batch(ITEMS, temperature=0)
    shared = len(fake.generations())
    assert shared == 6 + 6  # six different prompts, each with an answer and a select
    fake.requests.clear()
    ask.run_batch(ITEMS, temperature=0, optimize=Optimizations(share=False))
    assert len(fake.generations()) == 24
    fake.requests.clear()
    ask.run_batch(ITEMS, temperature=1.0)
    assert len([body for body in fake.generations() if not body.get("return_logprob")]) == 12
    fake.requests.clear()
    ask.run_batch(ITEMS, seed=3)
    assert len([body for body in fake.generations() if not body.get("return_logprob")]) == 6


def test_a_failure_is_not_shared(fake: FakeServer) -> None:
    fake.refuse["question 1"] = (503, "busy")
    states = ask.run_batch([ITEMS[1]] * 3, temperature=0, on_error="keep")
    assert [str(state.error()) for state in states] == ["busy"] * 3
    assert len(fake.generations()) == 3


def test_items_start_in_the_order_of_their_prefixes(fake: FakeServer) -> None:
    @function
    def program(s: Any, q: str, context: str) -> None:
        s += context + q + gen("a")

    items = [{"q": q, "context": c} for q in ("1", "2") for c in ("b", "a")]
    states = program.run_batch(items, num_threads=1)
    assert fake.prompts() == ["a1", "a2", "b1", "b2"]
    assert [state.text()[:2] for state in states] == ["b1", "a1", "b2", "a2"]
    fake.requests.clear()
    program.run_batch(items, num_threads=1, optimize=Optimizations(order=False))
    assert fake.prompts() == ["b1", "a1", "b2", "a2"]


def test_constants_travel_alone_without_merging(fake: FakeServer) -> None:
    ask.run(context="x", q="y", optimize=Optimizations(merge=False))
    assert len(fake.prefills()) > 3
    fake.requests.clear()
    ask.run(context="x", q="y")
    assert fake.prefills() == []


def test_forks_wait_for_each_other_without_concurrency(fake: FakeServer) -> None:
    @function
    def program(s: Any) -> None:
        forks = s.fork(4)
        forks += lambda i: f"{i}" + gen("x")
        forks.join()

    program.run(optimize=Optimizations(concurrent=False))
    assert fake.most_running == 1


def test_forks_share_a_prefix_that_is_computed_first(fake: FakeServer) -> None:
    @function
    def program(s: Any) -> None:
        s += RULES
        forks = s.fork(3)
        forks += lambda i: f"{i}" + gen("x")
        forks.join()

    program.run()
    assert fake.calls("/generate")[0]["text"] == RULES
    assert len(fake.prefills()) == 1


def test_a_batch_as_it_finishes(fake: FakeServer) -> None:
    release = threading.Event()
    fake.delay = lambda prompt: release.wait(10) and None if "question 5" in prompt else None
    states = ask.run_batch(ITEMS, generator_style=True, num_threads=12, optimize=Optimizations(share=False))
    first = next(states)
    assert first["answer"]
    release.set()
    assert len(list(states)) == len(ITEMS) - 1


def test_an_abandoned_batch_stops(fake: FakeServer) -> None:
    def wait_for_the_end(prompt: str) -> None:
        if "Context: 1" in prompt:  # of the second item: they run in the order of their texts
            wait_until(lambda: bool(fake.aborted))

    fake.delay = wait_for_the_end
    states = ask.run_batch([{"context": str(i), "q": "x"} for i in range(500)], generator_style=True, num_threads=1)
    next(states)
    states.close()
    assert len(fake.generations()) < 20


def test_progress_bar(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    ask.run_batch(ITEMS, progress_bar=True)
    assert capsys.readouterr().err.endswith("12/12\n")
    assert ask.run_batch([]) == []


def test_the_picture_shows_what_xml_cannot_hold(tmp_path: Path) -> None:
    @function
    def program(s: Any) -> None:
        s += "<&>\x00\x1b\ud800" + gen('a<"&>')

    program.compile().save_picture(tmp_path / "graph.svg")
    texts = [text for text in ElementTree.parse(tmp_path / "graph.svg").getroot().itertext() if "<" in text]
    assert texts[:2] == ["<&>\ufffd\ufffd\ufffd", "<&>\ufffd\ufffd\ufffd"]
