"""What can go wrong with a constraint, told so that its author finds the place. Leaves the answers to the loop."""

from __future__ import annotations


class ConstraintError(ValueError):
    """The source cannot be enforced. `kind` is the request's field, `place` lies inside the source, or is empty."""

    def __init__(self, kind: str, reason: str, place: str = "") -> None:
        self.kind = kind
        self.place = place
        self.reason = reason
        super().__init__(self.told())

    def told(self, field: str = "") -> str:
        """The message, with the client's own name of the field where it used another one."""
        return ": ".join(part for part in (field or self.kind, self.place, self.reason) if part)


class CompilerBusy(RuntimeError):
    """Too many constraints wait to be compiled; asking again later may help."""


class BadSource(ValueError):
    """Raised by the readers of sources, which do not know the field: a reason and a place."""

    def __init__(self, reason: str, place: str = "") -> None:
        self.reason = reason
        self.place = place
        super().__init__(f"{place}: {reason}" if place else reason)


def line_and_column(text: str, offset: int) -> str:
    """Where `offset` lies in `text`, counted from 1, with what follows there."""
    line = text.count("\n", 0, offset) + 1
    column = offset - (text.rfind("\n", 0, offset) + 1) + 1
    rest = text[offset : offset + 12]
    return f"line {line}, column {column} (at {rest!r})" if rest else f"line {line}, column {column} (at the end)"
