"""Choosing an attention backend by name. Leaves what each backend can do to the backend itself."""

from __future__ import annotations

import importlib

import structlog

from services.gpu_worker.attention.base import AttentionBackend
from services.gpu_worker.attention.reference import ReferenceAttention
from services.gpu_worker.kv_cache import KVCache
from services.gpu_worker.models.config import ModelConfig, ModelError

NATIVE_MODULE = "services.gpu_worker.attention.native"

log = structlog.get_logger()


def attention_backend(name: str, kv_cache: KVCache, config: ModelConfig) -> AttentionBackend:
    """The backend called `name`: "auto", "native" or "reference".

    Raises ModelError for an unknown name, and for "native" where there is no native backend.
    """
    if name == "reference":
        return ReferenceAttention(kv_cache, one_query=config.deterministic)
    if name not in ("auto", "native"):
        raise ModelError(f"attention backend {name!r} is not one of auto, native, reference")
    try:
        return _native(kv_cache, config)
    except _NoNative as error:
        if name == "native":
            raise ModelError(f"the native attention backend is not available: {error}") from error
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
