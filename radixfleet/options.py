"""Parses the flags of `serve` into options for the launcher and variables for the services.

Leaves the flags themselves to `flags` and what is started with them to `plan`.
"""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from radixfleet.flags import ALWAYS, ALWAYS_SWITCHES, GROUPS, PREFIX, REFUSED, Flag, all_flags


@dataclass(frozen=True)
class ServeOptions:
    """What the launcher needs itself, and `variables` for every service."""

    model_path: str | None = None
    revision: str | None = None
    host: str = "127.0.0.1"
    port: int = 30000
    workers: int = 1
    http_workers: int = 1
    launcher: str = "local"
    ray_address: str = "auto"
    skip_server_warmup: bool = False
    frozen_timeout: float = 10.0
    run_dir: str | None = None
    worker_bind: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    def variable(self, name: str, default: str = "") -> str:
        """A service's setting, from its flag or from the environment."""
        key = PREFIX + name.upper()
        return self.variables.get(key) or os.environ.get(key, default)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"radixfleet: error: {message}\n(`{self.prog} --help` lists the flags)\n")


def parse(
    argv: Sequence[str], environ: Mapping[str, str] | None = None, prog: str = "radixfleet serve"
) -> ServeOptions:
    """Flags over environment over defaults. Exits with a message where they make no sense."""
    environ = os.environ if environ is None else environ
    parser = build_parser(prog)
    _refuse_unsupported(parser, argv)
    found, unknown = parser.parse_known_args(list(argv))
    if unknown:
        parser.error(_about_unknown(unknown[0]))
    given = {name: value for name, value in vars(found).items() if value is not None}
    own: dict[str, Any] = {}
    for name in ("model_path", "host", "port"):  # these have a variable although the launcher uses them
        raw = environ.get(PREFIX + name.upper())
        if raw:
            own[name] = _checked_port(parser, raw) if name == "port" else raw
    positional = given.pop("model", None)
    if positional is not None:
        own["model_path"] = positional
    variables: dict[str, str] = {}
    for flag in all_flags():
        value = given.get(flag.dest)
        if value is None:
            continue
        if not flag.setting:
            own[flag.dest] = value
        else:
            variables[PREFIX + flag.setting.upper()] = _variable(flag, value)
    return ServeOptions(**own, variables=variables)


def _variable(flag: Flag, value: Any) -> str:
    if flag.kind == "switch":
        return flag.sets
    return ",".join(value) if flag.kind == "list" else str(value)


def build_parser(prog: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [MODEL] [FLAGS]",
        allow_abbrev=False,
        description="Start tokenizer, scheduler, workers and detokenizer on this machine. Defaults in brackets. "
        "Most flags also have a variable: --max-total-tokens is RADIXFLEET_MAX_TOTAL_TOKENS.",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="the same as --model-path")
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            _add(group, flag)
    for name, values in ALWAYS.items():
        parser.add_argument(name, dest=_unused(name), choices=values or None, help=argparse.SUPPRESS)
    for name in ALWAYS_SWITCHES:
        parser.add_argument(name, dest=_unused(name), action="store_true", default=None, help=argparse.SUPPRESS)
    return parser


def _unused(name: str) -> str:
    return "_" + name.removeprefix("--").replace("-", "_")


def _add(group: argparse._ArgumentGroup, flag: Flag) -> None:
    if flag.kind == "switch":
        group.add_argument(*flag.names, dest=flag.dest, action="store_true", default=None, help=flag.help)
        return
    metavar = None if flag.choices else {"int": "N", "float": "X"}.get(flag.kind, "TEXT")
    if flag.kind == "list":
        group.add_argument(*flag.names, dest=flag.dest, action="append", metavar=metavar, help=flag.help)
        return
    group.add_argument(
        *flag.names,
        dest=flag.dest,
        type=_converter(flag),
        choices=flag.choices or None,
        metavar=metavar,
        help=flag.help,
    )


def _converter(flag: Flag) -> Callable[[str], Any]:
    def convert(raw: str) -> Any:
        if flag.kind == "text":
            return dict(flag.aliases).get(raw, raw)
        try:
            value = int(raw) if flag.kind == "int" else float(raw)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{raw!r} is not a number") from None
        if flag.least is not None and value < flag.least:
            raise argparse.ArgumentTypeError(f"{raw} is below {flag.least:g}")
        if flag.most is not None and value > flag.most:
            raise argparse.ArgumentTypeError(f"{raw} is above {flag.most:g}")
        return value

    return convert


def _checked_port(parser: argparse.ArgumentParser, raw: str) -> int:
    if not raw.isdecimal():
        parser.error(f"{PREFIX}PORT is not a number: {raw!r}")
    return int(raw)


def _refuse_unsupported(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    for word in argv:
        reason = REFUSED.get(word.partition("=")[0])
        if reason is not None:
            parser.error(f"{word.partition('=')[0]}: {reason}")


def _about_unknown(word: str) -> str:
    name = word.partition("=")[0]
    known = [*(name for flag in all_flags() for name in flag.names), *ALWAYS, *ALWAYS_SWITCHES]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f"unknown flag {name}" + (f", did you mean {close[0]}?" if close else "")
