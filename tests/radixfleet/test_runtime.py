"""A Runtime's generations for event loops, against a stand-in for its server."""

from __future__ import annotations

import asyncio
from typing import Any

from radixfleet import RuntimeEndpoint
from radixfleet.runtime import AsyncGeneration
from tests.radixfleet.fake_model_server import FakeServer

GREEDY = {"max_new_tokens": 3, "temperature": 0}


def test_a_generation_is_awaited_or_iterated(fake: FakeServer) -> None:
    fake.answers["Once"] = " upon a time"
    endpoint = RuntimeEndpoint(fake.url)

    def ask(prompt: str | list[str]) -> AsyncGeneration:
        return AsyncGeneration(endpoint, prompt, GREEDY, {})

    async def main() -> Any:
        texts = [text async for text in ask("Once")]
        whole, others = await asyncio.gather(ask("Once"), ask(["Once", "Once"]))
        return texts, whole["text"], [other["text"] for other in others]

    texts, whole, others = asyncio.run(main())
    assert texts == [" upon", " a", " time"]
    assert whole == "".join(texts)
    assert others == [whole, whole]
    endpoint.close()
