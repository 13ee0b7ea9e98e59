"""A stand-in for the weather API that the articles' program calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from radixfleet import allow_api_hosts, forbid_api_hosts


class _Weather(BaseHTTPRequestHandler):
    server: Any

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads it."""

    def do_GET(self) -> None:
        self.server.asked.append(urlsplit(self.path))
        self.send_response(200)
        self.end_headers()
        self.wfile.write("晴，25℃".encode())


@contextmanager
def fake_weather() -> Iterator[Any]:
    """Stands for api.weather.com."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Weather)
    server.asked = []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    allow_api_hosts("api.weather.com", at=f"http://127.0.0.1:{server.server_address[1]}")
    yield server
    forbid_api_hosts()
    server.shutdown()
    server.server_close()
    thread.join(5)
