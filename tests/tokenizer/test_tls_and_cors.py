"""HTTPS and browsers, over real sockets."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import httpx
import pytest
import trustme

from radixfleet.errors import CommandError
from radixfleet.warmup import warm_up
from services.tokenizer import tls
from shared.config import TokenizerConfig
from tests.tokenizer.conftest import Launcher
from tests.tokenizer.fake_backend import FakeBackend
from tests.tokenizer.sse_reader import events

WORK = {"text": "hello", "sampling_params": {"max_new_tokens": 4}}
PAGE = "https://app.example"


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def files(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    issued = authority.issue_cert("127.0.0.1", "localhost")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    (folder / "cert.pem").write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    return {"ssl_certfile": str(folder / "cert.pem"), "ssl_keyfile": str(folder / "key.pem")}


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


async def test_https(launch: Launcher, authority: trustme.CA, files: dict[str, str]) -> None:
    service = await launch(**files)
    assert service.url.startswith("https://")
    async with httpx.AsyncClient(base_url=service.url, verify=trusting(authority), timeout=20) as client:
        assert (await client.get("/health")).status_code == 200
        async with client.stream("POST", "/generate", json={**WORK, "stream": True}) as answer:
            data = await answer.aread()
        assert events(data.decode())[-1]["meta_info"]["finish_reason"]["type"] == "length"
        assert data.endswith(b"data: [DONE]\n\n")
    async with httpx.AsyncClient(base_url=service.url, timeout=20) as client:
        with pytest.raises(httpx.ConnectError):  # nobody trusts that authority
            await client.get("/health")


async def test_what_is_no_tls_is_hung_up_on(launch: Launcher, authority: trustme.CA, files: dict[str, str]) -> None:
    service = await launch(**files)
    port = int(service.url.rpartition(":")[2])
    for data in (b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", b"\x00" * 600):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        async with asyncio.timeout(10):
            assert b"200 OK" not in await reader.read()
        writer.close()
    old = trusting(authority)
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await asyncio.open_connection("127.0.0.1", port, ssl=old)
    async with httpx.AsyncClient(base_url=service.url, verify=trusting(authority)) as client:
        assert (await client.get("/health")).status_code == 200


def test_certificates_that_cannot_be_used_end_the_start(files: dict[str, str], tmp_path: Path) -> None:
    tls.require(TokenizerConfig())
    tls.require(TokenizerConfig(**files))
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("nothing")
    for fields in (
        {"ssl_keyfile": files["ssl_keyfile"]},
        {"ssl_certfile": str(tmp_path / "missing.pem")},
        {"ssl_certfile": str(wrong)},
        {**files, "ssl_keyfile": files["ssl_certfile"]},
    ):
        with pytest.raises(SystemExit, match="radixfleet: "):
            tls.require(TokenizerConfig(**fields))


async def test_the_launchers_warm_up_needs_no_key_of_a_tenant(
    launch: Launcher, backend: FakeBackend, files: dict[str, str], authority: trustme.CA, tmp_path: Path
) -> None:
    elsewhere = authority.issue_cert("api.example")  # made for the name clients use
    elsewhere.private_key_and_cert_chain_pem.write_to_path(tmp_path / "both.pem")
    for tls_files in (files, {"ssl_certfile": str(tmp_path / "both.pem")}):
        service = await launch(**tls_files, api_key="tenant", launch_key="own")
        await warm_up(service.url, "own", tls_files["ssl_certfile"])
        with pytest.raises(CommandError, match="status 401"):
            await warm_up(service.url, "another", tls_files["ssl_certfile"])
    with pytest.raises(CommandError, match="CERTIFICATE_VERIFY_FAILED"):
        await warm_up(service.url, "own", files["ssl_certfile"])
    assert len(backend.requests) == 2
    plain = await launch()
    await warm_up(plain.url, "whatever", "")


async def test_no_page_may_call_unless_it_is_named(launch: Launcher) -> None:
    service = await launch()
    async with httpx.AsyncClient(base_url=service.url) as client:
        asked = {"origin": PAGE, "access-control-request-method": "POST"}
        assert (await client.options("/generate", headers=asked)).status_code == 405
        answer = await client.post("/generate", json=WORK, headers={"origin": PAGE})
        assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_named_pages_may_call(launch: Launcher) -> None:
    service = await launch(cors_origins=f"{PAGE}/, http://localhost:3000", api_key="secret")
    async with httpx.AsyncClient(base_url=service.url) as client:
        asked = {
            "origin": PAGE,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization, content-type, x-stainless-os",
        }
        answer = await client.options("/v1/chat/completions", headers=asked)  # without a key: browsers send none
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "authorization" in answer.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in answer.headers
        answer = await client.options("/generate", headers={**asked, "origin": "https://evil.example"})
        assert answer.status_code == 400
        assert "access-control-allow-origin" not in answer.headers
        # refusals can be read by the page as well
        for headers, status in (({}, 401), ({"authorization": "Bearer secret"}, 200)):
            answer = await client.post("/generate", json=WORK, headers={"origin": PAGE, **headers})
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == PAGE
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
        answer = await client.post("/generate", json=WORK, headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in answer.headers


async def test_any_page(launch: Launcher) -> None:
    service = await launch(cors_origins="*")
    async with httpx.AsyncClient(base_url=service.url) as client:
        answer = await client.post("/generate", json=WORK, headers={"origin": PAGE})
        assert answer.headers["access-control-allow-origin"] == "*"
