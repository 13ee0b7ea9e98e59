"""Graphs on a host: recorded work over the same buffers, with poison wherever a replay must not read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.gpu_worker.attention.base import AttentionBackend
from services.gpu_worker.attention.reference import ReferenceAttention
from services.gpu_worker.batch import ForwardBatch, HostColumns, SharedGroup
from services.gpu_worker.cuda.device import HostDevice
from services.gpu_worker.cuda.engine import PipelinedEngine
from services.gpu_worker.cuda.graphs import EAGER_BYTES_PER_LAYER, DecodeGraphs, GraphShape, graph_sizes
from services.gpu_worker.engine import Engine
from services.gpu_worker.kv_cache import KVCache
from services.gpu_worker.slots import SlotLimits
from tests.gpu_worker.step_player import Player, without_times
from tests.gpu_worker.step_stories import CONTEXT, MAX_TOKENS, PAGES_EACH, SLOTS, Writer
from tests.gpu_worker.tiny_models import UNDEFINED_PAGE, VOCABULARY, load
from tests.gpu_worker.toy_engine import CPU, PAGE

NUM_PAGES = SLOTS * PAGES_EACH


class PoisonedGraph:
    def __init__(self, work: Callable[[], torch.Tensor], poison: Callable[[], None]) -> None:
        self._work, self._poison = work, poison
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self._poison()
        self._work()


class PoisonedDevice(HostDevice):
    """Before each replay, whatever it has to write first, or must not read at all, is made useless."""

    def __init__(self, kv_cache: KVCache) -> None:
        self._kv_cache = kv_cache
        self.graphs: list[PoisonedGraph] = []

    def capture(self, work: Callable[[], torch.Tensor]) -> tuple[Any, torch.Tensor]:
        output = work()

        def poison() -> None:
            output.fill_(float("nan"))
            for layer in self._kv_cache.layers:
                layer[NUM_PAGES] = float("nan")

        self.graphs.append(PoisonedGraph(work, poison))
        return self.graphs[-1], output


class PoisonedAttention:
    """A GraphAttention over the reference; what a row's table holds beyond its pages is no page."""

    def __init__(self, kv_cache: KVCache, page_size: int = PAGE) -> None:
        self._cache = kv_cache
        self._page_size = page_size
        self._eager = ReferenceAttention(kv_cache)
        self.gain = 0
        self.planned: list[ForwardBatch] = []

    @property
    def kv_bytes_read(self) -> int:
        return self._eager.kv_bytes_read

    def plan(self, batch: ForwardBatch) -> None:
        self._eager.plan(batch)

    def forward(self, *args: Any) -> torch.Tensor:
        return self._eager.forward(*args)

    def graph_backend(self, batch_size: int, max_pages: int) -> AttentionBackend:
        outer, inner = self, ReferenceAttention(self._cache)

        class Fixed:
            kv_bytes_read = 0

            def plan(self, batch: ForwardBatch) -> None:
                assert batch.num_rows == batch_size
                assert batch.page_tables.shape[1] == max_pages
                check_host(batch, outer._page_size)
                used = -(-batch.kv_lengths // outer._page_size)
                beyond = torch.arange(max_pages) >= used[:, None]
                batch.page_tables[beyond] = UNDEFINED_PAGE
                outer.planned.append(batch)
                inner.plan(batch)

            def forward(self, *args: Any) -> torch.Tensor:
                return inner.forward(*args)

        return Fixed()

    def cascade_gain(self, batch: ForwardBatch) -> int:
        return self.gain if batch.groups else 0


def check_host(batch: ForwardBatch, page_size: int) -> None:
    """What plans are made from is what the kernels will find."""
    host = batch.host
    assert host is not None
    assert host.qo_indptr.tolist() == batch.qo_indptr.tolist() == list(range(batch.num_rows + 1))
    assert host.kv_lengths.tolist() == batch.kv_lengths.tolist()
    assert host.table_width == batch.page_tables.shape[1]
    assert int(host.kv_lengths.max()) <= page_size * host.table_width


class Rig:
    """A tiny model with graphs, and the same model without."""

    def __init__(self, folder: Path, sizes: list[int] | None = None) -> None:
        loaded = load(folder)
        limits = SlotLimits(SLOTS, NUM_PAGES, PAGE, CONTEXT, VOCABULARY)
        self.plain = Engine(loaded.build_runner(NUM_PAGES, PAGE, MAX_TOKENS), limits, MAX_TOKENS, CPU)
        runner = loaded.build_runner(NUM_PAGES + 1, PAGE, MAX_TOKENS)
        self.attention = PoisonedAttention(runner.kv_cache)
        self.device = PoisonedDevice(runner.kv_cache)
        shape = GraphShape(SLOTS, limits.max_pages, PAGE, NUM_PAGES, VOCABULARY, loaded.config.num_layers)
        self.graphs = DecodeGraphs(loaded.model, self.attention, shape, self.device)
        self.graphs.capture(sizes)
        self.engine = PipelinedEngine(Engine(runner, limits, MAX_TOKENS, CPU), self.device, self.graphs)

    @property
    def replays(self) -> int:
        return sum(graph.replays for graph in self.device.graphs)


def test_sizes() -> None:
    assert graph_sizes(40) == [1, 2, 4, 8, 16, 24, 32, 40]
    assert graph_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert graph_sizes(3) == [1, 2, 3]
    assert graph_sizes(1) == [1]


@pytest.mark.parametrize("sizes", [None, [4], [2]])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_graphs_with_padding_give_the_tokens_of_eager_steps(
    llama_folder: Path, sizes: list[int] | None, seed: int
) -> None:
    rig = Rig(llama_folder, sizes)
    story = Writer(seed, rig.plain).write(40)
    player = Player(story, 0.9, seed, rig.engine)
    for ours, theirs in zip(player.play(), story.results, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert without_times(ours).errors == theirs.errors
    assert rig.replays >= 2
    assert max(batch.num_rows for batch in rig.attention.planned) == max(sizes or [SLOTS])


def decode_batch(rows: int, groups: tuple[SharedGroup, ...] = ()) -> ForwardBatch:
    host = HostColumns(np.arange(rows + 1, dtype=np.int32), np.ones(rows, dtype=np.int32), 1)
    return ForwardBatch(
        token_ids=torch.arange(rows) + 5,
        positions=torch.zeros(rows, dtype=torch.int64),
        qo_indptr=torch.from_numpy(host.qo_indptr),
        kv_lengths=torch.from_numpy(host.kv_lengths),
        page_tables=torch.arange(rows, dtype=torch.int32)[:, None],
        kv_slots=torch.arange(rows) * PAGE,
        logit_rows=torch.arange(rows),
        num_decode_rows=rows,
        groups=groups,
        host=host,
    )


@torch.inference_mode()
def test_the_smallest_graph_that_fits_is_replayed(llama_folder: Path) -> None:
    rig = Rig(llama_folder, [1, 2, 4])
    for rows, size in ((1, 1), (3, 4), (2, 2), (4, 4)):
        logits = rig.graphs.forward(decode_batch(rows))
        assert logits is not None
        assert logits.shape == (rows, VOCABULARY)
        assert bool(logits.isfinite().all())
        assert rig.attention.planned[-1].num_rows == size
    assert Rig(llama_folder, [1]).graphs.forward(decode_batch(2)) is None


@torch.inference_mode()
def test_rows_that_are_no_longer_used_are_padding_again(llama_folder: Path) -> None:
    rig = Rig(llama_folder, [4])
    before = [layer[:NUM_PAGES].clone() for layer in rig.engine.kv_cache.layers]
    rig.graphs.forward(decode_batch(4))
    for layer, old in zip(rig.engine.kv_cache.layers, before, strict=True):
        layer[:NUM_PAGES] = old
    rig.graphs.forward(decode_batch(1))
    for layer, old in zip(rig.engine.kv_cache.layers, before, strict=True):
        torch.testing.assert_close(layer[1:NUM_PAGES], old[1:], rtol=0, atol=0)


@torch.inference_mode()
def test_a_cascade_that_saves_more_than_launching_costs_runs_eagerly(llama_folder: Path) -> None:
    rig = Rig(llama_folder)
    grouped = decode_batch(2, (SharedGroup(torch.tensor([0, 1], dtype=torch.int32), 1),))
    rig.attention.gain = 2 * EAGER_BYTES_PER_LAYER
    assert rig.graphs.forward(grouped) is not None
    rig.attention.gain += 1
    assert rig.graphs.forward(grouped) is None
    assert rig.graphs.forward(decode_batch(2)) is not None


def test_prefills_run_eagerly_and_stats_say_what_ran(llama_folder: Path) -> None:
    rig = Rig(llama_folder)
    seen = set()
    story = Writer(5, rig.plain).write(20)
    for command in story.commands:
        rig.engine.execute(command, story.masks.__getitem__, 7)
        stats = rig.engine.stats
        assert stats.is_cuda_graph == (stats.decode_rows > 0 and not stats.prefill_rows)
        seen.add(stats.is_cuda_graph)
    assert seen == {True, False}


def test_attention_that_cannot_be_captured_is_refused(llama_folder: Path) -> None:
    loaded = load(llama_folder)
    runner = loaded.build_runner(8, PAGE, MAX_TOKENS)
    shape = GraphShape(2, 2, PAGE, 7, VOCABULARY, 2)
    with pytest.raises(TypeError, match="captured"):
        DecodeGraphs(loaded.model, ReferenceAttention(runner.kv_cache), shape, HostDevice())
