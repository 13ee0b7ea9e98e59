"""The bytes behind each token id, read off a tokenizer's decoder; leaves time and streams to `incremental`.

Most tokenizers decode a token alone into the same bytes as in company (byte-level BPE, SentencePiece with byte
fallback, Metaspace). For those a table is exact and fast; for others there is no table and `load` says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_TOKENWISE = frozenset({"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"})


@dataclass(frozen=True)
class Vocabulary:
    """`pieces[i]` are the bytes of token i; empty `pieces`: this tokenizer's tokens depend on their neighbours.

    `strips_blank`: the very first blank of a text is not part of it.
    """

    tokenizer: Tokenizer
    pieces: tuple[bytes, ...]
    visible: tuple[bytes, ...]  # the same with special tokens blanked out
    special: frozenset[int]
    strips_blank: bool = False


def load(path: str) -> Vocabulary:
    """From a folder with tokenizer.json, or that file. Raises FileNotFoundError with the path it looked for."""
    file = Path(path)
    if file.is_dir():
        file = file / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"no tokenizer at {file}")
    return from_tokenizer(Tokenizer.from_file(str(file)))


def from_tokenizer(tokenizer: Tokenizer) -> Vocabulary:
    """Builds the table where the tokenizer's decoder allows it."""
    added = tokenizer.get_added_tokens_decoder()
    special = frozenset(i for i, token in added.items() if token.special)
    steps = _decoder_steps(tokenizer)
    to_bytes = _piece_rule(steps)
    if to_bytes is None:
        return Vocabulary(tokenizer, (), (), special)
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, i in vocab.items():
        pieces[i] = to_bytes(token)
    visible = tuple(b"" if i in special else piece for i, piece in enumerate(pieces))
    return Vocabulary(tokenizer, tuple(pieces), visible, special, _strips_blank(steps))


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    decoder = tokenizer.decoder
    if decoder is None:
        return []
    document = json.loads(decoder.__getstate__())
    return list(document["decoders"]) if document["type"] == "Sequence" else [document]


def _piece_rule(steps: list[dict[str, Any]]) -> Callable[[str], bytes] | None:
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}:
        return _byte_level
    if kinds and kinds <= _TOKENWISE and all(_is_plain(step) for step in steps):
        blank = next((step["replacement"] for step in steps if step["type"] == "Metaspace"), "\u2581")
        fallback = "ByteFallback" in kinds
        return lambda token: _sentence_piece(token, blank, fallback)
    return None


def _is_plain(step: dict[str, Any]) -> bool:
    """Whether a step does to a token alone what it does to a text, but for the first blank."""
    if step["type"] == "Replace":
        return bool(step["pattern"] == {"String": "\u2581"} and step["content"] == " ")
    if step["type"] == "Strip":
        return bool(step["content"] == " " and step["start"] <= 1 and step["stop"] == 0)
    return True


def _strips_blank(steps: list[dict[str, Any]]) -> bool:
    for step in steps:
        if step["type"] == "Strip" and step["start"] == 1:
            return True
        if step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never":
            return True
    return False


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: printable Latin-1 stands for itself, the rest follows U+0100."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


_ALPHABET = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:  # an added token in plain text
        return token.encode()


def _sentence_piece(token: str, blank: str, fallback: bool) -> bytes:
    if fallback:
        match = _BYTE_TOKEN.fullmatch(token)
        if match is not None:
            return bytes([int(match[1], 16)])
    return token.replace(blank, " ").encode()
