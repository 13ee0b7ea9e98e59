"""The small interface to a grammar engine: one matcher follows one output. Leaves compiling and batching to others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

MaskRow = NDArray[np.int32]
"""One row of a bitmask: bit t % 32 of word t // 32 is token t; 1 = allowed."""


class Matcher(Protocol):
    """Follows one output, token by token. It never raises for a bad grammar or token: `error` says what broke,
    and stays; a broken matcher accepts nothing."""

    @property
    def error(self) -> str:
        """Empty, or why this matcher can be used no more."""
        ...

    @property
    def is_complete(self) -> bool:
        """The output so far satisfies the grammar; it may end here."""
        ...

    @property
    def is_stopped(self) -> bool:
        """Complete, and nothing but an end-of-sequence token may follow."""
        ...

    def advance(self, ids: Sequence[int]) -> bool:
        """Take `ids`, in order. False: one of them is not allowed, and the matcher is broken."""
        ...

    def count_valid(self, ids: Sequence[int]) -> int:
        """How many of `ids`, from the first, could be taken now. Changes nothing."""
        ...

    def completes(self, ids: Sequence[int]) -> bool:
        """Would the output be complete after `ids`? Changes nothing."""
        ...

    def forced_tokens(self) -> list[int]:
        """Tokens that must follow, in the tokenizer's own spelling.

        A last token that could still merge with what comes after it is held back. Never an end token.
        """
        ...

    def fill_mask(self, row: MaskRow) -> bool:
        """Overwrite `row` with the tokens allowed now; words beyond the vocabulary become 0. False: broken."""
        ...

    def fork(self) -> Matcher:
        """An independent copy, a few microseconds and about 20 KB."""
        ...
