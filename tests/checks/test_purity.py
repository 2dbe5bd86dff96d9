"""What a second application of a pass has broken, as the check of purity says it."""

from __future__ import annotations

import pytest
import torch

from tcverify.application import Pair
from tcverify.checks import CHECKS, Evidence
from tcverify.execution import CollectiveCall, CollectiveWait, Comparison, Hang, Lockstep, NodeError, Run
from tcverify.ops import Collective
from tcverify.program import Contract
from tcverify.program.finding import Finding
from tests.support.programs import reduce_then_norm

CALL = CollectiveCall("all_reduce", Collective("all_reduce", (0, 1), (4,), torch.float32, reduce_op="sum"))


def said(run: Run) -> str:
    """What is found wrong with the run of a program after the second application of a pass."""
    program = reduce_then_norm()
    evidence = Evidence(Pair(program, program), Contract())
    evidence.taken["second-application"] = Comparison("lockstep", Lockstep().run(program), run)
    found = CHECKS["purity"](evidence)
    if not found:
        return ""
    (finding,) = found
    assert isinstance(finding, Finding)
    assert finding.title == "a second application of the pass breaks the program"
    return finding.detail


def test_a_program_that_runs_as_before_is_sound() -> None:
    assert said(Lockstep().run(reduce_then_norm())) == ""


def mismatched(run: Run) -> None:
    run.mismatch = "in all_reduce, rank 0 has root 0 while rank 1 has root 1", {0: CALL}


def hanging(run: Run) -> None:
    run.hang = Hang((CollectiveWait(0, CALL, 1),), False, 1)


def failing(run: Run) -> None:
    run.ranks[1].error = NodeError("mm", "RuntimeError: shapes do not fit")


@pytest.mark.parametrize(
    ("break_", "words"),
    [
        (mismatched, "in all_reduce, rank 0 has root 0 while rank 1 has root 1"),
        (hanging, "it deadlocks: "),
        (failing, "on rank 1, node 'mm' raises RuntimeError: shapes do not fit"),
    ],
)
def test_what_a_second_application_breaks_is_told(break_: object, words: str) -> None:
    run = Lockstep().run(reduce_then_norm())
    break_(run)  # type: ignore[operator]
    assert said(run).startswith(words)
