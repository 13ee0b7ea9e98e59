"""Programs: text, generations, variables, scopes, forks and nested programs, over real HTTP to a toy model."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from typing import Any

import pytest

import radixfleet as sgl
from radixfleet import Optimizations, function, gen
from tests.radixfleet.fake_model_server import END, FakeServer


@function
def question(s: Any, q: str) -> Any:
    s += "Q: " + q + "\n"
    s += "A:" + gen("answer", stop="\n", temperature=0)
    return s["answer"].strip()


def test_text_generation_and_return_value(fake: FakeServer) -> None:
    fake.answers["A:"] = " Paris, of course\nQ: more"
    state = question.run(q="Capital of France?")
    assert state["answer"] == " Paris, of course"
    assert state.text() == "Q: Capital of France?\nA: Paris, of course"
    assert state.ret_value == "Paris, of course"
    assert state.get_meta_info("answer")["finish_reason"] == {"type": "stop", "matched": "\n"}
    assert "answer" in state
    assert "other" not in state
    assert state.error() is None
    assert fake.prompts() == ["Q: Capital of France?\nA:"]
    assert fake.calls("/detokenize") == []  # nothing continues, so nobody needs to know where the ids were cut


def test_generated_ids_are_sent_as_they_were(fake: FakeServer) -> None:
    """The toy model writes "a", " ", "b", which its tokenizer would read as "a", " b"."""
    fake.answers["go"] = "x"
    ids = [fake.encode(one)[0] for one in ("a", " ", "b")]
    fake._answer = lambda body, prompt, choice: {  # type: ignore[method-assign]
        "text": "a b",
        "output_ids": ids,
        "meta_info": {"finish_reason": {"type": "length", "length": 3}, "completion_tokens": 3},
        "prompt_token_ids": prompt,
    }

    @function
    def program(s: Any) -> None:
        s += "go" + gen("first")
        s += " on" + gen("second")

    program.run()
    first, second = fake.generations()
    assert first["text"] == "go"
    assert second["input_ids"] == fake.encode("go") + ids + fake.encode(" on")
    assert fake.encode("a b") != ids


def test_what_ended_a_generation_is_not_continued(fake: FakeServer) -> None:
    fake.answers["one"] = " two" + END
    fake.answers["three"] = " four.five six"

    @function
    def program(s: Any) -> None:
        s += "one" + gen("a") + " three" + gen("b", stop=".f") + "!" + gen("c")

    state = program.run()
    assert state.text().startswith("one two three four!")
    assert fake.prompts()[2] == "one two three four!"


def test_a_stop_string_inside_a_token_leaves_text(fake: FakeServer) -> None:
    fake.answers["say"] = " hello world again"

    @function
    def program(s: Any) -> None:
        s += "say" + gen("a", stop="rld") + "rk" + gen("b")

    state = program.run()
    assert state["a"] == " hello wo"
    assert fake.generations()[1]["input_ids"] == fake.encode("say hello") + fake.encode(" work")


def test_neighbouring_constants_are_one_text(fake: FakeServer) -> None:
    @function
    def program(s: Any) -> None:
        s += "The"
        s += " cap"
        s += "ital" + gen("a", max_tokens=2)
        s += " of"
        s += "ten" + gen("b")

    program.run()
    first, second = fake.generations()
    assert first["text"] == "The capital"
    assert second["input_ids"][-1:] == fake.encode(" often")


def test_sampling_of_call_over_run(fake: FakeServer) -> None:
    @function
    def program(s: Any) -> None:
        s += "x" + gen("a", temperature=0.5, stop=["!"], seed=7, logit_bias={5: -1})
        s += gen("b")

    program.run(temperature=0.25, max_new_tokens=9, stop="?", repetition_penalty=1.5)
    first, second = (body["sampling_params"] for body in fake.generations())
    assert first == {
        "max_new_tokens": 9,
        "n": 1,
        "stop": ["!"],
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.5,
        "ignore_eos": False,
        "sampling_seed": 7,
        "logit_bias": {"5": -1.0},
    }
    assert second["stop"] == ["?"]
    assert second["temperature"] == 0.25


def test_constraints_and_types(fake: FakeServer) -> None:
    @function
    def program(s: Any) -> None:
        s += "n=" + sgl.gen_int("int", stop=";") + sgl.gen_string("str") + gen("f", dtype="float")
        s += gen("j", json_schema={"type": "object"}) + gen("e", ebnf='root ::= "a"') + gen("r", regex="a+")
        document = sgl.xml_schema("p", {"a": "[0-9]+", "b": [{"c": None}]})
        s += gen("l", lark='start: "a"') + gen("x", xml_schema=document)

    program.run()
    params = [body["sampling_params"] for body in fake.generations()]
    assert params[0]["regex"] == r"[-+]?[0-9]+[ \n]*"
    assert params[0]["stop"] == [";", " ", "\n"]
    assert params[1]["regex"] == r'"[\w\d ]*"'
    assert params[2]["regex"] == r"[-+]?[0-9]*\.?[0-9]+[ \n]*"
    assert params[3]["json_schema"] == '{"type": "object"}'
    assert params[4]["ebnf"] == 'root ::= "a"'
    assert params[5]["regex"] == "a+"
    assert params[6]["lark"] == 'start: "a"'
    assert json.loads(params[7]["xml_schema"]) == {"p": {"a": "[0-9]+", "b": [{"c": None}]}}
    with pytest.raises(ValueError, match="exclude each other"):
        gen("x", dtype=int, regex="a")
    with pytest.raises(ValueError, match="unknown dtype"):
        gen("x", dtype=dict)


@pytest.mark.parametrize(
    ("root", "content"), [("a b", None), ("", None), ("a", {}), ("a", {"b": 5}), ("a", [None]), ("a", {"<": None})]
)
def test_what_is_no_xml_document(root: str, content: Any) -> None:
    with pytest.raises(ValueError, match="element"):
        sgl.xml_schema(root, content)


def test_several_choices_of_one_generation(fake: FakeServer) -> None:
    @function
    def program(s: Any) -> None:
        s += "x" + gen("a", n=3)
        s += "y" + gen("b")

    state = program.run()
    assert len(state["a"]) == 3
    assert len(set(state["a"])) == 3
    assert fake.prompts()[-1] == f"x{state['a'][0]}y"


def test_nothing_of_the_caller_is_changed(fake: FakeServer) -> None:
    stop, choices, item, ids = ["\n"], ["a", "b"], {"q": "x"}, [3, 4]
    before = copy.deepcopy((stop, choices, item, ids))

    @function
    def program(s: Any, q: str) -> None:
        s += q + gen("a", stop=stop, dtype=int, stop_token_ids=ids)
        s += gen("b", choices=choices)

    for _ in range(2):
        program.run(stop=stop, **item)
        program.run_batch([item, item], stop=stop)
    assert (stop, choices, item, ids) == before


def test_scopes_and_assigned_variables(fake: FakeServer) -> None:
    fake.answers["name: "] = "Ann" + END

    @function
    def program(s: Any) -> None:
        with s.var_scope("json"):
            s += "{name: " + gen("name")
            s += "}"
        s["note"] = "kept " + s["name"]
        s.set_var("number", 5)

    state = program.run()
    assert state["json"] == "{name: Ann}"
    assert state["note"] == "kept Ann"
    assert state.get_var("number") == 5


def test_forks_gather_their_variables(fake: FakeServer) -> None:
    @function
    def program(s: Any) -> None:
        s += "Two tips." + gen("shared")
        forks = s.fork(2)
        forks += lambda i: f" Tip {i}:"
        forks[0] += gen("tip")
        forks[1] += gen("tip") + gen("extra")
        forks.join()
        s += " Summary" + gen("summary")

    state = program.run()
    assert len(state["tip"]) == 2
    assert state["tip"][0] != state["tip"][1]
    assert state["extra"] == [None, state["extra"][1]]
    assert isinstance(state["shared"], str)
    assert state.text().count("Tip") == 0


def test_forks_append_their_texts(fake: FakeServer) -> None:
    @function
    def program(s: Any) -> None:
        s += "Start."
        forks = s.fork(2)
        forks += [" one" + gen("a", max_tokens=2), " two" + gen("a", max_tokens=2)]
        forks.join("concate_and_append")
        s += " End" + gen("end")

    state = program.run()
    first, second = (text for text in fake.prompts()[:2])
    assert sorted([first, second]) == ["Start. one", "Start. two"]
    text = fake.prompts()[2]
    assert text.startswith("Start. one ")
    assert " two" in text
    assert text.endswith(" End")
    assert state.text().startswith(text)


def test_forks_run_at_the_same_time(fake: FakeServer) -> None:
    together = threading.Barrier(3, timeout=10)
    fake.delay = lambda prompt: together.wait() and None if prompt.endswith("?") else None

    @function
    def program(s: Any) -> None:
        forks = s.fork(3)
        forks += lambda i: f"{i}?" + gen("x")
        forks.join()

    program.run()
    assert fake.most_running == 3


def test_copy_leaves_the_original_alone(fake: FakeServer) -> None:
    fake.answers["calculate("] = "2*3)" + END

    @function
    def program(s: Any) -> None:
        s += "calculate(" + gen("expression", stop=")") + ") = "
        with s.copy() as tmp:
            tmp += "draft" + gen("draft")
            assert tmp["expression"] == "2*3"
        s += "6"

    state = program.run()
    assert state.text() == "calculate(2*3) = 6"
    assert "draft" not in state


def test_bind_and_call_and_nesting(fake: FakeServer) -> None:
    @function
    def part(s: Any, what: str) -> str:
        s += f"<{what}>" + gen(what, max_tokens=1)
        return what.upper()

    @function
    def whole(s: Any, a: str, b: str = "y") -> Any:
        return part(s, a) + part(s, what=b)

    state = whole.bind(a="x").run()
    assert state.ret_value == "XY"
    assert state["x"]
    assert whole("q").ret_value == "QY"


def test_a_program_without_threads_is_the_same(fake: FakeServer) -> None:
    text = question.run(q="same?").text()
    assert question.run(q="same?", use_thread=False).text() == text
    assert question.run(q="same?", optimize=False).text() == text
    assert question.run(q="same?", optimize=Optimizations(concurrent=False)).text() == text


def test_async_programs(fake: FakeServer) -> None:
    @function
    async def program(s: Any, q: str) -> str:
        s += q + gen("a")
        await asyncio.sleep(0)
        return str(await s.get("a"))

    async def main() -> None:
        state = await program.run_async(q="x")
        assert state.ret_value == state["a"]
        assert program.run(q="x", temperature=0).ret_value  # inside a running loop, like a notebook
        states = await asyncio.gather(*(question.run_async(q=str(i)) for i in range(5)))
        assert len({state["answer"] for state in states}) == 5

    asyncio.run(main())
    assert program.run(q="x").ret_value


def test_reasoning_is_separated(fake: FakeServer) -> None:
    fake.answers["?"] = "<think>\nhm\n</think>\n\nfour" + END

    @function
    def program(s: Any) -> None:
        s += "2+2?" + sgl.separate_reasoning(gen("answer"), model_type="qwen3")

    state = program.run()
    assert state["answer"] == "four"
    assert state["answer_reasoning_content"] == "hm"


def test_flush_and_server_info(fake: FakeServer) -> None:
    sgl.flush_cache()
    assert sgl.get_server_info()["version"] == "toy"
    assert fake.calls("/flush_cache") == [{}]


def test_the_first_parameter_is_s() -> None:
    with pytest.raises(TypeError, match="must be s"):

        @function
        def program(state: Any) -> None: ...


def test_every_export_exists() -> None:
    for name in sgl.__all__:
        assert getattr(sgl, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'generate'"):
        _ = sgl.generate
