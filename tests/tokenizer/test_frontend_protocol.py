"""The sockets: new scheduler lives, lost detokenizers, stale status, draining, over the HTTP surface."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import msgspec

from services.tokenizer.service import TokenizerService
from shared import ints
from shared.messages.stream import Finish, FinishReason, TextChunk
from tests.tokenizer.conftest import Launcher
from tests.tokenizer.fake_backend import FakeBackend, Script
from tests.tokenizer.sse_reader import events

STREAM = {"text": "hello", "rid": "r", "sampling_params": {"max_new_tokens": 10}, "stream": True}
TEN = list(range(260, 270))


def paused_script(after: int, count: int = 10) -> Script:
    script = Script(TEN[:count])
    script.pause_after = after
    return script


async def ready(client: httpx.AsyncClient, wanted: int = 200) -> httpx.Response:
    """Ask until /ready answers as wanted: other tasks decide when."""
    async with asyncio.timeout(10):
        while True:
            answer = await client.get("/ready")
            if answer.status_code == wanted:
                return answer
            await asyncio.sleep(0.01)


async def test_a_new_epoch_resubmits_with_all_ids(
    client: httpx.AsyncClient, backend: FakeBackend, service: TokenizerService
) -> None:
    backend.script = lambda request: paused_script(4)
    running = asyncio.ensure_future(client.post("/generate", json=STREAM))
    await backend.until(lambda: backend.live == 1)
    [stream] = service.context.frontend.streams.live()
    while stream.received < 4:
        await asyncio.sleep(0.01)
    old = backend.requests[0]
    backend.script = lambda request: Script(TEN)
    await backend.restart()
    beat = asyncio.create_task(beats(service))
    await backend.until(lambda: backend.requests)
    beat.cancel()
    again = backend.requests[0]
    assert again.request_id == "r"
    assert again.epoch == 2
    assert ints.unpack(again.output_ids).tolist() == TEN[:4]
    assert again.prompt_ids == old.prompt_ids
    assert again.sampling == old.sampling
    chunks = events((await running).text)
    assert chunks[-1]["output_ids"] == TEN
    assert chunks[-1]["text"] == backend.tokenizer.decode(TEN)
    assert chunks[-1]["meta_info"]["completion_tokens"] == 10


async def beats(service: TokenizerService) -> None:
    """The process's heartbeat, faster: tests own it."""
    while True:
        service.heartbeat()
        await asyncio.sleep(0.05)


