"""What the worker asks of a CUDA device beyond tensors: events, pinned memory, a side stream, graphs.

Everything else in this room is written against the protocols, so that it runs on a CPU as well. The compute stream is
the current stream of the compute thread: whatever that thread enqueues is in one order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch


class Event(Protocol):
    """A place in a stream."""

    def record(self) -> None:
        """Here, in the current stream."""
        ...

    def wait(self) -> None:
        """Hold the calling thread until the device has come to it. Raises what the work before it has done wrong."""
        ...

    def hold_stream(self) -> None:
        """Let the current stream go on only after it; the calling thread does not wait."""
        ...

    def ms_at(self, later: Event) -> float:
        """Milliseconds from this event to a later one of the same kind; both have been reached."""
        ...


class Graph(Protocol):
    """Captured work that reads and writes the same memory at each replay."""

    def replay(self) -> None: ...


class GraphDevice(Protocol):
    """Where a pipelined engine runs."""

    @property
    def device(self) -> torch.device: ...

    def event(self) -> Event: ...

    def pinned(self, size: int) -> torch.Tensor:
        """uint8 [size] of host memory that copies to and from the device need not wait for."""
        ...

    def side_stream(self) -> AbstractContextManager[None]:
        """What is enqueued within goes beside the compute stream."""
        ...

    def capture(self, work: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        """Record `work`; the tensor it returned is what each replay writes again. All graphs share one pool."""
        ...


class CudaEvent:
    """Waiting for it blocks without spinning, so that the event loop keeps its core."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event(enable_timing=True, blocking=True)

    def record(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        self._event.synchronize()

    def hold_stream(self) -> None:
        self._event.wait(torch.cuda.current_stream(self._device))

    def ms_at(self, later: Event) -> float:
        assert isinstance(later, CudaEvent)
        return float(self._event.elapsed_time(later._event))


class CudaDevice:
    """The GraphDevice of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def event(self) -> CudaEvent:
        return CudaEvent(self.device)

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        with torch.cuda.stream(self._side):
            yield

    def capture(self, work: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            work()  # what libraries set up at their first call must not be captured
        torch.cuda.current_stream(self.device).wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        # Of two contexts the first restores the stream: a capture that fails at its end leaves its own the current one.
        # "thread_local": what other threads of this process do meanwhile is no part of the capture.
        with (
            torch.cuda.stream(torch.cuda.current_stream(self.device)),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            output = work()
        return graph, output


class HostEvent:
    """On a host everything has been done by the time it is recorded."""

    def __init__(self) -> None:
        self._at = 0.0

    def record(self) -> None:
        self._at = time.perf_counter()

    def wait(self) -> None:
        """There is nothing to wait for."""

    def hold_stream(self) -> None:
        """There is one stream."""

    def ms_at(self, later: Event) -> float:
        assert isinstance(later, HostEvent)
        return (later._at - self._at) * 1e3


class HostGraph:
    """Runs the recorded work again and puts its result where the first one was."""

    def __init__(self, work: Callable[[], torch.Tensor], output: torch.Tensor) -> None:
        self._work = work
        self._output = output

    def replay(self) -> None:
        self._output.copy_(self._work())


class HostDevice:
    """The GraphDevice of a CPU: the order of things is that of a GPU, the speed is not."""

    device = torch.device("cpu")

    def event(self) -> HostEvent:
        return HostEvent()

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        yield

    def capture(self, work: Callable[[], torch.Tensor]) -> tuple[HostGraph, torch.Tensor]:
        output = work()
        return HostGraph(work, output), output
