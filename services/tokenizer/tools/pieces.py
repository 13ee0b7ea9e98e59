"""What an answer is made of, in the order of its text; leaves the words of each API to render/."""

from __future__ import annotations

import msgspec


class Text(msgspec.Struct, frozen=True):
    """More of the visible answer."""

    text: str


class Thought(msgspec.Struct, frozen=True):
    """More of the reasoning before it."""

    text: str


class CallStart(msgspec.Struct, frozen=True):
    """A call begins; `index` counts the calls of one answer from 0."""

    index: int
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """More of a call's arguments: all pieces of one call together are JSON."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True):
    """The call is complete."""

    index: int


Piece = Text | Thought | CallStart | CallArguments | CallEnd


class Call(msgspec.Struct):
    """A whole call."""

    id: str
    name: str
    arguments: str


class Parsed(msgspec.Struct):
    """A whole answer."""

    text: str = ""
    thought: str = ""
    calls: list[Call] = []

    def add(self, piece: Piece) -> None:
        match piece:
            case Text():
                self.text += piece.text
            case Thought():
                self.thought += piece.text
            case CallStart():
                self.calls.append(Call(piece.id, piece.name, ""))
            case CallArguments():
                self.calls[piece.index].arguments += piece.text
