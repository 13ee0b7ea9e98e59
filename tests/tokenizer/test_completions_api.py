"""/v1/completions over the wire: forms of prompts, echo, log-probabilities, streams, counts."""

from __future__ import annotations

from typing import Any

import httpx
from tokenizers import Tokenizer

from shared import ints
from shared.messages.stream import Finish, FinishReason
from tests.tokenizer.fake_backend import WORDS, FakeBackend, Script, scores_of
from tests.tokenizer.sse_reader import events

PATH = "/v1/completions"


async def test_forms_of_prompts(client: httpx.AsyncClient, backend: FakeBackend, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello").ids
    for prompt, expected in (
        ("hello", [ids]),
        (["hello", "hello"], [ids, ids]),
        (ids, [ids]),
        ([ids, [5]], [ids, [5]]),
    ):
        backend.requests.clear()
        answer = (await client.post(PATH, json={"prompt": prompt})).json()
        assert [list(ints.unpack(request.prompt_ids)) for request in backend.requests] == expected
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
        assert answer["object"] == "text_completion"
        assert answer["id"].startswith("cmpl-")
        assert backend.requests[0].sampling.max_tokens == 16


async def test_model_defaults_of_sampling(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    await client.post(PATH, json={"prompt": "a"})
    await client.post(PATH, json={"prompt": "a", "temperature": 1, "top_k": -1})
    own, given = (request.sampling for request in backend.requests)
    assert (own.temperature, own.top_p, own.top_k) == (0.6, 0.9, 50)
    assert (given.temperature, given.top_p, given.top_k) == (1.0, 0.9, -1)


async def test_counts_of_many_choices(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.cached_tokens = 2
    body = {"prompt": [[5, 6, 7], [8, 9]], "n": 3, "max_tokens": 4}
    answer = (await client.post(PATH, json=body)).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["completion_tokens"] == 24
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    streamed = events(
        (await client.post(PATH, json={**body, "stream": True, "stream_options": {"include_usage": True}})).text
    )
    assert streamed[-1]["usage"] == answer["usage"]
    assert all(chunk["usage"] is None for chunk in streamed[:-1])
    ended = [c["choices"][0]["index"] for c in streamed[:-1] if c["choices"][0]["finish_reason"]]
    assert sorted(ended) == list(range(6))


async def test_streams_without_usage(client: httpx.AsyncClient) -> None:
    for options in (None, {"include_usage": False}):
        body = {"prompt": "hello", "stream": True, "stream_options": options}
        chunks = events((await client.post(PATH, json=body)).text)
        assert all("usage" not in chunk for chunk in chunks)
        assert WORDS.startswith("".join(chunk["choices"][0]["text"] for chunk in chunks))
    body = {"prompt": "hello", "stream": True, "stream_options": {"continuous_usage_stats": True}, "max_tokens": 4}
    chunks = events((await client.post(PATH, json=body)).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 4


async def test_not_streaming_is_plain_json(client: httpx.AsyncClient) -> None:
    for stream in (None, False):
        answer = await client.post(PATH, json={"prompt": "hello", "stream": stream})
        assert answer.headers["content-type"] == "application/json"
        assert answer.json()["choices"][0]["finish_reason"] == "length"


async def test_matched_stop(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.script = lambda request: Script([270, 2], Finish(FinishReason.STOP, matched_token=2))
    answer = (await client.post(PATH, json={"prompt": "hello"})).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["matched_stop"] == 2
    backend.script = lambda request: Script([270, 2], Finish(FinishReason.STOP, matched_string="END"))
    chunks = events((await client.post(PATH, json={"prompt": "hello", "stop": "END", "stream": True})).text)
    assert chunks[-1]["choices"][0]["matched_stop"] == "END"
    assert backend.requests[-1].stop_strings == ("END",)


async def test_echo_and_logprobs(client: httpx.AsyncClient, backend: FakeBackend, tokenizer: Tokenizer) -> None:
    prompt = "hello 你"
    ids = tokenizer.encode(prompt).ids
    nan = float("nan")

    def script(request: Any) -> Script:
        assert request.sampling.prompt_logprobs_from == 0
        made = Script([270])
        made.prompt_scores = scores_of([(nan, [(0, nan)])] + [(-1.0, [(5, -0.25)])] * (len(ids) - 1))
        made.scores = lambda token: scores_of([(-0.5, [(token, -0.5)])])
        return made

    backend.script = script
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 1}
    answer = (await client.post(PATH, json=body)).json()
    [choice] = answer["choices"]
    assert choice["text"] == prompt + tokenizer.decode([270])
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(ids) + 1
    assert logprobs["token_logprobs"] == [None] + [-1.0] * (len(ids) - 1) + [-0.5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][-1] == {tokenizer.decode([270]): -0.5}
    assert logprobs["text_offset"][0] == 0
    assert logprobs["text_offset"][-1] == len(prompt)
    chunks = events((await client.post(PATH, json={**body, "stream": True})).text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert [t for block in streamed for t in block["tokens"]] == logprobs["tokens"]
    assert [t for block in streamed for t in block["text_offset"]] == logprobs["text_offset"]


async def test_echo_of_ids_shows_their_text(client: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("good morning").ids
    answer = (await client.post(PATH, json={"prompt": [ids, [*ids]], "echo": True, "max_tokens": 1})).json()
    assert all(choice["text"].startswith("good morning") for choice in answer["choices"])
    assert answer["choices"][0]["logprobs"] is None
