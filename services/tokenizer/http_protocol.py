"""uvicorn's HTTP parser with bounds it lacks: how large a request's head may be and how long it may take.

What is no HTTP is answered in the one envelope. Leaves bodies to body and everything after the head to uvicorn.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.tokenizer.errors import ApiError

MAX_HEAD_BYTES = 64 << 10
HEAD_TIMEOUT_S = 30.0


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. A head that is too large or too slow is answered and the connection closed."""

    _head_bytes = 0  # of the head now arriving
    _in_head = False
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_of_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head and self._head_bytes + len(data) > MAX_HEAD_BYTES:
            self._refuse(ApiError(431, f"The request head is larger than {MAX_HEAD_BYTES} bytes."))
            return
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to what is no HTTP."""
        self._refuse(ApiError(400, msg, code="invalid_http"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = 0
        self._expect_head()

    def on_headers_complete(self) -> None:
        self._end_of_head()
        super().on_headers_complete()

    def _expect_head(self) -> None:
        if self._head_timer is None:
            timeout = ApiError(408, "The request head did not arrive in time.")
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._refuse, timeout)

    def _end_of_head(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _may_speak(self) -> bool:
        """No answer is under way or owed to a request that is whole: no words in between."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete or (cycle.more_body and not cycle.response_started)

    def _refuse(self, error: ApiError) -> None:
        self._end_of_head()
        if self.transport.is_closing():
            return
        if self._may_speak():
            body = error.body()
            head = f"HTTP/1.1 {error.status} {error.code}\r\ncontent-type: application/json\r\nconnection: close\r\n"
            self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()
