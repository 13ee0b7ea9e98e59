"""Keeps finished responses for `previous_response_id`: bounded by count, bytes and age, least recently used out first.

A SQLite file in the run folder, so that every tokenizer of one `serve` finds what another one stored; in memory where
there is no such folder. Leaves what is stored to its users. All access is in one thread, off the event loop.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shared.config import TokenizerConfig
from shared.service import RUN_DIR

R = TypeVar("R")

FILE_NAME = "responses.sqlite"
_PATIENCE_S = 5.0  # while another process writes
_SETUP = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = OFF;
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, body BLOB NOT NULL,
    size INTEGER NOT NULL, used REAL NOT NULL, expires REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS by_use ON responses (used, size);
"""
_EVICT = """
DELETE FROM responses WHERE id IN (
    SELECT id FROM (
        SELECT id, SUM(size) OVER newest AS bytes, COUNT(*) OVER newest AS count
        FROM responses WINDOW newest AS (ORDER BY used DESC, id ROWS UNBOUNDED PRECEDING)
    ) WHERE bytes > ? OR count > ?
)
"""


class ResponseStore:
    """Bodies by id; only their owner finds them."""

    def __init__(
        self,
        path: str,
        *,
        max_count: int,
        max_bytes: int,
        ttl: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = path or ":memory:"
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._ttl = ttl
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, "responses")
        self._opened: sqlite3.Connection | None = None

    @classmethod
    def of(cls, config: TokenizerConfig) -> ResponseStore:
        """The store of this process, shared with others of the same run folder."""
        folder = os.environ.get(RUN_DIR)
        return cls(
            os.path.join(folder, FILE_NAME) if folder else "",
            max_count=config.max_stored_responses,
            max_bytes=config.max_stored_response_bytes,
            ttl=config.stored_response_ttl,
        )

    async def put(self, id: str, owner: str, body: bytes) -> None:
        """Store it, and make room; what is larger than all room is not kept."""

        def work() -> None:
            now = self._clock()
            with self._database() as database:
                row = (id, owner, body, len(body), now, now + self._ttl)
                database.execute("INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?)", row)
                database.execute("DELETE FROM responses WHERE expires <= ?", (now,))
                count, size = database.execute("SELECT COUNT(*), TOTAL(size) FROM responses").fetchone()
                if count > self._max_count or size > self._max_bytes:
                    database.execute(_EVICT, (self._max_bytes, self._max_count))

        await self._run(work)

    async def get(self, id: str, owner: str) -> bytes | None:
        """The body, which counts as a use."""

        def work() -> bytes | None:
            now = self._clock()
            with self._database() as database:
                mine = (id, owner, now)
                found = database.execute(
                    "SELECT body FROM responses WHERE id = ? AND owner = ? AND expires > ?", mine
                ).fetchone()
                if found is not None:
                    database.execute("UPDATE responses SET used = ? WHERE id = ?", (now, id))
            return bytes(found[0]) if found is not None else None

        return await self._run(work)

    async def delete(self, id: str, owner: str) -> bool:
        """False where there was none."""

        def work() -> bool:
            with self._database() as database:
                mine = (id, owner, self._clock())
                gone = database.execute("DELETE FROM responses WHERE id = ? AND owner = ? AND expires > ?", mine)
            return gone.rowcount > 0

        return await self._run(work)

    def close(self) -> None:
        self._thread.submit(self._close)
        self._thread.shutdown(wait=True)

    def _close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _database(self) -> sqlite3.Connection:
        """Opened by the thread that uses it."""
        if self._opened is None:
            self._opened = sqlite3.connect(self._path, timeout=_PATIENCE_S)
            self._opened.executescript(_SETUP)
        return self._opened

    async def _run(self, work: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
