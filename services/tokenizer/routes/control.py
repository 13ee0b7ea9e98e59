"""What an operator changes while the server runs, and its load in the words of balancers; leaves doing it to others."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from services.tokenizer import body, sse
from services.tokenizer.context import Context
from services.tokenizer.errors import ApiError, invalid
from services.tokenizer.load import Load
from services.tokenizer.openapi import takes
from shared.logging import set_level

_DUMPS = "requests are not written to files"
REFUSED_LOGGING = {
    "dump_requests_folder": _DUMPS,
    "dump_requests_threshold": _DUMPS,
    "crash_dump_folder": _DUMPS,
}


class PauseBody(msgspec.Struct, kw_only=True):
    """POST /pause_generation. `abort` ends all requests, `retract` frees their pages, `in_place` keeps both."""

    mode: Literal["abort", "retract", "in_place"] | None = None


class ContinueBody(msgspec.Struct, kw_only=True):
    """POST /continue_generation."""


class LoggingBody(msgspec.Struct, kw_only=True):
    """POST /configure_logging. `log_requests_level` 0 switches the line per request off, too."""

    log_requests: bool | None = None
    log_requests_level: int | None = None
    log_level: Literal["debug", "info", "warning", "error", "critical"] | None = None


def router(context: Context) -> APIRouter:
    routes = APIRouter(tags=["operations"])
    _generation(routes, context)
    _logging(routes, context)
    _loads(routes, context)
    return routes


def _generation(routes: APIRouter, context: Context) -> None:
    @routes.post("/pause_generation", openapi_extra=takes(PauseBody, optional=True))
    async def pause_generation(request: Request) -> Response:
        """Dispatch no more steps until /continue_generation; new requests wait."""
        wishes, unknown = await body.read(request, context, PauseBody, {}, empty=True)
        mode = wishes.mode or "abort"
        await _operate(context, "pause", mode)
        return _done(f"Generation is paused ({mode}).", context.ignored(unknown))

    @routes.post("/continue_generation", openapi_extra=takes(ContinueBody, optional=True))
    async def continue_generation(request: Request) -> Response:
        """Go on after /pause_generation."""
        _, unknown = await body.read(request, context, ContinueBody, {}, empty=True)
        await _operate(context, "continue")
        return _done("Generation goes on.", context.ignored(unknown))


def _logging(routes: APIRouter, context: Context) -> None:
    @routes.post("/configure_logging", openapi_extra=takes(LoggingBody))
    async def configure_logging(request: Request) -> Response:
        """Change what is logged: a line per request at this door, the level of the scheduler and of this door."""
        wishes, unknown = await body.read(request, context, LoggingBody, REFUSED_LOGGING)
        level = wishes.log_requests_level
        if level is not None and not 0 <= level <= 3:
            raise invalid("log_requests_level must be at least 0 and at most 3.", "log_requests_level", "out_of_range")
        if wishes.log_level is not None:
            await _operate(context, "set_log_level", wishes.log_level)
            set_level(wishes.log_level)
        if wishes.log_requests is not None or level == 0:
            context.measurements.log_requests = bool(wishes.log_requests) and level != 0
        return _done("Logging is configured.", context.ignored(unknown))


def _loads(routes: APIRouter, context: Context) -> None:
    @routes.get("/v1/loads")
    async def loads() -> Response:
        """Load of the system and of every worker, for balancers in front of several systems."""
        status = context.frontend.status
        load = Load.of(status if context.frontend.fresh else None)
        size = status.page_size if status is not None else 0
        workers = [
            {
                "dp_rank": rank,
                "worker_id": worker.worker_id,
                "ready": worker.ready and not worker.draining,
                "num_running_reqs": worker.running,
                "max_running_reqs": worker.max_slots,
                "num_used_tokens": size * (worker.num_pages - worker.pages_free - worker.pages_cached),
                "num_cached_tokens": size * worker.pages_cached,
                "max_total_num_tokens": size * worker.num_pages,
            }
            for rank, worker in enumerate(status.workers if status is not None else ())
        ]
        aggregate = {
            "num_running_reqs": load.running,
            "num_waiting_reqs": load.waiting,
            "num_used_tokens": load.used_tokens,
            "max_total_num_tokens": load.capacity,
            "token_usage": load.usage,
            "gen_throughput": load.throughput,
            "cache_hit_rate": load.hit_rate,
            "utilization": load.utilization,
        }
        return _json({"version": context.version, "aggregate": aggregate, "loads": workers})

    @routes.head("/ping", include_in_schema=False)
    @routes.get("/ping", include_in_schema=False)
    async def ping() -> Response:
        """200 while this process lives and hears the scheduler."""
        context.frontend.refuse_unless_alive()
        return Response(status_code=200)


async def _operate(context: Context, name: Literal["pause", "continue", "set_log_level"], argument: str = "") -> None:
    done = await context.frontend.operate(name, argument)
    if not done.ok:
        raise ApiError(400, done.detail or f"The scheduler refused {name}.")


def _done(message: str, headers: dict[str, str]) -> Response:
    value = {"message": message, "status": "ok"}
    return Response(sse.json_bytes(value), headers=headers, media_type="application/json")


def _json(value: Any) -> Response:
    return Response(sse.json_bytes(value), media_type="application/json")
