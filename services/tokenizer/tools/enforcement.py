"""Joins a request's own constraint with the grammar of its tools. Leaves the frames of calls to grammars.

Explains refusals, too: the compiler speaks of places in a source that the client never saw.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from services.tokenizer.errors import ApiError, invalid
from services.tokenizer.tools.definitions import Toolbox
from services.tokenizer.tools.formats import Format
from shared.messages.request import Constraint

KIND: Literal["structural_tag"] = "structural_tag"
_PLACE = re.compile(r"#/format\S*?(?=: )")
_ANSWER = re.compile(r"#/format/elements/[1-9]/(json_schema|pattern|grammar)")  # the answer's form stands last
_BUDGET = re.compile(r"at least (\d+) tokens, but max_new_tokens is (\d+)")
_TAG = re.compile(r"/tags/(\d+)/")


def constrain(own: Constraint | None, box: Toolbox | None, form: Format) -> Constraint | None:
    """The one constraint of a request with tools. Raises ApiError where its own cannot stand beside calls."""
    if box is None:
        return own
    answer = None
    if own is not None:
        if box.mode == "required" and own.kind != "json_schema":
            raise invalid(f"{own.kind} speaks of a text, but tool_choice asks for a call.", own.kind, "invalid_value")
        answer = _as_form(own) if box.mode == "auto" else None
    source = {"type": KIND, "format": form.form(box, answer)}
    return Constraint(
        kind=KIND,
        source=msgspec.json.encode(source).decode(),
        any_whitespace=own is not None and own.any_whitespace,
        # Free text has no shape to be completed to: steering it would bend its words and call a cut answer finished.
        complete_within_budget=box.mode == "required" if own is None else own.complete_within_budget,
        jump_forward=own is None or own.jump_forward,
        refuse_small_budget=box.mode == "required",
    )


def _as_form(own: Constraint) -> dict[str, Any]:
    if own.best_effort:
        raise invalid("best_effort cannot be used with tools.", "best_effort", "invalid_value")
    if own.kind == "json_schema":
        try:
            return {"type": "json_schema", "json_schema": msgspec.json.decode(own.source)}
        except (msgspec.DecodeError, RecursionError) as error:
            raise invalid(f"json_schema: {error}", "json_schema", "invalid_value") from None
    if own.kind == "regex":
        return {"type": "regex", "pattern": own.source}
    if own.kind == "ebnf":
        return {"type": "grammar", "grammar": own.source}
    raise invalid(f"{own.kind} cannot be used with tools.", own.kind, "invalid_value")


def explain(error: ApiError, box: Toolbox | None) -> ApiError:
    """A refusal of the grammar in terms of the tool that caused it."""
    if box is None or error.param != KIND:
        return error
    place = _PLACE.search(error.message)
    if place is None and (needed := _BUDGET.search(error.message)) is not None:
        text = f"A complete call takes at least {needed[1]} tokens, but max_tokens is {needed[2]}."
        return ApiError(error.status, text, param="max_tokens", code=error.code)
    tags = _TAG.findall(place[0]) if place is not None else []
    _, _, reason = error.message.partition(place[0] + ": " if place is not None else ": ")
    if tags and int(tags[-1]) < len(box.allowed):
        param = f"{box.allowed[int(tags[-1])].param}.parameters"
        inner = place[0].partition("/json_schema")[2] if place is not None else ""
        return ApiError(error.status, f"{param}{inner}: {reason}", param=param, code=error.code)
    param = "response_format" if place is not None and _ANSWER.match(place[0]) else "tools"
    return ApiError(error.status, f"{param}: {reason}", param=param, code=error.code)
