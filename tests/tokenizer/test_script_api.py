"""/script over the wire: every step goes on from the ids before it; bounds, errors and ends in the middle."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import httpx
import msgspec
import pytest
from tokenizers import Tokenizer

from services.tokenizer.service import TokenizerService
from shared import ints
from shared.messages.request import GenerateRequest, RequestRejected
from shared.messages.stream import Finish, FinishReason, Scores
from tests.tokenizer.conftest import Launcher
from tests.tokenizer.fake_backend import FakeBackend, Script, scores_of
from tests.tokenizer.sse_reader import events
from tests.tokenizer.test_disconnects import RawClient, held_script, until_clean

GREEDY = {"max_new_tokens": 4, "temperature": 0}


def gen(name: str, **params: Any) -> dict[str, Any]:
    return {"gen": {"name": name, "sampling_params": {**GREEDY, **params}}}


def script(*steps: dict[str, Any], text: str = "hello world", **fields: Any) -> dict[str, Any]:
    return {"prompt_parts": [{"text": text}], "steps": list(steps), **fields}


CHAIN = script(gen("a"), {"text": " and then"}, gen("b"))


def prompt_of(request: GenerateRequest) -> list[int]:
    return ints.unpack(request.prompt_ids).tolist()


async def test_steps_go_on_from_generated_ids(
    client: httpx.AsyncClient, backend: FakeBackend, tokenizer: Tokenizer
) -> None:
    backend.cached_tokens = 2
    answer = (await client.post("/script", json={**CHAIN, "rid": "mine"})).json()
    first, second = answer["parts"]
    assert [(part["part"], part["name"]) for part in answer["parts"]] == [(0, "a"), (1, "b")]
    one, two = backend.requests
    assert prompt_of(one) == tokenizer.encode("hello world").ids
    assert prompt_of(two) == [*prompt_of(one), *first["output_ids"], *tokenizer.encode(" and then").ids]
    assert len(second["output_ids"]) == 4
    assert second["meta_info"]["prompt_tokens"] == len(prompt_of(two))
    meta = answer["meta_info"]
    assert (meta["id"], meta["parts"], meta["completion_tokens"], meta["cached_tokens"]) == ("mine", 2, 8, 4)
    assert one.request_id != two.request_id
    assert one.names[-1] == two.names[-1] == "mine"


async def test_a_step_keeps_its_pages_and_its_place(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    body = script(gen("a"), gen("b"), gen("c"), priority=3)
    assert (await client.post("/script", json=body)).status_code == 200
    requests = backend.requests
    assert [request.priority for request in requests] == [3, 4, 4]
    assert len({request.group_id for request in requests}) == len({request.pin for request in requests}) == 1
    assert requests[0].group_id
    assert requests[0].pin
    assert [request.pin_s > 0 for request in requests] == [True, True, False]


async def test_a_token_that_ended_a_step_is_not_continued(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.script = lambda request: Script([270, 271, 2], Finish(FinishReason.STOP, matched_token=2))
    answer = (await client.post("/script", json=CHAIN)).json()
    one, two = backend.requests
    assert answer["parts"][0]["output_ids"] == [270, 271, 2]
    assert prompt_of(two)[len(prompt_of(one)) :][:2] == [270, 271]
    assert 2 not in prompt_of(two)


async def test_a_stop_string_inside_a_token_leaves_text(
    client: httpx.AsyncClient, backend: FakeBackend, tokenizer: Tokenizer
) -> None:
    hello, world = tokenizer.encode(" hello world").ids
    stop = Finish(FinishReason.STOP, matched_string="rld")
    backend.script = lambda request: Script([hello, world], stop, texts=[" hello", " wo"])
    await client.post("/script", json=script(gen("a", stop="rld"), {"text": "rk"}, gen("b")))
    one, two = backend.requests
    assert prompt_of(two) == [*prompt_of(one), hello, *tokenizer.encode(" work").ids]


async def test_texts_and_ids_in_parts(client: httpx.AsyncClient, backend: FakeBackend, tokenizer: Tokenizer) -> None:
    """Neighbouring texts are one text; letters of a control token stay letters where they are said to be."""
    parts = [{"text": "hel"}, {"text": "lo"}, {"ids": [7, 8]}, {"text": "<|im_end|>"}]
    steps = [{"text": " x <|im_end|>", "literal": True}, gen("a"), {"again": 0}, gen("b")]
    answer = (await client.post("/script", json={"prompt_parts": parts, "steps": steps})).json()
    one, two = backend.requests
    literal = Tokenizer.from_str(tokenizer.to_str())
    literal.encode_special_tokens = True
    assert prompt_of(one) == [*tokenizer.encode("hello").ids, 7, 8, 2, *literal.encode(" x <|im_end|>").ids]
    again = tokenizer.encode(answer["parts"][0]["text"]).ids
    assert prompt_of(two) == [*prompt_of(one), *answer["parts"][0]["output_ids"], *again]
    one_shot = {"prompt_parts": parts, "sampling_params": GREEDY, "return_prompt_token_ids": True}
    answer = (await client.post("/generate", json=one_shot)).json()
    assert answer["prompt_token_ids"] == [*tokenizer.encode("hello").ids, 7, 8, 2]


async def test_a_stream_of_named_parts(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    whole = (await client.post("/script", json=CHAIN)).json()
    for deltas in (True, False):
        response = await client.post("/script", json={**CHAIN, "stream": True, "deltas": deltas})
        assert response.headers["content-type"].startswith("text/event-stream")
        *news, last = events(response.text)
        parts = [event for event in news if "text" in event]
        assert [part["text"] for part in parts] == [part["text"] for part in whole["parts"]]
        assert last["meta_info"]["parts"] == 2
        for number, name in enumerate(("a", "b")):
            said = [event["delta"] for event in news if event["name"] == name and "delta" in event]
            assert "".join(said) == (parts[number]["text"] if deltas else "")


def scored(backend: FakeBackend, best: str, tokenizer: Tokenizer) -> None:
    """Options get worse log-probabilities than `best`."""

    def answer(request: GenerateRequest) -> Script:
        if request.sampling.prompt_logprobs_from < 0:
            return backend.default_script(request)
        ids = prompt_of(request)[request.sampling.prompt_logprobs_from :]
        value = -0.5 if tokenizer.decode(ids).endswith(best) else -2.0
        made = Script([])
        made.prompt_scores = scores_of([(value, []) for _ in ids])
        return made

    backend.script = answer


@pytest.mark.parametrize("method", ["token_length_normalized", "greedy_token_selection", None])
async def test_a_select_in_the_middle(
    client: httpx.AsyncClient, backend: FakeBackend, tokenizer: Tokenizer, method: str | None
) -> None:
    scored(backend, "world", tokenizer)
    select = {"select": {"name": "x", "choices": [" good morning", " world"], "method": method}}
    answer = (await client.post("/script", json=script(gen("a"), select, {"text": " and"}, gen("b")))).json()
    first, chosen, last = answer["parts"]
    assert chosen["text"] == " world"
    assert len(chosen["meta_info"]["normalized_prompt_logprobs"]) == 2
    assert [row[0] for row in chosen["meta_info"]["input_token_logprobs"][1]] == [-0.5]
    assert ("greedy_logprob_matrix" in chosen["meta_info"]) is (method == "greedy_token_selection")
    one, *options, end = backend.requests
    assert len(options) == 2
    known = [*prompt_of(one), *first["output_ids"]]
    assert prompt_of(end) == [*known, *tokenizer.encode(" world").ids, *tokenizer.encode(" and").ids]
    assert last["name"] == "b"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"steps": []}, "steps"),
        ({"steps": [{"text": "only"}]}, "steps"),
        ({"steps": [gen("a")] * 65}, "generations and selects in steps"),
        ({"steps": [{"text": "x"}] * 300}, "steps"),
        ({"steps": [{}]}, "steps[0]"),
        ({"steps": [{"text": "a", **gen("b")}]}, "steps[0]"),
        ({"steps": [gen("a"), {"again": 1}, gen("b")]}, "steps[1].again"),
        ({"steps": [{"again": 0}, gen("a")]}, "steps[0].again"),
        ({"steps": [gen("a", n=2)]}, "steps[0].gen.sampling_params.n"),
        ({"steps": [gen("a"), gen("b", temperature=-1)]}, "steps[1].gen.sampling_params.temperature"),
        ({"steps": [{"select": {"choices": []}}]}, "steps[0].select.choices"),
        ({"steps": [{"select": {"choices": ["a", "a"]}}]}, "steps[0].select.choices"),
        ({"steps": [{"select": {"choices": ["a"], "method": "guess"}}]}, "steps"),
        ({"prompt_parts": [{"text": "a", "ids": [1]}]}, "prompt_parts[0]"),
        ({"prompt_parts": [{"ids": [9999]}]}, "prompt_parts[0].ids"),
        ({"prompt_parts": [{"text": "hello " * 400}]}, "prompt_parts"),
        ({"rid": ""}, "rid"),
        ({"session_params": {"id": "x"}}, "session_params"),
    ],
)
async def test_what_is_no_script_is_refused_before_anything_runs(
    client: httpx.AsyncClient, backend: FakeBackend, change: dict[str, Any], param: str
) -> None:
    response = await client.post("/script", json={**CHAIN, **change})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert backend.requests == []


async def test_a_step_that_does_not_fit_any_more(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    """The first step filled the context."""
    body = script(gen("a"), {"text": " good morning" * 150}, gen("b"))
    response = await client.post("/script", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    *news, failure = events((await client.post("/script", json={**body, "stream": True})).text)
    assert news[-1]["name"] == "a"
    assert failure["error"]["code"] == "context_length_exceeded"


async def test_a_step_that_fails_or_is_refused(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    def failing(request: GenerateRequest) -> Script:
        if len(backend.requests) == 1:
            return backend.default_script(request)
        return Script([270], Finish(FinishReason.ERROR, message="the worker was lost", status=503))

    backend.script = failing
    response = await client.post("/script", json=CHAIN)
    assert (response.status_code, response.json()["error"]["message"]) == (503, "the worker was lost")
    backend.requests.clear()
    *news, failure = events((await client.post("/script", json={**CHAIN, "stream": True})).text)
    assert failure["error"]["message"] == "the worker was lost"
    assert any(event.get("text") for event in news)
    backend.reject = RequestRejected("", "queue_full", "full", 2.0)
    response = await client.post("/script", json={**CHAIN, "stream": True})
    assert (response.status_code, response.headers["retry-after"]) == (429, "2")


async def test_an_abort_ends_the_script_with_what_it_has(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    def held(request: GenerateRequest) -> Script:
        made = backend.default_script(request)
        if len(backend.requests) == 2:
            made.pause_after = 2
        return made

    backend.script = held
    body = script(gen("a"), gen("b"), gen("c"), rid="mine")
    task = asyncio.create_task(client.post("/script", json=body))
    await backend.until(lambda: len(backend.requests) == 2 and backend._sent.get(backend.requests[1].request_id) == 2)
    await client.post("/abort_request", json={"rid": "mine"})
    backend._abort(backend.requests[1].request_id)
    answer = (await task).json()
    assert [part["name"] for part in answer["parts"]] == ["a", "b"]
    assert answer["parts"][1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(backend.requests) == 2


async def test_an_abort_between_two_steps(
    service: TokenizerService, client: httpx.AsyncClient, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step has ended, the second is not sent yet."""
    text = service.context.text
    decode = text.decode

    async def slow(ids: Any, skip_special_tokens: bool = True) -> str:
        await client.post("/abort_request", json={"rid": "mine"})
        return await decode(ids, skip_special_tokens)

    monkeypatch.setattr(text, "decode", slow)
    stop = Finish(FinishReason.STOP, matched_string="!")
    backend.script = lambda request: Script([270, 271], stop)
    answer = (await client.post("/script", json={**CHAIN, "rid": "mine"})).json()
    assert [part["name"] for part in answer["parts"]] == ["a"]
    assert len(backend.requests) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_in_the_second_step(
    service: TokenizerService, backend: FakeBackend, stream: bool
) -> None:
    backend.script = lambda r: backend.default_script(r) if len(backend.requests) == 1 else held_script()
    client = RawClient(service.url)
    await client.send("/script", {**CHAIN, "stream": stream})
    await backend.until(lambda: len(backend.requests) == 2)
    client.leave("close")
    await until_clean(service, backend, 1)


