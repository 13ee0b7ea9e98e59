"""Engine: a model to call from Python. A server of its own behind it, no HTTP code in front.

Leaves the server to Runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from radixfleet.engine_calls import generate, generate_async
from radixfleet.runtime import Runtime


class Engine:
    """`Engine(model_path=...)`; keywords are flags of `radixfleet serve`. Raises ServerFailed."""

    def __init__(self, **server_args: Any) -> None:
        self._runtime = Runtime(**server_args)
        self.endpoint = self._runtime.endpoint
        self.url = self._runtime.url

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        stream: bool = False,
        **fields: Any,
    ) -> Any:
        """Answers as /generate gives them: one, a list for a batch, or an iterator with `stream`.

        Other keywords are fields of the request (return_logprob, rid, ...). Raises BackendError.
        """
        wishes = {**fields, "input_ids": input_ids, "stream": stream or None}
        return generate(self.endpoint, prompt, sampling_params, wishes)

    async def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        stream: bool = False,
        **fields: Any,
    ) -> Any:
        """The same for an event loop; with `stream` it returns an async iterator."""
        wishes = {**fields, "input_ids": input_ids, "stream": stream or None}
        return await generate_async(self.endpoint, prompt, sampling_params, wishes)

    def flush_cache(self) -> None:
        """Empty the cache. Raises BackendError while requests run."""
        self.endpoint.flush_cache()

    def get_server_info(self) -> dict[str, Any]:
        return self.endpoint.get_server_info()

    def shutdown(self) -> None:
        self._runtime.shutdown()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
