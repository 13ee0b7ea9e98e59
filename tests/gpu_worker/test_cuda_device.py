"""What a CUDA device does around torch's captures, with torch's own parts played by the test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from services.gpu_worker.cuda.device import CudaDevice

DEVICE = torch.device("cuda", 0)


class Streams:
    """The current stream by name; as torch's, a capture that fails at its end leaves its own stream the current one."""

    def __init__(self) -> None:
        self.current = Stream(self, "compute")

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: Graph, *, pool: object, capture_error_mode: str) -> Iterator[None]:
        before, self.current = self.current, Stream(self, "capture")
        yield
        if graph.broken:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.current = before


class Stream:
    def __init__(self, streams: Streams, name: str) -> None:
        self.streams, self.name = streams, name

    def wait_stream(self, other: Stream) -> None:
        """Everything is done at once here."""


class Graph:
    broken = False


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    streams = Streams()
    played: dict[str, Any] = {
        "Stream": lambda device: Stream(streams, "side"),
        "graph_pool_handle": lambda: (0, 1),
        "current_stream": lambda device=None: streams.current,
        "stream": streams.use,
        "CUDAGraph": Graph,
        "graph": streams.graph,
    }
    for name, part in played.items():
        monkeypatch.setattr(torch.cuda, name, part)
    return streams


def test_work_is_warmed_up_on_the_side_and_then_captured(streams: Streams) -> None:
    seen: list[str] = []

    def work() -> torch.Tensor:
        seen.append(streams.current.name)
        return torch.zeros(1)

    CudaDevice(DEVICE).capture(work)
    assert seen == ["side", "capture"]
    assert streams.current.name == "compute"


def test_a_capture_that_fails_leaves_the_stream_as_it_was(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Page moves and steps meet on the stream that every thread starts with."""
    monkeypatch.setattr(Graph, "broken", True)
    with pytest.raises(RuntimeError, match="during capture"):
        CudaDevice(DEVICE).capture(lambda: torch.zeros(1))
    assert streams.current.name == "compute"
