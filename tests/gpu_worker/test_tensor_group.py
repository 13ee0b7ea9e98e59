"""What the ranks of a worker say to each other, and over what: words over gloo, a GPU's tensors over NCCL."""

from __future__ import annotations

import inspect
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from services.gpu_worker.parallel.group import DEVICE_TIMEOUT, FOREVER, Meeting, TensorGroup


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """torch.distributed's calls by their real signatures; every collective leaves its tensor as it is."""
    made: list[tuple[str, dict[str, Any]]] = []

    def record(name: str, answer: Any = None) -> None:
        signature = inspect.signature(getattr(dist, name))

        def call(*args: Any, **kwargs: Any) -> Any:
            made.append((name, dict(signature.bind(*args, **kwargs).arguments)))
            return answer

        monkeypatch.setattr(dist, name, call)

    record("init_process_group")
    record("new_group", "on the device")
    for name in ("all_reduce", "broadcast", "gather"):
        record(name)
    return made


def test_a_gpus_tensors_have_a_group_of_their_own(calls: list[tuple[str, dict[str, Any]]], tmp_path: Path) -> None:
    device = torch.device("cuda", 3)
    group = TensorGroup.join(Meeting(str(tmp_path / "meeting"), 0, 2), device)
    (_, default), (_, on_device) = calls[0], calls[1]
    assert (default["backend"], default["timeout"]) == ("gloo", FOREVER)
    assert (on_device["backend"], on_device["device_id"]) == ("nccl", device)
    assert on_device["timeout"] == DEVICE_TIMEOUT < timedelta(hours=1)
    calls.clear()
    group.sum(torch.ones(3))
    group.gather_columns(torch.ones(2, 3))
    assert [(name, call["group"]) for name, call in calls] == [
        ("all_reduce", "on the device"),
        ("gather", "on the device"),
    ]
    calls.clear()
    group.least(3)
    group.broadcast(b"word")
    assert all(call.get("group") is None for _, call in calls)


def test_on_cpus_there_is_one_group(calls: list[tuple[str, dict[str, Any]]], tmp_path: Path) -> None:
    TensorGroup.join(Meeting(str(tmp_path / "meeting"), 0, 2), torch.device("cpu")).sum(torch.ones(3))
    assert [name for name, _ in calls] == ["init_process_group", "all_reduce", "all_reduce"]
