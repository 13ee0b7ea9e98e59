"""Distributions and semantics of the sampler against a naive float64 reference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from services.gpu_worker import selection
from services.gpu_worker.kernels import library
from services.gpu_worker.sampler import Sampler
from services.gpu_worker.sampling_columns import SampleRows, SamplingColumns
from shared.messages.request import SamplingParams

CPU = torch.device("cpu")
LIBRARY = library.load()
KERNELS: list[library.Library | None] = [None]


@pytest.fixture(autouse=True, scope="module", params=["torch", *library.available_isas(LIBRARY.functions)])
def way(request: pytest.FixtureRequest) -> None:
    """Every test of this file is one of torch's passes, and of the kernels on each instruction set."""
    KERNELS[0] = None if request.param == "torch" else library.Library(LIBRARY.functions, request.param)


def sampler(vocab: int) -> Sampler:
    return Sampler(vocab, CPU, KERNELS[0])


def reference(logits: NDArray[np.float32], params: SamplingParams) -> NDArray[np.float64]:
    """The exact distribution: temperature, then top-k, then top-p over the rest, then min-p; ties go to lower ids."""
    scaled = logits.astype(np.float64) / params.temperature
    probs = np.exp(scaled - scaled.max())
    order = np.lexsort((np.arange(len(probs)), -probs))
    kept = order[: params.top_k] if params.top_k > 0 else order
    share = probs[kept] / probs[kept].sum()
    kept = kept[(np.cumsum(share) - share) < params.top_p]
    kept = kept[probs[kept] >= params.min_p * probs.max()]
    out = np.zeros_like(probs)
    out[kept] = probs[kept] / probs[kept].sum()
    return out


def columns_of(params: list[SamplingParams], positions: list[int], vocab: int) -> SampleRows:
    columns = SamplingColumns(len(params), vocab)
    for slot, one in enumerate(params):
        columns.set(slot, one)
    return columns.rows(np.arange(len(params)), np.array(positions, dtype=np.int64))


def draw(logits: NDArray[np.float32], params: SamplingParams, count: int) -> NDArray[np.int64]:
    """`count` draws at consecutive positions."""
    vocab = len(logits)
    rows = columns_of([params] * count, list(range(count)), vocab)
    return sampler(vocab).sample(torch.from_numpy(np.tile(logits, (count, 1))), rows)[0]


@dataclass
class Case:
    vocab: int
    spread: float
    params: SamplingParams


CASES = [
    Case(50, 1.0, SamplingParams(temperature=1.0, seed=1)),
    Case(50, 1.0, SamplingParams(temperature=0.6, seed=2)),
    Case(130, 1.0, SamplingParams(temperature=1.7, seed=3)),
    Case(130, 1.5, SamplingParams(temperature=1.0, top_k=7, seed=4)),
    Case(130, 1.5, SamplingParams(temperature=1.0, top_p=0.8, seed=5)),
    Case(130, 1.5, SamplingParams(temperature=1.3, min_p=0.1, seed=6)),
    Case(130, 1.0, SamplingParams(temperature=0.9, top_k=30, top_p=0.7, min_p=0.05, seed=7)),
    Case(1000, 0.3, SamplingParams(temperature=1.0, top_p=0.5, seed=8)),  # a nucleus of hundreds
    Case(1000, 0.1, SamplingParams(temperature=1.0, top_k=900, seed=9)),  # more than there are blocks
]


@pytest.mark.parametrize("case", CASES)
def test_draws_follow_the_exact_distribution(case: Case) -> None:
    logits = (np.random.default_rng(case.vocab).standard_normal(case.vocab) * case.spread).astype(np.float32)
    expected = reference(logits, case.params)
    count = 8000
    seen = np.bincount(draw(logits, case.params, count), minlength=case.vocab)
    assert seen[expected == 0].sum() == 0
    # Bins of few expected draws are pooled; chi-square over its degrees of freedom is about 1 +- sqrt(2 / dof).
    order = np.argsort(-expected)
    bins, observed = _pool(expected[order] * count, seen[order])
    dof = len(bins) - 1
    chi2 = ((observed - bins) ** 2 / bins).sum()
    assert abs(chi2 - dof) < 4 * np.sqrt(2 * dof), (chi2, dof)


