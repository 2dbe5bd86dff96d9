"""The text of a box of the drawing: a node, or a run of omitted nodes, shortened to fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from torch import fx

from tcverify.explain.relations import Relation
from tcverify.ops import TensorSpec
from tcverify.program import Placement, Program
from tcverify.report.alignment import Mark, Row
from tcverify.report.listing import op_text, value_text
from tcverify.report.sanitize import plural, sanitize

_SHORT = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "int64": "i64", "int32": "i32",
    "int16": "i16", "int8": "i8", "uint8": "u8", "bool": "bool",
}  # fmt: skip

#: Widths of characters, in pixels: in the fixed-width text of a box, and in its note.
CHARACTER = 7.4
NAME_CHARACTER = 6.7
NOTE_CHARACTER = 5.6

#: The sign of the mark is to the right of the op.
SIGN_ROOM = 20


#: Kinds of vertices; a gap represents omitted rows.
VertexKind: TypeAlias = Literal["call", "input", "return", "gap"]

#: One of the two graphs: before ("b") or after ("a") the pass.
SideKey: TypeAlias = Literal["b", "a"]


@dataclass(slots=True)
class Vertex:
    """A row, or a run of omitted rows.

    Attributes:
        kind: "call", "input", "return" or "gap".
    """

    kind: VertexKind
    rows: list[Row] = field(default_factory=list)

    def stands_in(self, side: SideKey) -> bool:
        return any(node_of(row, side) is not None for row in self.rows)


@dataclass(frozen=True, slots=True)
class Text:
    """The text of a box.

    Attributes:
        op, name, note: its lines.
        note_kind: "wrong" or "sound" if the note is about its value, else "".
        title: everything about it, in one line.
    """

    op: str
    name: str
    note: str
    note_kind: str
    title: str


def node_of(row: Row, side: SideKey) -> fx.Node | None:
    return row.before if side == "b" else row.after


def any_node(row: Row) -> fx.Node:
    node = row.after if row.after is not None else row.before
    assert node is not None  # a row has one at least
    return node


def gap_text(vertex: Vertex, side: SideKey, alone: bool) -> Text:
    """The text for nodes that are not drawn.

    Args:
        alone: whether there is no other graph to compare with.
    """
    changed = sum(row.mark != "same" for row in vertex.rows)
    own = plural(
        sum(node_of(row, side) is not None for row in vertex.rows), "node" if changed or alone else "unchanged node"
    )
    return Text(f"… {own} …", "", f"{changed} of them changed" if changed else "", "", f"{own}, not drawn")


def box_text(
    node: fx.Node,
    width: float,
    relation: Relation | None,
    placements: Mapping[str, str],
) -> Text:
    """The text of the box of a node.

    Args:
        width: of the box, in pixels.
        relation: of its value to the original's.
        placements: of inputs, by name.
    """
    op, name, shape = op_text(node).removeprefix("_internal_"), node.name, short_value(node)
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
    return Text(
        _fit(op, int((width - (8 if node.op == "placeholder" else 16 + SIGN_ROOM)) / CHARACTER)),
        _fit(name, int((width - 14) / NAME_CHARACTER)),
        _fit(note, int((width - 12) / NOTE_CHARACTER)),
        note_kind,
        sanitize(title),
    )


def placement_texts(program: Program) -> dict[str, str]:
    """The placements of the inputs, by name: "shard 0, tp"."""
    return {spec.name: ", ".join(_placed(p, dim) for dim, p in spec.placements) for spec in program.inputs}


def short_value(node: fx.Node) -> str:
    """Dtype and shape of a node's result, short: "f32[4, 8]"."""

    def one(value: object) -> str:
        if isinstance(value, TensorSpec):
            dtype = str(value.dtype).removeprefix("torch.")
            return f"{_SHORT.get(dtype, dtype)}{list(value.shape)}"
        if isinstance(value, (tuple, list)):
            return f"({', '.join(map(one, value))})"
        return ""

    return one(node.meta.get("val"))


def edge_mark(vertices: Sequence[Vertex], source: int, target: int) -> Mark:
    """The mark of an edge: that of the end that is in only one graph."""
    marks = {row.mark for i in (source, target) for row in vertices[i].rows}
    shown: tuple[Mark, ...] = ("removed", "inserted", "moved")
    return "same" if marks <= {"same", "changed"} else next(m for m in shown if m in marks)


def _note(relation: Relation) -> str:
    words = {
        "reshaped": "reshaped",
        "shard": f"shard, dim {relation.dim}",
        "gathered": f"gathered, dim {relation.dim}",
        "partial": "partial sum",
        "reduced": "summed",
        "scaled": "scaled",
        "wrong-shard": "wrong shard",
        "permuted": "chunks in wrong order",
        "other-rank": "another rank's value",
        "unrelated": "differs",
    }.get(relation.kind, relation.brief)
    of = f" of {relation.original}" if relation.kind in ("shard", "gathered", "partial", "wrong-shard") else ""
    return words + of


def _placed(placement: Placement, dim: str) -> str:
    return f"{placement.kind}{'' if placement.dim is None else f' {placement.dim}'}, {dim}"


def _fit(text: str, width: int) -> str:
    text = sanitize(text)
    return text if len(text) <= width else f"{text[: max(1, width - 1)]}…"


__all__ = [
    "Text",
    "Vertex",
    "any_node",
    "box_text",
    "edge_mark",
    "gap_text",
    "node_of",
    "placement_texts",
    "short_value",
]
