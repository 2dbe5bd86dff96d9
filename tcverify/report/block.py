"""The block that shows a counterexample: the same content for the terminal, Markdown and files."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from torch.utils._pytree import MappingKey, tree_leaves_with_path

from tcverify.cases.counterexample import FILE_NAME, Counterexample, RankValue
from tcverify.explain.diagnosis import Diagnosis, diagnose
from tcverify.program import KINDS, Program
from tcverify.program.statistics import TABLE_HEADINGS, table_rows
from tcverify.report.listing import ListingLine, graph_lines, input_lines, listing_difference
from tcverify.report.sanitize import plural, sanitize, sanitize_lines
from tcverify.report.timetable import given_line, time_line, timetables

#: Longest detail and longest graph that are shown, in lines; files contain them whole.
MAX_DETAIL_LINES = 24
MAX_GRAPH_LINES = 80

#: In longer graphs, number of unchanged nodes that are shown around a changed one.
CONTEXT = 3

#: Number of entries of lists that are shown: values, further findings.
MAX_ENTRIES = 16

#: Number of lines of the pass that are named.
MAX_LINES = 3


@dataclass(frozen=True, slots=True)
class ReportBlock:
    """The contents of a counterexample's block. Every text is one line that is safe for terminals, see `sanitize`.

    Attributes:
        name: of the pass.
        headline: kind, pass, ranks, id.
        title: the cause in one line.
        detail: the lines after it.
        times: one line about the streams of a rewritten graph and its times, if it has both, and one about the program's
            settings of time, if the rewritten graph has streams.
        divergence: the first value that the original does not explain, and how it relates to the original's; or "".
        made_by: the lines of the pass that made the rewrite, if known; or "".
        blame: which of the pass's rewrites is to blame, if that was determined; or "".
        end_to_end: what PyTorch's public API makes of the program, if that was tried; or "".
        literal: whether the detail is a traceback or a log, whose lines must not be wrapped.
        program: one line about mesh, size, seed and options.
        inputs: one line per input.
        graph: the graph of `rank` before ⇒ after; only before, if there is no graph after.
        caption: the line above the graph.
        listing: the rewritten graph as text, if it cannot be compared.
        blamed: the node to blame, or whose value diverges first.
        values: expected and actual values per rank.
        statistics: rows of a table of what the pass reports about each collective, headings first; empty if it reports nothing.
        others: titles of further findings.
        footer: how it was run, and versions.
        reproduce: the commands; none if the case cannot be replayed.
    """

    name: str
    headline: str
    title: str
    detail: list[str]
    times: list[str]
    divergence: str
    made_by: str
    blame: str
    end_to_end: str
    literal: bool
    program: str
    inputs: list[str]
    rank: int
    graph: list[ListingLine]
    caption: str
    listing: list[str]
    blamed: str | None
    values: list[str]
    statistics: list[tuple[str, ...]]
    others: list[str]
    footer: str
    reproduce: list[str]


def make_block(case: Counterexample, path: Path | None, diagnosis: Diagnosis | None = None) -> ReportBlock:
    """Arrange the contents of a counterexample's block.

    Args:
        path: its file, for the commands that reproduce it; None omits them.
        diagnosis: where the versions diverge, if already known.
    """
    finding = case.finding
    diagnosis = diagnosis or diagnose(case.program, case.rewritten, finding)
    rank = diagnosis.rank
    program = case.program
    shrunk = f", shrunk from {case.size_drawn}" if case.size_drawn > program.size else ""
    if case.shrink_cut:
        shrunk += " (until the time limit)"
    where = f"in {' and '.join(case.executors)}" if case.executors else "before any program ran"
    domain = "" if finding.domain == "float64" else f", in the {finding.domain} domain"
    versions = ", ".join(f"{name} {case.environment[name]}" for name in ("torch", "python") if name in case.environment)
    values = [
        f"rank {v.rank}: {place_of(v, program)} expected {v.expected:.9g}, actual {v.actual:.9g}" for v in case.values
    ]
    graph, caption = _graph(case, diagnosis)
    title = sanitize(finding.title)
    return ReportBlock(
        name=sanitize(case.facts.name),
        headline=sanitize(f"{finding.kind}: {KINDS.get(finding.kind, finding.check)}"),
        title=title,
        detail=[] if sanitize(finding.detail) in title else _shorten(sanitize_lines(finding.detail), MAX_DETAIL_LINES),
        times=_times(case, rank),
        divergence=sanitize(str(diagnosis.first)) if diagnosis.first is not None else "",
        made_by=sanitize("; ".join(map(str, case.made_by[:MAX_LINES]))),
        blame=sanitize(str(case.blame)) if case.blame is not None else "",
        end_to_end=sanitize(str(case.end_to_end)) if case.end_to_end is not None else "",
        literal=finding.check == "application",
        program=f"{program.mesh}; {plural(program.size, 'node')}{shrunk}; seed {program.seed}{_told(program)}",
        inputs=[sanitize(text) for text in input_lines(program, case.real_shapes)],
        rank=rank,
        graph=graph,
        caption=caption,
        listing=_shorten(sanitize_lines(case.listing), MAX_GRAPH_LINES) if case.rewritten is None else [],
        blamed=_blamed(case, diagnosis),
        values=_first([sanitize(text) for text in values]),
        statistics=_statistics(case),
        others=_first([sanitize(f"{f.kind}: {f.title}") for f in case.others]),
        footer=sanitize(f"found by {finding.check} {where}{domain}; {versions}"),
        reproduce=_commands(case, path) if path is not None else [],
    )


def _statistics(case: Counterexample) -> list[tuple[str, ...]]:
    rows = [tuple(map(sanitize, row)) for row in table_rows(case.statistics[:MAX_ENTRIES])]
    return [TABLE_HEADINGS, *rows] if rows else []


def _times(case: Counterexample, rank: int) -> list[str]:
    found = timetables(case, rank)
    if found is None:
        return []
    before, after = found
    lines = [(f"streams of rank {rank}", time_line(after))]
    if after.asynchronous:
        lines = [(f"time of rank {rank}", time_line(after))]
        lines += [("before the pass", time_line(before))] if before is not None else []
    lines.append(("given to the pass", given_line(case.program, rank)))
    return [sanitize(f"{what}: {line}") for what, line in lines if line]


def _blamed(case: Counterexample, diagnosis: Diagnosis) -> str | None:
    return diagnosis.first.node if diagnosis.first is not None else case.finding.node


def _graph(case: Counterexample, diagnosis: Diagnosis) -> tuple[list[ListingLine], str]:
    rank = diagnosis.rank
    if case.rewritten is not None:
        lines = listing_difference(case.program, case.rewritten, rank)
        caption = f"rank {rank}, before ⇒ after the pass (- removed, + added)"
        if all(line.mark == " " for line in lines):
            caption = f"rank {rank}, unchanged by the pass"
    else:
        lines = [ListingLine(" ", name, text) for name, text in graph_lines(case.program, rank)]
        caption = f"rank {rank}, before the pass"
    return [ListingLine(e.mark, e.node, sanitize(e.text)) for e in _focus(lines, _blamed(case, diagnosis))], caption


def _focus(lines: list[ListingLine], blamed: str | None) -> list[ListingLine]:
    """Of a long graph, keep what changed and its surroundings."""
    if len(lines) <= MAX_GRAPH_LINES:
        return lines
    near: set[int] = set()
    for i, line in enumerate(lines):
        if line.mark != " " or line.node == blamed:
            near.update(range(i - CONTEXT, i + CONTEXT + 1))
    kept: list[ListingLine] = []
    skipped = 0
    for i, line in enumerate(lines):
        if i in near and len(kept) < MAX_GRAPH_LINES:
            if skipped:
                kept.append(ListingLine(" ", "", f"… {plural(skipped, 'node')} …"))
                skipped = 0
            kept.append(line)
        else:
            skipped += 1
    return [*kept, ListingLine(" ", "", f"… {plural(skipped, 'node')} …")] if skipped else kept


def place_of(value: RankValue, program: Program) -> str:
    """Where a value differs: the output and the index, and the name of the output if the program returns a dict."""
    place = f"{value.label}{list(value.index)}"
    if 0 <= value.rank < len(program.ranks):
        returned = program.graphs[program.ranks[value.rank].graph].output_node().args[0]
        paths = {f"output {number}": keys for number, (keys, _) in enumerate(tree_leaves_with_path(returned))}
        keys = paths.get(value.label, ())
        if any(isinstance(key, MappingKey) for key in keys):
            names = [str(key.key) if isinstance(key, MappingKey) else str(getattr(key, "idx", key)) for key in keys]
            place += f" ({'.'.join(names)})"
    return sanitize(place)


def _commands(case: Counterexample, path: Path) -> list[str]:
    if not case.replayable:
        return []
    folder = path.parent
    if path.name != FILE_NAME or folder.name != case.id:
        return [f"tcverify replay {shlex.quote(str(path))}"]
    where = "" if str(folder.parent) == "reports" else f" --report-dir {shlex.quote(str(folder.parent))}"
    return [f"tcverify replay {case.id}{where}", f"python {shlex.quote(str(folder / 'repro.py'))}"]


def _shorten(lines: list[str], limit: int) -> list[str]:
    if len(lines) <= limit:
        return lines
    kept = limit // 2
    return [*lines[:kept], f"… {len(lines) - 2 * kept} lines, see {FILE_NAME} …", *lines[-kept:]]


def _first(entries: list[str]) -> list[str]:
    more = len(entries) - MAX_ENTRIES
    return entries if more <= 0 else [*entries[:MAX_ENTRIES], f"… {more} more, see {FILE_NAME} …"]


def _told(program: Program) -> str:
    """The options for the pass that a program carries, as the end of a line about it."""
    named = (f"{name}={value}" for name, value in program.options.items())
    return sanitize(f"; options {', '.join(named)}") if program.options else ""
