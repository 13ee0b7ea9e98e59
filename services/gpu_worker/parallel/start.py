"""Brings the ranks of one worker together; on one machine rank 0 starts the others. Leaves loading to `startup`."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import msgspec
import structlog
import torch

from services.gpu_worker.parallel.group import Meeting, TensorGroup
from shared import service
from shared.config import WorkerConfig

log = structlog.get_logger(__name__)

LEAVE_S = 2.0
GONE_S = 10.0  # so long the worker may take to tell of a rank that is gone, and to end by itself
_ONLY_RANK_0 = frozenset({"scheduler", "service_id", "health_bind", "curve_dir", "kv_bind"})


def open_group(config: WorkerConfig, device: torch.device) -> TensorGroup | None:
    """The group this process is a rank of; None for a worker that is one process.

    Without `tp_meeting` the others are children of rank 0 and end with it. Raises RuntimeError where a rank does not
    come.
    """
    if config.tp_size == 1:
        return None
    if config.tp_meeting:
        return TensorGroup.join(Meeting(config.tp_meeting, config.tp_rank, config.tp_size), device)
    folder = Path(tempfile.mkdtemp(prefix="radixfleet-ranks-"))
    try:
        place = str(folder / "meeting")
        _start_followers(config, place)
        return TensorGroup.join(Meeting(place, 0, config.tp_size), device)
    finally:
        if device.type == "cpu":
            shutil.rmtree(folder, ignore_errors=True)
        else:
            atexit.register(shutil.rmtree, folder, ignore_errors=True)  # NCCL's watchdogs look into it now and then


def _start_followers(config: WorkerConfig, place: str) -> None:
    # They end when the other end of this pipe does, however rank 0 ended. It is never closed.
    reading, _ = os.pipe()
    environment = {**os.environ, service.PARENT_FD: str(reading)}
    environment.pop(service.RUN_DIR, None)  # is the launcher's, which may live on
    children = []
    for rank in range(1, config.tp_size):
        own = msgspec.structs.replace(config, tp_rank=rank, tp_meeting=place)
        command = [sys.executable, "-P", "-m", "services.gpu_worker", *arguments(own)]
        children.append(subprocess.Popen(command, pass_fds=(reading,), env=environment))
    os.close(reading)
    ending = threading.Event()
    atexit.register(_end, children, ending)
    for child in children:
        threading.Thread(target=_end_without, args=(child, ending), name="rank-watch", daemon=True).start()
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


def _end_without(child: subprocess.Popen[bytes], ending: threading.Event) -> None:
    """A rank is gone: the next step fails, which ends the worker; one that hangs on the device, or none, does not."""
    child.wait()
    if not ending.wait(GONE_S):
        log.error("a rank is gone", pid=child.pid, exit_code=child.returncode)
        sys.stderr.flush()
        os._exit(1)


def _end(children: list[subprocess.Popen[bytes]], ending: threading.Event) -> None:
    """They notice by themselves that rank 0 is gone; whoever is stuck is ended."""
    ending.set()
    for child in children:
        child.terminate()
    for child in children:
        try:
            child.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
