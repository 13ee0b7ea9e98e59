"""One server over HTTP: reused connections, time-outs, and failures in the server's own words.

Leaves what is asked to the backends.
"""

from __future__ import annotations

import ipaddress
import json
import ssl
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from radixfleet.backend.errors import BackendError, BackendTimeout

CONNECT_TIMEOUT_S = 10.0
_KEPT_CONNECTIONS = 256


class HttpServer:
    """Thread-safe. `timeout`: seconds without a byte from the server before a request is given up."""

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str],
        timeout: float,
        verify: bool | str | ssl.SSLContext | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        checked = ssl.create_default_context(cafile=verify) if isinstance(verify, str) else verify
        self._client = httpx.Client(
            headers=dict(headers),
            timeout=httpx.Timeout(timeout, connect=min(timeout, CONNECT_TIMEOUT_S), pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=_KEPT_CONNECTIONS),
            verify=True if checked is None else checked,
            trust_env=not _is_loopback(self.base_url),
        )
        self._close = weakref.finalize(self, self._client.close)

    def close(self) -> None:
        self._close()

    def get(self, path: str) -> Any:
        return self._request("GET", path, None)

    def post(self, path: str, body: Any = None) -> Any:
        """The JSON answer (its text, where it is none). Raises BackendError."""
        return self._request("POST", path, body)

    def events(self, path: str, body: Any) -> Iterator[dict[str, Any]]:
        """The JSON objects of a stream of server-sent events. Raises BackendError, also for errors in mid-stream."""
        url = self.base_url + path
        self._refuse_if_closed()
        try:
            with self._client.stream("POST", url, json=body) as response:
                if response.status_code >= 400:
                    response.read()
                    raise _refusal(response)
                for line in response.iter_lines():
                    if not line.startswith("data:"):
                        continue
                    data = line[5:].strip()
                    if data == "[DONE]":
                        return
                    yield _event(data)
        except httpx.HTTPError as error:
            raise self._failure(error) from error
        raise BackendError(f"{url} ended its stream before the answer was complete")

    def _request(self, method: str, path: str, body: Any) -> Any:
        self._refuse_if_closed()
        try:
            try:
                response = self._client.request(method, self.base_url + path, json=body)
            except httpx.RemoteProtocolError:  # the server closed an idle connection just as it was reused
                response = self._client.request(method, self.base_url + path, json=body)
        except httpx.HTTPError as error:
            raise self._failure(error) from error
        if response.status_code >= 400:
            raise _refusal(response)
        try:
            return response.json()
        except ValueError:
            return response.text

    def _refuse_if_closed(self) -> None:
        if self._client.is_closed:
            raise BackendError(f"the backend for {self.base_url} was closed")

    def _failure(self, error: httpx.HTTPError) -> BackendError:
        if isinstance(error, httpx.ConnectTimeout | httpx.ConnectError):
            return BackendError(f"no server answers at {self.base_url}: {error or type(error).__name__}")
        if isinstance(error, httpx.TimeoutException):
            return BackendTimeout(f"{self.base_url} did not answer in time ({type(error).__name__})")
        return BackendError(f"the connection to {self.base_url} broke: {error or type(error).__name__}")


def _event(data: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        raise BackendError(f"not JSON in the stream: {data[:200]!r}") from None
    if not isinstance(value, dict):
        raise BackendError(f"not an object in the stream: {data[:200]!r}")
    if "error" in value:
        raise BackendError(error_text(value) or data, _status_of(value["error"]))
    return value


def _refusal(response: httpx.Response) -> BackendError:
    try:
        words = error_text(response.json())
    except ValueError:
        words = response.text.strip()
    return BackendError(words or f"HTTP status {response.status_code}", response.status_code)


def error_text(body: Any) -> str:
    """What a server said in one of the usual envelopes; empty where it said nothing known."""
    if not isinstance(body, dict):
        return str(body) if body else ""
    error = body.get("error", body.get("detail", body.get("message", "")))
    if isinstance(error, dict):
        error = error.get("message", "")
    return str(error) if error else ""


def _status_of(error: Any) -> int | None:
    status = error.get("status") if isinstance(error, dict) else None
    return status if isinstance(status, int) else None


def _is_loopback(url: str) -> bool:
    """Proxies of the environment are never for a server on this machine."""
    host = httpx.URL(url).host
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
