"""Reports 5 to 10 and 25: streams, stop strings, characters, usage, choices, seeds. See docs/reports.md."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.tokenizer.test_disconnects import RawClient
from tests.whole_house import WholeHouse, open_house

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]
CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
PATHS = (CHAT, TEXT, NATIVE)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def house() -> AsyncIterator[WholeHouse]:
    with tempfile.TemporaryDirectory(prefix="rf") as folder:
        async with open_house(Path(folder), constraints=True, max_slots=16) as house:
            yield house


def body_for(path: str, prompt: str, **fields: Any) -> dict[str, Any]:
    """The same wishes in the words of each endpoint."""
    if path == CHAT:
        return {"messages": [{"role": "user", "content": prompt}], **fields}
    if path == TEXT:
        return {"prompt": prompt, **fields}
    names = {"max_tokens": "max_new_tokens"}
    return {"text": prompt, "sampling_params": {names.get(name, name): value for name, value in fields.items()}}


def deltas(path: str, events: list[dict[str, Any]]) -> list[str]:
    if path == NATIVE:
        texts = ["", *(event["text"] for event in events)]
        assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
        return [after[len(before) :] for before, after in itertools.pairwise(texts)]
    choices = [event["choices"][0] for event in events if event["choices"]]
    return [c["delta"].get("content") or "" if path == CHAT else c["text"] for c in choices]


def reasons(path: str, events: list[dict[str, Any]]) -> list[str]:
    if path == NATIVE:
        ends = [event["meta_info"]["finish_reason"] for event in events]
        return [end["type"] for end in ends if end]
    choices = [choice for event in events for choice in event["choices"]]
    return [choice["finish_reason"] for choice in choices if choice["finish_reason"]]


@pytest.mark.parametrize("how", ["close", "reset", "half"])
async def test_5_many_clients_go_away_in_mid_stream(house: WholeHouse, how: str) -> None:
    """More than there are seats; the next one is served at once."""
    aborted = house.core.metrics.counters["requests_aborted"]
    async with house.trial():
        clients = [RawClient(house.url) for _ in range(21)]
        for number, client in enumerate(clients):
            body = {"prompt": f"hello world {number}", "max_tokens": 3000, "ignore_eos": True, "stream": True}
            await client.send(TEXT, body)
        await asyncio.gather(*(client.read_until(b"data: ", 2) for client in clients[:8]))
        for client in clients:
            client.leave(how)
        prompt = "served at once"
        answer = await house.complete(prompt, 5)
        assert answer["choices"][0]["text"] == house.model.text(prompt, 5)
        for client in clients:
            client.socket.close()
    assert house.core.metrics.counters["requests_aborted"] >= aborted + 21


@pytest.mark.parametrize("path", PATHS)
async def test_6_a_stop_string_over_several_chunks(house: WholeHouse, path: str) -> None:
    whole = "alpha beta gamma delta 世界"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"stop": ["beta gamma"]}, "alpha "),
        ({"stop": ["beta gamma delta", "beta"]}, "alpha "),
        ({"stop": "alpha"}, ""),
        ({"stop": ["界"]}, "alpha beta gamma delta 世"),
        ({"stop": ["ta g"], "no_stop_trim": True}, "alpha beta g"),
        ({"stop": ["gamma epsilon"]}, whole),
        ({"stop_regex": "b[a-z]+ g"}, "alpha "),
        ({"stop_regex": ["[0-9]", r"d\w+a"], "stop": ["zzz"]}, "alpha beta gamma "),
    ]
    async with house.trial():
        for fields, expected in cases:
            body = body_for(path, "say it", regex=whole, max_tokens=60, **fields)
            events = await house.events(path, body)
            assert "".join(deltas(path, events)) == expected, fields
            assert reasons(path, events) == ["stop"], fields


TAGS = {"structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}], "triggers": ["<f>"]}


async def test_a_free_text_that_is_cut_says_so(house: WholeHouse) -> None:
    """Beside calls that may come, too: where the budget ends is no end of the text."""
    free = {"structural_tag": {"type": "structural_tag", **TAGS}, "complete_within_budget": False}
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    async with house.trial():
        body = body_for(NATIVE, "say much", max_tokens=12, temperature=0, ignore_eos=True, **free)
        answer = (await house.post(NATIVE, body)).json()
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 12}
        body = body_for(CHAT, "say much", max_tokens=12, temperature=0, ignore_eos=True, tools=[tool])
        answer = (await house.post(CHAT, body)).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 12
        body = body_for(NATIVE, "say it", max_tokens=4, regex="[ab]{4}", complete_within_budget=False)
        answer = (await house.post(NATIVE, body)).json()
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"  # nothing could follow


@pytest.mark.parametrize("path", PATHS)
async def test_7_no_replacement_characters(house: WholeHouse, path: str) -> None:
    unit = "\U0001fae0\u9f9c\u00e9"
    async with house.trial():

        async def one(number: int) -> None:
            fields = {"max_tokens": 200} if number % 2 else {"max_tokens": 9 + number, "complete_within_budget": False}
            body = body_for(path, f"faces {number}", regex=f"({unit}){{8}}", jump_forward=number % 3 == 0, **fields)
            parts = deltas(path, await house.events(path, body))
            assert not any("\ufffd" in part for part in parts)
            if number % 2:
                assert "".join(parts) == unit * 8
            else:
                assert (unit * 8).startswith("".join(parts))

        await asyncio.gather(*(one(number) for number in range(16)))


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_8_usage_of_streams(house: WholeHouse, path: str) -> None:
    async with house.trial():
        for n in (1, 3):
            for fields in ({"max_tokens": 5, "ignore_eos": True}, {"max_tokens": 60, "regex": "yes, it is"}):
                body = body_for(path, f"usage {n}", n=n, temperature=0, **fields)
                whole = (await house.post(path, body)).json()["usage"]
                again = (await house.post(path, body)).json()["usage"]
                cached, prompt_tokens = again["prompt_tokens_details"]["cached_tokens"], again["prompt_tokens"]
                # Where a constraint forces the first tokens, the last prompt token need not be computed for its logits.
                assert cached == prompt_tokens - ("regex" not in fields), (n, fields)
                events = await house.events(path, {**body, "stream_options": {"include_usage": True}})
                assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
                assert (events[-1]["choices"], events[-1]["usage"]) == ([], again)
                assert whole["completion_tokens"] == again["completion_tokens"]
                for options in ({"include_usage": False}, None):
                    events = await house.events(path, {**body, "stream_options": options})
                    assert all(event["choices"] and "usage" not in event for event in events)
        refused = await house.post(path, {**body, "stream_options": {"include_usage": True}})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream_options")


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_9_streams_of_several_choices(house: WholeHouse, path: str) -> None:
    async with house.trial():
        body = body_for(path, "three choices", n=3, temperature=1, max_tokens=120, seed=5)
        whole = (await house.post(path, body)).json()
        events = await house.events(path, {**body, "stream_options": {"include_usage": True}})
        assert len({(event["id"], event["created"]) for event in events}) == 1
        choices = [choice for event in events for choice in event["choices"]]
        assert {choice["index"] for choice in choices} == {0, 1, 2}
        for index in range(3):
            mine = [choice for choice in choices if choice["index"] == index]
            assert [choice["finish_reason"] for choice in mine[:-1]] == [None] * (len(mine) - 1)
            assert mine[-1]["finish_reason"] == whole["choices"][index]["finish_reason"]
            text = "".join((c["delta"].get("content") or "") if path == CHAT else c["text"] for c in mine)
            expected = whole["choices"][index]
            assert text == (expected["message"]["content"] if path == CHAT else expected["text"])
            assert "<|im_end|>" not in text
            assert "<|endoftext|>" not in text
            if path == CHAT:
                assert [choice["delta"].get("role") for choice in mine].count("assistant") == 1
        assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
        assert len({str(choice.get("message") or choice["text"]) for choice in whole["choices"]}) == 3


@pytest.mark.parametrize("path", PATHS)
async def test_10_the_basic_contract(house: WholeHouse, path: str) -> None:
    async with house.trial():
        for stream in ({}, {"stream": False}, {"stream": None}):
            for fields, reason in (({"max_tokens": 5, "ignore_eos": True}, "length"), ({"max_tokens": 900}, "stop")):
                answer = await house.post(path, {**body_for(path, "plain", temperature=0, **fields), **stream})
                assert answer.headers["content-type"] == "application/json"
                value = answer.json()
                if path == NATIVE:
                    meta = value["meta_info"]
                    ended, counted = meta["finish_reason"]["type"], meta["completion_tokens"]
                else:
                    assert value["object"] == {CHAT: "chat.completion", TEXT: "text_completion"}[path]
                    assert value["model"] == "tiny"
                    assert value["id"].startswith({CHAT: "chatcmpl-", TEXT: "cmpl-"}[path])
                    ended, counted = value["choices"][0]["finish_reason"], value["usage"]["completion_tokens"]
                assert ended == reason
                assert counted == 5 if reason == "length" else counted > 0


@pytest.mark.parametrize("path", PATHS)
async def test_25_seeds(house: WholeHouse, path: str) -> None:
    async def ask(**fields: Any) -> list[str]:
        body = body_for(path, "dice", temperature=1, max_tokens=12, ignore_eos=True, **fields)
        value = (await house.post(path, body)).json()
        if path == NATIVE:
            return [item["text"] for item in (value if isinstance(value, list) else [value])]
        return [choice["message"]["content"] if path == CHAT else choice["text"] for choice in value["choices"]]

    async with house.trial():
        beside = [asyncio.create_task(ask()) for _ in range(11)]
        first, second, other, none, again = await asyncio.gather(ask(seed=7), ask(seed=7), ask(seed=8), ask(), ask())
        await asyncio.gather(*beside)
        assert first == second
        assert len({*first, *other, *none, *again}) == 4
        pair = await ask(seed=7, n=2)
        assert pair[0] == first[0] != pair[1]
