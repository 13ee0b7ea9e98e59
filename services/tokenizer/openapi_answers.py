"""What the OpenAPI document says of answers: failures of every route, streams, plain texts, empty ones.

Leaves bodies of requests to openapi.
"""

from __future__ import annotations

from typing import Any

JSON, PLAIN, STREAM = "application/json", "text/plain", "text/event-stream"
STREAMS = frozenset(
    ("/generate", "/script", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
)
TEXTS = frozenset(("/metrics", "/flush_cache"))
EMPTY = frozenset(("/health", "/ready", "/health_generate", "/abort_request", "/close_session", "/unpin", "/ping"))
OTHER_ENVELOPE = "/v1/messages"  # failures there have the form that its clients expect
_FAILURE = {"$ref": "#/components/schemas/ErrorBody"}


def complete(document: dict[str, Any]) -> None:
    """Give every operation the answers it really has."""
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _complete(path, operation["responses"])


def _complete(path: str, responses: dict[str, Any]) -> None:
    responses.pop("422", None)  # nothing here is refused by the framework
    succeeded = responses.setdefault("200", {"description": "Done"})
    if path in EMPTY:
        succeeded.pop("content", None)
    elif path in TEXTS:
        succeeded["content"] = {PLAIN: {"schema": {"type": "string"}}}
    elif path in STREAMS:
        succeeded["content"] = {JSON: {}, STREAM: {}}
    failure: dict[str, Any] = {JSON: {} if path.startswith(OTHER_ENVELOPE) else {"schema": _FAILURE}}
    for code, text in (("4XX", "The request is at fault"), ("503", "Not ready")):
        responses[code] = {"description": text, "content": failure}
