"""A counterexample as the data of its page: a pure function of the counterexample, so that the page of an old file is the
page that was written beside it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path

from tcverify.counterexample import Counterexample, RankValue
from tcverify.diagnosis import Diagnosis, diagnose
from tcverify.program import KINDS, InputSpec, Program
from tcverify.report.alignment import Row, align
from tcverify.report.block import Block, make_block
from tcverify.report.html_collectives import MAX_RANKS, Timeline, Waiting, contribution, timeline, waiting
from tcverify.report.html_graph import SIGNS, Drawing, Labels, draw
from tcverify.report.html_streams import Schedule, draw_schedule
from tcverify.report.plain import count, plain, plain_lines

#: Rows of the table of relations, and lines of a listing or detail, that a page holds.
MAX_RELATIONS = 200
MAX_LINES = 400

#: Groups of a mesh dim that are shown.
MAX_GROUPS = 32


@dataclass(frozen=True, slots=True)
class Contrast:
    """What was expected and what was computed, on one rank or all."""

    where: str
    expected: str
    computed: str


@dataclass(frozen=True, slots=True)
class Value:
    """The largest difference of one rank's output."""

    rank: int
    label: str
    index: str
    expected: str
    actual: str
    difference: str
    relative: str


@dataclass(frozen=True, slots=True)
class NodeValue:
    """How one rewritten node relates to the original."""

    node: str
    text: str
    kind: str
    first: bool


@dataclass(frozen=True, slots=True)
class Group:
    """An ordered group of a mesh dim."""

    ranks: tuple[int, ...]
    more: int


@dataclass(frozen=True, slots=True)
class Dim:
    name: str
    groups: tuple[Group, ...]
    more: int


@dataclass(frozen=True, slots=True)
class Input:
    """One input, and which part of it each rank holds."""

    name: str
    dtype: str
    shape: str
    placement: str
    recipe: str
    parts: tuple[str, ...]


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
    divergence: str
    reads: tuple[tuple[str, str], ...]
    contrasts: tuple[Contrast, ...]
    detail: tuple[str, ...]
    drawings: tuple[tuple[str, Drawing], ...]
    schedule: Schedule | None
    schedule_first: bool
    block: Block
    blame: str
    foreign: tuple[str, ...]
    values: tuple[Value, ...]
    relations: tuple[NodeValue, ...]
    relations_left_out: int
    why: str
    timelines: tuple[Timeline, ...]
    waiting: Waiting | None
    dims: tuple[Dim, ...]
    inputs: tuple[Input, ...]
    input_ranks: tuple[int, ...]
    seed: int
    others: tuple[tuple[str, str], ...]
    contract: tuple[tuple[str, str], ...]
    options: tuple[tuple[str, str], ...]
    environment: tuple[tuple[str, str], ...]
    target: str
    replayable: bool
    reproduce: tuple[str, ...]


def make_page(case: Counterexample, path: Path | None) -> HtmlPage:
    """Arrange a counterexample for the page.

    Args:
        path: its file, for the commands that reproduce it.
    """
    finding, program = case.finding, case.program
    diagnosis = diagnose(program, case.rewritten, finding)
    first = diagnosis.first
    block = make_block(case, path, diagnosis)
    suspects = [r for r in (finding.rank, *(v.rank for v in case.values)) if r is not None]
    ranks = tuple(sorted(list(dict.fromkeys([*suspects, *range(program.world_size)]))[:MAX_RANKS]))
    relations = list((diagnosis.relations or {}).items())
    return HtmlPage(
        id=case.id,
        kind=plain(finding.kind),
        check=plain(finding.check),
        kind_text=plain(KINDS.get(finding.kind, finding.check)),
        title=plain(finding.title),
        rank=diagnosis.rank,
        facts=_facts(case),
        divergence=block.divergence,
        reads=tuple((plain(name), plain(r.text)) for name, r in first.operands) if first is not None else (),
        contrasts=_contrasts(case, diagnosis),
        detail=_bounded(plain_lines(finding.detail)) if plain(finding.detail) not in plain(finding.title) else (),
        drawings=_drawings(case, diagnosis),
        schedule=draw_schedule(case, diagnosis.rank),
        schedule_first=finding.check in ("happens-before", "interleavings", "schedule"),
        block=block,
        blame="finding" if finding.node is not None else "diverges",
        foreign=_bounded(plain_lines(case.listing)) if case.rewritten is None else (),
        values=tuple(_value(v) for v in case.values),
        relations=tuple(
            NodeValue(plain(node), plain(r.text), r.kind, first is not None and node == first.node)
            for node, r in relations[:MAX_RELATIONS]
        ),
        relations_left_out=max(0, len(relations) - MAX_RELATIONS),
        why=plain(diagnosis.why),
        timelines=_timelines(diagnosis, suspects),
        waiting=waiting(diagnosis.after) if diagnosis.after is not None else None,
        dims=_dims(program),
        inputs=tuple(_input(spec, program, ranks) for spec in program.inputs),
        input_ranks=ranks,
        seed=program.seed,
        others=tuple((plain(f.kind), plain(f.title)) for f in case.others),
        contract=_pairs(asdict(case.contract)),
        options=_pairs(case.facts.options),
        environment=_pairs(case.environment),
        target=plain(case.facts.target or case.facts.name),
        replayable=case.replayable,
        reproduce=tuple(map(plain, block.reproduce)),
    )


