"""One real request before users come: it proves the whole way and heats it. Leaves starting to the launcher."""

from __future__ import annotations

import ssl

import httpx

from radixfleet.errors import CommandError

PROMPT = "The capital city of France is"
TIMEOUT_S = 600.0


async def warm_up(url: str, key: str, certificate: str) -> None:
    """Raises CommandError where the answer is not one. `certificate`: the file the server shows, for HTTPS."""
    body = {"text": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
    headers = {"authorization": f"Bearer {key}"}
    trust = _trusting(certificate) if certificate else True
    try:
        async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False, verify=trust) as client:
            response = await client.post(f"{url}/generate", json=body, headers=headers)
    except httpx.HTTPError as error:
        raise CommandError(f"the warm-up request failed: {error!r}") from error
    if response.status_code != httpx.codes.OK:
        raise CommandError(f"the warm-up request failed with status {response.status_code}: {response.text[:500]}")


def _trusting(certificate: str) -> ssl.SSLContext:
    """Trusts exactly the certificate of this server, whatever host name it was made for."""
    try:
        context = ssl.create_default_context(cafile=certificate)
    except OSError as error:
        raise CommandError(f"{certificate} cannot be used for HTTPS: {error}") from error
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
