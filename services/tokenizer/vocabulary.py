"""Which bytes a token id stands for: logprobs show tokens byte by byte.

Leaves decoding of running text to the detokenizer. Three kinds of vocabularies are known: byte-level
(each character of a token is one byte), byte-fallback (`<0xE4>` is a byte, a low line is a blank) and others,
whose tokens are taken as text. The byte-level table is the one published with GPT-2.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_META_SPACE = "\u2581"


def _byte_level_table() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


class Vocabulary:
    """Bytes of ids. Unknown ids stand for nothing."""

    def __init__(self, tokenizer: Tokenizer, decoder: dict[str, Any] | None) -> None:
        """`decoder` is that part of tokenizer.json."""
        self._tokenizer = tokenizer
        self._added = {i: t.content for i, t in tokenizer.get_added_tokens_decoder().items()}
        self._kind = _kind(decoder)
        self._table = _byte_level_table()
        self.token_bytes = lru_cache(maxsize=1 << 16)(self._token_bytes)

    def text(self, token_id: int) -> str:
        """The token as text; bytes that are no whole character show as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def label(self, token_id: int) -> str:
        """The token as text, or `bytes:\\xe4\\xbd` where it is no whole text: distinct for distinct bytes."""
        data = self.token_bytes(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _token_bytes(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return added.encode()
        token = self._tokenizer.id_to_token(token_id) or ""
        if self._kind == "byte_level":
            table = self._table
            if all(character in table for character in token):
                return bytes(table[character] for character in token)
        elif self._kind == "byte_fallback":
            match = _BYTE_TOKEN.fullmatch(token)
            return bytes([int(match[1], 16)]) if match else token.replace(_META_SPACE, " ").encode()
        return token.encode()


def _kind(decoder: dict[str, Any] | None) -> str:
    if decoder is None:
        return "text"
    kinds = {decoder.get("type")} | {part.get("type") for part in decoder.get("decoders", ())}
    if "ByteLevel" in kinds:
        return "byte_level"
    return "byte_fallback" if kinds & {"ByteFallback", "Metaspace"} else "text"
