"""Labels of callers in the metrics: allowed names only, bounded, from header and field."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.tokenizer import labels
from services.tokenizer.errors import ApiError
from services.tokenizer.labels import CustomLabels
from tests.tokenizer.conftest import Launcher


def counts(text: str, name: str) -> dict[tuple[str, str, str], float]:
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples if s.name == name]
    return {(s.labels["team"], s.labels["app"], s.labels["status"]): s.value for s in samples}


async def test_requests_are_counted_by_their_labels(launch: Launcher) -> None:
    service = await launch(metrics_custom_labels="team, app")
    async with httpx.AsyncClient(base_url=service.url, timeout=20) as client:
        header = {"x-custom-labels": '{"team": "red", "app": "one", "unknown": "x"}'}
        body: dict[str, Any] = {"input_ids": [[5, 6], [7]], "sampling_params": {"max_new_tokens": 4}}
        for fields in ({}, {"stream": True}, {"custom_labels": {"app": "two"}}):
            assert (await client.post("/generate", json={**body, **fields}, headers=header)).status_code == 200
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "n": 2}
        assert (await client.post("/v1/chat/completions", json=chat, headers=header)).status_code == 200
        assert (await client.post("/generate", json=body)).status_code == 200  # without labels
        text = (await client.get("/metrics")).text
        asked = counts(text, "radixfleet_labelled_requests_total")
        assert asked == {("red", "one", "finished"): 3.0, ("red", "two", "finished"): 1.0}
        made = counts(text, "radixfleet_labelled_generation_tokens_total")
        assert made == {("red", "one", "finished"): 2 * 8 + 4.0, ("red", "two", "finished"): 8.0}
        read = counts(text, "radixfleet_labelled_prompt_tokens_total")
        assert read[("red", "two", "finished")] == 3.0
        for wrong, param in (
            ({"json": {**body, "custom_labels": {"mood": "good"}}}, "custom_labels"),
            ({"json": body, "headers": {"x-custom-labels": "team=red"}}, "x-custom-labels"),
        ):
            answer = await client.post("/generate", **wrong)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_without_names_the_field_is_refused(client: httpx.AsyncClient) -> None:
    answer = await client.post("/generate", json={"text": "x", "custom_labels": {"team": "red"}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "custom_labels")
    header = {"x-custom-labels": '{"team": "red"}'}
    assert (await client.post("/generate", json={"text": "x"}, headers=header)).status_code == 200
    assert "radixfleet_labelled" not in (await client.get("/metrics")).text


def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labels, "MAX_SETS", 2)
    custom = CustomLabels("a")
    assert [custom.read(None, {"a": value}) for value in ("x", "y", "z", "x")] == [("x",), ("y",), ("other",), ("x",)]
    assert custom.read(None, {"a": "y" * 1000}) == ("other",)
    with pytest.raises(ApiError):
        custom.read("[" * 10_000, None)
    for bad in ("a-b", "1a", "a,a", "model_name", "service_id"):
        with pytest.raises(ValueError, match="cannot be the name"):
            CustomLabels(bad)
