"""Details of each drawn node: its call, its result, how it relates to the original, its values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from torch import fx

from tcverify.explain.relations import Relation
from tcverify.program import Program
from tcverify.report.alignment import Row
from tcverify.report.html.boxes import SideKey, node_of, placement_texts
from tcverify.report.html.graph import Box, Drawing
from tcverify.report.html.values import MAX_CHARACTERS, Runs, ValueRecord, as_data, is_comparable, record
from tcverify.report.listing import graph_lines, value_text
from tcverify.report.sanitize import sanitize


@dataclass(frozen=True, slots=True)
class Card:
    """One node.

    Attributes:
        name: of the node.
        call: as in the listing.
        value: dtype and shape of what it returns.
        placement: of an input.
        mark: what the pass did to it, in words; "" for nothing.
        relation: of its value to the original's, a phrase to follow "it is".
        wrong: whether nothing explains that relation.
        flag: see `Box`.
        operands: ids of boxes.
        values: number of the record, None if none is kept.
    """

    name: str
    call: str
    value: str
    placement: str
    mark: str
    relation: str
    wrong: bool
    flag: str
    operands: tuple[str, ...]
    values: int | None


@dataclass(frozen=True, slots=True)
class Cards:
    """The nodes of a page by the ids of their boxes, and their values."""

    by_box: Mapping[str, Card]
    records: tuple[ValueRecord, ...]

    def of(self, id: str) -> tuple[Card, ValueRecord | None]:
        card = self.by_box[id]
        return card, None if card.values is None else self.records[card.values]

    def data(self) -> str:
        """The nodes as JSON that is safe in a script element: it contains no "<"."""
        nodes = {
            id: {
                "n": c.name, "c": c.call, "t": c.value, "p": c.placement, "m": c.mark,
                "r": c.relation, "w": c.wrong, "f": c.flag, "v": c.values,
            }
            for id, c in self.by_box.items()
        }  # fmt: skip
        slim = {id: {k: v for k, v in node.items() if v not in ("", False, None)} for id, node in nodes.items()}
        text = json.dumps({"nodes": slim, "values": [as_data(r) for r in self.records]}, separators=(",", ":"))
        return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@dataclass(frozen=True, slots=True)
class Side:
    """A version of the program and the rank whose graph is drawn."""

    program: Program
    rank: int


def make_cards(
    drawing: Drawing,
    rows: Sequence[Row],
    sides: Sequence[Side],
    relations: Mapping[str, Relation],
    runs: Runs | None,
) -> Cards:
    """Describe the nodes of a drawing.

    Args:
        rows: that were drawn.
        sides: of its graphs.
        relations: of the rewritten nodes, by name.
        runs: source of the values; None if graphs of two ranks are drawn.
    """
    values = _Values(relations, rows, runs)
    keys: tuple[SideKey, ...] = get_args(SideKey)
    boxes = [(side, box) for side, panel in zip(keys, drawing.panels, strict=False) for box in panel.boxes]
    centre = next((box.row for _, box in boxes if box.flag and box.row is not None), None)
    if centre is None:
        centre = next((box.row for _, box in boxes if box.mark != "same" and box.row is not None), 0)
    known = {box.row: values.of(box.row) for _, box in sorted(boxes, key=lambda b: abs((b[1].row or 0) - centre))
             if box.row is not None}  # fmt: skip
    found: dict[str, Card] = {}
    for side, version in zip(keys, sides, strict=False):
        texts = dict(graph_lines(version.program, version.rank))
        placements = placement_texts(version.program)
        for at, box in boxes:
            if at == side and box.row is not None:
                node = node_of(rows[box.row], side)
                assert node is not None  # the box is in this graph
                relation = relations.get(node.name) if side == "a" else None
                number = known[box.row][side == "a"]
                found[box.id] = _card(node, box, texts[node.name], placements, relation, number)
    return Cards(found, tuple(values.records))


def _card(
    node: fx.Node, box: Box, text: str, placements: Mapping[str, str], relation: Relation | None, values: int | None
) -> Card:
    return Card(
        name=sanitize(node.name),
        call=sanitize(text.partition(" = ")[2] if node.op != "output" else text),
        value=sanitize(value_text(node.meta.get("val"))),
        placement=sanitize(placements.get(node.name, "") or "replicated") if node.op == "placeholder" else "",
        mark=box.sign[2:],
        relation=sanitize(relation.text) if relation is not None else "",
        wrong=relation is not None and not relation.explained,
        flag=box.flag,
        operands=box.operands,
        values=values,
    )


class _Values:
    """Creates records up to the size limit of the page."""

    def __init__(self, relations: Mapping[str, Relation], rows: Sequence[Row], runs: Runs | None) -> None:
        self.relations, self.rows, self.runs = relations, rows, runs
        self.records: list[ValueRecord] = []
        self.room = MAX_CHARACTERS

    def of(self, number: int) -> tuple[int | None, int | None]:
        """Numbers of the records of a row, for its box before and its box after."""
        row = self.rows[number]
        before = row.before.name if row.before is not None else ""
        after = row.after.name if row.after is not None else ""
        relation = self.relations.get(after)
        against = relation.original or "" if relation is not None else before
        comparable = relation is None or is_comparable(relation)
        if before and (not after or against != before):
            own = self._keep(before, "", False)
            return own, self._keep(against, after, comparable) if after else None
        both = self._keep(against, after, comparable)
        return both, both

    def _keep(self, before: str, after: str, comparable: bool) -> int | None:
        if self.runs is None or self.room <= 0:
            return None
        found = record(self.runs, before, after, comparable)
        if found is None:
            return None
        self.room -= found.size
        self.records.append(found)
        return len(self.records) - 1


def merge(cards: Sequence[Cards]) -> Cards:
    """The nodes of several drawings, with unique box ids, as one."""
    nodes: dict[str, Card] = {}
    records: list[ValueRecord] = []
    for one in cards:
        for id, card in one.by_box.items():
            nodes[id] = card if card.values is None else replace(card, values=card.values + len(records))
        records += one.records
    return Cards(nodes, tuple(records))


__all__ = ["Card", "Cards", "Side", "make_cards", "merge"]
