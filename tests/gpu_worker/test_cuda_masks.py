"""Masks by the side stream forbid what masks of the host do, and never touch memory of the compute stream early."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from services.gpu_worker.cuda.device import HostDevice, HostEvent
from services.gpu_worker.cuda.masks import MaskUpload
from services.gpu_worker.logit_edits import apply_masks


class Order(HostEvent):
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def record(self) -> None:
        self._log.append("copied")

    def hold_stream(self) -> None:
        self._log.append("compute stream holds")


class TwoStreams(HostDevice):
    """Writes down which stream is current."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def event(self) -> HostEvent:
        return Order(self.log)

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        self.log.append("side")
        yield
        self.log.append("compute")


@pytest.mark.parametrize("vocab", [31, 32, 100, 4000])
@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4], [3, 0], [4]])
def test_masks_forbid_the_same(vocab: int, rows: list[int]) -> None:
    rng = np.random.default_rng(vocab + len(rows))
    logits = torch.from_numpy(rng.standard_normal((5, vocab)).astype(np.float32))
    upload, expected = MaskUpload(HostDevice()), logits.clone()
    for _ in range(2):
        words = rng.integers(0, 2**32, (len(rows), -(-vocab // 32)), dtype=np.uint32)
        where = np.array(rows, dtype=np.int64)
        upload.apply(logits, where, words)
        apply_masks(expected, where, words)
        torch.testing.assert_close(logits, expected, rtol=0, atol=0)


def test_the_compute_stream_holds_only_for_the_copy() -> None:
    device = TwoStreams()
    upload = MaskUpload(device)
    upload.apply(torch.zeros(2, 100), np.array([1]), np.zeros((1, 4), dtype=np.uint32))
    large = np.zeros((2, 1 << 15), dtype=np.uint32)
    upload.apply(torch.zeros(2, 1 << 20), np.array([0, 1]), large)
    memory, copy = ["side", "compute"], ["side", "copied", "compute", "compute stream holds"]
    assert device.log == [*memory, *copy, *memory, *copy]
