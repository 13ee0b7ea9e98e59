"""Reads KV events as an outside router does: its own decoder, its own picture of workers. Knows nothing of ours."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec


@dataclass
class Mirror:
    """What one worker holds, as far as the events say: block -> all tokens up to its end."""

    blocks: dict[int, tuple[int, ...]] = field(default_factory=dict)
    namespaces: dict[int, str] = field(default_factory=dict)

    def apply(self, event: list[Any]) -> None:
        kind, *fields = event
        if kind == "AllBlocksCleared":
            self.blocks.clear()
        elif kind == "BlockRemoved":
            for block in fields[0]:
                del self.blocks[block]
        else:
            assert kind == "BlockStored"
            self._store(*fields)

    def _store(
        self,
        hashes: list[int],
        parent: int | None,
        tokens: list[int],
        size: int,
        lora_id: int | None = None,
        medium: str | None = None,
        lora_name: str | None = None,
        extra: list[list[str]] | None = None,
    ) -> None:
        assert (lora_id, medium, lora_name) == (None, "GPU", None)
        assert len(tokens) == size * len(hashes)
        path = self.blocks[parent] if parent is not None else ()
        for index, block in enumerate(hashes):
            assert block not in self.blocks, "announced twice"
            path += tuple(tokens[index * size : (index + 1) * size])
            self.blocks[block] = path
            self.namespaces[block] = extra[index][0] if extra else ""

    @property
    def paths(self) -> set[tuple[str, tuple[int, ...]]]:
        return {(self.namespaces[block], path) for block, path in self.blocks.items()}


class Reader:
    """Takes payloads in order; `workers` by data_parallel_rank."""

    def __init__(self) -> None:
        self.workers: dict[int, Mirror] = {}

    def take(self, payload: bytes) -> None:
        _, events, rank = msgspec.msgpack.decode(payload)
        mirror = self.workers.setdefault(rank, Mirror())
        for event in events:
            mirror.apply(event)
