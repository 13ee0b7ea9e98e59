"""/generate over the wire: batches, streams, sampling parameters, meta_info, log-probabilities."""

from __future__ import annotations

import itertools
from typing import Any

import httpx
import msgspec
from tokenizers import Tokenizer

from services.tokenizer.service import TokenizerService
from shared import ints
from shared.messages.stream import Finish, FinishReason
from tests.tokenizer.conftest import Launcher
from tests.tokenizer.fake_backend import WORDS, FakeBackend, Script, scores_of
from tests.tokenizer.sse_reader import events
from tests.tokenizer.tiny_folder import CONTEXT


async def test_one_text(client: httpx.AsyncClient, backend: FakeBackend, tokenizer: Tokenizer) -> None:
    backend.cached_tokens = 3
    body = {"text": "hello world", "rid": "mine", "sampling_params": {"max_new_tokens": 5, "temperature": 0}}
    answer = (await client.post("/generate", json=body)).json()
    [request] = backend.requests
    assert list(ints.unpack(request.prompt_ids)) == tokenizer.encode("hello world").ids
    assert request.request_id == "mine"
    assert request.sampling.max_tokens == 5
    assert request.sampling.temperature == 0
    assert request.sampling.stop_token_ids == (0, 2)
    assert request.stream is False
    assert WORDS.startswith(answer["text"])
    assert len(answer["output_ids"]) == 5
    meta = answer["meta_info"]
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert meta["prompt_tokens"] == len(tokenizer.encode("hello world").ids)
    assert meta["completion_tokens"] == 5
    assert meta["cached_tokens"] == 3
    assert meta["e2e_latency"] > 0
    assert meta["weight_version"] == "default"
    assert meta["total_retractions"] == 0


async def test_defaults_and_every_parameter(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    await client.post("/generate", json={"text": "a"})
    params = {
        "max_new_tokens": 4,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "frequency_penalty": 1,
        "presence_penalty": -1,
        "repetition_penalty": 1.5,
        "min_new_tokens": 2,
        "sampling_seed": 11,
        "stop": ["x", "y"],
        "stop_token_ids": [9],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
        "logit_bias": {"3": -5.5},
    }
    body = {"text": "a", "sampling_params": params, "priority": 3, "extra_key": "k"}
    assert (await client.post("/generate", json=body)).status_code == 200
    plain, full = backend.requests
    assert (plain.sampling.max_tokens, plain.sampling.temperature, plain.sampling.top_k) == (128, 1.0, -1)
    assert plain.namespace == b""
    sampling = full.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (4, 0.5, 0.9, 7)
    assert (sampling.min_p, sampling.frequency_penalty, sampling.presence_penalty) == (0.1, 1, -1)
    assert (sampling.repetition_penalty, sampling.min_new_tokens, sampling.seed) == (1.5, 2, 11)
    assert sampling.stop_token_ids == (9,)
    assert list(ints.unpack(sampling.logit_bias_ids)) == [3]
    assert full.stop_strings == ("x", "y")
    assert (full.skip_special_tokens, full.spaces_between_special_tokens, full.no_stop_trim) == (False, False, True)
    assert full.priority == 3
    assert len(full.namespace) == 16


async def test_seeds(launch: Launcher, backend: FakeBackend) -> None:
    async def seeds_of(service: TokenizerService, **params: Any) -> list[int]:
        backend.requests.clear()
        async with httpx.AsyncClient(base_url=service.url) as client:
            body = {"text": "a", "sampling_params": {"max_new_tokens": 1, **params}}
            assert (await client.post("/generate", json=body)).status_code == 200
        return [request.sampling.seed for request in backend.requests]

    service = await launch()
    assert await seeds_of(service, seed=7) == [7]
    first, second, third = await seeds_of(service, seed=7, n=3)
    assert first == 7
    assert len({first, second, third}) == 3
    assert await seeds_of(service, seed=7, n=3) == [first, second, third]
    assert await seeds_of(service) != await seeds_of(service)
    assert await seeds_of(service, seed=-1) == [2**63 - 1]
    fixed = await launch(random_seed=5)
    again = await launch(random_seed=5)
    assert [await seeds_of(fixed), await seeds_of(fixed)] == [await seeds_of(again), await seeds_of(again)]


async def test_batches(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    body = {
        "text": ["hello", "good morning"],
        "sampling_params": [{"max_new_tokens": 2}, {"max_new_tokens": 3}],
        "rid": "b",
    }
    answers = (await client.post("/generate", json=body)).json()
    assert [len(a["output_ids"]) for a in answers] == [2, 3]
    assert [a["meta_info"]["id"] for a in answers] == ["b_0", "b_1"]
    body = {"input_ids": [[5, 6], [7]], "sampling_params": {"n": 2, "max_new_tokens": 1}, "rid": ["p", "q"]}
    answers = (await client.post("/generate", json=body)).json()
    assert [a["meta_info"]["id"] for a in answers] == ["p", "p", "q", "q"]
    groups = [request.group_id for request in backend.requests[2:]]
    assert groups[0] == groups[1] != groups[2] == groups[3]
    assert [request.choice_index for request in backend.requests[2:]] == [0, 1, 0, 1]
    one = (await client.post("/generate", json={"text": ["hello"], "sampling_params": {"max_new_tokens": 1}})).json()
    assert isinstance(one, list)


async def test_stream_is_cumulative(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 8}, "stream": True}
    chunks = events((await client.post("/generate", json=body)).text)
    texts = [chunk["text"] for chunk in chunks]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 8}
    assert len(chunks[-1]["output_ids"]) == 8
    assert all(chunk["meta_info"]["finish_reason"] is None for chunk in chunks[:-1])
    assert all("e2e_latency" not in chunk["meta_info"] for chunk in chunks[:-1])
    assert "index" not in chunks[0]


