"""A counterexample as plain text, for logs and code review: the same on every machine, 80 columns, no colour."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

from rich.console import Console

from tcverify.cases.counterexample import Counterexample
from tcverify.report.terminal import show

WIDTH = 80


def to_text(case: Counterexample, path: Path | None, width: int = WIDTH) -> str:
    """Return the block of a counterexample. Commands and tracebacks are never wrapped; everything else is wrapped at `width`.

    Args:
        path: its file, see `make_block`.
    """
    text = StringIO()
    console = Console(
        file=text, width=width, color_system=None, force_terminal=False, highlight=False, markup=False, emoji=False
    )
    show(console, case, path)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip().split("\n"))


__all__ = ["WIDTH", "to_text"]
