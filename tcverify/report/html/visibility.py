"""Which part of a drawing is initially visible: the difference and its surroundings; for very long graphs, which part
is drawn at all."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tcverify.report.alignment import Row
from tcverify.report.html.boxes import Vertex, VertexKind, any_node
from tcverify.report.html.layout import DrawingLayout

#: Graphs with up to this many rows are not folded; most visible rows of longer graphs; and most rows that are drawn.
MAX_WHOLE = 28
MAX_SHOWN = 40
MAX_DRAWN = 600

#: Number of unchanged nodes that are visible on either side of a changed one, in longer graphs.
CONTEXT = 2


def shown_rows(rows: Sequence[Row], focus: Collection[str]) -> set[int]:
    """Numbers of the rows that are initially visible."""
    if len(rows) <= MAX_WHOLE:
        return set(range(len(rows)))
    calls = [i for i, row in enumerate(rows) if any_node(row).op != "placeholder"]
    first = [k for k, i in enumerate(calls) if any_node(rows[i]).name in focus]
    rest = [k for k, i in enumerate(calls) if rows[i].mark != "same"]
    if not first and not rest:
        rest = [0, len(calls) - 1 - CONTEXT]
    chosen: dict[int, None] = {}
    for k in (*first, *rest):
        for near in range(max(0, k - CONTEXT), min(len(calls), k + CONTEXT + 1)):
            if len(chosen) < MAX_SHOWN:
                chosen[calls[near]] = None
    return set(chosen) | {i for i in calls if any_node(rows[i]).op == "output"}


def drawn_rows(rows: Sequence[Row], shown: Collection[int]) -> set[int]:
    """Numbers of the rows that are drawn: the visible ones and the nearest others, and the inputs that these read."""
    if len(rows) <= MAX_DRAWN:
        return set(range(len(rows)))
    far = len(rows)
    distances = [0 if i in shown else far for i in range(far)]
    for sweep in (range(1, far), range(far - 2, -1, -1)):
        step = sweep.step
        for i in sweep:
            distances[i] = min(distances[i], distances[i - step] + 1)
    calls = [i for i, row in enumerate(rows) if any_node(row).op != "placeholder"]
    drawn = set(sorted(calls, key=lambda i: (distances[i], i))[:MAX_DRAWN]) | set(shown)
    read = {o for i in drawn for n in (rows[i].before, rows[i].after) if n is not None for o in n.all_input_nodes}
    inputs = [i for i, row in enumerate(rows) if any_node(row).op == "placeholder" and {row.before, row.after} & read]
    return drawn | set(inputs[:MAX_DRAWN])


#: Kinds of drawn nodes, by `fx.Node.op`; all others are calls.
_KINDS: dict[str, VertexKind] = {"placeholder": "input", "output": "return"}


def make_vertices(rows: Sequence[Row], drawn: Collection[int]) -> tuple[list[Vertex], list[int | None]]:
    found: list[Vertex] = []
    numbers: list[int | None] = []
    for i, row in enumerate(rows):
        op = any_node(row).op
        if i in drawn:
            found.append(Vertex(_KINDS.get(op, "call"), [row]))
            numbers.append(i)
        elif op != "placeholder":
            if not found or found[-1].kind != "gap":
                found.append(Vertex("gap"))
                numbers.append(None)
            found[-1].rows.append(row)
    return found, numbers


def visible_layers(
    vertices: Sequence[Vertex], numbers: Sequence[int | None], shown: Collection[int], layout: DrawingLayout
) -> set[int]:
    """The layers that are initially visible."""
    layers = {
        layout.places[i].layer
        for i, (vertex, number) in enumerate(zip(vertices, numbers, strict=True))
        if vertex.kind == "gap" or (number in shown and vertex.kind != "input")
    }
    inputs = [layout.places[i].layer for i, vertex in enumerate(vertices) if vertex.kind == "input"]
    return layers | {layer for layer in inputs if layer + 1 in layers}


__all__ = ["drawn_rows", "make_vertices", "shown_rows", "visible_layers"]
