"""Under `deterministic` a row's logits have the same bits alone, in any batch and in any chunks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu_worker.tiny_models import Sequence, Session, load, random_tokens, save_model


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama-biased", "qwen3", "mistral", "gemma2"])
def test_bits_do_not_depend_on_the_company(tmp_path: Path, name: str, dtype: torch.dtype, backend: str) -> None:
    save_model(name, tmp_path)
    loaded = load(tmp_path, dtype=dtype, attention_backend=backend, deterministic=True)
    tokens = random_tokens(29, seed=1)
    alone = Session(loaded).step([(Sequence(tokens), 29)])

    session, sequence = Session(loaded, seed=5), Sequence(tokens)
    chunked = torch.cat([session.step([(sequence, count)]) for count in (3, 1, 1, 17, 7)])
    assert torch.equal(chunked, alone)

    session, sequence = Session(loaded, seed=6), Sequence(tokens)
    others = [Sequence(random_tokens(20, seed=seed)) for seed in (2, 3)]
    first = session.step([(others[0], 9), (others[1], 13), (sequence, 20)])[22:]
    second = torch.cat([session.step([(others[0], 1), (sequence, 1), (others[1], 1)])[1:2] for _ in range(5)])
    last = session.step([(others[0], 1), (sequence, 4)])[1:]
    assert torch.equal(torch.cat([first, second, last]), alone)
