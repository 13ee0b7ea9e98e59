"""Pages between a device and the host, on streams that do their work as late as they may, or as soon as they can."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gpu_worker.kv_cache import KVCache
from services.gpu_worker.transfer import device_pages
from services.gpu_worker.transfer.page_io import PageIO, PendingRead
from services.gpu_worker.transfer.staged import as_unsigned, checksum, device_checksum

PAGES = 16


@dataclass
class Stream:
    """Work that is enqueued; `(other, n)` stands for: wait until the other stream has done n."""

    name: str
    jobs: list[Callable[[], None] | tuple[Stream, int]] = field(default_factory=list)
    done: int = 0

    def drain(self, upto: int | None = None) -> None:
        """Do what was enqueued, and of the other stream just what must come before."""
        end = len(self.jobs) if upto is None else upto
        while self.done < end:
            job = self.jobs[self.done]
            if isinstance(job, tuple):
                job[0].drain(job[1])
            else:
                job()
            self.done += 1


class Device:
    """A SideStream and a compute stream on a CPU. Each test names the stream that is quick; the other only obeys."""

    def __init__(self, quick: str) -> None:
        self.compute, self.side = Stream("compute"), Stream("side")
        self._quick = quick
        self.compute_waits = 0

    def step(self, job: Callable[[], None]) -> None:
        self.compute.jobs.append(job)
        self._hurry()

    def after_compute(self) -> None:
        self.side.jobs.append((self.compute, len(self.compute.jobs)))
        self._hurry()

    def before_compute(self) -> None:
        self.compute_waits += 1
        self.compute.jobs.append((self.side, len(self.side.jobs)))
        self._hurry()

    def run(self, job: Callable[[], None]) -> None:
        self.side.jobs.append(job)
        self._hurry()

    def mark(self) -> Place:
        return Place(self.side, len(self.side.jobs))

    def pinned(self, size: int) -> torch.Tensor:
        return torch.full((size,), 0xAB, dtype=torch.uint8)  # what nobody wrote must not be taken for pages

    def _hurry(self) -> None:
        if self._quick == "compute":
            self.compute.drain()
        elif self._quick == "side":
            self.side.drain()


@dataclass
class Place:
    stream: Stream
    at: int

    def synchronize(self) -> None:
        self.stream.drain(self.at)


def stage(quick: str, dtype: torch.dtype = torch.bfloat16, head_dim: int = 8) -> tuple[Device, KVCache, PageIO]:
    device = Device(quick)
    cache = KVCache(3, PAGES, 4, 2, head_dim, dtype, torch.device("cpu"))
    for layer in cache.layers:
        layer.copy_(torch.randn(layer.shape))
    return device, cache, PageIO(cache, device)


def content(cache: KVCache, pages: list[int]) -> bytes:
    return b"".join(layer[pages].contiguous().view(torch.uint8).numpy().tobytes() for layer in cache.layers)


def fill(cache: KVCache, page: int, value: float) -> None:
    for layer in cache.layers:
        layer[page].fill_(value)


def fill_all(cache: KVCache, value: float) -> None:
    for page in range(PAGES):
        fill(cache, page, value)


QUICK = ["compute", "side", "neither"]


@pytest.mark.parametrize("quick", QUICK)
def test_a_store_reads_what_the_steps_before_it_wrote_and_nothing_later(quick: str) -> None:
    device, cache, pages = stage(quick)
    device.step(lambda: fill(cache, 3, 1.0))
    device.step(lambda: fill(cache, 5, 2.0))
    reading = pages.start_read([5, 3])
    device.step(lambda: fill(cache, 3, 7.0))
    device.step(lambda: fill(cache, 5, 8.0))
    data = reading.result()
    device.compute.drain()
    words = data.view(np.uint16)
    one, two = (torch.full((1,), value, dtype=torch.bfloat16).view(torch.uint16).item() for value in (1.0, 2.0))
    assert (words[:, 0] == two).all()
    assert (words[:, 1] == one).all()
    assert bool((cache.layers[0][3] == 7.0).all())
    assert bool((cache.layers[2][5] == 8.0).all())


@pytest.mark.parametrize("quick", QUICK)
def test_pages_for_another_worker_wait_for_no_step_and_hold_none_up(quick: str) -> None:
    device, cache, pages = stage(quick)
    before = content(cache, [1, 2])
    device.step(lambda: fill(cache, 9, 1.0))
    assert pages.read([1, 2]).tobytes() == before
    assert device.compute_waits == 0
    assert quick == "compute" or device.compute.done == 0


@pytest.mark.parametrize("quick", QUICK)
def test_what_was_written_is_there_for_the_next_step(quick: str) -> None:
    device, cache, pages = stage(quick)
    other = stage("neither")[1]
    data = content(other, [4, 6])
    device.step(lambda: fill(cache, 9, 1.0))
    pages.write([10, 11], data)
    seen: list[bytes] = []
    device.step(lambda: seen.append(content(cache, [10, 11])))
    device.compute.drain()
    assert seen == [data]
    assert device.compute_waits == 0


@pytest.mark.parametrize("quick", QUICK)
def test_the_last_steps_of_a_life_write_before_the_first_pages_of_the_next(quick: str) -> None:
    device, cache, pages = stage(quick)
    data = content(stage("neither")[1], [4])
    device.step(lambda: fill(cache, 10, 1.0))  # its result is of no use to anybody any more
    pages.fence()
    pages.write([10], data)
    device.compute.drain()
    assert content(cache, [10]) == data


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("head_dim", [1, 8])
def test_bytes_are_those_of_a_host_cache(dtype: torch.dtype, head_dim: int) -> None:
    _, cache, pages = stage("side", dtype, head_dim)
    plain = PageIO(cache)
    assert pages.read([3, 0, 15]).tobytes() == plain.read([3, 0, 15]).tobytes()
    assert pages.start_read([]).result().shape == (3, 0, pages.layer_bytes)
    pages.write([1, 2, 3], plain.read([4, 5, 6]))
    assert content(cache, [1, 2, 3]) == content(cache, [4, 5, 6])
    for wrong in ([PAGES], [-1]):
        with pytest.raises(IndexError):
            pages.start_read(wrong)
        with pytest.raises(IndexError):
            pages.write(wrong, plain.read([0]))


def test_only_the_last_piece_of_a_long_read_is_copied_out_beside_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    device, cache, pages = stage("compute")
    monkeypatch.setattr(device_pages, "PIECE_BYTES", 2 * pages.page_bytes)
    before = content(cache, list(range(7)))
    reading = pages.start_read(list(range(7)))
    device.step(lambda: fill_all(cache, 9.0))
    assert device.compute_waits == 1
    assert device.side.done == len(device.side.jobs) - 1, "the steps do not wait for the last copy to the host"
    assert reading.result().tobytes() == before


def test_nothing_goes_up_from_memory_that_is_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a copy holds its thread until the streams before it are done; for a store that is the compute thread."""
    device, cache, pages = stage("side")
    pinned: set[int] = set()
    copies: list[bool] = []

    def remember(size: int) -> torch.Tensor:
        memory = torch.empty(size, dtype=torch.uint8)
        pinned.add(memory.data_ptr())
        return memory

    def up(tensor: torch.Tensor, where: torch.device, *, non_blocking: bool = False) -> torch.Tensor:
        copies.append(non_blocking and tensor.data_ptr() in pinned)
        return tensor.clone()

    monkeypatch.setattr(device, "pinned", remember)
    monkeypatch.setattr(torch.Tensor, "to", up)
    data = pages.start_read([1, 2]).result()
    pages.write([4, 5], data)
    assert copies == [True] * 3
    assert content(cache, [4, 5]) == content(cache, [1, 2])


