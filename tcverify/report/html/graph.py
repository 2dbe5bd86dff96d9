"""Draws a program before ⇒ after as layers of boxes, both graphs on one grid: unchanged nodes have the same position in both.

Data only: the template turns it into SVG. In long graphs, nodes far from the difference are folded; in very long ones
they are not drawn at all, so that the size of the drawing is bounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from torch import fx

from tcverify.explain.relations import Relation
from tcverify.program import Program
from tcverify.report.alignment import Mark, Row
from tcverify.report.html.boxes import (
    SideKey,
    Vertex,
    VertexKind,
    box_text,
    edge_mark,
    gap_text,
    node_of,
    placement_texts,
)
from tcverify.report.html.folding import BOX_HEIGHT, LAYER_GAP, Fold, fold, hidden_edges, path, slack, slots, top
from tcverify.report.html.layout import CHANNEL, MARGIN, DrawingLayout, LayoutItem, lay_out
from tcverify.report.html.order import stream_predecessors
from tcverify.report.html.visibility import drawn_rows, make_vertices, shown_rows, visible_layers
from tcverify.report.sanitize import plural

#: Widest drawing that can have another one next to it, in pixels.
MAX_BESIDE = 920.0

#: Space between the two graphs, in pixels.
PANEL_GAP = 48.0


@dataclass(frozen=True, slots=True)
class Box:
    """One node as drawn.

    Attributes:
        id: unique in the page.
        kind: "call", "input", "return" or "gap" (nodes that are not drawn).
        mark: see `Row`.
        sign: the mark as a symbol, independent of colours.
        x, y, width: in pixels, x from the left of its graph, while all folds are closed.
        layer: from the top.
        away: whether it is in a fold.
        op, name, note: its text: op; name and shape; how its value relates to the original's, or the placement of an
            input.
        note_kind: "wrong", "sound" or "".
        title: everything about it, in one line.
        flag: "finding" if the finding is about it, "diverges" if values first diverge there, else "".
        operands: ids of boxes that it reads.
        twin: id of its counterpart in the other graph, or "".
        row: number of its row, None for a gap.
    """

    id: str
    kind: VertexKind
    mark: Mark
    sign: str
    x: float
    y: int
    width: float
    layer: int
    away: bool
    op: str
    name: str
    note: str
    note_kind: str
    title: str
    flag: str
    operands: tuple[str, ...]
    twin: str
    row: int | None


@dataclass(frozen=True, slots=True)
class EdgeLine:
    """One edge: an SVG path from the box `source` to the box `target`.

    Attributes:
        way: where it starts, goes down and ends: pixels from the left.
        away: whether a fold hides it.
    """

    source: str
    target: str
    path: str
    way: tuple[float, float, float]
    mark: Mark
    away: bool


@dataclass(frozen=True, slots=True)
class FoldMark:
    """Represents a closed fold in one graph.

    Attributes:
        number: of the fold.
        first, last: its layers.
        y: of its slot.
        text: what it contains.
        note: what is wrong in it.
    """

    number: int
    first: int
    last: int
    x: float
    y: int
    width: float
    text: str
    note: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph.

    Attributes:
        x, width: in pixels, while all folds are closed.
        right: where its boxes end if all folds are open; edges run in `channels` beyond it.
    """

    caption: str
    x: float
    width: float
    right: float
    channels: int
    boxes: tuple[Box, ...]
    lines: tuple[EdgeLine, ...]
    folds: tuple[FoldMark, ...]


@dataclass(frozen=True, slots=True)
class Drawing:
    """Both graphs, or the only one.

    Attributes:
        bands: tops of the slots, to guide the eye from one graph to the other.
        summary: the difference in words.
        folded: number of folded nodes; `left_out` nodes are not drawn at all.
        marks: marks that occur and their names, for the legend.
        flags: flags that occur.
    """

    width: float
    height: int
    panels: tuple[Panel, ...]
    bands: tuple[int, ...]
    summary: str
    folded: int
    left_out: int
    marks: tuple[tuple[str, str], ...]
    flags: tuple[str, ...]

    @property
    def wide(self) -> bool:
        """Whether there is no room next to it."""
        return self.width > MAX_BESIDE


#: The marks as symbols, independent of colours.
SIGNS: dict[Mark, str] = {
    "same": "",
    "removed": "− removed",
    "inserted": "+ inserted",
    "changed": "~ changed",
    "moved": "↕ moved",
}


