"""Judges a finished text against its source, for constraints that could only be enforced in part.

Runs in the compiling process: patterns of a schema may take for ever. Leaves killing it to the compiler.
"""

from __future__ import annotations

from services.scheduler.constraint.canonical import Kind, read_json
from services.scheduler.constraint.errors import BadSource
from services.scheduler.constraint.limits import Limits
from services.scheduler.constraint.llguidance_matcher import LLGuidanceMatcher
from services.scheduler.constraint.protocol import Verdict
from services.scheduler.constraint.schema_check import walk
from services.scheduler.constraint.sources import Options, read_source
from services.scheduler.constraint.vocabulary import Vocabulary

_ENFORCED = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Formats that the masks keep, whatever else is lenient."""


def check_text(kind: Kind, source: str, text: str, limits: Limits, vocabulary: Vocabulary) -> Verdict:
    """The verdict on `text`; `source` is canonical."""
    if kind == "json_schema":
        return _check_json(source, text)
    grammar = read_source(kind, source, Options(), limits, vocabulary)
    matcher = LLGuidanceMatcher.build(grammar.text, vocabulary, limits)
    if matcher.error:
        return Verdict(False, matcher.error, known=False)
    ids = vocabulary.encode(text)
    taken = matcher.count_valid(ids)
    if taken < len(ids):
        good = vocabulary.decode(ids[:taken]).decode("utf-8", "replace")
        return Verdict(False, f"not allowed after {good[-40:]!r}")
    matcher.advance(ids)
    return Verdict(True) if matcher.is_complete else Verdict(False, "the text is not finished")


def _check_json(source: str, text: str) -> Verdict:
    from jsonschema import Draft7Validator, Draft202012Validator  # only this process pays for it
    from jsonschema.validators import validator_for

    try:
        document = read_json(text)
    except BadSource as bad:
        return Verdict(False, str(bad))
    schema = read_json(source)
    parts = [part for _, part, _ in walk(schema) if isinstance(part, dict)]
    old = any(isinstance(part.get("items"), list) for part in parts)
    kind = validator_for(schema, Draft7Validator if old else Draft202012Validator)
    error = next(kind(schema, format_checker=kind.FORMAT_CHECKER).iter_errors(document), None)
    if error is not None:
        return Verdict(False, f"{error.json_path}: {error.message[:300]}")
    for part in parts:
        name = part.get("format")
        if isinstance(name, str) and name not in _ENFORCED and name not in kind.FORMAT_CHECKER.checkers:
            return Verdict(False, f"the format {name} is not known", known=False)
    return Verdict(True)
