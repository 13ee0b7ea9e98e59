"""Encodes a prompt from pieces whose ids are already known, so that a resent history costs nothing again.

    <|im_start|>user\\nA long ... ques|tion that goes on<|im_end|>\\n|<|im_start|>assistant\\n
                                    ^ after 512 letters, between two words       ^ before a special token

A text is cut only where the tokenizer itself cannot look across: before special tokens, which are taken out of a text
before anything else happens to it, and, for pre-tokenizers known by their definition, between a letter and a space
before another letter. Leaves when to use it, and the literal reading of special texts, to text.
"""

from __future__ import annotations

import json
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer

CACHE_BYTES = 64 << 20
ENTRY_BYTES = 250  # of one entry's objects, beside its text and ids
PIECE_CHARS = 512  # a piece between two special tokens is cut at the first good place after so many

_BETWEEN_WORDS = re.compile(r"[a-z](?= [A-Za-z])")
# Patterns of Split pre-tokenizers that end a token between a letter and a space (Llama 3's and Qwen 2's).
_WORD_PATTERNS = frozenset(
    rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{number}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    for number in (r"\p{N}{1,3}", r"\p{N}")
)
_Key = tuple[str, str]


class PromptCache:
    """Thread-safe. Entries are kept apart by `isolation`, since the time of an answer could tell what others sent."""

    def __init__(self, tokenizer: Tokenizer, source: str, max_bytes: int = CACHE_BYTES) -> None:
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        definition = json.loads(source)
        self._specials = _special_pattern(definition)
        self._words = _BETWEEN_WORDS if self._specials is not None and _cuts_words(definition) else None
        self._around = _added_around(tokenizer)
        self._lock = threading.Lock()
        self._known: OrderedDict[_Key, array[int]] = OrderedDict()
        self.bytes = 0

    def encode(self, text: str, add_special_tokens: bool, isolation: str = "") -> array[int]:
        """The tokenizer's ids of the whole text."""
        if self._specials is None or (add_special_tokens and self._around is None):
            return _encode(self._tokenizer, [text], add_special_tokens)[0]
        keys = [(isolation, piece) for piece in self._pieces(text)]
        found = self._look_up(keys)
        missing = [key for key in dict.fromkeys(keys) if key not in found]
        for key, ids in zip(missing, _encode(self._tokenizer, [piece for _, piece in missing], False), strict=True):
            found[key] = ids
        self._remember(missing, found)
        before, after = self._around if add_special_tokens and self._around else ((), ())
        whole = array("i", before)
        for key in keys:
            whole += found[key]
        whole.extend(after)
        return whole

    def _pieces(self, text: str) -> Iterator[str]:
        assert self._specials is not None
        start = 0
        for match in self._specials.finditer(text):
            yield from self._between(text, start, match.start())
            start = match.start()
        yield from self._between(text, start, len(text))

    def _between(self, text: str, start: int, end: int) -> Iterator[str]:
        """Cuts hang on what stands before them alone, so that a text that goes on keeps its pieces."""
        while self._words is not None and end - start > PIECE_CHARS:
            match = self._words.search(text, start + PIECE_CHARS, end)
            if match is None:
                break
            yield text[start : match.end()]
            start = match.end()
        if start < end:
            yield text[start:end]

    def _look_up(self, keys: list[_Key]) -> dict[_Key, array[int]]:
        found: dict[_Key, array[int]] = {}
        with self._lock:
            for key in keys:
                ids = self._known.get(key)
                if ids is not None:
                    self._known.move_to_end(key)
                    found[key] = ids
        return found

    def _remember(self, keys: list[_Key], found: dict[_Key, array[int]]) -> None:
        with self._lock:
            for key in keys:
                if key not in self._known:
                    self._known[key] = found[key]
                    self.bytes += _size(key, found[key])
            while self.bytes > self._max_bytes:
                self.bytes -= _size(*self._known.popitem(last=False))


def _size(key: _Key, ids: array[int]) -> int:
    return ENTRY_BYTES + key[1].__sizeof__() + len(ids) * ids.itemsize


def _encode(tokenizer: Tokenizer, texts: list[str], add_special_tokens: bool) -> list[array[int]]:
    if not texts:
        return []
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
    return [array("i", encoding.ids) for encoding in encodings]


def _special_pattern(definition: dict[str, Any]) -> re.Pattern[str] | None:
    """Finds the tokens that are taken out of the raw text, as the tokenizer does: leftmost, then longest.

    None where cutting before them is not certain to change nothing.
    """
    tokens = [token for token in definition.get("added_tokens") or [] if not token["normalized"] and token["content"]]
    if any(token["single_word"] or token["lstrip"] for token in definition.get("added_tokens") or []):
        return None
    if (definition.get("model") or {}).get("dropout"):
        return None
    longest_first = sorted((token["content"] for token in tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _cuts_words(definition: dict[str, Any]) -> bool:
    """Whether no token of this tokenizer spans a letter and the space before another letter."""
    if (definition.get("normalizer") or {"type": "NFC"})["type"] != "NFC":
        return False
    if any(_BETWEEN_WORDS.search(token["content"]) for token in definition.get("added_tokens") or []):
        return False
    whole = definition.get("pre_tokenizer") or {"type": ""}
    parts = whole["pretokenizers"] if whole["type"] == "Sequence" else [whole]
    return all(map(_keeps_places, parts)) and any(map(_ends_words, parts))


def _keeps_places(part: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer does the same to a text wherever it stands, and only cuts or renames."""
    if part["type"] == "ByteLevel":
        return not part["add_prefix_space"]
    return part["type"] == "Digits" or (part["type"] == "Split" and _ends_words(part))


def _ends_words(part: dict[str, Any]) -> bool:
    if part["type"] == "ByteLevel":
        return bool(part.get("use_regex", True))
    pattern = part.get("pattern") or {}
    return part.get("behavior") == "Isolated" and not part.get("invert") and pattern.get("Regex") in _WORD_PATTERNS


def _added_around(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The ids that the post-processor sets before and after any text; None where it does anything else."""
    plain, full = (_encode(tokenizer, ["a"], special)[0] for special in (False, True))
    for first in range(len(full) - len(plain) + 1):
        if full[first : first + len(plain)] == plain:
            return tuple(full[:first]), tuple(full[first + len(plain) :])
    return None