@settings(deadline=None)
@given(st.data())
def test_any_order_of_steps_stores_and_loads(data: st.DataObject) -> None:
    """Against a cache on which everything is done at once."""
    device, cache, pages = stage(data.draw(st.sampled_from(QUICK)))
    truth = KVCache(3, PAGES, 4, 2, 8, torch.bfloat16, torch.device("cpu"))
    for layer, source in zip(truth.layers, cache.layers, strict=True):
        layer.copy_(source)
    reads: list[tuple[PendingRead, bytes]] = []
    some_pages = st.lists(st.integers(0, PAGES - 1), min_size=1, max_size=3, unique=True)
    for number in range(data.draw(st.integers(1, 12))):
        chosen = data.draw(some_pages)
        match data.draw(st.sampled_from(["step", "store", "load", "result"])):
            case "step":
                for page in chosen:
                    device.step(lambda page=page, number=number: fill(cache, page, float(number)))  # type: ignore[misc]
                    fill(truth, page, float(number))
            case "store":
                reads.append((pages.start_read(chosen), content(truth, chosen)))
            case "load":
                device.compute.drain()  # the scheduler waits for the steps that know these pages
                bits = np.frombuffer(content(truth, [(page + 1) % PAGES for page in chosen]), np.uint8)
                pages.write(chosen, bits)
                PageIO(truth).write(chosen, bits)
            case "result" if reads:
                reading, expected = reads.pop(data.draw(st.integers(0, len(reads) - 1)))
                assert reading.result().tobytes() == expected
    for reading, expected in reads:
        assert reading.result().tobytes() == expected
    device.compute.drain()
    assert content(cache, list(range(PAGES))) == content(truth, list(range(PAGES)))


