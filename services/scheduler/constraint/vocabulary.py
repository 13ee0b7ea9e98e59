"""The model's tokens as the grammar library sees them: id -> bytes, special ids, end-of-sequence ids.

Built once per process from the files of a model folder, in a few hundred milliseconds: never on the loop's
thread. Leaves tokenising prompts and decoding answers to the other services.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

WORD_BITS = 32
_SHORT = 64  # characters of a text whose tokens are remembered: names and marks that a grammar writes again and again
_REMEMBERED = 4096


class VocabularyError(ValueError):
    """The folder's tokenizer cannot be used for constraints."""


class Vocabulary:
    """`size` tokens, ids 0 .. size - 1; `words` uint32 words hold one bit for each.

    `all_bytes` are the bytes of every id in text, nothing for special ones. `table` is what the engine reads.
    """

    def __init__(self, tokenizer_json: str, eos_ids: Sequence[int], size: int | None = None) -> None:
        """Raises VocabularyError where the library does not understand the tokenizer."""
        if not eos_ids:
            raise VocabularyError("the model names no end-of-sequence token; constraints could never end")
        try:
            plain = LLTokenizer(tokenizer_json, eos_token=list(eos_ids), n_vocab=size)
            self._tokenizer = Tokenizer.from_str(tokenizer_json)
        except Exception as error:  # what the tokenizers library raises has no class of its own
            raise VocabularyError(f"the tokenizer cannot be used for constraints: {error}") from None
        self.size = plain.vocab_size
        self.words = -(-self.size // WORD_BITS)
        self.eos_ids = tuple(eos_ids)
        self.all_bytes = tuple(_text_bytes(plain, token) for token in range(self.size))
        # the engine spells forced text with the tokenizer: `<|im_end|>` in a grammar must not become that token
        self._tokenizer.encode_special_tokens = True
        source = _TokenSource(self._tokenizer, self.all_bytes, self.eos_ids[0])
        self.table = LLTokenizer(TokenizerWrapper(source), eos_token=list(eos_ids), n_vocab=self.size)
        self.table.tokenize_str("warm")  # the first call of a process sets up the library's tables

    @classmethod
    def load(cls, model_path: str | Path) -> Vocabulary:
        """The vocabulary of a model folder, as wide as the model's logits."""
        folder = Path(model_path)
        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
        config = _read_json(folder / "config.json")
        declared = json.loads(text)
        size = _vocab_size(config)
        needed = _highest_id(declared) + 1
        return cls(text, eos_ids(folder, config, declared), max(size, needed) if size else None)

    def special_id(self, text: str) -> int | None:
        """The id of the special token that `text` is, if it is one."""
        token = self._tokenizer.token_to_id(text)
        return token if token is not None and token < self.size and not self.all_bytes[token] else None

    def encode(self, text: str | bytes) -> list[int]:
        """The tokenizer's own ids of `text`; special tokens are never produced. Incomplete UTF-8 is allowed."""
        return self.table.tokenize_bytes(text.encode() if isinstance(text, str) else text)

    def decode(self, ids: Sequence[int]) -> bytes:
        """The bytes of `ids`, special tokens left out."""
        return b"".join(self.all_bytes[token] for token in ids)


class _TokenSource:
    """What the engine's own wrapper asks of a tokenizer; special tokens begin with a byte that is in no text."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, all_bytes: Sequence[bytes], eos_id: int) -> None:
        self.eos_token_id = eos_id
        self.special_token_ids = [token for token, text in enumerate(all_bytes) if not text]
        self.tokens = [
            text or b"\xff" + (tokenizer.id_to_token(token) or f"<unused {token}>").encode()
            for token, text in enumerate(all_bytes)
        ]
        self._tokenizer = tokenizer
        self._encode_often = lru_cache(_REMEMBERED)(self._encode)

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return list(self._encode(text) if len(text) > _SHORT else self._encode_often(text))

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _text_bytes(table: LLTokenizer, token: int) -> bytes:
    return b"" if table.is_special_token(token) else table.decode_bytes([token])


def eos_ids(folder: Path, config: dict[str, Any], tokenizer: dict[str, Any]) -> tuple[int, ...]:
    """Every id that ends a sequence, as the generation settings, the model and its tokenizer name them."""
    found: list[int] = []
    for source in (_read_json(folder / "generation_config.json"), config, config.get("text_config", {})):
        value = source.get("eos_token_id")
        found += value if isinstance(value, list) else [value] if isinstance(value, int) else []
    name = _read_json(folder / "tokenizer_config.json").get("eos_token")
    content = name.get("content") if isinstance(name, dict) else name
    found += [token["id"] for token in tokenizer.get("added_tokens", ()) if token["content"] == content]
    return tuple(dict.fromkeys(found))


def _vocab_size(config: dict[str, Any]) -> int:
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or 0
    return int(size)


def _highest_id(tokenizer: dict[str, Any]) -> int:
    vocab = tokenizer.get("model", {}).get("vocab", ())
    inner = max(vocab.values(), default=-1) if isinstance(vocab, dict) else len(vocab) - 1
    return int(max([inner, *(token["id"] for token in tokenizer.get("added_tokens", ()))]))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    return value if isinstance(value, dict) else {}
