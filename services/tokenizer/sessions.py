"""Conversations that live here: a request may go on from the tokens of an earlier one. Bounded in number, size, time.

    open -> id      request (session, rid A) -> node A: prompt and output ids
                    request (session, rid B, from A) -> its prompt is node A's tokens and then its own

Only token ids are kept; that they are computed already is the radix tree's business. They lie in a SQLite file of the
run folder, so that it makes no difference which HTTP process is asked. Leaves HTTP to routes.
"""

from __future__ import annotations

import os
import sqlite3
import uuid
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec

from services.tokenizer import validation
from services.tokenizer.errors import ApiError, invalid
from services.tokenizer.exchange import Answerer
from services.tokenizer.output import Output
from shared.clock import Clock, MonotonicClock
from shared.service import RUN_DIR

MAX_SESSIONS = 1024
MAX_NODES = 256  # of one session; then its oldest is forgotten
MAX_IDS = 16 << 20  # of all sessions together
DEFAULT_TTL_S = 600.0
MAX_TTL_S = 24 * 3600.0
PARAM = "session_params"
FILE_NAME = "sessions.sqlite"
PATIENCE_S = 2.0  # while another process writes
_SETUP = """
PRAGMA synchronous = OFF;
PRAGMA foreign_keys = ON;
CREATE TABLE IF NOT EXISTS sessions (
    id INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT NOT NULL, name TEXT NOT NULL,
    capacity INTEGER NOT NULL, ttl REAL NOT NULL, expires REAL NOT NULL, UNIQUE (owner, name)
);
CREATE TABLE IF NOT EXISTS nodes (
    session INTEGER NOT NULL REFERENCES sessions (id) ON DELETE CASCADE, rid TEXT NOT NULL, parent TEXT,
    prompt BLOB NOT NULL, output BLOB NOT NULL, size INTEGER NOT NULL, UNIQUE (session, rid)
);
CREATE INDEX IF NOT EXISTS by_parent ON nodes (session, parent);
"""
# Every request that goes on from this one, directly or not.
_FORGET_CONTINUATIONS = """
WITH RECURSIVE later (rid) AS (
    SELECT rid FROM nodes WHERE session = :session AND parent = :rid
    UNION SELECT nodes.rid FROM nodes JOIN later ON nodes.parent = later.rid WHERE nodes.session = :session
)
DELETE FROM nodes WHERE session = :session AND rid IN (SELECT rid FROM later)
"""


class SessionParams(msgspec.Struct, kw_only=True):
    """`session_params` of a request: which session, and where in it the prompt goes on."""

    id: str | None = None
    rid: str | None = None  # None: a new beginning
    offset: int | None = None  # go on after this many of that request's tokens
    replace: bool | None = None  # forget that request's continuations, or all of the session without rid
    drop_previous_output: bool | None = None


class Sessions:
    """All sessions of the HTTP processes that share `path`; of this one alone where it is empty.

    `owner` is the tenant: nobody sees another's. Every call is one short transaction.
    """

    def __init__(self, clock: Clock, path: str = "") -> None:
        self._clock = clock
        self._path = path or ":memory:"
        self._opened: sqlite3.Connection | None = None

    @classmethod
    def shared(cls) -> Sessions:
        """In the run folder of `serve`, where there is one; its processes share the machine's monotonic time."""
        folder = os.environ.get(RUN_DIR)
        return cls(MonotonicClock(), os.path.join(folder, FILE_NAME) if folder else "")

    def __len__(self) -> int:
        with self._transaction() as database:
            return int(database.execute("SELECT COUNT(*) FROM sessions").fetchone()[0])

    def open(self, owner: str, capacity: int, name: str | None = None, ttl: float = DEFAULT_TTL_S) -> str:
        """The new session's id. Raises ApiError where it is open already or there are too many."""
        session_id = uuid.uuid4().hex if name is None else name
        with self._transaction() as database:
            if _session(database, owner, session_id) is not None:
                raise invalid(f"The session {session_id!r} is open already.", "session_id", "duplicate_id")
            if database.execute("SELECT COUNT(*) FROM sessions").fetchone()[0] >= MAX_SESSIONS:
                raise ApiError(429, f"{MAX_SESSIONS} sessions are open.", code="too_many_sessions", retry_after=1.0)
            row = (owner, session_id, min(capacity, MAX_IDS), ttl, self._clock.now() + ttl)
            database.execute("INSERT INTO sessions (owner, name, capacity, ttl, expires) VALUES (?, ?, ?, ?, ?)", row)
        return session_id

    def close(self, owner: str, session_id: str) -> None:
        """Raises ApiError where there is none."""
        with self._transaction() as database:
            session = self._find(database, owner, session_id, "session_id")
            database.execute("DELETE FROM sessions WHERE id = ?", (session.id,))

    def enter(self, owner: str, wishes: SessionParams, rid: str, ids: array[int]) -> tuple[array[int], Recorder]:
        """The whole prompt of a request whose own tokens are `ids`, and what takes down its answer."""
        if wishes.id is None:
            raise invalid(f"{PARAM}.id is required.", f"{PARAM}.id", "missing_required_parameter")
        with self._transaction() as database:
            session = self._find(database, owner, wishes.id, f"{PARAM}.id")
            whole = _continue(database, session, wishes) + ids
            if len(whole) > session.capacity:
                raise invalid(
                    f"The session would hold a text of {len(whole)} tokens; it was opened for {session.capacity}.",
                    f"{PARAM}.id",
                    "context_length_exceeded",
                )
            if _node(database, session.id, rid) is not None:
                raise invalid(f"The session knows a request {rid!r} already.", "rid", "duplicate_id")
            if database.execute("SELECT TOTAL(size) FROM nodes").fetchone()[0] + len(whole) > MAX_IDS:
                text = "The open sessions hold too many tokens."
                raise ApiError(429, text, code="too_many_sessions", retry_after=1.0)
        return whole, Recorder(self, session.id, rid, wishes.rid, whole)

    def put(self, session: int, rid: str, parent: str | None, prompt: array[int], output: array[int]) -> None:
        """Keep what a request was answered, if its session is still open."""
        with self._transaction() as database:
            if database.execute("SELECT 1 FROM sessions WHERE id = ?", (session,)).fetchone() is None:
                return
            row = (session, rid, parent, prompt.tobytes(), output.tobytes(), len(prompt) + len(output))
            database.execute("INSERT OR REPLACE INTO nodes VALUES (?, ?, ?, ?, ?, ?)", row)
            newest = "SELECT rowid FROM nodes WHERE session = ? ORDER BY rowid DESC LIMIT ?"
            database.execute(
                f"DELETE FROM nodes WHERE session = ? AND rowid NOT IN ({newest})",  # noqa: S608 - a constant
                (session, session, MAX_NODES),
            )

    def shut(self) -> None:
        """Close the file."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _find(self, database: sqlite3.Connection, owner: str, session_id: str, param: str) -> _Session:
        session = _session(database, owner, session_id)
        if session is None:
            raise invalid(f"There is no session {session_id[:256]!r}.", param, "session_not_found")
        expires = self._clock.now() + session.ttl
        database.execute("UPDATE sessions SET expires = ? WHERE id = ?", (expires, session.id))
        return session

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing, alone; what is over is gone before anything else is looked at."""
        if self._opened is None:
            self._opened = sqlite3.connect(self._path, timeout=PATIENCE_S, isolation_level=None)
            self._opened.executescript(_SETUP)
        database = self._opened
        database.execute("BEGIN IMMEDIATE")
        try:
            database.execute("DELETE FROM sessions WHERE expires <= ?", (self._clock.now(),))
            yield database
        except BaseException:
            database.execute("ROLLBACK")
            raise
        database.execute("COMMIT")


