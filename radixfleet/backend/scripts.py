"""Scripts on the wire: steps of a program as the body of /script, and its stream of parts as news.

Leaves connections to http and what an answer means to the endpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from radixfleet.backend.base import AgainStep, Answer, GenStep, News, Prompt, SelectStep, Step, TextPart
from radixfleet.backend.errors import BackendError
from radixfleet.backend.http import HttpServer

_NO_SUCH_PATH = (404, 405, 501)


@dataclass(frozen=True)
class Abilities:
    """`parts`: prompts of texts and ids, and pins; `scripts`: chains of steps in one request."""

    parts: bool
    scripts: bool


def abilities(http: HttpServer) -> Abilities:
    """What the server can do. Other servers of this API do not know the word."""
    try:
        info = http.get("/get_server_info")
    except BackendError as error:
        if error.status not in _NO_SUCH_PATH:
            raise
        return Abilities(False, False)
    switch = info.get("script") if isinstance(info, dict) else None
    return Abilities(parts=switch is not None, scripts=switch is True)


def prompt_fields(prompt: Prompt) -> dict[str, Any]:
    """A prompt of texts and ids, to be tokenised by the server."""
    parts = [_text(part) if isinstance(part, TextPart) else {"ids": list(part.ids)} for part in prompt.parts]
    return {"prompt_parts": parts, **({"templated": True} if prompt.templated else {})}


def body(prompt: Prompt, steps: Sequence[Step], tag: str, *, deltas: bool) -> dict[str, Any]:
    """The request."""
    return {
        **prompt_fields(prompt),
        "steps": [_step(step) for step in steps],
        "rid": tag,
        "stream": True,
        "deltas": deltas,
        "return_prompt_token_ids": True,
    }


def news(events: Iterable[dict[str, Any]], whole: Callable[[dict[str, Any]], Answer]) -> Iterator[News]:
    """What the stream says. Raises BackendError where it ends before its last part."""
    complete = False
    for event in events:
        if "delta" in event:
            yield News(event["part"], event["delta"])
        elif "part" in event:
            yield News(event["part"], answer=whole(event))
        else:
            complete = True
    if not complete:
        raise BackendError("the server ended a script before it was complete")


def _step(step: Step) -> dict[str, Any]:
    if isinstance(step, GenStep):
        return {"gen": {"sampling_params": step.sampling.wire(), **step.sampling.score_wire()}}
    if isinstance(step, SelectStep):
        select = {"choices": list(step.options), "method": step.method}
        return {"select": {**select, "literal": True} if step.literal else select}
    if isinstance(step, AgainStep):
        return {"again": step.number, **({"literal": True} if step.literal else {})}
    return _text(step)


def _text(part: TextPart) -> dict[str, Any]:
    return {"text": part.text, "literal": True} if part.literal else {"text": part.text}
