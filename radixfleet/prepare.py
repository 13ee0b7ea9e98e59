"""`radixfleet prepare`: keys and a model for services in containers. Leaves both to their modules."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from radixfleet.errors import CommandError
from radixfleet.flags import PREFIX
from radixfleet.keygen import KINDS, make_keys


def main(argv: Sequence[str]) -> int:
    """Returns the exit code; doing it again changes nothing. Raises CommandError."""
    parser = argparse.ArgumentParser(prog="radixfleet prepare", description="Make keys and a model available.")
    parser.add_argument("--keys", type=Path, help="folder for CURVE keys; those that are there stay")
    parser.add_argument("--model-path", default=os.environ.get(PREFIX + "MODEL_PATH", ""), help="as for serve")
    parser.add_argument("--model-link", type=Path, help="a link that will lead to the model's folder")
    options = parser.parse_args(list(argv))
    if options.keys is not None:
        made = make_keys(options.keys, KINDS)
        sys.stdout.write(f"keys: {', '.join(made) or 'all there'}\n")
    if options.model_link is not None:
        folder = _model(options.model_path or None)
        _link(options.model_link, folder)
        sys.stdout.write(f"model: {options.model_link} -> {folder}\n")
    return 0


def _model(name: str | None) -> Path:
    from radixfleet.models import ModelError, resolve

    try:
        return resolve(name)
    except ModelError as error:
        raise CommandError(str(error)) from error


def _link(link: Path, target: Path) -> None:
    """Replaced in one go: somebody may be reading through it."""
    draft = link.with_name(f".{link.name}.{os.getpid()}")
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        draft.symlink_to(target)
        draft.replace(link)
    except OSError as error:
        raise CommandError(f"{link}: {error.strerror}") from error
