"""A request is its tokens; seat, pages and worker can be taken away and rebuilt. Leaves every decision to others."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING

from services.scheduler.scores import ScoreLog
from shared import ints
from shared.messages.request import GenerateRequest
from shared.messages.stream import Finish, Scores

if TYPE_CHECKING:
    from services.scheduler.foresight import Foresight
    from services.scheduler.guide import Guide
    from services.scheduler.inflight import Ahead
    from services.scheduler.migration import Transfer
    from services.scheduler.outbox import Detokenizer
    from services.scheduler.placement_choice import Placed
    from services.scheduler.radix_tree import Lease
    from services.scheduler.worker import Worker


class State(enum.Enum):
    WAITING = "waiting"  # has neither seat nor rows in flight
    COMPILING = "compiling"  # its constraint is being compiled
    TRANSFERRING = "transferring"  # as waiting, while its pages are on the way to its worker; only in reports
    RUNNING = "running"  # has a seat
    SUSPENDED = "suspended"  # lost its seat, results are still to come
    FINISHED = "finished"  # kept until its frontend holds the last chunk


class Request:
    """One choice of one prompt.

    Positions are absolute. `dispatched` positions have their KV written by dispatched commands:

        |<-------- prompt -------->|<------ output ------>|
        |<---- prefill_end (known at admission) --->|
        0 ......... dispatched                            row_end: no decode row starts here or later

    A row whose last input is position p samples output p + 1 - prompt_length. Once `dispatched` has
    reached `prefill_end`, each decode row writes one position more.
    """

    __slots__ = (
        "admitted",
        "ahead",
        "arrival",
        "barrier",
        "blocked_until",
        "blocker",
        "cached_tokens",
        "cancel",
        "capacity",
        "check_at",
        "deadline",
        "detokenizer",
        "dirty",
        "dispatched",
        "failed_transfers",
        "faults",
        "finish",
        "finished_at",
        "foresight",
        "frontend",
        "guessed",
        "guide",
        "hit_age",
        "hit_tokens",
        "inflight_rows",
        "lease",
        "max_tokens",
        "message",
        "min_tokens",
        "opened",
        "output",
        "own",
        "pages",
        "placement",
        "plain",
        "prefill_end",
        "prefill_tokens",
        "prompt_length",
        "prompt_scores",
        "prompt_scores_sent",
        "request_id",
        "resumed",
        "retractions",
        "row_end",
        "sampling",
        "scores",
        "sent",
        "sequence",
        "slot",
        "state",
        "stops",
        "told",
        "transfer",
        "worker",
    )

    def __init__(self, message: GenerateRequest, frontend: bytes, arrival: float, sequence: int) -> None:
        sampling = message.sampling
        self.message = message
        self.request_id = message.request_id
        self.frontend = frontend
        self.sampling = sampling
        self.arrival = arrival
        self.sequence = sequence  # order of arrival, kept through every resume
        self.deadline = arrival + message.deadline_s if message.deadline_s > 0 else 0.0
        self.prompt_length = ints.count(message.prompt_ids)
        self.output = ints.unpack(message.output_ids)
        self.max_tokens = sampling.max_tokens
        self.min_tokens = sampling.min_new_tokens
        self.stops = frozenset(sampling.stop_token_ids)
        self.row_end = self.prompt_length + sampling.max_tokens - 1
        self.state = State.WAITING
        self.finish: Finish | None = None
        self.finished_at = 0.0
        self.admitted = False  # had a seat at least once
        self.cached_tokens = 0  # prompt tokens that were not computed when it first got a seat
        self.retractions = 0
        self.faults = 0  # workers that failed while computing it
        self.resumed = False
        self.inflight_rows = 0
        self.guide: Guide | None = None  # leads a constrained request; survives every suspend and resume
        self.foresight: Foresight | None = None  # guesses its next tokens, where guesses may be sent
        self.cancel: Callable[[], None] | None = None  # gives up compiling its constraint
        self.blocker: Request | None = None  # computes the next page this one needs
        self.blocked_until = 0
        self.placement: Placed | None = None  # where it was to go a moment ago
        self.transfer: Transfer | None = None  # brings pages to where it will go
        self.failed_transfers = 0  # it waited for in vain
        self.hit_tokens = 0  # a recent longest match, for the order of the queue
        self.hit_age = -1.0
        self._reset_seat()
        self.detokenizer: Detokenizer | None = None
        self.opened = False
        self.sent = 0  # output tokens the detokenizer has
        self.told = False  # the detokenizer knows that it has ended
        self.dirty = False  # queued in the outbox
        self.prompt_scores_sent = False
        self.plain = sampling.logprobs < 0 and sampling.prompt_logprobs_from < 0  # no scores to send
        self.scores = ScoreLog(len(self.output), sampling)
        self.prompt_scores = ScoreLog(max(sampling.prompt_logprobs_from, 0), sampling)

    def _reset_seat(self) -> None:
        self.worker: Worker | None = None
        self.slot = -1
        self.lease: Lease | None = None
        self.pages: array[int] = array("i")  # the whole table: shared ones first
        self.own: set[int] = set()  # those of `pages` that the tree does not hold
        self.dispatched = 0
        self.prefill_end = 0
        self.prefill_tokens = b""  # all tokens of the prefill, while it lasts
        self.capacity = 0  # positions the pages hold
        self.barrier = 0  # first position whose decode row needs the planner's attention
        self.check_at = 0  # output length at which a result needs more than an append
        self.guessed = b""  # the guesses of its row in flight, int32
        self.ahead: Ahead | None = None  # what its next row, which is in flight too, expects

    @property
    def namespace(self) -> bytes:
        return self.message.namespace

    @property
    def known(self) -> int:
        """Tokens whose values are known: prompt and settled output."""
        return self.prompt_length + len(self.output)

    @property
    def total_tokens(self) -> int:
        """The most it can ever have, prompt and output."""
        return self.prompt_length + self.max_tokens

    @property
    def live(self) -> bool:
        return self.state is not State.FINISHED

    @property
    def scores_prompt(self) -> bool:
        return self.sampling.prompt_logprobs_from >= 0

    @property
    def needs_history(self) -> bool:
        s = self.sampling
        return s.frequency_penalty != 0 or s.presence_penalty != 0 or s.repetition_penalty != 1

    @property
    def written(self) -> int:
        """Known tokens whose KV is certainly in the pages, for commands that come later.

        Prefill rows are always executed; a decode row in flight may be skipped by the worker, so the
        last settled token does not count.
        """
        return min(self.dispatched, max(self.prefill_end, self.known - 1))

    @property
    def prompt_scores_missing(self) -> int:
        """First prompt position that still wants a score; `prompt_length` where none does."""
        if not self.scores_prompt:
            return self.prompt_length
        return min(self.prompt_scores.end, self.prompt_length)

    def tokens(self, start: int, end: int) -> bytes:
        """The known tokens at positions start .. end - 1, int32 each."""
        n = self.prompt_length
        prompt = self.message.prompt_ids
        if end <= n:
            return prompt[4 * start : 4 * end]
        if start >= n:
            return ints.pack(self.output[start - n : end - n])
        return prompt[4 * start :] + ints.pack(self.output[: end - n])

    def drop_scores(self) -> None:
        """Go on without any: what came does not fit together."""
        self.plain = True
        self.scores = ScoreLog(0, self.sampling)
        self.prompt_scores = ScoreLog(self.prompt_length, self.sampling)

    def complete_prompt_scores(self) -> Scores | None:
        """All prompt scores that were asked for, or None as long as one is missing."""
        if self.prompt_scores_missing < self.prompt_length:
            return None
        return self.prompt_scores.received()

    def token(self, position: int) -> int:
        return ints.unpack(self.tokens(position, position + 1))[0]

    def match_limit(self) -> int:
        """How many of the known tokens a cache hit may cover: the last is always computed, and the score
        of a prompt token needs the logits before it."""
        limit = self.known - 1
        missing = self.prompt_scores_missing
        return limit if missing >= self.prompt_length else min(limit, max(missing - 1, 0))

    def set_check(self, page_size: int) -> None:
        """Next output length at which a page has been filled or the limit is reached."""
        if self.guide is not None:
            self.check_at = 0  # every token of it is looked at
            return
        settled = self.known - 1
        to_fill = page_size - settled % page_size
        self.check_at = min(len(self.output) + to_fill, self.max_tokens)

    def set_barrier(self, page_size: int) -> None:
        self.capacity = len(self.pages) * page_size
        self.barrier = min(self.capacity, self.row_end - 1)
