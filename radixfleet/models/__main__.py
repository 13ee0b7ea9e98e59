"""`python -m radixfleet.models [MODEL]`: make the model available and print its folder."""

from __future__ import annotations

import argparse
import sys

from radixfleet.models.errors import ModelError
from radixfleet.models.store import resolve
from radixfleet.orphan import die_with_parent


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="radixfleet models", description="Make a model available, print its folder.")
    parser.add_argument("model", nargs="?", help="a folder, a GGUF file or a hub name; nothing: the small model")
    parser.add_argument("--revision", help="branch, tag or commit of a hub model")
    options = parser.parse_args(argv)
    try:
        sys.stdout.write(f"{resolve(options.model, options.revision)}\n")
    except ModelError as error:
        sys.stderr.write(f"radixfleet: error: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    die_with_parent()
    sys.exit(main())
