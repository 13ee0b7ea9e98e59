"""`python -m radixfleet.models [MODEL]`: make the model available and print its folder."""

from __future__ import annotations

import argparse
import sys

from radixfleet.models.errors import ModelError
from radixfleet.models.store import resolve


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="radixfleet models", description=__doc__)
    parser.add_argument("model", nargs="?", help="a folder, a GGUF file or a hub name; nothing: the small model")
    parser.add_argument("--revision", help="branch, tag or commit of a hub model")
    options = parser.parse_args(argv)
    try:
        sys.stdout.write(f"{resolve(options.model, options.revision)}\n")
    except ModelError as error:
        sys.stderr.write(f"radixfleet: error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
