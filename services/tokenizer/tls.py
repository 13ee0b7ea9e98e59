"""The certificate of HTTPS, loaded once before anything else starts. Leaves handshakes to uvicorn."""

from __future__ import annotations

import ssl

from shared.config import TokenizerConfig


def options(config: TokenizerConfig) -> dict[str, str | None]:
    """What uvicorn needs to serve HTTPS; nothing where no certificate is named."""
    if not config.ssl_certfile:
        return {}
    return {
        "ssl_certfile": config.ssl_certfile,
        "ssl_keyfile": config.ssl_keyfile or None,
        "ssl_keyfile_password": config.ssl_keyfile_password or None,
    }


def require(config: TokenizerConfig) -> None:
    """Ends the process with a message where the certificate and its key cannot be used."""
    if config.ssl_keyfile and not config.ssl_certfile:
        raise SystemExit("radixfleet: --ssl-keyfile needs --ssl-certfile")
    if not config.ssl_certfile:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # An empty password, so that a key that has one fails instead of asking at the terminal.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile or None, config.ssl_keyfile_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        reason = error.strerror if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) else error
        raise SystemExit(f"radixfleet: {config.ssl_certfile} cannot be used for HTTPS: {reason}") from None
