"""Writes lowered graphs by hand, and asks the checks of streams what they find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from tcverify.application import Pair
from tcverify.checks import CHECKS, Evidence
from tcverify.execution import Lockstep
from tcverify.program import Contract, InputSpec, Mesh, Program, StreamSettings
from tcverify.program.finding import Doubt, Finding
from tests.support.hand_written import SQUARES, Writing, written
from tests.support.programs import TP2


class Lowering(Writing):
    """A builder with anchors."""

    def wait(self, value: fx.Node, stream: Any, *tokens: fx.Node) -> fx.Node:
        return self.call("tensor_cast::_internal_wait_and_bind", value, stream, list(tokens))

    def record(self, value: fx.Node, stream: Any = 0) -> fx.Node:
        return self.call("tensor_cast::_internal_record", value, stream)

    def reduce(self, a: Any, cost_s: float | None = None, dim: str = "tp") -> fx.Node:
        return self.work("tensor_cast::all_reduce", a, self.rank, self.group(dim), cost_s=cost_s)


Build = Callable[[Lowering], Any]


def program(
    *builds: Build,
    mesh: Mesh = TP2,
    inputs: Sequence[InputSpec] = SQUARES,
    schedule: dict[str, Any] | None = None,
    streams: StreamSettings | None = None,
) -> Program:
    """A program of these graphs: one for all ranks, or one per rank."""
    made = written(Lowering, builds, mesh, inputs)
    for graph in made.graphs if schedule is not None else ():
        graph.output_node().meta["schedule"] = dict(schedule or {})
    return replace(made, streams=streams)


def judge(
    check: str, rewritten: Program, *, original: Program | None = None, run: bool = False, **promises: Any
) -> list[Finding | Doubt]:
    """What a check says of a rewritten program."""
    before = original if original is not None else rewritten
    evidence = Evidence(Pair(before, rewritten, changed=True), Contract(**promises))
    if run:
        evidence.taken["lockstep"] = [Lockstep().compare(before, rewritten)]
    return CHECKS[check](evidence)


def findings(build: Build, *more: Build, run: bool = False, mesh: Mesh = TP2, **promises: Any) -> list[Finding]:
    """What happens-before says of a graph."""
    found = judge("happens-before", program(build, *more, mesh=mesh), run=run, **promises)
    assert not [f for f in found if isinstance(f, Doubt)], found
    return [f for f in found if isinstance(f, Finding)]


def kinds(build: Build, *more: Build, **options: Any) -> list[str]:
    return [f.kind for f in findings(build, *more, **options)]
