"""Reads one answer as it comes in: reasoning first, then text and calls. Leaves rendering the pieces to render/."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from services.tokenizer.output import Output
from services.tokenizer.reasoning.splitter import Splitter
from services.tokenizer.reasoning.styles import Style
from services.tokenizer.tools.definitions import Toolbox
from services.tokenizer.tools.emitter import Emitter, long_id
from services.tokenizer.tools.formats import Format
from services.tokenizer.tools.pieces import Parsed, Piece, Thought


class Reading(msgspec.Struct, frozen=True):
    """How the answers of one request are to be read. Without style and format there is nothing to read."""

    format: Format | None = None
    box: Toolbox | None = None
    style: Style | None = None
    opened: bool = False  # the prompt has begun the reasoning
    end_id: int = -1
    separate: bool = True  # False: reasoning stays in the text, between its marks
    stream_thoughts: bool = True  # False: all of it at once

    @property
    def is_plain(self) -> bool:
        return self.box is None and self.style is None

    def open(self) -> AnswerReader:
        """A reader for one choice."""
        return AnswerReader(self)

    def whole(self, output: Output) -> tuple[Parsed, int]:
        """A complete answer, and the tokens of its reasoning."""
        reader, parsed = self.open(), Parsed(calls=[])
        for piece in (*reader.feed(output.text, output.token_ids), *reader.finish()):
            parsed.add(piece)
        return parsed, reader.reasoning_tokens


class AnswerReader:
    """One choice."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._out = Emitter(reading.format.new_id if reading.format is not None else long_id)
        self._pieces: list[Piece] = []
        self._thoughts: list[str] = []
        self._shown = False  # reasoning that stays in the text has begun
        self._closed = False
        self._parser = None
        if reading.format is not None and reading.box is not None:
            self._parser = reading.format.parser(reading.box.names, self._out)
        self._splitter = None
        if reading.style is not None:
            self._splitter = Splitter(reading.style, reading.opened, reading.end_id, self._think, self._speak)

    @property
    def calls(self) -> int:
        """Calls begun so far."""
        return self._out.calls

    @property
    def reasoning_tokens(self) -> int:
        return self._splitter.tokens if self._splitter is not None else 0

    def feed(self, text: str, ids: Sequence[int] = ()) -> list[Piece]:
        """The pieces that are certain now."""
        if self._splitter is None:
            self._say(text)
        else:
            self._splitter.feed(text, ids)
            self._close()
        return self._take()

    def finish(self) -> list[Piece]:
        """What was held back."""
        if self._splitter is not None:
            self._splitter.finish()
        if self._parser is not None:
            self._parser.finish()
        self._flush_thoughts()
        return self._take()

    def _think(self, text: str) -> None:
        if not self._reading.separate:
            assert self._reading.style is not None
            self._out.text(text if self._shown else f"{self._reading.style.begin}\n{text}")
            self._shown = True
        elif self._reading.stream_thoughts:
            self._pieces.append(Thought(text))
        else:
            self._thoughts.append(text)

    def _speak(self, text: str) -> None:
        self._close()
        self._flush_thoughts()
        self._say(text)

    def _close(self) -> None:
        """The end mark of reasoning that stays in the text."""
        splitter, style = self._splitter, self._reading.style
        if self._shown and not self._closed and splitter is not None and splitter.ended and style is not None:
            self._closed = True
            self._out.text(f"\n{style.end}\n\n")

    def _say(self, text: str) -> None:
        if self._parser is not None:
            self._parser.feed(text)
        else:
            self._out.text(text)
        self._pieces += self._out.take()

    def _flush_thoughts(self) -> None:
        if self._thoughts:
            self._pieces.append(Thought("".join(self._thoughts)))
            self._thoughts = []

    def _take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces + self._out.take(), []
        return pieces
