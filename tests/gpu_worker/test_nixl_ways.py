"""Who has NIXL and who takes it: agents that do not start, `--page-transport`, what a worker says of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from services.gpu_worker.kv_cache import KVCache
from services.gpu_worker.transfer import carrier
from services.gpu_worker.transfer.carrier import Carrier, NixlFailed, open_carrier
from services.gpu_worker.transfer.nixl_api import NixlMissing, import_nixl
from services.gpu_worker.transfer.page_io import PageIO
from shared import curve, ints
from shared.config import WorkerConfig
from shared.messages.control import Heartbeat
from shared.messages.kv import KvChunk, KvDone, KvOffer, KvReady, KvReceive, KvSend
from shared.service import CannotStart
from tests.gpu_worker.nixl_fake import FakeNixl
from tests.gpu_worker.transfer_ends import CPU
from tests.gpu_worker.worker_stage import Stage


@pytest.fixture
def net() -> FakeNixl:
    return FakeNixl()


async def test_a_worker_names_its_agent_and_moves_pages_by_it(
    tmp_path: Path, net: FakeNixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carrier, "import_nixl", lambda one_machine: net)
    stage = Stage(tmp_path, page_transport="nixl")
    await stage.worker.start()
    try:
        hello = await stage.script.welcome()
        assert hello.kv_endpoints[1:] == tuple(f"nixl:{name}" for name in net.agents)
        stage.script.open()
        await stage.script.result()
        stage.script.send(KvReceive(1, ints.pack([40]), "w1"))
        await stage.script.next(KvReady)
        stage.script.send(KvSend(1, ints.pack([0]), "w1", hello.kv_endpoints))
        assert all([(await stage.script.next(KvDone)).ok for _ in range(2)])
        keys = stage.bench.runner.kv_cache.layers[0]
        assert torch.equal(keys[40], keys[0])
        stage.worker.heartbeat()
        assert (await stage.script.next(Heartbeat)).gauges["kv_nixl_pages_in"] == 1
    finally:
        await stage.worker.close()
        stage.script.server.close()


async def test_a_worker_that_is_to_use_nixl_and_has_none_does_not_start(
    tmp_path: Path, net: FakeNixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carrier, "import_nixl", lambda one_machine: net)
    net.fault = "start"
    stage = Stage(tmp_path, page_transport="nixl")
    try:
        with pytest.raises(CannotStart, match="NIXL"):
            await stage.worker.start()
    finally:
        await stage.worker.close()
        stage.script.server.close()


def cache() -> PageIO:
    return PageIO(KVCache(1, 4, 4, 1, 8, torch.float32, CPU))


@pytest.mark.parametrize("fault", ["start", "no UCX"])
def test_where_no_agent_starts_it_says_why(net: FakeNixl, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net.fault = fault
    if fault == "no UCX":

        def no_backend(*args: Any) -> None:
            raise KeyError("UCX")

        monkeypatch.setattr("tests.gpu_worker.nixl_fake.FakeAgent.register_memory", no_backend)
    with pytest.raises(NixlMissing, match="NIXL_ERR_BACKEND" if fault == "start" else "UCX"):
        Carrier(net, cache())


def offer(carrier: Carrier, name: str) -> KvOffer:
    chunk = KvChunk(1, 0, 1, True, 0, "float32")
    return KvOffer(chunk, name, "DRAM", carrier.to_send[0].address, 0, "ipc:///nowhere")


def test_an_agent_that_comes_under_another_name_does_not_stay(net: FakeNixl) -> None:
    ours, known, other = (Carrier(net, cache()) for _ in range(3))
    met = net.agents[ours.name].met
    into = ours.to_read[0]
    ours.read(offer(known, known.name), known.metadata, 8, into)
    assert met == {known.name}
    for name, metadata in (
        ("somebody", other.metadata),
        (known.name, other.metadata),  # who is known keeps its name
        ("somebody", known.metadata),  # and its place under it
        ("somebody", b"metadata of \xff\xfe"),
    ):
        with pytest.raises(NixlFailed, match="another agent's"):
            ours.read(offer(other, name), metadata, 8, into)
        assert met == {known.name}
        ours.read(offer(known, known.name), known.metadata, 8, into)
    with pytest.raises(NixlFailed, match="another agent's"):
        ours.read(offer(other, "somebody"), known.metadata + b", and more", 8, into)
    assert met == set()  # what NIXL knows of it now is not what we know
    ours.read(offer(known, known.name), known.metadata, 8, into)
    ours.read(offer(other, other.name), other.metadata, 8, into)
    assert met == {known.name, other.name}


def test_which_way_is_taken(net: FakeNixl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrier, "import_nixl", lambda one_machine: net)
    pages = cache()

    def way(wish: str, endpoint: str = "tcp://10.0.0.1:*") -> bool:
        return open_carrier(WorkerConfig(page_transport=wish), pages, endpoint) is not None  # type: ignore[arg-type]

    assert way("nixl")
    assert not way("nixl", "")  # there are no transfers at all
    assert not way("zmq")
    assert not way("auto")  # between CPUs there is nothing to gain
    monkeypatch.setattr(PageIO, "on_gpu", True)
    assert way("auto")
    assert not way("auto", "ipc:///run/kv.sock")  # only this user reaches that socket
    assert way("nixl", "ipc:///run/kv.sock")
    monkeypatch.setattr(curve, "in_use", lambda: True)
    assert not way("auto")
    assert way("nixl")
    monkeypatch.setattr(curve, "in_use", lambda: False)
    net.fault = "start"
    assert not way("auto")
    with pytest.raises(NixlMissing):
        way("nixl")


def test_on_one_machine_nixl_listens_on_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UCX_NET_DEVICES", "NIXL_LOG_LEVEL"):
        monkeypatch.setenv(name, "x")  # so that it is undone
        monkeypatch.delenv(name)
    monkeypatch.setattr("importlib.import_module", lambda name: name)
    import_nixl(one_machine=False)
    assert "UCX_NET_DEVICES" not in os.environ
    import_nixl(one_machine=True)
    assert os.environ["UCX_NET_DEVICES"] == "lo"
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:1")
    import_nixl(one_machine=True)
    assert os.environ["UCX_NET_DEVICES"] == "mlx5_0:1"