async def test_stream_of_a_batch_carries_indexes(client: httpx.AsyncClient) -> None:
    body = {"text": ["hello", "you"], "sampling_params": {"max_new_tokens": 4, "n": 2}, "stream": True}
    chunks = events((await client.post("/generate", json=body)).text)
    assert {chunk["index"] for chunk in chunks} == {0, 1, 2, 3}
    finished = [chunk["index"] for chunk in chunks if chunk["meta_info"]["finish_reason"]]
    assert sorted(finished) == [0, 1, 2, 3]


async def test_stream_of_deltas(launch: Launcher, backend: FakeBackend) -> None:
    service = await launch(stream_output=True)
    async with httpx.AsyncClient(base_url=service.url) as client:
        body = {"text": "hello", "sampling_params": {"max_new_tokens": 8}, "stream": True}
        chunks = events((await client.post("/generate", json=body)).text)
    assert WORDS.startswith("".join(chunk["text"] for chunk in chunks))
    assert sum(len(chunk["output_ids"]) for chunk in chunks) == 8


async def test_a_least_length_beyond_the_most_is_refused(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    for path, body, param in (
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 4, "min_new_tokens": 5}}, "max_new_tokens"),
        ("/generate", {"text": "a", "sampling_params": {"min_new_tokens": 129}}, "max_new_tokens"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 4, "min_tokens": 5}, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "min_tokens": 17}, "max_tokens"),
    ):
        answer = await client.post(path, json=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"].endswith(param)
    assert not backend.requests


async def test_lengths_are_clipped(client: httpx.AsyncClient, backend: FakeBackend, launch: Launcher) -> None:
    body = {"input_ids": [5] * 100, "sampling_params": {"max_new_tokens": 10**9, "min_new_tokens": 10**8}}
    assert (await client.post("/generate", json=body)).status_code == 200
    assert backend.requests[-1].sampling.max_tokens == CONTEXT - 100
    assert backend.requests[-1].sampling.min_new_tokens == CONTEXT - 100
    body = {"input_ids": [5] * (CONTEXT - 1)}
    assert (await client.post("/generate", json=body)).status_code == 200
    assert backend.requests[-1].sampling.max_tokens == 1
    body = {"input_ids": [5] * CONTEXT, "sampling_params": {"max_new_tokens": 0}}
    assert (await client.post("/generate", json=body)).status_code == 200
    strict = await launch(strict_length=True, context_length=64)
    async with httpx.AsyncClient(base_url=strict.url) as other:
        body = {"input_ids": [5] * 60, "sampling_params": {"max_new_tokens": 5}}
        answer = await other.post("/generate", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        body["sampling_params"] = {"max_new_tokens": 4}
        assert (await other.post("/generate", json=body)).status_code == 200


async def test_the_smaller_limit_counts(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.publish(max_request_tokens=50)
    models = (await client.get("/v1/models")).json()
    while models["data"][0]["max_model_len"] != 50:
        models = (await client.get("/v1/models")).json()
    answer = await client.post("/generate", json={"input_ids": [5] * 50})
    assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_ends(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    ends = [
        (Finish(FinishReason.STOP, matched_token=2), {"type": "stop", "matched": 2}),
        (Finish(FinishReason.STOP, matched_string="\n"), {"type": "stop", "matched": "\n"}),
        (Finish(FinishReason.STOP), {"type": "stop", "matched": None}),
        (Finish(FinishReason.LENGTH), {"type": "length", "length": 2}),
    ]
    for finish, expected in ends:
        backend.script = lambda request, finish=finish: Script([270, 2], finish)
        answer = (await client.post("/generate", json={"text": "a"})).json()
        assert answer["meta_info"]["finish_reason"] == expected
    backend.script = lambda request: Script([270, 2], Finish(FinishReason.ERROR, message="broken", status=500))
    answer = await client.post("/generate", json={"text": "a"})
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "broken"
    answer = await client.post("/generate", json={"text": "a", "stream": True})
    if answer.status_code == 200:  # the first token came before the failure
        assert events(answer.text)[-1] == {
            "error": {"message": "broken", "type": "server_error", "param": None, "code": "internal_error"}
        }


async def test_special_texts_are_parsed_unless_switched_off(
    client: httpx.AsyncClient, backend: FakeBackend, tokenizer: Tokenizer
) -> None:
    for parse in (True, False):
        body = {"text": "<|im_start|>user", "parse_special": parse, "sampling_params": {"max_new_tokens": 1}}
        await client.post("/generate", json=body)
    parsed, literal = (list(ints.unpack(request.prompt_ids)) for request in backend.requests)
    assert parsed[0] == 1
    assert 1 not in literal
    assert tokenizer.decode(literal) == "<|im_start|>user"


async def test_logprobs(client: httpx.AsyncClient, backend: FakeBackend, tokenizer: Tokenizer) -> None:
    hello, world = tokenizer.encode(" hello world").ids
    nan = float("nan")

    def script(request: Any) -> Script:
        assert request.sampling.logprobs == 2
        assert request.sampling.prompt_logprobs_from == 1
        assert list(ints.unpack(request.sampling.logprob_token_ids)) == [7, 8]
        made = Script([world, hello])
        made.scores = lambda token: scores_of([(-0.5, [(token, -0.5), (9, -1.5)])], [-3.0, float("-inf")])
        made.prompt_scores = scores_of(
            [(-1.0, [(5, -0.25), (6, -2.0)]), (nan, [(0, nan), (0, nan)])], [-1, -2, nan, nan]
        )
        return made

    backend.script = script
    body = {
        "input_ids": [hello, world, hello],
        "return_logprob": True,
        "logprob_start_len": 1,
        "top_logprobs_num": 2,
        "token_ids_logprob": [7, 8],
        "return_text_in_logprobs": True,
        "return_prompt_token_ids": True,
    }
    answer = (await client.post("/generate", json=body)).json()
    meta = answer["meta_info"]
    assert meta["input_token_logprobs"] == [[-1.0, world, " world"], [None, hello, " hello"]]
    assert meta["prompt_tokens"] == 1 + len(meta["input_token_logprobs"])
    assert meta["input_top_logprobs"][0][0][:2] == [-0.25, 5]
    assert meta["input_top_logprobs"][1] is None
    assert meta["output_token_logprobs"] == [[-0.5, world, " world"], [-0.5, hello, " hello"]]
    assert [[row[:2] for row in rows] for rows in meta["output_top_logprobs"]] == [
        [[-0.5, world], [-1.5, 9]],
        [[-0.5, hello], [-1.5, 9]],
    ]
    assert [row[:2] for row in meta["output_token_ids_logprobs"][0]] == [[-3.0, 7], [-9999.0, 8]]
    assert answer["prompt_token_ids"] == [hello, world, hello]
    body["stream"] = True
    chunks = events((await client.post("/generate", json=body)).text)
    assert chunks[-1]["meta_info"]["output_token_logprobs"] == meta["output_token_logprobs"]
    assert chunks[-1]["meta_info"]["input_token_logprobs"] == meta["input_token_logprobs"]


async def test_no_texts_in_logprobs_unless_asked(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    def script(request: Any) -> Script:
        made = Script([270])
        made.scores = lambda token: scores_of([(-0.5, [])])
        return made

    backend.script = script
    body = {"text": ["a", "b"], "return_logprob": [True, False]}
    scored, plain = (await client.post("/generate", json=body)).json()
    assert scored["meta_info"]["output_token_logprobs"] == [[-0.5, 270, None]]
    assert scored["meta_info"]["input_token_logprobs"] == []
    assert "output_token_logprobs" not in plain["meta_info"]
    assert backend.requests[1].sampling.logprobs == -1


async def test_prefill_only(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.script = lambda request: Script([])
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 0}}
    answer = (await client.post("/generate", json=body)).json()
    assert answer["text"] == ""
    assert answer["output_ids"] == []
    assert answer["meta_info"]["completion_tokens"] == 0
    assert backend.requests[0].sampling.max_tokens == 0


async def test_namespaces(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    bodies = [
        ("/generate", {"text": "a"}),
        ("/generate", {"text": "a", "extra_key": "x"}),
        ("/generate", {"text": "a", "cache_salt": "x"}),
        ("/v1/completions", {"prompt": "a", "extra_key": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "cache_salt": "x"}),
    ]
    for path, body in bodies:
        assert (await client.post(path, json=body)).status_code == 200
    none, key, salt, other_key, other_salt = (request.namespace for request in backend.requests)
    assert none == b""
    assert key == other_key
    assert salt == other_salt
    assert len({none, key, salt}) == 3


async def test_large_bodies_are_decoded_off_the_loop(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 1}, "padding": "x" * 200_000}
    answer = await client.post(
        "/generate", content=msgspec.json.encode(body), headers={"content-type": "application/json"}
    )
    assert answer.status_code == 200


async def test_stream_interval_makes_fewer_and_larger_events(client: httpx.AsyncClient) -> None:
    body = {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": 8, "stream_interval": 3}}
    answer = events((await client.post("/generate", json=body)).text)
    counts = [len(event["output_ids"]) for event in answer]
    assert counts[-1] == 8
    assert all(later - earlier >= 3 for earlier, later in itertools.pairwise(counts[:-1]))
    body["sampling_params"] = {"stream_interval": 0}
    refused = await client.post("/generate", json=body)
    assert refused.json()["error"]["param"] == "sampling_params.stream_interval"
