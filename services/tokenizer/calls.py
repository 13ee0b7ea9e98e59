"""Who calls and under which conditions: set once at the door, read where a request becomes work.

Leaves finding out who it is to access and what a tenant may use to the scheduler.
"""

from __future__ import annotations

import hashlib
import re
import time
from contextvars import ContextVar
from dataclasses import dataclass, field

from services.tokenizer.errors import ApiError

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


@dataclass(slots=True)
class Call:
    """One HTTP request. `tenant` is empty where no key is asked for, and for operators."""

    tenant: str = ""
    isolation: str = ""  # whose cache it uses; empty: everybody's
    is_operator: bool = True
    traceparent: str = ""
    labels: tuple[str, ...] = ()  # values of the custom labels that are counted
    timeout: float = 0.0  # seconds from `started`; 0: none
    started: float = field(default_factory=time.monotonic)
    _counted: bool = False

    def request_id(self, rid: str) -> str:
        """A caller's id as the other services know it: tenants cannot meet under one."""
        return f"{self.tenant}:{rid}" if self.tenant else rid

    def namespace(self, wished: bytes) -> bytes:
        """The cache namespace of a request: what the client wishes can only narrow what its key gives it."""
        if not self.isolation:
            return wished
        return hashlib.blake2b(self.isolation.encode() + b"\0" + wished, digest_size=16).digest()

    def limit_time(self, seconds: float | None) -> None:
        """The shorter of this and what was said before."""
        if seconds:
            self.timeout = min(self.timeout, seconds) if self.timeout else seconds

    def time_left(self) -> float:
        """Seconds, 0 where there is no limit. Raises ApiError where nothing is left."""
        if not self.timeout:
            return 0.0
        left = self.timeout - (time.monotonic() - self.started)
        if left <= 0:
            raise ApiError(408, "The request timed out before it could be sent.")
        return left

    def check_abort_all(self) -> None:
        """A tenant ends its own requests, an operator everybody's; nobody else may. Raises ApiError."""
        if not self.tenant and not self.is_operator:
            raise ApiError(403, "Ending all requests needs an operator's key.")

    def counts(self) -> bool:
        """True the first time: an HTTP request counts once against its tenant's rate."""
        first, self._counted = not self._counted, True
        return first


_current: ContextVar[Call] = ContextVar("call")


def begin(call: Call) -> None:
    """From now on `current` in this task and its children."""
    _current.set(call)


def current() -> Call:
    """The call at hand; outside of any, an operator's without limits."""
    return _current.get(None) or Call()


def trace_id(traceparent: str) -> str:
    """The trace id of a W3C traceparent header; empty where it is none."""
    match = _TRACEPARENT.fullmatch(traceparent)
    version, rest = traceparent[:2], match and match[2]
    return match[1] if match is not None and not (version == "00" and rest) else ""
