"""The recorded signatures of FlashInfer and NIXL, and the binding of calls against them."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any


def _table(name: str) -> dict[str, Any]:
    table: dict[str, Any] = json.loads(Path(__file__).with_name(name).read_text())
    return table


def _parameter(row: list[Any]) -> inspect.Parameter:
    name, kind, *default = row
    return inspect.Parameter(name, getattr(inspect.Parameter, kind), default=default[0] if default else inspect._empty)


def _signatures(table: dict[str, Any]) -> dict[str, inspect.Signature]:
    return {name: inspect.Signature([_parameter(row) for row in rows]) for name, rows in table["signatures"].items()}


TABLE = _table("flashinfer_signatures.json")
SIGNATURES = _signatures(TABLE)
NIXL_SIGNATURES = _signatures(_table("nixl_signatures.json"))


def bind(name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments by name, defaults included. Raises TypeError for a call the real function does not take."""
    bound = (SIGNATURES | NIXL_SIGNATURES)[name].bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments
