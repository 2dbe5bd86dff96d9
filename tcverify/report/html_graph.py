"""Draws a program before ⇒ after as layers of boxes, both graphs on one grid: what the pass left alone stands at the same
place in both.

Data only: the template turns it into SVG. Of long graphs, what is far from the difference is collapsed, so that the
drawing is bounded whatever the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from tcverify.ops import TensorSpec
from tcverify.program import Placement, Program
from tcverify.relations import Relation
from tcverify.report.alignment import Row
from tcverify.report.html_layout import BOX_HEIGHT, Item, Place, lay_out
from tcverify.report.listing import op_text, value_text
from tcverify.report.plain import count, plain

#: Rows that are drawn without collapsing any, and most that are drawn of longer graphs.
MAX_WHOLE = 52
MAX_SHOWN = 40

#: Unchanged nodes that are drawn on either side of a changed one, in longer graphs.
CONTEXT = 2

#: Inputs that are drawn of longer graphs.
MAX_INPUTS = 24

_SHORT = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "int64": "i64", "int32": "i32",
    "int16": "i16", "int8": "i8", "uint8": "u8", "bool": "bool",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Box:
    """One node as drawn.

    Attributes:
        id: unique in the page.
        kind: "call", "input", "return" or "gap" (collapsed nodes).
        mark: see `Row`.
        sign: the mark for those who see no colours.
        lines: what stands in it: op; name and shape; note.
        title: everything about it, in one line.
        note: how its value relates to the original's, or the placement of an input.
        flag: "finding" where the finding says so, "diverges" where values first diverge, else "".
        operands: ids of boxes that it reads.
        twin: id of its counterpart in the other graph, or "".
    """

    id: str
    kind: str
    mark: str
    sign: str
    x: float
    y: float
    width: float
    height: float
    op: str
    name: str
    note: str
    note_kind: str
    title: str
    flag: str
    operands: tuple[str, ...]
    twin: str


@dataclass(frozen=True, slots=True)
class Line:
    """One edge: an SVG path from the box `source` to the box `target`."""

    source: str
    target: str
    path: str
    mark: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph."""

    caption: str
    x: float
    width: float
    boxes: tuple[Box, ...]
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class Drawing:
    """Both graphs, or the only one.

    Attributes:
        bands: tops of the layers, to guide the eye from one graph to the other.
        summary: the difference in words.
        hidden: how many nodes are collapsed.
        marks: that occur and what they are called, for the legend.
        flags: that occur.
    """

    width: float
    height: float
    panels: tuple[Panel, ...]
    bands: tuple[float, ...]
    summary: str
    hidden: int
    marks: tuple[tuple[str, str], ...]
    flags: tuple[str, ...]


#: The marks for those who see no colours.
SIGNS = {"same": "", "removed": "− removed", "inserted": "+ inserted", "changed": "~ changed", "moved": "↕ moved"}


@dataclass(frozen=True, slots=True)
class Labels:
    """What is said about a drawing.

    Attributes:
        captions: of the graphs; one or two.
        signs: what marks are called; see `SIGNS`.
        prefix: of the boxes' ids, unique in the page.
        flags: per graph ("b" or "a"), the flags of nodes by name.
    """

    captions: tuple[str, ...]
    signs: Mapping[str, str]
    prefix: str
    flags: Mapping[str, Mapping[str, str]]


