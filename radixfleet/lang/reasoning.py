"""Thoughts and answer of models that think aloud, told apart by the tags of each family."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tags:
    """`opened`: the prompt already holds the opening tag."""

    start: str = "<think>"
    end: str = "</think>"
    opened: bool = False


MODEL_TYPES = {
    "deepseek-r1": Tags(opened=True),
    "deepseek-v3": Tags(),
    "glm45": Tags(),
    "kimi": Tags("◁think▷", "◁/think▷"),
    "qwen3": Tags(),
    "qwen3-thinking": Tags(opened=True),
    "step3": Tags(opened=True),
}


def tags_of(model_type: str) -> Tags:
    """Raises ValueError for a family nobody told about."""
    try:
        return MODEL_TYPES[model_type]
    except KeyError:
        raise ValueError(f"unknown model_type {model_type!r}; known: {', '.join(MODEL_TYPES)}") from None


def split(text: str, tags: Tags) -> tuple[str, str]:
    """(thoughts, answer). Text that was cut off while thinking is all thoughts."""
    stripped = text.lstrip()
    if stripped.startswith(tags.start):
        stripped = stripped[len(tags.start) :]
    elif not tags.opened:
        return "", text
    thoughts, ended, answer = stripped.partition(tags.end)
    return (thoughts.strip(), answer.lstrip("\n") if ended else "")