def _facts(case: Counterexample) -> tuple[tuple[str, str], ...]:
    program = case.program
    size = count(program.size, "node")
    if case.size_drawn > program.size:
        size += f", shrunk from {case.size_drawn}"
    if case.shrink_cut:
        size += " (until time ran out)"
    found = f"{case.finding.check} check"
    if case.executors:
        found += f", in {' and '.join(case.executors)}"
    mesh = str(program.mesh)
    if program.world_size > MAX_RANKS:
        sizes = [f"{dim.name}: {count(len(dim.groups), 'group')}" for dim in program.mesh.dims]
        mesh = f"{program.world_size} ranks; {'; '.join(sizes)}"
    facts = (("Pass", case.facts.name), ("Mesh", mesh), ("Program", size), ("Found by", found))
    return tuple((label, plain(text)) for label, text in facts)


def _pairs(facts: object) -> tuple[tuple[str, str], ...]:
    return tuple((plain(str(k)), plain(str(v))) for k, v in facts.items()) if hasattr(facts, "items") else ()


def _bounded(lines: list[str]) -> tuple[str, ...]:
    more = len(lines) - MAX_LINES
    return (
        tuple(lines) if more <= 0 else (*lines[:MAX_LINES], f"… {count(more, 'further line')} in counterexample.json …")
    )


def _contrasts(case: Counterexample, diagnosis: Diagnosis) -> tuple[Contrast, ...]:
    """Expected and computed, in as few words as the kind of finding allows."""
    finding, after = case.finding, diagnosis.after
    if case.values:
        return tuple(
            Contrast(f"rank {v.rank}", f"{plain(v.label)}{list(v.index)} = {_number(v.expected)}", _number(v.actual))
            for v in case.values[:4]
        )
    where = f"rank {finding.rank}" if finding.rank is not None else "all ranks"
    if after is not None and after.mismatch is not None:
        sentence = "every member of the group calls the same collective"
        calls = sorted(after.mismatch[1].items())[:8]
        found = {r: f"{call.collective.kind}({contribution(call.collective)})" for r, call in calls}
        return tuple(Contrast(f"rank {r}", sentence, plain(text)) for r, text in found.items())
    if after is not None and after.hang is not None:
        waits = after.hang.waits[:8]
        return tuple(
            Contrast(f"rank {w.rank}", "every rank finishes", f"waits for ever in {w.call.node}") for w in waits
        )
    if finding.kind == "rewritten-raises":
        return (Contrast(where, "finishes, as the original does", plain(finding.detail or finding.title)),)
    if finding.check == "application":
        return (Contrast(where, "the pass returns a graph", plain(finding.title)),)
    return ()


def _number(value: float) -> str:
    return f"{value:.9g}"


def _value(value: RankValue) -> Value:
    difference = abs(value.actual - value.expected)
    relative = difference / abs(value.expected) if value.expected and math.isfinite(difference) else math.nan
    return Value(
        value.rank,
        plain(value.label),
        str(list(value.index)),
        _number(value.expected),
        _number(value.actual),
        f"{difference:.3g}",
        f"{100 * relative:.3g} %" if math.isfinite(relative) else "",
    )


