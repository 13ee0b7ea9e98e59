"""How many KV pages fit: free memory, the operator's wishes and sensible limits; leaves allocating to the runner."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import structlog

if TYPE_CHECKING:
    import torch

log = structlog.get_logger(__name__)

T = TypeVar("T")
GIB = 1 << 30
MIB = 1 << 20
CPU_POOL_BYTES = 4 * GIB  # unless more is asked for: a machine's memory is rarely for one process alone
_CGROUP = Path("/sys/fs/cgroup")


class MemoryPlanError(ValueError):
    """The pool that is wanted does not fit; the message says what to change."""


LEAST_PAGES = 2  # one to fill and one spare, for the copy of a half-filled page


@dataclass(frozen=True, slots=True)
class PoolWish:
    """What decides the size of the pool. Sizes in tokens are of KV, `max_total_tokens` 0 means from free memory."""

    page_size: int
    bytes_per_page: int
    max_context: int
    max_slots: int
    max_total_tokens: int
    mem_fraction: float
    on_cpu: bool


def plan_pages(wish: PoolWish, free_before: int, free_now: int) -> int:
    """Number of pages; `free_before` and `free_now` are free bytes before and after the weights were loaded.

    Raises MemoryPlanError where the pool that is asked for, or one request of full context, does not fit.
    """
    if wish.max_total_tokens:
        pages = wish.max_total_tokens // wish.page_size
        if pages < LEAST_PAGES:
            raise MemoryPlanError(
                f"--max-total-tokens {wish.max_total_tokens} is less than the {LEAST_PAGES * wish.page_size} tokens "
                f"({LEAST_PAGES} pages) that the smallest request needs"
            )
        if pages * wish.bytes_per_page > free_now:
            raise MemoryPlanError(
                f"--max-total-tokens {wish.max_total_tokens} needs {_mib(pages * wish.bytes_per_page)}, "
                f"{_mib(free_now)} are free"
            )
        return pages
    weights = max(0, free_before - free_now)
    budget = min(int(free_before * wish.mem_fraction) - weights, free_now)
    one_request = -(-wish.max_context // wish.page_size)
    pages = max(0, budget) // wish.bytes_per_page
    if pages < one_request:
        raise MemoryPlanError(
            f"one request of {wish.max_context} tokens needs {_mib(one_request * wish.bytes_per_page)} of KV cache, "
            f"{_mib(max(0, budget))} are left: raise --mem-fraction-static, lower --context-length "
            "or set --max-total-tokens"
        )
    if wish.on_cpu:
        pages = min(pages, max(CPU_POOL_BYTES // wish.bytes_per_page, one_request))
    return min(pages, one_request * wish.max_slots)


def allocate_pool(
    pages: int, least: int, build: Callable[[int], T | None], agree: Callable[[bool], bool] = bool
) -> tuple[T, int]:
    """What `build` makes of the most pages for which it does not answer None, that it found no memory; and how many.

    `agree` says whether all ranks have found theirs. Raises MemoryPlanError where not even `least` pages fit.
    """
    while True:
        built = build(pages)
        if agree(built is not None) and built is not None:
            return built, pages
        built = None  # its pages are free before the next ones are asked for
        release_cached()
        if pages <= least:
            raise MemoryPlanError(
                f"no memory for a KV cache of {pages} pages, which one request needs: lower --context-length, "
                "--max-total-tokens or --cuda-graph-max-bs, or free memory of the device"
            )
        fewer = max(least, pages - max(1, pages // 10))
        log.warning("no memory for the KV cache: trying with fewer pages", pages=pages, next=fewer)
        pages = fewer


def least_pages(wish: PoolWish, planned: int) -> int:
    """Below this there is no use in a pool: one request of full context, or what an operator's small pool is for."""
    one_request = -(-wish.max_context // wish.page_size)
    return one_request if one_request <= planned else LEAST_PAGES


def release_cached() -> None:
    """Give memory that no tensor holds back to the device; in the thread that computes."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        gc.collect()  # a traceback's frames hold tensors, and lie in cycles
        torch.cuda.empty_cache()


def free_bytes(device: torch.device) -> int:
    """Memory that is free for this process on `device`; on CPU within the limits of its container."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    return min(_available_ram(), _cgroup_room())


def resident_bytes() -> int:
    """Resident memory of this process."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096


def own_bytes(device: torch.device) -> int:
    """Memory this process holds on `device`."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.memory_allocated(device))
    return resident_bytes()


def _available_ram() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise MemoryPlanError("/proc/meminfo has no MemAvailable")


def _cgroup_room() -> int:
    limits = [_room(_CGROUP / "memory.max", _CGROUP / "memory.current", _CGROUP / "memory.stat", "inactive_file")]
    v1 = _CGROUP / "memory"
    limits.append(
        _room(v1 / "memory.limit_in_bytes", v1 / "memory.usage_in_bytes", v1 / "memory.stat", "total_inactive_file")
    )
    return min(limits)


def _room(limit: Path, used: Path, stat: Path, reclaimable: str) -> int:
    try:
        allowed = limit.read_text().strip()
        if allowed == "max":
            return 1 << 62
        cached = sum(int(line.split()[1]) for line in stat.read_text().splitlines() if line.split()[0] == reclaimable)
        return max(0, int(allowed) - int(used.read_text()) + cached)
    except (OSError, ValueError):
        return 1 << 62


def _mib(size: int) -> str:
    return f"{size / MIB:,.0f} MiB"
