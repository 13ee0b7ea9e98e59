"""ServerArgs: flags of `radixfleet serve` as an object, for programs that make it first and start a server later.

Leaves judging them to the server, which names those it does not know.
"""

from __future__ import annotations

from typing import Any


class ServerArgs:
    """`Runtime(server_args=ServerArgs(model_path="..."))`; each keyword is an attribute, too."""

    def __init__(self, **flags: Any) -> None:
        vars(self).update(flags)

    def __repr__(self) -> str:
        return f"ServerArgs({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"
