"""Values that do not exist yet, where authors put them by mistake or in passing: they never reach a model as marks."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from radixfleet import function, gen, select, set_default_backend
from tests.radixfleet.fake_model_server import END, FakeServer


def test_values_inside_lists_and_mappings_of_a_call(fake: FakeServer) -> None:
    fake.answers["To: "] = "Rome" + END
    plain = {"kept": (1, 2)}
    seen: dict[str, Any] = {}

    @function
    def program(s: Any) -> None:
        dest = gen("dest")
        s += f"To: {dest}"
        wishes = {"places": [dest, f"near {dest}"], "options": {"to": dest, "days": 3}, "plain": plain}
        s += gen("found", api_url=lambda **given: seen.update(given) or "ok", params=wishes)

    program.run()
    assert seen == {"places": ["Rome", "near Rome"], "options": {"to": "Rome", "days": 3}, "plain": {"kept": (1, 2)}}
    assert seen["plain"] is plain


@pytest.mark.parametrize(
    "wish",
    [
        lambda value: {"regex": f"{value}"},
        lambda value: {"regex": value},
        lambda value: {"stop": ["x", f"{value}"]},
        lambda value: {"json_schema": {"const": f"{value}"}},
    ],
)
def test_wishes_cannot_mention_values(wish: Callable[[Any], dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match=r"mentions Gen\('dest'\), which has no value yet; use s\['dest'\]"):
        gen("next", **wish(gen("dest")))


def test_arguments_of_a_trace_may_stand_in_wishes() -> None:
    @function
    def program(s: Any, pattern: str) -> None:
        s += "x" + gen("a", regex=pattern) + gen("b", regex=f"{pattern}+")

    graph = program.trace()
    assert graph.stopped is None
    assert [node.label for node in graph.nodes] == ["x", "a", "b"]


@pytest.mark.parametrize("change", [str.upper, json.dumps, lambda text: text[1:]])
def test_a_changed_mention_is_refused(fake: FakeServer, change: Callable[[str], str]) -> None:
    @function
    def program(s: Any) -> None:
        dest = gen("dest", max_tokens=1)
        s += f"To: {dest}"
        s += change(f"{dest}")

    with pytest.raises(ValueError, match=r"mentions a gen\(\) was changed"):
        program.run()


def test_returned_values_are_texts(fake: FakeServer) -> None:
    fake.answers["To: "] = "Rome" + END

    @function
    def program(s: Any, how: Callable[[Any], Any]) -> Any:
        dest = gen("dest")
        s += f"To: {dest}"
        return how(dest)

    assert program.run(how=lambda dest: f"going to {dest}").ret_value == "going to Rome"
    assert program.run(how=lambda dest: dest).ret_value == "Rome"
    never = gen("never")
    assert program.run(how=lambda dest: never).ret_value is never


def test_a_function_is_no_text(fake: FakeServer) -> None:
    @function
    def part(s: Any) -> None:
        s += "part"

    for wrong in (part, gen):

        @function
        def program(s: Any, wrong: Any = wrong) -> None:
            s += "x" + gen("a", max_tokens=1)
            s += wrong

        with pytest.raises(TypeError, match="is no text; call it"):
            program.run()


def test_a_scope_ends_when_something_is_raised_inside(fake: FakeServer) -> None:
    @function
    def program(s: Any) -> None:
        with s.var_scope("outer"):
            s += "a"
            try:
                with s.var_scope("inner"):
                    s += "b"
                    raise ArithmeticError
            except ArithmeticError:
                s += "c"
        try:
            with s.user():
                s += "d"
                raise ArithmeticError
        except ArithmeticError:
            with s.user():
                s += "e"

    for use_thread in (True, False):
        state = program.run(use_thread=use_thread)
        assert (state["outer"], state["inner"]) == ("abc", "b")
        assert [turn["content"] for turn in state.messages()] == ["d", "e"]


def test_a_compiled_program_has_its_arguments(fake: FakeServer) -> None:
    @function
    def program(s: Any, x: str, y: str) -> None:
        s += x + y

    compiled = program.compile(x="a")
    assert compiled.run(y="b").text() == "ab"
    assert compiled.run("c", "d").text() == "cd"
    assert [state.text() for state in compiled.run_batch([{"y": "b"}, {"x": "c", "y": "d"}])] == ["ab", "cd"]


def test_returned_lists_hold_texts(fake: FakeServer) -> None:
    kept = ["x", 1]

    @function
    def program(s: Any) -> Any:
        word = gen("word", max_tokens=1)
        s += "A" + word
        return {"all": [word, f"<{word}>", (word, 3)], "kept": kept}

    state = program.run()
    word = state["word"]
    assert state.ret_value == {"all": [word, f"<{word}>", (word, 3)], "kept": kept}


def test_a_value_is_not_compared_before_it_exists(fake: FakeServer) -> None:
    @function
    def program(s: Any) -> None:
        tool = select("tool", ["calculator", "search"])
        s += "I take the " + tool
        if tool == "calculator":
            s += "!"

    with pytest.raises(TypeError, match=r"has no value yet; append it to the state and read state\['tool'\]"):
        program.run()
    known = gen("x")
    assert known in [gen("y"), known]
    assert known not in [gen("x"), None]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_function_that_yields_is_no_program(is_async: bool) -> None:
    def program(s: Any) -> Any:
        yield s

    async def awaited(s: Any) -> Any:
        yield s

    with pytest.raises(TypeError, match="yields"):
        function(awaited if is_async else program)


def test_an_address_is_no_backend() -> None:
    with pytest.raises(TypeError, match=r"RuntimeEndpoint\('http://127\.0\.0\.1:1'\)"):
        set_default_backend("http://127.0.0.1:1")
