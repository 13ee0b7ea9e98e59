"""Batches of decode rows whose memory is filled anew: what `build_batch` makes of the same rows, step after step."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gpu_worker.batch_builder import build_batch
from services.gpu_worker.decode_batches import DecodeBatches
from services.gpu_worker.rows import plan_rows
from services.gpu_worker.slots import SlotLimits, Slots
from shared.ints import pack
from shared.messages.request import SamplingParams
from shared.messages.step import SlotOpen, StepCommand

SLOTS, PAGE, CONTEXT, VOCAB = 6, 4, 40, 50
LIMITS = SlotLimits(SLOTS, SLOTS * CONTEXT // PAGE, PAGE, CONTEXT, VOCAB)
COLUMNS = ("token_ids", "positions", "qo_indptr", "kv_lengths", "kv_slots", "logit_rows", "num_decode_rows")


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_as_they_would_be_built(data: st.DataObject) -> None:
    """Rows come and go, in any order; one that has ended is left out."""
    slots, pages = Slots(LIMITS), CONTEXT // PAGE
    opens = [
        SlotOpen(
            slot, SamplingParams(temperature=slot / 4), 9, 9, pack(range(slot * pages, (slot + 1) * pages)), b"", 99
        )
        for slot in range(SLOTS)
    ]
    # The first two share their first two pages.
    opens[1] = SlotOpen(1, SamplingParams(), 9, 9, pack([0, 1, *range(pages + 2, 2 * pages)]), b"", 99)
    slots.apply(StepCommand(0, 1, opens=tuple(opens)))
    slots.last_token[:] = np.arange(SLOTS)
    batches, device = DecodeBatches(slots), torch.device("cpu")
    for step in range(1, 6):
        which = data.draw(st.permutations(range(SLOTS)))[: data.draw(st.integers(1, SLOTS))]
        slots.computed[:] = data.draw(st.lists(st.integers(9, CONTEXT - 1), min_size=SLOTS, max_size=SLOTS))
        slots.last_token[:] = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=SLOTS, max_size=SLOTS))
        slots.ended[:] = [slot == step for slot in range(SLOTS)]
        grouped = {"group_slots": pack([0, 1]), "group_sizes": pack([2]), "group_pages": pack([2])}
        command = StepCommand(step, 1, decode_slots=pack(which), **(grouped if data.draw(st.booleans()) else {}))
        rows = plan_rows(command, slots, 1000)
        if not rows.num_rows:
            continue
        found, expected = batches.build(rows, command), build_batch(rows, command, slots, device)
        for name in COLUMNS:
            assert np.array_equal(getattr(found, name), getattr(expected, name)), name
        for row, length in enumerate(expected.kv_lengths.tolist()):
            held = -(-length // PAGE)
            assert found.page_tables[row, :held].tolist() == expected.page_tables[row, :held].tolist()
        assert np.array_equal(found.scales, expected.scales)
        assert [(g.rows.tolist(), g.num_pages) for g in found.groups] == [
            (g.rows.tolist(), g.num_pages) for g in expected.groups
        ]
