"""Keys: who gets in, what each may do, and that tenants never meet."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer.access import Access
from services.tokenizer.errors import ApiError
from services.tokenizer.service import TokenizerService
from shared.config import TokenizerConfig
from shared.messages.request import RequestRejected
from shared.tenants import Tenant, TenantsError
from tests.tokenizer.conftest import Launcher
from tests.tokenizer.fake_backend import FakeBackend, Script

ALICE = {"authorization": "Bearer sk-alice"}
BOB = {"authorization": "Bearer sk-bob"}
CAROL = {"x-api-key": "sk-carol"}
ADMIN = {"authorization": "Bearer sk-admin"}
KEYS = """
alice sk-alice 600 100000
bob   sk-bob   -   -      lab
carol sk-carol -   -      lab
"""
WORK = {"text": "hello", "sampling_params": {"max_new_tokens": 2}}


@pytest.fixture
async def guarded(launch: Launcher, tmp_path: Path) -> TokenizerService:
    path = tmp_path / "keys"
    path.write_text(KEYS)
    path.chmod(0o600)
    return await launch(api_key_file=str(path), admin_api_key="sk-admin", launch_key="own")  # type: ignore[no-any-return]


@pytest.fixture
async def door(guarded: TokenizerService) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=guarded.url, timeout=20) as opened:
        yield opened


def held() -> Script:
    script = Script([270] * 50)
    script.gate = asyncio.Event()
    return script


async def test_every_route_is_denied_without_a_key(door: httpx.AsyncClient, backend: FakeBackend) -> None:
    paths = (await door.get("/openapi.json", headers=ADMIN)).json()["paths"]
    assert len(paths) > 15
    for path, method in ((p, m) for p, methods in paths.items() for m in methods):
        answer = await door.request(method, path, json={})
        if path in ("/health", "/ready"):
            assert answer.status_code == 200
            continue
        assert answer.status_code == 401, path
        error = answer.json()["error"]
        assert error["type"] == "authentication_error"
        assert error.get("code") == ("invalid_api_key" if not path.startswith("/v1/messages") else None)
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.headers["x-request-id"]
    assert backend.requests == []
    assert backend.operations == []


async def test_the_document_says_where_keys_are_asked_for(door: httpx.AsyncClient, launch: Launcher) -> None:
    document = (await door.get("/openapi.json", headers=ALICE)).json()
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    asked = {path: operation["security"] for path, item in document["paths"].items() for operation in item.values()}
    assert asked["/health"] == []
    assert asked["/generate"] == asked["/flush_cache"] == [{"key": []}]
    async with httpx.AsyncClient(base_url=(await launch()).url) as client:
        assert "security" not in (await client.get("/openapi.json")).text


async def test_what_is_no_good_key(door: httpx.AsyncClient) -> None:
    for headers in (
        {"authorization": "Bearer sk-alic"},
        {"authorization": "Bearer sk-alicee"},
        {"authorization": "Bearer"},
        {"authorization": "Basic sk-alice"},
        {"authorization": "sk-alice"},
        {"authorization": "Bearer SK-ALICE"},
        {"authorization": "Bearer " + "x" * 5000},
        {"authorization": "Basic x", "x-api-key": "sk-alice"},
        {"x-api-key": "Bearer sk-alice"},
        {"cookie": "key=sk-alice"},
    ):
        for path in ("/generate", "/generate?key=sk-alice", "/GENERATE", "//generate", "/nothing", "/flush_cache"):
            assert (await door.post(path, json=WORK, headers=headers)).status_code == 401, (path, headers)


async def test_tenants_work_and_operators_command(door: httpx.AsyncClient, backend: FakeBackend) -> None:
    for headers in (ALICE, BOB, CAROL, ADMIN, {"authorization": "bearer  sk-alice"}, {"x-api-key": "own"}):
        answer = await door.post("/generate", json=WORK, headers=headers)
        assert answer.status_code == 200, answer.text
        assert (await door.get("/v1/models", headers=headers)).status_code == 200
    for path in ("/flush_cache", "/pause_generation", "/continue_generation"):
        answer = await door.post(path, json={}, headers=ALICE)
        assert answer.status_code == 403
        assert answer.json()["error"]["type"] == "permission_error"
    assert backend.operations == []
    assert (await door.post("/flush_cache", headers=ADMIN)).status_code == 200
    assert [operation.name for operation in backend.operations] == ["flush_cache"]


async def test_no_answer_shows_a_secret(door: httpx.AsyncClient, guarded: TokenizerService) -> None:
    for path in ("/get_server_info", "/server_info", "/metrics", "/openapi.json"):
        text = (await door.get(path, headers=ALICE)).text
        for secret in ("sk-alice", "sk-bob", "sk-admin", '"own"'):
            assert secret not in text, path


async def test_each_tenant_has_a_cache_of_its_own(door: httpx.AsyncClient, backend: FakeBackend) -> None:
    async def namespace(headers: dict[str, str], **fields: Any) -> bytes:
        answer = await door.post("/generate", json={**WORK, **fields}, headers=headers)
        assert answer.status_code == 200
        return backend.requests[-1].namespace

    alice, bob, carol = [await namespace(key) for key in (ALICE, BOB, CAROL)]
    assert await namespace(ALICE) == alice
    assert bob == carol  # they share one because the operator says so
    narrowed = await namespace(ALICE, cache_salt="x")
    assert await namespace(BOB, cache_salt="x") == await namespace(CAROL, cache_salt="x")
    seen = [alice, bob, narrowed, await namespace(BOB, cache_salt="x"), await namespace(ADMIN), b"x"]
    assert len(set(seen)) == len(seen)
    # nobody reaches another's by naming it
    for salt in ("alice", "name:alice", alice.hex(), "lab", "shared:lab"):
        for fields in ({"cache_salt": salt}, {"extra_key": salt}):
            assert await namespace(BOB, **fields) not in (alice, bob)


async def test_ids_of_tenants_never_meet(door: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.script = lambda request: held()
    body = {**WORK, "rid": "same"}
    running = [asyncio.ensure_future(door.post("/generate", json=body, headers=key)) for key in (ALICE, BOB)]
    await backend.until(lambda: backend.live == 2)
    assert sorted(r.request_id for r in backend.requests) == ["alice:same", "bob:same"]
    again = await door.post("/generate", json=body, headers=ALICE)
    assert again.json()["error"]["code"] == "duplicate_id"
    assert "alice" not in again.json()["error"]["message"]
    for rid in ("bob:same", "bob", "sam", ""):
        await door.post("/abort_request", json={"rid": rid}, headers=ALICE)
    assert (await door.post("/abort_request", json={"rid": "same"}, headers=ALICE)).status_code == 200
    assert (await running[0]).json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert (await running[0]).json()["meta_info"]["id"] == "same"
    assert backend.live == 1
    assert backend.aborted == ["alice:same"]
    assert (await door.post("/abort_request", json={"abort_all": True}, headers=ALICE)).status_code == 200
    assert backend.live == 1
    assert (await door.post("/abort_request", json={"rid": "same"}, headers=ADMIN)).status_code == 200
    assert (await running[1]).json()["meta_info"]["finish_reason"]["type"] == "abort"


async def test_an_operator_ends_everybodys_requests(door: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.script = lambda request: held()
    running = [asyncio.ensure_future(door.post("/generate", json=WORK, headers=key)) for key in (ALICE, BOB)]
    await backend.until(lambda: backend.live == 2)
    await door.post("/abort_request", json={"abort_all": True}, headers=ADMIN)
    for answer in await asyncio.gather(*running):
        assert answer.json()["meta_info"]["finish_reason"]["type"] == "abort"


async def test_a_tenant_beyond_its_budget_is_told_when_to_come_back(
    door: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.reject = RequestRejected("", "rate_limited", "alice may send 600 requests a minute", 300.0)
    for stream in (False, True):
        answer = await door.post("/generate", json={**WORK, "stream": stream}, headers=ALICE)
        assert answer.status_code == 429
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert "600 requests" in error["message"]
        assert 200 < int(answer.headers["retry-after"]) <= 300
    assert len(backend.requests) == 1  # the second was refused by what the first was told
    backend.reject = None
    assert (await door.post("/generate", json=WORK, headers=BOB)).status_code == 200
    assert (await door.get("/v1/models", headers=ALICE)).status_code == 200
    assert (await door.post("/tokenize", json={"prompt": "hello"}, headers=ALICE)).status_code == 200


async def test_an_http_request_counts_once(door: httpx.AsyncClient, backend: FakeBackend) -> None:
    body = {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 1, "n": 2}, "rid": "r"}
    assert (await door.post("/generate", json=body, headers=ALICE)).status_code == 200
    assert [request.counted for request in backend.requests] == [True, False, False, False]
    assert {request.tenant for request in backend.requests} == {"alice"}
    assert all("r" in request.names for request in backend.requests)


async def test_only_an_admin_key_guards_only_commands(launch: Launcher) -> None:
    service = await launch(admin_api_key="sk-admin")
    async with httpx.AsyncClient(base_url=service.url) as client:
        assert (await client.post("/generate", json=WORK)).status_code == 200
        assert (await client.post("/flush_cache")).status_code == 401
        assert (await client.post("/flush_cache", headers=ADMIN)).status_code == 200
        assert (await client.post("/abort_request", json={"abort_all": True})).status_code == 403
        assert (await client.post("/abort_request", json={"rid": "x"})).status_code == 200


async def test_metrics_may_be_open_and_proxies_may_keep_their_prefix(launch: Launcher) -> None:
    service = await launch(api_key="a,b", public_metrics=True, fastapi_root_path="/llm")
    async with httpx.AsyncClient(base_url=service.url) as client:
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.get("/get_server_info")).status_code == 401
        for key in "ab":
            for prefix in ("", "/llm"):
                headers = {"authorization": f"Bearer {key}"}
                assert (await client.post(f"{prefix}/generate", json=WORK, headers=headers)).status_code == 200
                assert (await client.post(f"{prefix}/flush_cache", headers=headers)).status_code == 403


def test_one_key_cannot_mean_two(tmp_path: Path) -> None:
    with pytest.raises(TenantsError):
        Access([Tenant("a", ("k",)), Tenant("b", ("k",))], [])
    with pytest.raises(TenantsError):
        Access([Tenant("a", ("k",))], ["k"])


def test_every_key_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time to find a key, or none, does not tell which of them fits."""
    access = Access([Tenant(f"t{i}", (f"key{i}",)) for i in range(20)], ["operator"])
    compared = itertools.count()
    from services.tokenizer import access as module

    original = module.hmac.compare_digest
    monkeypatch.setattr(module.hmac, "compare_digest", lambda a, b: (next(compared), original(a, b))[1])
    counts = []
    for key in ("key0", "key19", "operator", "none"):
        start = next(compared)
        access._holder(key.encode())
        counts.append(next(compared) - start)
    assert len(set(counts)) == 1


