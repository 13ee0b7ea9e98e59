"""One fake backend and one real tokenizer service per test, in the test's event loop."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from tokenizers import Tokenizer

from services.tokenizer.service import TokenizerService
from shared.config import TokenizerConfig
from tests.tokenizer.fake_backend import FakeBackend
from tests.tokenizer.tiny_folder import write_model_folder


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop that serves users; disconnects look different on others."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_folder / "tokenizer.json"))


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rf") as name:  # short: ipc paths are bounded
        yield Path(name)


@pytest.fixture
async def backend(run_dir: Path, tokenizer: Tokenizer) -> AsyncIterator[FakeBackend]:
    fake = FakeBackend(run_dir, tokenizer)
    await fake.start()
    yield fake
    await fake.stop()


Launcher = Callable[..., Any]


@pytest.fixture
async def launch(backend: FakeBackend, model_folder: Path) -> AsyncIterator[Launcher]:
    """Start a service with these configuration fields; it is ready when this returns."""
    async with AsyncExitStack() as stack:

        async def start(**fields: Any) -> TokenizerService:
            defaults = {"model_path": str(model_folder), "served_model_name": "tiny", "port": 0}
            config = TokenizerConfig(**{**defaults, "scheduler": backend.scheduler, "text_threads": 2, **fields})
            service = TokenizerService(config)
            await service.start()
            stack.push_async_callback(service.close)
            frontend = service.context.frontend
            ready, announce = asyncio.Event(), frontend.on_ready
            frontend.on_ready = lambda: (announce(), ready.set())
            if frontend.why_not_ready():
                async with asyncio.timeout(10):
                    await ready.wait()
            return service

        yield start


@pytest.fixture
async def service(launch: Launcher) -> TokenizerService:
    return await launch()  # type: ignore[no-any-return]


@pytest.fixture
async def client(service: TokenizerService) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=service.url, timeout=20) as opened:
        yield opened