async def test_chunks_of_an_old_epoch_are_dropped(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    script = paused_script(0)
    backend.script = lambda request: script
    running = asyncio.ensure_future(client.post("/generate", json=STREAM))
    await backend.until(lambda: backend.live == 1)
    stale = TextChunk("r", 0, ints.pack([5]), "stale", Finish(FinishReason.LENGTH), 1)
    backend.say(backend.requests[0], stale, epoch=0)
    script.resume.set()
    assert events((await running).text)[-1]["output_ids"] == TEN


async def test_a_lost_detokenizer(client: httpx.AsyncClient, backend: FakeBackend, service: TokenizerService) -> None:
    """The stream is opened again elsewhere, with all of its text; the client sees each character once."""
    backend.script = lambda request: paused_script(4)
    running = asyncio.ensure_future(client.post("/generate", json=STREAM))
    await backend.until(lambda: backend.live == 1)
    [stream] = service.context.frontend.streams.live()
    while stream.received < 4:
        await asyncio.sleep(0.01)
    await backend.stop_streams()
    backend.detok.close()
    backend.start_detokenizer("d2")
    backend.publish()
    await ready(client)
    text = backend.tokenizer.decode(TEN)
    whole = TextChunk("r", 0, ints.pack(TEN), text, Finish(FinishReason.LENGTH), 10, reopened=True)
    backend.say(backend.requests[0], whole)
    chunks = events((await running).text)
    assert chunks[-1]["output_ids"] == TEN
    assert chunks[-1]["text"] == text


async def test_duplicates_of_a_resubmission_are_no_failure(
    client: httpx.AsyncClient, backend: FakeBackend, service: TokenizerService
) -> None:
    script = paused_script(4)
    backend.script = lambda request: script
    running = asyncio.ensure_future(client.post("/generate", json=STREAM))
    await backend.until(lambda: backend.live == 1)
    [stream] = service.context.frontend.streams.live()
    stream.resumed(1)
    backend.to_frontend(next(iter(backend._frontends)), rejection("r", "duplicate_id"))
    script.resume.set()
    assert events((await running).text)[-1]["output_ids"] == TEN


def rejection(request_id: str, code: Any) -> msgspec.Struct:
    from shared.messages.request import RequestRejected

    return RequestRejected(request_id, code, "because")


async def test_stale_status_refuses_at_once(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    assert (await client.get("/health")).status_code == 200
    await backend.stop()
    answer = await ready(client, 503)
    assert answer.headers["retry-after"] == "1"
    for path in ("/health", "/ping", "/health_generate"):
        answer = await client.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "service_unavailable"), path
    answer = await client.post("/v1/completions", json={"prompt": "x"})
    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "server_error"
    assert (await client.post("/flush_cache")).status_code == 503
    await backend.start()


async def test_not_ready_says_why(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.publish(ready=False, detail="the worker is loading", retry_after_s=9.0)
    answer = await ready(client, 503)
    assert answer.json()["error"]["message"] == "the worker is loading"
    assert answer.headers["retry-after"] == "9"
    assert (await client.get("/health")).status_code == 200
    backend.publish(ready=True)
    await ready(client)


async def test_a_scheduler_that_stays_away(launch: Launcher, backend: FakeBackend, monkeypatch: Any) -> None:
    monkeypatch.setattr("services.tokenizer.frontend.PEER_GRACE_S", 0.1)
    service = await launch()
    backend.script = lambda request: paused_script(2)
    async with httpx.AsyncClient(base_url=service.url, timeout=20) as client:
        running = asyncio.ensure_future(client.post("/generate", json=STREAM))
        whole = asyncio.ensure_future(client.post("/generate", json={**STREAM, "stream": False, "rid": "s"}))
        await backend.until(lambda: backend.live == 2)
        while any(stream.received < 2 for stream in service.context.frontend.streams.live()):
            await asyncio.sleep(0.01)
        await backend.stop()
        beat = asyncio.create_task(beats(service))
        last = events((await running).text)[-1]
        assert last["error"]["type"] == "server_error"
        assert (await whole).status_code == 503
        beat.cancel()
    await backend.start()


async def test_a_detokenizer_that_stays_away(launch: Launcher, backend: FakeBackend, monkeypatch: Any) -> None:
    monkeypatch.setattr("services.tokenizer.frontend.PEER_GRACE_S", 0.1)
    service = await launch()
    backend.script = lambda request: paused_script(2)
    async with httpx.AsyncClient(base_url=service.url, timeout=20) as client:
        running = asyncio.ensure_future(client.post("/generate", json=STREAM))
        await backend.until(lambda: backend.live == 1)
        while any(stream.received < 2 for stream in service.context.frontend.streams.live()):
            await asyncio.sleep(0.01)
        backend.publish(detokenizers=())
        assert "detokenizer" in (await ready(client, 503)).json()["error"]["message"]
        beat = asyncio.create_task(beats(service))
        last = events((await running).text)[-1]
        assert last["error"]["message"] == "The detokenizer is away for too long."
        await backend.until(lambda: backend.aborted == ["r"])
        beat.cancel()


async def test_a_detokenizer_that_cannot_be_reached(launch: Launcher, backend: FakeBackend, monkeypatch: Any) -> None:
    """A newcomer gets a moment; after that its requests would hang, so the door closes."""
    monkeypatch.setattr("services.tokenizer.links.INTRODUCTION_S", 0.5)
    service = await launch()
    own = (backend.detokenizer_id, backend.detok.endpoint)
    backend.publish(detokenizers=(own, ("d9/1", "ipc:///nowhere/at/all")))
    async with httpx.AsyncClient(base_url=service.url, timeout=20) as client:
        await ready(client, 200)
        await ready(client, 503)
        backend.publish(detokenizers=(own,))
        await ready(client, 200)


async def test_draining(launch: Launcher, backend: FakeBackend) -> None:
    service = await launch(drain_timeout=20)
    script = paused_script(2)
    backend.script = lambda request: script
    async with httpx.AsyncClient(base_url=service.url, timeout=20) as client:
        running = asyncio.ensure_future(client.post("/generate", json=STREAM))
        await backend.until(lambda: backend.live == 1)
        draining = asyncio.ensure_future(service.drain())
        await ready(client, 503)
        answer = await client.post("/generate", json={**STREAM, "rid": "late"})
        assert answer.status_code == 503
        assert "shutting down" in answer.json()["error"]["message"]
        assert not draining.done()
        script.resume.set()
        assert events((await running).text)[-1]["output_ids"] == TEN
        await draining
    assert backend.aborted == []


async def test_draining_ends_what_takes_too_long(launch: Launcher, backend: FakeBackend) -> None:
    service = await launch(drain_timeout=0.1)
    backend.script = lambda request: paused_script(2)
    async with httpx.AsyncClient(base_url=service.url, timeout=20) as client:
        running = asyncio.ensure_future(client.post("/generate", json=STREAM))
        await backend.until(lambda: backend.live == 1)
        while any(stream.received < 2 for stream in service.context.frontend.streams.live()):
            await asyncio.sleep(0.01)
        await service.drain()
        last = events((await running).text)[-1]
        assert last["error"]["message"] == "The server is shutting down."
    await backend.until(lambda: backend.aborted == ["r"])


async def test_heartbeats_carry_measurements(client: httpx.AsyncClient, backend: FakeBackend, service: Any) -> None:
    await client.post("/generate", json=STREAM)
    service.heartbeat()
    await backend.until(lambda: backend.beats)
    beat = backend.beats[-1]
    assert beat.gauges["http_requests"] == 1
    assert beat.gauges["streams"] == 0
    assert beat.histograms["time_to_first_token_seconds"][-2] == 1


async def test_every_final_chunk_is_acknowledged(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    """Also of requests nobody waits for any more: the scheduler keeps them until then."""
    await client.post("/generate", json={**STREAM, "stream": False})
    await backend.until(lambda: backend.acked == ["r"])
    late = TextChunk("r", 10, b"", finish=Finish(FinishReason.ABORT), num_output_tokens=10)
    backend.say(backend.requests[0], late)
    await backend.until(lambda: backend.acked == ["r", "r"])
