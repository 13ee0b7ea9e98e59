"""Why an answer ended, in the words of each API."""

from __future__ import annotations

from typing import Any

from services.tokenizer.output import Output
from shared.messages.stream import Finish, FinishReason

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "abort"}


def reason(finish: Finish | None) -> str | None:
    """OpenAI's finish_reason; null while running."""
    return None if finish is None else _REASONS.get(finish.reason, "abort")


def matched(finish: Finish | None) -> int | str | None:
    """The token id or the stop string that ended the answer."""
    if finish is None or finish.reason is not FinishReason.STOP:
        return None
    return finish.matched_token if finish.matched_token >= 0 else finish.matched_string or None


def verdict(finish: Finish | None) -> dict[str, Any]:
    """The check of a best_effort constraint, as a member of the answer; nothing where none was asked for."""
    if finish is None or not finish.verdict:
        return {}
    return {"constraint_check": {"verdict": finish.verdict, "reason": finish.violation or None}}


def native(output: Output) -> dict[str, Any] | None:
    """The finish_reason object of /generate."""
    finish = output.finish
    if finish is None:
        return None
    if finish.reason is FinishReason.STOP:
        return {"type": "stop", "matched": matched(finish)}
    if finish.reason is FinishReason.LENGTH:
        return {"type": "length", "length": output.num_output_tokens}
    return {
        "type": "abort",
        "message": finish.message or "The request was aborted.",
        "status_code": finish.status or None,
        "err_type": None,
    }
