"""Findings in PyTorch's passes as users meet them: scripts that need torch alone, what they show, and issues made of both."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tcverify.cases.counterexample import Counterexample
    from tcverify.cases.end_to_end import EndToEnd


def try_end_to_end(case: Counterexample) -> EndToEnd | None:
    """Run a case as a user would; see `trial.try_end_to_end`. What that takes is imported when a case is there."""
    from tcverify.pytorch.end_to_end import trial

    return trial.try_end_to_end(case)


__all__ = ["try_end_to_end"]
