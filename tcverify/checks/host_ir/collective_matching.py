"""Matching: whether streams of host IR terminate where hosts that block at waits would not.

A wait of host IR blocks the current stream, and not the host. Executors that run a rank as one sequential program,
in lockstep or on a backend whose waits block, can therefore hang where streams would proceed: a receive is on a worker
stream, and the send that it needs is issued later, on another stream.
"""

from __future__ import annotations

from collections import deque

from torch import fx

from tcverify.checks.streams.anchors import lowered_ranks
from tcverify.checks.streams.reading import BEGINNING, StreamReading
from tcverify.ops import lookup
from tcverify.program import Program

#: A rank, and one of its ops by index.
_Place = tuple[int, int]


def streams_meet(program: Program) -> bool:
    """Whether all ops of all ranks terminate on their streams: each after the previous op of its stream and what that stream
    waits for, communications once all members of the team have begun them. False if unknown. Linear in ops and edges.
    """
    readings = {rank: reading for reading, ranks in lowered_ranks(program) for rank in ranks}
    others = {binding.graph for rank, binding in enumerate(program.ranks) if rank not in readings}
    if not all(map(_known, readings.values())) or any(_communicates(program.graphs[number]) for number in others):
        return False
    users: dict[_Place, list[int]] = {}
    missing: dict[_Place, int] = {}
    ready: deque[_Place] = deque()
    for rank, reading in readings.items():
        for index, before in enumerate(_befores(reading)):
            missing[rank, index] = len(before)
            for other in before:
                users.setdefault((rank, other), []).append(index)
            if not before:
                ready.append((rank, index))
    begun: dict[
        tuple[tuple[int, ...], int], list[_Place]
    ] = {}  # members of a team that have begun its n-th communication
    entered: dict[tuple[tuple[int, ...], int], int] = {}  # of a team and a rank
    while ready:
        rank, index = ready.popleft()
        team = readings[rank].teams.get(readings[rank].ops[index].stream)
        ended = [(rank, index)]
        if team is not None:
            number = entered.setdefault((team, rank), 0)
            entered[team, rank] += 1
            members = begun.setdefault((team, number), [])
            members.append((rank, index))
            ended = members if len(members) == len(team) else []
        for place in ended:
            del missing[place]
            for user in users.get(place, ()):
                missing[place[0], user] -= 1
                if not missing[place[0], user]:
                    ready.append((place[0], user))
    return not missing


def _known(reading: StreamReading) -> bool:
    """Whether the streams of ops and the teams of communications are known: no anchors, no blocking collectives."""
    if not reading.host or reading.mixed is not None or reading.conflicts:
        return False
    return all(op.stream in reading.teams for op in reading.ops if op.collective)


def _communicates(graph: fx.Graph) -> bool:
    return any(node.op == "call_function" and lookup(node.target).collective for node in graph.nodes)


def _befores(reading: StreamReading) -> list[set[int]]:
    """Per op, the ops that must have ended before it begins."""
    last: dict[int, int] = {}
    found = []
    for index, op in enumerate(reading.ops):
        before = {other for other in op.after if other != BEGINNING}
        if op.stream in last:
            before.add(last[op.stream])
        last[op.stream] = index
        found.append(before)
    return found


__all__ = ["streams_meet"]
