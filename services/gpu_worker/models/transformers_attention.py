"""Our paged attention as a function transformers' models call, and a probe that learns what they ask of it.

Leaves building the models to `transformers_backend`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from services.gpu_worker.attention.base import AttentionBackend, AttentionSpec
from services.gpu_worker.models.config import UnsupportedModel

PROBE_TOKENS = 4
# Arguments that say nothing about the scores, or nothing a causal attention without dropout does not do anyway.
HARMLESS = frozenset(
    {
        "cache",
        "cache_position",
        "dropout",
        "is_causal",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer's attention as the probe saw it."""

    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    spec: AttentionSpec


class AttentionBridge:
    """Runs one model's attention on whatever backend is bound; the model finds it by `name`.

    No mask function is registered for `name`, so the model builds no masks.
    """

    def __init__(self) -> None:
        self.name = f"radixfleet_paged_{next(_numbers)}"
        self._backend: AttentionBackend | None = None
        self._specs: tuple[AttentionSpec, ...] = ()
        AttentionInterface.register(self.name, self._attend)

    def bind(self, backend: AttentionBackend, specs: tuple[AttentionSpec, ...]) -> None:
        self._backend = backend
        self._specs = specs

    def _attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        """Query [1, Hq, T, D], key [1, Hkv, T, D], value [1, Hkv, T, Dv] -> [1, T, Hq, Dv]."""
        assert self._backend is not None
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
        missing = k.shape[-1] - v.shape[-1]
        if missing:  # latent attention has shorter values than keys
            v = F.pad(v, (0, missing))
        out = self._backend.forward(layer, q, k, v, self._specs[layer])
        return out[..., : value.shape[-1]].unsqueeze(0), None


class AttentionProbe:
    """Stands in for attention during one trial pass and records what each layer asks for.

    Raises UnsupportedModel from within that pass for anything the interface cannot express.
    """

    def __init__(self) -> None:
        self.name = f"radixfleet_probe_{next(_numbers)}"
        self._layers: dict[int, LayerShape] = {}
        self._masks: list[tuple[torch.Tensor, int | None]] = []  # marker, window; None: no mask we know
        AttentionInterface.register(self.name, self._attend)
        AttentionMaskInterface.register(self.name, self._mask)

    def layers(self, expected: int) -> list[LayerShape]:
        """What was seen, layer by layer. Raises UnsupportedModel unless all `expected` layers share one shape."""
        if sorted(self._layers) != list(range(expected)):
            raise UnsupportedModel(
                f"only layers {sorted(self._layers)} of {expected} keep their state in keys and values"
            )
        found = [self._layers[layer] for layer in range(expected)]
        if len({(layer.heads, layer.kv_heads, layer.dim) for layer in found}) > 1:
            raise UnsupportedModel("layers differ in the shape of their queries or keys")
        return found

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        layer = _layer_index(module, self._layers)
        _refuse_extras(module, kwargs)
        if query.shape[2] != key.shape[2] or value.shape[-1] > key.shape[-1] or query.shape[-1] != key.shape[-1]:
            raise UnsupportedModel(f"layer {layer} attends with shapes {query.shape}, {key.shape}, {value.shape}")
        dim = query.shape[-1]
        spec = AttentionSpec(
            scale=float(dim**-0.5 if scaling is None else scaling),
            sliding_window=self._window(layer, attention_mask, int(sliding_window or 0)),
            soft_cap=float(softcap or 0.0),
        )
        self._layers[layer] = LayerShape(query.shape[1], key.shape[1], dim, value.shape[-1], spec)
        return query.new_zeros((query.shape[0], query.shape[2], query.shape[1], value.shape[-1])), None

    def _mask(
        self,
        mask_function: Callable[..., Any],
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        local_size: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Called where a model builds a mask; returns a marker that tells which mask reaches a layer."""
        window = int(local_size or 0)
        marker = torch.zeros((1, 1, PROBE_TOKENS, PROBE_TOKENS), dtype=dtype, device=device)
        self._masks.append((marker, window if _is_causal_window(mask_function, window) else None))
        return marker

    def _window(self, layer: int, mask: torch.Tensor | None, asked: int) -> int:
        """The window of the mask that came, which must not contradict the window the layer asks for."""
        if mask is None:
            return asked
        for marker, window in self._masks:
            if marker.untyped_storage().data_ptr() != mask.untyped_storage().data_ptr():
                continue
            if window is None:
                raise UnsupportedModel(f"layer {layer} masks attention by more than order and a sliding window")
            if asked not in (0, window):
                raise UnsupportedModel(f"layer {layer} asks for a window of {asked}, its mask has {window}")
            return window
        raise UnsupportedModel(f"layer {layer} brings an attention mask of its own")


def _layer_index(module: torch.nn.Module, seen: dict[int, LayerShape]) -> int:
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise UnsupportedModel(f"{type(module).__name__} does not know its layer")
    if layer in seen:
        raise UnsupportedModel(f"layer {layer} attends more than once")
    return layer


def _refuse_extras(module: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    name = type(module).__name__
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModel(f"{name} is not causal")
    extras = sorted(key for key, value in kwargs.items() if key not in HARMLESS and value is not None)
    if extras:
        raise UnsupportedModel(f"{name} needs {', '.join(extras)}, which paged attention does not have")


def _is_causal_window(mask_function: Callable[..., Any], window: int) -> bool:
    """Compare the mask with ours at the positions where the two could differ."""
    reach = window or 64
    queries = sorted({0, 1, 5, reach - 1, reach, reach + 1, 2 * reach + 3, 5 * reach + 7})
    for query in queries:
        around = {0, 1, query - 2 * reach, query - reach - 1, query - reach, query - reach + 1, query - 1, query}
        for key in sorted(k for k in around | {query + 1, query + reach} if k >= 0):
            allowed = bool(mask_function(0, 0, torch.tensor(query), torch.tensor(key)))
            if allowed != (key <= query and (window == 0 or key > query - window)):
                return False
    return True