@dataclass(frozen=True, slots=True)
class Labels:
    """The words of a drawing.

    Attributes:
        captions: of the graphs; one or two.
        signs: names of marks; see `SIGNS`.
        prefix: of the boxes' ids, unique in the page.
        flags: per graph ("b" or "a"), the flags of nodes by name.
    """

    captions: tuple[str, ...]
    signs: Mapping[Mark, str]
    prefix: str
    flags: Mapping[SideKey, Mapping[str, str]]


def draw(program: Program, rows: Sequence[Row], relations: Mapping[str, Relation], labels: Labels) -> Drawing:
    """Draw aligned graphs.

    Args:
        program: for the placements of inputs.
        rows: see `align`; for a single graph, rows with nothing after.
        relations: of the rewritten nodes, by name.
    """
    shown = shown_rows(rows, {name for flags in labels.flags.values() for name in flags})
    vertices, numbers = make_vertices(rows, drawn_rows(rows, shown))
    index: dict[tuple[SideKey, fx.Node], int] = {
        (side, node): i
        for i, vertex in enumerate(vertices)
        for row in vertex.rows
        for side, node in zip(get_args(SideKey), (row.before, row.after), strict=True)
        if node is not None
    }
    sides: tuple[SideKey, ...] = get_args(SideKey)[: len(labels.captions)]
    operands = {side: [_operands(vertex, side, i, index) for i, vertex in enumerate(vertices)] for side in sides}
    below = _below(vertices, sides[-1], index)
    items = [
        LayoutItem(
            vertex.kind == "input",
            {s for s in sides if vertex.stands_in(s)},
            {s: operands[s][i] for s in sides},
            below[i],
        )
        for i, vertex in enumerate(vertices)
    ]
    layout = lay_out(items, sides)
    folds = fold(layout.layers, visible_layers(vertices, numbers, shown, layout))
    scene = _Scene(vertices, numbers, layout, folds, slots(layout.layers, folds), operands, placement_texts(program))
    panels = []
    left = 0.0
    for side, caption in zip(sides, labels.captions, strict=True):
        panels.append(_panel(scene, side, left, caption, labels, relations if side == "a" else {}))
        left += panels[-1].width + PANEL_GAP
    drawn = [box for panel in panels for box in panel.boxes if box.kind != "gap"]
    last = scene.slots[-1] if scene.slots else 0
    return Drawing(
        width=left - PANEL_GAP,
        height=top(last + 1) - LAYER_GAP + 10,
        panels=tuple(panels),
        bands=tuple(map(top, range(last + 1))) if vertices else (),
        summary=_summary(rows, labels.signs) if len(panels) > 1 else "",
        folded=sum(scene.fold_of(i) is not None for i in range(len(vertices))),
        left_out=sum(len(v.rows) for v in vertices if v.kind == "gap"),
        marks=tuple((m, labels.signs[m]) for m in SIGNS if m != "same" and any(b.mark == m for b in drawn)),
        flags=tuple(sorted({b.flag for b in drawn if b.flag})),
    )


@dataclass(frozen=True, slots=True)
class _Scene:
    """What both graphs of a drawing share.

    Attributes:
        numbers: of a vertex's row, None for a gap.
        slots: by layer.
        operands: by graph and vertex.
        placements: of inputs, by name.
    """

    vertices: Sequence[Vertex]
    numbers: Sequence[int | None]
    layout: DrawingLayout
    folds: Sequence[Fold]
    slots: Sequence[int]
    operands: Mapping[SideKey, Sequence[tuple[int, ...]]]
    placements: Mapping[str, str]

    def fold_of(self, vertex: int) -> int | None:
        layer = self.layout.places[vertex].layer
        return next((i for i, f in enumerate(self.folds) if f.first <= layer <= f.last), None)


def _panel(
    scene: _Scene, side: SideKey, left: float, caption: str, labels: Labels, relations: Mapping[str, Relation]
) -> Panel:
    layout, id = scene.layout, f"{labels.prefix}{side}"
    places, edges, right = layout.places, layout.edges[side], layout.rights[side]
    stands = [i for i, vertex in enumerate(scene.vertices) if vertex.stands_in(side)]
    boxes = tuple(_box(scene, side, i, labels, relations) for i in stands)
    hidden = hidden_edges(edges, places, scene.folds)
    seen = [places[i] for i, box in zip(stands, boxes, strict=True) if not box.away]
    moved = slack(right, seen, [e for i, e in enumerate(edges) if i not in hidden])
    lines = tuple(
        EdgeLine(
            f"{id}{e.source}",
            f"{id}{e.target}",
            path(e, right, moved, *(scene.slots[places[end].layer] for end in (e.source, e.target)))
            if i not in hidden
            else "",
            (e.start, e.way, e.end),
            edge_mark(scene.vertices, e.source, e.target),
            i in hidden,
        )
        for i, e in enumerate(edges)
    )
    channels = layout.channels[side]
    return Panel(
        caption=caption,
        x=left,
        width=right - moved + MARGIN + CHANNEL * (channels + 1 if channels else 0),
        right=right,
        channels=channels,
        boxes=boxes,
        lines=lines,
        folds=_fold_marks(scene, boxes, right - moved),
    )


