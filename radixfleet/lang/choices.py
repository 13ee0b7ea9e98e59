"""Which option of a select wins, from the log-probabilities of the options' tokens.

A method is any callable with the keywords of `ChoicesMethod.__call__`. Leaves scoring to the backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Row = tuple[float | None, int, str | None]


@dataclass(frozen=True)
class ChoicesDecision:
    """The winning option, and numbers for `get_meta_info`."""

    decision: str
    meta_info: dict[str, Any] = field(default_factory=dict)


class ChoicesMethod(Protocol):
    """`requires_unconditional_logprobs`: the options' tokens are also scored with nothing before them."""

    @property
    def requires_unconditional_logprobs(self) -> bool: ...

    def __call__(
        self,
        *,
        choices: Sequence[str],
        normalized_prompt_logprobs: Sequence[float],
        input_token_logprobs: Sequence[Sequence[Row]],
        output_token_logprobs: Sequence[Sequence[Row]],
        unconditional_token_logprobs: Sequence[Sequence[float | None]] | None = None,
    ) -> ChoicesDecision: ...


class _TokenLengthNormalized:
    """The highest mean log-probability per token, so that long options lose nothing by their length."""

    requires_unconditional_logprobs = False

    def __call__(
        self, *, choices: Sequence[str], normalized_prompt_logprobs: Sequence[float], **_: Any
    ) -> ChoicesDecision:
        return ChoicesDecision(choices[_best(normalized_prompt_logprobs)])


class _GreedyTokenSelection:
    """Follows greedy decoding: at each token the options with the likeliest next one stay in.

    An option that has ended goes on with its mean, so an option and a longer one starting with it compare fairly.
    """

    requires_unconditional_logprobs = False

    def __call__(
        self, *, choices: Sequence[str], input_token_logprobs: Sequence[Sequence[Row]], **_: Any
    ) -> ChoicesDecision:
        lists = [values(rows) for rows in input_token_logprobs]
        length = max(map(len, lists))
        padded = [numbers + [mean(numbers)] * (length - len(numbers)) for numbers in lists]
        left = list(range(len(choices)))
        for position in range(length):
            best = max(padded[index][position] for index in left)
            left = [index for index in left if padded[index][position] == best]
            if len(left) == 1:
                break
        return ChoicesDecision(choices[left[0]], {"greedy_logprob_matrix": padded})


class _UnconditionalLikelihoodNormalized:
    """The largest gain of the prompt: mean log-probability after it minus that without it."""

    requires_unconditional_logprobs = True

    def __call__(
        self,
        *,
        choices: Sequence[str],
        input_token_logprobs: Sequence[Sequence[Row]],
        unconditional_token_logprobs: Sequence[Sequence[float | None]] | None = None,
        **_: Any,
    ) -> ChoicesDecision:
        assert unconditional_token_logprobs is not None
        gains = []
        for rows, alone in zip(input_token_logprobs, unconditional_token_logprobs, strict=True):
            pairs = zip((row[0] for row in rows), alone, strict=True)  # a first token alone has no log-probability
            gains.append(mean([after - (before or 0.0) for after, before in pairs if after is not None]))
        meta = {"normalized_unconditional_prompt_logprobs": gains}
        return ChoicesDecision(choices[_best(gains)], meta)


token_length_normalized = _TokenLengthNormalized()
greedy_token_selection = _GreedyTokenSelection()
unconditional_likelihood_normalized = _UnconditionalLikelihoodNormalized()

_SERVER_METHODS: tuple[tuple[ChoicesMethod, str], ...] = (
    (token_length_normalized, "token_length_normalized"),
    (greedy_token_selection, "greedy_token_selection"),
)


def server_name(method: ChoicesMethod) -> str | None:
    """What servers call a method that they can apply themselves."""
    return next((name for known, name in _SERVER_METHODS if known is method), None)


def values(rows: Sequence[Row]) -> list[float]:
    """Log-probabilities of the rows that have one."""
    return [row[0] for row in rows if row[0] is not None]


def mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else 0.0


def _best(numbers: Sequence[float]) -> int:
    return max(range(len(numbers)), key=numbers.__getitem__)
