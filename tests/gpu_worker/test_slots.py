"""What a command may not name, and that nothing of it reaches an index."""

from __future__ import annotations

from typing import Any

import pytest

from services.gpu_worker.faults import ProtocolError
from shared.ints import pack
from tests.gpu_worker.toy_engine import Bench, greedy, open_slot, prefill

READY = {"opens": (open_slot(0, 3, [0, 1]),), "prefills": (prefill(0, [1, 2, 3]),)}


@pytest.mark.parametrize(
    "command",
    [
        {"opens": (open_slot(8, 3, [0]),)},
        {"opens": (open_slot(-1, 3, [0]),)},
        {"opens": (open_slot(0, 3, [0]),)},  # is open already
        {"opens": (open_slot(1, 3, [64]),)},
        {"opens": (open_slot(1, 3, [-1]),)},
        {"opens": (open_slot(1, 3, list(range(17))),)},  # more pages than the context has
        {"opens": (open_slot(1, 3, [5], computed=5),)},
        {"opens": (open_slot(1, 3, [5], computed=-1),)},
        {"opens": (open_slot(1, 9, [5], greedy(presence_penalty=1.0), computed=3, history=[1]),)},
        {"closes": pack([1])},
        {"closes": pack([0, 0])},
        {"closes": pack([-8])},
        {"page_slots": pack([0]), "page_ids": pack([64])},
        {"page_slots": pack([0]), "page_ids": pack([])},
        {"page_slots": pack([1]), "page_ids": pack([5])},
        {"page_slots": pack([0] * 15), "page_ids": pack(range(10, 25))},
        {"page_slots": b"123", "page_ids": pack([1])},
        {"decode": [1]},
        {"decode": [8]},
        {"decode": [-1]},
        {"decode": [0, 0]},
        {"decode": [0], "prefills": (prefill(0, [1]),)},
        {"prefills": (prefill(0, [1]), prefill(0, [2]))},
        {"prefills": (prefill(1, [1]),)},
        {"prefills": (prefill(0, []),)},
        {"prefills": (prefill(0, [1] * 6),)},  # 3 + 6 tokens, two pages
        {"prefills": (prefill(0, [1] * 65),)},
        {"opens": (open_slot(1, 3, [5]),), "decode": [1]},  # has sampled nothing
        {"decode": [0], "masked_slots": pack([1])},
        {"decode": [0], "masked_slots": pack([0, 0])},
        {"decode": [0], "group_slots": pack([0]), "group_sizes": pack([2]), "group_pages": pack([1])},
        {"decode": [0], "group_slots": pack([0]), "group_sizes": pack([-1, 2]), "group_pages": pack([1, 1])},
    ],
)
def test_what_does_not_exist_is_a_protocol_error(command: dict[str, Any]) -> None:
    bench = Bench()
    bench.step(**READY)
    with pytest.raises(ProtocolError):
        bench.step(**command)


def test_a_decode_row_needs_a_page_for_its_token() -> None:
    bench = Bench()
    bench.step(**READY)
    for _ in range(5):
        bench.step([0])
    with pytest.raises(ProtocolError, match="room"):
        bench.step([0])


def test_a_step_is_no_longer_than_was_offered() -> None:
    bench = Bench(max_tokens=4)
    opens = (open_slot(0, 3, [0]), open_slot(1, 3, [1]))
    with pytest.raises(ProtocolError, match="at most 4"):
        bench.step(opens=opens, prefills=(prefill(0, [1, 2, 3]), prefill(1, [1, 2])))


def test_a_sequence_ends_with_the_context() -> None:
    bench = Bench(context=6)
    bench.step(opens=(open_slot(0, 5, [0, 1]),), prefills=(prefill(0, [1, 2, 3, 4, 5]),))
    bench.step([0])
    with pytest.raises(ProtocolError):
        bench.step([0])
