"""Greedy fp32 output equals transformers' own generate, token by token, however it is scheduled."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.system.prompts import thirty
from tests.system.servers import serving

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]
NEW_TOKENS = 24


# With guesses the answers are complete before the pool is short of pages.
SLOWLY = ("--dtype", "float32", "--speculative-algorithm", "none")


@pytest.fixture(scope="module")
def prompts(model_dir: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    ids = [tokenizer.encode(text).ids for text in thirty()]
    assert max(map(len, ids)) >= 3000
    return ids


@pytest.fixture(scope="module")
def passes(prompts: list[list[int]]) -> dict[str, list[dict[str, Any]]]:
    """One server's answers while nothing is cached, while all is, and to all at once with nothing cached again."""
    with serving("--dtype", "float32") as server:
        cold, warm = some_alone(server.url, prompts), some_alone(server.url, prompts)
        assert httpx.post(f"{server.url}/flush_cache").status_code == 200
        return {"cold": cold, "warm": warm, "together": asyncio.run(generate(server.url, prompts, 16))}


@pytest.fixture(scope="module")
def expected(model_dir: Path, prompts: list[list[int]], passes: dict[str, list[dict[str, Any]]]) -> list[list[int]]:
    """What transformers generates, alone, in fp32.

    Where each token of our answer is its choice after all before it, that is the answer; one forward tells.
    """
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.inference_mode():
        return [
            ours if len(ours) == NEW_TOKENS and chosen_after(model, ids, ours) == ours else generated_after(model, ids)
            for ids, ours in zip(prompts, (answer["output_ids"] for answer in passes["cold"]), strict=True)
        ]


def chosen_after(model: PreTrainedModel, ids: list[int], output: list[int]) -> list[int]:
    """The most likely token after the prompt and after each token of the output but the last."""
    logits = model(torch.tensor([ids + output[:-1]]), logits_to_keep=len(output), use_cache=False).logits[0]
    chosen: list[int] = logits.argmax(1).tolist()
    return chosen


def generated_after(model: PreTrainedModel, ids: list[int]) -> list[int]:
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
    tokens: list[int] = generated[0, len(ids) :].tolist()
    return tokens


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


def some_alone(url: str, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Every third prompt and the longest one by itself, then the others by fours."""
    longest = max(map(len, prompts))
    alone = [i for i, ids in enumerate(prompts) if i % 3 == 0 or len(ids) == longest]
    others = [i for i in range(len(prompts)) if i not in alone]
    answers = asyncio.run(generate(url, [prompts[i] for i in alone], 1))
    answers += asyncio.run(generate(url, [prompts[i] for i in others], 4))
    return [answer for _, answer in sorted(zip(alone + others, answers, strict=True), key=lambda pair: pair[0])]


def check(answers: list[dict[str, Any]], expected: list[list[int]]) -> None:
    got = [a["output_ids"] for a in answers]
    different = [i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b]
    assert not different, [(i, got[i], expected[i]) for i in different]


def test_cold_warm_and_concurrent(
    prompts: list[list[int]], passes: dict[str, list[dict[str, Any]]], expected: list[list[int]]
) -> None:
    for answers in passes.values():
        check(answers, expected)
    for ids, answer in zip(prompts, passes["warm"], strict=True):
        assert answer["meta_info"]["cached_tokens"] == len(ids)


@pytest.mark.parametrize("depth", [1, 2])
def test_odd_chunks_at_each_run_ahead(prompts: list[list[int]], expected: list[list[int]], depth: int) -> None:
    flags = ["--disable-overlap-schedule"] if depth == 1 else []
    with serving("--dtype", "float32", "--chunked-prefill-size", "37", *flags) as server:
        # The longest first, so that its chunks go beside all the others.
        check(asyncio.run(generate(server.url, prompts[::-1], 8)), expected[::-1])


def test_suspend_and_resume_in_a_tiny_pool(prompts: list[list[int]], expected: list[list[int]]) -> None:
    short = [i for i, ids in enumerate(prompts) if len(ids) < 64]
    with serving(*SLOWLY, "--max-total-tokens", "320") as server:
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
    params = [{"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}] * growing
    params.append({**params[0], "max_new_tokens": NEW_TOKENS})
    with serving(*SLOWLY, "--max-total-tokens", str(16 * pages)) as server:
        batch = {"input_ids": [prompts[i] for i in order], "sampling_params": params}
        response = httpx.post(f"{server.url}/generate", json=batch, timeout=600)
        assert response.status_code == 200, response.text
        answers = response.json()
    check([{"output_ids": a["output_ids"][:NEW_TOKENS]} for a in answers], [expected[i] for i in order])
    assert answers[-1]["meta_info"]["total_retractions"] > 0, "the long prompt was never suspended"
