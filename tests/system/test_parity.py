"""Greedy fp32 output equals transformers' own generate, token by token, however it is scheduled."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from tests.system.prompts import thirty
from tests.system.servers import serving

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def prompts(model_dir: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    ids = [tokenizer.encode(text).ids for text in thirty()]
    assert max(map(len, ids)) >= 3000
    return ids


@pytest.fixture(scope="module")
def expected(model_dir: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers generates, alone, in fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small products: threads waiting for each other cost more than they bring
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    outputs = []
    with torch.inference_mode():
        for ids in prompts:
            generated = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                eos_token_id=None,
                pad_token_id=0,
                temperature=None,
                top_p=None,
                top_k=None,
            )
            outputs.append(generated[0, len(ids) :].tolist())
    torch.set_num_threads(threads)
    return outputs


def body(ids: list[int]) -> dict[str, Any]:
    return {
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
    }


async def generate(url: str, prompts: list[list[int]], concurrency: int) -> list[dict[str, Any]]:
    gate = asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def one(ids: list[int]) -> dict[str, Any]:
            async with gate:
                response = await client.post("/generate", json=body(ids))
                assert response.status_code == 200, response.text
                answer: dict[str, Any] = response.json()
                return answer

        return await asyncio.gather(*map(one, prompts))


def check(answers: list[dict[str, Any]], expected: list[list[int]]) -> None:
    got = [a["output_ids"] for a in answers]
    different = [i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b]
    assert not different, [(i, got[i], expected[i]) for i in different]


def test_cold_warm_and_concurrent(prompts: list[list[int]], expected: list[list[int]]) -> None:
    with serving("--dtype", "float32") as server:
        cold = asyncio.run(generate(server.url, prompts, 1))
        check(cold, expected)
        warm = asyncio.run(generate(server.url, prompts, 1))
        check(warm, expected)
        for ids, answer in zip(prompts, warm, strict=True):
            assert answer["meta_info"]["cached_tokens"] == len(ids) - 1
        assert httpx.post(f"{server.url}/flush_cache").status_code == 200
        together = asyncio.run(generate(server.url, prompts, 16))
        check(together, expected)


@pytest.mark.parametrize("depth", [1, 2])
def test_odd_chunks_at_each_run_ahead(prompts: list[list[int]], expected: list[list[int]], depth: int) -> None:
    flags = ["--disable-overlap-schedule"] if depth == 1 else []
    with serving("--dtype", "float32", "--chunked-prefill-size", "37", *flags) as server:
        check(asyncio.run(generate(server.url, prompts, 8)), expected)


def test_suspend_and_resume_in_a_tiny_pool(prompts: list[list[int]], expected: list[list[int]]) -> None:
    short = [i for i, ids in enumerate(prompts) if len(ids) < 64]
    with serving("--dtype", "float32", "--max-total-tokens", "320") as server:
        answers = asyncio.run(generate(server.url, [prompts[i] for i in short], 16))
        check(answers, [expected[i] for i in short])
        retracted = sum(a["meta_info"]["total_retractions"] for a in answers)
        assert retracted > 0, "the pool was too large to force a suspension"


def test_a_long_prompt_is_suspended_and_resumed(prompts: list[list[int]], expected: list[list[int]]) -> None:
    """It comes last in a batch and fits beside the others at first; they go on growing, and it is the youngest."""
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
    order = [*(i for i, ids in enumerate(prompts) if len(ids) < 16), longest]
    growing = len(order) - 1
    pages = -(-(len(prompts[longest]) + 1) // 16) + 2 * growing + 4
    params = [{"temperature": 0, "max_new_tokens": 120, "ignore_eos": True}] * growing
    params.append({**params[0], "max_new_tokens": NEW_TOKENS})
    with serving("--dtype", "float32", "--max-total-tokens", str(16 * pages)) as server:
        batch = {"input_ids": [prompts[i] for i in order], "sampling_params": params}
        response = httpx.post(f"{server.url}/generate", json=batch, timeout=600)
        assert response.status_code == 200, response.text
        answers = response.json()
    check([{"output_ids": a["output_ids"][:NEW_TOKENS]} for a in answers], [expected[i] for i in order])
    assert answers[-1]["meta_info"]["total_retractions"] > 0, "the long prompt was never suspended"