def _drawings(case: Counterexample, diagnosis: Diagnosis) -> tuple[tuple[str, Drawing], ...]:
    """The graph of the rank that shows it; where ranks disagree and run different graphs, also two of these."""
    rank, program, rewritten = diagnosis.rank, case.program, case.rewritten
    if len(program.graphs[program.ranks[rank].graph].nodes) <= 1:
        return ()
    first = diagnosis.first
    flags = {first.node: "diverges"} if first is not None else {}
    if case.finding.node is not None:
        flags[case.finding.node] = "finding"
    if rewritten is None:
        rows = [Row("same", node, None) for node in program.graphs[program.ranks[rank].graph].nodes]
        labels = Labels(("Before the pass",), SIGNS, "p", {"b": flags})
        return ((f"The program on rank {rank}", draw(program, rows, {}, labels)),)
    labels = Labels(("Before the pass", "After the pass"), SIGNS, "p", {"a": flags})
    rows = align(program, rewritten, rank)
    found = (
        f"The program on rank {rank}, before ⇒ after the pass",
        draw(program, rows, diagnosis.relations or {}, labels),
    )
    pair = _disagreeing(rewritten, diagnosis)
    if pair is None:
        return (found,)
    (one, its), (other, others) = pair
    signs = {**SIGNS, "removed": f"− rank {one} only", "inserted": f"+ rank {other} only", "changed": "~ differs"}
    captions = (f"Rank {one}, after the pass", f"Rank {other}, after the pass")
    labels = Labels(captions, signs, "r", {"b": {its: "finding"}, "a": {others: "finding"}})
    rows = align(rewritten, rewritten, one, other)
    return (found, (f"After the pass, rank {one} against rank {other}", draw(program, rows, {}, labels)))


def _disagreeing(rewritten: Program, diagnosis: Diagnosis) -> tuple[tuple[int, str], tuple[int, str]] | None:
    """Two ranks that disagree or wait for each other in different graphs, each with the node where it does."""
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


def _timelines(diagnosis: Diagnosis, suspects: list[int]) -> tuple[Timeline, ...]:
    runs = [(diagnosis.before, "Before the pass"), (diagnosis.after, "After the pass")]
    return tuple(
        timeline(run, caption, suspects)
        for run, caption in runs
        if run is not None and any(result.calls for result in run.ranks)
    )


def _dims(program: Program) -> tuple[Dim, ...]:
    return tuple(
        Dim(
            plain(dim.name),
            tuple(Group(g[:MAX_RANKS], max(0, len(g) - MAX_RANKS)) for g in dim.groups[:MAX_GROUPS]),
            max(0, len(dim.groups) - MAX_GROUPS),
        )
        for dim in program.mesh.dims
    )


def _input(spec: InputSpec, program: Program, ranks: tuple[int, ...]) -> Input:
    placement = ", ".join(f"{placement} over {dim}" for dim, placement in spec.placements) or "replicated"
    recipe = spec.recipe.kind if spec.recipe.scale == 1.0 else f"{spec.recipe.kind} × {spec.recipe.scale:.3g}"
    return Input(
        plain(spec.name),
        str(spec.dtype).removeprefix("torch."),
        str(list(spec.shape)),
        plain(placement),
        recipe,
        tuple(_part(spec, program, rank) for rank in ranks),
    )


def _part(spec: InputSpec, program: Program, rank: int) -> str:
    """What a rank holds of an input: a slice, an addend, a value of its own, all of it."""
    bounds = spec.bounds(program.mesh, rank)
    cut = any((low, high) != (0, size) for (low, high), size in zip(bounds, spec.shape, strict=True))
    cuts = ["[" + ", ".join(f"{low}:{high}" for low, high in bounds) + "]"] if cut else []
    for name, placement in spec.placements:
        dim = program.mesh.dim(name)
        if placement.kind == "partial":
            cuts.append(f"addend {dim.position(rank) + 1} of {len(dim.group(rank))}")
        elif placement.kind == "varying":
            cuts.append("its own values")
    return ", ".join(cuts) or "all"


__all__ = ["HtmlPage", "make_page"]
