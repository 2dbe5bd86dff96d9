"""Communicators: collectives that a rank may enter in either order, because its streams are not ordered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.fx.node import map_aggregate

from tcverify.checks.streams.clocks import Clocks
from tcverify.checks.streams.races import stream_around
from tcverify.checks.streams.reading import IssuedOp, StreamReading
from tcverify.execution import Run
from tcverify.ops import lookup, schema_of
from tcverify.program import Program, RankConstant
from tcverify.program.finding import Finding
from tcverify.program.graph import constant_value

CHECK = "happens-before"


def unordered_collectives(
    program: Program, reading: StreamReading, clocks: Clocks, ranks: list[int], run: Run | None
) -> Finding | None:
    """Two collectives of one communicator that a rank may enter in either order. Communicators are lists of ranks."""
    ops = [(i, op) for i, op in enumerate(reading.ops) if op.collective]
    if len({op.stream for _, op in ops}) < 2:
        return None
    for rank in ranks:
        named = _communicators(program, rank, run)
        last: dict[tuple[int, ...], int] = {}
        for index, op in ops:
            for communicator in named.get(op.name, ()):
                earlier = last.get(communicator)
                if earlier is not None and not clocks.ordered(earlier, index):
                    return _unordered_pair(reading, reading.ops[earlier], op, communicator, rank)
                last[communicator] = index
    return None


def _unordered_pair(
    reading: StreamReading, first: IssuedOp, second: IssuedOp, communicator: tuple[int, ...], rank: int
) -> Finding:
    title = (
        f"'{second.name}' on stream {second.stream} is not ordered after '{first.name}' on stream {first.stream}, and both are "
        f"collectives of group {list(communicator)}"
    )
    lines = [stream_around(reading, first), stream_around(reading, second)]
    lines.append("ranks that enter them in different orders wait for each other, or exchange the wrong values")
    data = {"first": first.name, "second": second.name, "streams": [first.stream, second.stream]}
    return Finding("unordered-collectives", CHECK, title, "\n".join(lines), second.name, rank, data)


def _communicators(program: Program, rank: int, run: Run | None) -> Mapping[str, list[tuple[int, ...]]]:
    """The communicators of a rank's collectives, by node: from the calls that it made, or else from the nodes' arguments."""
    found: dict[str, list[tuple[int, ...]]] = {}
    if run is not None and rank < len(run.ranks):
        for call in run.ranks[rank].calls:
            named = found.setdefault(call.node, [])
            if call.collective.communicator not in named:
                named.append(call.collective.communicator)
        if run.finished:
            return found
    binding = program.ranks[rank]

    def known(value: Any) -> Any:
        bound = isinstance(value, RankConstant) and value.name in binding.constants
        return constant_value(value, binding.constants) if bound else value

    for node in program.graphs[binding.graph].nodes:
        if node.op != "call_function" or node.name in found or not lookup(node.target).collective:
            continue
        schema = schema_of(node.target)
        names = [argument.name for argument in schema.arguments] if schema is not None else []
        given = {**dict(zip(names, map_aggregate(node.args, known), strict=False)), **map_aggregate(node.kwargs, known)}
        group = given.get("rank_group")
        if group is None and "source_rank" in given and rank in (given["source_rank"], given.get("target_rank")):
            group = [given["source_rank"], given.get("target_rank")]
        if isinstance(group, (list, tuple)):
            found[node.name] = [tuple(group)]
    return found


__all__ = ["unordered_collectives"]
