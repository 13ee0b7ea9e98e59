"""Declares the hand-decoded bodies in the OpenAPI document; leaves decoding to body."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from services.tokenizer import openapi_answers, schema
from services.tokenizer.access import Access
from services.tokenizer.errors import ErrorBody

BODIES: list[type[msgspec.Struct]] = [  # and whatever `takes` is told
    schema.ChatBody,
    schema.CompletionBody,
    schema.GenerateBody,
    schema.NativeSampling,
    schema.TokenizeBody,
    schema.DetokenizeBody,
    schema.AbortBody,
    schema.ChatTemplateBody,
    ErrorBody,
]
_REF = "#/components/schemas/{name}"


def takes(kind: type[msgspec.Struct], *, optional: bool = False) -> dict[str, Any]:
    """`openapi_extra` of a route that reads `kind` from its body."""
    if kind not in BODIES:
        BODIES.append(kind)
    return {
        "requestBody": {
            "required": not optional,
            "content": {"application/json": {"schema": {"$ref": _REF.format(name=kind.__name__)}}},
        },
    }


def install(app: FastAPI, access: Access) -> None:
    """Let the app describe itself with our schemas among its components, and the keys it asks for."""
    _, components = msgspec.json.schema_components(BODIES, ref_template=_REF)

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            described = get_openapi(title=app.title, version=app.version, routes=app.routes)
            described.setdefault("components", {}).setdefault("schemas", {}).update(components)
            openapi_answers.complete(described)
            if access.guarded:
                _ask_for_keys(described, access)
            app.openapi_schema = described
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _ask_for_keys(document: dict[str, Any], access: Access) -> None:
    """A bearer key wherever the door asks for one."""
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["security"] = [{"key": []}] if access.asks(path) else []