async def test_a_script_is_finished_while_the_server_drains(
    service: TokenizerService, client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    release = asyncio.Event()

    def held(request: GenerateRequest) -> Script:
        made = backend.default_script(request)
        if len(backend.requests) == 1:
            made.gate = release
        return made

    backend.script = held
    task = asyncio.create_task(client.post("/script", json=CHAIN))
    await backend.until(lambda: len(backend.requests) == 1)
    draining = asyncio.create_task(service.drain())
    await asyncio.sleep(0)
    release.set()
    assert len((await task).json()["parts"]) == 2
    await draining


async def test_scripts_can_be_switched_off(launch: Launcher) -> None:
    service = await launch(script=False)
    async with httpx.AsyncClient(base_url=service.url) as client:
        response = await client.post("/script", json=CHAIN)
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "script_disabled"
        assert (await client.get("/get_server_info")).json()["script"] is False


async def test_scores_of_a_step(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    def answer(request: GenerateRequest) -> Script:
        made = backend.default_script(request)
        made.scores = lambda token: Scores(1, array("f", [-0.25]).tobytes())
        return made

    backend.script = answer
    body = msgspec.json.decode(msgspec.json.encode(CHAIN))
    body["steps"][2]["gen"]["return_logprob"] = True
    first, second = (await client.post("/script", json=body)).json()["parts"]
    assert "output_token_logprobs" not in first["meta_info"]
    assert [row[0] for row in second["meta_info"]["output_token_logprobs"]] == [-0.25] * 4


async def test_pins(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    body = {"text": "hello world", "sampling_params": {"max_new_tokens": 0}, "pin": "mine", "pin_seconds": 5}
    assert (await client.post("/generate", json=body)).status_code == 200
    [request] = backend.requests
    assert request.pin_s == 5
    assert (await client.post("/unpin", json={"pin": "mine"})).status_code == 200
    [operation] = [one for one in backend.operations if one.name == "unpin"]
    assert operation.argument == request.pin != "mine"
    for change in ({"pin": None}, {"pin_seconds": 0}, {"pin_seconds": 1e9}, {"text": ["a", "b"]}):
        response = await client.post("/generate", json={**body, **change})
        assert response.status_code == 400
