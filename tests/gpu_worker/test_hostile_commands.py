"""Commands that no scheduler would send: a ProtocolError or a RowError, never an index past a tensor.

Which index comes from the wire, and where it is checked before it can index anything:

    closes, prefill.slot                slots.require_open          opens.slot, opens.pages      slots._open
    page_slots, page_ids                slots._append               page_copies                  slots.copy_pairs
    opens.num_computed                  slots._open, rows._require_room (positions, context)
    opens.history                       slots._take_history         logit_bias_ids               SlotEdits
    logprob_token_ids, logprobs         slots._score_spec           stop_token_ids               SlotEdits
    decode_slots                        rows._decode_slots          prefill.token_ids, next_token   rows._tokens
    prefill.score_from                  rows._span                  masked_slots, mask words     sampling.take_masks
    group_slots, _sizes, _pages         batch_builder._groups       pages of Kv... orders        PageIO._index
    slots of Kv... orders               HostTier._index, DiskTier   numbers of SamplingParams    slots._require_numbers
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gpu_worker.batch import ForwardBatch
from services.gpu_worker.cuda.device import HostDevice
from services.gpu_worker.cuda.engine import PipelinedEngine
from services.gpu_worker.faults import ProtocolError
from shared.ints import pack
from shared.messages.kv import KvReceive
from shared.messages.request import SamplingParams
from shared.messages.step import PrefillRow, SlotOpen, StepCommand, WorkerFault
from tests.gpu_worker.toy_engine import VOCAB, Bench, greedy, open_slot, prefill, tokens, toy_greedy
from tests.gpu_worker.worker_stage import Stage

SLOTS, PAGES, CONTEXT, MOST = 4, 12, 24, 16
EXTREMES = [-(2**31), 2**31 - 1, -1, 0, 1, SLOTS, PAGES, VOCAB, CONTEXT]
small = st.integers(-1, 13)
number = st.one_of(small, small, st.sampled_from(EXTREMES))
wide = st.one_of(number, st.sampled_from([2**31, -(2**40), 2**63 - 1, -(2**63)]))


def columns(size: int) -> st.SearchStrategy[bytes]:
    plain = st.lists(small, max_size=size).map(pack)
    return st.one_of(plain, plain, st.lists(number, max_size=size).map(pack), st.binary(max_size=7))


floats = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(width=32))
params = st.builds(
    SamplingParams,
    temperature=floats,
    top_p=floats,
    top_k=wide,
    min_p=floats,
    seed=wide,
    frequency_penalty=floats,
    presence_penalty=floats,
    repetition_penalty=floats,
    min_new_tokens=wide,
    stop_token_ids=st.lists(wide, max_size=3).map(tuple),
    logit_bias_ids=columns(3),
    logit_bias_values=st.lists(floats, max_size=3).map(lambda v: np.array(v, "<f4").tobytes()),
    logprobs=st.one_of(st.integers(-1, 3), wide),
    logprob_token_ids=columns(3),
)
opens = st.builds(
    SlotOpen,
    slot=number,
    sampling=st.one_of(st.just(greedy()), params),
    prompt_length=wide,
    num_computed=st.one_of(st.just(0), wide),
    pages=columns(7),
    history=columns(3),
    remaining=st.one_of(st.just(5), wide),
)
prefills = st.builds(
    PrefillRow,
    slot=number,
    token_ids=st.one_of(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6).map(pack), columns(5)),
    sample=st.booleans(),
    score_from=st.one_of(st.just(-1), wide),
    next_token=st.one_of(st.just(-1), wide),
    drafts=st.one_of(st.sampled_from([0, 0, 1, 2]), wide),
    keep_hidden=st.booleans(),
    start=st.one_of(st.sampled_from([-1, -1, 3, 4]), wide),
)
commands = st.fixed_dictionaries(
    {},
    optional={
        "decode_slots": columns(4),
        "prefills": st.lists(prefills, max_size=3).map(tuple),
        "masked_slots": columns(3),
        "opens": st.lists(opens, max_size=3).map(tuple),
        "closes": columns(2),
        "page_slots": columns(2),
        "page_ids": columns(2),
        "page_copies": columns(4),
        "group_slots": columns(4),
        "group_sizes": columns(2),
        "group_pages": columns(2),
    },
)


class Watched:
    """A bench whose model looks at every index before it uses one."""

    def __init__(self, *, pipelined: bool) -> None:
        self.bench = Bench(
            slots=SLOTS,
            pages=PAGES,
            context=CONTEXT,
            max_tokens=MOST,
            drafts=0 if pipelined else 3,
            keeps_hidden=not pipelined,
        )
        whole = self.bench.whole  # whatever the switch of `cuda.start` says
        self.engine = PipelinedEngine(whole, HostDevice()) if pipelined else whole
        self.bench.engine = self.engine  # type: ignore[assignment]
        self._forward = self.bench.runner.forward
        self.bench.runner.forward = self._checked  # type: ignore[method-assign]

    def _checked(self, batch: ForwardBatch) -> torch.Tensor:
        size = self.bench.limits.page_size
        within(batch.token_ids, VOCAB)
        within(batch.positions, CONTEXT)
        within(batch.kv_slots, PAGES * size)
        within(batch.page_tables, PAGES)
        within(batch.kv_lengths - 1, CONTEXT)
        within(batch.logit_rows, batch.num_tokens)
        if batch.hidden is not None:
            within(batch.hidden.pages, PAGES)
            within(batch.hidden.kept_pages, PAGES)
            within(batch.hidden.kept, batch.num_tokens)
        assert batch.num_tokens <= MOST
        assert not batch.num_rows or int(batch.kv_lengths.max()) <= batch.page_tables.shape[1] * size
        assert batch.qo_indptr[0] == 0
        assert batch.qo_indptr[-1] == batch.num_tokens
        assert (batch.qo_indptr.diff() > 0).all()
        earlier: list[tuple[set[int], int]] = []
        for group in batch.groups:
            within(group.rows, batch.num_rows)
            assert (batch.qo_indptr.diff()[group.rows.long()] == 1).all()
            rows = set(group.rows.tolist())
            assert len(rows) == len(group.rows)
            assert 0 < group.num_pages <= batch.page_tables.shape[1]
            assert all(
                rows.isdisjoint(other) or (rows <= other and pages < group.num_pages) for other, pages in earlier
            )
            earlier.append((rows, group.num_pages))
        return self._forward(batch)


def within(indices: torch.Tensor, size: int) -> None:
    assert not len(indices) or (int(indices.min()) >= 0 and int(indices.max()) < size)


@pytest.mark.parametrize("pipelined", [False, True])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_no_command_reaches_past_a_tensor(pipelined: bool, data: st.DataObject) -> None:
    watched = Watched(pipelined=pipelined)
    engine, step = watched.engine, 0

    def masks(step_id: int) -> tuple[bytes, bytes]:
        words = data.draw(st.sampled_from([4, 3, 0]))
        masked = fields.get("masked_slots", b"")
        return masked, b"\xff" * (len(masked) // 4 * words * 4)

    fields: dict[str, Any]
    ready: dict[str, Any] = {
        "opens": (open_slot(0, 3, [0, 1]), open_slot(1, 3, [0, 2])),
        "prefills": (prefill(0, [1, 2, 3]),),
    }
    for fields in [ready, *data.draw(st.lists(commands, max_size=5))]:
        command = StepCommand(step_id=step, epoch=1, **fields)
        step += 1
        try:
            with np.errstate(over="ignore"):  # a hostile temperature becomes infinite, which is none of its row's harm
                result = engine.execute(command, masks, incarnation=7)
        except ProtocolError:
            engine.reset()
            continue
        drawn = np.frombuffer(result.token_ids, "<i4")
        assert ((drawn >= -1) & (drawn < VOCAB)).all()
    engine.reset()
    watched.bench.steps = step
    assert watched.bench.run([5, 17, 3], 3, greedy()) == toy_greedy([5, 17, 3], 3)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"])
def test_numbers_that_are_none_end_their_request_only(name: str, value: float) -> None:
    bench = Bench()
    bad = SamplingParams(**{"temperature": 0.7, name: value})  # type: ignore[arg-type]
    result = bench.step(
        opens=(open_slot(0, 3, [0], bad), open_slot(1, 3, [1])),
        prefills=(prefill(0, [1, 2, 3]), prefill(1, [5, 17, 3])),
    )
    assert tokens(result) == [-1, *toy_greedy([5, 17, 3], 1)]
    assert [(error.slot, name in error.detail) for error in result.errors] == [(0, True)]


def test_a_history_outside_the_vocabulary_ends_its_request_only() -> None:
    bench = Bench()
    bench.step(opens=(open_slot(0, 4, [0]),), prefills=(prefill(0, [1, 2, 3], sample=False),))
    penalised = greedy(presence_penalty=1.0)
    opened = open_slot(1, 4, [0], penalised, computed=3, history=[1, VOCAB, 3])
    result = bench.step(opens=(opened, open_slot(2, 3, [1])), prefills=(prefill(1, [4]), prefill(2, [5, 17, 3])))
    assert tokens(result) == [-1, *toy_greedy([5, 17, 3], 1)]
    assert [error.slot for error in result.errors] == [1]


def sharing(bench: Bench) -> Bench:
    """Slots 0, 1, 2 with two pages in common, 3 with the first of them."""
    known = list(range(1, 9))
    bench.step(opens=(open_slot(0, 9, [0, 1, 2]),), prefills=(prefill(0, [*known, 9]),))
    opens = tuple(open_slot(slot, 9, [0, 1, slot + 2], computed=8) for slot in (1, 2))
    last = open_slot(3, 9, [0, 5, 6], computed=4)
    rows = (*(prefill(slot, [9]) for slot in (1, 2)), prefill(3, [*known[4:], 9]))
    bench.step(opens=(*opens, last), prefills=rows)
    return bench


@pytest.mark.parametrize(
    "groups",
    {
        "twice in one": ([0, 0], [2], [1]),
        "the same rows, the same pages": ([0, 1, 1, 0], [2, 2], [1, 1]),
        "an inner one without pages of its own": ([0, 1, 2, 3, 0, 1], [4, 2], [1, 1]),
        "an inner one with fewer pages": ([0, 1, 2, 0, 1], [3, 2], [2, 1]),
        "the inner one first": ([0, 1, 0, 1, 2], [2, 3], [2, 1]),
        "neither within the other": ([0, 1, 3, 0, 1, 2], [3, 3], [1, 2]),
        "in two within a third": ([0, 1, 2, 0, 1, 1, 2], [3, 2, 2], [1, 2, 2]),
    }.values(),
)
def test_groups_that_share_rows_must_be_nested(groups: Any) -> None:
    bench = sharing(Bench())
    members, sizes, pages = map(pack, groups)
    for _ in range(2):  # what is kept of the columns from step to step knows no wrong ones
        with pytest.raises(ProtocolError, match="two shared groups"):
            bench.step([0, 1, 2, 3], group_slots=members, group_sizes=sizes, group_pages=pages)


@pytest.mark.parametrize("pages", [[1, 2], [0, 2], [-1, 2]])
def test_an_inner_group_that_does_not_share_its_own_pages(pages: list[int]) -> None:
    bench = sharing(Bench())
    with pytest.raises(ProtocolError, match="differ"):
        bench.step(
            [0, 1, 2, 3], group_slots=pack([0, 1, 2, 3, 2, 3]), group_sizes=pack([4, 2]), group_pages=pack(pages)
        )


def test_nested_groups_come_as_they_are() -> None:
    bench = sharing(Bench())
    members, sizes, pages = [0, 9, 1, 2, 3, 2, 1, 9, 1], [5, 3, 1], [1, 2, 3]  # nobody is in 9, the last is one row
    columns = {"group_slots": pack(members), "group_sizes": pack(sizes), "group_pages": pack(pages)}
    for decode, expected in (
        ([1, 2, 3, 0], [([3, 0, 1, 2], 1), ([1, 0], 2)]),
        ([0, 2, 1], [([0, 2, 1], 1), ([1, 2], 2)]),  # the same columns, other rows
        ([3, 1], [([1, 0], 1)]),
    ):
        bench.step(decode, **columns)
        found = bench.runner.batches[-1].groups
        assert [(group.rows.tolist(), group.num_pages) for group in found] == expected


async def test_an_order_that_is_no_column_is_a_fault(stage: Stage) -> None:
    await stage.script.welcome()
    stage.script.send(KvReceive(5, b"123", "w2"))
    fault = await stage.script.next(WorkerFault)
    assert fault.kind == "protocol"
