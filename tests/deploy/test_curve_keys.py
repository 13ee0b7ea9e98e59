"""Keys between hosts: who has one of the right kind gets in, everybody else does not, and nobody notices them."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
import zmq
from structlog.testing import capture_logs

from radixfleet.cli import main
from radixfleet.keygen import KINDS, make_keys
from radixfleet.run_folder import run_folder
from shared import curve
from shared.messages.control import Ping, Pong
from shared.messages.edges import FromWorker, ToWorker
from shared.transport import Client, Server

ANY_PORT = "tcp://127.0.0.1:*"
PATIENCE_S = 20
ENDED = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


@pytest.fixture
def keys(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "keys"
    make_keys(folder, KINDS)
    yield folder
    curve.use(None)


class Door:
    """The scheduler's door for workers, answering pings."""

    def __init__(self, keys: Path) -> None:
        self.names: list[bytes] = []
        curve.use(curve.load(keys, "scheduler"))
        self.server: Server[Any] = Server(ANY_PORT, FromWorker, self._answer, edge="worker", peers=("worker",))
        self.endpoint = self.server.endpoint

    def _answer(self, identity: bytes, message: Any, frames: list[bytes]) -> None:
        self.names.append(identity)
        self.server.send(identity, Pong(message.nonce))


async def pong(endpoint: str) -> Pong:
    """The answer to a ping of a Client with the keys in use."""
    answer: asyncio.Future[Pong] = asyncio.get_running_loop().create_future()
    client: Client[Any] = Client(endpoint, "w/1", ToWorker, lambda m, _: answer.done() or answer.set_result(m))
    client.on_writable = lambda: client.try_send(Ping(7))
    client.on_writable()
    try:
        return await asyncio.wait_for(answer, PATIENCE_S)
    finally:
        client.close()