@pytest.mark.parametrize("quick", QUICK)
def test_staged_pages_wait_for_no_step_and_come_back_as_they_were(quick: str) -> None:
    device, cache, pages = stage(quick)
    plain, before = PageIO(cache), content(cache, [1, 2])
    device.step(lambda: fill(cache, 9, 1.0))
    staged = pages.staging(2 * pages.page_bytes)
    total = pages.stage([1, 2], staged)
    assert staged.numpy().tobytes() == before
    assert total == pages.checksum(staged) == plain.checksum(staged) == plain.stage([1, 2], plain.staging(len(staged)))
    assert device.compute_waits == 0
    assert quick == "compute" or device.compute.done == 0
    pages.unstage([11, 10], staged)
    assert content(cache, [11, 10]) == before
    device.compute.drain()
    for io in (pages, plain):
        with pytest.raises(IndexError):
            io.stage([PAGES], staged[: pages.page_bytes])
        with pytest.raises(IndexError):
            io.unstage([-1], staged[: pages.page_bytes])


def test_staged_pages_come_after_the_last_steps_of_a_life() -> None:
    device, cache, pages = stage("neither")
    device.step(lambda: fill(cache, 3, 1.0))
    pages.fence()
    staged = pages.staging(pages.page_bytes)
    pages.stage([3], staged)
    assert staged.numpy().tobytes() == content(cache, [3])
    assert bool((cache.layers[0][3] == 1.0).all())


@given(data=st.binary(min_size=1, max_size=100), where=st.integers(0, 99), other=st.integers(1, 255))
def test_a_checksum_is_the_same_on_host_and_device_and_finds_a_byte(data: bytes, where: int, other: int) -> None:
    whole = np.frombuffer(bytearray(data), np.uint8)
    total = checksum(whole)
    assert total == as_unsigned(int(device_checksum(torch.from_numpy(whole))))
    whole[where % len(data)] ^= other
    assert checksum(whole) != total


def test_a_checksum_finds_words_that_changed_places_and_what_is_not_there() -> None:
    words = np.arange(1, 9, dtype=np.uint64)
    totals = [
        checksum(some.view(np.uint8)) for some in (words, words[::-1].copy(), np.roll(words, 1), words[:7].copy())
    ]
    assert len(set(totals)) == 4