GUARDED = Access([Tenant("a", ("key-of-a",)), Tenant("b", ("key-of-b",))], ["key-of-operator"], root_path="/llm")
HEADERS = st.lists(
    st.tuples(
        st.sampled_from([b"authorization", b"x-api-key", b"host", b"cookie", b"x-forwarded-for", b"x-original-url"]),
        st.binary(max_size=30)
        | st.sampled_from([b"Bearer ", b"Bearer key-of-", b"Bearer *", b"/health", b"key-of-a "]),
    ),
    max_size=4,
)
PATHS = st.text(max_size=30) | st.builds(
    "".join,
    st.lists(
        st.sampled_from(["/", "//", "llm", "health", "ready", "generate", "v1", "..", "%2e", "\x00", ";"]), max_size=6
    ),
)


def outcome(path: str, headers: list[tuple[bytes, bytes]]) -> tuple[int, str]:
    """Status of a refusal and nothing, or 0 and the tenant."""
    try:
        call = GUARDED.admit({"path": path, "headers": headers, "method": "POST"})
    except ApiError as error:
        return error.status, ""
    assert not call.is_operator
    assert not call.tenant or call.namespace(b"x") not in (b"x", call.namespace(b""))
    return 0, call.tenant


@given(path=PATHS, headers=HEADERS)
def test_nothing_but_a_key_opens_a_path(path: str, headers: list[tuple[bytes, bytes]]) -> None:
    path = "/" + path
    is_open = path.removeprefix("/llm") in ("/health", "/ready", "/ping")
    assert outcome(path, headers) == ((0, "") if is_open else (401, ""))
    for key, tenant in ((b"key-of-a", "a"), (b"key-of-b", "b")):
        found = outcome(path, [(b"authorization", b"Bearer " + key), *headers])
        assert found in ([(0, "")] if is_open else [(0, tenant), (403, "")])


@pytest.mark.parametrize("given_keys", [{"api_key": ","}, {"api_key": " "}, {"admin_api_key": " , "}])
def test_keys_that_are_none_open_nothing(given_keys: dict[str, str]) -> None:
    with pytest.raises(TenantsError, match="holds no key"):
        Access.of(TokenizerConfig(**given_keys))
