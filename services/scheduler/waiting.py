"""The queue of requests without a seat: order, limits, ageing. Leaves who gets which seat to placement and planner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Literal

from services.scheduler.request import Request

LPM_WINDOW = 128  # requests whose matches are compared
HIT_MAX_AGE_S = 0.1  # a match this old is good enough to sort by


class WaitingQueue:
    """Resumed requests first (oldest first), then by priority, then by arrival or longest match.

    `longest_match(request)` is asked under lpm only. Every request is in at most one place.
    """

    def __init__(
        self,
        policy: Literal["fcfs", "lpm"] = "fcfs",
        ageing_seconds: float = 5.0,
        longest_match: Callable[[Request], int] | None = None,
    ) -> None:
        self._resumed: dict[str, Request] = {}
        self._in_disorder = False  # the resumed ones are sorted when next asked for
        self._fresh: dict[int, dict[str, Request]] = {}  # by priority, each in order of arrival
        self._policy = policy
        self._ageing = ageing_seconds
        self._longest_match = longest_match or (lambda request: 0)
        self._count = 0
        self.tokens = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        return iter([*self._resumed.values(), *chain.from_iterable(q.values() for q in self._fresh.values())])

    def __contains__(self, request: Request) -> bool:
        line = self._line(request)
        return line is not None and line.get(request.request_id) is request

    def add(self, request: Request) -> None:
        if request.resumed:
            self._resumed[request.request_id] = request
            self._in_disorder = True
        else:
            self._fresh.setdefault(request.message.priority, {})[request.request_id] = request
        self._count += 1
        self.tokens += request.known

    def remove(self, request: Request) -> None:
        """Take one out; does nothing where it is not queued."""
        if request not in self:
            return
        line = self._line(request)
        assert line is not None
        del line[request.request_id]
        if not line and line is not self._resumed:
            del self._fresh[request.message.priority]
        self._count -= 1
        self.tokens -= request.known

    def in_order(self, now: float) -> Iterator[Request]:
        """Who should be served, first to last. The queue must not change while this is read."""
        if self._in_disorder:
            self._in_disorder = False
            ordered = sorted(self._resumed.values(), key=lambda r: (-r.message.priority, r.sequence))
            self._resumed = {request.request_id: request for request in ordered}
        fresh = chain.from_iterable(self._fresh[priority].values() for priority in sorted(self._fresh, reverse=True))
        if self._policy == "lpm":
            return chain(self._resumed.values(), self._by_match(list(islice(fresh, LPM_WINDOW)), now))
        return chain(self._resumed.values(), fresh)

    def _by_match(self, window: list[Request], now: float) -> list[Request]:
        for request in window:
            if request.hit_age < 0 or now - request.hit_age > HIT_MAX_AGE_S:
                request.hit_tokens = self._longest_match(request)
                request.hit_age = now
        aged = [request for request in window if now - request.arrival >= self._ageing]
        young = [request for request in window if now - request.arrival < self._ageing]
        young.sort(key=lambda r: (-r.message.priority, -r.hit_tokens, r.sequence))
        return aged + young

    def _line(self, request: Request) -> dict[str, Request] | None:
        return self._resumed if request.resumed else self._fresh.get(request.message.priority)
