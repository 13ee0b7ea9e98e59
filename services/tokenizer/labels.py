"""Labels that callers put on their requests, as metrics: only names the operator allows, bounded in number.

They come in the header `x-custom-labels` (a JSON object of texts) or in the field `custom_labels`, which wins.
Leaves all other metrics to exposition; the counts are those of this process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import msgspec
from prometheus_client.core import CounterMetricFamily, Metric

from services.tokenizer.errors import invalid

HEADER = "x-custom-labels"
FIELD = "custom_labels"
MAX_VALUE_CHARS = 128
MAX_SETS = 256  # of values; further ones are counted as OTHERS
OTHERS = "other"
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_TAKEN = frozenset(("model_name", "service_id", "status"))

Values = tuple[str, ...]


class CustomLabels:
    """`names` as the operator gives them, separated by commas. Raises ValueError for what is no label name."""

    def __init__(self, names: str = "") -> None:
        self._names = tuple(name.strip() for name in names.split(",") if name.strip())
        for name in self._names:
            if not _NAME.fullmatch(name) or name in _TAKEN or self._names.count(name) > 1:
                raise ValueError(f"{name!r} cannot be the name of a label")
        self._counts: dict[tuple[Values, str], list[int]] = {}
        self._sets: set[Values] = set()

    def read(self, header: str | None, field: Mapping[str, str] | None) -> Values:
        """The values of one request, empty where it has none. Raises ApiError."""
        given = {**_parse(header), **(field or {})}
        for name in field or ():
            if name not in self._names:
                allowed = ", ".join(self._names) or "none: start with --metrics-custom-labels"
                raise invalid(f"{FIELD}.{name[:64]} is no label here; allowed are {allowed}.", FIELD, "invalid_value")
        values = tuple(given.get(name, "")[:MAX_VALUE_CHARS] for name in self._names)
        if not any(values):
            return ()
        if len(self._sets) >= MAX_SETS and values not in self._sets:
            return tuple(OTHERS for _ in values)
        self._sets.add(values)
        return values

    def count(self, values: Values, *, finished: bool, prompt_tokens: int, output_tokens: int) -> None:
        """One request with these labels has ended."""
        counts = self._counts.setdefault((values, "finished" if finished else "aborted"), [0, 0, 0])
        for index, amount in enumerate((1, prompt_tokens, output_tokens)):
            counts[index] += amount

    def collect(self, labels: Mapping[str, str]) -> Iterator[Metric]:
        """Counters with `labels` and the callers'."""
        names = [*labels, *self._names, "status"]
        for index, what in enumerate(("requests", "prompt_tokens", "generation_tokens")):
            family = CounterMetricFamily(f"radixfleet_labelled_{what}", f"By custom labels: {what}", labels=names)
            for (values, status), counts in self._counts.items():
                family.add_metric([*labels.values(), *values, status], counts[index])
            if self._counts:
                yield family


def _parse(header: str | None) -> dict[str, str]:
    if not header:
        return {}
    try:
        return msgspec.json.decode(header.encode("latin-1"), type=dict[str, str])
    except (ValueError, RecursionError):
        raise invalid(f"The header {HEADER} is a JSON object of texts.", HEADER, "invalid_value") from None
