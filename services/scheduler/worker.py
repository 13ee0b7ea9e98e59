"""One worker as the scheduler sees it: seats, pages, steps in flight, age. Leaves sockets to the fleet."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass
from typing import Literal

from services.scheduler.inflight import InflightStep, SharedGroups
from services.scheduler.pace import Pace
from services.scheduler.page_pool import PagePool
from services.scheduler.request import Request
from services.scheduler.step_cost import StepCost
from shared import ints
from shared.messages.control import Heartbeat
from shared.messages.kv import KvStore
from shared.messages.request import WorkerStatus
from shared.messages.step import WorkerHello


class Tier:
    """Pages that a worker keeps beyond its device. `key` names them in the tree; a copy's ready_step is an order."""

    def __init__(self, worker_key: str, name: Literal["host", "disk"], num_pages: int) -> None:
        self.name: Literal["host", "disk"] = name
        self.key = f"{worker_key}#{name}"
        self.pool = PagePool(num_pages)
        self.order = 0  # the last one given
        self.settled = 0  # the last one carried out
        self.under_way = 0  # pages of the orders in between
        self.sizes: deque[int] = deque()  # of each of them


@dataclass(slots=True)
class UnloggedPrefills:
    """What the next line about prefills will say."""

    sequences: int = 0
    new_tokens: int = 0
    cached_tokens: int = 0
    usage: float = 0.0
    running: int = 0
    queued: int = 0


class Worker:
    """All of it is rebuilt from the hello of the next incarnation."""

    def __init__(self, identity: bytes, hello: WorkerHello, depth: int, seats: int, step_tokens: int, now: float):
        self.identity = identity
        self.key = identity.decode()
        self.hello = hello
        self.worker_id = hello.worker_id
        self.depth = depth  # steps that may be in flight
        self.seats = seats  # most requests with a slot
        self.step_tokens = step_tokens  # most tokens of one step
        # One page stays out: a request alone may need every other page while one is the source of its copy.
        self.max_request_tokens = min(hello.max_context, (hello.num_pages - 1) * hello.page_size)
        self.pool = PagePool(hello.num_pages)
        self.free_slots = list(range(hello.max_slots - 1, -1, -1))
        self.running: dict[int, Request] = {}  # by slot
        self.guided: dict[int, Request] = {}  # those of `running` that obey a constraint
        self.prefilling: list[Request] = []  # those with prompt left to dispatch, oldest admission first
        self.decoding: list[Request] | None = None  # None: to be collected again; the list itself never changes
        self.decode_slots = b""
        self.max_drafts = 0  # most guesses of one row
        self.keeps_hidden = False  # states of prompts' last tokens, in `pool.hidden`
        self.drafting: dict[int, int] = {}  # by slot: guesses its request sends in the step planned last
        self.held_step = -1  # the step that waits for the results before it
        self.cost = StepCost()
        self.groups = SharedGroups()  # among `grouped`, the decode rows they were found in
        self.grouped: list[Request] | None = None
        self.regroup_at = 0  # the step from which they may be found anew
        self.closes: array[int] = array("i")  # slots the next command closes
        self.inflight: deque[InflightStep] = deque()
        self.next_step_id = 0
        self.pace = Pace()
        self.masking = False  # the masks of its oldest step are being filled
        self.masks_asked = -1  # the last step whose masks were asked for
        self.shortage = 0.0  # how short of pages it was lately, 0 .. 1
        self.candidates: list[Request] = []  # who may be admitted in this turn
        self.last_heard = now
        self.head_since = now  # when the oldest step in flight became the oldest, or the last one came back
        self.heartbeat: Heartbeat | None = None
        self.draining = False
        self.drain_until = 0.0
        self.needed_until = 0.0  # by then its pages must have been moved
        self.emigrants: list[Request] = []  # requests that were moved away and may want their pages
        self.transfers: set[int] = set()  # in and out
        self.quarantine: dict[int, list[int]] = {}  # by transfer: pages it is being sent
        self.orders: deque[KvStore] = deque()  # to be sent before any other message
        self.tiers: dict[str, Tier] = {}  # beyond its device, the fastest first
        self.pages_in = 0
        self.pages_out = 0
        self.prefill_rate = 0.0  # tokens/s, smoothed; 0: not measured yet
        self.cached_tokens = 0
        self.computed_tokens = 0
        self.decoded_tokens = 0
        self.decode_steps = 0
        self.tokens_at_log = 0
        self.logged_at = now
        self.unlogged = UnloggedPrefills()
        self.prefill_logged_at = 0.0

    @property
    def has_credit(self) -> bool:
        return len(self.inflight) < self.depth

    @property
    def settled_step(self) -> int:
        """The last step whose result has come."""
        return (self.inflight[0].step_id if self.inflight else self.next_step_id) - 1

    @property
    def open_seats(self) -> int:
        return 0 if self.draining else self.seats - len(self.running)

    def pending_tokens(self) -> int:
        """Prompt tokens of seated requests that no step carries yet."""
        return sum(request.prefill_end - request.dispatched for request in self.prefilling)

    def collect_decoding(self) -> list[Request]:
        """The requests that take a decode row in the next step; cached until a seat or a phase changes."""
        rows = self.decoding
        if rows is None:
            rows = [
                request
                for request in self.running.values()
                if request.prefill_end <= request.dispatched < request.row_end
                and (request.guide is None or not request.guide.resting)
                and request.slot not in self.drafting
            ]
            self.decoding = rows
            self.decode_slots = ints.pack(request.slot for request in rows)
        return rows

    def seat(self, request: Request) -> int:
        slot = self.free_slots.pop()
        self.running[slot] = request
        if request.guide is not None:
            self.guided[slot] = request
        self.prefilling.append(request)
        self.decoding = None
        self.groups = self.groups.without(slot)
        return slot

    def unseat(self, request: Request) -> None:
        """The slot is free at once: the next command closes it before it opens any."""
        slot = request.slot
        del self.running[slot]
        self.guided.pop(slot, None)
        self.drafting.pop(slot, None)
        if request in self.prefilling:
            self.prefilling.remove(request)
        self.decoding = None
        self.closes.append(slot)
        self.free_slots.append(slot)

    def status(self, now: float, evictable: int) -> WorkerStatus:
        return WorkerStatus(
            worker_id=self.worker_id,
            device=self.hello.device,
            ready=True,
            draining=self.draining,
            num_pages=self.hello.num_pages,
            pages_free=self.pool.free,
            pages_cached=evictable,
            max_slots=self.seats,
            running=len(self.running),
            inflight_steps=len(self.inflight),
            heartbeat_age_s=round(now - self.last_heard, 3),
            cached_tokens=self.cached_tokens,
            computed_tokens=self.computed_tokens,
            decoded_tokens=self.decoded_tokens,
            pages_held=self.hello.num_pages - self.pool.free - evictable,
            queue=sum(request.slot < 0 for request in self.candidates) + len(self.prefilling),
            kv_pages_in=self.pages_in,
            kv_pages_out=self.pages_out,
            transfers=len(self.transfers),
            **self._tier_status(),
        )

    def _tier_status(self) -> dict[str, int]:
        status = {}
        for name, tier in self.tiers.items():
            status[f"{name}_pages"] = tier.pool.num_pages
            status[f"{name}_pages_used"] = tier.pool.num_pages - tier.pool.free
        return status
