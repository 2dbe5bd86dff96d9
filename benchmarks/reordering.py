"""Times of the passes that reorder for overlap, by the size of the graph: `python benchmarks/reordering.py`.

A chain is layer after layer, each waiting for the collective of the one before, with a side product per layer that can hide it. A
backward pass computes a gradient per layer, whose reduction is waited for at once and read by nobody until the end, over two
groups in turn. Graphs of both are rewritten by every pass of `OVERLAP_PASSES`, each on a new copy; the first row of a graph is
what finding its dependencies takes, which all of them do. The last column is the growth per doubling of the nodes, from the two
largest sizes: 2 is linear. Times are of CPU, the least of three. Compare rows of one run only: machines differ.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import torch
from torch import fx

sys.path.insert(0, str(Path(__file__).parents[1]))

from tcverify.passes import ReorderForComputeCommOverlap
from tcverify.passes.overlap import OVERLAP_PASSES, comm_graph
from tcverify.program import GraphBuilder, InputSpec, Mesh, Program, spmd_program

SIZES = (500, 1_000, 2_000, 4_000, 8_000)
US = 1e-6


def chain(b: GraphBuilder, nodes: int) -> Any:
    value, weight = b.input("x"), b.input("w")
    for _ in range(nodes // 6):
        product = costed(b.call("aten::mm", value, weight), 10)
        reduced = waited(b, product, "tp", 15)
        side = costed(b.call("aten::mm", value, weight), 10)
        value = costed(b.call("aten::relu", costed(b.call("aten::add.Tensor", reduced, side), 3)), 2)
    return value


def backward(b: GraphBuilder, nodes: int) -> Any:
    value, weight = b.input("x"), b.input("w")
    gradients = []
    for layer in range(nodes // 4):
        value = costed(b.call("aten::mm", value, weight), 10)
        gradient = costed(b.call("aten::mul.Tensor", value, value), 4)
        gradients.append(waited(b, gradient, ("dp", "tp")[layer % 2], 12))
    return value, gradients


def waited(b: GraphBuilder, value: fx.Node, group: str, microseconds: float) -> fx.Node:
    started = costed(b.call("_c10d_functional::all_reduce", value, "sum", group), microseconds)
    return b.call("_c10d_functional::wait_tensor", started)


def costed(node: fx.Node, microseconds: float) -> fx.Node:
    node.meta["cost_s"] = microseconds * US
    return node


def built(shape: Callable[[GraphBuilder, int], Any], nodes: int) -> Program:
    inputs = [InputSpec("x", (64, 64)), InputSpec("w", (64, 64))]
    return spmd_program(Mesh.grid({"dp": 2, "tp": 2}), inputs, lambda b: shape(b, nodes))


def rewriting(make: Callable[[], Any]) -> Callable[[fx.GraphModule], Any]:
    """A run with a new pass: what one instance has cached must not help it with the next graph."""

    def run(gm: fx.GraphModule) -> Any:
        return make()(gm)

    return run


def timed(run: Callable[[fx.GraphModule], Any], program: Program) -> float:
    """Milliseconds of CPU that one run takes on a new copy of rank 0's graph: the least of three, with no garbage collected."""
    taken = []
    for _ in range(3):
        gm = program.graph_module(0)
        gc.collect()
        gc.disable()
        before = time.process_time()
        run(gm)
        taken.append(time.process_time() - before)
        gc.enable()
    return 1e3 * min(taken)


@click.command()
@click.option("--largest", type=click.IntRange(SIZES[0]), default=SIZES[-1], show_default=True, help="Nodes.")
@click.option("--passes", default="", help="Names, separated by commas; all unless given.")
def main(largest: int, passes: str) -> None:
    torch.set_num_threads(1)
    sizes = [size for size in SIZES if size <= largest]
    every = {**OVERLAP_PASSES, ReorderForComputeCommOverlap.name: ReorderForComputeCommOverlap}
    chosen = [name for name in every if not passes or name in passes.split(",")]
    runs: dict[str, Callable[[fx.GraphModule], Any]] = {"(dependencies)": lambda gm: comm_graph(gm.graph)}
    runs.update((name, rewriting(every[name])) for name in chosen)
    print(f"{'graph':<10}{'pass, ms':<46}" + "".join(f"{size:>9}" for size in sizes) + f"{'growth':>9}")
    for shape in (chain, backward):
        programs = [built(shape, size) for size in sizes]
        for name, run in runs.items():
            timed(run, programs[0])  # warms memos up
            times = [timed(run, program) for program in programs]
            steps = [(second / first) for first, second in pairwise(times)]
            growth = f"{steps[-1]:>9.2f}" if steps else ""
            print(f"{shape.__name__:<10}{name:<46}" + "".join(f"{ms:>9.1f}" for ms in times) + growth, flush=True)


if __name__ == "__main__":
    main()
