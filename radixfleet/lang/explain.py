"""Words about a program's graph: its steps, and what each optimisation found in it."""

from __future__ import annotations

from radixfleet.lang.graph import WORK, Graph, Node
from radixfleet.lang.optimizations import WORTH_A_REQUEST, Optimizations


def explain(name: str, graph: Graph, options: Optimizations) -> str:
    """A page for the terminal."""
    lines = [f"program {name}", *_steps(graph), ""]
    if graph.stopped is not None:
        lines += [f"the trace ends here: {graph.stopped}; what follows is decided while it runs", ""]
    lines += [
        f"{'[x]' if getattr(options, switch) else '[ ]'} {switch:<10} {found}" for switch, found in _findings(graph)
    ]
    return "\n".join(lines) + "\n"


def _steps(graph: Graph) -> list[str]:
    return [f"  {node.number:>3}  {node.kind:<9} {_described(node)}{_needs(node)}" for node in graph.nodes]


def _described(node: Node) -> str:
    if node.kind in ("constant", "template"):
        return repr(node.label) if node.kind == "constant" else node.label
    return f"{node.label} of {node.options} options" if node.options else node.label


def _needs(node: Node) -> str:
    needs = [*(f"after {number}" for number in node.after), *(f"uses {number}" for number in node.uses)]
    return f"   ({', '.join(needs)})" if needs else ""


def _findings(graph: Graph) -> list[tuple[str, str]]:
    """One line per switch of Optimizations."""
    return [
        ("prefix", _prefix(graph)),
        ("share", _share(graph)),
        ("concurrent", _concurrent(graph)),
        ("merge", _merge(graph)),
        ("tail", _tail(graph)),
        ("order", _order(graph)),
        ("select", _select(graph)),
        ("script", _script(graph)),
    ]


def _prefix(graph: Graph) -> str:
    size = len(graph.prefix_text)
    if size < WORTH_A_REQUEST:
        return f"a constant prefix of {size} characters: too short to be worth a request before a batch"
    return f"a constant prefix of {size} characters, computed once before a batch"


def _share(graph: Graph) -> str:
    repeatable = [node.label for node in graph.of_kind("gen", "select") if node.repeatable]
    if not repeatable:
        return "no generation is greedy or seeded, so none is shared"
    return f"repeatable, identical ones of a batch are asked for once: {', '.join(repeatable)}"


def _concurrent(graph: Graph) -> str:
    wide = [[node.label for node in level] for level in graph.levels() if len(level) > 1]
    if not wide:
        return "every step needs the one before it"
    return "at the same time: " + "; ".join(", ".join(level) for level in wide)


def _merge(graph: Graph) -> str:
    constants = graph.of_kind("constant")
    pieces = sum(node.pieces for node in constants)
    return f"{pieces} constants become {len(constants)}, sent with the generation after them"


def _tail(graph: Graph) -> str:
    calls = [node.label for node in graph.calls_with_text_before()]
    if not calls:
        return "no call with text before it and a generation after it"
    return f"text before a call is computed while it runs: {', '.join(calls)}"


def _order(graph: Graph) -> str:
    if not graph.arguments:
        return "no arguments, all items of a batch are alike"
    return f"items of a batch start sorted by {', '.join(graph.arguments)}"


def _select(graph: Graph) -> str:
    selects = graph.of_kind("select")
    if not selects:
        return "no select"
    options = sum(node.options for node in selects)
    return f"{options} options are scored in {len(selects)} requests"


def _script(graph: Graph) -> str:
    chains = [chain for chain in graph.chains() if len(chain) > 1]
    if not chains:
        return "no generation goes on from another one without this process in between"
    return "one request for each chain: " + "; ".join(" - ".join(node.label for node in chain) for chain in chains)


def summary(graph: Graph) -> str:
    """One line: how much work there is."""
    return ", ".join(f"{len(graph.of_kind(kind))} {kind}" for kind in WORK)
