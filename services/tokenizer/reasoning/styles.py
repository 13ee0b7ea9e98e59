"""How models mark their reasoning, by the names of `--reasoning-parser`. Leaves splitting texts to splitter."""

from __future__ import annotations

import msgspec


class Style(msgspec.Struct, frozen=True):
    """Marks around the reasoning. `opens`: it goes on from the prompt, so the begin mark may be missing."""

    begin: str = "<think>"
    end: str = "</think>"
    opens: bool = False
    switches: tuple[str, ...] = ("enable_thinking",)  # arguments by which chat templates turn it on or off


STYLES = {
    "deepseek-r1": Style(opens=True),
    "deepseek-v3": Style(switches=("thinking",)),
    "glm45": Style(),
    "kimi": Style("◁think▷", "◁/think▷"),
    "kimi_k2": Style(opens=True),
    "magistral": Style("[THINK]", "[/THINK]"),
    "qwen3": Style(),
    "qwen3-thinking": Style(opens=True),
    "step3": Style(opens=True),
}


def choose(name: str) -> Style | None:
    """None for `none`: answers are shown as they are."""
    return STYLES.get(name)
