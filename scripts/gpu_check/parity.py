"""The worker's answers judged by transformers on the same device: every token it chose, given those before it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from scripts.gpu_check.options import CheckFailed, Options
from scripts.gpu_check.player import Answer

EXACT = 2e-3  # of a logit in fp32


async def parity(options: Options) -> str:
    """fp32: each token is the best one, up to rounding. bf16: no worse than transformers' own bf16, twice over."""
    answers: dict[str, list[Answer]] = {}
    for dtype in ("float32", "bfloat16"):
        async with options.player(dtype) as player:
            prompts = options.prompts(options.rows, 120, player.hello.vocab_size)
            answers[dtype] = await player.generate(prompts, options.count, chunk=50)
    truth = _judge(options, torch.float32)
    gaps, exact = _compare(truth, prompts, answers["float32"])
    errors = np.abs(exact - _own(answers["float32"]))
    if gaps.max() > EXACT or errors.max() > EXACT:
        raise CheckFailed(f"fp32: tokens {gaps.max():.2g} below the best one, log-probabilities {errors.max():.2g} off")
    wide, exact = _compare(truth, prompts, answers["bfloat16"])
    _, theirs = _compare(_judge(options, torch.bfloat16), prompts, answers["bfloat16"])
    off, rough = np.abs(exact - _own(answers["bfloat16"])), np.abs(exact - theirs)
    allowed = 2 * rough.mean() + 0.02
    if off.mean() > allowed or wide.mean() > allowed:
        raise CheckFailed(f"bf16: log-probabilities {off.mean():.3f} off, transformers' bf16 {rough.mean():.3f}")
    return (
        f"fp32: {gaps.size} tokens, at most {gaps.max():.1g} below the best, log-probabilities {errors.max():.1g} off; "
        f"bf16: {off.mean():.4f} off, transformers' own bf16 {rough.mean():.4f}"
    )


def _own(answers: list[Answer]) -> np.ndarray:
    return np.concatenate([answer.logprobs for answer in answers])


def _judge(options: Options, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    return model.to(options.device).eval()


@torch.inference_mode()
def _logits(model: Any, prompt: list[int], answer: Answer) -> torch.Tensor:
    """float32 [len(answer), vocab]: what each of the answer's tokens was chosen from."""
    ids = torch.tensor([[*prompt, *answer.tokens]], device=model.device)
    logits: torch.Tensor = model(ids).logits[0, len(prompt) - 1 : -1].float()
    return logits


def _compare(model: Any, prompts: list[list[int]], answers: list[Answer]) -> tuple[np.ndarray, np.ndarray]:
    """Of each chosen token: how far below the best logit its own is, and its log-probability."""
    gaps, scores = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = _logits(model, prompt, answer)
        chosen = torch.tensor(answer.tokens, device=logits.device).unsqueeze(1)
        gaps.append((logits.amax(1) - logits.gather(1, chosen).squeeze(1)).cpu().numpy())
        scores.append(logits.log_softmax(1).gather(1, chosen).squeeze(1).cpu().numpy())
    return np.concatenate(gaps), np.concatenate(scores)
