"""What passes that move communication gain and cost: `python benchmarks/exposed.py --programs 300`.

Asynchronous programs are drawn; the pass is applied; the oracles of the checks, which share nothing with the passes, tell on
every rank how long communication is exposed and how high memory goes. Gains are 1 − exposed after / exposed before, over the
ranks whose costs are all known and on which asynchronous communication was exposed before: what blocking communication takes can
be hidden by nobody, and does not count. "worse" counts ranks that are exposed for longer than before.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click
import torch
from overlap import drawn

sys.path.insert(0, str(Path(__file__).parents[1]))

from tcverify.application import subject_of
from tcverify.checks.memory.liveness import peak_of
from tcverify.checks.ordering.accesses import accesses_of
from tcverify.checks.streams.replay import replay_streams
from tcverify.ops import lookup
from tcverify.passes import BUILTIN
from tcverify.program import Program
from tcverify.strategies import DECODERS

#: (name of the pass, options, what they are called)
RUNS: tuple[tuple[str, dict[str, str], str], ...] = (
    ("reorder_communication_preserving_peak_memory", {}, "no more memory"),
    ("reorder_communication_preserving_peak_memory", {"memory_budget": "0.2"}, "+20 %"),
    ("reorder_communication_preserving_peak_memory", {"memory_budget": "100"}, "any memory"),
    ("reorder_communication_preserving_peak_memory", {"use_runtime_estimates": "false"}, "by structure"),
    ("sink_waits_iterative", {}, "no more memory"),
    ("sink_waits_iterative", {"memory_budget": "0.2"}, "+20 %"),
    ("sink_waits_iterative", {"memory_budget": "100"}, "any memory"),
    ("sink_waits_iterative", {"use_runtime_estimates": "false"}, "by structure"),
    ("sink_waits", {}, ""),
    ("raise_comms", {}, ""),
    ("reorder_compute_for_overlap", {}, ""),
)
BOTH = "sink_waits_iterative,reorder_communication_preserving_peak_memory,sink_waits_iterative"


def blocking_s(program: Program, rank: int) -> float:
    """Seconds that blocking communication takes."""
    total = 0.0
    for node in program.graphs[program.ranks[rank].graph].nodes:
        if node.op == "call_function":
            op = lookup(node.target)
            if (op.collective or op.effect) and op.phase is None:
                total += float(node.meta.get("cost_s", 0.0))
    return total


@click.command()
@click.option("--programs", type=click.IntRange(1), default=300, show_default=True)
@click.option("--ranks", type=click.IntRange(2), default=4, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True)
@click.option("--strategy", type=click.Choice(list(DECODERS)), default="functional", show_default=True)
def main(programs: int, ranks: int, seed: int, strategy: str) -> None:
    torch.set_num_threads(1)
    sample = list(drawn(strategy, ranks, programs, seed))
    print(f"{len(sample)} programs of strategy {strategy} on {ranks} ranks")
    print(
        f"{'pass':<46}{'mode':<16}{'changed':>8}{'exposed':>9}{'improved':>9}{'worse':>6}"
        f"{'gain 10 %':>10}{'25 %':>6}{'50 %':>6}{'75 %':>6}{'90 %':>6}{'peak':>7}{'ms':>7}"
    )
    subjects = [(name, mode, subject_of(BUILTIN[name](**given))) for name, given, mode in RUNS]
    both = BUILTIN["reorder_for_compute_comm_overlap"](passes=BOTH)
    subjects.insert(8, ("both of them: waits, starts, waits", "no more memory", subject_of(both)))
    for name, mode, subject in subjects:
        changed = worse = 0
        gains: list[float] = []
        peak = spent = 0.0
        for program in sample:
            started = time.perf_counter()
            pair = subject.apply(program)
            spent += time.perf_counter() - started
            changed += pair.changed
            assert pair.rewritten is not None, pair.failure
            for rank in range(ranks):
                before, after = replay_streams(program, rank).exposed_s, replay_streams(pair.rewritten, rank).exposed_s
                highest = [peak_of(accesses_of(each, rank)).nbytes for each in (pair.rewritten, program)]
                peak = max(peak, highest[0] / max(highest[1], 1))
                if before is None or after is None:
                    continue
                fixed = blocking_s(program, rank)
                worse += after > before + 1e-12
                if before - fixed > 1e-12:
                    gains.append((before - after) / (before - fixed))
        gains.sort()
        shown = [f"{gains[int(q * (len(gains) - 1))]:>6.0%}" if gains else "-" for q in (0.1, 0.25, 0.5, 0.75, 0.9)]
        improved = sum(gain > 1e-9 for gain in gains)
        print(
            f"{name:<46}{mode:<16}{changed / len(sample):>8.0%}{len(gains):>9}{improved / max(len(gains), 1):>9.0%}"
            f"{worse:>6}{shown[0]:>10}{''.join(shown[1:])}{peak:>7.2f}{1e3 * spent / len(sample):>7.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
