"""The stream edge, scheduler -> detokenizer -> tokenizer: tokens become text.

Every chunk carries the offset of its first token in the request's output, and the ids, so that a
receiver can drop what it has and prove that nothing is missing.
"""

from __future__ import annotations

import enum
from typing import Literal

from shared.messages.base import Message


class FinishReason(enum.IntEnum):
    STOP = 0  # a stop token, a stop string, or a constraint that is complete
    LENGTH = 1
    ABORT = 2
    ERROR = 3


class Finish(Message, frozen=True):
    """Why a request ended. At most one of the matched fields is set."""

    reason: FinishReason
    matched_token: int = -1
    matched_string: str = ""  # the stop string or the regex pattern
    message: str = ""  # ABORT and ERROR: for the client
    status: int = 0  # ABORT and ERROR: the HTTP status the client would get before a stream
    verdict: Literal["", "conforms", "violates", "unknown"] = ""  # of a best_effort constraint on the finished text
    violation: str = ""  # why it does not conform, or why nobody knows


class Scores(Message, frozen=True):
    """Raw log-probabilities of consecutive tokens, in columns; two blocks join by joining columns.

    `count` positions; `top_*` hold `count * k`, `wanted` holds `count * len(logprob_token_ids)`.
    A position with no score (the first prompt token) is NaN.
    """

    count: int
    logprobs: bytes = b""  # float32 [count]
    top_ids: bytes = b""  # int32 [count * k]
    top_logprobs: bytes = b""  # float32 [count * k]
    wanted: bytes = b""  # float32 [count * m]


class StreamOpen(Message, frozen=True, tag=20):
    """Start (or, after a detokenizer was lost, start again) decoding one request.

    `output_ids` are all tokens so far; when not empty the first TextChunk has offset 0 and all text so far.
    `finish` is set when the request has already ended.
    """

    request_id: str
    frontend_id: str  # routing id `id/incarnation` of the tokenizer
    prompt_tail: bytes = b""  # int32: a few last prompt tokens, context for the first decoded token
    output_ids: bytes = b""
    stop_strings: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    stream: bool = True
    epoch: int = 0
    finish: Finish | None = None
    cached_tokens: int = 0
    scores: Scores | None = None  # of output_ids
    prompt_scores: Scores | None = None


class TokenChunk(Message, frozen=True):
    """The next tokens of one request (part of TokenChunks)."""

    request_id: str
    offset: int  # index of the first token in this request's output
    token_ids: bytes
    finish: Finish | None = None
    cached_tokens: int = 0
    scores: Scores | None = None  # of token_ids
    prompt_scores: Scores | None = None  # whole; rides in the chunk after the last prefill
    retractions: int = 0  # how often it was suspended so far


class TokenChunks(Message, frozen=True, tag=21):
    chunks: tuple[TokenChunk, ...]
    epoch: int = 0


class StopMatched(Message, frozen=True, tag=22):
    """A stop string ended the request after `num_output_tokens`; the client already has its final chunk."""

    request_id: str
    num_output_tokens: int
    matched: str = ""
    epoch: int = 0


class TextChunk(Message, frozen=True):
    """Text for one client (part of TextChunks). `text` may lag behind `token_ids`: a tail that could
    still become a stop string or half a character is held back until it is settled."""

    request_id: str
    offset: int
    token_ids: bytes
    text: str = ""
    finish: Finish | None = None
    num_output_tokens: int = 0  # total so far; at the end, what counts as completion tokens
    cached_tokens: int = 0
    scores: Scores | None = None
    prompt_scores: Scores | None = None
    retractions: int = 0
    reopened: bool = False  # offset is 0 and text is all text so far: cut off what was already sent


class TextChunks(Message, frozen=True, tag=23):
    chunks: tuple[TextChunk, ...]
    epoch: int = 0
