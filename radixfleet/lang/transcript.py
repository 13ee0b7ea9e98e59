"""What a program's state has said so far: parts for the model, turns of the conversation, text for the reader.

    parts    ids(everything a request has covered) | text | ids generated in a joined fork | text
    history  every piece since the start, so that a fork's share can be appended to its parent

Knows no backend and no threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from radixfleet.backend.base import Answer, CutPart, IdsPart, Message, Part, Prompt, TextPart


@dataclass(frozen=True)
class Place:
    """Where a transcript stood: pieces, turns begun, turns ended, and the role of the open one."""

    position: int
    roles: int
    messages: int
    open_role: str | None


class Transcript:
    """Grows at its end only. Copies are cheap and independent."""

    def __init__(self) -> None:
        self._parts: list[Part | CutPart] = []
        self._history: list[Part | CutPart] = []
        self._templated = False
        self._messages: list[Message] = []
        self._content_from = 0
        self.roles: list[str] = []  # of all turns begun
        self.open_role: str | None = None

    def copy(self) -> Transcript:
        other = Transcript()
        other.__dict__.update({name: list(v) if isinstance(v, list) else v for name, v in self.__dict__.items()})
        return other

    @property
    def place(self) -> Place:
        return Place(self.position, len(self.roles), len(self._messages), self.open_role)

    @property
    def position(self) -> int:
        """A place in the history, for `text` and `pieces`."""
        return len(self._history)

    def text(self, since: int = 0) -> str:
        return "".join(part.text for part in self._history[since:])

    def pieces(self, since: int) -> list[Part]:
        return _settled(self._history[since:])

    @property
    def unsent(self) -> int:
        """Characters at the end that no request has covered."""
        return sum(len(part.text) for part in self._parts if isinstance(part, TextPart))

    def prompt(self) -> Prompt:
        return Prompt(tuple(_settled(self._parts)), self._templated, tuple(self._turns()), self.open_role)

    def messages(self) -> list[dict[str, str]]:
        """All turns, the open one included, as dictionaries."""
        return [{"role": message.role, "content": message.content} for message in self._turns()]

    def append_text(self, text: str) -> None:
        if text:
            self._add(TextPart(text, literal=self.open_role is not None))

    def append_pieces(self, pieces: Sequence[Part]) -> None:
        for piece in pieces:
            self._add(piece)

    def left_turn(self, since: Place) -> bool:
        """Whether the turn that was open then (or none) is no longer the one at the end."""
        within = since.open_role is not None
        return self.open_role != since.open_role or (within and len(self.roles) != since.roles)

    def append_turns(self, other: Transcript, since: Place) -> None:
        """What another transcript, a copy of this one as it was at `since`, has said since then."""
        self.append_pieces(other.pieces(since.position))
        self.roles += other.roles[since.roles :]
        self._messages += other._messages[since.messages :]

    def append_answer(self, answer: Answer, text: str) -> None:
        """The model's continuation of `prompt()`: its ids, and `text` for the reader."""
        if answer.prompt_ids is None:
            self.append_text(text)
            return
        covered = "".join(part.text for part in self._parts)
        if answer.cut is not None:
            self._parts = [IdsPart(answer.prompt_ids, covered), answer.cut]
            self._history.append(answer.cut)
        else:
            self._parts = [IdsPart(answer.prompt_ids + answer.ids, covered + text)]
            self._history.append(IdsPart(answer.ids, text))

    def begin_turn(self, role: str, template_text: str) -> None:
        self._templated = self._templated or not self._history
        if template_text:
            self._add(TextPart(template_text))
        self.roles.append(role)
        self.open_role = role
        self._content_from = self.position

    def end_turn(self, template_text: str) -> None:
        assert self.open_role is not None
        self._messages.append(Message(self.open_role, self.text(self._content_from)))
        self.open_role = None
        if template_text:
            self._add(TextPart(template_text))

    def _turns(self) -> list[Message]:
        if self.open_role is None:
            return list(self._messages)
        return [*self._messages, Message(self.open_role, self.text(self._content_from))]

    def _add(self, part: Part) -> None:
        self._parts.append(part)
        self._history.append(part)


def _settled(parts: Sequence[Part | CutPart]) -> list[Part]:
    """Parts whose ids are all known. May ask the server."""
    settled: list[Part] = []
    for part in parts:
        settled += part.parts() if isinstance(part, CutPart) else [part]
    return settled
