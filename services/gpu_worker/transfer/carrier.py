"""NIXL under one worker's transfers: memory that others may read, and reading theirs. Leaves the order to its users.

Only `SLOTS` pieces of memory each way are registered, never the cache: who knows this agent can read what is on its way
out and nothing else, and a read that nobody waits for any more ends in a place where no page is.
Not for more than one thread at a time; NIXL's own thread is off, since it never sleeps: who waits asks again and again.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import structlog
import torch

from services.gpu_worker.transfer.nixl_api import NixlApi, NixlMissing, State, import_nixl
from services.gpu_worker.transfer.page_io import PageIO
from shared import curve
from shared.config import WorkerConfig
from shared.messages.kv import KvOffer

SLOT_BYTES = 16 << 20
SLOTS = 4
MAX_AGENTS = 64  # that are remembered; the one not met for the longest time is forgotten
SCHEME = "nixl:"
_BACKENDS = ["UCX"]

log = structlog.get_logger(__name__)
T = TypeVar("T")


class NixlFailed(Exception):
    """A call of NIXL went wrong: the socket has to do."""


class Slot:
    """A piece of registered memory."""

    __slots__ = ("memory",)

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory  # uint8 [slot_bytes]

    @property
    def address(self) -> int:
        return self.memory.data_ptr()


class Carrier:
    """Raises NixlMissing where an agent cannot be started or has no memory."""

    def __init__(self, api: NixlApi, pages: PageIO) -> None:
        self.name = f"radixfleet-{secrets.token_hex(8)}"  # of one process: who comes back is somebody else
        self.slot_bytes = -(-max(SLOT_BYTES, pages.page_bytes) // 8) * 8
        self.works = True
        self._known: dict[str, bytes] = {}  # agents by name, with their metadata
        try:
            self._memory = pages.staging(2 * SLOTS * self.slot_bytes)
            self._agent = api.nixl_agent(self.name, api.nixl_agent_config(enable_prog_thread=False, backends=_BACKENDS))
            whole = (self._memory.data_ptr(), self._memory.numel(), self.device, "")
            self._registered = self._agent.register_memory([whole], self.memory, _BACKENDS)
            self.metadata = self._agent.get_agent_metadata()
        except Exception as error:  # NIXL has a class of its own for each kind of failure
            raise NixlMissing(f"no agent of NIXL: {type(error).__name__}: {error}") from error
        slots = [Slot(part) for part in self._memory.split(self.slot_bytes)]
        self.to_send, self.to_read = slots[:SLOTS], slots[SLOTS:]

    @property
    def memory(self) -> Literal["DRAM", "VRAM"]:
        """The kind of it, in NIXL's words."""
        return "VRAM" if self._memory.is_cuda else "DRAM"

    @property
    def device(self) -> int:
        return max(self._memory.get_device(), 0)

    def enter_thread(self) -> None:
        """In the thread that will use it from now on."""
        if self._memory.is_cuda:
            torch.cuda.set_device(self._memory.device)  # UCX looks for the memory in the thread's current context

    def read(self, offer: KvOffer, metadata: bytes, size: int, into: Slot) -> Any:
        """Begin to read `size` bytes; the handle. Raises NixlFailed."""
        self._meet(offer.agent, metadata)
        return _tried(lambda: self._begin(offer, size, into))

    def state(self, handle: Any) -> State:
        try:
            return self._agent.check_xfer_state(handle)
        except Exception as error:  # that the other side is gone comes as an exception, too
            log.info("nixl: a read failed", reason=f"{type(error).__name__}: {error}")
            return "ERR"

    def release(self, handle: Any) -> None:
        """Of a read that is not done NIXL may go on writing into its slot."""
        try:
            self._agent.release_xfer_handle(handle)
        except Exception as error:  # what cannot be given up is kept by NIXL until the agent ends
            log.info("nixl: a read cannot be given up", reason=f"{type(error).__name__}: {error}")

    def help_others(self) -> None:
        """Some networks need this side to move a read along, all of them to be connected."""
        if not self.works:
            return
        try:
            self._agent.get_new_notifs(_BACKENDS)
        except Exception as error:
            self.works = False
            log.warning("nixl: nothing is offered any more", reason=f"{type(error).__name__}: {error}")

    def close(self) -> None:
        try:
            self._agent.deregister_memory(self._registered, _BACKENDS)
        except Exception as error:  # reads under way still use it
            log.info("nixl: memory stays registered", reason=f"{type(error).__name__}: {error}")

    def _begin(self, offer: KvOffer, size: int, into: Slot) -> Any:
        ours = self._agent.get_xfer_descs([(into.address, size, self.device)], self.memory)
        theirs = self._agent.get_xfer_descs([(offer.address, size, offer.device)], offer.memory)
        handle = self._agent.initialize_xfer("READ", ours, theirs, offer.agent, backends=_BACKENDS)
        if self._agent.transfer(handle) == "ERR":
            self.release(handle)
            raise NixlFailed("the read was not begun")
        return handle

    def _meet(self, name: str, metadata: bytes) -> None:
        if self._known.get(name) != metadata:
            met = _tried(lambda: self._agent.add_remote_agent(metadata))
            if met not in (name, name.encode()):  # it may be any bytes
                self._part_from(met, metadata)
                raise NixlFailed(f"the metadata of {name} is another agent's")
        self._known.pop(name, None)  # now it is the last one met
        self._known[name] = metadata
        if len(self._known) > MAX_AGENTS:
            oldest = next(iter(self._known))
            del self._known[oldest]
            _tried(lambda: self._agent.remove_remote_agent(oldest))

    def _part_from(self, met: str | bytes, metadata: bytes) -> None:
        """Of an agent that came under another name; who is known by the same metadata has lost nothing by it."""
        known = next((name for name in self._known if met in (name, name.encode())), None)
        if known is not None and self._known[known] == metadata:
            return
        if known is not None:
            del self._known[known]
        _tried(lambda: self._agent.remove_remote_agent(met))


def _tried(call: Callable[[], T]) -> T:
    try:
        return call()
    except NixlFailed:
        raise
    except Exception as error:  # NIXL has a class of its own for each kind of failure
        raise NixlFailed(f"{type(error).__name__}: {error}") from error


def open_carrier(config: WorkerConfig, pages: PageIO, endpoint: str) -> Carrier | None:
    """What `--page-transport` asks for; None: the sockets alone. Raises NixlMissing where NIXL was asked for by name.

    By itself it is taken between GPUs, and where it opens no more than the sockets do: whoever reaches UCX's ports may
    read and write this process's memory (docs/security.md).
    """
    wish = config.page_transport
    if wish == "zmq" or not endpoint or (wish == "auto" and not pages.on_gpu):
        return None
    if wish == "auto" and (curve.in_use() or not endpoint.startswith("tcp:")):
        log.info("pages travel by sockets: NIXL asks for no keys, nor for the user, so it takes --page-transport nixl")
        return None
    try:
        carrier = Carrier(import_nixl(one_machine=endpoint.startswith(("ipc:", "tcp://127."))), pages)
    except NixlMissing as error:
        if wish == "nixl":
            raise
        log.info("pages travel by sockets", reason=str(error))
        return None
    log.info("pages travel by NIXL where the other worker has it", agent=carrier.name, memory=carrier.memory)
    return carrier
