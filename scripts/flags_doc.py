"""Writes docs/flags.md from the table of flags, so that the page cannot differ from the program.

python scripts/flags_doc.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from radixfleet.flags import ALWAYS, ALWAYS_SWITCHES, GROUPS, PREFIX, Flag  # noqa: E402

PAGE = ROOT / "docs" / "flags.md"

HEAD = """# Flags

Flags of `radixfleet serve` and of `python -m radixfleet.launch_server`; names and defaults are those operators of such
servers know. In brackets: the default. What a flag sets in a service can also be given as the variable in the last
column, which is how single services (`radixfleet tokenizer|scheduler|worker|detokenizer`, each with `--help`) are
configured in containers. A flag wins over a variable. This page is written by `scripts/flags_doc.py`.
"""


def page() -> str:
    parts = [HEAD]
    for group, flags in GROUPS.items():
        parts.append(f"\n## {group[0].upper()}{group[1:]}\n\n| flag | meaning | variable |\n|---|---|---|\n")
        parts.extend(_row(flag) for flag in flags)
    accepted = ", ".join(f"`{name}`" + (f" ({', '.join(values)})" if values else "") for name, values in ALWAYS.items())
    parts.append("\n## Accepted from other servers' command lines\n\n")
    parts.append(f"These ask for what is the case here anyway; another value is refused: {accepted}.\n")
    parts.append(f"Without effect: {', '.join(f'`{name}`' for name in sorted(ALWAYS_SWITCHES))}.\n")
    return "".join(parts)


def _row(flag: Flag) -> str:
    names = ", ".join(f"`{name}`" for name in flag.names)
    choices = f" ({', '.join(flag.choices)})" if flag.choices else ""
    variable = f"`{PREFIX}{flag.setting.upper()}`" if flag.setting else "launcher"
    return f"| {names} | {flag.help}{choices} | {variable} |\n"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
