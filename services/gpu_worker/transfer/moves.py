"""Everything that moves pages of one worker: to others and back, to its tiers and back. One face for the worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from services.gpu_worker.compute import ComputeThread
from services.gpu_worker.startup import StartedEngine
from services.gpu_worker.tiers.plan import make_tiers
from services.gpu_worker.transfer.address import bind_address
from services.gpu_worker.transfer.carrier import Carrier, open_carrier
from services.gpu_worker.transfer.page_io import PageIO
from services.gpu_worker.transfer.transfers import Transfers
from shared.config import WorkerConfig
from shared.messages.edges import KvOrder, KvTold
from shared.messages.kv import KvCancel, KvLoad, KvStore
from shared.messages.step import WorkerHello

Reply = Callable[[KvTold], object]


@dataclass(frozen=True, slots=True)
class Ways:
    """The pages, and how they leave this process. Of several ranks they have no way: none holds whole pages."""

    pages: PageIO
    endpoint: str
    carrier: Carrier | None


def open_ways(config: WorkerConfig, worker_id: str, started: StartedEngine) -> Ways:
    """In the compute thread, whose device it is. Raises NixlMissing."""
    pages = PageIO(started.engine.kv_cache)
    alone = started.hello.tp_size == 1
    endpoint = bind_address(config.kv_bind, config.scheduler, worker_id) if alone else ""
    return Ways(pages, endpoint, open_carrier(config, pages, endpoint))


class PageMoves:
    """Of one worker, as long as its process lives."""

    def __init__(
        self, config: WorkerConfig, ways: Ways, started: StartedEngine, compute: ComputeThread, reply: Reply
    ) -> None:
        self._pages = ways.pages
        self._transfers = Transfers(ways.pages, ways.endpoint, reply, ways.carrier)
        self._tiers = make_tiers(config, started.hello, ways.pages, compute, reply)

    def complete(self, hello: WorkerHello) -> WorkerHello:
        """With what the scheduler has to know."""
        return msgspec.structs.replace(
            hello,
            kv_endpoints=self._transfers.endpoints,
            host_pages=self._tiers.host_pages,
            disk_pages=self._tiers.disk_pages,
        )

    def begin(self, incarnation: int) -> None:
        self._transfers.begin(incarnation)
        if self._tiers.service is not None:
            self._tiers.service.begin(incarnation)

    def end(self) -> None:
        """Nothing of this life writes a page any more once this has returned, nor do its last steps before the next."""
        self._transfers.end()
        if self._tiers.service is not None:
            self._tiers.service.end()
        self._pages.fence()

    def close(self) -> None:
        self._transfers.close()
        self._tiers.close()

    def handle(self, message: KvOrder) -> None:
        tiers = self._tiers.service
        if isinstance(message, KvStore | KvLoad):
            if tiers is None:
                return  # none were offered
            if isinstance(message, KvStore):
                tiers.store(message)
            else:
                tiers.load(message)
            return
        self._transfers.handle(message)
        if isinstance(message, KvCancel) and tiers is not None:
            tiers.cancel(message.transfer_id)

    def gauges(self) -> dict[str, float]:
        return self._transfers.gauges()
