"""Ids become text as they come: whole characters only, never a replacement character for half a one.

Bytes that are no UTF-8 are dropped, and so is a character that is incomplete at the end; everything else is
exact, so the deltas joined are the decoded whole. `spaces_between_special_tokens` changes nothing, as with every
fast tokenizer. Leaves stop strings to `stops`.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol

from services.detokenizer.vocabulary import Vocabulary

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 6
STALL_TOKENS = 12  # longer than any character, so what is still unreadable then never becomes readable

_utf8 = codecs.getincrementaldecoder("utf-8")


class IncrementalDecoder(Protocol):
    def push(self, ids: Iterable[int]) -> str:
        """The text that became certain with these ids."""
        ...


def make_decoder(vocabulary: Vocabulary, prompt_tail: Sequence[int], skip_special: bool) -> IncrementalDecoder:
    """`prompt_tail`: the last ids before the first one pushed; they are context and give no text."""
    if vocabulary.pieces:
        return ByteDecoder(vocabulary, prompt_tail, skip_special)
    return WindowDecoder(vocabulary, prompt_tail, skip_special)


class ByteDecoder:
    """Token bytes from a table, then incremental UTF-8: constant time per token, whatever the bytes."""

    __slots__ = ("_decode", "_pieces", "_strip")

    def __init__(self, vocabulary: Vocabulary, prompt_tail: Sequence[int], skip_special: bool) -> None:
        self._pieces = vocabulary.visible if skip_special else vocabulary.pieces
        self._decode = _utf8("ignore").decode
        before = self._join(prompt_tail)
        self._strip = vocabulary.strips_blank and not before
        self._decode(before)  # a character may begin in the prompt and end in the output

    def push(self, ids: Iterable[int]) -> str:
        text = self._decode(self._join(ids))
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text

    def _join(self, ids: Iterable[int]) -> bytes:
        pieces = self._pieces
        size = len(pieces)
        return b"".join([pieces[i] for i in ids if 0 <= i < size])


class WindowDecoder:
    """For decoders whose tokens depend on neighbours: decodes a short window with and without the new ids.

    The window method is the one of text-generation-inference; a cap on its length keeps hostile bytes cheap.

        window   [ context, already text | new ids ]
        delta    decode(window) minus decode(context), once it does not end inside a character
    """

    __slots__ = ("_read", "_skip", "_tokenizer", "_window")

    def __init__(self, vocabulary: Vocabulary, prompt_tail: Sequence[int], skip_special: bool) -> None:
        self._tokenizer = vocabulary.tokenizer
        self._skip = skip_special
        self._window = list(prompt_tail[-CONTEXT_TOKENS:])
        self._read = len(self._window)

    def push(self, ids: Iterable[int]) -> str:
        return "".join([self._push_one(i) for i in ids])

    def _push_one(self, token: int) -> str:
        self._window.append(token)
        text = self._text(self._window)
        unread = len(self._window) - self._read
        if text.endswith(REPLACEMENT) and unread < STALL_TOKENS:
            return ""
        delta = text[len(self._text(self._window[: self._read])) :]
        self._window = self._window[-CONTEXT_TOKENS:]
        self._read = len(self._window)
        return delta.replace(REPLACEMENT, "")

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)
