"""GET /v1/models: the one model that is served."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from services.tokenizer import sse
from services.tokenizer.context import Context


def router(context: Context) -> APIRouter:
    routes = APIRouter(tags=["openai"])

    @routes.get("/v1/models")
    async def models() -> Response:
        """List what is served."""
        return _json({"object": "list", "data": [_model(context)]})

    @routes.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> Response:
        """Describe the served model; 404 for any other."""
        context.check_model(model_id)
        return _json(_model(context))

    return routes


def _model(context: Context) -> dict[str, Any]:
    return {
        "id": context.model.served_name,
        "object": "model",
        "created": context.started_at,
        "owned_by": "radixfleet",
        "root": context.model.name,
        "parent": None,
        "max_model_len": context.limit,
    }


def _json(value: dict[str, Any]) -> Response:
    return Response(sse.json_bytes(value), media_type="application/json")
