"""How large the tiers are and where: from the operator's wishes to objects. Leaves their use to the service."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import structlog

from services.gpu_worker.compute import ComputeThread
from services.gpu_worker.tiers.disk import DiskTier
from services.gpu_worker.tiers.folder import Folder
from services.gpu_worker.tiers.host import HostTier
from services.gpu_worker.tiers.service import Reply, TierService
from services.gpu_worker.transfer.page_io import PageIO
from shared.config import WorkerConfig
from shared.messages.step import WorkerHello

log = structlog.get_logger(__name__)

GB = 1e9
FORMAT = 1
_FILE_OVERHEAD_BYTES = 4096


@dataclass(slots=True)
class Tiers:
    """What a worker has of them; `service` is None without any."""

    service: TierService | None = None
    host_pages: int = 0
    disk_pages: int = 0
    folder: Folder | None = None

    def close(self) -> None:
        if self.service is not None:
            self.service.close()
        if self.folder is not None:
            self.folder.close()


def make_tiers(config: WorkerConfig, hello: WorkerHello, pages: PageIO, compute: ComputeThread, reply: Reply) -> Tiers:
    """A disk tier that cannot be had is said and left out."""
    if hello.tp_size > 1 and (config.host_cache_gb or config.disk_cache_gb):
        log.warning("no cache tiers: the pages of a worker of several ranks are not in one process")
        return Tiers()
    host_pages = int(config.host_cache_gb * GB) // pages.page_bytes
    disk_pages, folder = 0, None
    if config.disk_cache_gb and config.disk_cache_dir:
        try:
            folder = Folder(config.disk_cache_dir, fingerprint(hello))
            disk_pages = int(config.disk_cache_gb * GB) // (pages.page_bytes + _FILE_OVERHEAD_BYTES)
        except OSError as error:
            log.warning("no disk tier", folder=config.disk_cache_dir, reason=str(error))
    if not (host_pages or disk_pages):
        return Tiers(folder=folder)
    host = HostTier(host_pages, pages.num_layers, pages.layer_bytes) if host_pages else None
    disk = DiskTier(folder.path, disk_pages, pages.page_bytes) if folder is not None and disk_pages else None
    log.info("cache tiers", host_pages=host_pages, disk_pages=disk_pages, folder=str(folder.path) if folder else "")
    return Tiers(TierService(pages, compute, host, disk, reply), host_pages, disk_pages, folder)


def fingerprint(hello: WorkerHello) -> str:
    """Equal where pages of one life mean the same in another."""
    parts = (FORMAT, hello.model_digest, hello.kv_dtype, hello.kv_layout, hello.page_size, hello.kv_bytes_per_page)
    return hashlib.sha256(repr(parts).encode()).hexdigest()
