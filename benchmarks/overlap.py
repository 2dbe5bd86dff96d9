"""How often multistream scheduling lowers programs, and what it gains: `python benchmarks/overlap.py --programs 500`.

A program has overlap potential when, on some rank, the critical path with the synchronisation overhead on every edge between
compute and communication is at most 0.9 of the serial time. Gains are predicted serial time over predicted makespan, per rank
of the programs lowered; "replay = plan" counts the lowered ranks whose replay gives the predicted makespan to the last digit.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import torch
from torch import fx

sys.path.insert(0, str(Path(__file__).parents[1]))

from tcverify.application import InProcess, load_pass
from tcverify.checks.streams.replay import replay_streams
from tcverify.passes import Multistream
from tcverify.passes.multistream.graph import NotLowered, edges_of
from tcverify.program import Program
from tcverify.strategies import DECODERS, all_meshes

POTENTIAL = 0.9


def drawn(strategy: str, world_size: int, count: int, seed: int) -> Iterator[Program]:
    generator = random.Random(seed)
    meshes = all_meshes(world_size)
    decoder = DECODERS[strategy]
    for _ in range(count):
        yield decoder.decode(generator.choice(meshes), generator.randbytes(decoder.width))


def has_potential(gm: fx.GraphModule) -> bool:
    """Whether overlap could pay on this rank; not if costs of ops are missing."""
    scheduler = Multistream()
    streams = gm.meta.get("streams")
    if streams is None:
        return False
    try:
        scheduler.use(streams)
        parts = scheduler.read(gm.graph)
    except NotLowered:
        return False
    ends = [op.cost_s for op in parts.work]
    starts = [0.0] * len(parts.work)
    by_second: dict[int, list[int]] = {}
    for edge in edges_of(parts):
        by_second.setdefault(edge.second, []).append(edge.first)
    for op in parts.work:
        for first in by_second.get(op.index, ()):
            crosses = parts.work[first].resources != op.resources
            overhead = streams.sync_overhead_s if crosses else 0.0
            starts[op.index] = max(starts[op.index], ends[first] + overhead)
        ends[op.index] = starts[op.index] + op.cost_s
    return max(ends, default=0.0) <= POTENTIAL * sum(op.cost_s for op in parts.work)


@click.command()
@click.option("--programs", type=click.IntRange(1), default=300, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True)
def main(programs: int, seed: int) -> None:
    torch.set_num_threads(1)
    passes = {
        "multistream": InProcess(load_pass("tcverify.passes:Multistream")),
        "sequence_parallel+multistream": InProcess(
            load_pass("tcverify.passes:SequenceParallel+tcverify.passes:Multistream")
        ),
    }
    print(
        f"{'pass':<31}{'strategy':<10}{'ranks':>5}{'programs':>9}{'potential':>10}{'lowered':>8}"
        f"{'of potential':>13}{'median gain':>12}{'best':>6}{'replay = plan':>15}"
    )
    for strategy in ("overlap", "mixed"):
        for world_size in (2, 3, 4):
            for name, subject in passes.items():
                lowered = potential = both = exact = ranks = 0
                gains: list[float] = []
                for program in drawn(strategy, world_size, programs, seed):
                    able = any(has_potential(gm) for gm in program.graph_modules())
                    pair = subject.apply(program)
                    done = pair.rewrites.get("lowered", 0) > 0
                    potential, lowered, both = potential + able, lowered + done, both + (able and done)
                    if not done or pair.rewritten is None:
                        continue
                    for rank in range(world_size):
                        graph = pair.rewritten.graphs[pair.rewritten.ranks[rank].graph]
                        declared = next(n for n in graph.nodes if n.op == "output").meta.get("schedule")
                        if declared is None:
                            continue
                        found = replay_streams(pair.rewritten, rank)
                        ranks += 1
                        exact += found.makespan_s == declared["makespan_s"]
                        gains.append(declared["serial_s"] / declared["makespan_s"])
                share = f"{both / potential:.0%}" if potential else "-"
                median = f"{statistics.median(gains):.2f}" if gains else "-"
                print(
                    f"{name:<31}{strategy:<10}{world_size:>5}{programs:>9}{potential:>10}{lowered:>8}"
                    f"{share:>13}{median:>12}{max(gains, default=1.0):>6.2f}{f'{exact} of {ranks}':>15}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
