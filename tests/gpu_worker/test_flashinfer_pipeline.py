"""Run-ahead, graphs with padding and cascades together over FlashInfer's fake: the tokens of the plain reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.gpu_worker.attention.flashinfer import FlashInferAttention
from services.gpu_worker.cuda import graphs
from services.gpu_worker.cuda.device import HostDevice
from services.gpu_worker.cuda.engine import PipelinedEngine
from services.gpu_worker.cuda.graphs import DecodeGraphs, GraphShape
from services.gpu_worker.engine import Engine
from services.gpu_worker.kv_cache import KVCache
from services.gpu_worker.model_runner import LoadedModel, ModelRunner
from services.gpu_worker.slots import SlotLimits
from tests.gpu_worker.flashinfer_fake import FakeFlashInfer
from tests.gpu_worker.flashinfer_scene import FREE
from tests.gpu_worker.step_player import Player
from tests.gpu_worker.step_stories import CONTEXT, MAX_TOKENS, PAGES_EACH, SLOTS, Writer
from tests.gpu_worker.test_flashinfer_engine import LIMITS, MOST_TOKENS, conversation, steps_of
from tests.gpu_worker.tiny_models import VOCABULARY, load, save_model
from tests.gpu_worker.toy_engine import CPU, PAGE, Steps, greedy

NUM_PAGES = SLOTS * PAGES_EACH


@pytest.fixture(scope="module", params=["llama", "qwen2-windows"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = tmp_path_factory.mktemp(request.param)
    save_model(request.param, folder, head_dim=64, num_attention_heads=8)
    return load(folder)


def pipelined(loaded: LoadedModel, api: FakeFlashInfer, limits: SlotLimits, max_tokens: int) -> PipelinedEngine:
    """All of it; the page beyond the scheduler's is the graphs'."""
    config, pages = loaded.config, limits.num_pages + 1
    cache = KVCache(config.num_layers, pages, limits.page_size, config.kv_heads, config.head_dim, config.dtype, CPU)
    attention = FlashInferAttention(cache, config, api, FREE)
    runner = ModelRunner(config, loaded.model, cache, attention, max_tokens)
    shape = GraphShape(
        limits.max_slots, limits.max_pages, limits.page_size, limits.num_pages, VOCABULARY, config.num_layers
    )
    captured = DecodeGraphs(loaded.model, attention, shape, HostDevice())
    captured.capture()
    return PipelinedEngine(Engine(runner, limits, max_tokens, CPU), HostDevice(), captured)


@pytest.mark.parametrize("seed", [1, 2])
def test_stories_of_many_requests(loaded: LoadedModel, seed: int) -> None:
    limits = SlotLimits(SLOTS, NUM_PAGES, PAGE, CONTEXT, VOCABULARY)
    plain = Engine(loaded.build_runner(NUM_PAGES, PAGE, MAX_TOKENS), limits, MAX_TOKENS, CPU)
    story = Writer(seed, plain).write(30)
    player = Player(story, 0.9, seed, pipelined(loaded, FakeFlashInfer(float32=True), limits, MAX_TOKENS))
    results = player.play()
    assert [result.token_ids for result in results] == [result.token_ids for result in story.results]
    assert player.events["ahead"] > 5


@pytest.mark.parametrize("worth", ["graphs", "cascades"])
def test_a_conversation_with_groups(loaded: LoadedModel, worth: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped decode steps are replayed row by row, or run eagerly in levels: it is the same."""
    api, seen = FakeFlashInfer(float32=True), set()
    monkeypatch.setattr(graphs, "EAGER_BYTES_PER_LAYER", 0 if worth == "cascades" else 1 << 40)

    class Watched(Steps):
        def step(self, decode: list[int] | None = None, **fields: Any) -> Any:
            merges = api.calls.count("merge_state_in_place")
            result = super().step(decode, **fields)
            cascade = api.calls.count("merge_state_in_place") > merges
            seen.add((self.engine.stats.is_cuda_graph, cascade))
            return result

    expected = conversation(steps_of(loaded, None), greedy())
    assert conversation(Watched(pipelined(loaded, api, LIMITS, MOST_TOKENS)), greedy()) == expected
    assert ((True, False) in seen) == (worth == "graphs")
    assert (False, True) in seen
