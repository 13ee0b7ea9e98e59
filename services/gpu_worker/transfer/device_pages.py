"""Whole pages between a GPU's cache and pinned memory, on a stream beside the steps. Leaves whose they are to callers.

compute   step t ----------> step t+1 (may write the pages again)
             \\              /          after_compute, before_compute: the device waits, no thread does
side          gather ------x--> to pinned memory --> mark: whoever wants the bytes waits for it
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from services.gpu_worker.transfer.staged import as_unsigned, device_checksum

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]

PIECE_BYTES = 64 << 20
"""Gathered on the device at once; of a longer read the steps wait for all pieces but the last to be copied out."""


class Mark(Protocol):
    """A place in the side stream."""

    def synchronize(self) -> None:
        """Hold the calling thread until the device has come to it."""
        ...


class SideStream(Protocol):
    """A stream beside the compute stream, which is the current stream of the thread that runs the steps."""

    def after_compute(self) -> None:
        """What is run from now on sees all that was enqueued in the current stream."""
        ...

    def before_compute(self) -> None:
        """What the current stream is given from now on comes after all that was run here."""
        ...

    def run(self, job: Callable[[], None]) -> None:
        """Enqueue what `job` does on the device."""
        ...

    def mark(self) -> Mark: ...

    def pinned(self, size: int) -> torch.Tensor:
        """uint8 [size] of host memory."""
        ...


class CudaSideStream:
    """The real one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def after_compute(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def before_compute(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def run(self, job: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            job()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # waiting for it leaves the core to others
        event.record(self._stream)
        return event

    def pinned(self, size: int) -> torch.Tensor:
        # From torch's cache of pinned memory, which takes it back once nothing uses it any more.
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)


@dataclass(frozen=True, slots=True)
class DeviceRead:
    """A read under way."""

    _pinned: torch.Tensor  # uint8 [layers, n, bytes]
    _mark: Mark

    def result(self) -> Bytes:
        """The bytes, which live as long as the array does. Waits until they are there."""
        self._mark.synchronize()
        data: Bytes = self._pinned.numpy()
        return data


class DevicePages:
    """The pages of `layers`, each [num_pages, ...] and contiguous. Any thread may call it."""

    def __init__(self, layers: list[torch.Tensor], side: SideStream) -> None:
        self._layers = [_words(layer) for layer in layers]
        self._layer_bytes = self._layers[0][0].nbytes
        self._side = side
        self._lock = threading.Lock()  # guards _fenced
        self._fenced = False

    def fence(self) -> None:
        """What is read or written from now on comes after the steps under way, whose life is over.

        The thread that runs the steps leaves their stream the current one, so that it is that of any thread.
        """
        with self._lock:
            self._fenced = True

    @torch.no_grad()
    def start_read(self, pages: Ints, *, ordered: bool) -> DeviceRead:
        """Begin to read these pages. `ordered`: as one of the steps, in the thread that runs them.

        Then the pages are read as the steps enqueued so far leave them, and no later step writes them before. Else
        they must be pages that no step under way writes.
        """
        shape = (len(self._layers), len(pages), self._layer_bytes)
        out = self._side.pinned(shape[0] * shape[1] * shape[2]).view(shape)
        self._follow_compute(ordered=ordered)
        pieces = list(self._pieces(len(pages)))
        for piece in pieces:
            self._read_piece(pages[piece], out[:, piece], is_end=ordered and piece is pieces[-1])
        return DeviceRead(out, self._side.mark())

    @torch.no_grad()
    def write(self, pages: Ints, rows: Bytes) -> None:
        """rows uint8 [layers, n, bytes] into pages that no step knows yet; they are there when this returns.

        So whoever hears of it may use them in any stream.
        """
        self._follow_compute(ordered=False)
        for piece in self._pieces(len(pages)):
            part = rows[:, piece]
            pinned = self._side.pinned(part.size).view(part.shape)
            np.copyto(pinned.numpy(), part)
            self._side.run(partial(self._scatter, pages[piece], pinned))
            self._side.mark().synchronize()

    @torch.no_grad()
    def stage(self, pages: Ints, staged: torch.Tensor) -> int:
        """These pages side by side into uint8 [layers * n * bytes] on the device; returns its checksum.

        They must be pages that no step under way writes. They are there when this returns.
        """
        self._follow_compute(ordered=False)
        out = staged.view(len(self._layers), len(pages), -1)
        self._side.run(lambda: self._gather_into(pages, out.view(self._layers[0].dtype)))
        return self.checksum(staged)

    @torch.no_grad()
    def unstage(self, pages: Ints, staged: torch.Tensor) -> None:
        """What `stage` gave, into pages that no step knows yet; they are there when this returns."""
        self._follow_compute(ordered=False)
        rows = staged.view(len(self._layers), len(pages), -1)
        self._side.run(lambda: self._put(pages, rows.view(self._layers[0].dtype)))
        self._side.mark().synchronize()

    @torch.no_grad()
    def checksum(self, staged: torch.Tensor) -> int:
        """Of uint8 [n] on the device."""
        total = self._side.pinned(8).view(torch.int64)
        self._side.run(lambda: _copy_number(device_checksum(staged), total))
        self._side.mark().synchronize()
        return as_unsigned(int(total[0]))

    def _follow_compute(self, *, ordered: bool) -> None:
        with self._lock:  # of two threads that come after a fence, the second must not pass while the first is here
            if ordered or self._fenced:
                self._side.after_compute()
                self._fenced = False

    def _read_piece(self, pages: Ints, out: torch.Tensor, *, is_end: bool) -> None:
        """`is_end`: steps enqueued later may write these pages and those of all pieces before."""
        staged: list[torch.Tensor] = []
        self._side.run(lambda: staged.append(self._gather(pages)))
        if is_end:
            self._side.before_compute()
        self._side.run(lambda: _copy_out(staged.pop(), out))

    def _pieces(self, count: int) -> Iterator[slice]:
        size = max(1, PIECE_BYTES // (self._layer_bytes * len(self._layers)))
        return (slice(first, first + size) for first in range(0, count, size))

    def _gather(self, pages: Ints) -> torch.Tensor:
        """The pages side by side on the device, [layers, n, words]."""
        first = self._layers[0]
        shape = (len(self._layers), len(pages), first.shape[1])
        staged = torch.empty(shape, dtype=first.dtype, device=first.device)
        self._gather_into(pages, staged)
        return staged

    def _gather_into(self, pages: Ints, staged: torch.Tensor) -> None:
        where = self._places(pages)
        for layer, out in zip(self._layers, staged, strict=True):
            torch.index_select(layer, 0, where, out=out)

    def _scatter(self, pages: Ints, pinned: torch.Tensor) -> None:
        first = self._layers[0]
        self._put(pages, pinned.to(first.device, non_blocking=True).view(first.dtype))

    def _put(self, pages: Ints, staged: torch.Tensor) -> None:
        where = self._places(pages)
        for layer, source in zip(self._layers, staged, strict=True):
            layer.index_copy_(0, where, source)

    def _places(self, pages: Ints) -> torch.Tensor:
        """The numbers on the device. From memory that is not pinned the copy would hold the thread, and with `ordered`
        that is the one that runs the steps, until all steps under way are done.
        """
        pinned = self._side.pinned(pages.nbytes).view(torch.int64)
        np.copyto(pinned.numpy(), pages)
        return pinned.to(self._layers[0].device, non_blocking=True)


def _copy_out(staged: torch.Tensor, out: torch.Tensor) -> None:
    # Part by part contiguous on both sides: else torch would go through memory that is not pinned.
    for source, target in zip(staged.view(torch.uint8), out, strict=True):
        target.copy_(source, non_blocking=True)


def _copy_number(number: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(number, non_blocking=True)


def _words(layer: torch.Tensor) -> torch.Tensor:
    """The same memory as whole numbers [num_pages, words]: not all operations know all dtypes."""
    rows = layer.view(layer.shape[0], -1).view(torch.uint8)
    return rows.view(torch.int64) if rows.shape[1] % 8 == 0 else rows
