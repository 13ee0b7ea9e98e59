"""The sampler of deferred steps: the device's choice, fetched at once. Leaves the choice to `sampling`."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from services.gpu_worker.cuda.sampling import draw_arrays, sample_on_device
from services.gpu_worker.cuda.staging import Staging
from services.gpu_worker.kernels.logits import Blocks
from services.gpu_worker.sampling_columns import SampleRows

Ints = NDArray[np.int64]


class DeviceSampler:
    """As `sampler.Sampler`, whose many passes would each wait for the device."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging

    def sample(
        self, logits: torch.Tensor, rows: SampleRows, blocks: Blocks | None = None
    ) -> tuple[Ints, NDArray[np.bool_]]:
        """Tokens [n], -1 for rows that are not fit, and which are; logits float32 [n, vocab]."""
        shape, arrays = draw_arrays(rows)
        tokens: Ints = sample_on_device(logits, shape, self._staging.send(arrays)).cpu().numpy()
        fit = tokens >= 0
        return np.where(fit, tokens, -1), fit
