"""The recorded signatures of FlashInfer, and the binding of calls against them."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

TABLE: dict[str, Any] = json.loads(Path(__file__).with_name("flashinfer_signatures.json").read_text())


def _parameter(row: list[Any]) -> inspect.Parameter:
    name, kind, *default = row
    return inspect.Parameter(name, getattr(inspect.Parameter, kind), default=default[0] if default else inspect._empty)


SIGNATURES = {name: inspect.Signature([_parameter(row) for row in rows]) for name, rows in TABLE["signatures"].items()}


def bind(name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments by name, defaults included. Raises TypeError for a call the real function does not take."""
    bound = SIGNATURES[name].bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments
