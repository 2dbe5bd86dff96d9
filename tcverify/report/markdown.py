"""A counterexample as Markdown, to paste into an issue: written for GitHub, readable anywhere."""

from __future__ import annotations

from pathlib import Path

from tcverify.cases.counterexample import Counterexample
from tcverify.explain.diagnosis import diagnose
from tcverify.program import KINDS
from tcverify.report.block import ReportBlock, make_block
from tcverify.report.sanitize import plural, sanitize

#: Graphs or details with more lines than this are collapsed.
OPEN_LINES = 20


def to_markdown(case: Counterexample, path: Path | None) -> str:
    """Return a counterexample as Markdown. Foreign text is in code, where it cannot be markup, a mention or a link.

    Args:
        path: its file, see `make_block`.
    """
    diagnosis = diagnose(case.program, case.rewritten, case.finding)
    block = make_block(case, path, diagnosis)
    kind = case.finding.kind
    parts = [f"### {code_span(kind)} in {code_span(block.name)}", "", f"**{code_span(block.title)}**", ""]
    if kind in KINDS:
        parts[-1:] = ["", f"{_sentence(KINDS[kind])}", ""]
    if block.divergence:
        parts += [f"**First divergence:** {code_span(block.divergence)}", ""]
    if block.made_by:
        parts += [f"**Rewritten at:** {code_span(block.made_by)}", ""]
    if block.blame:
        parts += [f"**Root cause:** {code_span(block.blame)}", ""]
    if block.end_to_end:
        parts += [f"**End to end:** {code_span(block.end_to_end)}", ""]
    if block.detail:
        parts += [*_folded("", f"Detail, {plural(len(block.detail), 'line')}", block.detail), ""]
    parts += [*_table(_facts(case, block)), ""]
    parts += ["**Inputs**", "", *fence(block.inputs), ""] if block.inputs else []
    if block.graph:
        marked = [f"{e.mark} {e.text}{_here(block, e.node, e.mark)}" for e in block.graph]
        parts += [
            *_folded(caption := f"R{block.caption[1:]}", f"{caption}, {plural(len(marked), 'line')}", marked, "diff"),
            "",
        ]
    if block.listing:
        parts += [*_folded(caption := "Rank 0, after the pass", caption, block.listing), ""]
    if block.values:
        parts += ["**Largest difference per rank**", "", *fence(block.values), ""]
    if block.statistics:
        heading, *rows = block.statistics
        cells = [f"| {' | '.join(table_cell(code_span(cell)) for cell in row)} |" for row in rows]
        parts += [
            "**Collectives, by the pass** (rank 0, times in µs)",
            "",
            f"| {' | '.join(heading)} |",
            "|---" * len(heading) + "|",
            *cells,
            "",
        ]
    if block.others:
        parts += ["**Also**", "", *fence(block.others), ""]
    if block.reproduce:
        parts += ["**Reproduce with**", "", *fence(block.reproduce, "sh"), ""]
    return "\n".join(parts).rstrip()


def _facts(case: Counterexample, block: ReportBlock) -> list[tuple[str, str]]:
    """Rows of the table: the label of each, and its text as Markdown."""
    finding = case.finding
    facts = [("case", code_span(case.id)), ("pass", code_span(sanitize(case.facts.target or case.facts.name)))]
    options = ", ".join(f"{name}={value}" for name, value in case.facts.options.items())
    facts += [("options", code_span(sanitize(options)))] if options else []
    stage = finding.data.get("stage")
    facts += [("faulty stage", code_span(sanitize(str(stage))))] if stage else []
    facts += [("faulty node", code_span(sanitize(block.blamed)))] if block.blamed else []
    facts += [("program", code_span(sanitize(block.program)))]
    facts += [(what, code_span(line)) for what, _, line in (text.partition(": ") for text in block.times)]
    facts += [("found", code_span(block.footer.removeprefix("found ")))]
    return facts


def _here(block: ReportBlock, node: str, mark: str) -> str:
    return "  ◀ here" if node == block.blamed and mark != "-" else ""


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _table(rows: list[tuple[str, str]]) -> list[str]:
    return ["| | |", "|---|---|", *(f"| {name} | {table_cell(text)} |" for name, text in rows)]


def _folded(caption: str, summary: str, lines: list[str], language: str = "") -> list[str]:
    """Lines of code under a caption; many lines are collapsed behind a summary. Caption and summary are trusted text.

    The blank lines inside make GitHub render Markdown there.
    """
    if len(lines) <= OPEN_LINES:
        return [*([f"**{caption}**", ""] if caption else []), *fence(lines, language)]
    return ["<details>", f"<summary>{summary}</summary>", "", *fence(lines, language), "", "</details>"]


def fence(lines: list[str], language: str = "") -> list[str]:
    """Return a code block with a fence longer than any run of backticks inside."""
    fence = "`" * max(3, _longest_run("\n".join(lines)) + 1)
    return [f"{fence}{language}", *lines, fence]


def code_span(text: str) -> str:
    """Return a code span, with a fence longer than any run of backticks inside."""
    fence = "`" * (_longest_run(text) + 1)
    edge = " " if not text.strip() or "`" in (text[0], text[-1]) or " " in (text[0], text[-1]) else ""
    return f"{fence}{edge}{text or '-'}{edge}{fence}"


def table_cell(text: str) -> str:
    """Return text for a table cell. A bar would end the cell, even within code."""
    return text.replace("|", "\\|")


def _longest_run(text: str) -> int:
    return max((len(run) for run in "".join(c if c == "`" else " " for c in text).split()), default=0)


__all__ = ["OPEN_LINES", "code_span", "fence", "table_cell", "to_markdown"]
