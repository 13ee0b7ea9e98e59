"""Who may come in: limits, lengths, life of the system. Leaves the wording for clients to the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping

from services.scheduler.fleet import Fleet
from services.scheduler.pins import Pins
from services.scheduler.request import Request
from services.scheduler.waiting import WaitingQueue
from shared import ints
from shared.clock import Clock
from shared.config import SchedulerConfig
from shared.messages.request import GenerateRequest, RejectCode, RequestRejected

RETRY_AFTER_S = 1.0


class Door:
    def __init__(
        self,
        config: SchedulerConfig,
        waiting: WaitingQueue,
        fleet: Fleet,
        requests: Mapping[str, Request],
        compiling: Mapping[str, Request],
        pins: Pins,
        clock: Clock,
    ) -> None:
        self.draining = False
        self._config = config
        self._waiting = waiting
        self._fleet = fleet
        self._requests = requests
        self._compiling = compiling
        self._pins = pins
        self._clock = clock

    def refuse(self, message: GenerateRequest) -> RequestRejected | None:
        """Why this request cannot come in, or None. Looks at the cheapest reasons first."""
        known = self._requests.get(message.request_id)
        if known is not None and known.live:
            return _rejected(message, "duplicate_id", "a request with this id is running")
        if self.draining:
            return _rejected(message, "draining", "the server is shutting down", RETRY_AFTER_S)
        if message.constraint is not None and not self._config.model_path:
            reason = "constraints are not available: the scheduler was started without a model_path"
            return _rejected(message, "bad_constraint", reason)
        return self._refuse_tokens(message) or self._refuse_load(message)

    def _refuse_tokens(self, message: GenerateRequest) -> RequestRejected | None:
        if not message.prompt_ids or len(message.prompt_ids) % ints.ITEM_BYTES:
            return _rejected(message, "internal", "the prompt is empty or not int32")
        if len(message.output_ids) % ints.ITEM_BYTES or message.sampling.max_tokens < 0:
            return _rejected(message, "internal", "malformed request")
        model = self._fleet.model
        if model is not None:
            ids = ints.unpack(message.prompt_ids + message.output_ids)
            if min(ids) < 0 or max(ids) >= model.vocab_size:
                return _rejected(message, "internal", f"a token id is outside the vocabulary of {model.vocab_size}")
        limit = self._fleet.max_request_tokens
        total = ints.count(message.prompt_ids) + max(message.sampling.max_tokens, ints.count(message.output_ids))
        if limit and total > limit:
            return _rejected(message, "too_long", f"prompt and output would have {total} tokens, the limit is {limit}")
        return None

    def _refuse_load(self, message: GenerateRequest) -> RequestRejected | None:
        config = self._config
        if not len(self._fleet) and self._clock.now() - self._fleet.changed_at > config.worker_grace:
            return _rejected(message, "no_worker", "no worker is connected", RETRY_AFTER_S)
        if message.output_ids or message.pin in self._pins:
            return None  # it was let in once, or is the next step of a script that was
        waiting = len(self._waiting) + len(self._compiling)
        if waiting >= config.max_queued_requests:
            detail = f"{waiting} requests are waiting"
        elif self._waiting.tokens + ints.count(message.prompt_ids) > config.max_queued_tokens:
            detail = f"{self._waiting.tokens} tokens are waiting"
        else:
            return None
        return _rejected(message, "queue_full", detail, RETRY_AFTER_S)


def _rejected(message: GenerateRequest, code: RejectCode, detail: str, retry_after_s: float = 0.0) -> RequestRejected:
    return RequestRejected(message.request_id, code, detail, retry_after_s)
