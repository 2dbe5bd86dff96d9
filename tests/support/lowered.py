"""Writes lowered graphs by hand, and asks the checks of streams what they find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from tcverify.application import Pair
from tcverify.checks import CHECKS, Evidence
from tcverify.execution import Lockstep
from tcverify.program import Contract, GraphBuilder, InputSpec, Mesh, Program, RankBinding, StreamSettings
from tcverify.program.finding import Doubt, Finding
from tests.support.programs import TP2

SQUARES = [InputSpec("x", (4, 4)), InputSpec("y", (4, 4))]


class Lowering(GraphBuilder):
    """A builder with anchors, which keeps dead nodes.

    Attributes:
        x, y: the inputs, both [4, 4].
    """

    x: fx.Node
    y: fx.Node

    def wait(self, value: fx.Node, stream: Any, *tokens: fx.Node) -> fx.Node:
        return self.call("tensor_cast::_internal_wait_and_bind", value, stream, list(tokens))

    def record(self, value: fx.Node, stream: Any = 0) -> fx.Node:
        return self.call("tensor_cast::_internal_record", value, stream)

    def mm(self, a: Any, b: Any = None, cost_s: float | None = None) -> fx.Node:
        return self.work("aten::mm", a, self.y if b is None else b, cost_s=cost_s)

    def relu(self, a: Any, cost_s: float | None = None) -> fx.Node:
        return self.work("aten::relu", a, cost_s=cost_s)

    def add(self, a: Any, b: Any, cost_s: float | None = None) -> fx.Node:
        return self.work("aten::add.Tensor", a, b, cost_s=cost_s)

    def reduce(self, a: Any, cost_s: float | None = None, dim: str = "tp") -> fx.Node:
        return self.work("tensor_cast::all_reduce", a, self.rank, self.group(dim), cost_s=cost_s)

    def work(self, op: str, *args: Any, cost_s: float | None = None) -> fx.Node:
        node = self.call(op, *args)
        if cost_s is not None:
            node.meta["cost_s"] = cost_s
        return node

    def finish(self, result: Any) -> fx.Graph:
        self._graph.output(result)
        return self._graph


Build = Callable[[Lowering], Any]


def program(
    *builds: Build,
    mesh: Mesh = TP2,
    inputs: Sequence[InputSpec] = tuple(SQUARES),
    schedule: dict[str, Any] | None = None,
    streams: StreamSettings | None = None,
) -> Program:
    """A program of these graphs: one for all ranks, or one per rank."""
    graphs, ranks = [], []
    for i, build in enumerate(builds):
        builder = Lowering(mesh, {spec.name: spec for spec in inputs}, i)
        builder.x, builder.y = builder.input("x"), builder.input("y")
        graphs.append(builder.finish(build(builder)))
        if schedule is not None:
            list(graphs[-1].nodes)[-1].meta["schedule"] = dict(schedule)
        ranks.append(builder)
    bindings = tuple(
        RankBinding(min(rank, len(builds) - 1), ranks[min(rank, len(builds) - 1)].bindings(rank))
        for rank in range(mesh.world_size)
    )
    return Program(mesh, tuple(graphs), bindings, tuple(inputs), streams=streams)


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
