"""The tokenizer process: builds its rooms, serves HTTP, drains on the first signal. Leaves requests to the routes."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from importlib import metadata

import structlog

from services.tokenizer import app, http_server, model_folder, tls
from services.tokenizer.access import Access
from services.tokenizer.context import BodyBudget, Context
from services.tokenizer.errors import unavailable
from services.tokenizer.exposition import Exposition
from services.tokenizer.frontend import Frontend
from services.tokenizer.http_server import HttpServer
from services.tokenizer.labels import CustomLabels
from services.tokenizer.metrics import Measurements
from services.tokenizer.response_store import ResponseStore
from services.tokenizer.sampling import SeedSource
from services.tokenizer.text import TextEngine
from shared.clock import Clock, MonotonicClock
from shared.config import TokenizerConfig
from shared.service import announce_ready, new_incarnation, new_service_id

log = structlog.get_logger(__name__)

MAX_BODY_MEMORY = 256 << 20


class TokenizerService:
    """One life of the front door."""

    def __init__(self, config: TokenizerConfig, clock: Clock | None = None) -> None:
        self._config = config
        self._clock = clock or MonotonicClock()
        self._context: Context | None = None
        self._http: HttpServer | None = None
        self._listening = False
        self._announced = False
        self._empty = asyncio.Event()

    @property
    def context(self) -> Context:
        assert self._context is not None, "not started"
        return self._context

    @property
    def url(self) -> str:
        assert self._http is not None, "not started"
        return self._http.url

    async def start(self) -> None:
        config = self._config
        listener = None if config.reuse_port else self._listen()  # who shares a port takes its part when it can serve
        try:
            self._context = await self._build()
            listener = listener or self._listen()
        except BaseException:
            if listener is not None:
                listener.close()
            raise
        level = config.log_level_http or "warning"
        self._http = HttpServer(app.create(self._context), listener, level, tls.options(config))
        await self._http.start()
        self._listening = True
        if not self._context.frontend.why_not_ready():
            self._announce()

    def _listen(self) -> socket.socket:
        config = self._config
        return http_server.listen(
            config.host, config.port, config.http_fd, config.client_stall_timeout, reuse_port=config.reuse_port
        )

    async def drain(self) -> None:
        """Refuse what is new, finish what runs; what is left after the time-out ends with an error."""
        frontend = self.context.frontend
        frontend.draining = True
        if len(frontend.streams):
            frontend.on_idle = self._empty.set
            try:
                async with asyncio.timeout(self._config.drain_timeout):
                    await self._empty.wait()
            except TimeoutError:
                log.warning("not drained in time", streams=len(frontend.streams))
                frontend.fail_all(unavailable("The server is shutting down."))

    async def close(self) -> None:
        if self._http is not None:
            await self._http.stop()
        if self._context is not None:
            self._context.frontend.shut()
            self._context.sessions.shut()
            self._context.text.close()
            self._context.responses.close()

    def heartbeat(self) -> None:
        frontend = self.context.frontend
        frontend.heartbeat()
        self._abort_stalled()

    def _abort_stalled(self) -> None:
        """A client that reads nothing for too long loses its connection, and with it its request."""
        now = time.monotonic()
        for group in self.context.frontend.streams.groups():
            since = group.writing_since
            if since is not None and now - since > self._config.client_stall_timeout and group.writer is not None:
                log.info("client reads nothing", seconds=round(now - since, 1))
                group.writer.cancel()

    def _announce(self) -> None:
        if self._listening and not self._announced:
            self._announced = True
            log.info("ready", url=self.url, model=self.context.model.served_name)
            announce_ready()

    async def _build(self) -> Context:
        config = self._config
        loop = asyncio.get_running_loop()
        load: Callable[[], model_folder.ModelFolder] = lambda: model_folder.load(  # noqa: E731
            config.model_path,
            tokenizer_path=config.tokenizer_path,
            name=config.model_name,
            served_name=config.served_model_name,
            chat_template=config.chat_template,
            context_length=config.context_length,
        )
        model = await loop.run_in_executor(None, load)
        text = await loop.run_in_executor(None, TextEngine, model, config.text_threads)
        measurements = Measurements()
        labels = CustomLabels(config.metrics_custom_labels)
        service_id = new_service_id("tokenizer", config)
        frontend = Frontend(config.scheduler, service_id, new_incarnation(), self._clock, measurements)
        frontend.grace = config.worker_grace
        frontend.on_ready = self._announce
        return Context(
            config=config,
            model=model,
            text=text,
            vocabulary=text.vocabulary,
            frontend=frontend,
            measurements=measurements,
            exposition=Exposition(frontend, measurements, model.served_name, labels),
            labels=labels,
            seeds=SeedSource(config.random_seed),
            started_at=int(time.time()),
            version=_version(),
            bodies=BodyBudget(max(MAX_BODY_MEMORY, config.max_body_bytes)),
            access=Access.of(config),
            responses=ResponseStore.of(config),
        )


def _version() -> str:
    try:
        return metadata.version("radixfleet")
    except metadata.PackageNotFoundError:
        return "unknown"
