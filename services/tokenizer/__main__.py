"""`python -m services.tokenizer`: the HTTP frontend as a process. Leaves everything else to service."""

from __future__ import annotations

import sys

from services.tokenizer import tls
from services.tokenizer.access import Access
from services.tokenizer.service import TokenizerService
from shared import service
from shared.config import TokenizerConfig, load
from shared.tenants import TenantsError


def main() -> int:
    config = load(TokenizerConfig, sys.argv[1:])
    tls.require(config)
    try:
        Access.of(config)
    except TenantsError as error:
        raise SystemExit(f"radixfleet: {error}") from None
    return service.run("tokenizer", config, lambda: TokenizerService(config))


if __name__ == "__main__":
    sys.exit(main())
