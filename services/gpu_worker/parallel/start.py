"""Brings the ranks of one worker together; on one machine rank 0 starts the others. Leaves loading to `startup`."""

from __future__ import annotations

import atexit
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import structlog

from services.gpu_worker.parallel.group import Meeting, TensorGroup
from shared.config import WorkerConfig

log = structlog.get_logger(__name__)

LEAVE_S = 2.0
_ONLY_RANK_0 = frozenset({"scheduler", "service_id", "health_bind", "curve_dir", "kv_bind"})


def open_group(config: WorkerConfig) -> TensorGroup | None:
    """The group this process is a rank of; None for a worker that is one process.

    Without `tp_meeting` the others are children of rank 0 and end with it. Raises RuntimeError where a rank does not
    come.
    """
    if config.tp_size == 1:
        return None
    if config.tp_meeting:
        return TensorGroup.join(Meeting(config.tp_meeting, config.tp_rank, config.tp_size))
    folder = Path(tempfile.mkdtemp(prefix="radixfleet-ranks-"))
    try:
        place = str(folder / "meeting")
        _start_followers(config, place)
        return TensorGroup.join(Meeting(place, 0, config.tp_size))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start_followers(config: WorkerConfig, place: str) -> None:
    children = []
    for rank in range(1, config.tp_size):
        own = msgspec.structs.replace(config, tp_rank=rank, tp_meeting=place)
        children.append(subprocess.Popen([sys.executable, "-P", "-m", "services.gpu_worker", *arguments(own)]))
    atexit.register(_end, children)
    log.info("ranks started", size=config.tp_size, pids=[child.pid for child in children])


def arguments(config: WorkerConfig) -> list[str]:
    """The flags that make this configuration, without what concerns only rank 0."""
    flags: list[str] = []
    for field in msgspec.structs.fields(config):
        value: Any = getattr(config, field.name)
        if value == field.default or field.name in _ONLY_RANK_0:
            continue
        name = field.name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        else:
            flags.append(f"--{name}={value}")
    return flags


def _end(children: list[subprocess.Popen[bytes]]) -> None:
    """They notice by themselves that rank 0 is gone; whoever is stuck is ended."""
    for child in children:
        child.terminate()
    for child in children:
        try:
            child.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
