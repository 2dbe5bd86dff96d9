"""The drawings of a page: the graph of the rank that shows the finding, before ⇒ after; if ranks disagree and run
different graphs, also the graphs of two such ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tcverify.cases.counterexample import Counterexample
from tcverify.explain.diagnosis import Diagnosis
from tcverify.program import Program
from tcverify.report.alignment import Mark, Row, align
from tcverify.report.html.graph import SIGNS, Drawing, Labels, draw
from tcverify.report.html.nodes import Cards, Side, make_cards
from tcverify.report.html.values import Runs


@dataclass(frozen=True, slots=True)
class DrawingSheet:
    """A drawing with its heading, and details of its nodes."""

    heading: str
    drawing: Drawing
    cards: Cards


def make_sheets(case: Counterexample, diagnosis: Diagnosis, ranks: Sequence[int]) -> tuple[DrawingSheet, ...]:
    """Draw the graphs of a counterexample.

    Args:
        ranks: whose values are shown, most informative first.
    """
    rank, program, rewritten = diagnosis.rank, case.program, case.rewritten
    if len(program.graphs[program.ranks[rank].graph].nodes) <= 1:
        return ()
    first = diagnosis.first
    flags = {first.node: "diverges"} if first is not None else {}
    if case.finding.node is not None:
        flags[case.finding.node] = "finding"
    runs = Runs(diagnosis.before, diagnosis.after, ranks)
    if rewritten is None:
        rows = [Row("same", node, None) for node in program.graphs[program.ranks[rank].graph].nodes]
        drawing = draw(program, rows, {}, Labels(("Before the pass",), SIGNS, "p", {"b": flags}))
        return (
            DrawingSheet(
                f"The program on rank {rank}", drawing, make_cards(drawing, rows, [Side(program, rank)], {}, runs)
            ),
        )
    relations = diagnosis.relations or {}
    rows = align(program, rewritten, rank)
    drawing = draw(program, rows, relations, Labels(("Before the pass", "After the pass"), SIGNS, "p", {"a": flags}))
    cards = make_cards(drawing, rows, [Side(program, rank), Side(rewritten, rank)], relations, runs)
    found = DrawingSheet(f"The program on rank {rank}, before ⇒ after the pass", drawing, cards)
    pair = _disagreeing(rewritten, diagnosis)
    return (found,) if pair is None else (found, _against(rewritten, *pair))


def _against(rewritten: Program, one: tuple[int, str], other: tuple[int, str]) -> DrawingSheet:
    """The graphs of two ranks, each with the node at which it disagrees."""
    signs: dict[Mark, str] = {
        **SIGNS,
        "removed": f"− rank {one[0]} only",
        "inserted": f"+ rank {other[0]} only",
        "changed": "~ differs",
    }
    captions = (f"Rank {one[0]}, after the pass", f"Rank {other[0]}, after the pass")
    labels = Labels(captions, signs, "r", {"b": {one[1]: "finding"}, "a": {other[1]: "finding"}})
    rows = align(rewritten, rewritten, one[0], other[0])
    drawing = draw(rewritten, rows, {}, labels)
    cards = make_cards(drawing, rows, [Side(rewritten, rank) for rank, _ in (one, other)], {}, None)
    return DrawingSheet(f"After the pass, rank {one[0]} against rank {other[0]}", drawing, cards)


def _disagreeing(rewritten: Program, diagnosis: Diagnosis) -> tuple[tuple[int, str], tuple[int, str]] | None:
    """Two ranks that disagree or wait for each other in different graphs, each with that node."""
    after = diagnosis.after
    if after is None:
        return None
    nodes: list[tuple[int, str]] = []
    if after.mismatch is not None:
        nodes = [(rank, call.node) for rank, call in sorted(after.mismatch[1].items())]
    elif after.hang is not None:
        nodes = [(wait.rank, wait.call.node) for wait in after.hang.waits]
        nodes += [(after.hang.finished, "output")] if after.hang.finished is not None else []
    graphs = [rewritten.ranks[rank].graph for rank, _ in nodes]
    return next(((nodes[0], node) for node, graph in zip(nodes, graphs, strict=True) if graph != graphs[0]), None)


__all__ = ["DrawingSheet", "make_sheets"]
