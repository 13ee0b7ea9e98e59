"""The whole engine over FlashInfer's fake gives the reference's tokens: mixed steps, nested groups, resumes, models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.gpu_worker.attention.base import AttentionBackend
from services.gpu_worker.attention.flashinfer import FlashInferAttention
from services.gpu_worker.attention.reference import ReferenceAttention
from services.gpu_worker.engine import Engine
from services.gpu_worker.kv_cache import KVCache
from services.gpu_worker.model_runner import LoadedModel, ModelRunner
from services.gpu_worker.slots import SlotLimits
from shared.ints import pack
from shared.messages.request import SamplingParams
from tests.gpu_worker.flashinfer_fake import FakeFlashInfer
from tests.gpu_worker.flashinfer_scene import FREE
from tests.gpu_worker.tiny_models import VOCABULARY, load, random_tokens, save_model
from tests.gpu_worker.toy_engine import Steps, greedy, open_slot, prefill, tokens

PAGE, PAGES, MOST_TOKENS = 16, 48, 256
LIMITS = SlotLimits(8, PAGES, PAGE, 200, VOCABULARY)
CPU = torch.device("cpu")


def steps_of(loaded: LoadedModel, api: FakeFlashInfer | None) -> Steps:
    """An engine over FlashInfer's fake, or over the reference."""
    config = loaded.config
    cache = KVCache(config.num_layers, PAGES, PAGE, config.kv_heads, config.head_dim, config.dtype, CPU)
    attention: AttentionBackend = ReferenceAttention(cache)
    if api is not None:
        attention = FlashInferAttention(cache, config, api, FREE)
    return Steps(Engine(ModelRunner(config, loaded.model, cache, attention, MOST_TOKENS), LIMITS, MOST_TOKENS, CPU))


def conversation(drive: Steps, params: SamplingParams) -> list[list[int]]:
    """Three requests over one prefix, read together for a while; one is suspended and resumed elsewhere."""
    prompt = random_tokens(40, 3)
    ends = [random_tokens(5, 4), random_tokens(3, 5), random_tokens(9, 6)]
    out: list[list[int]] = [[], [], []]
    first = [*prompt, *ends[0]]
    chunk = prefill(0, first[:30], sample=False)
    drive.step(opens=(open_slot(0, len(first), [0, 1, 2, 3, 4], params),), prefills=(chunk,))
    out[0] += tokens(drive.step(prefills=(prefill(0, first[30:]),)))
    opens = tuple(
        open_slot(slot, 32 + 8 + len(ends[slot]), [0, 1, *range(slot * 10, slot * 10 + 4)], params, computed=32)
        for slot in (1, 2)
    )
    rows = tuple(prefill(slot, [*prompt[32:], *ends[slot]]) for slot in (1, 2))
    mixed = tokens(drive.step([0], opens=opens, prefills=rows))
    for row, token in zip((0, 1, 2), mixed, strict=True):
        out[row].append(token)
    nested = {"group_slots": pack([2, 0, 1, 2, 0]), "group_sizes": pack([3, 2]), "group_pages": pack([1, 2])}
    for number in range(6):
        groups = nested if number % 2 else groups_of(2, 0, 1)
        for row, token in zip((1, 0, 2), tokens(drive.step([1, 0, 2], **groups)), strict=True):
            out[row].append(token)
    known = [*prompt, *ends[1], *out[1]]
    again = open_slot(5, len(prompt) + len(ends[1]), [0, 1, 30, 31, 32, 33], params, computed=32)
    resumed = drive.step(
        [0, 2], closes=pack([1]), opens=(again,), prefills=(prefill(5, known[32:]),), **groups_of(0, 2)
    )
    for row, token in zip((0, 2, 1), tokens(resumed), strict=True):
        out[row].append(token)
    for _ in range(3):
        for row, token in zip((0, 1, 2), tokens(drive.step([0, 5, 2], **groups_of(0, 2))), strict=True):
            out[row].append(token)
    return out


def groups_of(*slots: int) -> dict[str, bytes]:
    return {"group_slots": pack(list(slots)), "group_sizes": pack([len(slots)]), "group_pages": pack([2])}


MODELS = {
    "llama": {"head_dim": 64},
    "qwen3": {"head_dim": 128},
    "mistral": {"head_dim": 64, "sliding_window": 30},
    "qwen2-windows": {"head_dim": 64, "sliding_window": 46},
    "gemma2": {"head_dim": 64, "query_pre_attn_scalar": 64},
}
PARAMS = {"greedy": greedy(), "drawn": SamplingParams(temperature=1.0, top_p=0.9, seed=11)}


@pytest.fixture(scope="module", params=MODELS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = tmp_path_factory.mktemp(request.param)
    save_model(request.param, folder, **MODELS[request.param])
    return load(folder)


@pytest.mark.parametrize("params", PARAMS)
def test_tokens_are_the_references(loaded: LoadedModel, params: str) -> None:
    api = FakeFlashInfer(float32=True)
    expected = conversation(steps_of(loaded, None), PARAMS[params])
    assert conversation(steps_of(loaded, api), PARAMS[params]) == expected
    assert [len(row) for row in expected] == [12, 11, 11]
    cascades = api.calls.count("merge_state_in_place")
    full = sum(spec.sliding_window == 0 for spec in loaded.config.attention)
    assert cascades >= (10 + 3) * full  # three of ten steps have two levels
    if all(spec.sliding_window == 30 for spec in loaded.config.attention):
        assert cascades == 0


def test_bfloat16_tokens(tmp_path: Path) -> None:
    save_model("llama", tmp_path, head_dim=64)
    model = load(tmp_path, dtype=torch.bfloat16)
    assert conversation(steps_of(model, FakeFlashInfer()), greedy()) == conversation(steps_of(model, None), greedy())