def _fold_marks(scene: _Scene, boxes: Sequence[Box], right: float) -> tuple[FoldMark, ...]:
    found = []
    for number, f in enumerate(scene.folds):
        inside = [box for box in boxes if f.first <= box.layer <= f.last]
        changed = sum(box.mark != "same" for box in inside)
        wrong = sum(box.note_kind == "wrong" for box in inside)
        text = plural(len(inside), "node" if changed else "unchanged node")
        notes = [f"{changed} changed"] * (changed > 0)
        notes += ["values differ" if wrong == len(inside) else f"{wrong} with different values"] * (wrong > 0)
        y = top(scene.slots[f.first])
        found.append(FoldMark(number, f.first, f.last, MARGIN, y, right - MARGIN, text, ", ".join(notes)))
    return tuple(found)


def _operands(
    vertex: Vertex, side: SideKey, number: int, index: Mapping[tuple[SideKey, fx.Node], int]
) -> tuple[int, ...]:
    """Numbers of the vertices that a vertex reads, each once, in argument order."""
    found: dict[int, None] = {}
    for row in vertex.rows:
        node = node_of(row, side)
        for operand in node.all_input_nodes if node is not None else ():
            other = index.get((side, operand))
            if other is not None and other != number:
                found[other] = None
    return tuple(found)


def _below(
    vertices: Sequence[Vertex], side: SideKey, index: Mapping[tuple[SideKey, fx.Node], int]
) -> list[tuple[int, ...]]:
    """Numbers of the vertices that each one is drawn below, in host programs; see `stream_predecessors`."""
    nodes = [node_of(vertex.rows[0], side) for vertex in vertices]
    graph = next((node.graph for node in nodes if node is not None), None)
    before = stream_predecessors(graph) if graph is not None else {}
    found: list[tuple[int, ...]] = []
    for number, node in enumerate(nodes):
        above = (index.get((side, one)) for one in (before.get(node, ()) if node is not None else ()))
        found.append(tuple(other for other in above if other is not None and other < number))
    return found


def _box(scene: _Scene, side: SideKey, number: int, labels: Labels, relations: Mapping[str, Relation]) -> Box:
    vertex, place = scene.vertices[number], scene.layout.places[number]
    other: SideKey = "a" if side == "b" else "b"
    twin = f"{labels.prefix}{other}{number}" if len(labels.captions) > 1 and vertex.stands_in(other) else ""
    node = node_of(vertex.rows[0], side) if vertex.kind != "gap" else None
    if node is None:
        text, flag, sign = gap_text(vertex, side, len(labels.captions) == 1), "", ""
        mark: Mark = "changed" if text.note else "same"
    else:
        mark = vertex.rows[0].mark
        text = box_text(node, place.width, relations.get(node.name), scene.placements)
        flag, sign = labels.flags.get(side, {}).get(node.name, ""), labels.signs[mark]
    return Box(
        id=f"{labels.prefix}{side}{number}",
        kind=vertex.kind,
        mark=mark,
        sign=sign,
        x=place.x,
        y=top(scene.slots[place.layer]),
        width=place.width,
        layer=place.layer,
        away=scene.fold_of(number) is not None,
        op=text.op,
        name=text.name,
        note=text.note,
        note_kind=text.note_kind,
        title=text.title,
        flag=flag,
        operands=tuple(f"{labels.prefix}{side}{o}" for o in scene.operands[side][number]),
        twin=twin,
        row=scene.numbers[number],
    )


def _summary(rows: Sequence[Row], signs: Mapping[Mark, str]) -> str:
    numbers = {mark: sum(row.mark == mark for row in rows) for mark in SIGNS}
    numbers["moved"] //= 2
    parts = [f"{n} {signs[mark][2:]}" for mark, n in numbers.items() if n and mark != "same"]
    return ", ".join([*parts, f"{numbers['same']} the same"])


__all__ = ["BOX_HEIGHT", "SIGNS", "Box", "Drawing", "EdgeLine", "FoldMark", "Labels", "Panel", "draw"]
