"""Every call made of FlashInfer binds to its recorded signatures, and these to the installed package's."""

from __future__ import annotations

import importlib.util
import inspect
import operator
import zipfile
from pathlib import Path

import pytest

from scripts.wheel_signatures import WANTED, signatures
from tests.gpu_worker.flashinfer_fake import FakeFlashInfer
from tests.gpu_worker.flashinfer_scene import FREE, Scene
from tests.gpu_worker.flashinfer_signatures import SIGNATURES, TABLE, bind

CALLED = {
    "BatchDecodeWithPagedKVCacheWrapper.__init__",
    "BatchDecodeWithPagedKVCacheWrapper.plan",
    "BatchDecodeWithPagedKVCacheWrapper.run",
    "BatchPrefillWithPagedKVCacheWrapper.__init__",
    "BatchPrefillWithPagedKVCacheWrapper.plan",
    "BatchPrefillWithPagedKVCacheWrapper.run",
    "append_paged_kv_cache",
    "merge_state_in_place",
}
SUMS = {  # called in test_fused_sum, but for the compiling
    "create_allreduce_fusion_workspace": "flashinfer.comm",
    "allreduce_fusion": "flashinfer.comm",
    "get_trtllm_comm_module": "flashinfer.comm.trtllm_ar",
}
EXPERTS = {"cutlass_fused_moe", "cutlass_fused_moe_workspace_size"}  # called in test_moe_fused


def test_a_step_of_every_kind_binds_all_that_is_recorded() -> None:
    api = FakeFlashInfer(float32=True)
    scene = Scene([40, 50, 20], [(4, 6)], [([0, 1], 2)])
    scene.layers(scene.backend(api, costs=FREE))
    scene.backend(api).graph_backend(3, 8)
    assert set(api.calls) == CALLED
    assert set(SIGNATURES) == CALLED | EXPERTS | SUMS.keys() | {"BatchDecodeWithPagedKVCacheWrapper._plan_impl"}


def test_a_call_that_does_not_fit_is_refused() -> None:
    with pytest.raises(TypeError, match="scale"):
        bind("merge_state_in_place", 1, 2, 3, 4, scale=1.0)
    with pytest.raises(TypeError, match="missing"):
        bind("append_paged_kv_cache", 1, 2)
    with pytest.raises(TypeError, match="causal"):
        FakeFlashInfer().BatchDecodeWithPagedKVCacheWrapper(None, causal=True)


def test_defaults_are_those_that_must_be_overridden() -> None:
    plan = SIGNATURES["BatchPrefillWithPagedKVCacheWrapper.plan"].parameters
    assert (plan["causal"].default, plan["q_data_type"].default) == (False, "float16")
    assert SIGNATURES["append_paged_kv_cache"].parameters["kv_layout"].default == "NHD"


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed")
def test_the_installed_package_has_these_signatures() -> None:
    for name, recorded in SIGNATURES.items():
        place = "flashinfer.fused_moe" if name in EXPERTS else SUMS.get(name, "flashinfer")
        module = importlib.import_module(place)
        found = inspect.signature(operator.attrgetter(name)(module))
        # What was recorded must be accepted; what a later version adds must have a default.
        for parameter in recorded.parameters.values():
            assert found.parameters[parameter.name].kind == parameter.kind, f"{name}: {parameter.name}"
        for extra in found.parameters.keys() - recorded.parameters.keys():
            assert found.parameters[extra].default is not inspect.Parameter.empty, f"{name}: {extra}"


SOURCE = """
class Wrapper:
    def __init__(self, workspace, layout: str = "NHD", *, graph=False): ...
    @overload
    def run(self, q) -> int: ...
    def run(self, q, *args, out=None, window=-1, **kwargs): ...
def append(key, /, value, last=None, kind=Kind.Plain) -> None: ...
"""


def test_signatures_are_read_from_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "some-1.0.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("flashinfer/page.py", SOURCE)
    monkeypatch.setattr("scripts.wheel_signatures.WANTED", {"page": ["Wrapper.__init__", "Wrapper.run", "append"]})
    both = "POSITIONAL_OR_KEYWORD"
    assert signatures(wheel) == {
        "wheel": "some-1.0.whl",
        "signatures": {
            "Wrapper.__init__": [
                ["self", both],
                ["workspace", both],
                ["layout", both, "NHD"],
                ["graph", "KEYWORD_ONLY", False],
            ],
            "Wrapper.run": [
                ["self", both],
                ["q", both],
                ["args", "VAR_POSITIONAL"],
                ["out", "KEYWORD_ONLY", None],
                ["window", "KEYWORD_ONLY", -1],
                ["kwargs", "VAR_KEYWORD"],
            ],
            "append": [["key", "POSITIONAL_ONLY"], ["value", both], ["last", both, None], ["kind", both, "Kind.Plain"]],
        },
    }
    monkeypatch.setattr("scripts.wheel_signatures.WANTED", {"page": ["gone"]})
    with pytest.raises(KeyError, match="gone"):
        signatures(wheel)


def test_the_table_has_all_that_is_wanted() -> None:
    assert set(TABLE["signatures"]) == {name for names in WANTED.values() for name in names}
