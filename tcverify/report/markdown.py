"""A counterexample as Markdown, to paste into an issue."""

from __future__ import annotations

from pathlib import Path

from tcverify.counterexample import Counterexample
from tcverify.report.block import make_block


def to_markdown(case: Counterexample, path: Path | None) -> str:
    """Return the block of a counterexample as Markdown. Texts of others stand in code, where nothing is markup.

    Args:
        path: its file, see `make_block`.
    """
    block = make_block(case, path)
    parts = [f"## Case {case.id}", "", _fence([f"{block.name}: {block.headline}", block.title, *block.detail])]
    if block.times:
        parts += ["", "### Streams", "", _fence(block.times)]
    if block.divergence:
        parts += ["", "### First divergence", "", _fence([block.divergence])]
    parts += ["", "### Program", "", _fence([block.program, *block.inputs])]
    if block.graph:
        marked = [
            f"{e.mark} {e.text}" + ("  ◀ here" if e.node == block.blamed and e.mark != "-" else "") for e in block.graph
        ]
        parts += ["", f"### R{block.caption[1:]}", "", _fence(marked, "diff")]
    if block.listing:
        parts += ["", "### Rank 0, after the pass", "", _fence(block.listing)]
    if block.values:
        parts += ["", "### Largest difference per rank", "", _fence(block.values)]
    if block.others:
        parts += ["", "### Also", "", _fence(block.others)]
    parts += ["", "### Found", "", _fence([block.footer])]
    if block.reproduce:
        parts += ["", "### Reproduce with", "", _fence(block.reproduce, "sh")]
    return "\n".join(parts)


def _fence(lines: list[str], language: str = "") -> str:
    """A code block whose fence is longer than any run of backticks inside."""
    text = "\n".join(lines)
    longest = max((len(run) for run in "".join(c if c == "`" else " " for c in text).split()), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
