"""A matcher over llguidance, which never raises for a bad grammar or token: every call here is checked."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLMatcher

from services.scheduler.constraint.limits import Limits, parser_limits
from services.scheduler.constraint.matcher import MaskRow
from services.scheduler.constraint.vocabulary import Vocabulary


class LLGuidanceMatcher:
    """See the Matcher protocol. Copies of one matcher share its lexer, so their masks warm each other up."""

    __slots__ = ("_eos", "_inner", "_words")

    def __init__(self, inner: LLMatcher, words: int, eos: int) -> None:
        self._inner = inner
        self._words = words
        self._eos = eos

    @classmethod
    def build(cls, grammar: str, vocabulary: Vocabulary, limits: Limits) -> LLGuidanceMatcher:
        """The matcher at the beginning of `grammar`; milliseconds, with the interpreter's lock released."""
        inner = LLMatcher(vocabulary.table, grammar, log_level=0, limits=parser_limits(limits))
        return cls(inner, vocabulary.words, vocabulary.eos_ids[0])

    @property
    def error(self) -> str:
        return self._inner.get_error() if self._inner.is_error() else ""

    @property
    def is_complete(self) -> bool:
        return not self._inner.is_error() and self._inner.is_accepting()

    @property
    def is_stopped(self) -> bool:
        return not self._inner.is_error() and self._inner.is_stopped()

    def advance(self, ids: Sequence[int]) -> bool:
        return self._inner.consume_tokens(list(ids)) and not self._inner.is_error()

    def count_valid(self, ids: Sequence[int]) -> int:
        return 0 if self._inner.is_error() else self._inner.validate_tokens(list(ids))

    def completes(self, ids: Sequence[int]) -> bool:
        # an end token is valid exactly where the text is complete; a tenth of the price of taking the tokens
        return self.count_valid([*ids, self._eos]) == len(ids) + 1

    def forced_tokens(self) -> list[int]:
        return [] if self._inner.is_error() else self._inner.compute_ff_tokens()

    def fill_mask(self, row: MaskRow) -> bool:
        own = row[: self._words]
        if self._inner.is_error() or own.size != self._words or not own.flags.c_contiguous:
            return False
        row[self._words :] = 0
        self._inner.unsafe_compute_mask_ptr(own.ctypes.data, own.nbytes)
        return not self._inner.is_error()

    def fork(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self._inner.deep_copy(), self._words, self._eos)
