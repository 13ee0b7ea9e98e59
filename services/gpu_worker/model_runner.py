"""Loading a model and running forward passes over its paged cache. Leaves batching and sampling to the engine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import structlog
import torch

from services.gpu_worker.attention.base import AttentionBackend
from services.gpu_worker.attention.select import attention_backend as select_backend
from services.gpu_worker.batch import ForwardBatch
from services.gpu_worker.kernels.logits import Blocks
from services.gpu_worker.kv_cache import FP8, KVCache
from services.gpu_worker.layers.moe_fused import MoeBackend
from services.gpu_worker.models.config import ModelConfig, ModelError, ModelFolder, UnsupportedModel, read_folder
from services.gpu_worker.models.decoder import Decoder
from services.gpu_worker.models.families import read_decoder_config
from services.gpu_worker.models.loading import LoadFormat, LoadOptions, Model, Quantization, load_own
from services.gpu_worker.parallel.group import TensorGroup

ModelImpl = Literal["auto", "own", "transformers"]
KvCacheDtype = Literal["auto", "fp8_e4m3"]

log = structlog.get_logger()


class ModelRunner:
    """A model with its cache. `forward` is for one thread at a time."""

    def __init__(
        self,
        config: ModelConfig,
        model: Model,
        kv_cache: KVCache,
        attention: AttentionBackend,
        max_batched_tokens: int,
    ) -> None:
        self.config = config
        self.kv_cache = kv_cache
        self.model = model
        self.attention = attention
        self._max_batched_tokens = max_batched_tokens

    @property
    def kv_bytes_read(self) -> int:
        """Bytes of K and V that attention has read from the cache so far."""
        return self.attention.kv_bytes_read

    @property
    def blocks(self) -> Blocks | None:
        """What the product that made the last forward's logits has noted of them."""
        return self.model.blocks

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """One step: writes the tokens' K and V, returns fp32 logits [len(batch.logit_rows), vocab].

        They last until the next step.
        Raises ValueError for more tokens than the runner was built for.
        """
        if batch.num_tokens > self._max_batched_tokens:
            raise ValueError(f"a step of {batch.num_tokens} tokens exceeds the limit of {self._max_batched_tokens}")
        with torch.inference_mode():
            return self.model.forward(batch, self.attention)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Weights in place, no cache yet."""

    config: ModelConfig
    model: Model
    device: torch.device
    attention_backend: str
    kv_dtype: torch.dtype

    @property
    def is_capturable(self) -> bool:
        """Whether a CUDA graph can hold its forward pass, which then never waits for the device.

        The reference attention does, and it is what a deterministic model gets.
        """
        if self.config.deterministic or self.attention_backend == "reference":
            return False
        return isinstance(self.model, Decoder) and self.model.capturable

    @property
    def is_batch_invariant(self) -> bool:
        """Whether guessing tokens ahead changes no token: its logits do not depend on the rows beside it."""
        return isinstance(self.model, Decoder) and self.model.is_native

    def kv_bytes_per_page(self, page_size: int) -> int:
        """Bytes of one page over all layers."""
        config = self.config
        return KVCache.bytes_per_page(config.num_layers, page_size, config.kv_heads, config.head_dim, self.kv_dtype)

    def build_runner(self, num_pages: int, page_size: int, max_batched_tokens: int) -> ModelRunner:
        """Allocate the cache and plug the attention in. Raises ModelError if the backend is not available."""
        config = self.config
        kv_cache = KVCache(
            config.num_layers,
            num_pages,
            page_size,
            config.kv_heads,
            config.head_dim,
            self.kv_dtype,
            self.device,
            config.kv_scales,
            config.hidden if self.is_batch_invariant else 0,
        )
        attention = select_backend(self.attention_backend, kv_cache, config)
        return ModelRunner(config, self.model, kv_cache, attention, max_batched_tokens)


def load_model(
    model_path: str,
    *,
    device: torch.device,
    dtype: torch.dtype | None,
    load_format: LoadFormat,
    model_impl: ModelImpl,
    attention_backend: str,
    context_length: int,
    deterministic: bool,
    quantization: Quantization = "none",
    group: TensorGroup | None = None,
    moe_backend: MoeBackend = "auto",
    kv_cache_dtype: KvCacheDtype = "auto",
) -> LoadedModel:
    """Weights of the folder `model_path` on `device`; dtype None takes the folder's, context_length 0 the model's.

    Raises ModelError, which says what is wrong with the folder or with the wish.
    """
    started = time.monotonic()
    folder = read_folder(model_path)
    native = attention_backend != "reference" and kv_cache_dtype == "auto"
    options = LoadOptions(
        device, dtype, load_format, context_length, deterministic, native, quantization, group, moe_backend
    )
    config, model = _load(folder, options, model_impl)
    log.info(
        "model loaded",
        architecture=config.architecture,
        implementation=config.implementation,
        dtype=str(config.dtype).removeprefix("torch."),
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        context=config.max_context,
        seconds=round(time.monotonic() - started, 2),
    )
    kv_dtype = config.dtype if kv_cache_dtype == "auto" else FP8
    return LoadedModel(config, model, device, attention_backend, kv_dtype)


def _load(folder: ModelFolder, options: LoadOptions, model_impl: ModelImpl) -> tuple[ModelConfig, Model]:
    if model_impl != "transformers":
        try:
            return load_own(folder, read_decoder_config(folder.architecture, folder.config), options)
        except UnsupportedModel as error:
            if model_impl == "own":
                raise
            log.info("running through transformers", reason=str(error))
    if options.quantization != "none":
        raise ModelError(f"--quantization {options.quantization} is for models of the own decoder")
    if options.group is not None:
        raise ModelError("--tp-size is for models of the own decoder")
    from services.gpu_worker.models.transformers_backend import load_transformers  # seconds of import

    return load_transformers(folder, options)
