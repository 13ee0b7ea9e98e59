"""What we call of NIXL, and the one place that imports it. Leaves what the calls mean together to `carrier`.

The names and parameters are NIXL's own (`nixl._api`), so that its module is the real thing and nothing stands in
between. Tests bind every call against a table of its signatures.
"""

from __future__ import annotations

import importlib
import os
from typing import Any, Literal, Protocol, cast

State = Literal["DONE", "PROC", "ERR"]
Descriptor = tuple[int, int, int]  # address, bytes, number of the device


class NixlMissing(Exception):
    """NIXL cannot be had here; the message says why."""


class NixlAgent(Protocol):
    """One agent. Of a transfer that is under way nothing is known but its state, so somebody has to ask for it."""

    def register_memory(self, reg_list: list[tuple[int, int, int, str]], mem_type: str, backends: list[str]) -> Any: ...

    def deregister_memory(self, dereg_list: Any, backends: list[str]) -> None: ...

    def get_agent_metadata(self) -> bytes: ...

    def add_remote_agent(self, metadata: bytes) -> bytes | str:
        """Its name."""
        ...

    def remove_remote_agent(self, agent: str | bytes) -> None: ...

    def get_xfer_descs(self, descs: list[Descriptor], mem_type: str) -> Any: ...

    def initialize_xfer(
        self,
        operation: Literal["READ", "WRITE"],
        local_descs: Any,
        remote_descs: Any,
        remote_agent: str,
        *,
        backends: list[str],
    ) -> Any: ...

    def transfer(self, handle: Any) -> State: ...

    def check_xfer_state(self, handle: Any) -> State: ...

    def release_xfer_handle(self, handle: Any) -> None: ...

    def get_new_notifs(self, backends: list[str]) -> dict[str, list[bytes]]: ...


class NixlApi(Protocol):
    """The module `nixl._api`, as far as we use it."""

    def nixl_agent_config(self, *, enable_prog_thread: bool, backends: list[str]) -> Any: ...

    def nixl_agent(self, agent_name: str, nixl_conf: Any) -> NixlAgent: ...


def import_nixl(*, one_machine: bool) -> NixlApi:
    """The installed package. `one_machine`: its sockets listen on the loopback alone. Raises NixlMissing."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # it would print into our output
    if one_machine:
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
    try:
        return cast(NixlApi, importlib.import_module("nixl._api"))
    except (ImportError, OSError, RuntimeError) as error:  # a library of CUDA that is missing is an OSError
        raise NixlMissing(f"nixl cannot be imported: {error}") from error
