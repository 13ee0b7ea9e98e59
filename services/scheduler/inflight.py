"""Steps that were dispatched and whose results are still to come; leaves what a result means to settle."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from services.scheduler.request import Request
from shared import ints
from shared.messages.step import SlotOpen


@dataclass(slots=True)
class Ahead:
    """What a row that was planned ahead expects of the one before: its last sample, and where that stands."""

    start: int
    token: int
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Chunk:
    """Known tokens start .. end - 1 of one request, computed by one step; none where its last one's state is kept."""

    request: Request
    slot: int
    start: int
    end: int
    sample: bool
    tokens: bytes = b""  # int32; empty: the request's prefill has them
    drafts: int = 0  # so many of `tokens`, the last ones, are guesses
    keeps_hidden: bool = False  # of its last token
    ahead: Ahead | None = None

    @property
    def size(self) -> int:
        """Tokens its row has; known once the result before is."""
        return 1 if self.ahead is not None and self.ahead.failed else self.end - self.start

    @property
    def num_samples(self) -> int:
        return (1 + self.drafts) if self.sample else 0


class Masked(NamedTuple):
    """A row that samples under a mask, and behind each of its guesses under another."""

    request: Request
    guesses: tuple[int, ...] = ()


class SharedGroups(NamedTuple):
    """Decode rows that share pages, as a StepCommand's columns say it; all int32."""

    slots: bytes = b""
    sizes: bytes = b""
    pages: bytes = b""

    def without(self, slot: int) -> SharedGroups:
        """A slot that changes hands leaves its groups."""
        slots = ints.unpack(self.slots)
        if slot not in slots:
            return self
        sizes, begin = ints.unpack(self.sizes), 0
        for group, size in enumerate(sizes):
            members = slots[begin : begin + size]
            if slot in members:
                del slots[begin + members.index(slot)]
                sizes[group] = size = size - 1
            begin += size
        return SharedGroups(ints.pack(slots), ints.pack(sizes), self.pages)


@dataclass(slots=True)
class StepPlan:
    """What one step changes, before it is a message. `decode` is never changed once planned."""

    decode: list[Request] = field(default_factory=list)
    decode_slots: bytes = b""
    groups: SharedGroups = field(default_factory=SharedGroups)
    chunks: list[Chunk] = field(default_factory=list)
    opens: list[SlotOpen] = field(default_factory=list)
    page_slots: array[int] = field(default_factory=lambda: array("i"))
    page_ids: array[int] = field(default_factory=lambda: array("i"))
    copies: array[int] = field(default_factory=lambda: array("i"))  # pairs (source, target)
    budget: int = 0  # tokens this step may still take
    guesses: int = 0  # and so many of them may be guesses
    prefill_tokens: int = 0
    cached_tokens: int = 0
    masked: list[Masked] = field(default_factory=list)
    masked_slots: array[int] = field(default_factory=lambda: array("i"))  # one for each sample

    def add_pages(self, slot: int, pages: list[int]) -> None:
        """The slot's table has grown by these."""
        self.page_slots.extend([slot] * len(pages))
        self.page_ids.extend(pages)

    def mask(self, request: Request, guesses: tuple[int, ...] = ()) -> None:
        """The request's row is planned, and its samples must obey a constraint."""
        guide = request.guide
        assert guide is not None
        guide.sample_at = request.dispatched
        self.masked.append(Masked(request, guesses))
        self.masked_slots.extend([request.slot] * (1 + len(guesses)))


@dataclass(frozen=True, slots=True)
class InflightStep:
    step_id: int
    decode: list[Request]
    decode_slots: bytes
    chunks: list[Chunk]
    dispatched_at: float
    num_samples: int
    masked: list[Masked] = field(default_factory=list)
    masked_slots: bytes = b""

    @property
    def num_tokens(self) -> int:
        return len(self.decode) + sum(chunk.size for chunk in self.chunks)

    def rows(self) -> Iterator[Request]:
        """The request of every row; one may have several over steps, one in each."""
        yield from self.decode
        for chunk in self.chunks:
            yield chunk.request
