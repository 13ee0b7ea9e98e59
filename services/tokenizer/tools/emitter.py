"""Collects the pieces a parser finds and numbers its calls. Leaves finding them to the formats."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable

from services.tokenizer.tools.pieces import CallArguments, CallEnd, CallStart, Piece, Text

_SIGNS = string.ascii_letters + string.digits


def long_id() -> str:
    """An id as most clients know it."""
    return f"call_{secrets.token_hex(12)}"


def short_id() -> str:
    """Nine letters and digits: some chat templates refuse others."""
    return "".join(secrets.choice(_SIGNS) for _ in range(9))


class Emitter:
    """One answer's pieces, taken away as they come."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._pieces: list[Piece] = []
        self.calls = 0

    def take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def text(self, text: str) -> None:
        if text:
            self._pieces.append(Text(text))

    def start(self, name: str) -> None:
        self._pieces.append(CallStart(self.calls, self._new_id(), name))
        self.calls += 1

    def arguments(self, text: str) -> None:
        if text:
            self._pieces.append(CallArguments(self.calls - 1, text))

    def end(self) -> None:
        self._pieces.append(CallEnd(self.calls - 1))
