"""How many pages a worker offers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.gpu_worker import device, memory
from services.gpu_worker.memory import CPU_POOL_BYTES, GIB, MIB, MemoryPlanError, PoolWish, plan_pages


def wish(**changes: object) -> PoolWish:
    fields: dict[str, object] = {
        "page_size": 16,
        "bytes_per_page": MIB,
        "max_context": 16 * 100,
        "max_slots": 256,
        "max_total_tokens": 0,
        "mem_fraction": 0.5,
        "on_cpu": False,
    }
    return PoolWish(**{**fields, **changes})  # type: ignore[arg-type]


def test_the_share_of_free_memory_without_the_weights() -> None:
    assert plan_pages(wish(), 10 * GIB, 8 * GIB) == 3 * 1024


def test_no_more_than_all_slots_can_hold() -> None:
    assert plan_pages(wish(max_slots=2), 10 * GIB, 10 * GIB) == 200


def test_on_cpu_a_sensible_limit_unless_one_request_needs_more() -> None:
    assert plan_pages(wish(on_cpu=True), 100 * GIB, 100 * GIB) == CPU_POOL_BYTES // MIB
    assert plan_pages(wish(on_cpu=True, max_context=16 * 5000), 100 * GIB, 100 * GIB) == 5000


def test_one_full_request_must_fit() -> None:
    with pytest.raises(MemoryPlanError, match="--context-length"):
        plan_pages(wish(), 150 * MIB, 150 * MIB)
    with pytest.raises(MemoryPlanError, match="0 MiB are left"):
        plan_pages(wish(), 10 * GIB, 1 * GIB)


def test_what_is_asked_for_wins_even_when_tiny() -> None:
    assert plan_pages(wish(max_total_tokens=64), 10 * GIB, 10 * GIB) == 4
    assert plan_pages(wish(max_total_tokens=32), 10 * GIB, 10 * GIB) == 2
    for tokens in (1, 5, 31):
        with pytest.raises(MemoryPlanError, match="smallest request"):
            plan_pages(wish(max_total_tokens=tokens), 10 * GIB, 10 * GIB)
    with pytest.raises(MemoryPlanError, match="--max-total-tokens"):
        plan_pages(wish(max_total_tokens=16 * 20_000), 10 * GIB, 10 * GIB)


def test_a_container_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("600000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 100000\n")
    assert memory.free_bytes(torch.device("cpu")) == 500_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_bytes(torch.device("cpu")) > 1_000_000


def test_at_least_one_core_is_found() -> None:
    assert device.physical_cores() >= 1
    assert memory.resident_bytes() > MIB
