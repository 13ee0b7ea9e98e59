"""Two ranks that share every expert say what one process says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu_worker import moe_rank
from tests.gpu_worker.tiny_models import random_tokens, reference_logits, save_model


@pytest.mark.timeout(300)
def test_two_ranks_give_the_logits_of_transformers(tmp_path: Path) -> None:
    model = save_model("qwen3-moe-mixed", tmp_path)
    command = [sys.executable, moe_rank.__file__, str(tmp_path), str(tmp_path / "meeting")]
    ranks = [subprocess.Popen([*command, str(rank), "2"]) for rank in (0, 1)]
    try:
        assert [rank.wait(250) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    logits = torch.load(tmp_path / "logits.pt", weights_only=True)
    expected = reference_logits(model, random_tokens(moe_rank.TOKENS, seed=4))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
