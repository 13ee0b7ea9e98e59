"""Finds requests by the names their callers know, whichever frontend they came through.

Leaves aborting to the handlers and who may abort whom to the tokenizer.
"""

from __future__ import annotations

from services.scheduler.request import Request


class Names:
    """From name to the requests of that name, of all tenants."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, Request]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def add(self, request: Request) -> None:
        for name in request.message.names:
            self._found.setdefault(name, {})[request.request_id] = request

    def discard(self, request: Request) -> None:
        for name in request.message.names:
            requests = self._found.get(name)
            if requests is not None and requests.get(request.request_id) is request:
                del requests[request.request_id]
                if not requests:
                    del self._found[name]

    def find(self, name: str, tenant: str) -> list[Request]:
        """Requests of that name; of one tenant, or of anybody where `tenant` is empty."""
        found = self._found.get(name, {})
        return [request for request in found.values() if not tenant or request.message.tenant == tenant]
