"""The choice on the device is the host sampler's, for the same logits: ties, filters, rows that are not fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gpu_worker.cuda.sampling import NO_TOKEN, UNFIT, draw_arrays, sample_on_device
from services.gpu_worker.sampler import Sampler
from services.gpu_worker.sampling_columns import SampleRows, SamplingColumns
from shared.messages.request import SamplingParams

CPU = torch.device("cpu")


def rows_of(params: list[SamplingParams], positions: list[int], vocab: int) -> SampleRows:
    columns = SamplingColumns(len(params), vocab)
    for slot, one in enumerate(params):
        columns.set(slot, one)
    return columns.rows(np.arange(len(params)), np.array(positions, dtype=np.int64))


def on_device(logits: torch.Tensor, rows: SampleRows) -> list[int]:
    shape, arrays = draw_arrays(rows)
    draws = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    return sample_on_device(logits.clone(), shape, draws).tolist()


def on_host(logits: torch.Tensor, rows: SampleRows) -> list[int]:
    tokens: list[int] = Sampler(logits.shape[1], CPU).sample(logits.clone(), rows)[0].tolist()
    return tokens


@st.composite
def params(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 1.0, 5.0])),
        top_k=draw(st.sampled_from([0, 0, 0, 1, 2, 7, 50, 1000])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.01, 0.0])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0])),
        seed=draw(st.integers(0, 2**64 - 1)),
    )


@st.composite
def logits_of(draw: st.DrawFn, rows: int) -> torch.Tensor:
    vocab = draw(st.sampled_from([1, 5, 63, 64, 65, 300, 5000]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["spread", "flat", "ties", "few", "equal"]))
    if kind == "ties":
        values = rng.integers(-2, 3, (rows, vocab)).astype(np.float32)
    elif kind == "equal":
        values = np.zeros((rows, vocab), dtype=np.float32)
    else:
        values = (rng.standard_normal((rows, vocab)) * (0.05 if kind == "flat" else 3)).astype(np.float32)
    if kind == "few":
        values[rng.random((rows, vocab)) < 0.9] = -np.inf
        values[:, rng.integers(vocab)] = 0.5
    return torch.from_numpy(values)


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_the_device_chooses_as_the_host_does(data: st.DataObject) -> None:
    chosen = data.draw(st.lists(params(), min_size=1, max_size=6))
    logits = data.draw(logits_of(len(chosen)))
    positions = data.draw(st.lists(st.integers(0, 2**31), min_size=len(chosen), max_size=len(chosen)))
    rows = rows_of(chosen, positions, logits.shape[1])
    assert on_device(logits, rows) == on_host(logits, rows)


FILTERS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_k=5),
    SamplingParams(temperature=1.0, top_k=20, top_p=0.95),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=1.0, min_p=0.1),
]


@pytest.mark.parametrize("one", FILTERS)
def test_rows_that_are_not_fit_say_why_and_leave_the_others_alone(one: SamplingParams) -> None:
    inf = float("inf")
    logits = torch.randn(5, 90, generator=torch.Generator().manual_seed(1))
    logits[1, 3] = float("nan")
    logits[2, 89] = inf
    logits[3] = -inf
    rows = rows_of([one] * 5, [4, 5, 6, 7, 8], 90)
    tokens = on_device(logits, rows)
    assert tokens[1:4] == [UNFIT, UNFIT, NO_TOKEN]
    expected = on_host(logits, rows)
    assert [tokens[0], tokens[4]] == [expected[0], expected[4]]
    assert expected[1:4] == [-1, -1, -1]


@pytest.mark.parametrize("one", FILTERS)
def test_a_row_is_chosen_the_same_alone_and_among_others(one: SamplingParams) -> None:
    logits = torch.randn(12, 700, generator=torch.Generator().manual_seed(2)) * 2
    everyone = [FILTERS[i % len(FILTERS)] for i in range(12)]
    everyone[5] = one
    together = on_device(logits, rows_of(everyone, list(range(12)), 700))
    assert on_device(logits[5:6], rows_of([one], [5], 700)) == [together[5]]


def test_a_nucleus_cuts_ties_by_id() -> None:
    logits = torch.zeros(1, 1000)
    seen = {on_device(logits, rows_of([SamplingParams(temperature=1.0, top_p=0.01)], [i], 1000))[0] for i in range(200)}
    assert seen == set(range(10))
