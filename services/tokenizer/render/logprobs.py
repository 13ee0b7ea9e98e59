"""Log-probabilities in the words of each API; leaves collecting them to output."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from services.tokenizer.output import ScoreColumns
from services.tokenizer.vocabulary import Vocabulary

Row = list[Any]  # [logprob | null, id, text | null]


class NativeLogprobs:
    """The lists in /generate's meta_info."""

    def __init__(self, vocabulary: Vocabulary, with_text: bool, wanted_ids: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self._with_text = with_text
        self._wanted_ids = wanted_ids

    def lists(self, side: str, columns: ScoreColumns, ids: Sequence[int]) -> dict[str, list[Any]]:
        """`side` is input or output; `ids` are the tokens at the columns' positions."""
        count = min(len(columns), len(ids))
        lists: dict[str, list[Any]] = {
            f"{side}_token_logprobs": [self._row(columns.logprob(i), ids[i]) for i in range(count)]
        }
        if columns.k:
            lists[f"{side}_top_logprobs"] = [
                [self._row(logprob, token) for token, logprob in columns.top(i)] or None for i in range(count)
            ]
        if columns.m:
            lists[f"{side}_token_ids_logprobs"] = [
                [self._row(p, t) for p, t in zip(columns.wanted_at(i), self._wanted_ids, strict=True)]
                for i in range(count)
            ]
        return lists

    def _row(self, logprob: float | None, token: int) -> Row:
        return [logprob, token, self._vocabulary.text(token) if self._with_text else None]


def chat_content(vocabulary: Vocabulary, columns: ScoreColumns, ids: Sequence[int]) -> dict[str, Any]:
    """`choices[].logprobs` of chat completions."""
    content = []
    for i in range(min(len(columns), len(ids))):
        entry = _chat_entry(vocabulary, ids[i], columns.logprob(i))
        entry["top_logprobs"] = [_chat_entry(vocabulary, token, logprob) for token, logprob in columns.top(i)]
        content.append(entry)
    return {"content": content, "refusal": None}


def _chat_entry(vocabulary: Vocabulary, token: int, logprob: float | None) -> dict[str, Any]:
    data = vocabulary.token_bytes(token)
    return {"token": vocabulary.label(token), "bytes": list(data), "logprob": logprob}


class CompletionLogprobs:
    """`choices[].logprobs` of completions; text offsets go on from block to block."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def block(self, columns: ScoreColumns, ids: Sequence[int]) -> dict[str, Any]:
        label = self._vocabulary.label
        block: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for i in range(min(len(columns), len(ids))):
            logprob = columns.logprob(i)
            block["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(self._vocabulary.token_bytes(ids[i])))
            block["tokens"].append(label(ids[i]))
            block["token_logprobs"].append(logprob)
            top = {label(token): p for token, p in columns.top(i)}
            block["top_logprobs"].append({**top, label(ids[i]): logprob} if top or logprob is not None else None)
        return block
