"""Whole pages of a KV cache as bytes and back, outside of the compute thread. Leaves which pages to the scheduler.

Only pages that no step knows are written, and `read` is for full pages whose steps' results have been told, so neither
waits for a step or is waited for by one. `start_read` is for pages that the next steps may write again: it takes its
place among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from services.gpu_worker.kv_cache import KVCache, as_bytes
from services.gpu_worker.transfer.device_pages import CudaSideStream, DevicePages, SideStream
from services.gpu_worker.transfer.staged import checksum

Bytes = NDArray[np.uint8]


class PendingRead(Protocol):
    """Pages on their way; uint8 [layers, n, bytes]."""

    def result(self) -> Bytes: ...


@dataclass(frozen=True, slots=True)
class _Read:
    """Pages that were read at once."""

    _data: Bytes

    def result(self) -> Bytes:
        return self._data


class PageIO:
    """Bytes of n pages: [layer][page][page's bytes in that layer], as they lie in the cache."""

    def __init__(self, kv_cache: KVCache, side: SideStream | None = None) -> None:
        self._layers = [as_bytes(layer) for layer in kv_cache.layers]
        self.format = kv_cache.format
        self.num_pages = kv_cache.num_pages
        self.layer_bytes = self._layers[0][0].nbytes
        self.num_layers = len(self._layers)
        self.page_bytes = self.layer_bytes * self.num_layers
        device = self._layers[0].device
        # numpy copies in the calling thread; torch would start a pool of threads for it beside the model's.
        self._views = [_as_bytes(layer) for layer in self._layers] if device.type == "cpu" else []
        if device.type == "cuda" and side is None:
            side = CudaSideStream(device)
        self._device = DevicePages(self._layers, side) if side is not None else None

    @property
    def on_gpu(self) -> bool:
        return self._layers[0].is_cuda

    def read(self, pages: list[int]) -> Bytes:
        """uint8 [layers, n, bytes]. Raises IndexError for a page that is not in the cache."""
        index = self._index(pages)
        if self._device is not None:
            return self._device.start_read(index, ordered=False).result()
        out = np.empty((len(self._layers), len(pages), self.layer_bytes), np.uint8)
        self._take(index, out)
        return out

    def fence(self) -> None:
        """A life is over: what is read or written from now on comes after its last steps."""
        if self._device is not None:
            self._device.fence()

    def start_read(self, pages: list[int]) -> PendingRead:
        """As `read`, called between two steps in the thread that runs them: the pages as the first leaves them.

        On a device nothing is waited for but by `result`, in any thread. Raises IndexError.
        """
        if self._device is None:
            return _Read(self.read(pages))
        return self._device.start_read(self._index(pages), ordered=True)

    def write(self, pages: list[int], data: bytes | memoryview | Bytes) -> None:
        """What `read` gave, into these pages. Raises IndexError, ValueError for another number of bytes."""
        index = self._index(pages)
        rows = np.frombuffer(data, np.uint8).reshape(len(self._layers), len(pages), self.layer_bytes)
        if self._device is not None:
            self._device.write(index, rows)
            return
        for view, source in zip(self._views, rows, strict=True):
            view[index] = source

    def staging(self, size: int) -> torch.Tensor:
        """uint8 [size] where the cache is, for `stage`."""
        return torch.empty(size, dtype=torch.uint8, device=self._layers[0].device)

    def stage(self, pages: list[int], staged: torch.Tensor) -> int:
        """These pages into uint8 [n * page_bytes] from `staging`; its checksum. As `read` in all else."""
        index = self._index(pages)
        if self._device is not None:
            return self._device.stage(index, staged)
        self._take(index, staged.numpy().reshape(len(self._layers), len(pages), self.layer_bytes))
        return self.checksum(staged)

    def unstage(self, pages: list[int], staged: torch.Tensor) -> None:
        """What `stage` gave, into these pages; as `write`."""
        if self._device is not None:
            self._device.unstage(self._index(pages), staged)
        else:
            self.write(pages, staged.numpy())

    def checksum(self, staged: torch.Tensor) -> int:
        return checksum(staged.numpy()) if self._device is None else self._device.checksum(staged)

    def _take(self, index: NDArray[np.int64], out: Bytes) -> None:
        for view, rows in zip(self._views, out, strict=True):
            np.take(view, index, axis=0, out=rows, mode="clip")  # was checked; "raise" would copy twice

    def _index(self, pages: list[int]) -> NDArray[np.int64]:
        index = np.array(pages, np.int64)
        if len(index) and not (index.min() >= 0 and index.max() < self.num_pages):
            raise IndexError("a page is not in the cache")
        return index


def _as_bytes(tensor: torch.Tensor) -> Bytes:
    """The tensor's memory, uint8 [pages, bytes]."""
    view: Bytes = tensor.view(tensor.shape[0], -1).view(torch.uint8).numpy()
    return view
