"""The ranks of one worker and what they say to each other. Leaves what is shared out to `sharding`.

Rank 0 alone talks to the scheduler; the others hear from it through `broadcast`. Words and tensors of CPUs travel over
gloo: it blocks without using the CPU, and fails at once where a rank has died, since its connection closes. Tensors of
GPUs travel over NCCL, in the order of the compute stream and without holding up the thread. NCCL does not notice a
death: a collective that takes longer than DEVICE_TIMEOUT ends the process, and `start` ends it earlier where a rank of
the same machine is gone.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from services.gpu_worker.layers.norm import add_norm
from services.gpu_worker.parallel.fused import FusedSum, fused_sum

DEVICE_TIMEOUT = timedelta(minutes=5)
"""Within a step ranks wait for each other's kernels, or for one of them to compile some at its first step."""
FOREVER = timedelta(days=365)
"""Ranks wait for rank 0 for as long as there is nothing to do; who dies is noticed by its connection."""


class GroupBroken(RuntimeError):
    """A rank is gone or failed: the group can only be started anew."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks find each other: a file on one machine, or `HOST:PORT` of rank 0."""

    place: str
    rank: int
    size: int


class TensorGroup:
    """Collective operations of one group; every rank calls the same ones in the same order, from one thread."""

    def __init__(
        self, rank: int, size: int, on_device: dist.ProcessGroup | None = None, *, one_machine: bool = False
    ) -> None:
        self.rank = rank
        self.size = size
        self._on_device = on_device  # None: the default group, for tensors of CPUs
        self._one_machine = one_machine
        self._fused: FusedSum | None = None

    @staticmethod
    def join(meeting: Meeting, device: torch.device) -> TensorGroup:
        """Wait until all ranks are there, each with its device."""
        dist.init_process_group(
            "gloo", store=_store(meeting), rank=meeting.rank, world_size=meeting.size, timeout=FOREVER
        )
        on_device = None
        if device.type == "cuda":
            # With its device named it connects here and now, not within the first step or a captured one.
            on_device = dist.new_group(backend="nccl", timeout=DEVICE_TIMEOUT, device_id=device)
        group = TensorGroup(meeting.rank, meeting.size, on_device, one_machine=_tcp_address(meeting) is None)
        group.least(0)  # all are through with the meeting place: rank 0 may remove it
        return group

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """x [...] becomes the sum over all ranks, the same bits on each."""
        if x.numel():
            dist.all_reduce(x, group=self._on_device)
        return x

    def fuse(self, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        """Have `sum_add_norm` done by one kernel where there is one for these sizes."""
        self._fused = fused_sum(self, one_machine=self._one_machine, hidden=hidden, dtype=dtype, device=device)

    def sum_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of x [T, n] over all ranks plus `residual`, first normalised by `weight` [n], then as it is.

        Both x and `residual` may be overwritten.
        """
        if self._fused is not None and self._fused.takes(x):
            return self._fused(x, residual, weight, eps)
        return add_norm(self.sum(x), residual, weight, eps)

    def share(self, x: torch.Tensor) -> None:
        """x becomes what it is on rank 0."""
        dist.broadcast(x, src=0, group=self._on_device)

    def gather_columns(self, part: torch.Tensor) -> torch.Tensor | None:
        """[rows, c] of every rank -> [rows, size * c] on rank 0, None elsewhere; `rows` is the same on all."""
        if not part.numel():
            return part.new_empty((0, self.size * part.shape[1])) if self.leads else None
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.leads else None
        dist.gather(part.contiguous(), parts, dst=0, group=self._on_device)
        return torch.cat(parts, dim=1) if parts is not None else None

    def least(self, number: int) -> int:
        """The smallest number any rank brings."""
        value = torch.tensor([number], dtype=torch.int64)
        dist.all_reduce(value, op=dist.ReduceOp.MIN)
        return int(value)

    def broadcast(self, data: bytes = b"") -> bytes:
        """What rank 0 says; the others' `data` is ignored."""
        length = torch.tensor([len(data)], dtype=torch.int64)
        dist.broadcast(length, src=0)
        body = torch.empty(int(length), dtype=torch.uint8)
        if self.leads and data:
            body = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if len(body):
            dist.broadcast(body, src=0)
        return data if self.leads else body.numpy().tobytes()


def _store(meeting: Meeting) -> Store:
    if (address := _tcp_address(meeting)) is not None:
        return TCPStore(*address, meeting.size, is_master=meeting.rank == 0)
    # Ranks on one machine listen to nobody else.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    return FileStore(meeting.place, meeting.size)


def _tcp_address(meeting: Meeting) -> tuple[str, int] | None:
    """None: the ranks meet in a file, on one machine."""
    host, colon, port = meeting.place.rpartition(":")
    return (host, int(port)) if colon and port.isdigit() else None
