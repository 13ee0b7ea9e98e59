"""Requests drawn from our own OpenAPI document: answers are what the document says, and never a server error."""

from __future__ import annotations

import asyncio
import os
import warnings

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from services.tokenizer.service import TokenizerService
from tests.tokenizer.fake_backend import FakeBackend

with warnings.catch_warnings():  # of its dependencies, while they are imported
    warnings.simplefilter("ignore")
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
EXAMPLES = int(os.environ.get("RADIXFLEET_DOOR_EXAMPLES", "4"))  # of each operation


def talk(url: str) -> dict[str, int]:
    """How many requests each operation got. Raises what schemathesis finds wrong."""
    document = schemathesis.openapi.from_url(f"{url}/openapi.json")
    counts: dict[str, int] = {}
    for found in document.get_all_operations():
        operation = found.ok()

        @given(case=operation.as_strategy())
        @settings(
            max_examples=EXAMPLES,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def ask(case: schemathesis.Case) -> None:
            counts[case.operation.label] = counts.get(case.operation.label, 0) + 1
            case.call_and_validate(base_url=url, checks=CHECKS, timeout=20)

        ask()
    return counts


@pytest.mark.timeout(240)
async def test_answers_are_what_the_document_says(service: TokenizerService, backend: FakeBackend) -> None:
    counts = await asyncio.to_thread(talk, service.url)
    assert {"POST /generate", "POST /v1/chat/completions", "POST /v1/completions", "GET /health"} <= set(counts)
    assert sum(counts.values()) > 2 * len(counts)
    await backend.until(lambda: not backend.live)
    assert not service.context.frontend.streams.live()
