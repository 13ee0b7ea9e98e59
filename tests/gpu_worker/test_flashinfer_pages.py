"""Page ids gathered where the tables are: the lists of the host, for a few numbers a row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.gpu_worker.attention import flashinfer_parts
from services.gpu_worker.attention.flashinfer_parts import PlannedPages, gather_pages
from services.gpu_worker.attention.page_lists import PageSpans, page_spans
from tests.gpu_worker.flashinfer_fake import FakeFlashInfer
from tests.gpu_worker.flashinfer_scene import Scene
from tests.gpu_worker.tiny_models import UNDEFINED_PAGE


@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(1, 40), max_size=6),
    page_size=st.sampled_from([1, 4, 16]),
    spare=st.integers(0, 3),
)
def test_gathered_lists_are_the_hosts(seed: int, lengths: list[int], page_size: int, spare: int) -> None:
    """Of rows of a table in any order, each without some of its first pages."""
    rng = np.random.default_rng(seed)
    pages = [-(-length // page_size) for length in lengths]
    width = max(pages, default=0) + spare
    tables = np.full((len(lengths) + 2, width), UNDEFINED_PAGE, dtype=np.int32)
    rows = rng.permutation(len(lengths) + 2)[: len(lengths)]
    for row, count in zip(rows, pages, strict=True):
        tables[row, :count] = rng.integers(0, 1000, count)
    tokens = np.array(lengths, dtype=np.int32)
    skip = np.array([rng.integers(count) for count in pages], dtype=np.int32)
    for cut in (None, skip):
        expected = page_spans(tokens, page_size, width, cut)
        spans = page_spans(tokens, page_size, width, cut, rows)
        assert spans.pages(tables).tolist() == expected.pages(tables[rows]).tolist()
        found = PlannedPages.gathered(spans, torch.from_numpy(tables))
        assert found.indices.dtype == torch.int32
        assert found.indices.tolist() == spans.pages(tables).tolist()
        for name in ("indptr", "last_page_len"):
            assert getattr(found, name).tolist() == getattr(expected, name).tolist()


def test_runs_without_pages_among_others() -> None:
    tables = np.arange(24, dtype=np.int32).reshape(3, 8)
    indptr, last = np.array([0, 0, 2, 2, 3], dtype=np.int32), np.array([0, 16, 0, 16], dtype=np.int32)
    spans = PageSpans(np.array([0, 2, 0, 1]), np.array([0, 3, 0, 7]), indptr, last)
    assert spans.pages(tables).tolist() == gather_pages(spans, torch.from_numpy(tables)).tolist() == [19, 20, 15]


def test_tables_with_gaps_between_their_rows() -> None:
    wide = torch.arange(24, dtype=torch.int32).view(3, 8)
    spans = page_spans(np.array([9, 4], dtype=np.int32), 4, 3)
    assert gather_pages(spans, wide[::2, :3]).tolist() == [0, 1, 2, 16]


@pytest.mark.parametrize("graph", [False, True])
def test_what_travels_does_not_grow_with_the_pages(graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    send = flashinfer_parts.upload

    def count(values: np.ndarray, device: torch.device) -> torch.Tensor:
        sent.append(values.size)
        return send(values, device)

    monkeypatch.setattr(flashinfer_parts, "upload", count)
    for length in (16, 640):
        scene = Scene([length] * 3)
        backend = scene.backend(FakeFlashInfer(float32=True))
        (backend.graph_backend(3, 50) if graph else backend).plan(scene.batch())
    assert sent == [6, 6]
