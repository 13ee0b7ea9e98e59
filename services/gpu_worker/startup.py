"""From configuration to an engine that works: device, weights, KV cache; leaves the wire to the worker.

Runs in the compute thread.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import structlog
import torch

from services.gpu_worker import device as devices
from services.gpu_worker.cuda.device import GraphDevice
from services.gpu_worker.cuda.edits import most_bytes
from services.gpu_worker.cuda.graphs import DecodeGraphs
from services.gpu_worker.cuda.start import GraphPlan, graph_device, split
from services.gpu_worker.engine import Engine
from services.gpu_worker.executor import StepEngine
from services.gpu_worker.faults import is_out_of_memory
from services.gpu_worker.kv_cache import KV_LAYOUT
from services.gpu_worker.memory import (
    MIB,
    MemoryPlanError,
    PoolWish,
    allocate_pool,
    free_bytes,
    least_pages,
    own_bytes,
    plan_pages,
    release_cached,
)
from services.gpu_worker.model_runner import LoadedModel, ModelRunner, load_model
from services.gpu_worker.models.config import DTYPES
from services.gpu_worker.parallel.group import TensorGroup
from services.gpu_worker.parallel.leader import lead
from services.gpu_worker.parallel.start import open_group
from services.gpu_worker.slots import SlotLimits
from shared.config import WorkerConfig
from shared.messages.step import WorkerHello

log = structlog.get_logger(__name__)

DEFAULT_SLOTS = 256
MAX_DRAFTS = 31  # with the last token two tiles of 16 rows
DEFAULT_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}
MEM_FRACTION = {"cpu": 0.6, "cuda": 0.88}  # a machine's memory is rarely for one process alone, a card's mostly is


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """An engine and what the scheduler is told of it; the hello's ids are filled in by the worker."""

    engine: StepEngine
    hello: WorkerHello
    gauges: dict[str, float] = field(default_factory=dict)  # what does not change while it lives


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """One rank's engine; of a worker that is one process, all of it."""

    engine: Engine
    hello: WorkerHello
    gauges: dict[str, float]
    group: TensorGroup | None
    device: GraphDevice | None  # None: its steps are best executed in one piece
    graphs: DecodeGraphs | None


def start_engine(config: WorkerConfig) -> StartedEngine:
    """The engine of a worker, or of rank 0 with the other ranks behind it. Raises ModelError, MemoryPlanError."""
    built = build_engine(config)
    if built.group is not None:
        return StartedEngine(lead(built.engine, built.group, built.device), built.hello, built.gauges)
    return StartedEngine(split(built.engine, built.device, built.graphs), built.hello, built.gauges)


def build_engine(config: WorkerConfig) -> BuiltEngine:
    """Meet the other ranks, load the weights and allocate the cache. Raises ModelError, MemoryPlanError."""
    began = time.monotonic()
    threads = devices.set_torch_threads(devices.threads_of(config))
    device = devices.resolve(config.device, config.tp_rank)
    group = open_group(config, device)
    free_before, own_before = free_bytes(device), own_bytes(device)
    log.info("loading weights", model=config.model_path, device=str(device), threads=threads)
    loading = time.monotonic()
    try:
        model = _load(config, device, group)
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryPlanError(f"the weights of {config.model_path} do not fit into {_name_of(device)}") from error
    loaded = time.monotonic()
    release_cached()  # what loading has used beside the weights would count as theirs, and the pool would lack it
    weight_bytes = own_bytes(device) - own_before
    wish = _wish(config, model, device)
    graph_plan = GraphPlan.of(config, model, wish.max_slots)
    reserved = graph_plan.reserve(model.config, wish.page_size, wish.bytes_per_page)
    counts = most_bytes(wish.max_slots, model.config.vocab_size) if device.type == "cuda" else 0
    pages = plan_pages(wish, free_before, free_bytes(device) - reserved - counts)
    if group is not None:
        pages = group.least(pages)
    tokens = config.max_batched_tokens or DEFAULT_BATCHED_TOKENS[device.type]
    runner, pages = _allocate(model, wish, pages, tokens, group, graph_plan.scratch_pages)
    log.info(f"KV cache: {pages} pages, {pages * wish.page_size} tokens, {pages * wish.bytes_per_page // MIB} MiB")
    steps_on = graph_device(device)
    graphs = graph_plan.capture(runner, steps_on, pages, wish.page_size, reserved) if steps_on is not None else None
    native = model.is_batch_invariant and group is None and steps_on is None
    drafts = MAX_DRAFTS if native else 0
    vocab = model.config.vocab_size
    limits = SlotLimits(wish.max_slots, pages, wish.page_size, wish.max_context, vocab, drafts, native)
    hello = WorkerHello(
        worker_id="",
        incarnation=0,
        model=config.model_name or config.model_path,
        model_digest=model.config.digest,
        page_size=wish.page_size,
        num_pages=pages,
        max_slots=wish.max_slots,
        max_batched_tokens=tokens,
        max_context=wish.max_context,
        max_inflight_steps=config.max_inflight_steps,
        vocab_size=vocab,
        device=_name_of(device),
        kv_dtype=runner.kv_cache.format,
        kv_layout=KV_LAYOUT,
        kv_bytes_per_page=wish.bytes_per_page * config.tp_size,
        tp_size=config.tp_size,
        max_drafts=drafts,
        keeps_hidden=native,
    )
    gauges = {
        "weight_bytes": float(weight_bytes),
        "kv_bytes": float(pages * wish.bytes_per_page),
        "load_weights_seconds": loaded - loading,
        "startup_seconds": time.monotonic() - began,
    }
    return BuiltEngine(Engine(runner, limits, tokens, device), hello, gauges, group, steps_on, graphs)


def _allocate(
    model: LoadedModel, wish: PoolWish, pages: int, max_batched_tokens: int, group: TensorGroup | None, scratch: int
) -> tuple[ModelRunner, int]:
    """The runner with as many of the planned pages as there is memory for, the same number on every rank.

    `scratch`: pages beyond them.
    """

    def build(pages: int) -> ModelRunner | None:
        try:
            return model.build_runner(pages + scratch, wish.page_size, max_batched_tokens)
        except (RuntimeError, MemoryError, OSError) as error:
            if not is_out_of_memory(error):
                raise
            return None

    def agree(fits: bool) -> bool:
        return fits if group is None else bool(group.least(int(fits)))

    return allocate_pool(pages, least_pages(wish, pages), build, agree)


def _load(config: WorkerConfig, device: torch.device, group: TensorGroup | None) -> LoadedModel:
    return load_model(
        config.model_path,
        device=device,
        dtype=DTYPES.get(config.dtype),
        load_format=config.load_format,
        model_impl=config.model_impl,
        attention_backend=config.attention_backend,
        context_length=config.context_length,
        deterministic=config.deterministic,
        quantization=config.quantization,
        moe_backend=config.moe_backend,
        kv_cache_dtype=config.kv_cache_dtype,
        group=group,
    )


def _wish(config: WorkerConfig, model: LoadedModel, device: torch.device) -> PoolWish:
    return PoolWish(
        page_size=config.page_size,
        bytes_per_page=model.kv_bytes_per_page(config.page_size),
        max_context=model.config.max_context,
        max_slots=config.max_running_requests or DEFAULT_SLOTS,
        max_total_tokens=config.max_total_tokens,
        mem_fraction=config.mem_fraction_static or MEM_FRACTION[device.type],
        on_cpu=device.type == "cpu",
    )


def _name_of(device: torch.device) -> str:
    return f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)
