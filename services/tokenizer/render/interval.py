"""`stream_interval`: fewer and larger events; leaves their words to another answerer."""

from __future__ import annotations

from collections.abc import Sequence

from services.tokenizer.exchange import Answerer
from services.tokenizer.output import Output


class IntervalAnswerer:
    """The first tokens and the end go out at once, others when `intervals[index]` of them have gathered."""

    def __init__(self, inner: Answerer, intervals: Sequence[int]) -> None:
        self._inner = inner
        self._intervals = intervals
        self._begun: set[int] = set()
        self._held: dict[int, Output] = {}

    def event(self, index: int, news: Output) -> bytes:
        held = self._held.pop(index, None)
        if held is not None:
            held.join(news)
            news = held
        is_due = index not in self._begun or len(news.token_ids) >= self._intervals[index]
        if is_due or news.finish is not None:
            self._begun.add(index)
            return self._inner.event(index, news)
        self._held[index] = news
        return b""

    def end(self) -> bytes:
        return self._inner.end()

    def whole(self, outputs: list[Output]) -> bytes:
        return self._inner.whole(outputs)