def is_answered(endpoint: str, ring: curve.Keyring | None, server_key: bytes = b"") -> bool:
    """Whether a raw socket with these keys gets its ping answered, or its connection ended instead."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.setsockopt(zmq.LINGER, 0)
        raw.setsockopt(zmq.IDENTITY, b"raw/1")
        if ring is not None:
            raw.curve_publickey, raw.curve_secretkey = ring.public, ring.secret
            raw.curve_serverkey = server_key or ring.of("scheduler")
        monitor = raw.get_monitor_socket(ENDED)
        raw.connect(endpoint)
        raw.send(msgspec.msgpack.encode(Ping(1)))
        poller = zmq.Poller()
        for socket in (raw, monitor):
            poller.register(socket, zmq.POLLIN)
        events = dict(poller.poll(PATIENCE_S * 1000))
        raw.disable_monitor()
        monitor.close(linger=0)
        assert events, "neither answered nor refused"
        return raw in events


async def test_a_worker_with_its_key_speaks_with_the_scheduler(keys: Path) -> None:
    door = Door(keys)
    ring = curve.load(keys, "worker")
    try:
        curve.hold(ring)
        assert await pong(door.endpoint) == Pong(7)
    finally:
        door.server.close()


@pytest.mark.parametrize("who", ["nobody", "a stranger", "a tokenizer"])
async def test_everybody_else_is_not_heard(keys: Path, tmp_path: Path, who: str) -> None:
    door = Door(keys)
    make_keys(tmp_path / "other", KINDS)
    rings = {
        "nobody": None,
        "a stranger": curve.load(tmp_path / "other", "worker"),
        "a tokenizer": curve.load(keys, "tokenizer"),
    }
    server_key = curve.load(keys, "scheduler").public
    try:
        assert not await asyncio.to_thread(is_answered, door.endpoint, rings[who], server_key)
        assert await asyncio.to_thread(is_answered, door.endpoint, curve.load(keys, "worker"))
        assert door.names == [b"raw/1"]
        assert (curve.refused() > 0) == (rings[who] is not None)
    finally:
        door.server.close()


async def test_a_client_speaks_only_to_the_server_it_meant(keys: Path, tmp_path: Path) -> None:
    """Another machine at the scheduler's address has no scheduler's key."""
    make_keys(tmp_path / "other", KINDS)
    door = Door(tmp_path / "other")
    try:
        assert not await asyncio.to_thread(is_answered, door.endpoint, curve.load(keys, "worker"))
        assert door.names == []
    finally:
        door.server.close()


async def test_a_key_of_its_own_can_be_withdrawn(keys: Path) -> None:
    make_keys(keys, ["worker-rack7"])
    ring = curve.load(keys, "worker-rack7")
    door = Door(keys)
    try:
        assert await asyncio.to_thread(is_answered, door.endpoint, ring)
    finally:
        door.server.close()
    (keys / "worker-rack7.key").unlink()
    door = Door(keys)
    try:
        assert not await asyncio.to_thread(is_answered, door.endpoint, ring)
    finally:
        door.server.close()


@pytest.fixture
def fresh_loggers() -> Iterator[None]:
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()


@pytest.mark.usefixtures("fresh_loggers")
async def test_tcp_without_keys_is_said_loudly_and_ipc_is_not(tmp_path: Path, keys: Path) -> None:
    with capture_logs() as lines:
        Server(f"ipc://{tmp_path}/s", FromWorker, lambda *_: None).close()
        curve.use(curve.load(keys, "scheduler"))
        Server(ANY_PORT, FromWorker, lambda *_: None).close()
        assert lines == []
        curve.use(None)
        Server(ANY_PORT, FromWorker, lambda *_: None).close()
    assert [(line["log_level"], line["event"][:13]) for line in lines] == [("warning", "NO ENCRYPTION")]


def test_keys_are_private_and_never_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "keys"
    assert main(["keygen", "--dir", str(folder)]) == 0
    secrets = {path.name: path.read_bytes() for path in folder.glob("*.key_secret")}
    assert set(secrets) == {f"{kind}.key_secret" for kind in KINDS}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.glob("*.key_secret")} == {0o600}
    assert main(["keygen", "--dir", str(folder), *KINDS, "worker-2"]) == 0
    assert {name: (folder / name).read_bytes() for name in secrets} == secrets
    assert (folder / "worker-2.key_secret").is_file()
    assert main(["keygen", "--dir", str(folder), "../x"]) == 1


def test_the_folder_of_the_sockets_is_private_whatever_the_umask(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        with run_folder(str(tmp_path)) as folder:
            assert folder.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(umask)


def test_a_secret_others_can_read_is_refused(keys: Path) -> None:
    (keys / "worker.key_secret").chmod(0o644)
    with pytest.raises(curve.KeysUnusable, match="chmod 600"):
        curve.load(keys, "worker")
    with pytest.raises(curve.KeysUnusable, match="radixfleet keygen"):
        curve.load(keys.parent, "worker")


@pytest.mark.system
def test_services_of_two_hosts_meet_over_tcp_with_keys(keys: Path, tmp_path: Path) -> None:
    """The real scheduler process; `radixfleet ping` from a host with keys and from one without."""
    health = f"ipc://{tmp_path}/health"
    env = {**os.environ, "RADIXFLEET_CURVE_DIR": str(keys)}
    binds = [word for name in ("tokenizer", "detokenizer", "worker") for word in (f"--{name}-bind", ANY_PORT)]
    command = [sys.executable, "-m", "services.scheduler", *binds, "--health-bind", health, "--log-format", "json"]
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        lines: list[dict[str, Any]] = []
        for line in process.stderr:
            lines.append(msgspec.json.decode(line))
            if lines[-1]["event"] == "scheduler listens":
                break
        assert not any("NO ENCRYPTION" in line["event"] for line in lines)
        worker_door = lines[-1]["endpoints"][2]

        def ping(endpoint: str, *flags: str, keys: str) -> int:
            arguments = [sys.executable, "-m", "shared.ping", endpoint, "--timeout", "20", *flags]
            return subprocess.run(arguments, env={**env, "RADIXFLEET_CURVE_DIR": keys}, check=False).returncode

        assert ping(worker_door, "--as", "worker", keys=str(keys)) == 0
        assert ping(worker_door, "--as", "tokenizer", "--timeout", "1", keys=str(keys)) == 1
        assert ping(worker_door, "--timeout", "1", keys="") == 1
        assert ping(health, keys="") == 0
    finally:
        process.terminate()
        assert process.wait(20) == 0
        process.stderr.close()
