"""A compiled grammar and the cache of them. Leaves compiling to the compiler and following outputs to the states."""

from __future__ import annotations

from collections import OrderedDict

from services.scheduler.constraint.budget import BudgetGuard, Ending
from services.scheduler.constraint.canonical import Kind
from services.scheduler.constraint.completion import TokenOrder
from services.scheduler.constraint.errors import ConstraintError
from services.scheduler.constraint.matcher import Matcher
from services.scheduler.constraint.state import ConstraintState

_LEAST_BYTES = 1 << 20
_GROWTH = 2
"""A grammar's lexer grows while masks are filled: what the masks of the search took is a sample of it."""


class CompiledGrammar:
    """A matcher at the beginning of a grammar; every request follows a copy of it.

    `opening` are the tokens that every text begins with.
    """

    __slots__ = ("_base", "_order", "ending", "kind", "opening", "size")

    def __init__(
        self, kind: Kind, base: Matcher, ending: Ending, order: TokenOrder, size: int, opening: tuple[int, ...] = ()
    ) -> None:
        self.kind = kind
        self.ending = ending
        self.opening = opening
        self.size = max(_GROWTH * size, _LEAST_BYTES)
        self._base = base
        self._order = order

    @property
    def minimum(self) -> int | None:
        """Tokens of the shortest text that was found; None where none was."""
        return None if self.ending.shortest is None else len(self.ending.shortest)

    def state(
        self,
        max_tokens: int,
        *,
        complete_within_budget: bool = False,
        jump_forward: bool = True,
        thinking_end: int = -1,
        refuse_small_budget: bool = True,
    ) -> ConstraintState:
        """A new output's state, in microseconds.

        Raises ConstraintError where no text can fit into `max_tokens`, unless that is not to be refused.
        """
        guard = None
        if complete_within_budget and self.ending.shortest is not None:
            needed = len(self.ending.shortest) + (thinking_end >= 0)
            if max_tokens >= needed:
                guard = BudgetGuard(self.ending, self._order)
            elif refuse_small_budget:
                raise ConstraintError(
                    self.kind, f"a complete text takes at least {needed} tokens, but max_new_tokens is {max_tokens}"
                )
        return ConstraintState(
            self._base.fork(),
            guard,
            jump_forward=jump_forward,
            thinking_end=thinking_end,
            ends=self._order.vocabulary.eos_ids,
        )


class GrammarCache:
    """Least recently used grammars go first. Requests that follow a grammar keep it; the cache does not count them."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._held: OrderedDict[bytes, CompiledGrammar] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: bytes) -> CompiledGrammar | None:
        grammar = self._held.get(key)
        if grammar is not None:
            self._held.move_to_end(key)
        return grammar

    def put(self, key: bytes, grammar: CompiledGrammar) -> None:
        """Keep it, unless it alone is larger than the cache."""
        self.drop(key)
        if grammar.size > self._most:
            return
        self._held[key] = grammar
        self.bytes += grammar.size
        while self.bytes > self._most:
            _, oldest = self._held.popitem(last=False)
            self.bytes -= oldest.size

    def drop(self, key: bytes) -> None:
        old = self._held.pop(key, None)
        if old is not None:
            self.bytes -= old.size

    def clear(self) -> None:
        self._held.clear()
        self.bytes = 0
