"""Constraints over real sockets: the real compiler and mask threads between fake peers that honour masks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from radixfleet.models import resolve
from shared.messages.request import Constraint
from shared.messages.stream import FinishReason
from tests.fake_model import generate
from tests.local_fleet import tokens
from tests.protocol.house import House
from tests.scheduler.guided_kit import text_of

pytestmark = pytest.mark.timeout(120)
DATE = Constraint("regex", "[0-9]{4}-[0-9]{2}-[0-9]{2}")
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "count": {"type": "integer", "maximum": 99, "minimum": 1}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
OBJECT = Constraint("json_schema", json.dumps(SCHEMA), complete_within_budget=True)
SLOW = Constraint("regex", "[a-z ]{300}")
PATIENT_S = 60.0  # the compiler starts in this very process: nobody may be taken for dead meanwhile


@pytest.fixture
def model() -> Path:
    return resolve(None)


async def test_answers_conform_and_bad_sources_never_get_in(house: House, model: Path) -> None:
    service = await house.scheduler(model_path=str(model), heartbeat_timeout=PATIENT_S)
    worker = await house.worker()
    detokenizer, frontend = await house.detokenizer(), await house.frontend()
    frontend.submit("plain", tokens(40, 1), 200)
    frontend.submit("bad", tokens(20), 20, constraint=Constraint("regex", "a(b"))
    frontend.submit("small", tokens(20), 3, constraint=OBJECT)
    frontend.submit("date", tokens(20), 20, constraint=DATE)
    frontend.submit("object", tokens(21), 30, constraint=OBJECT)
    await frontend.until(lambda: {"bad", "small"} <= set(frontend.record.rejected), 60)
    assert frontend.record.rejected["bad"].code == "bad_constraint"
    assert "unclosed" in frontend.record.rejected["bad"].detail
    assert "at least" in frontend.record.rejected["small"].detail
    await detokenizer.until(lambda: detokenizer.finished("plain", "date", "object"), 60)
    assert re.fullmatch(DATE.source, text_of(detokenizer.streams["date"].tokens))
    document = json.loads(text_of(detokenizer.streams["object"].tokens))
    assert document["colour"] in ("red", "green")
    assert 1 <= document["count"] <= 99
    assert detokenizer.streams["object"].finish.reason is FinishReason.STOP
    assert detokenizer.streams["plain"].tokens == generate(tokens(40, 1), 200)
    assert not {"bad", "small"} & set(detokenizer.streams)
    assert worker.error is None
    core = service.scheduler.core
    assert "bad" not in core.lifecycle.requests
    counters = core.compiling.counters()
    assert (counters["grammars_compiled"], counters["grammars_refused"], counters["compiles_killed"]) == (2, 1, 0)
    assert counters["grammar_cache_bytes"] > 0
    assert core.metrics.counters["constrained_requests"] == 4
    assert core.metrics.loop_cpu.snapshot()[-1] > 0


async def test_a_dead_worker_and_an_abort_in_the_middle_of_masks(house: House, model: Path) -> None:
    await house.scheduler(model_path=str(model), heartbeat_timeout=PATIENT_S)
    lost = await house.worker("w0", step_s=0.2)
    detokenizer, frontend = await house.detokenizer(), await house.frontend()
    frontend.submit("kept", tokens(20), 80, constraint=SLOW)
    frontend.submit("gone", tokens(21), 80, constraint=SLOW)
    await detokenizer.until(
        lambda: all(r in detokenizer.streams and len(detokenizer.streams[r].tokens) > 3 for r in ("kept", "gone")), 60
    )
    await lost.close()
    frontend.abort("gone")
    heir = await house.worker("w1")
    await detokenizer.until(lambda: detokenizer.finished("kept", "gone"), 60)
    stream = detokenizer.streams["kept"]
    assert re.fullmatch("[a-z ]{60,300}", text_of(stream.tokens))
    assert len(stream.tokens) == 80 or stream.finish.reason is FinishReason.STOP
    assert stream.retractions == 1
    assert detokenizer.streams["gone"].finish.reason is FinishReason.ABORT
    assert heir.error is None


async def test_without_a_tokenizer_constraints_are_refused_with_a_reason(house: House, tmp_path: Path) -> None:
    await house.scheduler(model_path=str(tmp_path))
    await house.worker()
    detokenizer, frontend = await house.detokenizer(), await house.frontend()
    frontend.submit("date", tokens(20), 20, constraint=DATE)
    await frontend.until(lambda: "date" in frontend.record.rejected)
    assert "constraints are not available" in frontend.record.rejected["date"].detail
    frontend.submit("plain", tokens(20), 5)
    await detokenizer.until(lambda: detokenizer.finished("plain"))


async def test_an_abort_while_compiling_ends_the_request(house: House, model: Path) -> None:
    await house.scheduler(model_path=str(model), heartbeat_timeout=PATIENT_S)
    await house.worker()
    detokenizer, frontend = await house.detokenizer(), await house.frontend()
    frontend.submit("early", tokens(20), 20, constraint=DATE)  # the compiler has just begun to start
    frontend.abort("early")
    await detokenizer.until(lambda: detokenizer.finished("early"))
    assert detokenizer.streams["early"].finish.reason is FinishReason.ABORT
    frontend.submit("later", tokens(20), 20, constraint=DATE)
    await detokenizer.until(lambda: detokenizer.finished("later"), 60)
