"""Which option of a select wins, from the log-probabilities of the options' tokens. Leaves scoring to chain."""

from __future__ import annotations

from collections.abc import Sequence

from services.tokenizer.scripts.body import Method

Scores = Sequence[Sequence[float]]


def mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else 0.0


def choose(method: Method, scores: Scores) -> tuple[int, list[list[float]] | None]:
    """The winner's place, and the matrix that greedy selection compared. `scores`: one list for each option.

    `token_length_normalized`: the highest mean. `greedy_token_selection`: token by token the options with the best
    one stay in; an option that has ended goes on with its mean.
    """
    means = [mean(numbers) for numbers in scores]
    if method == "token_length_normalized":
        return max(range(len(means)), key=means.__getitem__), None
    length = max(map(len, scores))
    padded = [[*numbers, *[average] * (length - len(numbers))] for numbers, average in zip(scores, means, strict=True)]
    left = list(range(len(padded)))
    for position in range(length):
        best = max(padded[index][position] for index in left)
        left = [index for index in left if padded[index][position] == best]
        if len(left) == 1:
            break
    return left[0], padded


def shared_length(lists: Sequence[Sequence[int]]) -> int:
    """How many tokens all lists begin with."""
    shared = 0
    for column in zip(*lists, strict=False):
        if len(set(column)) > 1:
            break
        shared += 1
    return shared
