"""What compile() returns: a program, its graph, and the ways to look at it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixfleet.backend.base import Backend
from radixfleet.backend.sampling import Sampling
from radixfleet.lang import explain, picture, tracer
from radixfleet.lang.executor import Executor
from radixfleet.lang.graph import Graph
from radixfleet.lang.optimizations import WORTH_A_REQUEST, Optimizations
from radixfleet.lang.run import Run
from radixfleet.lang.symbols import Symbol

if TYPE_CHECKING:
    from radixfleet.lang.program import Program


class CompiledProgram:
    """Runs like the program, with the arguments it was compiled for."""

    def __init__(self, program: Program, graph: Graph, options: Optimizations, given: Mapping[str, Any]) -> None:
        self._program = program
        self._given = dict(given)
        self._name = program.function.__name__
        self._options = options
        self.graph = graph

    def run(self, *args: Any, **kwargs: Any) -> Any:
        taken = self._program.arg_names[: len(args)]
        given = {name: value for name, value in self._given.items() if name not in taken}
        return self._program.bind(**given).run(*args, **{"optimize": self._options, **kwargs})

    def run_batch(self, batch_kwargs: Any, **kwargs: Any) -> Any:
        return self._program.bind(**self._given).run_batch(batch_kwargs, **{"optimize": self._options, **kwargs})

    def text(self) -> str:
        """The graph and what was found in it."""
        return explain.explain(self._name, self.graph, self._options)

    def explain(self) -> None:
        """Print text()."""
        sys.stdout.write(self.text())

    def svg(self) -> str:
        return picture.svg(self._name, self.graph)

    def save_picture(self, path: str | Path) -> None:
        """Write the graph as an SVG file."""
        Path(path).write_text(self.svg(), encoding="utf-8")

    def _repr_svg_(self) -> str:
        """Notebooks show the picture."""
        return self.svg()


def graph_of(
    program: Program, given: Mapping[str, Any], sampling: Sampling, *, more: tuple[str, ...] = (), merge: bool = True
) -> Graph:
    """The program's graph for these arguments and values of gen()s; `more` names values that come later."""
    known = {**program.bound, **given}
    arguments = {name: value for name, value in known.items() if name in program.arg_names}
    bindings = {name: value for name, value in known.items() if name not in program.arg_names}
    later = {name: Symbol(name, "argument") for name in more if name not in program.arg_names}
    return tracer.trace(program.function, arguments, {**bindings, **later}, sampling, merge=merge)


def compute_prefix(graph: Graph, backend: Backend, pin: str = "") -> bool:
    """Compute and cache a graph's constant prefix, under `pin` until that is ended. False where it is too short."""
    if len(graph.prefix_text) < WORTH_A_REQUEST:
        return False
    executor = Executor(Run(backend, Sampling(), inline=True))
    executor.submit(list(graph.prefix))
    prompt = executor.transcript.prompt()
    if pin:
        backend.pin(prompt, pin)
    else:
        backend.prefill(prompt)
    return True
