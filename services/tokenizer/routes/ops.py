"""Health, metrics, descriptions and the commands of an operator; leaves carrying them out to the scheduler."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse, Response

from services.tokenizer import body, calls, requests, sse
from services.tokenizer.access import SECRETS
from services.tokenizer.context import Context
from services.tokenizer.errors import ApiError, invalid, unavailable
from services.tokenizer.load import Load
from services.tokenizer.openapi import takes
from services.tokenizer.requests import Prompt
from services.tokenizer.schema import AbortBody
from shared.messages.request import SamplingParams

HEALTH_GENERATE_TIMEOUT_S = 20.0


def router(context: Context) -> APIRouter:
    routes = APIRouter(tags=["operations"])
    _health(routes, context)
    _describe(routes, context)
    _command(routes, context)
    return routes


def _health(routes: APIRouter, context: Context) -> None:
    frontend = context.frontend

    @routes.head("/health", include_in_schema=False)
    @routes.get("/health")
    async def health() -> Response:
        """200 while this process lives and hears the scheduler."""
        frontend.refuse_unless_alive()
        return Response(status_code=200)

    @routes.head("/ready", include_in_schema=False)
    @routes.get("/ready")
    async def ready() -> Response:
        """200 while a request would run now; otherwise 503 says why not."""
        frontend.refuse_unless_ready()
        return Response(status_code=200)

    @routes.get("/health_generate")
    async def health_generate() -> Response:
        """200 after one token was really generated."""
        try:
            async with asyncio.timeout(HEALTH_GENERATE_TIMEOUT_S):
                await _generate_one(context)
        except (ApiError, TimeoutError) as failure:
            raise unavailable(f"No token was generated: {str(failure) or 'it took too long'}") from None
        return Response(status_code=200)

    if not context.config.enable_metrics:
        return

    @routes.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text of the whole system."""
        text = await context.text.run(context.exposition.text, calls.current().tenant)
        return Response(text, media_type=CONTENT_TYPE_LATEST)


async def _generate_one(context: Context) -> None:
    token = context.model.eos_ids[0] if context.model.eos_ids else 0
    params = SamplingParams(max_tokens=1, temperature=0.0)
    rid = f"health-{requests.new_rid()}"
    prompt = Prompt(ids=array("i", [token]), params=params, wished=1, default_max_tokens=1, rid=rid)
    group = requests.make_group([prompt], context.seeds)
    try:
        context.frontend.submit(group)
        while not group.done:
            await group.wait()
            for stream in group.take_ready():
                if stream.error is not None:
                    raise stream.error
    finally:
        context.frontend.close(group)


def _describe(routes: APIRouter, context: Context) -> None:
    @routes.get("/get_model_info")
    @routes.get("/model_info")
    async def model_info() -> Response:
        """What is served."""
        return _json(
            {
                "model_path": context.model.name,
                "tokenizer_path": context.model.tokenizer_path,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": "default",
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "served_model_name": context.model.served_name,
                "max_model_len": context.limit,
                "vocab_size": context.model.vocab_size,
            }
        )

    @routes.get("/get_server_info")
    @routes.get("/server_info")
    async def server_info() -> Response:
        """Configuration and state."""
        return _json(_server_info(context))

    @routes.get("/get_load")
    async def get_load() -> Response:
        """Load of every worker; what waits is counted at the first."""
        status = context.frontend.status
        size = status.page_size if status is not None else 0
        return _json(
            [
                {
                    "dp_rank": rank,
                    "worker_id": worker.worker_id,
                    "num_reqs": worker.running,
                    "num_waiting_reqs": status.num_waiting if status is not None and rank == 0 else 0,
                    "num_tokens": size * (worker.num_pages - worker.pages_free - worker.pages_cached),
                }
                for rank, worker in enumerate(status.workers if status is not None else ())
            ]
        )

    @routes.get("/workers")
    async def workers() -> Response:
        """Every worker as the scheduler sees it."""
        status = context.frontend.status
        found = status.workers if status is not None else ()
        return _json([_named(worker) for worker in found])


def _server_info(context: Context) -> dict[str, Any]:
    status = context.frontend.status
    load = Load.of(status if context.frontend.fresh else None)
    gauges: dict[str, float] = {}
    for service in status.services if status is not None else ():
        if service.service == "worker":
            gauges.update(service.gauges)
    return {
        **{name: value for name, value in msgspec.to_builtins(context.config).items() if name not in SECRETS},
        "model_path": context.model.name,
        "served_model_name": context.model.served_name,
        "tokenizer_path": context.model.tokenizer_path,
        "context_length": context.model.context_length,
        "max_total_num_tokens": load.capacity,
        "max_req_input_len": context.limit,
        "page_size": status.page_size if status is not None else None,
        "ready": not context.frontend.why_not_ready(),
        "internal_states": [
            {
                "last_gen_throughput": load.throughput,
                "num_running_reqs": load.running,
                "num_queue_reqs": load.waiting,
                "cache_hit_rate": load.hit_rate,
                "memory_usage": {
                    "weight": gauges.get("weight_bytes", 0.0) / (1 << 30),
                    "kvcache": gauges.get("kv_bytes", 0.0) / (1 << 30),
                    "token_capacity": load.capacity,
                    "graph": 0.0,
                },
                "epoch": status.epoch if status is not None else None,
            }
        ],
        "version": context.version,
    }


def _command(routes: APIRouter, context: Context) -> None:
    @routes.get("/flush_cache")
    @routes.post("/flush_cache")
    async def flush_cache() -> Response:
        """Empty the radix cache; 400 while requests run."""
        done = await context.frontend.operate("flush_cache")
        if not done.ok:
            reason = done.detail or "requests are running"
            raise ApiError(400, f"The cache was not flushed: {reason}.", code="cache_in_use")
        return PlainTextResponse("Cache flushed.\n")

    @routes.post("/abort_request", openapi_extra=takes(AbortBody))
    async def abort_request(request: Request) -> Response:
        """End the request with exactly this id, or all of them; unknown ids are no error."""
        wishes, unknown = await body.read(request, context, AbortBody, {})
        if wishes.abort_all:
            calls.current().check_abort_all()
            await context.frontend.operate("abort_all")
        elif wishes.rid:
            context.frontend.abort(wishes.rid)
        else:
            raise invalid("Give rid or abort_all.", "rid", "missing_required_parameter")
        return Response(status_code=200, headers=context.ignored(unknown))


def _named(message: msgspec.Struct) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


def _json(value: Any) -> Response:
    return Response(sse.json_bytes(value), media_type="application/json")
