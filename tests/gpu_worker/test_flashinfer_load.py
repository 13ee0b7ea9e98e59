"""When FlashInfer is taken, when it is refused and why, and what loading it tries out."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

from services.gpu_worker.attention import flashinfer, select
from services.gpu_worker.attention.base import AttentionSpec
from services.gpu_worker.attention.flashinfer import FlashInferAttention, FlashInferUnavailable, build, refusal
from services.gpu_worker.attention.flashinfer_api import FlashInferMissing, find_build_tool, import_flashinfer
from services.gpu_worker.attention.reference import ReferenceAttention
from services.gpu_worker.kv_cache import KVCache
from services.gpu_worker.models.config import ModelConfig, ModelError
from tests.gpu_worker.flashinfer_fake import FakeFlashInfer, FakePrefill, Refused
from tests.gpu_worker.flashinfer_scene import CPU, Scene

HALF = Scene([20], dtype=torch.bfloat16)


class OnCuda:
    """A cache that says it is on a card."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self.layers = [_Elsewhere(cache.layers[0])]


class _Elsewhere:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self.device, self.shape = tensor.dtype, torch.device("cuda", 0), tensor.shape


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A cache on a card that is not there, with a fake of FlashInfer for it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flashinfer, "import_flashinfer", FakeFlashInfer)
    monkeypatch.setattr(flashinfer, "build", lambda cache, config, api: ("flashinfer", config, api))
    return OnCuda(HALF.cache())


def test_auto_takes_it_on_a_card(card: Any) -> None:
    for name in ("auto", "flashinfer"):
        taken = select.attention_backend(name, card, HALF.config)
        assert taken[:2] == ("flashinfer", HALF.config)  # type: ignore[index]


def test_what_it_has_no_kernels_for(card: Any) -> None:
    def reason(**changes: Any) -> str:
        config = dataclasses.replace(HALF.config, **changes)
        with pytest.raises(ModelError, match="the flashinfer attention backend is not available") as info:
            select.attention_backend("flashinfer", card, config)
        assert isinstance(select.attention_backend("auto", card, config), ReferenceAttention)
        return str(info.value)

    assert "head_dim 80, only for 64, 128, 256" in reason(head_dim=80)
    assert "float32 queries" in reason(dtype=torch.float32)
    assert "--deterministic" in reason(deterministic=True)


def test_old_cards_are_refused(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ModelError, match=r"compute capability 8\.0"):
        select.attention_backend("flashinfer", card, HALF.config)


def test_on_a_cpu_it_is_refused_and_auto_is_native() -> None:
    cache = HALF.cache()
    with pytest.raises(ModelError, match="needs a CUDA device"):
        select.attention_backend("flashinfer", cache, HALF.config)
    assert not isinstance(select.attention_backend("auto", cache, HALF.config), FlashInferAttention)


