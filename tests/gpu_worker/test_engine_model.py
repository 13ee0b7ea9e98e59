"""The engine over a real tiny decoder: tokens and scores of transformers, whatever the chunks and the company."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.gpu_worker.cuda.start import graph_device, split
from services.gpu_worker.engine import Engine
from services.gpu_worker.slots import SlotLimits
from shared.ints import pack
from tests.gpu_worker.tiny_models import VOCABULARY, load, random_tokens, reference_logits, save_model
from tests.gpu_worker.toy_engine import Steps, floats, greedy, open_slot, prefill, tokens

PAGE = 4

pytestmark = pytest.mark.usefixtures("both_engines")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("llama")
    return folder, save_model("llama", folder)


def steps_of(folder: Path, backend: str) -> Steps:
    runner = load(folder, attention_backend=backend).build_runner(64, PAGE, 128)
    cpu = torch.device("cpu")
    return Steps(split(Engine(runner, SlotLimits(8, 64, PAGE, 200, VOCABULARY), 128, cpu), graph_device(cpu)))


def generate(model: Any, prompt: list[int], count: int) -> list[int]:
    out: list[int] = []
    for _ in range(count):
        out.append(int(reference_logits(model, [*prompt, *out])[-1].argmax()))
    return out


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_greedy_equals_transformers_in_mixed_steps(model: tuple[Path, Any], backend: str) -> None:
    folder, theirs = model
    driver = steps_of(folder, backend)
    long, short = random_tokens(21, 1), random_tokens(5, 2)
    out_short = tokens(driver.step(opens=(open_slot(3, 5, [60, 61, 62, 63]),), prefills=(prefill(3, short),)))
    opened = open_slot(0, 21, list(range(9)))
    out_short += tokens(driver.step([3], opens=(opened,), prefills=(prefill(0, long[:10], sample=False),)))
    mixed = tokens(driver.step([3], prefills=(prefill(0, long[10:]),)))
    out_short, out_long = [*out_short, mixed[0]], [mixed[1]]
    for _ in range(6):
        first, second = tokens(driver.step([0, 3]))
        out_long.append(first)
        out_short.append(second)
    assert out_long == generate(theirs, long, 7)
    assert out_short == generate(theirs, short, 9)


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_shared_pages_copied_pages_and_groups_change_nothing(model: tuple[Path, Any], backend: str) -> None:
    folder, theirs = model
    driver = steps_of(folder, backend)
    prompt = random_tokens(14, 3)
    others = [[*prompt[:14], *random_tokens(3, 4)], [*prompt[:13], *random_tokens(2, 5)]]
    out = [tokens(driver.step(opens=(open_slot(0, 14, list(range(8))),), prefills=(prefill(0, prompt),)))]
    opens = (
        open_slot(1, 17, [0, 1, 2, 20, 21, 22, 23], computed=14),
        open_slot(2, 15, [0, 1, 2, 30, 31, 32, 33], computed=13),
    )
    rows = (prefill(1, others[0][14:]), prefill(2, others[1][13:]))
    first = tokens(driver.step([0], opens=opens, prefills=rows, page_copies=pack([3, 20, 3, 30])))
    out = [[*out[0], first[0]], [first[1]], [first[2]]]
    flat = {"group_slots": pack([2, 0, 1]), "group_sizes": pack([3]), "group_pages": pack([3])}
    nested = {"group_slots": pack([2, 0, 1, 0, 2]), "group_sizes": pack([3, 2]), "group_pages": pack([1, 3])}
    for groups in (flat, nested, nested, flat, {}):
        for row, token in zip((1, 0, 2), tokens(driver.step([1, 0, 2], **groups)), strict=True):
            out[row].append(token)
    assert out[0] == generate(theirs, prompt, 7)
    assert out[1:] == [generate(theirs, other, 6) for other in others]


@pytest.mark.parametrize("sizes", [[20], [7, 13], [1, 18, 1]])
def test_prompt_scores_equal_transformers(model: tuple[Path, Any], sizes: list[int]) -> None:
    folder, theirs = model
    driver = steps_of(folder, "reference")
    prompt = random_tokens(20, 6)
    params = greedy(logprobs=2, prompt_logprobs_from=4)
    columns: dict[str, bytes] = {"logprobs": b"", "top_logprobs": b"", "top_ids": b""}
    at = 0
    for size in sizes:
        end = at + size
        row = prefill(0, prompt[at:end], end == 20, score_from=4, next_token=prompt[end] if end < 20 else -1)
        opens = (open_slot(0, 20, [0, 1, 2, 3, 4, 5], params),) if at == 0 else ()
        for scored in driver.step(opens=opens, prefills=(row,)).prompt_scores:
            columns = {name: data + getattr(scored.scores, name) for name, data in columns.items()}
        at = end
    expected = reference_logits(theirs, prompt)[3:19].log_softmax(1)
    best = expected.topk(2, dim=1)
    assert floats(columns["logprobs"]) == pytest.approx(expected[range(16), prompt[4:]].tolist(), abs=1e-4)
    assert floats(columns["top_logprobs"]) == pytest.approx(best.values.flatten().tolist(), abs=1e-4)
    assert np.frombuffer(columns["top_ids"], "<i4").tolist() == best.indices.flatten().tolist()
