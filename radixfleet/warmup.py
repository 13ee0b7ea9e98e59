"""One real request before users come: it proves the whole way and heats it. Leaves starting to the launcher."""

from __future__ import annotations

import httpx

from radixfleet.errors import CommandError

PROMPT = "The capital city of France is"
TIMEOUT_S = 600.0


async def warm_up(url: str) -> None:
    """Raises CommandError where the answer is not one."""
    body = {"text": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
    try:
        async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as client:
            response = await client.post(f"{url}/generate", json=body)
    except httpx.HTTPError as error:
        raise CommandError(f"the warm-up request failed: {error!r}") from error
    if response.status_code != httpx.codes.OK:
        raise CommandError(f"the warm-up request failed with status {response.status_code}: {response.text[:500]}")
