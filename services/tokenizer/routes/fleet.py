"""What an operator may ask of one worker; leaves carrying it out to the scheduler."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from services.tokenizer import sse
from services.tokenizer.context import Context
from services.tokenizer.errors import ApiError


def router(context: Context) -> APIRouter:
    routes = APIRouter(tags=["operations"])

    @routes.post("/workers/{worker_id}/drain")
    async def drain(worker_id: str) -> Response:
        """Move the worker's requests away, with their KV where that is cheaper, and let it end; 404 where it is not."""
        done = await context.frontend.operate("drain_worker", worker_id)
        if not done.ok:
            raise ApiError(404, done.detail or f"There is no worker {worker_id!r}.")
        value = {"message": f"Worker {worker_id} is draining.", "status": "ok"}
        return Response(sse.json_bytes(value), media_type="application/json")

    return routes