class _Session(NamedTuple):
    id: int
    capacity: int
    ttl: float


def _session(database: sqlite3.Connection, owner: str, name: str) -> _Session | None:
    row = database.execute(
        "SELECT id, capacity, ttl FROM sessions WHERE owner = ? AND name = ?", (owner, name)
    ).fetchone()
    return _Session(*row) if row is not None else None


def _node(database: sqlite3.Connection, session: int, rid: str) -> tuple[array[int], array[int]] | None:
    """Prompt and output of a request that has ended."""
    row = database.execute("SELECT prompt, output FROM nodes WHERE session = ? AND rid = ?", (session, rid)).fetchone()
    return (array("i", row[0]), array("i", row[1])) if row is not None else None


def _continue(database: sqlite3.Connection, session: _Session, wishes: SessionParams) -> array[int]:
    if wishes.rid is None:
        if wishes.replace:
            database.execute("DELETE FROM nodes WHERE session = ?", (session.id,))
        return array("i")
    node = _node(database, session.id, wishes.rid)
    if node is None:
        text = f"The session knows no request {wishes.rid[:256]!r} that has ended."
        raise invalid(text, f"{PARAM}.rid", "invalid_value")
    if wishes.replace:
        database.execute(_FORGET_CONTINUATIONS, {"session": session.id, "rid": wishes.rid})
    before = node[0] if wishes.drop_previous_output else node[0] + node[1]
    offset = validation.in_range(f"{PARAM}.offset", wishes.offset, 0, len(before))
    return before[:offset] if offset else before


class Recorder:
    """Takes down what a request of a session has answered, once it has ended."""

    def __init__(self, sessions: Sessions, session: int, rid: str, parent: str | None, prompt: array[int]) -> None:
        self._sessions = sessions
        self._session = session
        self._rid = rid
        self._parent = parent
        self._prompt = prompt

    def ended(self, output: array[int]) -> None:
        self._sessions.put(self._session, self._rid, self._parent, self._prompt, output)


class RecordingAnswerer:
    """Lets another answerer speak and listens to the tokens."""

    def __init__(self, inner: Answerer, recorder: Recorder) -> None:
        self._inner = inner
        self._recorder = recorder
        self._output: array[int] = array("i")

    def event(self, index: int, news: Output) -> bytes:
        self._output += news.token_ids
        if news.finish is not None:
            self._recorder.ended(self._output)
        return self._inner.event(index, news)

    def end(self) -> bytes:
        return self._inner.end()

    def whole(self, outputs: list[Output]) -> bytes:
        self._recorder.ended(outputs[0].token_ids)
        return self._inner.whole(outputs)


def read(params: dict[str, Any] | None, choices: int, unknown: list[str]) -> SessionParams | None:
    """The field as a request has it; what nobody knows in it is added to `unknown`.

    Raises ApiError, also where the request has more than one choice.
    """
    if not params:
        return None
    wishes, others = validation.convert(params, SessionParams, {}, f"{PARAM}.")
    unknown += others
    if choices != 1:
        raise invalid(f"{PARAM} goes with one prompt and one choice.", PARAM, "invalid_value")
    return wishes
