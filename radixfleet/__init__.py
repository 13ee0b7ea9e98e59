"""RadixFleet: an LLM serving system that computes every shared prefix once.

A program over a model needs no more than `from radixfleet import function, gen, ...` or `import radixfleet as sgl`.
Everything else is imported when it is first asked for, so that the command line stays quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from radixfleet.version import __version__

if TYPE_CHECKING:
    from radixfleet.backend.endpoint import RuntimeEndpoint
    from radixfleet.backend.errors import BackendError, BackendTimeout
    from radixfleet.backend.openai_api import OpenAI
    from radixfleet.engine import Engine
    from radixfleet.lang.api import (
        assistant,
        assistant_begin,
        assistant_end,
        gen,
        gen_int,
        gen_string,
        select,
        separate_reasoning,
        system,
        system_begin,
        system_end,
        user,
        user_begin,
        user_end,
    )
    from radixfleet.lang.calls import allow_api_hosts, forbid_api_hosts
    from radixfleet.lang.choices import (
        greedy_token_selection,
        token_length_normalized,
        unconditional_likelihood_normalized,
    )
    from radixfleet.lang.defaults import flush_cache, get_server_info, global_config, set_default_backend
    from radixfleet.lang.errors import ApiCallError, BatchError, LanguageError, UnsetVariable
    from radixfleet.lang.optimizations import Optimizations
    from radixfleet.lang.program import function
    from radixfleet.lang.xml import xml_schema
    from radixfleet.runtime import Runtime
    from radixfleet.server_args import ServerArgs

_HOMES = {
    "radixfleet.backend.endpoint": ("RuntimeEndpoint",),
    "radixfleet.backend.errors": ("BackendError", "BackendTimeout"),
    "radixfleet.backend.openai_api": ("OpenAI",),
    "radixfleet.engine": ("Engine",),
    "radixfleet.lang.api": (
        "assistant",
        "assistant_begin",
        "assistant_end",
        "gen",
        "gen_int",
        "gen_string",
        "select",
        "separate_reasoning",
        "system",
        "system_begin",
        "system_end",
        "user",
        "user_begin",
        "user_end",
    ),
    "radixfleet.lang.calls": ("allow_api_hosts", "forbid_api_hosts"),
    "radixfleet.lang.choices": (
        "greedy_token_selection",
        "token_length_normalized",
        "unconditional_likelihood_normalized",
    ),
    "radixfleet.lang.defaults": ("flush_cache", "get_server_info", "global_config", "set_default_backend"),
    "radixfleet.lang.errors": ("ApiCallError", "BatchError", "LanguageError", "UnsetVariable"),
    "radixfleet.lang.optimizations": ("Optimizations",),
    "radixfleet.lang.program": ("function",),
    "radixfleet.lang.xml": ("xml_schema",),
    "radixfleet.runtime": ("Runtime",),
    "radixfleet.server_args": ("ServerArgs",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "ApiCallError",
    "BackendError",
    "BackendTimeout",
    "BatchError",
    "Engine",
    "LanguageError",
    "OpenAI",
    "Optimizations",
    "Runtime",
    "RuntimeEndpoint",
    "ServerArgs",
    "UnsetVariable",
    "__version__",
    "allow_api_hosts",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "flush_cache",
    "forbid_api_hosts",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "global_config",
    "greedy_token_selection",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
    "xml_schema",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'radixfleet' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value
