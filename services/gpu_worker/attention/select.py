"""Choosing an attention backend by name. Leaves what each backend can do to the backend itself."""

from __future__ import annotations

import importlib

import structlog

from services.gpu_worker.attention import flashinfer
from services.gpu_worker.attention.base import AttentionBackend
from services.gpu_worker.attention.flashinfer import FlashInferUnavailable
from services.gpu_worker.attention.reference import ReferenceAttention
from services.gpu_worker.kv_cache import KVCache
from services.gpu_worker.models.config import ModelConfig, ModelError

NAMES = ("auto", "native", "flashinfer", "reference")
NATIVE_MODULE = "services.gpu_worker.attention.native"

log = structlog.get_logger()


def attention_backend(name: str, kv_cache: KVCache, config: ModelConfig) -> AttentionBackend:
    """The backend called `name`: "auto", "native", "flashinfer" or "reference".

    "auto" is what is fastest on the cache's device, else the reference. Raises ModelError for an unknown name, and for
    "native" or "flashinfer" where it is not available.
    """
    if name == "reference":
        return ReferenceAttention(kv_cache, one_query=config.deterministic)
    if name not in NAMES:
        raise ModelError(f"attention backend {name!r} is not one of {', '.join(NAMES)}")
    on_cuda = kv_cache.layers[0].device.type == "cuda"
    wanted = ("flashinfer" if on_cuda else "native") if name == "auto" else name
    try:
        return _native(kv_cache, config) if wanted == "native" else flashinfer.load(kv_cache, config)
    except (_NoNative, FlashInferUnavailable) as error:
        if name == wanted:
            raise ModelError(f"the {name} attention backend is not available: {error}") from error
        log.warning(
            "attention in plain torch: every step copies every row's context, expect several times less speed",
            reason=str(error),
        )
        return ReferenceAttention(kv_cache, one_query=config.deterministic)


class _NoNative(Exception):
    """Why there is no native backend here."""


def _native(kv_cache: KVCache, config: ModelConfig) -> AttentionBackend:
    try:
        native = importlib.import_module(NATIVE_MODULE)
    except ModuleNotFoundError as error:
        if error.name != NATIVE_MODULE:
            raise
        raise _NoNative(str(error)) from error
    try:
        backend: AttentionBackend = native.load(kv_cache, config)
        return backend
    except native.NativeUnavailable as error:
        raise _NoNative(str(error)) from error
