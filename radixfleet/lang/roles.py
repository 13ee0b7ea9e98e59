"""The text around turns of a conversation, read off the model's own chat template.

The server renders messages whose contents are marks; what stands between two marks is the template's. A turn is
opened by what the template adds to the text so far, so text once sent never changes:

    rendered   <|im_start|>user\\n[0]<|im_end|>\\n<|im_start|>assistant\\n
               `------ begin -----'    `- end -''------- begin -------'
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from radixfleet.backend.base import Backend
from radixfleet.lang.errors import LanguageError


def begin_text(backend: Backend, roles: Sequence[str], role: str, *, spoken: bool) -> str:
    """Text between the turns so far and the content of the next one. `spoken`: that content is already known."""
    generation = role == "assistant" and not spoken
    turns = tuple(roles) if generation else (*roles, role)
    pieces = _pieces(backend, turns, generation)
    if pieces is None:
        return f"{role.upper()}: "
    text = pieces[-1] if generation else pieces[-2]
    if not roles:
        return text
    shown = end_text(backend, roles)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(shown, text, strict=False)))
    return text[shared:]


def end_text(backend: Backend, roles: Sequence[str]) -> str:
    """Text after the content of the last turn."""
    pieces = _pieces(backend, tuple(roles), False)
    return "\n" if pieces is None else pieces[-1]


def _pieces(backend: Backend, roles: tuple[str, ...], generation_prompt: bool) -> list[str] | None:
    """The template's texts before, between and after the contents; None where the backend has no template."""
    contents = tuple(f"\ue000{index}\ue001" for index in range(len(roles)))
    rendered = backend.render(roles, contents, generation_prompt)
    if rendered is None:
        return None
    pieces = []
    for content in contents:
        before, found, rendered = rendered.partition(content)
        if not found:
            raise LanguageError(f"the model's chat template leaves out a turn of {' / '.join(roles)}")
        pieces.append(before)
    return [*pieces, rendered]
