"""Entry point of the detokenizer service; leaves everything to shared.service."""

import sys

from services.detokenizer.detokenizer import Detokenizer
from shared.config import DetokenizerConfig, load
from shared.service import run


def main() -> int:
    config = load(DetokenizerConfig, sys.argv[1:])
    return run("detokenizer", config, lambda: Detokenizer(config))


if __name__ == "__main__":
    sys.exit(main())
