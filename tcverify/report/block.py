"""The block that shows a counterexample: the same content for the terminal, Markdown and files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tcverify.counterexample import FILE_NAME, Counterexample
from tcverify.program import KINDS
from tcverify.report.listing import Line, difference, input_lines

#: Longest detail that is shown; files hold it whole.
MAX_DETAIL_LINES = 24


@dataclass(frozen=True, slots=True)
class Block:
    """What is shown of a counterexample.

    Attributes:
        headline: kind, pass, ranks, id.
        title: the cause in one line.
        detail: what follows it.
        program: one line about mesh, size and seed.
        inputs: one line per input.
        graph: the graph of `rank` before ⇒ after, or nothing.
        listing: the rewritten graph as text, where it cannot be compared.
        blamed: node that is to blame.
        values: expected and actual values per rank.
        others: titles of further findings.
        footer: who ran it, and versions.
        reproduce: the commands, or why there are none.
    """

    headline: str
    title: str
    detail: list[str]
    program: str
    inputs: list[str]
    rank: int
    graph: list[Line]
    listing: str
    blamed: str | None
    values: list[str]
    others: list[str]
    footer: str
    reproduce: str


def make_block(case: Counterexample, report_dir: Path) -> Block:
    """Arrange a counterexample for people.

    Args:
        report_dir: where its folder is, for the commands that reproduce it.
    """
    finding = case.finding
    rank = finding.rank if finding.rank is not None else 0
    program = case.program
    shrunk = f", shrunk from {case.size_drawn}" if case.size_drawn > program.size else ""
    executors = " and ".join(case.executors) or "the pass alone"
    versions = ", ".join(f"{name} {case.environment[name]}" for name in ("torch", "python") if name in case.environment)
    values = [
        f"rank {v.rank}: {v.label}{list(v.index)} expected {v.expected:.9g}, actual {v.actual:.9g}" for v in case.values
    ]
    folder = report_dir / case.id
    if case.replayable:
        where = "" if str(report_dir) == "reports" else f" --report-dir {report_dir}"
        reproduce = f"tcverify replay {case.id}{where}   |   python {folder / 'repro.py'}"
    else:
        reproduce = (
            f"(the pass cannot be imported by name, so only the process that made it can replay {folder / FILE_NAME})"
        )
    return Block(
        headline=f"{finding.kind}: {KINDS.get(finding.kind, finding.check)}",
        title=finding.title,
        detail=_shorten(finding.detail),
        program=f"{program.mesh}; {program.size} nodes{shrunk}; seed {program.seed}",
        inputs=input_lines(program),
        rank=rank,
        graph=difference(program, case.rewritten, rank) if case.rewritten is not None else [],
        listing="" if case.rewritten is not None else case.listing,
        blamed=finding.node,
        values=values,
        others=[f"{f.kind}: {f.title}" for f in case.others],
        footer=f"found by {finding.check} in {executors}; {versions}",
        reproduce=reproduce,
    )


def _shorten(text: str) -> list[str]:
    lines = text.rstrip().splitlines()
    if len(lines) <= MAX_DETAIL_LINES:
        return lines
    kept = MAX_DETAIL_LINES // 2
    return [*lines[:kept], f"… {len(lines) - 2 * kept} lines, see {FILE_NAME} …", *lines[-kept:]]
