"""Where the services' code lies and how one of them is run; leaves what runs to its callers."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

MODULES = {
    "tokenizer": "services.tokenizer",
    "scheduler": "services.scheduler",
    "detokenizer": "services.detokenizer",
    "worker": "services.gpu_worker",
}


def app_root() -> Path:
    """The folder that holds `services` and `shared`: inside an installed wheel, or the checkout."""
    package = Path(__file__).resolve().parent
    bundled = package / "_app"
    return bundled if bundled.is_dir() else package.parent


def command(module: str) -> list[str]:
    """Runs a module of the application; -P keeps the user's current folder off its path."""
    return [sys.executable, "-P", "-m", module]


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """`base` with the application first on the path of Python."""
    root = str(app_root())
    rest = base.get("PYTHONPATH")
    return {**base, "PYTHONPATH": root + (os.pathsep + rest if rest else "")}
