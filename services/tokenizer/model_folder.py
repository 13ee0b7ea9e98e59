"""Reads what the door must know from a model folder: limits, ids, defaults, chat template.

Leaves weights to the workers and the meaning of the template to chat_template.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

DEFAULT_CONTEXT = 2048
SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_UNLIMITED = 1 << 30  # some folders say "no limit" with a number like 10**30


class ModelFolder(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of one model. `chat_template` is jinja source or empty; `sampling_defaults` holds only what is set."""

    path: str
    tokenizer_path: str
    name: str  # as the user gave it
    served_name: str
    vocab_size: int
    context_length: int
    eos_ids: tuple[int, ...]
    bos_token: str = ""
    eos_token: str = ""
    special_texts: dict[str, str] = {}  # further named tokens that templates may use: pad_token, unk_token, ...
    chat_template: str = ""
    sampling_defaults: dict[str, float] = {}


def load(
    path: str,
    *,
    tokenizer_path: str = "",
    name: str = "",
    served_name: str = "",
    chat_template: str = "",
    context_length: int = 0,
) -> ModelFolder:
    """Read the folder. Raises FileNotFoundError or ValueError with a message for the operator."""
    folder, words = Path(path), Path(tokenizer_path or path)
    if not (words / "tokenizer.json").is_file():
        raise FileNotFoundError(f"no tokenizer.json in {words}")
    config = _read(folder / "config.json")
    config = {**config, **config.get("text_config", {})}
    generation = _read(folder / "generation_config.json")
    special = _read(words / "tokenizer_config.json")
    tokenizer = _read(words / "tokenizer.json")
    added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}
    texts = _special_texts(special)
    eos_ids = _ids(generation.get("eos_token_id")) | _ids(config.get("eos_token_id"))
    eos_ids |= _ids(added.get(texts.get("eos_token", "")))
    vocab_size = int(config.get("vocab_size") or _vocab_size(tokenizer, added))
    name = name or path
    return ModelFolder(
        path=path,
        tokenizer_path=str(words),
        name=name,
        served_name=served_name or name,
        vocab_size=vocab_size,
        context_length=context_length or _context(config, special),
        eos_ids=tuple(sorted(i for i in eos_ids if 0 <= i < vocab_size)),
        bos_token=texts.pop("bos_token", ""),
        eos_token=texts.pop("eos_token", ""),
        special_texts=texts,
        chat_template=_template(words, special, chat_template),
        sampling_defaults={k: generation[k] for k in SAMPLING_KEYS if isinstance(generation.get(k), int | float)},
    )


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return value


def _vocab_size(tokenizer: dict[str, Any], added: dict[str, int]) -> int:
    """One more than the largest id, where the folder does not say how wide the logits are."""
    vocab = tokenizer.get("model", {}).get("vocab", {})
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    return max([*ids, *added.values()], default=-1) + 1


def _ids(value: object) -> set[int]:
    if isinstance(value, int):
        return {value}
    return {v for v in value if isinstance(v, int)} if isinstance(value, list) else set()


def _special_texts(special: dict[str, Any]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for key, value in special.items():
        if key.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                texts[key] = text
    return texts


def _context(config: dict[str, Any], special: dict[str, Any]) -> int:
    for value in (config.get("max_position_embeddings"), special.get("model_max_length")):
        if isinstance(value, int | float) and 0 < value < _UNLIMITED:
            return int(value)
    return DEFAULT_CONTEXT


def _template(folder: Path, special: dict[str, Any], override: str) -> str:
    """The operator's file, else chat_template.jinja, else what tokenizer_config.json holds."""
    if override:
        return Path(override).read_text(encoding="utf-8")
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    value = special.get("chat_template") or _read(folder / "chat_template.json").get("chat_template")
    if isinstance(value, list):
        named = {entry["name"]: entry["template"] for entry in value}
        value = named.get("default", "")
    return value if isinstance(value, str) else ""
