"""Names of pins as the scheduler knows them. Leaves holding paths of the tree to the scheduler."""

from __future__ import annotations

from services.tokenizer import calls, validation
from services.tokenizer.errors import invalid

DEFAULT_SECONDS = 600.0
MAX_SECONDS = 3600.0


def full_name(name: str) -> str:
    """A caller's name, apart from those of other tenants and of scripts."""
    return f"client-{calls.current().request_id(name)}"


def read(name: str | None, seconds: float | None) -> tuple[str, float]:
    """(full name, seconds) of the pin a request asks for; two neutral values where it asks for none."""
    validation.in_range("pin_seconds", seconds, 0, MAX_SECONDS, above=True)
    if not name:
        if seconds is not None:
            raise invalid("pin_seconds needs a pin.", "pin_seconds", "invalid_value")
        return "", 0.0
    return full_name(validation.bounded_key("pin", name)), seconds or DEFAULT_SECONDS
