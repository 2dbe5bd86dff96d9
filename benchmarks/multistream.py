"""Times and memory of multistream scheduling by the size of the graph: `python benchmarks/multistream.py`.

A chain is one op after the other, of which every fifth is a collective whose result is read four ops later. A branching graph
has layers of four branches, each of three ops with a collective in the middle, and a sum that joins them. Reading is inference
of specs and edges; planning covers all orders tried; lowering moves and inserts nodes, with metadata; checking is that of
lowered graphs, without lockstep. Memory is the most that Python allocates while the pass runs, beyond the graph it is given.
Compare rows of one run only: machines differ.
"""

from __future__ import annotations

import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from torch import fx

sys.path.insert(0, str(Path(__file__).parents[1]))

from tcverify.application import InProcess, load_pass
from tcverify.checks.evidence import Evidence
from tcverify.checks.streams.happens_before import check_happens_before
from tcverify.checks.streams.schedule import check_schedule
from tcverify.passes import Multistream
from tcverify.passes.multistream.lowering import StreamLowering, plan_joins
from tcverify.program import GraphBuilder, InputSpec, Mesh, Program, spmd_program

SIZES = (100, 300, 1_000, 3_000, 10_000)
US = 1e-6


def chain(b: GraphBuilder, nodes: int) -> Any:
    value = other = b.input("x")
    weight = b.input("w")
    for number in range(nodes):
        if number % 5 == 0:
            other = reduced(b, value)
        elif number % 5 == 4:
            value = costed(b.call("aten::add.Tensor", value, other), 5)
        else:
            value = costed(b.call("aten::mm", value, weight), 10)
    return value, other


def branching(b: GraphBuilder, nodes: int) -> Any:
    value, weight = b.input("x"), b.input("w")
    for _ in range(max(1, nodes // 15)):
        ends = []
        for branch in range(4):
            middle = reduced(b, costed(b.call("aten::mm", value, weight), 5 + branch))
            ends.append(costed(b.call("aten::relu", middle), 4))
        for end in ends:
            value = costed(b.call("aten::add.Tensor", value, end), 3)
    return value


def reduced(b: GraphBuilder, value: fx.Node) -> fx.Node:
    return costed(b.call("tensor_cast::all_reduce", value, b.rank, b.group("tp")), 20)


def costed(node: fx.Node, microseconds: float) -> fx.Node:
    node.meta["cost_s"] = microseconds * US
    return node


def built(shape: Callable[[GraphBuilder, int], Any], nodes: int) -> Program:
    inputs = [InputSpec("x", (8, 8)), InputSpec("w", (8, 8))]
    return spmd_program(Mesh.grid({"tp": 2}), inputs, lambda b: shape(b, nodes))


def checked(evidence: Evidence) -> list[Any]:
    return [*check_happens_before(evidence), *check_schedule(evidence)]


def timed(run: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """What it returns, and the milliseconds it took."""
    before = time.perf_counter()
    result = run(*arguments)
    return result, 1e3 * (time.perf_counter() - before)


@click.command()
@click.option("--largest", type=click.IntRange(SIZES[0]), default=SIZES[-1], show_default=True, help="Nodes.")
def main(largest: int) -> None:
    torch.set_num_threads(1)
    subject = InProcess(load_pass("tcverify.passes:Multistream"))
    print(
        f"{'graph':<11}{'nodes':>7}{'read ms':>9}{'plan ms':>9}{'lower ms':>10}{'pass µs/node':>14}{'check ms':>10}"
        f"{'KiB/node':>10}{'gain':>7}{'waits':>7}"
    )
    for name, shape in (("chain", chain), ("branching", branching)):
        for nodes in SIZES:
            if nodes > largest:
                continue
            program = built(shape, nodes)
            work = program.size
            scheduler, graph = Multistream(), program.graph(0)
            parts, read = timed(scheduler.read, graph)
            schedule, plan = timed(scheduler.plan, parts)
            joins = plan_joins(parts, schedule.join)
            state = StreamLowering(graph, parts, schedule)
            _, lower = timed(scheduler.lower, state, joins)
            gm = program.graph_module(0)
            tracemalloc.start()
            Multistream()(gm)
            memory = tracemalloc.get_traced_memory()[1] / 1024
            tracemalloc.stop()
            pair = subject.apply(program)
            evidence = Evidence(pair, Multistream.contract)
            found, check = timed(checked, evidence)
            assert found == []
            print(
                f"{name:<11}{work:>7}{read:>9.1f}{plan:>9.1f}{lower:>10.1f}{1e3 * (read + plan + lower) / work:>14.1f}"
                f"{check:>10.1f}{memory / work:>10.1f}{schedule.gain:>7.2f}{state.waits:>7}"
            )


if __name__ == "__main__":
    main()
