"""A counterexample as Markdown, to paste into an issue."""

from __future__ import annotations

from pathlib import Path

from tcverify.counterexample import Counterexample
from tcverify.report.block import make_block


def to_markdown(case: Counterexample, report_dir: Path) -> str:
    """Return the block of a counterexample as Markdown. Texts of the pass stand in code, where nothing is markup."""
    block = make_block(case, report_dir)
    parts = [
        f"## {case.facts.name}: case {case.id}",
        "",
        f"**{block.headline}**",
        "",
        _fence([block.title, *block.detail]),
    ]
    parts += ["", "### Program", "", _fence([block.program, *block.inputs])]
    if block.graph:
        marked = [
            f"{e.mark} {e.text}" + ("  ◀ here" if e.node == block.blamed and e.mark != "-" else "") for e in block.graph
        ]
        parts += ["", f"### Rank {block.rank}, before ⇒ after", "", _fence(marked, "diff")]
    elif block.listing:
        parts += ["", "### Rank 0, after the pass", "", _fence(block.listing.splitlines())]
    if block.values:
        parts += ["", "### Largest difference per rank", "", _fence(block.values)]
    if block.others:
        parts += ["", "### Also", "", _fence(block.others)]
    parts += ["", block.footer, "", "Reproduce with:", "", _fence([block.reproduce]), ""]
    return "\n".join(parts)


def _fence(lines: list[str], language: str = "") -> str:
    """A code block whose fence is longer than any run of backticks inside."""
    text = "\n".join(lines)
    longest = max((len(run) for run in "".join(c if c == "`" else " " for c in text).split()), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
