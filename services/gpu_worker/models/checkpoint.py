"""Safetensors files of one model folder, memory-mapped: names, tensors and a digest. Never unpickles anything."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from services.gpu_worker.models.config import ModelError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
SAMPLE_BYTES = 64
# These say how or by what a folder was written, not what the model is.
VOLATILE_KEYS = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "auto_map"})


class Checkpoint:
    """All tensors of a folder, each mapped from its shard; nothing is read before it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._shard_of: dict[str, Any] = {}
        promised = _promised_files(folder)
        for file_name in sorted(set(promised.values())) or [_single_file(folder)]:
            shard = _open(folder / file_name)
            for name in shard.keys():  # noqa: SIM118 - the handle is no mapping
                self._shard_of[name] = shard
        lost = sorted(promised.keys() - self._shard_of.keys())
        if lost:
            raise ModelError(f"{folder}: the index promises tensors no shard holds: {_listing(lost)}")

    def names(self) -> list[str]:
        return sorted(self._shard_of)

    def tensor(self, name: str) -> torch.Tensor:
        """A view of the mapped file (CPU); copying it into place is the only copy made."""
        return self._shard_of[name].get_tensor(name)

    def floating_dtype(self) -> torch.dtype | None:
        """The dtype most floating tensors are stored in."""
        counts: dict[torch.dtype, int] = {}
        for name in self.names():
            dtype = self.tensor(name).dtype
            if dtype.is_floating_point:
                counts[dtype] = counts.get(dtype, 0) + 1
        return max(counts, key=lambda dtype: counts[dtype], default=None)

    def samples(self) -> Iterator[bytes]:
        """Per tensor: name, dtype, shape and a few bytes from its start, middle and end, whatever the sharding."""
        for name in self.names():
            tensor = self.tensor(name)
            yield f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode()
            flat = tensor.reshape(-1).view(torch.uint8)
            middle = flat.numel() // 2
            for start in (0, middle, max(flat.numel() - SAMPLE_BYTES, 0)):
                yield flat[start : start + SAMPLE_BYTES].numpy().tobytes()


def digest(config: Mapping[str, Any], checkpoint: Checkpoint | None) -> str:
    """Hex digest over configuration and sampled weights; None stands for seeded random weights."""
    kept = {key: value for key, value in config.items() if key not in VOLATILE_KEYS}
    state = hashlib.sha256(json.dumps(kept, sort_keys=True).encode())
    for sample in [b"dummy"] if checkpoint is None else checkpoint.samples():
        state.update(sample)
    return state.hexdigest()[:32]


def check_names(
    checkpoint: Checkpoint, wanted: Collection[str], ignorable: Callable[[str], bool] = lambda _: False
) -> None:
    """Raises ModelError that names missing or unexpected tensors."""
    available, targets = set(checkpoint.names()), set(wanted)
    missing = sorted(targets - available)
    if missing:
        raise ModelError(f"{checkpoint.folder}: missing tensors: {_listing(missing)}")
    unexpected = sorted(name for name in available - targets if not ignorable(name))
    if unexpected:
        raise ModelError(f"{checkpoint.folder}: unexpected tensors: {_listing(unexpected)}")


def copy_weights(
    checkpoint: Checkpoint,
    targets: Mapping[str, torch.Tensor],
    part: Callable[[str, torch.Tensor], torch.Tensor] = lambda _, tensor: tensor,
) -> None:
    """Fill every target (often a slice of a fused tensor) from the tensor of its name, or from `part` of it.

    Raises ModelError that names a misshapen tensor.
    """
    for name, target in targets.items():
        source = part(name, checkpoint.tensor(name))
        if source.shape != target.shape:
            raise ModelError(
                f"{checkpoint.folder}: tensor {name} is {tuple(source.shape)}, expected {tuple(target.shape)}"
            )
        target.copy_(source)


def _promised_files(folder: Path) -> dict[str, str]:
    index = folder / INDEX_NAME
    if not index.is_file():
        return {}
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{index} cannot be read: {error!r}") from error
    for file_name in weight_map.values():
        if Path(file_name).name != file_name:
            raise ModelError(f"{index} names a file outside the folder: {file_name!r}")
    return dict(weight_map)


def _single_file(folder: Path) -> str:
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if SINGLE_NAME in found:
        return SINGLE_NAME
    if len(found) == 1:
        return found[0]
    if found:
        raise ModelError(f"{folder} has several safetensors files but no {INDEX_NAME}: {_listing(found)}")
    raise ModelError(f"{folder} has no safetensors weights (other formats are never loaded)")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be opened: {error}") from error


def _listing(names: list[str], limit: int = 8) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
