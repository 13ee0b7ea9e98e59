"""Copying whole pages of a CPU cache in one call for all layers. Leaves which pages to the scheduler."""

from __future__ import annotations

import ctypes

import torch

from services.gpu_worker.kernels.library import Library


class PageCopier:
    """copy(sources, targets) within every layer; the layers are contiguous CPU tensors whose first axis is the page."""

    def __init__(self, kernels: Library, layers: list[torch.Tensor]) -> None:
        self._copy = kernels.functions.rf_copy_pages
        self._layers = layers  # keeps the memory alive
        self._pointers = (ctypes.c_void_p * len(layers))(*(layer.data_ptr() for layer in layers))
        self._num_pages = layers[0].shape[0]
        self._page_bytes = layers[0][0].nbytes

    def __call__(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """int64 [n] each; all sources are read before any target is written. Raises ValueError for unknown pages."""
        pages = torch.stack([sources, targets]).to(torch.int64).contiguous()
        if pages.numel() == 0:
            return
        if int(pages.min()) < 0 or int(pages.max()) >= self._num_pages:
            raise ValueError("a page to copy is not in the cache")
        failed = self._copy(
            self._pointers,
            len(self._layers),
            pages[0].data_ptr(),
            pages[1].data_ptr(),
            pages.shape[1],
            self._page_bytes,
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError("no memory to copy pages")
