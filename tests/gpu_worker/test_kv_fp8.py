"""K and V of 8 bits: how values are stored, how near logits stay, whose pages fit, how many fit."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.gpu_worker.attention.reference import ReferenceAttention
from services.gpu_worker.kv_cache import FP8, KVCache, kv_format, to_fp8
from services.gpu_worker.memory import PoolWish, plan_pages
from services.gpu_worker.models.config import ModelError
from services.gpu_worker.startup import build_engine
from services.gpu_worker.tiers.plan import fingerprint
from services.gpu_worker.transfer.page_io import PageIO
from services.gpu_worker.transfer.transfers import Transfers
from shared import ints
from shared.config import WorkerConfig
from shared.messages.kv import KvReceive, KvSend
from tests.gpu_worker.tiny_models import Sequence, Session, load, random_tokens, save_model

CPU = torch.device("cpu")
FP8_NAME = "float8_e4m3fn"


def cache(scales: tuple[tuple[float, float], ...] = (), pages: int = 6) -> KVCache:
    found = KVCache(2, pages, 4, 2, 8, FP8, CPU, scales)
    for index, layer in enumerate(found.layers):
        layer.copy_(torch.randn(layer.shape, generator=torch.Generator().manual_seed(index)))
    return found


def test_what_is_too_large_is_stored_as_the_largest_number() -> None:
    values = torch.tensor([0.0, 1.0, -3.0, 447.0, 1e4, -1e30, float("inf")])
    assert to_fp8(values, 1.0).float().tolist() == [0.0, 1.0, -3.0, 448.0, 448.0, -448.0, 448.0]
    assert to_fp8(values, 0.5).float().tolist() == [0.0, 2.0, -6.0, 448.0, 448.0, -448.0, 448.0]
    assert to_fp8(torch.tensor([float("nan")]), 1.0).isnan().all(), "a row that is spoilt is noticed as one"


@pytest.mark.parametrize("scales", [(), ((0.5, 0.25), (2.0, 0.125))])
def test_attention_reads_what_was_stored_times_the_scales(
    tmp_path: Path, scales: tuple[tuple[float, float], ...]
) -> None:
    save_model("llama", tmp_path)
    session = Session(load(tmp_path))
    tokens = Sequence(random_tokens(11, seed=1))
    batch = session.batch([(tokens, 11)])
    stored, plain = (KVCache(2, 64, 4, 2, 16, dtype, CPU, scales) for dtype in (FP8, torch.float32))
    q, k, v = (torch.randn(11, heads, 16) for heads in (4, 2, 2))
    for layer in range(2):
        k_scale, v_scale = scales[layer] if scales else (1.0, 1.0)
        rounded = [to_fp8(x, scale).float() * scale for x, scale in ((k, k_scale), (v, v_scale))]
        results = []
        for backend, (keys, values) in ((ReferenceAttention(stored), (k, v)), (ReferenceAttention(plain), rounded)):
            backend.plan(batch)
            results.append(backend.forward(layer, q, keys, values, session.runner.config.attention[layer]))
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "olmo2", "qwen3-moe"])
def test_logits_stay_near_those_of_a_full_cache(tmp_path: Path, name: str) -> None:
    save_model(name, tmp_path)
    tokens = random_tokens(41, seed=2)
    logits = []
    for dtype in ("auto", "fp8_e4m3"):
        loaded = load(tmp_path, kv_cache_dtype=dtype)
        session, sequence = Session(loaded), Sequence(tokens)
        logits.append(torch.cat([session.step([(sequence, count)]) for count in (7, 1, 13, 2, 17, 1)]))
    assert session.runner.kv_cache.layers[0].dtype == FP8
    distance = float((logits[1] - logits[0]).norm() / logits[0].norm())
    assert 0.0 < distance < 0.1
    agreement = (logits[1].argmax(-1) == logits[0].argmax(-1)).float().mean()
    assert agreement > 0.8


def test_pages_are_copied_as_they_are() -> None:
    kv = cache()
    before = [layer.float() for layer in kv.layers]
    kv.copy_pages(torch.tensor([1, 4]), torch.tensor([0, 1]))
    for layer, was in zip(kv.layers, before, strict=True):
        assert torch.equal(layer.float(), was[[1, 4, 2, 3, 4, 5]])


def test_twice_as_many_pages_fit(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    pages = []
    for dtype in ("auto", "fp8_e4m3"):
        loaded = load(tmp_path, dtype=torch.bfloat16, kv_cache_dtype=dtype)
        wish = PoolWish(16, loaded.kv_bytes_per_page(16), 256, 10_000, 0, 0.5, on_cpu=False)
        pages.append(plan_pages(wish, 1 << 28, 1 << 28))
    assert pages[1] == 2 * pages[0]


def write_scales(folder: Path, **scales: float) -> None:
    path = folder / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(path).items()}
    added = {"model.layers." + name: torch.tensor(value) for name, value in scales.items()}
    save_file({**weights, **added}, path, metadata={"format": "pt"})


def test_scales_of_the_checkpoint_are_used_and_named_in_the_format(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    assert load(tmp_path, kv_cache_dtype="fp8_e4m3").build_runner(4, 16, 64).kv_cache.format == FP8_NAME
    write_scales(tmp_path, **{"0.self_attn.k_scale": 0.5, "1.self_attn.v_proj.v_scale": 0.25})
    kv = load(tmp_path, kv_cache_dtype="fp8_e4m3").build_runner(4, 16, 64).kv_cache
    assert kv.scales is not None
    assert kv.scales.tolist() == [[0.5, 1.0], [1.0, 0.25]]
    assert kv.format.startswith(FP8_NAME + "/")
    plain = load(tmp_path).build_runner(4, 16, 64).kv_cache
    assert (plain.format, plain.scales) == ("float32", None)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_none_is_refused(tmp_path: Path, value: float) -> None:
    save_model("llama", tmp_path)
    write_scales(tmp_path, **{"1.self_attn.kv_scale": value})
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.kv_scale is not a positive number"):
        load(tmp_path, kv_cache_dtype="fp8_e4m3")


def test_formats_tell_scales_apart() -> None:
    scales = [(), ((1.0, 1.0), (1.0, 1.0)), ((0.5, 1.0), (1.0, 1.0)), ((1.0, 0.5), (1.0, 1.0))]
    formats = [kv_format(FP8, given) for given in scales]
    assert formats[0] == formats[1] == cache().format == FP8_NAME
    assert len(set(formats)) == 3
    assert kv_format(torch.bfloat16, scales[2]) == "bfloat16"


async def transfer(tmp_path: Path, source: KVCache, target: KVCache) -> Any:
    """What the target says in the end about page 2 of the source, sent to its page 5."""
    news: asyncio.Queue[Any] = asyncio.Queue()
    ends = [
        Transfers(PageIO(kv), f"ipc://{tmp_path}/{index}", reply)
        for index, (kv, reply) in enumerate(((source, lambda _news: None), (target, news.put_nowait)))
    ]
    try:
        for end in ends:
            end.begin(1)
        ends[1].handle(KvReceive(1, ints.pack([5]), "a"))
        await asyncio.wait_for(news.get(), 20)
        ends[0].handle(KvSend(1, ints.pack([2]), "b", ends[1].endpoints))
        return await asyncio.wait_for(news.get(), 20)
    finally:
        for end in ends:
            end.close()


async def test_pages_move_between_equal_scales(tmp_path: Path) -> None:
    scales = ((0.5, 1.0), (1.0, 2.0))
    source, target = cache(scales), cache(scales)
    done = await transfer(tmp_path, source, target)
    assert done.ok
    for sent, received in zip(source.layers, target.layers, strict=True):
        assert torch.equal(received[5].float(), sent[2].float())


async def test_pages_of_other_scales_are_refused(tmp_path: Path) -> None:
    target = cache()
    before = [layer.float() for layer in target.layers]
    done = await transfer(tmp_path, cache(((0.5, 1.0), (1.0, 1.0))), target)
    assert not done.ok
    assert FP8_NAME in done.detail
    assert all(torch.equal(layer.float(), was) for layer, was in zip(target.layers, before, strict=True))


def test_the_scheduler_and_the_disk_are_told(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    options: dict[str, Any] = {
        "model_path": str(tmp_path),
        "device": "cpu",
        "max_total_tokens": 512,
        "dtype": "bfloat16",
        "threads": 1,
    }
    hellos = [build_engine(WorkerConfig(**options, kv_cache_dtype=dtype)).hello for dtype in ("auto", "fp8_e4m3")]
    write_scales(tmp_path, **{"0.self_attn.k_scale": 0.5})
    hellos.append(build_engine(WorkerConfig(**options, kv_cache_dtype="fp8_e4m3")).hello)
    assert [hello.kv_dtype for hello in hellos[:2]] == ["bfloat16", FP8_NAME]
    assert hellos[2].kv_dtype.startswith(FP8_NAME + "/")
    assert [hello.kv_bytes_per_page for hello in hellos] == [4096, 2048, 2048]
    assert len({fingerprint(hello) for hello in hellos}) == 3


def test_native_attention_has_no_8_bits(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    session = Session(load(tmp_path, kv_cache_dtype="fp8_e4m3", attention_backend="auto"))
    assert session.step([(Sequence(random_tokens(5, seed=1)), 5)]).isfinite().all(), "the reference runs it"
    with pytest.raises(ModelError, match="native attention"):
        load(tmp_path, kv_cache_dtype="fp8_e4m3", attention_backend="native").build_runner(4, 16, 64)
    with pytest.raises(ModelError, match="--quantization int8 needs"):
        load(tmp_path, kv_cache_dtype="fp8_e4m3", attention_backend="auto", quantization="int8")
