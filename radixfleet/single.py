"""`radixfleet tokenizer|scheduler|worker|detokenizer`: one service in place of this process.

Its flags are the service's own (see --help); only the model is resolved here. Leaves supervision to the machine's
own means: compose, Kubernetes, systemd.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from radixfleet.app import MODULES, command, environment
from radixfleet.errors import CommandError
from radixfleet.flags import PREFIX

_NEED_MODEL = ("tokenizer", "worker", "detokenizer")
_MODEL_FLAGS = ("--model-path", "--model")


def run_service(service: str, argv: Sequence[str]) -> int:
    """Never returns, except with the exit code of a start that failed. Raises CommandError."""
    if "--help" in argv or "-h" in argv:
        arguments, env = list(argv), dict(os.environ)
    else:
        arguments, env = prepare(service, argv, os.environ)
    program = command(MODULES[service])
    sys.stdout.flush()
    os.execve(program[0], [*program, *arguments], environment(env))  # noqa: S606 - arguments of the user's own


def prepare(service: str, argv: Sequence[str], environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """(arguments, environment) of the service, with the model as a folder."""
    arguments, model, revision = _take_model(argv)
    env = dict(environ)
    model = model or env.get(PREFIX + "MODEL_PATH") or None
    if service in _NEED_MODEL or model:
        from radixfleet.models import SMALL_MODEL_NAME, ModelError, resolve

        try:
            env[PREFIX + "MODEL_PATH"] = str(resolve(model, revision))
        except ModelError as error:
            raise CommandError(str(error)) from error
        env.setdefault(PREFIX + "MODEL_NAME", model or SMALL_MODEL_NAME)
    return arguments, env


def _take_model(argv: Sequence[str]) -> tuple[list[str], str | None, str | None]:
    """The other arguments, --model-path and --revision."""
    rest: list[str] = []
    found: dict[str, str] = {}
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if name in (*_MODEL_FLAGS, "--revision"):
            found[name] = value if equals else next(words, "")
            if not found[name]:
                raise CommandError(f"{name} needs a value")
        else:
            rest.append(word)
    model = next((found[name] for name in _MODEL_FLAGS if name in found), None)
    return rest, model, found.get("--revision")


def ping(argv: Sequence[str]) -> int:
    """`radixfleet ping ENDPOINT`: hands over to shared.ping."""
    program = command("shared.ping")
    os.execve(program[0], [*program, *argv], environment(os.environ))  # noqa: S606
