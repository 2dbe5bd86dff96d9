"""The timing of programs: costs of their ops, and the streams, overheads and device for a schedule.

Decoration does not change what a program computes. Its nodes carry `cost_s` in their metadata, and it has stream settings.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import fx

from tcverify.cost import PROFILES
from tcverify.ops import lookup
from tcverify.program import Program, RankBinding, StreamSettings
from tcverify.program.graph import copy_graph
from tcverify.strategies.choices import weighted_table


@dataclass(frozen=True, slots=True)
class Timing:
    """The choices about time; see `FIELDS` for the values.

    Attributes:
        known: which nodes carry a cost: "none" (and then there are no stream settings either), "all" or "some"; with "-device" a
            device is named too, for nodes without a cost, such as those that a pass inserts; "device": only that.
        spread: how costs are drawn: "equal" per resource, from "few" values, so that there are ties, or "wide".
        balance: how much longer communication takes than compute.
        skew: how costs differ between ranks: "none", "slight" (up to a tenth) or "independent".
        streams: ids of compute and comm streams.
        overhead: seconds that a wait for another stream costs.
        device: name of the device profile, where one is named.
        seed: of the costs, two bytes.
    """

    known: str
    spread: str
    balance: float
    skew: str
    streams: tuple[tuple[int, ...], tuple[int, ...]]
    overhead: float
    device: str
    seed: int
    seed_high: int


_BYTE = tuple(range(256))

FIELDS: dict[str, tuple[object, ...]] = {
    "known": weighted_table(
        ("none", 3), ("all-device", 15), ("all", 6), ("some", 1), ("device", 3), ("some-device", 2)
    ),
    "spread": weighted_table(("equal", 1), ("few", 2), ("wide", 5)),
    "balance": weighted_table((1.0, 4), (0.5, 2), (2.0, 2), (0.1, 1), (8.0, 1)),
    "skew": weighted_table(("none", 9), ("slight", 1), ("independent", 1)),
    "streams": weighted_table(
        (((0,), (1,)), 6),
        (((0,), (1, 2)), 2),
        (((1,), (0,)), 2),
        (((3,), (5,)), 1),
        (((0, 2), (1,)), 2),
        (((2, 0), (1, 3)), 1),
        (((0,), (0,)), 1),
    ),
    "overhead": weighted_table((0.0, 3), (1e-6, 3), (3.7e-6, 2), (2e-5, 1)),
    "device": tuple(PROFILES),
    "seed": _BYTE,
    "seed_high": _BYTE,
}

#: Bytes of a decoration.
WIDTH = len(FIELDS)


def decode_timing(choices: bytes) -> Timing:
    """Decode any bytes; missing ones count as 0."""
    padded = choices.ljust(WIDTH, b"\0")
    return Timing(*[table[byte % len(table)] for table, byte in zip(FIELDS.values(), padded, strict=False)])  # type: ignore[arg-type]


def with_timing(program: Program, timing: Timing) -> Program:
    """Return the program with costs and stream settings. The program must not be shared: its metadata is overwritten."""
    if timing.known == "none":
        return program
    labels = [*program.labels, "timed"]
    seed = timing.seed + 256 * timing.seed_high
    if timing.known != "device":
        if timing.skew == "none":
            for graph in program.graphs:
                _write_costs(graph, timing, random.Random(seed), random.Random(0))
        else:
            # Different costs need a separate graph.
            graphs = tuple(copy_graph(program.graphs[binding.graph]) for binding in program.ranks)
            for rank, graph in enumerate(graphs):
                rng = random.Random(seed + (rank << 16 if timing.skew == "independent" else 0))
                _write_costs(graph, timing, rng, random.Random(rank))
            ranks = tuple(RankBinding(i, binding.constants) for i, binding in enumerate(program.ranks))
            program = replace(program, graphs=graphs, ranks=ranks)
            labels.append("rank-dependent-costs")
    compute, comm = timing.streams
    device = timing.device if "device" in timing.known else None
    streams = StreamSettings(compute, comm, timing.overhead, device)
    return replace(program, labels=tuple(labels), streams=streams)


def _write_costs(graph: fx.Graph, timing: Timing, rng: random.Random, skew: random.Random) -> None:
    draw = _costs(timing, rng)
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        cost = next(draw)
        if timing.known.startswith("some") and rng.random() < 0.2:
            continue
        if "comm" in lookup(node.target).resources:
            cost *= timing.balance
        if timing.skew == "slight":
            cost *= 0.9 + 0.2 * skew.random()
        node.meta["cost_s"] = float(f"{cost:.4g}")


def _costs(timing: Timing, rng: random.Random) -> Iterator[float]:
    """Costs in seconds, of ops that do not communicate."""
    equal = rng.choice((1e-6, 5e-6, 2.3e-5))
    few = [1e-6 * rng.randint(1, 12) for _ in range(3)]
    while True:
        if timing.spread == "equal":
            yield equal
        elif timing.spread == "few":
            yield rng.choice(few)
        else:
            yield 1e-6 * 2.0 ** rng.uniform(-1.0, 6.0)
