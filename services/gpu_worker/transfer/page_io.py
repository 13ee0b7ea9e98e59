"""Whole pages of a KV cache as bytes and back, outside of the compute thread. Leaves which pages to the scheduler.

Only full pages that no step writes are read, and only pages that no step knows are written, so nothing here waits for
a step or is waited for by one.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from services.gpu_worker.kv_cache import KVCache

Bytes = NDArray[np.uint8]


class PageIO:
    """Bytes of n pages: [layer][page][page's bytes in that layer], as they lie in the cache."""

    def __init__(self, kv_cache: KVCache) -> None:
        self._layers = kv_cache.layers
        self.num_pages = kv_cache.num_pages
        self.layer_bytes = self._layers[0][0].nbytes
        self.num_layers = len(self._layers)
        self.page_bytes = self.layer_bytes * self.num_layers
        device = self._layers[0].device
        # numpy copies in the calling thread; torch would start a pool of threads for it beside the model's.
        self._views = [_as_bytes(layer) for layer in self._layers] if device.type == "cpu" else []
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def read(self, pages: list[int]) -> Bytes:
        """uint8 [layers, n, bytes]. Raises IndexError for a page that is not in the cache."""
        index = self._index(pages)
        out = np.empty((len(self._layers), len(pages), self.layer_bytes), np.uint8)
        if self._stream is not None:
            self._read_device(index, out)
            return out
        for view, rows in zip(self._views, out, strict=True):
            np.take(view, index, axis=0, out=rows, mode="clip")  # was checked; "raise" would copy twice
        return out

    def write(self, pages: list[int], data: bytes | memoryview | Bytes) -> None:
        """What `read` gave, into these pages. Raises IndexError, ValueError for another number of bytes."""
        index = self._index(pages)
        rows = np.frombuffer(data, np.uint8).reshape(len(self._layers), len(pages), self.layer_bytes)
        if self._stream is not None:
            self._write_device(index, rows)
            return
        for view, source in zip(self._views, rows, strict=True):
            view[index] = source

    def _index(self, pages: list[int]) -> NDArray[np.int64]:
        index = np.array(pages, np.int64)
        if len(index) and not (index.min() >= 0 and index.max() < self.num_pages):
            raise IndexError("a page is not in the cache")
        return index

    @torch.no_grad()
    def _read_device(self, index: NDArray[np.int64], out: Bytes) -> None:
        with torch.cuda.stream(self._stream):
            rows = torch.from_numpy(index).to(self._layers[0].device)
            gathered = [layer.index_select(0, rows) for layer in self._layers]
            for target, source in zip(out, gathered, strict=True):
                target[:] = _as_bytes(source.cpu())

    @torch.no_grad()
    def _write_device(self, index: NDArray[np.int64], rows: Bytes) -> None:
        assert self._stream is not None
        with torch.cuda.stream(self._stream):
            where = torch.from_numpy(index).to(self._layers[0].device)
            for layer, source in zip(self._layers, rows, strict=True):
                values = torch.from_numpy(source.copy()).view(layer.dtype).view(len(index), *layer.shape[1:])
                layer.index_copy_(0, where, values.to(layer.device))
        self._stream.synchronize()  # whoever hears that they are in may use them in any stream


def _as_bytes(tensor: torch.Tensor) -> Bytes:
    """The tensor's memory, uint8 [pages, bytes]."""
    view: Bytes = tensor.view(tensor.shape[0], -1).view(torch.uint8).numpy()
    return view
