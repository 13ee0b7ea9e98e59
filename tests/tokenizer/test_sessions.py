"""Sessions: prompts that go on from earlier answers, their bounds and their end; best_of beside them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.tokenizer import sessions
from services.tokenizer.errors import ApiError
from services.tokenizer.sessions import Recorder, SessionParams, Sessions
from shared import ints
from shared.clock import ManualClock
from shared.messages.request import GenerateRequest
from tests.tokenizer.fake_backend import FakeBackend, Script, scores_of
from tests.tokenizer.sse_reader import events


def ids(*tokens: int) -> array[int]:
    return array("i", tokens)


def answer(recorder: Recorder, *tokens: int) -> None:
    recorder.ended(ids(*tokens))


@pytest.fixture
def store() -> Iterator[Sessions]:
    made = Sessions(ManualClock(100.0))
    yield made
    made.shut()


def test_branches_offsets_and_dropped_outputs(store: Sessions) -> None:
    session = store.open("", 100)
    whole, first = store.enter("", SessionParams(id=session), "a", ids(1, 2))
    assert whole == ids(1, 2)
    answer(first, 3, 4)
    for wishes, expected in (
        (SessionParams(id=session, rid="a"), ids(1, 2, 3, 4, 9)),
        (SessionParams(id=session, rid="a", drop_previous_output=True), ids(1, 2, 9)),
        (SessionParams(id=session, rid="a", offset=3), ids(1, 2, 3, 9)),
        (SessionParams(id=session), ids(9)),
    ):
        assert store.enter("", wishes, "probe", ids(9))[0] == expected
    _, second = store.enter("", SessionParams(id=session, rid="a"), "b", ids(5))
    answer(second, 6)
    _, third = store.enter("", SessionParams(id=session, rid="b"), "c", ids(7))
    answer(third, 8)
    store.enter("", SessionParams(id=session, rid="a", replace=True), "d", ids(5))
    for gone in ("b", "c"):
        with pytest.raises(ApiError, match="no request"):
            store.enter("", SessionParams(id=session, rid=gone), "e", ids(1))
    store.enter("", SessionParams(id=session, replace=True), "f", ids(1))
    with pytest.raises(ApiError, match="no request"):
        store.enter("", SessionParams(id=session, rid="a"), "g", ids(1))


def test_bounds_time_and_owners(store: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = store._clock
    assert isinstance(clock, ManualClock)
    session = store.open("alice", 5, "mine", ttl=10)
    with pytest.raises(ApiError, match="open already"):
        store.open("alice", 5, "mine")
    for owner in ("", "bob"):
        with pytest.raises(ApiError, match="no session"):
            store.enter(owner, SessionParams(id=session), "a", ids(1))
    with pytest.raises(ApiError, match="6 tokens"):
        store.enter("alice", SessionParams(id=session), "a", ids(*range(6)))
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 2)
    store.open("bob", 5)
    with pytest.raises(ApiError) as full:
        store.open("bob", 5)
    assert (full.value.status, full.value.retry_after) == (429, 1.0)
    clock.advance(9)
    store.enter("alice", SessionParams(id=session), "a", ids(1))  # a use keeps it alive
    clock.advance(9)
    store.close("alice", session)
    clock.advance(sessions.DEFAULT_TTL_S)
    store.open("", 5)
    assert len(store) == 1


def test_the_oldest_request_is_forgotten(store: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_NODES", 2)
    session = store.open("", 100)
    for rid in "abc":
        answer(store.enter("", SessionParams(id=session), rid, ids(1))[1], 2)
    with pytest.raises(ApiError, match="no request"):
        store.enter("", SessionParams(id=session, rid="a"), "d", ids(1))
    assert store.enter("", SessionParams(id=session, rid="c"), "d", ids(3))[0] == ids(1, 2, 3)
    monkeypatch.setattr(sessions, "MAX_IDS", 4)
    with pytest.raises(ApiError, match="too many tokens"):
        store.enter("", SessionParams(id=session), "e", ids(1))


def test_processes_share_sessions(tmp_path: Path) -> None:
    here, there = (Sessions(ManualClock(100.0), str(tmp_path / "sessions")) for _ in range(2))
    session = here.open("alice", 100, "same")
    assert here.open("bob", 100, "same") == session  # a name is the tenant's own
    answer(here.enter("alice", SessionParams(id=session), "a", ids(1, 2))[1], 3)
    whole, recorder = there.enter("alice", SessionParams(id=session, rid="a"), "b", ids(4))
    assert whole == ids(1, 2, 3, 4)
    with pytest.raises(ApiError, match="no request"):
        there.enter("bob", SessionParams(id=session, rid="a"), "b", ids(4))
    here.close("alice", session)
    answer(recorder, 5)  # nobody wants it any more
    here.open("alice", 100, "same")
    with pytest.raises(ApiError, match="no request"):
        here.enter("alice", SessionParams(id=session, rid="b"), "c", ids(4))
    here.shut()
    there.shut()


async def test_a_conversation_over_http(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.script = lambda request: Script([7, 8])
    session = (await client.post("/open_session", json={"capacity_of_str_len": 1000})).json()
    body: dict[str, Any] = {"input_ids": [1, 2], "session_params": {"id": session}, "sampling_params": {"n": 1}}
    first = (await client.post("/generate", json=body)).json()
    body.update(input_ids=[3], session_params={"id": session, "rid": first["meta_info"]["id"]}, rid="second")
    streamed = events((await client.post("/generate", json={**body, "stream": True})).text)
    assert streamed[-1]["meta_info"]["prompt_tokens"] == 5
    assert ints.unpack(backend.requests[-1].prompt_ids).tolist() == [1, 2, 7, 8, 3]
    body = {"prompt": [4], "session_params": {"id": session, "rid": "second"}, "max_tokens": 2}
    answer = (await client.post("/v1/completions", json=body)).json()
    assert answer["usage"]["prompt_tokens"] == 8
    assert ints.unpack(backend.requests[-1].prompt_ids).tolist() == [1, 2, 7, 8, 3, 7, 8, 4]
    assert (await client.post("/close_session", json={"session_id": session})).status_code == 200
    gone = await client.post("/v1/completions", json=body)
    assert (gone.status_code, gone.json()["error"]["param"]) == (400, "session_params.id")


async def test_what_sessions_refuse(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    await client.post("/open_session", json={"capacity_of_str_len": 1000, "session_id": "s"})
    for path, body, param in (
        ("/open_session", {"capacity_of_str_len": 0}, "capacity_of_str_len"),
        ("/open_session", {"capacity_of_str_len": 9, "session_id": "s"}, "session_id"),
        ("/open_session", {"capacity_of_str_len": 9, "timeout": 0}, "timeout"),
        ("/open_session", {"capacity_of_str_len": 9, "streaming": True}, "streaming"),
        ("/close_session", {"session_id": "unknown"}, "session_id"),
        ("/generate", {"text": "x", "session_params": {"rid": "a"}}, "session_params.id"),
        ("/generate", {"text": "x", "session_params": {"id": "s", "rid": "a"}}, "session_params.rid"),
        ("/generate", {"text": ["x", "y"], "session_params": {"id": "s"}}, "session_params"),
        ("/generate", {"text": "x", "sampling_params": {"n": 2}, "session_params": {"id": "s"}}, "session_params"),
        ("/v1/chat/completions", {"messages": [], "session_id": "s"}, "session_id"),
    ):
        answer = await client.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), (path, body)
    assert not backend.requests


async def test_best_of_shows_the_most_likely(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    def script(request: GenerateRequest) -> Script:
        script = Script([10 + request.choice_index] * (1 + request.choice_index))
        script.scores = lambda token: scores_of([(-abs(12.0 - token), [])])
        script.texts = [f"<{request.choice_index}>"] * (1 + request.choice_index)
        return script

    backend.script = script
    body = {"prompt": ["one", "two"], "max_tokens": 8, "n": 2, "best_of": 4}
    answer = (await client.post("/v1/completions", json=body)).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts in (["<2>" * 3, "<1>" * 2] * 2, ["<2>" * 3, "<3>" * 4] * 2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 2 * (1 + 2 + 3 + 4)
    for change, status in (({"best_of": 1}, 400), ({"stream": True}, 400), ({"best_of": 10**6}, 400)):
        wrong = await client.post("/v1/completions", json={**body, **change})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (status, "best_of")
