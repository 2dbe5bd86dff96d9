"""Communication buffers: values at fixed offsets of a rank's arena (`meta["comm_buffer"]`) do not overlap, belong
to the graph, and have the same offset on all ranks that communicate through them."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from tcverify.checks.memory.liveness import lives_of
from tcverify.checks.ordering.accesses import Accesses, AccessStep, accesses_of
from tcverify.checks.ordering.collective_calls import calls_of
from tcverify.program import Program
from tcverify.program.finding import Finding

CHECK = "memory"


@dataclass(frozen=True, slots=True, order=True)
class BufferPlace:
    """The position of a value in the arena of its rank, in bytes; the node that declares it, and the group whose ranks
    agree on it."""

    offset: int
    nbytes: int
    node: str
    group: str = ""

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    def __str__(self) -> str:
        return f"bytes {self.offset} to {self.end}"


#: Offset and bytes of an operand, None if it is in no buffer.
_Where: TypeAlias = "tuple[int, int] | None"


def buffer_findings(program: Program) -> list[Finding]:
    """Return what is wrong with the buffers of a program: one finding per kind, the first on the lowest rank."""
    found: dict[str, Finding] = {}
    judged = set()
    places: dict[int, dict[int, BufferPlace]] = {}
    for rank in range(program.world_size):
        accesses = accesses_of(program, rank)
        if id(accesses) in judged:
            continue
        judged.add(id(accesses))
        buffers = places[id(accesses)] = {}
        for finding in _own(accesses, rank, buffers):
            found.setdefault(finding.kind, finding)
        collision = _collision(accesses, buffers, rank)
        if collision is not None:
            found.setdefault(collision.kind, collision)
    if any(places.values()) and "buffer-mismatch" not in found:
        mismatch = _mismatch(program, places)
        if mismatch is not None:
            found[mismatch.kind] = mismatch
    return list(found.values())


def _own(of: Accesses, rank: int, buffers: dict[int, BufferPlace]) -> Iterator[Finding]:
    """Collect the buffers of a graph, by storage, and report invalid ones."""
    for step in of.steps:
        if step.buffer is None:
            continue
        place = _place(step)
        if place is None or len(step.holds) != 1:
            said = "is malformed: it must contain group, offset and nbytes"
            yield _wrong(
                f"meta['comm_buffer'] of '{step.name}' {said}", step.name, rank, {"said": repr(step.buffer)[:80]}
            )
            continue
        storage = step.holds[0]
        buffers.setdefault(storage, place)
        owner = of.value(storage)
        data = {"offset": place.offset, "nbytes": place.nbytes, "value": owner}
        if storage in of.inputs:
            title = f"'{step.name}' lives in a communication buffer, but its storage is that of input '{of.inputs[storage]}'"
            yield _wrong(title, step.name, rank, data)
        elif storage in of.outputs:
            title = f"'{step.name}' lives in a communication buffer and is returned: the next call overwrites it"
            yield _wrong(title, step.name, rank, data)
        needs = of.nbytes.get(storage, 0)
        if owner == step.name and place.nbytes < needs:
            title = f"the communication buffer of '{step.name}' has {place.nbytes} bytes, and its value needs {needs}"
            yield _wrong(title, step.name, rank, data)


def _place(step: AccessStep) -> BufferPlace | None:
    said: Any = step.buffer
    if not isinstance(said, dict):
        return None
    offset, nbytes = said.get("offset"), said.get("nbytes")
    if type(offset) is not int or type(nbytes) is not int or offset < 0 or nbytes < 0:
        return None
    return BufferPlace(offset, nbytes, step.name, str(said.get("group", "")))


def _collision(of: Accesses, buffers: dict[int, BufferPlace], rank: int) -> Finding | None:
    """The first value that overlaps with another one that is still alive. Before it, there is no overlap."""
    if len(buffers) < 2:
        return None
    live: list[BufferPlace] = []  # by offset
    ends: list[tuple[int, BufferPlace]] = []
    until: dict[BufferPlace, int] = {}
    for life in lives_of(of):
        place = buffers.get(life.storage)
        if place is None or not place.nbytes:
            continue
        while ends and ends[0][0] < life.first:
            gone = heapq.heappop(ends)[1]
            live.pop(bisect_left(live, gone))
        at = bisect_left(live, place)
        for other in live[max(0, at - 1) : at + 1]:
            if other.offset < place.end and place.offset < other.end:
                return _overlap(of, other, place, until[other], rank)
        insort(live, place)
        until[place] = life.last
        heapq.heappush(ends, (life.last, place))
    return None


def _overlap(of: Accesses, first: BufferPlace, second: BufferPlace, last: int, rank: int) -> Finding:
    title = f"'{second.node}' overlaps '{first.node}', which is still live, in the communication buffers"
    lines = [
        f"'{first.node}' has {first} until '{of.steps[last].name}'",
        f"'{second.node}' has {second}",
        "what a collective reads lives until the wait for its result",
    ]
    data = {
        "first": first.node, "second": second.node, "last_use": of.steps[last].name,
        "ranges": [[first.offset, first.end], [second.offset, second.end]],
    }  # fmt: skip
    return Finding("overlapping-buffers", CHECK, title, "\n".join(lines), second.node, rank, data)


def _mismatch(program: Program, places: dict[int, dict[int, BufferPlace]]) -> Finding | None:
    """The first collective whose buffers have another offset on another rank of its group."""
    told: dict[tuple[str, int], tuple[int, str, list[_Where]]] = {}
    steps: dict[int, dict[str, AccessStep]] = {}
    for rank in range(program.world_size):
        accesses = accesses_of(program, rank)
        by_name = steps.get(id(accesses))
        if by_name is None:
            by_name = steps[id(accesses)] = {step.name: step for step in accesses.steps}
        numbers: dict[str, int] = {}
        for call in calls_of(program, rank)[0]:
            number = numbers[call.group] = numbers.get(call.group, 0) + 1
            mine = _buffers(by_name[call.node], call.group, places[id(accesses)])
            other, node, theirs = told.setdefault((call.group, number), (rank, call.node, mine))
            if _differ(mine, theirs, symmetric=by_name[call.node].op.startswith("symm_mem::")):
                title = (
                    f"the communication buffers of '{call.node}' (number {number} of group {call.group}) on rank {rank} are not "
                    f"those on rank {other}"
                )
                lines = [
                    f"rank {r}: '{n}' {_format_buffers(found)}"
                    for r, n, found in ((other, node, theirs), (rank, call.node, mine))
                ]
                return _wrong(title, call.node, rank, {"group": call.group, "number": number}, "\n".join(lines))
    return None


def _buffers(step: AccessStep, group: str, places: dict[int, BufferPlace]) -> list[_Where]:
    """Offset and bytes of the operands of a collective, None for those outside of buffers, or in buffers of another group, whose
    ranks need not agree with these. The position of the result is up to each rank: one may reduce in place, and another not."""
    sources = [s for transfer in step.transfers for s in transfer.source] or step.touches
    own = {s: places[s] for s in sources if s in places and group.startswith(f"'{places[s].group}'")}
    return [(own[s].offset, own[s].nbytes) if s in own else None for s in sources]


def _differ(mine: list[_Where], theirs: list[_Where], *, symmetric: bool) -> bool:
    """Whether operands have different offsets. An operand in no buffer matters if peers read each other's memory."""
    if len(mine) != len(theirs):
        return True
    return any(a != b and (symmetric or None not in (a, b)) for a, b in zip(mine, theirs, strict=True))


def _format_buffers(found: list[_Where]) -> str:
    texts = [f"bytes {place[0]} to {sum(place)}" if place is not None else "no buffer" for place in found]
    return ", ".join(texts)


def _wrong(title: str, node: str, rank: int, data: dict[str, Any], detail: str = "") -> Finding:
    return Finding("buffer-mismatch", CHECK, title, detail, node, rank, data)


__all__ = ["BufferPlace", "buffer_findings"]
