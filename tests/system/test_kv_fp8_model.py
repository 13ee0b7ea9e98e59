"""The small model with K and V of 8 bits: what it says is nearly what it says with 32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from services.gpu_worker.model_runner import KvCacheDtype, load_model
from tests.gpu_worker.tiny_models import Sequence, Session
from tests.system.prompts import thirty

PROMPT_TOKENS = 160
NEW_TOKENS = 24

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]


def session(model_dir: Path, kv_cache_dtype: KvCacheDtype) -> Session:
    loaded = load_model(
        str(model_dir),
        device=torch.device("cpu"),
        dtype=torch.float32,
        load_format="auto",
        model_impl="own",
        attention_backend="reference",
        context_length=512,
        deterministic=False,
        kv_cache_dtype=kv_cache_dtype,
    )
    return Session(loaded, num_pages=32, page_size=16)


def test_logits_and_greedy_tokens_are_nearly_the_same(model_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    prompt = tokenizer.encode(" ".join(thirty())).ids[:PROMPT_TOKENS]
    full, small = session(model_dir, "auto"), session(model_dir, "fp8_e4m3")
    sequences = [Sequence(list(prompt)), Sequence(list(prompt))]
    logits = [run.step([(sequence, PROMPT_TOKENS)]) for run, sequence in zip((full, small), sequences, strict=True)]
    distance = float((logits[1] - logits[0]).norm() / logits[0].norm())
    equal = float((logits[1].argmax(-1) == logits[0].argmax(-1)).float().mean())
    chosen = logits[0][-1:].argmax(-1)
    same = 0
    for _ in range(NEW_TOKENS):  # both continue what the full cache says
        token = int(chosen[-1])
        both = []
        for run, sequence in zip((full, small), sequences, strict=True):
            sequence.tokens.append(token)
            both.append(run.step([(sequence, 1)])[-1])
        same += int(both[0].argmax() == both[1].argmax())
        chosen = both[0].argmax(-1, keepdim=True)
    assert distance < 0.1
    assert equal > 0.8
    assert same >= 0.75 * NEW_TOKENS