def draw(program: Program, rows: Sequence[Row], relations: Mapping[str, Relation], labels: Labels) -> Drawing:
    """Draw aligned graphs.

    Args:
        program: for the placements of inputs.
        rows: see `align`; for a single graph, rows with nothing after.
        relations: of the rewritten nodes, by name.
    """
    vertices = _vertices(rows, _shown(rows, {name for flags in labels.flags.values() for name in flags}))
    index = {
        (side, node): i
        for i, vertex in enumerate(vertices)
        for row in vertex.rows
        for side, node in (("b", row.before), ("a", row.after))
        if node is not None
    }
    sides = ("b", "a")[: len(labels.captions)]
    operands = {side: [_operands(vertex, side, i, index) for i, vertex in enumerate(vertices)] for side in sides}
    items = [
        Item(vertex.kind == "input", {s for s in sides if vertex.stands_in(s)}, {s: operands[s][i] for s in sides})
        for i, vertex in enumerate(vertices)
    ]
    layout = lay_out(items, sides)
    placements = {spec.name: ", ".join(_placed(p, dim) for dim, p in spec.placements) for spec in program.inputs}
    panels = []
    left = 0.0
    for side, caption in zip(sides, labels.captions, strict=True):
        id = f"{labels.prefix}{side}"
        known = relations if side == "a" else {}
        boxes = tuple(
            _box(vertex, _Spot(side, i, left, layout.places[i], operands[side][i]), labels, known, placements)
            for i, vertex in enumerate(vertices)
            if side in items[i].sides
        )
        lines = tuple(
            Line(f"{id}{e.source}", f"{id}{e.target}", e.path(left), _edge_mark(vertices, e.source, e.target))
            for e in layout.edges[side]
        )
        panels.append(Panel(caption, left, layout.widths[side], boxes, lines))
        left += layout.widths[side] + PANEL_GAP
    drawn = [box for panel in panels for box in panel.boxes if box.kind != "gap"]
    return Drawing(
        width=left - PANEL_GAP,
        height=layout.height,
        panels=tuple(panels),
        bands=tuple(layout.tops),
        summary=_summary(rows, labels.signs) if len(panels) > 1 else "",
        hidden=sum(len(v.rows) for v in vertices if v.kind == "gap"),
        marks=tuple((m, labels.signs[m]) for m in SIGNS if m != "same" and any(b.mark == m for b in drawn)),
        flags=tuple(sorted({b.flag for b in drawn if b.flag})),
    )


#: Between the two graphs.
PANEL_GAP = 48.0


@dataclass(slots=True)
class _Vertex:
    """A row, or a stretch of rows that are collapsed."""

    kind: str
    rows: list[Row] = field(default_factory=list)

    def stands_in(self, side: str) -> bool:
        return any(_node(row, side) is not None for row in self.rows)


def _node(row: Row, side: str) -> fx.Node | None:
    return row.before if side == "b" else row.after


def _any(row: Row) -> fx.Node:
    node = row.after if row.after is not None else row.before
    assert node is not None  # a row has one at least
    return node


def _shown(rows: Sequence[Row], focus: set[str]) -> set[int]:
    """Numbers of the rows to draw."""
    if len(rows) <= MAX_WHOLE:
        return set(range(len(rows)))
    calls = [i for i, row in enumerate(rows) if _any(row).op != "placeholder"]
    first = [k for k, i in enumerate(calls) if _any(rows[i]).name in focus]
    rest = [k for k, i in enumerate(calls) if rows[i].mark != "same"]
    if not first and not rest:
        rest = [0, len(calls) - 1 - CONTEXT]
    chosen: dict[int, None] = {}
    for k in (*first, *rest):
        for near in range(max(0, k - CONTEXT), min(len(calls), k + CONTEXT + 1)):
            if len(chosen) < MAX_SHOWN:
                chosen[calls[near]] = None
    shown = set(chosen) | {i for i in calls if _any(rows[i]).op == "output"}
    read = {o for i in shown for n in (rows[i].before, rows[i].after) if n is not None for o in n.all_input_nodes}
    inputs = [i for i, row in enumerate(rows) if _any(row).op == "placeholder" and {row.before, row.after} & read]
    return shown | set(inputs[:MAX_INPUTS])


def _vertices(rows: Sequence[Row], shown: set[int]) -> list[_Vertex]:
    found: list[_Vertex] = []
    for i, row in enumerate(rows):
        op = _any(row).op
        if i in shown:
            found.append(_Vertex({"placeholder": "input", "output": "return"}.get(op, "call"), [row]))
        elif op != "placeholder":
            if not found or found[-1].kind != "gap":
                found.append(_Vertex("gap"))
            found[-1].rows.append(row)
    return found


def _operands(vertex: _Vertex, side: str, number: int, index: Mapping[tuple[str, fx.Node], int]) -> tuple[int, ...]:
    """Numbers of the vertices that a vertex reads, each once, in the order of its arguments."""
    found: dict[int, None] = {}
    for row in vertex.rows:
        node = _node(row, side)
        for operand in node.all_input_nodes if node is not None else ():
            other = index.get((side, operand))
            if other is not None and other != number:
                found[other] = None
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Spot:
    """Where a vertex is drawn."""

    side: str
    number: int
    left: float
    place: Place
    operands: tuple[int, ...]


