"""Every way to name a constraint, and what the scheduler gets for it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest

from shared.messages.request import Constraint, RequestRejected
from tests.tokenizer.fake_backend import FakeBackend

CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
TAGS = {"type": "structural_tag", "format": {"type": "any_text"}}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, **fields}


def generate(**params: Any) -> dict[str, Any]:
    return {"text": "hello", "sampling_params": {"max_new_tokens": 2, **params}}


# Steered to an end by default; only JSON is refused where no end fits.
EASY: dict[str, Any] = {"complete_within_budget": True, "refuse_small_budget": False}

NATIVE = [
    ({"regex": "a+"}, Constraint("regex", "a+", **EASY)),
    ({"json_schema": "$$ANY$$"}, Constraint("json_schema", "$$ANY$$", complete_within_budget=True)),
    ({"json_schema": json.dumps(SCHEMA)}, Constraint("json_schema", json.dumps(SCHEMA), complete_within_budget=True)),
    ({"json_schema": True}, Constraint("json_schema", "true", complete_within_budget=True)),
    ({"ebnf": 'root ::= "a"'}, Constraint("ebnf", 'root ::= "a"', **EASY)),
    ({"lark": 'start: "a"'}, Constraint("lark", 'start: "a"', **EASY)),
    ({"choice": ["a", "ü"]}, Constraint("choice", '["a","ü"]', **EASY)),
    ({"xml_schema": {"b": None}}, Constraint("xml_schema", '{"b":null}', **EASY)),
    ({"xml_schema": '{"b":{"a":"[0-9]"}}'}, Constraint("xml_schema", '{"b":{"a":"[0-9]"}}', **EASY)),
    ({"regex": "a", "complete_within_budget": True}, Constraint("regex", "a", complete_within_budget=True)),
    ({"json_schema": "{}", "complete_within_budget": False}, Constraint("json_schema", "{}")),
    ({"regex": "a", "complete_within_budget": False}, Constraint("regex", "a", refuse_small_budget=False)),
    ({"regex": "a", "jump_forward": False, "ebnf": None}, Constraint("regex", "a", jump_forward=False, **EASY)),
    ({}, None),
]


@pytest.mark.parametrize(("params", "constraint"), NATIVE)
async def test_native_fields(
    client: httpx.AsyncClient, backend: FakeBackend, params: dict[str, Any], constraint: Constraint | None
) -> None:
    answer = await client.post("/generate", json=generate(**params))
    assert answer.status_code == 200, answer.text
    assert "x-radixfleet-ignored" not in answer.headers
    if constraint is not None:  # errors of the compiler name the field as the client wrote it
        constraint = msgspec.structs.replace(constraint, field=f"sampling_params.{constraint.kind}")
    assert backend.requests[-1].constraint == constraint


OPENAI = [
    ({"response_format": {"type": "text"}}, "", None),
    ({"response_format": {"type": "json_object"}}, "json_schema", {"type": "object"}),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        "json_schema",
        SCHEMA,
    ),
    ({"response_format": TAGS}, "structural_tag", TAGS),
    ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
    ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"]),
    ({"structured_outputs": {"json_object": True}}, "json_schema", {"type": "object"}),
    ({"json_schema": SCHEMA, "any_whitespace": True}, "json_schema", SCHEMA),
    ({"structural_tag": TAGS}, "structural_tag", TAGS),
    ({"xml_schema": {"a": {"b": "[0-9]"}}}, "xml_schema", {"a": {"b": "[0-9]"}}),
    ({"structured_outputs": {"xml_schema": {"a": None}}}, "xml_schema", {"a": None}),
    ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
    ({"guided_json": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
    ({"guided_choice": ["a", "b"]}, "choice", ["a", "b"]),
]


@pytest.mark.parametrize(("fields", "kind", "source"), OPENAI)
async def test_openai_fields(
    client: httpx.AsyncClient, backend: FakeBackend, fields: dict[str, Any], kind: str, source: Any
) -> None:
    answer = await client.post(CHAT, json=chat(**fields))
    assert answer.status_code == 200, answer.text
    constraint = backend.requests[-1].constraint
    if not kind:
        assert constraint is None
        return
    assert constraint is not None
    assert constraint.kind == kind
    read = json.loads(constraint.source)
    assert read == source
    assert constraint.any_whitespace == fields.get("any_whitespace", False)
    if kind == "json_schema" and "properties" in source:
        assert list(read["properties"]) == ["b", "a"]  # members come in the order of the schema


@pytest.mark.parametrize(
    ("fields", "kind", "name"),
    [
        ({"regex": "[0-9]+"}, "regex", ""),
        ({"guided_regex": "[0-9]+"}, "regex", "guided_regex"),
        ({"guided_grammar": "[0-9]+"}, "ebnf", "guided_grammar"),
        ({"structured_outputs": {"grammar": "[0-9]+"}}, "ebnf", "structured_outputs.grammar"),
        ({"structured_outputs": {"lark": "[0-9]+"}}, "lark", "structured_outputs.lark"),
    ],
)
async def test_sources_that_are_no_json(
    client: httpx.AsyncClient, backend: FakeBackend, fields: dict[str, Any], kind: str, name: str
) -> None:
    for path, body in ((CHAT, chat(**fields)), ("/v1/completions", {"prompt": "x", "max_tokens": 2, **fields})):
        answer = await client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert "x-radixfleet-ignored" not in answer.headers
        constraint = backend.requests[-1].constraint
        assert constraint is not None
        assert (constraint.kind, constraint.source, constraint.field) == (kind, "[0-9]+", name)


async def test_each_item_of_a_batch_has_its_own(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    params = [{"max_new_tokens": 1, "regex": "a"}, {"max_new_tokens": 1}]
    answer = await client.post("/generate", json={"text": ["x", "y"], "sampling_params": params})
    assert answer.status_code == 200
    kinds = [request.constraint and request.constraint.kind for request in backend.requests[-2:]]
    assert sorted(map(str, kinds)) == ["None", "regex"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refused_source_is_a_400_with_its_place(
    client: httpx.AsyncClient, backend: FakeBackend, stream: bool
) -> None:
    told = "sampling_params.regex: column 2: unclosed group"
    backend.reject = RequestRejected("", "bad_constraint", told)
    answer = await client.post("/generate", json={**generate(regex="a("), "stream": stream})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == told
    assert answer.json()["error"]["param"] == "sampling_params.regex"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *(({kind: ""}, kind) for kind in ("regex", "json_schema", "ebnf", "lark", "structural_tag", "guided_json")),
        ({"regex": "a", "ebnf": ""}, "ebnf"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ],
)
async def test_an_empty_source_is_no_freedom(client: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    answer = await client.post(CHAT, json=chat(**fields))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_constraint"), answer.text
    assert answer.json()["error"]["param"] == param