def _pool(expected: NDArray[np.float64], seen: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    edges = np.unique(np.floor(np.cumsum(expected) / 20).astype(int), return_index=True)[1]
    return np.add.reduceat(expected, edges), np.add.reduceat(seen, edges).astype(np.float64)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocab=st.integers(2, 400),
    levels=st.integers(1, 40),  # few distinct logits: ties everywhere
    temperature=st.sampled_from([0.2, 1.0, 3.0]),
    top_k=st.sampled_from([-1, 2, 5, 64, 300]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
)
def test_survivors_are_those_of_the_definition(
    seed: int, vocab: int, levels: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    generator = np.random.default_rng(seed)
    # A quarter of a unit apart, so that no rounding decides which side of a border a token is on.
    logits = (generator.integers(0, levels, vocab) * 0.25).astype(np.float32)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    expected = reference(logits, params)
    if _is_borderline(logits, params):
        return
    seen = draw(logits, params, 40)
    assert expected[seen].min() > 0
    below = np.cumsum(expected)
    uniforms = _uniforms(params.seed, 40)
    assert seen.tolist() == [int(np.searchsorted(below, u * below[-1], side="right")) for u in uniforms]


def _uniforms(seed: int, count: int) -> NDArray[np.float64]:
    from services.gpu_worker.rng import uniforms

    return uniforms(np.full(count, seed, dtype=np.uint64), np.arange(count))


def _is_borderline(logits: NDArray[np.float32], params: SamplingParams) -> bool:
    """Whether a running sum meets top_p, or a ratio min_p, up to rounding: either answer is right then."""
    scaled = logits.astype(np.float64) / params.temperature
    probs = np.sort(np.exp(scaled - scaled.max()))[::-1]
    kept = probs[: params.top_k] if params.top_k > 0 else probs
    near_nucleus = np.abs(np.cumsum(kept) / kept.sum() - params.top_p).min() < 1e-6 and params.top_p < 1
    near_floor = bool(params.min_p) and np.abs(probs[1:] / params.min_p - 1.0).min(initial=1.0) < 1e-6
    return bool(near_nucleus or (near_floor and params.min_p < 1))


def test_each_row_is_what_it_would_be_alone() -> None:
    vocab, rows = 3000, 24
    generator = np.random.default_rng(5)
    logits = torch.from_numpy(
        (generator.standard_normal((rows, vocab)) * generator.uniform(0.1, 6, (rows, 1))).astype(np.float32)
    )
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.8, seed=1),
        SamplingParams(temperature=1.0, top_p=0.95, seed=2),
        SamplingParams(temperature=1.0, top_k=40, seed=3),
        SamplingParams(temperature=1.0, top_k=2500, top_p=0.99, seed=4),
        SamplingParams(temperature=2.0, min_p=0.3, seed=5),
    ]
    params = [kinds[i % len(kinds)] for i in range(rows)]
    positions = [7 * i for i in range(rows)]
    together, fit = sampler(vocab).sample(logits, columns_of(params, positions, vocab))
    assert fit.all()
    for i in range(rows):
        alone, _ = sampler(vocab).sample(logits[i : i + 1], columns_of([params[i]], [positions[i]], vocab))
        assert alone[0] == together[i]


def test_a_nucleus_that_does_not_fit_falls_back_to_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "FIRST_CANDIDATES", 2)
    monkeypatch.setattr(selection, "MORE_CANDIDATES", 4)
    logits = (np.random.default_rng(0).standard_normal(500) * 0.5).astype(np.float32)
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=3)
    below = np.cumsum(reference(logits, params))
    expected = [int(np.searchsorted(below, u, side="right")) for u in _uniforms(3, 200)]
    assert draw(logits, params, 200).tolist() == expected


def test_the_device_path_agrees_with_the_host_path(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = (np.random.default_rng(3).standard_normal(3000) * 2).astype(np.float32)
    kinds = [SamplingParams(temperature=0.0), SamplingParams(seed=1), SamplingParams(top_k=40, top_p=0.9)]
    kinds += [SamplingParams(top_p=0.99, seed=7), SamplingParams(min_p=0.01)]
    host = [draw(logits, params, 50).tolist() for params in kinds]
    monkeypatch.setattr(selection, "is_host", lambda tensor: False)
    assert [draw(logits, params, 50).tolist() for params in kinds] == host


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = np.array([1.0, 5.0, 5.0, 2.0], dtype=np.float32)
    for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_k=1, seed=9)):
        assert draw(logits, params, 5).tolist() == [1] * 5


def test_top_p_keeps_at_least_the_likeliest_token() -> None:
    logits = np.array([1.0, 1.0, 1.0, 0.0], dtype=np.float32)
    assert draw(logits, SamplingParams(temperature=1.0, top_p=1e-9, seed=9), 20).tolist() == [0] * 20


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(seed=1), SamplingParams(top_k=5)])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_cannot_be_sampled_is_unfit(params: SamplingParams, bad: float) -> None:
    logits = torch.ones(3, 80)
    logits[0, 3 if bad != -np.inf else slice(None)] = bad
    tokens, fit = sampler(80).sample(logits, columns_of([params] * 3, [1, 2, 3], 80))
    assert fit.tolist() == [False, True, True]
    assert tokens[0] == -1
    assert (tokens[1:] >= 0).all()


@pytest.mark.parametrize("params", [SamplingParams(seed=1), SamplingParams(top_k=5), SamplingParams(top_p=0.5)])
def test_forbidden_tokens_are_never_drawn(params: SamplingParams) -> None:
    logits = np.full(200, -np.inf, dtype=np.float32)
    logits[[3, 77, 199]] = [0.0, 0.1, 0.2]
    assert set(draw(logits, params, 300).tolist()) <= {3, 77, 199}


def test_extreme_temperatures_stay_finite() -> None:
    logits = (np.random.default_rng(1).standard_normal(300) * 50).astype(np.float32)
    cold = draw(logits, SamplingParams(temperature=1e-30, seed=2), 10)
    assert set(cold.tolist()) == {int(logits.argmax())}
    hot = draw(logits, SamplingParams(temperature=1e6, seed=2), 200)
    assert len(set(hot.tolist())) > 80
