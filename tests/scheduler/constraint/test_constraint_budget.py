"""complete_within_budget: whatever is sampled, the text is complete when the budget ends."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from radixfleet.models import resolve
from services.scheduler.constraint.budget import BudgetGuard, Ending
from services.scheduler.constraint.canonical import canonical
from services.scheduler.constraint.compile_worker import Worker
from services.scheduler.constraint.completion import allowed, first_allowed
from services.scheduler.constraint.errors import ConstraintError
from services.scheduler.constraint.grammar import CompiledGrammar
from services.scheduler.constraint.llguidance_matcher import LLGuidanceMatcher
from services.scheduler.constraint.protocol import CompileJob, Setup
from services.scheduler.constraint.schema_size import largest_step
from services.scheduler.constraint.state import ConstraintState

sys.path.insert(0, str(Path(__file__).parent))
from constraint_kit import LIMITS, accepts, build, token_order, vocabulary

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 18},
        "city": {"type": "string", "minLength": 3},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
NESTED = {
    "type": "object",
    "properties": {
        "tags": {"type": "array", "items": {"enum": ["a", "a very long tag of many words", "b"]}},
        "people": {"type": "array", "items": PERSON},
        "note": {"anyOf": [{"type": "null"}, PERSON, {"type": "string"}]},
    },
    "required": ["tags"],
}
TREE = {
    "$defs": {
        "n": {
            "type": "object",
            "properties": {"left": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}, "v": {"type": "number"}},
            "required": ["left", "v"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/n",
}
EITHER = {
    "type": "object",
    "properties": {"a": {"type": ["null", "object"], "properties": {"first": PERSON}, "required": ["first"]}},
    "required": ["a"],
    "additionalProperties": False,
}
LONG_OR_SHORT = {"type": ["integer", "array"], "minItems": 20, "items": {"type": "string"}}
SOMEWHERE = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": "bcd"}, "b": {"type": "string", "pattern": "x[0-9]{3}$"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
SCHEMAS: list[Any] = [
    {"type": "integer"},
    {"type": "string"},
    {},
    PERSON,
    NESTED,
    TREE,
    EITHER,
    LONG_OR_SHORT,
    {"type": "string", "format": "duration"},
    SOMEWHERE,
]


@cache
def _compiling() -> Worker:
    return Worker(Setup(resolve(None), LIMITS))


@cache
def _grammar(kind: Any, source: str) -> CompiledGrammar:
    """As the compiler makes it, without a process for it."""
    made = _compiling().compile(CompileJob(kind, canonical(kind, source), best_effort=False, any_whitespace=False))
    matcher = LLGuidanceMatcher.build(made.grammar, vocabulary(), LIMITS)
    return CompiledGrammar(kind, matcher, Ending(made.shortest, made.step, made.plain_is_harmless), token_order(), 0)


def _generate(state: ConstraintState, budget: int, rng: np.random.Generator, *, avoid_end: bool = True) -> str:
    """A model that likes long answers: an end token only where nothing else is left."""
    row = np.zeros(vocabulary().words, np.int32)
    out: list[int] = []
    while len(out) < budget and not state.is_stopped:
        ids = state.fill(row, budget - len(out))
        if not ids:
            choices = allowed(row, vocabulary())
            others = choices[~np.isin(choices, vocabulary().eos_ids)]
            choices = others if len(others) and avoid_end else choices
            assert len(choices)
            ids = (int(rng.choice(choices)),)
        if ids[0] in vocabulary().eos_ids:
            break
        assert state.advance(ids), state.error
        out += ids
    return vocabulary().decode(out).decode()


@pytest.mark.parametrize("schema", SCHEMAS, ids=[json.dumps(s)[:30] for s in SCHEMAS])
def test_every_json_document_is_closed_inside_its_budget(schema: Any) -> None:
    grammar = _grammar("json_schema", json.dumps(schema))
    minimum = grammar.minimum
    assert minimum is not None
    validator = Draft202012Validator(schema)
    for extra in (0, 1, 2, 4, 9, 30):
        for seed in range(5):
            state = grammar.state(minimum + extra, complete_within_budget=True)
            text = _generate(state, minimum + extra, np.random.default_rng(seed))
            assert state.is_complete, (extra, seed, text)
            assert validator.is_valid(json.loads(text)), (extra, seed, text)


@pytest.mark.parametrize(
    ("kind", "source", "judge"),
    [
        ("regex", "[a-z]+@[a-z]+\\.com", re.compile(r"[a-z]+@[a-z]+\.com").fullmatch),
        ("regex", "(ab){3,}c", re.compile("(ab){3,}c").fullmatch),
        ("ebnf", 'root ::= "(" root ")" | [0-9]+', re.compile(r"\(*[0-9]+\)*").fullmatch),
        ("choice", '["a much longer choice of words","no"]', {"a much longer choice of words", "no"}.__contains__),
    ],
)
def test_other_grammars_end_in_time_too(kind: Any, source: str, judge: Callable[[str], Any]) -> None:
    grammar = _grammar(kind, source)
    assert grammar.minimum is not None
    for extra in (0, 1, 4, 12):
        for seed in range(5):
            budget = grammar.minimum + extra
            state = grammar.state(budget, complete_within_budget=True)
            text = _generate(state, budget, np.random.default_rng(seed))
            assert judge(text), (budget, text)


def test_without_it_a_long_text_is_cut() -> None:
    grammar = _grammar("json_schema", '{"type":"string"}')
    state = grammar.state(10)
    _generate(state, 10, np.random.default_rng(0))
    assert not state.is_complete


def test_a_roomy_budget_changes_no_mask() -> None:
    grammar = _grammar("json_schema", json.dumps(PERSON))
    free, guarded = grammar.state(400), grammar.state(400, complete_within_budget=True)
    one, other = (np.zeros(vocabulary().words, np.int32) for _ in range(2))
    rng = np.random.default_rng(1)
    for position in range(40):
        forced = free.fill(one, 400 - position)
        assert guarded.fill(other, 400 - position) == forced
        assert (one == other).all()
        ids = forced or (int(rng.choice(allowed(one, vocabulary()))),)
        if free.is_stopped or ids[0] in vocabulary().eos_ids:
            break
        assert free.advance(ids)
        assert guarded.advance(ids)


@pytest.mark.parametrize(
    ("kind", "source", "end"),
    [
        ("regex", "(.|\\n)*", ""),
        ("regex", "[A-Za-z ,.']*\\.", "."),
        ("ebnf", 'root ::= "Answer:" [^@]* "@"', "@"),
        ("structural_tag", '{"structures":[{"begin":"<f>","schema":{},"end":"</f>"}],"triggers":["<f>"]}', ""),
    ],
)
def test_words_of_an_open_text_stay_allowed_to_its_end(kind: Any, source: str, end: str) -> None:
    """Else a model would have to say its last words in the few tokens that could be tried one by one."""
    grammar = _grammar(kind, source)
    assert grammar.minimum is not None
    budget = grammar.minimum + 30
    free, guarded = grammar.state(budget), grammar.state(budget, complete_within_budget=True)
    all_rows, row = (np.zeros(vocabulary().words, np.int32) for _ in range(2))
    rng = np.random.default_rng(5)
    out: list[int] = []
    open_states = 0
    while len(out) < budget and not guarded.is_stopped:
        left = budget - len(out)
        ids = free.fill(all_rows, left)
        assert guarded.fill(row, left) == ids
        if not ids:
            words = allowed((all_rows.view(np.uint32) & token_order().prose).view(np.int32), vocabulary())
            kept = allowed(row, vocabulary())
            if left > 8 and len(words) > 300:
                assert np.isin(words, kept).all()
                open_states += 1
            words = words[np.isin(words, kept)]
            ids = (int(rng.choice(words if len(words) else kept)),)
        assert free.advance(ids)
        assert guarded.advance(ids)
        out += ids
    assert guarded.is_complete
    assert vocabulary().decode(out).decode().endswith(end)
    assert open_states > 10


def test_a_budget_below_the_minimum_is_refused_with_the_number() -> None:
    grammar = _grammar("json_schema", json.dumps(PERSON))
    assert grammar.minimum is not None
    with pytest.raises(ConstraintError, match=f"at least {grammar.minimum} tokens, but max_new_tokens is 3"):
        grammar.state(3, complete_within_budget=True)
    with pytest.raises(ConstraintError, match=f"at least {grammar.minimum + 1} tokens"):
        grammar.state(grammar.minimum, complete_within_budget=True, thinking_end=5)
    assert grammar.state(3).is_complete is False


def test_the_minimum_is_the_shortest_known_text() -> None:
    for source, text in [
        ('{"type":"object"}', "{}"),
        ('{"type":"integer"}', "0"),
        ('{"enum":["aaaa bbbb cccc","b"]}', '"b"'),
    ]:
        grammar = _grammar("json_schema", source)
        assert grammar.minimum is not None
        assert grammar.minimum <= len(vocabulary().encode(text))
        assert grammar.ending.shortest is not None
        assert accepts(build("json_schema", source), vocabulary().decode(grammar.ending.shortest).decode())


def test_a_fork_is_guarded_by_itself() -> None:
    grammar = _grammar("json_schema", json.dumps(PERSON))
    assert grammar.minimum is not None
    budget = grammar.minimum + 6
    parent = grammar.state(budget, complete_within_budget=True)
    start = vocabulary().encode('{"name":"Al')
    assert parent.advance(start)
    texts = set()
    for seed in range(4):
        child = parent.fork()
        text = _generate(child, budget - len(start), np.random.default_rng(seed))
        assert child.is_complete
        texts.add(text)
    assert len(texts) > 1
    assert not parent.is_complete


def test_thinking_leaves_room_for_the_answer() -> None:
    grammar = _grammar("json_schema", json.dumps(PERSON))
    assert grammar.minimum is not None
    end = vocabulary().encode("\n")[0]
    budget = grammar.minimum + 5
    state = grammar.state(budget, complete_within_budget=True, thinking_end=end)
    row = np.zeros(vocabulary().words, np.int32)
    thought = vocabulary().encode("hm")[0]
    spent = 0
    while not state.begun:
        assert state.fill(row, budget - spent) == ()
        ids = allowed(row, vocabulary())
        token = end if len(ids) == 1 else thought
        assert token in ids
        assert state.advance([token])
        spent += 1
    text = _generate(state, budget - spent, np.random.default_rng(3))
    assert Draft202012Validator(PERSON).is_valid(json.loads(text))


def test_a_guard_that_finds_no_end_gives_up_and_says_so() -> None:
    matcher = build("json_schema", '{"type":"string","pattern":"中"}')
    guard = BudgetGuard(Ending(tuple(vocabulary().encode('"')), 8), token_order())
    ids = vocabulary().encode('"a long text')
    assert matcher.advance(ids)
    guard.follow(ids)
    row = np.zeros(vocabulary().words, np.int32)
    assert matcher.fill_mask(row)
    before = row.copy()
    guard.restrict(matcher, 2, row)
    assert guard.lost
    assert (row == before).all()


def test_a_required_property_obliges_to_nothing_new() -> None:
    def step(required: list[str]) -> int:
        properties = {"a_rather_long_name_of_a_property": {"type": "string", "minLength": 50}}
        schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        return largest_step(schema, 64)

    assert step(["a_rather_long_name_of_a_property"]) < 20
    assert step([]) > 2 * 80


def test_the_larger_of_two_types_is_a_choice() -> None:
    assert largest_step({"type": ["null", "string"], "minLength": 60}, 64) > 120
    assert largest_step({"type": ["integer", "array"], "minItems": 30, "items": {"type": "string"}}, 64) > 60
    assert largest_step({"type": "string", "minLength": 60}, 64) < 60


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.9, 1.0])
def test_the_first_allowed_tokens_are_the_lowest(share: float) -> None:
    rng = np.random.default_rng(1)
    words = vocabulary().words
    row = np.packbits(rng.random(words * 32) < share, bitorder="little").view(np.int32)
    every = allowed(row, vocabulary()).tolist()
    for most in (0, 1, 10, 300):
        assert first_allowed(row, vocabulary(), most).tolist() == every[:most]
