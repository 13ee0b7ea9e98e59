"""A program's graph as an SVG picture: steps from top to bottom, what can happen at the same time side by side."""

from __future__ import annotations

import html
import re

from radixfleet.lang.graph import Graph, Node

_WIDTH, _HEIGHT = 220, 44
_GAP_X, _GAP_Y = 28, 34
_LABEL = 28
_COLOURS = {
    "constant": "#eceff4",
    "template": "#e5e9f0",
    "argument": "#fff3c4",
    "value": "#fff3c4",
    "gen": "#c9e4ff",
    "select": "#d6c9ff",
    "call": "#ffd8c2",
    "fork": "#ffffff",
    "join": "#ffffff",
}
_UNFIT = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # what no XML may hold


def svg(title: str, graph: Graph) -> str:
    """The whole picture as text."""
    places = _places(graph)
    width = max((x for x, _ in places.values()), default=0) + _WIDTH + _GAP_X
    height = max((y for _, y in places.values()), default=0) + _HEIGHT + _GAP_Y
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f"<title>{_escape(title)}</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#4c566a"/></marker></defs>',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        *(_line(places[start], places[end], value) for start, end, value in graph.edges()),
        *(_box(node, *places[node.number]) for node in graph.nodes),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _places(graph: Graph) -> dict[int, tuple[int, int]]:
    """Upper left corners: a row below everything a node needs, a column of its own in that row."""
    row: dict[int, int] = {}
    taken: dict[int, int] = {}
    places = {}
    for node in graph.nodes:
        row[node.number] = 1 + max((row[other] for other in (*node.after, *node.uses)), default=-1)
        column = taken.get(row[node.number], 0)
        taken[row[node.number]] = column + 1
        places[node.number] = (
            _GAP_X + column * (_WIDTH + _GAP_X),
            _GAP_Y + row[node.number] * (_HEIGHT + _GAP_Y),
        )
    return places


def _box(node: Node, x: int, y: int) -> str:
    label = node.label if len(node.label) <= _LABEL else node.label[: _LABEL - 1] + "…"
    kind = f"{node.kind} ({node.options} options)" if node.options else node.kind
    return (
        f'<g><title>{_escape(node.label)}</title><rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="6" '
        f'fill="{_COLOURS[node.kind]}" stroke="#4c566a"/>'
        f'<text x="{x + 10}" y="{y + 17}" fill="#4c566a" font-size="10">{_escape(kind)}</text>'
        f'<text x="{x + 10}" y="{y + 34}">{_escape(label)}</text></g>'
    )


def _line(start: tuple[int, int], end: tuple[int, int], value: bool) -> str:
    dashes = ' stroke-dasharray="5 4"' if value else ""
    x1, y1 = start[0] + _WIDTH // 2, start[1] + _HEIGHT
    x2, y2 = end[0] + _WIDTH // 2, end[1]
    bend = (y2 - y1) // 2
    return (
        f'<path d="M{x1} {y1} C{x1} {y1 + bend} {x2} {y2 - bend} {x2} {y2}" fill="none" stroke="#4c566a"'
        f'{dashes} marker-end="url(#tip)"/>'
    )


def _escape(text: str) -> str:
    return html.escape(_UNFIT.sub("\ufffd", text))
