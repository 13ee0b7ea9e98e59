"""select: which tokens are scored, which option wins, and how many requests it takes."""

from __future__ import annotations

from typing import Any

import pytest

import radixfleet as sgl
from radixfleet import Optimizations, assistant, function, gen, select, user
from tests.radixfleet.fake_model_server import FakeServer


@function
def choose(s: Any, text: str, options: list[str], method: Any = None) -> None:
    s += text + select("choice", options, choices_method=method)
    s += "." + gen("after", max_tokens=1)


def likes(fake: FakeServer, **tokens: float) -> None:
    """The toy model's log-probability of each token, -9 for others."""
    table = {token.replace("_", " "): value for token, value in tokens.items()}
    fake.logprob = lambda before, token: table.get(token, -9.0)


def test_the_boundary_is_tokenised_as_the_model_would(fake: FakeServer) -> None:
    """After "is " the option "Paris" is the token " Paris"; the blank alone is never scored."""
    likes(fake, _Paris=-1.0, _London=-2.0)
    state = choose.run(text="The capital is ", options=["London", "Paris"])
    assert state["choice"] == "Paris"
    [scored, after] = fake.generations()
    assert scored["input_ids"] == [fake.encode("The capital is London"), fake.encode("The capital is Paris")]
    assert scored["logprob_start_len"] == len(fake.encode("The capital is"))
    assert after["input_ids"] == fake.encode("The capital is Paris.")
    assert state.get_meta_info("choice")["normalized_prompt_logprobs"] == [-2.0, -1.0]


def test_options_with_and_without_a_blank(fake: FakeServer) -> None:
    likes(fake, _yes=-1.0, yes=-3.0, no=-2.0, _no=-4.0)
    assert choose.run(text="ok?", options=[" yes", " no"])["choice"] == " yes"
    assert choose.run(text="ok?", options=["yes", "no"])["choice"] == "no"


def test_after_a_chat_template(fake: FakeServer) -> None:
    likes(fake, Paris=-0.5, Rome=-1.0)

    @function
    def program(s: Any) -> None:
        s += user("Where?")
        s += assistant(select("choice", ["Rome", "Paris"]))

    state = program.run()
    assert state["choice"] == "Paris"
    assert state.messages()[-1] == {"role": "assistant", "content": "Paris"}


def test_methods(fake: FakeServer) -> None:
    long = "Anti dis establish"
    likes(fake, _Paris=-1.0, _Anti=-0.5, _dis=-0.9, _establish=-3.0)
    assert choose.run(text="x", options=[" Paris", " " + long])["choice"] == " Paris"
    greedy = choose.run(text="x", options=[" Paris", " " + long], method=sgl.greedy_token_selection)
    assert greedy["choice"] == " " + long
    assert greedy.get_meta_info("choice")["greedy_logprob_matrix"] == [[-1.0, -1.0, -1.0], [-0.5, -0.9, -3.0]]
    fake.logprob = lambda before, token: -1.0 if token == " a" else (-1.5 if "x" in before else -5.0)
    gain = sgl.unconditional_likelihood_normalized
    assert choose.run(text="x", options=[" a", " a b"])["choice"] == " a"
    assert choose.run(text="x", options=[" a", " a b"], method=gain)["choice"] == " a b"


def test_an_option_that_starts_another(fake: FakeServer) -> None:
    likes(fake, _Paris=-1.0, _Texas=-0.2)
    for method in (sgl.token_length_normalized, sgl.greedy_token_selection):
        assert choose.run(text="x", options=[" Paris", " Paris Texas"], method=method)["choice"] == " Paris Texas"


def test_one_option_duplicates_and_none(fake: FakeServer) -> None:
    assert choose.run(text="x", options=[" only"])["choice"] == " only"
    likes(fake, _b=-1.0)
    assert choose.run(text="x", options=[" a", " b", " a"])["choice"] == " b"
    assert len(fake.generations()[-2]["input_ids"]) == 2
    for wrong in ([], None, "text", ["a", ""]):
        with pytest.raises(ValueError, match="choice"):
            select("x", wrong)
    with pytest.raises(ValueError, match="temperature must be 0"):
        select("x", ["a"], temperature=1.0)


def test_one_request_for_all_options(fake: FakeServer) -> None:
    options = [f" option{i}" for i in range(20)]
    one = choose.run(text="x", options=options)
    assert len(fake.generations()) == 2
    fake.requests.clear()
    many = choose.run(text="x", options=options, optimize=Optimizations(select=False))
    assert len(fake.generations()) == 21
    assert one["choice"] == many["choice"]


def test_gen_with_choices_and_own_methods(fake: FakeServer) -> None:
    class Last:
        requires_unconditional_logprobs = False

        def __call__(self, *, choices: Any, **_: Any) -> Any:
            from radixfleet.lang.choices import ChoicesDecision

            return ChoicesDecision(choices[-1], {"mine": 1})

    @function
    def program(s: Any) -> None:
        s += "x" + gen("c", choices=["a", "b", "c"], choices_method=Last())

    state = program.run()
    assert state["c"] == "c"
    assert state.get_meta_info("c")["mine"] == 1


@pytest.mark.parametrize("method", [sgl.token_length_normalized, sgl.unconditional_likelihood_normalized])
def test_more_options_than_one_request_may_hold(fake: FakeServer, method: Any) -> None:
    fake.logprob = lambda before, token: -1.0 if before and token == " 599" else -9.0
    state = choose.run(text="The number", options=[f" {number}" for number in range(600)], method=method)
    assert state["choice"] == " 599"
    assert [len(body["prompt"]) for body in fake.calls("/tokenize")[:2]] == [512, 89]
    assert max(len(body.get("input_ids", [])) for body in fake.calls("/generate")[:-1]) == 256
