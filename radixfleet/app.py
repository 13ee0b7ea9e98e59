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


def package_parent() -> Path:
    """The folder that holds the package `radixfleet`: site-packages or the checkout."""
    return Path(__file__).resolve().parents[1]


def app_root() -> Path:
    """The folder that holds `services` and `shared`: inside an installed wheel, or the checkout."""
    bundled = Path(__file__).resolve().parent / "_app"
    return bundled if bundled.is_dir() else package_parent()


def command(module: str) -> list[str]:
    """Runs a module; -P keeps the user's current folder off its path."""
    return [sys.executable, "-P", "-m", module]


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """`base` with the application first on the path of Python."""
    return on_path(base, app_root())


def on_path(base: Mapping[str, str], folder: Path) -> dict[str, str]:
    """`base` with this folder first on the path of Python."""
    rest = base.get("PYTHONPATH")
    return {**base, "PYTHONPATH": f"{folder}{os.pathsep}{rest}" if rest else str(folder)}
