"""Runtime: a server for this program alone, started with it and always stopped.

Leaves the process to local_server and the requests to the endpoint.
"""

from __future__ import annotations

import asyncio
import subprocess
import weakref
from collections.abc import AsyncIterator, Generator, Sequence
from types import TracebackType
from typing import Any, NoReturn

from radixfleet import parent_watch
from radixfleet.backend.endpoint import DEFAULT_TIMEOUT_S, RuntimeEndpoint
from radixfleet.backend.errors import Unsupported
from radixfleet.backend.tokens import ServerTokenizer
from radixfleet.engine_calls import generate, generate_async
from radixfleet.local_server import LocalServer
from radixfleet.server_args import ServerArgs

DEFAULT_READY_TIMEOUT_S = 600.0


class Runtime:
    """Starts `radixfleet serve` and waits until it is ready. Raises ServerFailed with its last lines.

    Keywords are flags: `model_path="..."` is --model-path, `disable_radix_cache=True` a switch. Those of `server_args`
    hold where no keyword says otherwise. Use it as a context
    manager, or call shutdown(); at the latest it stops with this process, however that ends.
    """

    def __init__(
        self,
        log_level: str = "error",
        *,
        ready_timeout: float = DEFAULT_READY_TIMEOUT_S,
        timeout: float = DEFAULT_TIMEOUT_S,
        server_args: ServerArgs | None = None,
        **flags: Any,
    ) -> None:
        wishes = {"log_level": log_level, **(vars(server_args) if server_args else {}), **flags}
        self._server = LocalServer(*flags_of(wishes), ready_timeout=ready_timeout)
        self._server.start()
        watcher = parent_watch.start(self._server.process.pid)
        self._stop = weakref.finalize(self, _stop, self._server, watcher)
        self.url = self._server.url
        self.generate_url = f"{self.url}/generate"
        self.endpoint = RuntimeEndpoint(self.url, wishes.get("api_key"), timeout=timeout)

    def shutdown(self) -> None:
        """Stop the server. Does nothing the second time."""
        self.endpoint.close()
        self._stop()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def generate(
        self, prompt: str | Sequence[str], sampling_params: dict[str, Any] | None = None, **fields: Any
    ) -> Any:
        """The answer of /generate (a list for a list of prompts). Raises BackendError."""
        return generate(self.endpoint, prompt, sampling_params, fields)

    def async_generate(
        self, prompt: str | Sequence[str], sampling_params: dict[str, Any] | None = None, **fields: Any
    ) -> AsyncGeneration:
        """The same for an event loop: await the answer, or iterate over its text (of one prompt) as it is generated."""
        return AsyncGeneration(self.endpoint, prompt, sampling_params, fields)

    add_request = async_generate

    def cache_prefix(self, prefix: str) -> None:
        """Compute and cache a prefix."""
        self.generate(prefix, {"max_new_tokens": 0})

    def encode(self, prompt: str | Sequence[str]) -> NoReturn:
        """For embedding models, of which there are none here. Raises Unsupported."""
        raise Unsupported("the served models generate text; there are no embeddings (for token ids: get_tokenizer)")

    def get_tokenizer(self) -> ServerTokenizer:
        """`encode` and `decode` as the model does them."""
        return self.endpoint.get_tokenizer()

    def flush_cache(self) -> None:
        self.endpoint.flush_cache()

    def get_server_info(self) -> dict[str, Any]:
        return self.endpoint.get_server_info()

    async def get_server_info_async(self) -> dict[str, Any]:
        return await asyncio.to_thread(self.get_server_info)


class AsyncGeneration:
    """A generation that starts when it is awaited or iterated."""

    def __init__(self, endpoint: RuntimeEndpoint, prompt: Any, sampling_params: Any, fields: dict[str, Any]) -> None:
        self._asked = (endpoint, prompt, sampling_params)
        self._fields = fields

    def __await__(self) -> Generator[Any, None, Any]:
        return generate_async(*self._asked, self._fields).__await__()

    async def __aiter__(self) -> AsyncIterator[str]:
        shown = 0
        async for event in await generate_async(*self._asked, {**self._fields, "stream": True}):
            text = event["text"]
            if text[shown:]:
                yield text[shown:]
            shown = len(text)


def flags_of(server_args: dict[str, Any]) -> list[str]:
    """Keywords as flags of `radixfleet serve`; None and False say nothing."""
    flags: list[str] = []
    for name, value in server_args.items():
        if value is None or value is False:
            continue
        flags.append("--" + name.replace("_", "-"))
        if value is not True:
            flags.append(str(value))
    return flags


def _stop(server: LocalServer, watcher: subprocess.Popen[bytes]) -> None:
    parent_watch.release(watcher)
    server.stop()