def test_a_package_that_cannot_be_imported(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setattr(flashinfer, "import_flashinfer", import_flashinfer)
    with pytest.raises(ModelError, match="cannot be imported"):
        select.attention_backend("flashinfer", card, HALF.config)
    assert isinstance(select.attention_backend("auto", card, HALF.config), ReferenceAttention)


def test_a_package_of_that_name_without_the_wrappers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", type(sys)("flashinfer"))
    with pytest.raises(FlashInferMissing, match="BatchDecode"):
        import_flashinfer()


def test_what_compiles_is_found_beside_a_python_whose_environment_is_not_active(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts, elsewhere = tmp_path / "scripts", tmp_path / "elsewhere"
    for folder in (scripts, elsewhere):
        folder.mkdir()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(scripts))
    monkeypatch.setenv("PATH", str(elsewhere))
    find_build_tool()
    assert os.environ["PATH"] == str(elsewhere), "there is none"
    (scripts / "ninja").touch(0o755)
    for _ in range(2):
        find_build_tool()
        assert os.environ["PATH"] == f"{elsewhere}{os.pathsep}{scripts}"
    assert shutil.which("ninja") == str(scripts / "ninja")


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_loading_runs_every_kernel_once(page_size: int) -> None:
    specs = (AttentionSpec(0.125), AttentionSpec(0.125, 4096), AttentionSpec(0.125))
    scene = Scene([20], dtype=torch.bfloat16, specs=specs, page_size=page_size)
    api, cache = FakeFlashInfer(), scene.cache()
    attention = build(cache, scene.config, api)
    assert api.calls.count("merge_state_in_place") == 2 * (1 + 2)  # of two specs one shared level, then two
    assert api.calls.count("append_paged_kv_cache") == 2 * 2
    assert attention.kv_bytes_read == 0
    for layer in cache.layers:  # the trial has written into it
        layer.copy_(scene.contents)
    torch.testing.assert_close(
        scene.layers(attention), scene.expected(), rtol=torch.finfo(torch.bfloat16).eps, atol=1e-3
    )


def test_loading_tries_few_and_many_queries_of_a_row_at_both_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond 64 another kernel is taken, also without a window where the layers have one."""
    planned, plan = set(), FakePrefill.plan

    def record(wrapper: FakePrefill, *args: Any, **kwargs: Any) -> None:
        plan(wrapper, *args, **kwargs)
        many = int(wrapper.queries.diff().max()) > 64
        planned.add((kwargs["causal"], kwargs["window_left"] >= 0, many))

    monkeypatch.setattr(FakePrefill, "plan", record)
    scene = Scene([20], dtype=torch.bfloat16, specs=(AttentionSpec(0.125, 4096),))
    build(scene.cache(), scene.config, FakeFlashInfer())
    assert planned == {(True, True, False), (True, True, True), (False, False, False), (False, False, True)}


def test_loading_tries_requests_without_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a group that are in none of those within it."""
    planned, plan = [], FakePrefill.plan

    def record(wrapper: FakePrefill, *args: Any, **kwargs: Any) -> None:
        plan(wrapper, *args, **kwargs)
        planned.append(wrapper.indptr.diff().tolist())

    monkeypatch.setattr(FakePrefill, "plan", record)
    build(HALF.cache(), HALF.config, FakeFlashInfer())
    assert planned[-3:-1] == [[1, 1], [1, 0, 1]]


def test_the_trial_uses_two_pages_only() -> None:
    config = HALF.config
    cache = KVCache(len(config.attention), 2, 16, config.kv_heads, config.head_dim, config.dtype, CPU)
    build(cache, config, FakeFlashInfer())
    assert all(bool((layer == 0).all()) for layer in cache.layers)


def test_a_kernel_that_does_not_compile_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no nvcc")

    monkeypatch.setattr(FakeFlashInfer, "merge_state_in_place", fail)
    with pytest.raises(FlashInferUnavailable, match="no nvcc"):
        build(HALF.cache(), HALF.config, FakeFlashInfer())


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: 700")])
def test_a_lack_of_memory_and_a_broken_device_are_not_taken_for_that(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(FakeFlashInfer, "append_paged_kv_cache", fail)
    with pytest.raises(type(error), match="CUDA"):
        build(HALF.cache(), HALF.config, FakeFlashInfer())


def test_a_kernel_that_gives_no_numbers_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeFlashInfer, "append_paged_kv_cache", lambda *args, **kwargs: None)
    cache = HALF.cache()
    for layer in cache.layers:
        layer.fill_(float("nan"))
    with pytest.raises(FlashInferUnavailable, match="something else than numbers"):
        build(cache, HALF.config, FakeFlashInfer())


def test_the_refusals_are_what_the_fake_refuses() -> None:
    for scene in (Scene([20], dim=80, dtype=torch.bfloat16), Scene([20])):
        assert refusal(scene.cache(), scene.config) is not None
        with pytest.raises(Refused):
            scene.backend(FakeFlashInfer()).plan(scene.batch())
    assert refusal(HALF.cache(), HALF.config) is None
    eight_bits = Scene([20], dtype=torch.bfloat16, scales=((1.0, 1.0), (1.0, 1.0)))
    assert refusal(eight_bits.cache(), eight_bits.config) is None
    full: ModelConfig = Scene([20]).config
    assert "queries over torch.float8" in str(refusal(eight_bits.cache(), full))
