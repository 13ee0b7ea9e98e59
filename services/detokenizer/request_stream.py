"""One request's way from ids to text: decoder, stop strings, counting. Leaves sockets to `detokenizer`."""

from __future__ import annotations

from array import array

from services.detokenizer import scores
from services.detokenizer.incremental import make_decoder
from services.detokenizer.regex_stops import MixedMatcher
from services.detokenizer.stops import StopMatch, StopMatcher
from services.detokenizer.vocabulary import Vocabulary
from shared import ints
from shared.messages.stream import Finish, FinishReason, StreamOpen, TextChunk, TokenChunk

Matcher = StopMatcher | MixedMatcher


class MissingTokens(Exception):
    """A chunk starts behind what has been received."""


class RequestStream:
    """A pure function of the ids: the same ids give the same text and the same end, however they arrive."""

    __slots__ = ("_decoder", "_matcher", "_trim", "count", "frontend", "stream")

    def __init__(self, opening: StreamOpen, vocabulary: Vocabulary) -> None:
        self.frontend = opening.frontend_id.encode()
        self.stream = opening.stream
        self.count = 0  # output tokens received
        self._trim = not opening.no_stop_trim
        self._decoder = make_decoder(vocabulary, ints.unpack(opening.prompt_tail), opening.skip_special_tokens)
        self._matcher = _make_matcher(opening)

    def reopen(self, opening: StreamOpen) -> TextChunk:
        """Everything again in one chunk, for a stream whose former detokenizer was lost."""
        chunk = TokenChunk(
            opening.request_id,
            0,
            opening.output_ids,
            opening.finish,
            opening.cached_tokens,
            opening.scores,
            opening.prompt_scores,
        )
        return self._advance(chunk, ints.unpack(opening.output_ids), reopened=True)

    def feed(self, chunk: TokenChunk) -> TextChunk | None:
        """The text of a chunk; None where all of it was received before. Raises MissingTokens."""
        ids = ints.unpack(chunk.token_ids)
        known = self.count - chunk.offset
        if known == 0:
            return self._advance(chunk, ids)
        if known < 0:
            raise MissingTokens(f"expected token {self.count}, got {chunk.offset}")
        if known >= len(ids) and chunk.finish is None:
            return None
        rest = TokenChunk(
            chunk.request_id,
            self.count,
            ints.pack(ids[known:]),
            chunk.finish,
            chunk.cached_tokens,
            scores.cut(chunk.scores, known, len(ids)),
            chunk.prompt_scores,
            chunk.retractions,
        )
        return self._advance(rest, ids[known:])

    def _advance(self, chunk: TokenChunk, ids: array[int], reopened: bool = False) -> TextChunk:
        finish = chunk.finish
        spoken = ids[:-1] if self._ends_with_stop_token(finish, ids) else ids
        if self._matcher is None:
            text, used = self._decoder.push(spoken), len(ids)
        else:
            text, matched, used = self._match(self._matcher, spoken, len(ids))
            if matched is not None:
                finish = Finish(FinishReason.STOP, matched_string=matched.name)
            elif finish is not None:
                text += self._matcher.flush()
        self.count += used
        whole = used == len(ids)
        return TextChunk(
            chunk.request_id,
            chunk.offset,
            chunk.token_ids if whole else ints.pack(ids[:used]),
            text,
            finish,
            self.count,
            chunk.cached_tokens,
            chunk.scores if whole else scores.cut(chunk.scores, 0, used),
            chunk.prompt_scores,
            chunk.retractions,
            reopened,
        )

    def _match(self, matcher: Matcher, spoken: array[int], total: int) -> tuple[str, StopMatch | None, int]:
        """(text, what ended it, tokens used): token by token, to know which one completed the match."""
        shown: list[str] = []
        for position, token in enumerate(spoken):
            text, matched = matcher.push(self._decoder.push((token,)))
            shown.append(text)
            if matched is not None:
                if not self._trim:
                    shown.append(matched.text)
                return "".join(shown), matched, position + 1
        return "".join(shown), None, total

    def _ends_with_stop_token(self, finish: Finish | None, ids: array[int]) -> bool:
        if not self._trim or finish is None or finish.matched_token < 0:
            return False
        return len(ids) > 0 and ids[-1] == finish.matched_token


def _make_matcher(opening: StreamOpen) -> Matcher | None:
    if opening.stop_regex:
        return MixedMatcher(opening.stop_strings, opening.stop_regex)
    return StopMatcher(opening.stop_strings) if opening.stop_strings else None
