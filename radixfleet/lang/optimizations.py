"""The switches of the compiler: what is done to make programs cheap. Results never change by them."""

from __future__ import annotations

from dataclasses import dataclass, fields

WORTH_A_REQUEST = 256  # characters of text whose computation ahead is worth a request of its own


@dataclass(frozen=True)
class Optimizations:
    """Everything is on by default; `Optimizations.none()` runs programs word by word."""

    prefix: bool = True  # compute the constant prefix of a batch once, before it starts
    share: bool = True  # answer identical repeatable generations of a batch once
    concurrent: bool = True  # let forks, calls and values that do not need each other run at the same time
    merge: bool = True  # send neighbouring constants together, with the generation after them
    tail: bool = True  # compute text ahead while the program waits for a call
    order: bool = True  # start items that share the longest prefixes one after another
    select: bool = True  # score all options of a select in one request
    script: bool = True  # run a chain of generations and constants as one request, where the server can

    @classmethod
    def none(cls) -> Optimizations:
        return cls(**{field.name: False for field in fields(cls)})
