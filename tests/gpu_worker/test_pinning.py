"""Each kernel thread on a core of its own, where every core has one; in a process of its own, since it lasts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch

from services.gpu_worker import device, pinning
from services.gpu_worker.kv_cache import KVCache
from shared.config import WorkerConfig

SCRIPT = """
    import json, os, threading
    import torch
    from services.gpu_worker import device, pinning
    from services.gpu_worker.kv_cache import KVCache
    from shared.config import WorkerConfig

    cores = device.cores_allowed()
    torch.set_num_threads(len(cores))
    cache = KVCache(1, 1, 4, 1, 8, torch.float32, torch.device("cpu"))
    found = {}

    def compute():
        found["pinned"] = pinning.pin_threads(WorkerConfig(**%s), cache)
        found["own"] = sorted(os.sched_getaffinity(0))
        found["all"] = [sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")]

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    found["main"] = sorted(os.sched_getaffinity(0))
    print(json.dumps(found))
"""


LATE = """
    import itertools, json, os
    import torch
    from services.gpu_worker import device
    from services.gpu_worker.kernels import library
    from tests.gpu_worker.test_kernels_decoder import HIDDEN, Model

    def helpers():
        places = {task: sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")}
        return {task: place for task, place in places.items() if place != free}

    free, kernels = sorted(os.sched_getaffinity(0)), library.load()
    model = Model(kernels, torch.float32, bias=False, qk_norm=False, rope=True)
    places = list(itertools.islice(itertools.cycle(device.cores_allowed()), 4))
    table = torch.tensor([place[:1] for place in places], dtype=torch.int32)
    torch.set_num_threads(4)
    assert kernels.functions.rf_pin_threads(table.data_ptr(), 1, 4) == 0
    first = helpers()
    memory = torch.zeros(64, dtype=torch.int64)
    kernels.functions.rf_read_memory(memory.data_ptr(), 64, 2)  # two helpers end
    model.steps(torch.randn(8, HIDDEN), [8])
    later = helpers()
    print(json.dumps({"places": table.tolist(), "first": sorted(first.values()), "later": sorted(later.values()),
                      "new": len(later.keys() - first.keys())}))
"""


@pytest.mark.skipif(len(device.cores_allowed()) < 2, reason="every place is the same one")
def test_helpers_that_start_later_find_their_core() -> None:
    found = execute(LATE)
    assert found["new"] == 2
    assert found["first"] == found["later"] == sorted(found["places"])


def run(**options: object) -> dict[str, Any]:
    return execute(SCRIPT % repr(options))


def execute(script: str) -> dict[str, Any]:
    script = textwrap.dedent(script)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_each_thread_has_a_core_and_others_stay_free() -> None:
    found, cores = run(), device.cores_allowed()
    assert found["main"] == sorted(os.sched_getaffinity(0))
    assert found["pinned"] is (len(cores) > 1)
    if len(cores) > 1:
        assert found["own"] == cores[0]
        assert all(core in found["all"] for core in cores)


@pytest.mark.parametrize("options", [{"disable_thread_pinning": True}, {"tp_size": 2}])
def test_none_is_kept_where_that_is_not_wanted_or_ranks_share_the_cores(options: dict[str, object]) -> None:
    found = run(**options)
    assert found["pinned"] is False
    assert found["own"] == found["main"]


def test_fewer_threads_than_cores_stay_free() -> None:
    cache = KVCache(1, 1, 4, 1, 8, torch.float32, torch.device("cpu"))
    threads, allowed = torch.get_num_threads(), os.sched_getaffinity(0)
    torch.set_num_threads(len(device.cores_allowed()) + 1)
    try:
        assert not pinning.pin_threads(WorkerConfig(), cache)
    finally:
        torch.set_num_threads(threads)
    assert os.sched_getaffinity(0) == allowed


def test_siblings_are_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 5})
    monkeypatch.setattr(device, "_siblings", lambda cpu: {0: "0,2", 2: "0,2"}.get(cpu, str(cpu)))
    assert device.cores_allowed() == [[0, 2], [1], [5]]
