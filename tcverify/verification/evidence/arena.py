"""Evidence `arena`: the rewritten program with its communication buffers in one piece of memory per rank."""

from __future__ import annotations

from tcverify.checks import Evidence
from tcverify.execution import ArenaRun, run_in_arena


def run_arena(evidence: Evidence) -> ArenaRun | None:
    """Run the rewritten program in an arena, if it has communication buffers."""
    return None if evidence.rewritten is None else run_in_arena(evidence.rewritten)
