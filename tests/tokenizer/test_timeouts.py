"""Time-outs, and what a stream says when it fails on its way: counts, then one error, then the end."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from services.tokenizer import exchange
from services.tokenizer.calls import Call, trace_id
from services.tokenizer.errors import ApiError
from services.tokenizer.service import TokenizerService
from shared.messages.stream import Finish, FinishReason
from tests.tokenizer.conftest import Launcher
from tests.tokenizer.fake_backend import FakeBackend, Script
from tests.tokenizer.sse_reader import events

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 50}
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hello", "max_tokens": 50},
    "/generate": {"text": "hello", "sampling_params": {"max_new_tokens": 50}},
}
OVERDUE = Finish(FinishReason.ABORT, message="The request timed out while it was running.", status=408)


def overdue_after(count: int) -> Script:
    return Script([270] * count, OVERDUE)


@pytest.mark.parametrize("path", sorted(PATHS))
async def test_where_a_time_out_comes_from(launch: Launcher, backend: FakeBackend, path: str) -> None:
    service = await launch(request_timeout=50.0)
    async with httpx.AsyncClient(base_url=service.url) as client:

        async def deadline(header: str | None = None, **fields: Any) -> float:
            headers = {"x-request-timeout": header} if header else {}
            answer = await client.post(path, json={**PATHS[path], **fields}, headers=headers)
            assert answer.status_code == 200, answer.text
            return backend.requests[-1].deadline_s

        assert 40 < await deadline() <= 50
        assert 20 < await deadline(timeout=30) <= 30
        assert 40 < await deadline(timeout=3000) <= 50  # the operator's stays
        assert 10 < await deadline("20") <= 20
        assert 10 < await deadline("20.0", timeout=30) <= 20
        for header in ("0", "-1", "nan", "inf", "soon", "1e9", ""):
            answer = await client.post(path, json=PATHS[path], headers={"x-request-timeout": header})
            assert answer.status_code == 400, header
            assert "x-request-timeout" in answer.json()["error"]["message"]
        for timeout in (0, -1, 1e9):
            answer = await client.post(path, json={**PATHS[path], "timeout": timeout})
            assert answer.json()["error"]["param"] == "timeout"
        answer = await client.post(path, json=PATHS[path], headers={"x-request-timeout": "1e-9"})
        assert answer.status_code == 408


async def test_no_time_out_unless_asked_for(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    await client.post("/generate", json=PATHS["/generate"])
    assert backend.requests[-1].deadline_s == 0.0


@pytest.mark.parametrize("path", sorted(PATHS))
async def test_a_whole_answer_that_times_out_is_a_status(
    client: httpx.AsyncClient, backend: FakeBackend, path: str
) -> None:
    for status, code in ((408, "request_timeout"), (504, "timeout")):
        script = Script([270, 270] if status == 408 else [], Finish(FinishReason.ABORT, message="late", status=status))
        backend.script = lambda request, script=script: script  # type: ignore[misc]
        answer = await client.post(path, json=PATHS[path])
        assert answer.status_code == status
        assert answer.json()["error"]["code"] == code
        assert answer.json()["error"]["message"] == "late"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("n", [1, 2])
async def test_a_stream_that_fails_tells_its_counts(
    client: httpx.AsyncClient, backend: FakeBackend, path: str, n: int
) -> None:
    backend.script = lambda request: overdue_after(5 if request.choice_index == 0 else 50)
    backend.cached_tokens = 3
    body = {**PATHS[path], "n": n, "stream": True, "stream_options": {"include_usage": True}}
    answer = await client.post(path, json=body)
    assert answer.status_code == 200
    *chunks, usage, error = events(answer.text)
    assert set(error) == {"error"}
    assert error["error"]["code"] == "request_timeout"
    assert usage["choices"] == []
    shown = [choice for chunk in chunks for choice in chunk["choices"]]
    texts = [choice.get("text") or choice.get("delta", {}).get("content") for choice in shown]
    counted = usage["usage"]["completion_tokens"]
    assert counted == 5 if n == 1 else counted >= 5  # the other choice had some of its tokens, too
    assert usage["usage"]["total_tokens"] == usage["usage"]["prompt_tokens"] + usage["usage"]["completion_tokens"]
    assert any(texts)
    assert not [choice for choice in shown if choice["index"] == 0 and choice["finish_reason"]]
    without = events((await client.post(path, json={**PATHS[path], "stream": True})).text)
    assert set(without[-1]) == {"error"}
    assert all("usage" not in chunk for chunk in without)


async def test_a_native_stream_that_fails(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.script = lambda request: overdue_after(4)
    *chunks, error = events((await client.post("/generate", json={**PATHS["/generate"], "stream": True})).text)
    assert error["error"]["code"] == "request_timeout"
    assert chunks[-1]["meta_info"]["completion_tokens"] == 4
    assert all(chunk["meta_info"]["finish_reason"] is None for chunk in chunks)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_counts_of_an_aborted_stream_are_exact(
    client: httpx.AsyncClient, backend: FakeBackend, path: str
) -> None:
    script = Script([270] * 50)
    script.pause_after = 7
    backend.script = lambda request: script
    body = {**PATHS[path], "rid": "r", "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", path, json=body) as answer:
        data = b""
        chunks = answer.aiter_bytes()
        while data.count(b'"finish_reason":null') < 7 and backend._sent.get("r") != 7:
            data += await anext(chunks)
        await client.post("/abort_request", json={"rid": "r"})
        async for piece in chunks:
            data += piece
    *rest, usage = events(data.decode())
    assert usage["usage"]["completion_tokens"] == 7
    ends = [choice["finish_reason"] for chunk in rest for choice in chunk["choices"] if choice["finish_reason"]]
    assert ends == ["abort"]


async def test_a_scheduler_that_says_nothing_does_not_hold_a_request_for_ever(
    client: httpx.AsyncClient, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "SCHEDULER_MARGIN_S", 0.05)
    monkeypatch.setattr(Call, "time_left", lambda self: 0.05)
    script = Script([270] * 5)
    script.gate = asyncio.Event()
    backend.script = lambda request: script
    answer = await client.post("/generate", json=PATHS["/generate"])
    assert answer.status_code == 504
    await backend.until(lambda: len(backend.aborted) == 1 and backend.live == 0)


async def test_time_is_over_after_the_first_tokens(
    service: TokenizerService, client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    script = Script([270] * 5)
    script.pause_after = 2
    backend.script = lambda request: script
    running = asyncio.ensure_future(client.post("/generate", json=PATHS["/generate"]))
    await backend.until(lambda: backend.live == 1)
    [group] = service.context.frontend.streams.groups()
    while group.streams[0].received < 2:
        await asyncio.sleep(0.01)
    group.time_out()
    assert (await running).status_code == 408
    await backend.until(lambda: len(backend.aborted) == 1 and backend.live == 0)


async def test_headers_come_before_the_first_token(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    script = Script([270])
    script.gate = asyncio.Event()
    backend.script = lambda request: script
    async with client.stream("POST", "/generate", json={**PATHS["/generate"], "stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-accel-buffering"] == "no"
        script.gate.set()
        assert events((await answer.aread()).decode())


async def test_no_reader_of_lines_is_fooled_by_an_error(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    message = "one\u2028two\u2029three\u0085four\nfive"
    backend.script = lambda request: Script([270, 270], Finish(FinishReason.ERROR, message=message, status=500))
    raw = (await client.post("/generate", json={**PATHS["/generate"], "stream": True})).content
    [line] = [line for line in raw.decode().splitlines() if "error" in line]
    assert json.loads(line.removeprefix("data: "))["error"]["message"] == message


def test_time_runs_from_the_arrival() -> None:
    call = Call()
    assert call.time_left() == 0.0
    call.limit_time(0.0)
    call.limit_time(None)
    assert call.time_left() == 0.0
    call.limit_time(30.0)
    call.limit_time(60.0)
    assert 29 < call.time_left() <= 30
    call.started -= 31
    with pytest.raises(ApiError) as caught:
        call.time_left()
    assert caught.value.status == 408


TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.mark.parametrize(
    ("header", "trace"),
    [
        (f"00-{TRACE}-b7ad6b7169203331-01", TRACE),
        (f"cc-{TRACE}-b7ad6b7169203331-01-what-comes-later", TRACE),
        (f"00-{TRACE}-b7ad6b7169203331-01-more", ""),
        (f"ff-{TRACE}-b7ad6b7169203331-01", ""),
        (f"00-{'0' * 32}-b7ad6b7169203331-01", ""),
        (f"00-{TRACE}-{'0' * 16}-01", ""),
        (f"00-{TRACE.upper()}-b7ad6b7169203331-01", ""),
        (f"00-{TRACE}-b7ad6b7169203331", ""),
        ("", ""),
        ("x" * 5000, ""),
    ],
)
async def test_traces(launch: Launcher, backend: FakeBackend, capsys: Any, header: str, trace: str) -> None:
    assert trace_id(header) == trace
    service = await launch(log_requests=True)
    async with httpx.AsyncClient(base_url=service.url) as client:
        capsys.readouterr()
        answer = await client.post("/generate", json=PATHS["/generate"], headers={"traceparent": header})
        assert answer.status_code == 200
    assert backend.requests[-1].traceparent == (header if trace else "")
    said = capsys.readouterr()
    lines = [line for line in (said.out + said.err).splitlines() if "request received" in line]
    assert len(lines) == 1
    assert (TRACE in lines[0]) == bool(trace)
