"""Progress of loading: a line every two seconds, none for what is quick or done."""

from __future__ import annotations

from structlog.testing import capture_logs

from services.gpu_worker.models.progress import LoadProgress


def test_a_slow_load_says_how_far_it_is() -> None:
    now = 0.0
    progress = LoadProgress(10, lambda: now)
    with capture_logs() as lines:
        for _ in range(10):
            now += 0.7
            progress.add(1)
    assert [line["percent"] for line in lines] == [30, 60, 90]


def test_a_quick_load_says_nothing() -> None:
    progress = LoadProgress(3, lambda: 0.0)
    with capture_logs() as lines:
        for _ in range(3):
            progress.add(1)
    assert not lines