def _box(
    vertex: _Vertex,
    spot: _Spot,
    labels: Labels,
    relations: Mapping[str, Relation],
    placements: Mapping[str, str],
) -> Box:
    place, side = spot.place, spot.side
    ids = tuple(f"{labels.prefix}{side}{o}" for o in spot.operands)
    id = f"{labels.prefix}{side}{spot.number}"
    other = "a" if side == "b" else "b"
    twin = f"{labels.prefix}{other}{spot.number}" if len(labels.captions) > 1 and vertex.stands_in(other) else ""
    at = (spot.left + place.x, place.y, place.width, float(BOX_HEIGHT))
    if vertex.kind == "gap":
        changed = sum(row.mark != "same" for row in vertex.rows)
        own = count(
            sum(_node(row, side) is not None for row in vertex.rows),
            "node" if changed or len(labels.captions) == 1 else "unchanged node",
        )
        note = f"{changed} of them changed" if changed else ""
        title = f"{own}, not drawn"
        mark = "changed" if changed else "same"
        return Box(id, "gap", mark, "", *at, f"… {own} …", "", note, "", title, "", ids, twin)
    row = vertex.rows[0]
    node = _node(row, side)
    assert node is not None  # the vertex stands in this graph
    sign = labels.signs[row.mark]
    op, name, shape = op_text(node), node.name, _short(node)
    relation = relations.get(name)
    note, note_kind = "", ""
    if node.op == "placeholder":
        op, name, note = name, shape, placements.get(name, "") or "replicated"
    elif node.op == "output":
        name = ", ".join(n.name for n in node.all_input_nodes)
    else:
        name = f"{name}: {shape}" if name != op else shape
        if relation is not None and relation.kind != "equal":
            note, note_kind = _note(relation), "sound" if relation.explained else "wrong"
    title = f"{node.name}: {op_text(node)} → {value_text(node.meta.get('val')) or 'returned values'}"
    if relation is not None:
        title += f"; {relation.text}"
    width, note_width = int((place.width - 14) / 6.7), int((place.width - 12) / 5.6)
    return Box(
        id, vertex.kind, row.mark, sign, *at,
        _fit(op, max(6, width - len(sign))), _fit(name, width), _fit(note, note_width),
        note_kind, plain(title), labels.flags.get(side, {}).get(node.name, ""), ids, twin,
    )  # fmt: skip


def _note(relation: Relation) -> str:
    where = f", dim {relation.dim}" if relation.kind in ("shard", "gathered") else ""
    of = f" of {relation.original}" if relation.kind in ("shard", "gathered", "partial", "wrong-shard") else ""
    return relation.brief + where + of


def _placed(placement: Placement, dim: str) -> str:
    return f"{placement.kind}{'' if placement.dim is None else f' {placement.dim}'}, {dim}"


def _short(node: fx.Node) -> str:
    def one(value: object) -> str:
        if isinstance(value, TensorSpec):
            dtype = str(value.dtype).removeprefix("torch.")
            return f"{_SHORT.get(dtype, dtype)}{list(value.shape)}"
        if isinstance(value, (tuple, list)):
            return f"({', '.join(map(one, value))})"
        return ""

    return one(node.meta.get("val"))


def _fit(text: str, width: int) -> str:
    text = plain(text)
    return text if len(text) <= width else f"{text[: max(1, width - 1)]}…"


def _edge_mark(vertices: Sequence[_Vertex], source: int, target: int) -> str:
    marks = {row.mark for i in (source, target) for row in vertices[i].rows}
    return "same" if marks <= {"same", "changed"} else next(m for m in ("removed", "inserted", "moved") if m in marks)


def _summary(rows: Sequence[Row], signs: Mapping[str, str]) -> str:
    numbers = {mark: sum(row.mark == mark for row in rows) for mark in SIGNS}
    numbers["moved"] //= 2
    parts = [f"{n} {signs[mark][2:]}" for mark, n in numbers.items() if n and mark != "same"]
    return ", ".join([*parts, f"{numbers['same']} the same"])
