"""One worker of two ranks: the same answers as one rank, and none is lost when a rank dies."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from radixfleet.local_server import LocalServer
from tests.system.processes import descendants, eventually
from tests.system.servers import serving

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49153,  # does not divide: the last rank has one row less
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "attention_bias": True,
    "mlp_bias": True,
    "eos_token_id": 2,
}
ON_CPU = "RADIXFLEET_PIPELINED_ON_CPU"
PROMPTS = [[5, 6, 7], list(range(100, 180)), [9] * 33]


@pytest.fixture(scope="module")
def folder(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model without weights: each rank draws its part of the same random ones."""
    made = tmp_path_factory.mktemp("ranks")
    (made / "config.json").write_text(json.dumps(CONFIG))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_dir / name, made / name)
    return made


def flags(folder: Path) -> list[str]:
    model = ["--model-path", str(folder), "--load-format", "dummy", "--dtype", "float32", "--max-total-tokens", "4096"]
    return [*model, "--worker-grace", "120"]  # two processes that start anew on a busy machine


def answers(server: LocalServer, tokens: int = 24) -> list[list[int]]:
    """Greedy, seeded and penalised ids of every prompt, asked together."""
    greedy = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    drawn = {**greedy, "temperature": 0.8, "top_p": 0.9, "sampling_seed": 7}
    penalised = {**greedy, "repetition_penalty": 1.3, "presence_penalty": 0.5}
    kinds = (greedy, drawn, penalised)
    body = {"input_ids": PROMPTS * len(kinds), "sampling_params": [kind for kind in kinds for _ in PROMPTS]}
    response = httpx.post(f"{server.url}/generate", json=body, timeout=150)
    if "retry-after" in response.headers:  # the group was gone before the requests came, and none was let in
        assert ready_again(server)
        response = httpx.post(f"{server.url}/generate", json=body, timeout=150)
    assert response.status_code == 200, response.text
    return [answer["output_ids"] for answer in response.json()]


def ready_again(server: LocalServer) -> bool:
    return eventually(lambda: httpx.get(f"{server.url}/ready", timeout=10).status_code == 200)


def second_rank(server: LocalServer) -> int:
    return next(pid for pid, command in descendants(server.process.pid).items() if "--tp-rank=1" in command)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    with serving(*flags(folder)) as server:
        return answers(server)


@pytest.mark.parametrize("halves", [False, True])
def test_two_ranks_answer_as_one_and_outlive_a_rank(folder: Path, expected: list[list[int]], halves: bool) -> None:
    """Their steps in one piece, or in two halves as on CUDA."""
    with serving(*flags(folder), "--tp-size", "2", env={ON_CPU: "1"} if halves else {}) as server:
        assert ("steps are launched ahead of results" in server.output) == halves
        pids = [*descendants(server.process.pid)]
        assert answers(server) == expected
        os.kill(second_rank(server), signal.SIGKILL)
        assert answers(server) == expected  # the step fails, the group starts anew, the requests go on
        assert ready_again(server)
        pids += [*descendants(server.process.pid)]
    assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 10.0)


def test_a_model_that_does_not_divide_is_refused(folder: Path) -> None:
    with (
        pytest.raises(Exception, match="4 query heads do not divide by --tp-size 3"),
        serving(*flags(folder), "--tp-size", "3"),
    ):
        pass
