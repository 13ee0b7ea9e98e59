"""NIXL between agents of one process: real bytes, the recorded signatures, and faults on demand."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.gpu_worker.flashinfer_signatures import bind

Descriptors = list[tuple[int, int, int]]


class FakeNixlError(Exception):
    """NIXL's own exceptions have no base of their own either."""


@dataclass
class FakeRead:
    """A read; its bytes come when it is done, however late that is."""

    ours: Descriptors
    theirs: Descriptors
    of: FakeAgent
    posted: bool = False
    left: int = 0  # answers PROC before it is done
    stuck: bool = False
    fails: bool = False
    released: bool = False


@dataclass
class FakeNixl:
    """The module `nixl._api` of several agents that reach each other."""

    delay: int = 1
    fault: str = ""  # hang | error | raise | refuse | metadata | start
    on_read: Callable[[FakeRead], None] = lambda read: None
    agents: dict[str, FakeAgent] = field(default_factory=dict)
    calls: set[str] = field(default_factory=set)
    reads: list[FakeRead] = field(default_factory=list)

    def bind(self, name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.calls.add(name)
        return bind(name, *args, **kwargs)

    def unstick(self) -> None:
        self.fault = ""
        for read in self.reads:
            read.stuck = False

    def nixl_agent_config(self, *args: Any, **kwargs: Any) -> Any:
        return self.bind("nixl_agent_config.__init__", None, *args, **kwargs)

    def nixl_agent(self, *args: Any, **kwargs: Any) -> FakeAgent:
        a = self.bind("nixl_agent.__init__", None, *args, **kwargs)
        if self.fault == "start":
            raise FakeNixlError("NIXL_ERR_BACKEND")
        assert a["nixl_conf"]["enable_prog_thread"] is False  # it would take a core of its own
        agent = self.agents[a["agent_name"]] = FakeAgent(self, a["agent_name"])
        return agent


class FakeAgent:
    def __init__(self, net: FakeNixl, name: str) -> None:
        self._net = net
        self.name = name
        self.memory: list[tuple[int, int]] = []  # from, to
        self.met: set[str] = set()
        self.helped = 0

    def register_memory(self, *args: Any, **kwargs: Any) -> Any:
        a = self._net.bind("nixl_agent.register_memory", self, *args, **kwargs)
        assert (a["mem_type"], a["backends"]) == ("DRAM", ["UCX"])
        self.memory += [(address, address + size) for address, size, _, _ in a["reg_list"]]
        return a["reg_list"]

    def deregister_memory(self, *args: Any, **kwargs: Any) -> None:
        self._net.bind("nixl_agent.deregister_memory", self, *args, **kwargs)
        self.memory.clear()

    def get_agent_metadata(self, *args: Any) -> bytes:
        self._net.bind("nixl_agent.get_agent_metadata", self, *args)
        return f"metadata of {self.name}".encode()

    def add_remote_agent(self, *args: Any, **kwargs: Any) -> bytes:
        metadata = self._net.bind("nixl_agent.add_remote_agent", self, *args, **kwargs)["metadata"]
        if self._net.fault == "metadata" or not metadata.startswith(b"metadata of "):
            raise FakeNixlError("NIXL_ERR_MISMATCH")
        name = metadata.removeprefix(b"metadata of ").partition(b", ")[0]
        self.met.add(name.decode(errors="replace"))
        return name  # bytes, as NIXL's

    def remove_remote_agent(self, *args: Any, **kwargs: Any) -> None:
        name = self._net.bind("nixl_agent.remove_remote_agent", self, *args, **kwargs)["agent"]
        self.met.remove(name if isinstance(name, str) else name.decode(errors="replace"))  # NIXL takes both

    def get_xfer_descs(self, *args: Any, **kwargs: Any) -> Descriptors:
        a = self._net.bind("nixl_agent.get_xfer_descs", self, *args, **kwargs)
        assert a["mem_type"] == "DRAM"
        descriptors: Descriptors = a["descs"]
        return descriptors

    def initialize_xfer(self, *args: Any, **kwargs: Any) -> FakeRead:
        a = self._net.bind("nixl_agent.initialize_xfer", self, *args, **kwargs)
        assert a["operation"] == "READ"
        if a["remote_agent"] not in self.met:
            raise FakeNixlError("NIXL_ERR_NOT_FOUND")
        other = self._net.agents[a["remote_agent"]]
        for agent, descriptors in ((self, a["local_descs"]), (other, a["remote_descs"])):
            for address, size, _ in descriptors:
                if not any(start <= address and address + size <= end for start, end in agent.memory):
                    raise FakeNixlError("NIXL_ERR_NOT_FOUND")
        read = FakeRead(a["local_descs"], a["remote_descs"], other)
        self._net.reads.append(read)
        return read

    def transfer(self, *args: Any, **kwargs: Any) -> str:
        read: FakeRead = self._net.bind("nixl_agent.transfer", self, *args, **kwargs)["handle"]
        if self._net.fault == "refuse":
            return "ERR"
        read.posted, read.left, read.stuck = True, self._net.delay, self._net.fault == "hang"
        self._net.on_read(read)
        return self._state(read)

    def check_xfer_state(self, *args: Any, **kwargs: Any) -> str:
        read: FakeRead = self._net.bind("nixl_agent.check_xfer_state", self, *args, **kwargs)["handle"]
        assert read.posted
        assert not read.released
        if self._net.fault == "raise":
            raise FakeNixlError("NIXL_ERR_REMOTE_DISCONNECT")
        read.left -= 1
        return self._state(read)

    def release_xfer_handle(self, *args: Any, **kwargs: Any) -> None:
        read: FakeRead = self._net.bind("nixl_agent.release_xfer_handle", self, *args, **kwargs)["handle"]
        assert not read.released
        read.released = True

    def get_new_notifs(self, *args: Any, **kwargs: Any) -> dict[str, list[bytes]]:
        self._net.bind("nixl_agent.get_new_notifs", self, *args, **kwargs)
        self.helped += 1
        return {}

    def _state(self, read: FakeRead) -> str:
        if self._net.fault == "error":
            return "ERR"
        if read.stuck or read.left > 0 or not read.of.helped:
            return "PROC"  # the other side has to help with the first connection
        if read.fails:
            return "ERR"
        copy(read)
        return "DONE"


def copy(read: FakeRead) -> None:
    """What the network does, also of a read that nobody waits for any more."""
    for (to, size, _), (source, other, _) in zip(read.ours, read.theirs, strict=True):
        assert size == other
        ctypes.memmove(to, source, size)
