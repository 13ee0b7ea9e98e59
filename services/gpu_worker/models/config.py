"""Reading a model folder's configuration as plain JSON. Leaves what an architecture means to its family."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from services.gpu_worker.attention.base import AttentionSpec

Implementation = Literal["own", "transformers"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelError(ValueError):
    """The model folder cannot be served; the message says why."""


class UnsupportedModel(ModelError):
    """A sound model that the chosen implementation cannot run."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What a served model is, whichever implementation runs it."""

    architecture: str
    model_type: str
    implementation: Implementation
    digest: str  # of configuration and weights, equal for equal models
    dtype: torch.dtype
    vocab_size: int
    hidden: int
    num_layers: int
    num_heads: int
    kv_heads: int
    head_dim: int
    max_context: int  # longest sequence in tokens
    eos_ids: tuple[int, ...]
    attention: tuple[AttentionSpec, ...]  # one per layer
    deterministic: bool = False
    kv_scales: tuple[tuple[float, float], ...] = ()  # per layer of K and V, for a cache of 8 bits; none: 1


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """config.json and generation_config.json of one folder, as they are."""

    path: Path
    config: dict[str, Any]
    generation: dict[str, Any]

    @property
    def architecture(self) -> str:
        names = self.config.get("architectures") or []
        return str(names[0]) if names else ""

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", ""))

    def eos_ids(self) -> tuple[int, ...]:
        """End tokens: generation_config.json's if it names any, else config.json's."""
        value = self.generation.get("eos_token_id")
        if value is None:
            value = self.config.get("eos_token_id")
        if value is None:
            return ()
        return tuple(value) if isinstance(value, list) else (int(value),)

    def declared_dtype(self) -> torch.dtype | None:
        """The dtype the folder was saved in, if it says so. Raises ModelError for one we cannot run."""
        name = self.config.get("dtype") or self.config.get("torch_dtype")
        if name is None:
            return None
        if name not in DTYPES:
            raise ModelError(f"{self.path}: dtype {name!r} is not one of {', '.join(DTYPES)}")
        return DTYPES[name]


def read_folder(model_path: str) -> ModelFolder:
    """Raises ModelError when the folder or its config.json is missing or unusable."""
    path = Path(model_path)
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} is not a model folder: it has no config.json")
    config = _read_json(path / "config.json")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ModelError(f"{path}: weights quantised with {method!r} are not supported")
    generation_path = path / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.is_file() else {}
    return ModelFolder(path, config, generation)


def required(config: dict[str, Any], key: str) -> Any:
    """The value of a key an architecture cannot do without. Raises ModelError naming it."""
    value = config.get(key)
    if value is None:
        raise ModelError(f"config.json lacks {key!r}")
    return value


def limit_context(native: int, requested: int, *, extendable: bool = False) -> int:
    """The context to serve: the model's own unless fewer tokens are asked for; more only where rope stretches."""
    if requested <= 0:
        return native
    if requested > native and not extendable:
        raise ModelError(f"context_length {requested} exceeds the model's {native} tokens")
    return requested


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value
