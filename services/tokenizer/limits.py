"""Remembers which tenants are beyond their budgets, so that refusing them again costs nothing.

The scheduler counts and decides; this only repeats what it said for as long as it said.
"""

from __future__ import annotations

from services.tokenizer.errors import ApiError
from shared.clock import Clock


class Limits:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until: dict[str, tuple[float, str]] = {}

    def block(self, tenant: str, seconds: float, detail: str) -> None:
        self._until[tenant] = (self._clock.now() + seconds, detail)

    def check(self, tenant: str) -> None:
        """Raises ApiError (429 with the time left) while the tenant is to wait."""
        until, detail = self._until.get(tenant, (0.0, ""))
        left = until - self._clock.now()
        if left > 0:
            raise ApiError(429, detail, code="rate_limit_exceeded", retry_after=left)
        self._until.pop(tenant, None)
