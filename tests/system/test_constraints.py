"""Constraints on the real small model: every answer conforms, wrong sources are 400, neighbours are not disturbed."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

import httpx
import pytest

from radixfleet.local_server import LocalServer
from tests.system.servers import serving

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"type": "string", "maxLength": 30},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
CHINESE = "(北京|上海|广州)的天气(很好|不好)。🙂"


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with serving("--dtype", "float32") as server:
        yield server


def body(text: str = "Describe a person as JSON: ", **params: Any) -> dict[str, Any]:
    return {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": 80, **params}}


def generate(server: LocalServer, **params: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/generate", json=body(**params), timeout=300)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def check_person(text: str) -> None:
    person = json.loads(text)
    assert list(person) == ["name", "age", "city"]
    assert 0 <= person["age"] <= 120
    assert len(person["name"]) <= 30


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_each_kind_conforms(server: LocalServer, temperature: float) -> None:
    date = generate(server, regex=r"\d{4}-\d{2}-\d{2}", temperature=temperature)
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", date["text"])
    assert date["meta_info"]["finish_reason"]["type"] == "stop"
    check_person(generate(server, json_schema=json.dumps(PERSON), temperature=temperature)["text"])
    assert generate(server, choice=["red", "green"], temperature=temperature)["text"] in ("red", "green")
    assert re.fullmatch(CHINESE, generate(server, regex=CHINESE, temperature=temperature)["text"])
    assert generate(server, ebnf='root ::= "yes" | "no"', temperature=temperature)["text"] in ("yes", "no")
    assert isinstance(json.loads(generate(server, json_schema="$$ANY$$", temperature=temperature)["text"]), list | dict)
    lark = generate(server, lark='start: "n=" NUMBER\nNUMBER: /[0-9]{1,4}/', temperature=temperature)
    assert re.fullmatch("n=[0-9]{1,4}", lark["text"])
    card = {"person": {"name": "[A-Z][a-z]{1,9}", "age": r"\d{1,3}", "phones": [{"phone": "[0-9-]{3,8}"}]}}
    root = ElementTree.fromstring(generate(server, xml_schema=card, temperature=temperature)["text"])
    assert [child.tag for child in root] == ["name", "age", "phones"]
    assert 0 <= int(root[1].text or "") <= 999


def test_forced_tokens_change_the_cost_and_not_the_answer(server: LocalServer) -> None:
    answers = [generate(server, json_schema=PERSON, jump_forward=jump) for jump in (False, True)]
    assert answers[0]["text"] == answers[1]["text"]
    counts = [answer["meta_info"]["completion_tokens"] for answer in answers]
    assert counts == [len(answer["output_ids"]) for answer in answers]


def test_scores_match_the_tokens(server: LocalServer) -> None:
    request = {**body(json_schema=PERSON), "return_logprob": True}
    answer = httpx.post(f"{server.url}/generate", json=request, timeout=300).json()
    scores = answer["meta_info"]["output_token_logprobs"]
    assert [score[1] for score in scores] == answer["output_ids"]
    assert all(score[0] is not None for score in scores)


def test_a_document_is_closed_inside_its_budget(server: LocalServer) -> None:
    for budget in (16, 20, 25):
        answer = generate(server, json_schema=PERSON, max_new_tokens=budget)
        check_person(answer["text"])
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"
    cut = generate(server, json_schema=PERSON, max_new_tokens=8, complete_within_budget=False)
    assert cut["meta_info"]["finish_reason"] == {"type": "length", "length": 8}


def test_chat_stream(server: LocalServer) -> None:
    request = {
        "messages": [{"role": "user", "content": "A person, please."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
        "max_tokens": 80,
        "stream": True,
    }
    text, reasons = "", []
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=request, timeout=300) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                [choice] = json.loads(line[6:])["choices"]
                text += choice["delta"].get("content") or ""
                reasons.append(choice["finish_reason"])
    check_person(text)
    assert [reason for reason in reasons if reason] == ["stop"]


def test_names_of_older_clients_and_errors_in_their_words(server: LocalServer) -> None:
    chat = {"messages": [{"role": "user", "content": "A colour, please."}], "max_tokens": 40, "temperature": 0}

    def ask(**fields: Any) -> httpx.Response:
        return httpx.post(f"{server.url}/v1/chat/completions", json={**chat, **fields}, timeout=300)

    def said(**fields: Any) -> str:
        return str(ask(**fields).json()["choices"][0]["message"]["content"])

    assert said(guided_choice=["red", "green"]) in ("red", "green")
    assert re.fullmatch("[0-9]{3}", said(guided_regex="[0-9]{3}"))
    assert said(guided_grammar='root ::= "yes" | "no"') in ("yes", "no")
    check_person(said(guided_json=PERSON))
    for fields, start in (
        ({"guided_regex": "a(b"}, "guided_regex: column 2: unclosed group"),
        ({"structured_outputs": {"regex": "a(b"}}, "structured_outputs.regex: column 2: unclosed group"),
        ({"xml_schema": {"a": {"b": "("}}}, "xml_schema: #/a/b (column 1): unclosed group"),
    ):
        answer = ask(**fields)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(start), answer.text
        assert answer.json()["error"]["param"] == start.split(":")[0]


def test_choices_differ_and_conform(server: LocalServer) -> None:
    request = body(json_schema=PERSON, temperature=1.2, n=3)
    answers = httpx.post(f"{server.url}/generate", json=request, timeout=300).json()
    assert len(answers) == 3
    for answer in answers:
        check_person(answer["text"])


BAD = [
    ({"regex": "a(b"}, "unclosed group"),
    ({"json_schema": '{"type": "wibble"}'}, "wibble"),
    ({"json_schema": "{"}, "JSON"),
    ({"ebnf": "root = x"}, ""),
    ({"lark": "start: missing"}, "missing"),
    ({"choice": []}, "empty"),
    ({"json_schema": json.dumps(PERSON), "max_new_tokens": 3}, "at least"),
]


def test_together_and_beside_plain_streams_and_bad_sources(server: LocalServer) -> None:
    plain = body("Once upon a time", max_new_tokens=60, ignore_eos=True)

    async def run() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
            alone = (await client.post("/generate", json=plain)).json()["output_ids"]
            neighbour = asyncio.create_task(client.post("/generate", json=plain))
            people = [
                asyncio.create_task(client.post("/generate", json=body(f"Person {i}: ", json_schema=PERSON)))
                for i in range(8)
            ]
            for params, reason in BAD:
                answer = await client.post("/generate", json=body(**params))
                assert answer.status_code == 400, answer.text
                assert reason in answer.json()["error"]["message"], answer.text
                assert next(iter(params)) in answer.json()["error"]["message"]
            for person in people:
                check_person((await person).json()["text"])
            assert (await neighbour).json()["output_ids"] == alone

    asyncio.run(run())


def test_what_cannot_be_enforced_is_refused_or_checked(server: LocalServer) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 3, "maxItems": 3}
    refused = httpx.post(f"{server.url}/generate", json=body(json_schema=schema), timeout=300)
    assert refused.status_code == 400
    assert "uniqueItems" in refused.json()["error"]["message"]
    answer = generate(server, json_schema=schema, best_effort=True)
    assert len(json.loads(answer["text"])) == 3  # of two values: they cannot be unique
    assert answer["meta_info"]["constraint_check"]["verdict"] == "violates"
    schema = {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "maxItems": 1}
    answer = generate(server, json_schema=schema, best_effort=True)
    assert answer["meta_info"]["constraint_check"] == {"verdict": "conforms", "reason": None}
    plain = generate(server, json_schema=PERSON)
    assert "constraint_check" not in plain["meta_info"]


def test_an_abandoned_stream_leaves_the_server_well(server: LocalServer) -> None:
    request = {**body(regex="[a-z ]{400}", max_new_tokens=300), "stream": True}
    with httpx.stream("POST", f"{server.url}/generate", json=request, timeout=300) as answer:
        next(answer.iter_lines())
    check_person(generate(server, json_schema=PERSON)["text"])
    metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
    broken = re.search(r"^radixfleet_scheduler_internal_errors_total\{\S* (\S+)", metrics, re.M)
    assert broken is not None
    assert float(broken[1]) == 0
