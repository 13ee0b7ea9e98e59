"""The changes of the radix tree as KV events, in the form that routers and indexers of other servers read.

A block is a full page of one worker; its hash covers all tokens before it and the namespace. A page is announced when
the result of the step that fills it has arrived, so that nobody is told of KV that may never exist; half-filled pages
are not announced. Workers are told apart by `data_parallel_rank`. Leaves sockets to `kv_publisher`.

The events are positional msgpack in the field order that vLLM and SGLang share.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count

import msgspec

TOKEN_BYTES = 4
HASH_BYTES = 8
MEDIUM = "GPU"  # what readers call a device's own memory, whatever the device is


class _Event(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(_Event):
    """`token_ids` are those of all blocks; `extra_keys` holds the namespace of each where there is one."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[str, ...]] | None = None


class BlockRemoved(_Event):
    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(_Event):
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one turn of the scheduler changed on one worker; `ts` in seconds since 1970."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


@dataclass(slots=True)
class _Block:
    hash: int
    ready_step: int
    announced: bool = False


@dataclass(slots=True)
class _Run:
    """Pages that one step fills, one after another."""

    pages: array[int]
    blocks: list[_Block]
    parent: int | None
    tokens: bytes
    namespace: bytes


@dataclass(slots=True)
class _Worker:
    rank: int
    blocks: dict[int, _Block] = field(default_factory=dict)  # by page
    waiting: list[_Run] = field(default_factory=list)  # for their steps; a run never comes before its parent
    settled_step: int = -1
    events: list[Event] = field(default_factory=list)


class KvEvents:
    """A TreeObserver. `publish(batch)` gets the batches at every `flush`; `step_done` says whose pages are real."""

    def __init__(
        self, page_size: int, publish: Callable[[EventBatch], None], clock: Callable[[], float] = time.time
    ) -> None:
        self._page_size = page_size
        self._publish = publish
        self._clock = clock
        self._workers: dict[str, _Worker] = {}
        self._left: list[tuple[int, list[Event]]] = []

    def joined(self, worker: str) -> None:
        taken = {known.rank for known in self._workers.values()}
        rank = next(number for number in count() if number not in taken)
        self._workers[worker] = _Worker(rank, events=[AllBlocksCleared()])

    def left(self, worker: str) -> None:
        gone = self._workers.pop(worker, None)
        if gone is not None:
            self._left.append((gone.rank, [*gone.events, AllBlocksCleared()]))

    def stored(
        self, worker: str, namespace: bytes, before: int, tokens: bytes, pages: array[int], ready_step: int
    ) -> None:
        state = self._workers[worker]
        page_bytes = self._page_size * TOKEN_BYTES
        full = len(tokens) // page_bytes
        if not full:
            return
        parent = state.blocks[before] if before >= 0 else None
        step = max(ready_step, parent.ready_step) if parent else ready_step
        last = parent.hash if parent else _root_hash(namespace)
        blocks: list[_Block] = []
        for start in range(0, full * page_bytes, page_bytes):
            last = _chain(last, tokens[start : start + page_bytes])
            blocks.append(_Block(last, step))
        state.blocks.update(zip(pages[:full], blocks, strict=True))
        run = _Run(pages[:full], blocks, parent.hash if parent else None, bytes(tokens[: full * page_bytes]), namespace)
        if step <= state.settled_step:
            self._announce(state, run)
        else:
            state.waiting.append(run)

    def removed(self, worker: str, pages: array[int]) -> None:
        state = self._workers.get(worker)
        if state is None:
            return
        gone = [block for block in (state.blocks.pop(page, None) for page in pages) if block is not None]
        hashes = [block.hash for block in gone if block.announced]
        if hashes:
            state.events.append(BlockRemoved(hashes, MEDIUM))

    def step_done(self, worker: str, step: int) -> None:
        """The result of that step has arrived: what it and those before it filled is there."""
        state = self._workers.get(worker)
        if state is None:
            return
        state.settled_step = step
        waiting, state.waiting = state.waiting, []
        for run in waiting:
            if run.blocks[0].ready_step <= step:
                self._announce(state, run)
            else:
                state.waiting.append(run)

    def flush(self) -> None:
        """Publish what has changed since the last time."""
        for rank, events in self._left:
            self._publish(EventBatch(self._clock(), events, rank))
        self._left.clear()
        for state in self._workers.values():
            if state.events:
                self._publish(EventBatch(self._clock(), state.events, state.rank))
                state.events = []

    def _announce(self, state: _Worker, run: _Run) -> None:
        """What is left of the run: its end may have been evicted meanwhile."""
        kept = list(_still_there(state, run))
        if not kept:
            return
        for block in kept:
            block.announced = True
        tokens = array("i", run.tokens[: len(kept) * self._page_size * TOKEN_BYTES])
        extra: list[tuple[str, ...]] | None = [(run.namespace.hex(),)] * len(kept) if run.namespace else None
        hashes = [block.hash for block in kept]
        state.events.append(
            BlockStored(hashes, run.parent, tokens.tolist(), self._page_size, None, MEDIUM, None, extra)
        )


def _still_there(state: _Worker, run: _Run) -> Iterator[_Block]:
    for page, block in zip(run.pages, run.blocks, strict=True):
        if state.blocks.get(page) is not block:
            return
        yield block


def _root_hash(namespace: bytes) -> int:
    return _chain(0, namespace)


def _chain(last: int, data: bytes) -> int:
    digest = blake2b(last.to_bytes(HASH_BYTES, "big"), digest_size=HASH_BYTES)
    digest.update(data)
    return int.from_bytes(digest.digest(), "big")
