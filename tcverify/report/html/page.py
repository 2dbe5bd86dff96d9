"""A counterexample as the data of its page: a pure function of the counterexample, so that an old file gives the page
that was first written for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tcverify.cases.counterexample import MAX_VALUES, Counterexample
from tcverify.explain.diagnosis import Diagnosis, diagnose
from tcverify.explain.relations import Relation
from tcverify.explain.relations.storages import is_buffer, written_operands
from tcverify.program import KINDS
from tcverify.program.graph import in_host_ir
from tcverify.registry.glossary import terms_in
from tcverify.report.block import ReportBlock, make_block
from tcverify.report.html.collectives import MAX_RANKS, CollectiveTimeline, timelines
from tcverify.report.html.drawings import DrawingSheet, make_sheets
from tcverify.report.html.expected_actual import Contrast, make_contrasts
from tcverify.report.html.nodes import Card, merge
from tcverify.report.html.ranks import Dim, Input, make_dims, make_inputs
from tcverify.report.html.streams import ScheduleDrawing, draw_schedule
from tcverify.report.html.values import Runs, ValueRecord, is_comparable, ranks_text, record
from tcverify.report.html.waiting import WaitingCycle, describe_waiting
from tcverify.report.sanitize import plural, sanitize, sanitize_lines

#: Number of rows of the table of relations, and of lines of a listing or detail, on a page.
MAX_RELATIONS = 80
MAX_LINES = 400

#: Terms that need no explanation on a page.
_EVIDENT = frozenset({
    "case", "changed", "check", "condition", "draw", "edit", "group", "kind", "known", "meaning", "mesh", "note", "original",
    "outcome", "pass", "passed", "program", "rank", "refuted", "rewritten", "search", "start, wait",
})  # fmt: skip

#: Number of operands of the first bad node whose values are shown next to it.
MAX_OPERANDS = 4


@dataclass(frozen=True, slots=True)
class NodeValue:
    """How one rewritten node relates to the original."""

    node: str
    text: str
    kind: str
    explained: bool
    first: bool


@dataclass(frozen=True, slots=True)
class HtmlPage:
    """Everything that the page shows. Every text is one line without control characters, not yet escaped for HTML."""

    id: str
    kind: str
    check: str
    kind_text: str
    title: str
    rank: int
    facts: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    divergence: str
    contrasts: tuple[Contrast, ...]
    contrasts_left_out: int
    contrasts_cut: int
    detail: tuple[str, ...]
    sheets: tuple[DrawingSheet, ...]
    focus: str
    blamed: tuple[tuple[str, Card, ValueRecord | None], ...]
    data: str
    schedule: ScheduleDrawing | None
    schedule_first: bool
    block: ReportBlock
    blame: str
    foreign: tuple[str, ...]
    relations: tuple[NodeValue, ...]
    relations_summary: str
    values_domain: str
    relations_left_out: int
    why: str
    timelines: tuple[CollectiveTimeline, ...]
    waiting: WaitingCycle | None
    dims: tuple[Dim, ...]
    inputs: tuple[Input, ...]
    input_headings: tuple[str, ...]
    seed: int
    others: tuple[tuple[str, str], ...]
    contract: tuple[tuple[str, str], ...]
    options: tuple[tuple[str, str], ...]
    environment: tuple[tuple[str, str], ...]
    target: str
    replayable: bool
    reproduce: tuple[str, ...]
    terms: tuple[tuple[str, str], ...]


def make_page(case: Counterexample, path: Path | None) -> HtmlPage:
    """Arrange a counterexample for the page.

    Args:
        path: its file, for the commands that reproduce it.
    """
    finding, program = case.finding, case.program
    diagnosis = diagnose(program, case.rewritten, finding)
    first = diagnosis.first
    block = make_block(case, path, diagnosis)
    suspects = [r for r in (diagnosis.rank, finding.rank, *(v.rank for v in case.values)) if r is not None]
    ranks = list(dict.fromkeys([*suspects, *range(program.world_size)]))[:MAX_RANKS]
    contrasts, contrasts_left_out = make_contrasts(case, diagnosis)
    sheets = make_sheets(case, diagnosis, ranks)
    inputs, holders = make_inputs(program, sorted(ranks), case.real_shapes)
    relations = _relations(diagnosis)
    facts = _facts(case)
    return HtmlPage(
        id=case.id,
        kind=sanitize(finding.kind),
        check=sanitize(finding.check),
        kind_text=sanitize(KINDS.get(finding.kind, finding.check)),
        title=sanitize(finding.title),
        rank=diagnosis.rank,
        facts=facts,
        notes=tuple(sanitize(sentence) for _, sentence in case.notes),
        divergence=block.divergence,
        contrasts=contrasts,
        contrasts_left_out=contrasts_left_out,
        contrasts_cut=MAX_VALUES if len(case.values) == MAX_VALUES < program.world_size else 0,
        detail=_bounded(sanitize_lines(finding.detail))
        if sanitize(finding.detail) not in sanitize(finding.title)
        else (),
        sheets=sheets,
        focus=_focus(sheets),
        blamed=_blamed(
            sheets,
            {} if first is None else dict(first.operands),
            Runs(diagnosis.before, diagnosis.after, ranks),
            _filled(case, diagnosis.rank, block.blamed),
        ),
        data=merge([sheet.cards for sheet in sheets]).data() if sheets else "",
        schedule=draw_schedule(case, diagnosis.rank),
        schedule_first=finding.check in ("happens-before", "interleavings", "order", "schedule"),
        block=block,
        blame="finding" if finding.node is not None else "diverges",
        foreign=_bounded(sanitize_lines(case.listing)) if case.rewritten is None else (),
        relations=_window(relations),
        relations_summary=_counted(relations),
        values_domain=sanitize(diagnosis.before.domain.partition(":")[0]) if diagnosis.before is not None else "",
        relations_left_out=max(0, len(relations) - MAX_RELATIONS),
        why=sanitize(diagnosis.why),
        timelines=timelines(diagnosis.before, diagnosis.after, suspects),
        waiting=describe_waiting(diagnosis.after) if diagnosis.after is not None else None,
        dims=make_dims(program),
        inputs=inputs,
        input_headings=tuple(f"{ranks_text(held)} hold{'s' * (len(held) == 1)}" for held in holders),
        seed=program.seed,
        others=tuple((sanitize(f.kind), sanitize(f.title)) for f in case.others),
        contract=_pairs(asdict(case.contract)),
        options=_pairs({**program.options, **case.facts.options}),
        environment=_pairs(case.environment),
        target=sanitize(case.facts.target or case.facts.name),
        replayable=case.replayable,
        reproduce=tuple(map(sanitize, block.reproduce)),
        terms=_terms(case, block, facts),
    )


def _terms(case: Counterexample, block: ReportBlock, facts: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """The terms of the page that a reader who knows PyTorch may not know."""
    texts = [case.finding.title, case.finding.detail, block.divergence, *block.inputs, *(text for _, text in facts)]
    texts += ["divergence"] if block.divergence else []
    return tuple(one for one in terms_in(texts) if one[0] not in _EVIDENT)


def _facts(case: Counterexample) -> tuple[tuple[str, str], ...]:
    program = case.program
    size = plural(program.size, "node")
    if case.size_drawn > program.size:
        size += f", shrunk from {case.size_drawn}"
    if case.shrink_cut:
        size += " (until the time limit)"
    found = f"{case.finding.check} check"
    if case.executors:
        found += f", in {' and '.join(case.executors)}"
    values = case.finding.check == "equivalence" and case.finding.domain != case.domain
    domain = f"{case.domain}; {case.finding.domain} shows it" if values else case.domain
    facts = (
        ("Pass", case.facts.name),
        ("Mesh", str(program.mesh)),
        ("Program", size),
        ("Found by", found),
        ("Number domain", domain),
    )
    return tuple((label, sanitize(text)) for label, text in facts)


def _pairs(facts: object) -> tuple[tuple[str, str], ...]:
    return tuple((sanitize(str(k)), sanitize(str(v))) for k, v in facts.items()) if hasattr(facts, "items") else ()


def _bounded(lines: list[str]) -> tuple[str, ...]:
    more = len(lines) - MAX_LINES
    return (
        tuple(lines)
        if more <= 0
        else (*lines[:MAX_LINES], f"… {plural(more, 'further line')} in counterexample.json …")
    )


def _relations(diagnosis: Diagnosis) -> list[NodeValue]:
    first = diagnosis.first.node if diagnosis.first is not None else None
    found = (diagnosis.relations or {}).items()
    return [NodeValue(sanitize(node), sanitize(r.text), r.kind, r.explained, node == first) for node, r in found]


def _window(relations: Sequence[NodeValue]) -> tuple[NodeValue, ...]:
    """As many rows as are shown, around the first that diverges."""
    first = next((i for i, r in enumerate(relations) if r.first), 0)
    start = max(0, min(first - MAX_RELATIONS // 2, len(relations) - MAX_RELATIONS))
    return tuple(relations[start : start + MAX_RELATIONS])


def _counted(relations: Sequence[NodeValue]) -> str:
    """How many values have which relation: "12 equal, 1 partial, 3 unrelated"."""
    return ", ".join(f"{n} {kind}" for kind, n in Counter(r.kind for r in relations).items())


def _focus(sheets: Sequence[DrawingSheet]) -> str:
    """The id of the box to look at first: the node to blame, else the first that the pass changed; or ""."""
    boxes = [box for sheet in sheets[:1] for panel in reversed(sheet.drawing.panels) for box in panel.boxes]
    found = next((box for box in boxes if box.flag), None) or next((box for box in boxes if box.mark != "same"), None)
    return found.id if found is not None else ""


def _blamed(
    sheets: Sequence[DrawingSheet], reads: Mapping[str, Relation], runs: Runs, filled: frozenset[str]
) -> tuple[tuple[str, Card, ValueRecord | None], ...]:
    """The box to look at first and its operands, each with its id and values.

    Args:
        reads: how the operands relate to those of the original, by name.
        filled: operands that it does not read.
    """
    id = _focus(sheets)
    if not id or id not in sheets[0].cards.by_box:
        return ()
    cards = sheets[0].cards
    found = [(id, *cards.of(id))]
    for operand in cards.by_box[id].operands[:MAX_OPERANDS]:
        if operand in cards.by_box:
            card, values = cards.of(operand)
            if card.name in filled:
                continue
            relation = reads.get(card.name)
            if relation is not None:
                card = replace(card, relation=sanitize(relation.text), wrong=not relation.explained)
                values = record(runs, relation.original or "", card.name, is_comparable(relation)) or values
            found.append((operand, card, values))
    return tuple(found)


def _filled(case: Counterexample, rank: int, name: str | None) -> frozenset[str]:
    """The allocations that a node writes into: it does not read their previous contents."""
    if case.rewritten is None or name is None:
        return frozenset()
    graph = case.rewritten.graphs[case.rewritten.ranks[rank].graph]
    node = next((node for node in graph.nodes if node.name == name), None)
    if node is None or not in_host_ir(graph):
        return frozenset()
    return frozenset(operand.name for operand in written_operands(node) if is_buffer(operand))


__all__ = ["HtmlPage", "make_page"]
