"""API calls in the middle of a program: made from this process, only to hosts its author allowed.

    allow_api_hosts("api.weather.com")                 https and http, each at its own port
    allow_api_hosts("127.0.0.1:8080", timeout=2.0)     this port only

Answers are bounded in time and size, and redirects are not followed. Leaves where the text goes to evaluate.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from radixfleet.lang.errors import ApiCallError
from radixfleet.lang.ir import ApiCall, Expr, expressions_in

DEFAULT_TIMEOUT_S = 10.0
DEFAULT_MAX_BYTES = 64 * 1024
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Allowed:
    """One entry of the allow-list. `port` None: the scheme's own."""

    host: str
    port: int | None
    timeout: float
    max_bytes: int
    at: httpx.URL | None


_allowed: dict[tuple[str, int | None], Allowed] = {}
_lock = threading.Lock()


def allow_api_hosts(
    *hosts: str, timeout: float = DEFAULT_TIMEOUT_S, max_bytes: int = DEFAULT_MAX_BYTES, at: str | None = None
) -> None:
    """Let programs of this process call these hosts (`name` or `name:port`).

    `timeout`: seconds for a whole call; `max_bytes`: the longest answer. Both can be set for a single gen(), too.
    `at` is another address that answers for them, such as a test's own server: "http://127.0.0.1:8080".
    Raises ValueError for what is no host.
    """
    stand_in = httpx.URL(at) if at is not None else None
    if stand_in is not None and (stand_in.scheme not in _PORTS or not stand_in.host):
        raise ValueError(f"not an address: {at!r}; write it like 'http://127.0.0.1:8080'")
    for host in hosts:
        url = httpx.URL(f"//{host}")
        if not url.host or url.path not in ("", "/") or "://" in host:
            raise ValueError(f"not a host: {host!r}; write it like 'api.example.com' or '127.0.0.1:8080'")
        with _lock:
            _allowed[url.host, url.port] = Allowed(url.host, url.port, timeout, max_bytes, stand_in)


def forbid_api_hosts(*hosts: str) -> None:
    """Take hosts off the allow-list; without arguments all of them."""
    with _lock:
        for key in (
            list(_allowed) if not hosts else [(httpx.URL(f"//{h}").host, httpx.URL(f"//{h}").port) for h in hosts]
        ):
            _allowed.pop(key, None)


def perform(call: ApiCall, resolve: Callable[[Any], str]) -> str:
    """The answer as text. `resolve` gives the text of a value that may mention expressions. Raises ApiCallError."""
    params = {name: _plain(value, resolve) for name, value in call.params.items()}
    if callable(call.target):
        answer = call.target(**params)
        return answer_text(asyncio.run(answer) if inspect.iscoroutine(answer) else answer)
    headers = {name: resolve(value) for name, value in call.headers.items()}
    return _fetch(call, resolve(call.target), params, headers)


def answer_text(value: Any) -> str:
    """What a Python function returned, as a model reads it: text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _plain(value: Any, resolve: Callable[[Any], str]) -> Any:
    if isinstance(value, str | Expr):
        return resolve(value)
    if next(expressions_in(value), None) is None:
        return value
    if isinstance(value, Mapping):
        return {name: _plain(inner, resolve) for name, inner in value.items()}
    return [_plain(inner, resolve) for inner in value]


def _fetch(call: ApiCall, address: str, params: dict[str, Any], headers: dict[str, str]) -> str:
    who = f"gen({call.name!r})"
    try:
        url = httpx.URL(address)
    except httpx.InvalidURL as error:
        raise ApiCallError(f"{who}: api_url is no address: {address!r} ({error})") from error
    entry = _entry(who, url)
    timeout = call.timeout if call.timeout is not None else entry.timeout
    limit = call.max_bytes if call.max_bytes is not None else entry.max_bytes
    target = url.copy_merge_params(params)
    if entry.at is not None:
        target = target.copy_with(scheme=entry.at.scheme, host=entry.at.host, port=entry.at.port)
    try:
        status, text = asyncio.run(_get(target, headers, limit, timeout))
    except (TimeoutError, httpx.TimeoutException) as error:
        raise ApiCallError(f"{who}: {url.host} did not answer within {timeout:g} s") from error
    except _TooLong as error:
        raise ApiCallError(f"{who}: the answer of {url.host} is longer than {limit} bytes") from error
    except (httpx.HTTPError, UnicodeError) as error:
        raise ApiCallError(f"{who}: the call to {url.host} failed: {error or type(error).__name__}") from error
    if status >= 300:
        raise ApiCallError(f"{who}: {url.host} answered with status {status}: {text[:300]}")
    return text


class _TooLong(Exception):
    pass


async def _get(target: httpx.URL, headers: dict[str, str], limit: int, seconds: float) -> tuple[int, str]:
    """Status and text. In a loop of its own, because only there one time-out covers a server that drips."""
    body = bytearray()
    async with (
        asyncio.timeout(seconds),
        httpx.AsyncClient(timeout=seconds, follow_redirects=False) as client,
        client.stream("GET", target, headers=headers) as response,
    ):
        async for piece in response.aiter_bytes():
            body += piece
            if len(body) > limit:
                raise _TooLong
    return response.status_code, body.decode(response.encoding or "utf-8", "replace")


def _entry(who: str, url: httpx.URL) -> Allowed:
    if url.scheme not in _PORTS or not url.host:
        raise ApiCallError(f"{who}: api_url must be an http or https address, not {str(url)!r}")
    port = url.port or _PORTS[url.scheme]
    with _lock:
        found = _allowed.get((url.host, port))
        if found is None and port == _PORTS[url.scheme]:
            found = _allowed.get((url.host, None))
    if found is None:
        name = url.host if port == _PORTS[url.scheme] else f"{url.host}:{port}"
        raise ApiCallError(
            f"{who} wants to call {name}, which is not on the allow-list of API hosts. "
            f"To allow it: radixfleet.allow_api_hosts({name!r})"
        )
    return found
