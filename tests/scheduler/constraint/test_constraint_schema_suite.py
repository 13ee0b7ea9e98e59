"""The published JSON Schema test suite: no invalid text is accepted, but for fine points of `format`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from constraint_kit import accepts, build

GROUPS = json.loads((Path(__file__).parent / "json_schema_suite.json").read_text(encoding="utf-8"))["groups"]

LOOSE = {
    ("optional/format/date-time", "leap second"),
    ("optional/format/time", "leap second"),
    ("optional/format/date", "29 days in February"),
    ("optional/format/date", "2021 is not a leap year"),
    ("optional/ecmascript-regex", "zero-width whitespace"),  # Unicode no longer counts it as white space
}
"""(file, part of the description) of invalid texts that pass."""

STRICT = {
    "format",  # the suite takes it for a remark, here it is enforced
    "const",  # numbers are matched as they are written: 1.0 is not 1
    "enum",
    "type",
    "allOf",  # properties come in the order of the branches
    "optional/float-overflow",
    "optional/format/email",  # quoted local parts
    "optional/format/ipv6",  # IPv4 inside
    "optional/ecmascript-regex",
}
"""Files where some valid texts are refused: a mask may be too narrow, never too wide."""


@pytest.mark.parametrize("group", GROUPS, ids=[f"{g['file']}: {g['description']}"[:70] for g in GROUPS])
def test_published_instances(group: dict) -> None:
    matcher = build("json_schema", json.dumps(group["schema"]))
    refused = 0
    for description, text, valid in group["tests"]:
        accepted = accepts(matcher, text)
        if valid:
            refused += not accepted
        elif accepted:
            assert any(group["file"] == file and part in description for file, part in LOOSE), (description, text)
    assert refused == 0 or group["file"] in STRICT, refused


def test_the_suite_is_whole() -> None:
    assert len(GROUPS) >= 190
    assert sum(not valid for group in GROUPS for _, _, valid in group["tests"]) >= 400
