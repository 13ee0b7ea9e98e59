"""What the scheduler and a compiling process say to each other over a pipe: frames of a length and msgpack.

Leaves running the process to `process` and the work to `compile_worker`.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from services.scheduler.constraint.canonical import Kind
from services.scheduler.constraint.limits import Limits

LENGTH_BYTES = 4
MAX_FRAME = 64 << 20


class Setup(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The first frame of a process."""

    model_path: str
    limits: Limits


class CompileJob(msgspec.Struct, frozen=True, array_like=True, tag=2):
    kind: Kind
    source: str  # canonical
    best_effort: bool
    any_whitespace: bool


class CheckJob(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Does the finished text satisfy the source?"""

    kind: Kind
    source: str
    text: str


class CanonicalJob(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """What is the canonical form of a source that is too long to be read by the scheduler itself?"""

    kind: Kind
    source: str


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=10):
    vocabulary_size: int


class Compiled(msgspec.Struct, frozen=True, array_like=True, tag=11):
    grammar: str  # the engine's text
    shortest: tuple[int, ...] | None  # tokens of a shortest text, where the search found one
    step: int  # see budget.Ending
    plain_is_harmless: bool
    seconds: float
    grown: int  # bytes the process grew by


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=12):
    reason: str
    place: str


class Verdict(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """Of a finished text. `known` is False where the check itself could not be finished."""

    valid: bool
    reason: str = ""
    known: bool = True


class Canonical(msgspec.Struct, frozen=True, array_like=True, tag=14):
    source: str


Job: TypeAlias = CompileJob | CheckJob | CanonicalJob
ToProcess: TypeAlias = Setup | Job
FromProcess: TypeAlias = Ready | Compiled | Refused | Verdict | Canonical

_encoder = msgspec.msgpack.Encoder()
to_process = msgspec.msgpack.Decoder(ToProcess)
from_process = msgspec.msgpack.Decoder(FromProcess)


def frame(message: ToProcess | FromProcess) -> bytes:
    """Length and body of one message."""
    body = _encoder.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body
