"""Token ids of prompts and the text of ids, asked from the server's /tokenize and /detokenize.

Ids a model has seen or generated stand as they are; only text beside them is tokenised, each run of it as a whole,
and remembered. Leaves what is done with the ids to the endpoint.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from radixfleet.backend.base import IdsPart, Prompt, TextPart
from radixfleet.backend.http import HttpServer

Ids = tuple[int, ...]
T = TypeVar("T")
_MOST_AT_ONCE = 512  # texts or lists that one request may hold
_REMEMBERED = 4096
_LONGEST_REMEMBERED = 8192
_BROKEN = "�"  # how a tokenizer shows bytes that are no character yet


class Tokens:
    """Thread-safe. Raises BackendError where the server refuses."""

    def __init__(self, http: HttpServer) -> None:
        self._http = http
        self._memo: OrderedDict[tuple[str, bool, bool], Ids] = OrderedDict()
        self._lock = threading.Lock()

    def of_prompt(self, prompt: Prompt) -> Ids:
        return self.of_prompts([prompt])[0]

    def of_prompts(self, prompts: Sequence[Prompt]) -> list[Ids]:
        """Ids of all parts of each prompt, with few requests for all of them together.

        Only text that opens a prompt without a template gets the model's own first token.
        """
        pieces = [_pieces(prompt) for prompt in prompts]
        found = self._of_runs([piece for one in pieces for piece in one if isinstance(piece, _Run)])
        return [
            tuple(token for piece in one for token in (found[piece] if isinstance(piece, _Run) else piece.ids))
            for one in pieces
        ]

    def of_texts(self, texts: Sequence[str], *, special: bool = True, opening: bool = False) -> list[Ids]:
        """Ids of several texts, with few requests. `special`: texts of special tokens become those tokens."""
        keys = [(text, special, opening) for text in texts]
        with self._lock:
            known = {key: self._memo[key] for key in keys if key in self._memo}
        missing = [text for text in dict.fromkeys(texts) if (text, special, opening) not in known]
        if missing:
            body = {"add_special_tokens": opening, "parse_special": special}
            for some in portions(missing, _MOST_AT_ONCE):
                answer = self._http.post("/tokenize", {**body, "prompt": some})
                for text, ids in zip(some, answer["tokens"], strict=True):
                    known[text, special, opening] = tuple(ids)
            self._remember(known)
        return [known[key] for key in keys]

    def text_of(self, lists: Sequence[Sequence[int]]) -> list[str]:
        texts: list[str] = []
        for some in portions(lists, _MOST_AT_ONCE):
            answer = self._http.post("/detokenize", {"tokens": [list(ids) for ids in some]})
            texts += [str(text) for text in answer["text"]]
        return texts

    def cut(self, ids: Ids, text: str, stop: str) -> tuple[Ids, str]:
        """The most ids that hold nothing beyond `text`, which a stop string ended, and the text they lack.

        A stop string can end in the middle of a token; that token was never part of the text, so what remains of
        its letters is text again.
        """
        window = min(len(ids), len(stop.encode()) + 4)
        for first in dict.fromkeys((len(ids) - window, 0)):
            ends = range(len(ids), first - 1, -1)
            shown = dict(zip(ends, self.text_of([ids[:end] for end in ends if end]), strict=False))
            for end in ends:
                part = shown.get(end, "")
                if text.startswith(" ") and part and not part.startswith(" "):
                    part = " " + part  # decoders of some models drop the first blank
                if text.startswith(part) and not part.endswith(_BROKEN):
                    return ids[:end], text[len(part) :]
        return (), text

    def clip(self, text: str, max_tokens: int) -> str:
        """The first tokens of a text, without a character cut in two."""
        [ids] = self.of_texts([text], special=False)
        if len(ids) <= max_tokens:
            return text
        [short] = self.text_of([ids[:max_tokens]]) if max_tokens else [""]
        return short.rstrip(_BROKEN)

    def _of_runs(self, runs: Sequence[_Run]) -> dict[_Run, Ids]:
        """Each run is tokenised as a whole unless a literal part of it holds the text of a special token."""
        found: dict[_Run, Ids] = {}
        for opening in {run.opening for run in runs}:
            mine = list(dict.fromkeys(run for run in runs if run.opening is opening))
            literals = list(dict.fromkeys(text for run in mine for text in run.literals))
            ids = self.of_texts([*(run.whole for run in mine), *literals], opening=opening)
            found |= dict(zip(mine, ids, strict=False))
            plain = self.of_texts(literals, special=False, opening=opening)
            special = {text for text, a, b in zip(literals, ids[len(mine) :], plain, strict=True) if a != b}
            for run in mine:
                if not special.isdisjoint(run.literals):
                    found[run] = self._in_parts(run)
        return found

    def _in_parts(self, run: _Run) -> Ids:
        ids: list[int] = []
        for index, part in enumerate(run.parts):
            opening = run.opening and index == 0
            ids += self.of_texts([part.text], special=not part.literal, opening=opening)[0]
        return tuple(ids)

    def _remember(self, found: dict[tuple[str, bool, bool], Ids]) -> None:
        with self._lock:
            for key, ids in found.items():
                if len(key[0]) <= _LONGEST_REMEMBERED:
                    self._memo[key] = ids
                    self._memo.move_to_end(key)
            while len(self._memo) > _REMEMBERED:
                self._memo.popitem(last=False)


class ServerTokenizer:
    """The model's tokenizer, asked from the server: what ported programs call `get_tokenizer()` for."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. Raises BackendError."""
        return list(self._tokens.of_texts([text], opening=add_special_tokens)[0])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids, without special tokens. Raises BackendError."""
        return self._tokens.text_of([token_ids])[0]


@dataclass(frozen=True)
class _Run:
    """Text between ids, in parts of different kinds."""

    parts: tuple[TextPart, ...]
    opening: bool

    @property
    def whole(self) -> str:
        return "".join(part.text for part in self.parts)

    @property
    def literals(self) -> list[str]:
        return [part.text for part in self.parts if part.literal]


def portions(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """The items in order, at most `size` in each portion."""
    return [items[first : first + size] for first in range(0, len(items), size)]


def _pieces(prompt: Prompt) -> list[_Run | IdsPart]:
    pieces: list[_Run | IdsPart] = []
    for is_text, group in groupby(prompt.parts, lambda part: isinstance(part, TextPart)):
        if not is_text:
            pieces += [part for part in group if isinstance(part, IdsPart)]
        elif parts := _merged([part for part in group if isinstance(part, TextPart) and part.text]):
            pieces.append(_Run(parts, opening=not pieces and not prompt.templated))
    return pieces


def _merged(parts: Sequence[TextPart]) -> tuple[TextPart, ...]:
    """Neighbouring texts of the same kind as one."""
    return tuple(
        TextPart("".join(part.text for part in group), literal)
        for literal, group in groupby(parts, lambda part: part.literal)
    )
