"""Conversations that live here: a request may go on from the tokens of an earlier one. Bounded in number, size, time.

    open -> id      request (session, rid A) -> node A: prompt and output ids
                    request (session, rid B, from A) -> its prompt is node A's tokens and then its own

Only token ids are kept; that they are computed already is the radix tree's business. Leaves HTTP to routes.
"""

from __future__ import annotations

import uuid
from array import array
from dataclasses import dataclass, field
from typing import Any

import msgspec

from services.tokenizer import validation
from services.tokenizer.errors import ApiError, invalid
from services.tokenizer.exchange import Answerer
from services.tokenizer.output import Output
from shared.clock import Clock

MAX_SESSIONS = 1024
MAX_NODES = 256  # of one session; then its oldest is forgotten
MAX_IDS = 16 << 20  # of all sessions together
DEFAULT_TTL_S = 600.0
MAX_TTL_S = 24 * 3600.0
PARAM = "session_params"


class SessionParams(msgspec.Struct, kw_only=True):
    """`session_params` of a request: which session, and where in it the prompt goes on."""

    id: str | None = None
    rid: str | None = None  # None: a new beginning
    offset: int | None = None  # go on after this many of that request's tokens
    replace: bool | None = None  # forget that request's continuations, or all of the session without rid
    drop_previous_output: bool | None = None


@dataclass(slots=True)
class _Node:
    prompt: array[int]
    output: array[int]
    parent: str | None

    def __len__(self) -> int:
        return len(self.prompt) + len(self.output)


@dataclass(slots=True)
class _Session:
    owner: str
    capacity: int
    ttl: float
    expires: float
    nodes: dict[str, _Node] = field(default_factory=dict)
    held: int = 0  # token ids of all nodes

    def put(self, rid: str, node: _Node) -> None:
        self.nodes[rid] = node
        self.held += len(node)
        if len(self.nodes) > MAX_NODES:
            self.drop(next(iter(self.nodes)))

    def drop(self, rid: str) -> None:
        self.held -= len(self.nodes.pop(rid))


class Sessions:
    """All sessions of this process. `owner` is the tenant: nobody sees another's."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sessions: dict[str, _Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, owner: str, capacity: int, name: str | None = None, ttl: float = DEFAULT_TTL_S) -> str:
        """The new session's id. Raises ApiError where it is open already or there are too many."""
        self._expire()
        session_id = uuid.uuid4().hex if name is None else name
        if session_id in self._sessions:
            raise invalid(f"The session {session_id!r} is open already.", "session_id", "duplicate_id")
        if len(self._sessions) >= MAX_SESSIONS:
            raise ApiError(429, f"{MAX_SESSIONS} sessions are open.", code="too_many_sessions", retry_after=1.0)
        self._sessions[session_id] = _Session(owner, capacity, ttl, self._clock.now() + ttl)
        return session_id

    def close(self, owner: str, session_id: str) -> None:
        """Raises ApiError where there is none."""
        self._find(owner, session_id, "session_id")
        del self._sessions[session_id]

    def enter(self, owner: str, wishes: SessionParams, rid: str, ids: array[int]) -> tuple[array[int], Recorder]:
        """The whole prompt of a request whose own tokens are `ids`, and what takes down its answer."""
        if wishes.id is None:
            raise invalid(f"{PARAM}.id is required.", f"{PARAM}.id", "missing_required_parameter")
        session = self._find(owner, wishes.id, f"{PARAM}.id")
        whole = self._continue(session, wishes) + ids
        if len(whole) > session.capacity:
            raise invalid(
                f"The session would hold a text of {len(whole)} tokens; it was opened for {session.capacity}.",
                f"{PARAM}.id",
                "context_length_exceeded",
            )
        if rid in session.nodes:
            raise invalid(f"The session knows a request {rid!r} already.", "rid", "duplicate_id")
        self._make_room(len(whole))
        return whole, Recorder(session, rid, wishes.rid, whole)

    def _find(self, owner: str, session_id: str, param: str) -> _Session:
        self._expire()
        session = self._sessions.get(session_id)
        if session is None or session.owner != owner:
            raise invalid(f"There is no session {session_id[:256]!r}.", param, "session_not_found")
        session.expires = self._clock.now() + session.ttl
        return session

    def _continue(self, session: _Session, wishes: SessionParams) -> array[int]:
        if wishes.rid is None:
            for rid in list(session.nodes) if wishes.replace else ():
                session.drop(rid)
            return array("i")
        node = session.nodes.get(wishes.rid)
        if node is None:
            text = f"The session knows no request {wishes.rid[:256]!r} that has ended."
            raise invalid(text, f"{PARAM}.rid", "invalid_value")
        if wishes.replace:
            _forget_continuations(session, wishes.rid)
        before = node.prompt if wishes.drop_previous_output else node.prompt + node.output
        offset = validation.in_range(f"{PARAM}.offset", wishes.offset, 0, len(before))
        return before[:offset] if offset else before[:]

    def _expire(self) -> None:
        now = self._clock.now()
        for session_id in [name for name, session in self._sessions.items() if session.expires <= now]:
            del self._sessions[session_id]

    def _make_room(self, wanted: int) -> None:
        held = sum(session.held for session in self._sessions.values())
        if held + wanted > MAX_IDS:
            raise ApiError(429, "The open sessions hold too many tokens.", code="too_many_sessions", retry_after=1.0)


class Recorder:
    """Takes down what a request of a session has answered, once it has ended."""

    def __init__(self, session: _Session, rid: str, parent: str | None, prompt: array[int]) -> None:
        self._session = session
        self._rid = rid
        self._parent = parent
        self._prompt = prompt

    def ended(self, output: array[int]) -> None:
        self._session.put(self._rid, _Node(self._prompt, output, self._parent))


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


def read(params: dict[str, Any] | None, choices: int) -> SessionParams | None:
    """The field as a request has it. Raises ApiError, also where the request has more than one choice."""
    if not params:
        return None
    wishes, unknown = validation.convert(params, SessionParams, {}, f"{PARAM}.")
    if unknown:
        raise invalid(f"{unknown[0]} is not known.", unknown[0], "invalid_value")
    if choices != 1:
        raise invalid(f"{PARAM} goes with one prompt and one choice.", PARAM, "invalid_value")
    return wishes


def _forget_continuations(session: _Session, rid: str) -> None:
    """Every request that goes on from this one, directly or not."""
    parents = {rid}
    for name, node in list(session.nodes.items()):  # in order of ending, so that parents come first
        if node.parent in parents:
            parents.add(name)
            session.drop(name)
