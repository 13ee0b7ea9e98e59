"""What goes wrong between a program and its model; the text is the server's own wherever it said something."""

from __future__ import annotations


class BackendError(RuntimeError):
    """A request failed. `status` is the HTTP status, None where no answer came."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class BackendTimeout(BackendError):
    """The server did not answer in time."""


class Unsupported(BackendError):
    """This backend cannot do what the program asks."""
