"""The backend of programs that name none."""

from __future__ import annotations

from typing import Any, cast

from radixfleet.backend.base import Backend
from radixfleet.lang.errors import LanguageError

_default: Backend | None = None


class GlobalConfig:
    """Settings of this process under the names that ported programs use."""

    enable_precache_with_tracing = True  # the switch `prefix` of batches
    enable_parallel_encoding = False  # forks are joined by their texts in any case

    @property
    def default_backend(self) -> Backend | None:
        return _default

    @default_backend.setter
    def default_backend(self, backend: Any) -> None:
        set_default_backend(backend)


global_config = GlobalConfig()


def set_default_backend(backend: Any) -> None:
    """Programs run on this from now on: an endpoint, or a Runtime."""
    global _default
    _default = endpoint_of(backend)


def backend_or_default(backend: Any = None) -> Backend:
    """Raises LanguageError where there is neither."""
    if backend is not None:
        return endpoint_of(backend)
    if _default is None:
        raise LanguageError("no backend: call set_default_backend(RuntimeEndpoint(url)) first, or pass backend=...")
    return _default


def flush_cache(backend: Any = None) -> None:
    """Empty the server's cache. Raises BackendError while requests run."""
    backend_or_default(backend).flush_cache()


def get_server_info(backend: Any = None) -> dict[str, Any]:
    """Configuration and state of the server."""
    return backend_or_default(backend).get_server_info()


def endpoint_of(backend: Any) -> Backend:
    """A Runtime stands for its endpoint. Raises TypeError for an address alone."""
    if isinstance(backend, str):
        raise TypeError(f"a backend is wanted, not a text: RuntimeEndpoint({backend!r})")
    return cast(Backend, getattr(backend, "endpoint", backend))
