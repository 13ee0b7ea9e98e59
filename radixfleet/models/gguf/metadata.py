"""Typed access to the key-value part of a GGUF file; leaves tensors to `tensors`."""

from __future__ import annotations

from typing import Any

from gguf import GGUFReader

from radixfleet.models.errors import ModelError


class Metadata:
    """Looks up keys; architecture keys are written without their prefix (`block_count`)."""

    def __init__(self, reader: GGUFReader) -> None:
        self._fields = reader.fields
        self.arch = self.text("general.architecture")

    def get(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelError(f"the GGUF file has no {key}")
        return value

    def text(self, key: str) -> str:
        return str(self.require(key))

    def arch_get(self, key: str, default: Any = None) -> Any:
        return self.get(f"{self.arch}.{key}", default)

    def arch_require(self, key: str) -> Any:
        return self.require(f"{self.arch}.{key}")
