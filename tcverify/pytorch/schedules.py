"""Judges a pass's order of Inductor's scheduler nodes: plain data about the nodes before and after, and no code of torch.

What two nodes may not swap is decided by the memory that they touch, and not by the dependencies that Inductor has written down:
some of those only express a preference, and others are missing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from tcverify.application.pair import Defect

#: What a step is: "opaque" is communication, or another effect, of which the compiler knows nothing.
Role = Literal["compute", "collective", "wait", "opaque"]


@dataclass(frozen=True, slots=True)
class ScheduleStep:
    """One node of the scheduler, in the list or inside a fused node.

    Attributes:
        name: in Inductor.
        op: its callee, for reports.
        reads: storages; a wait reads what its collective reads, since that may happen until then.
        writes: storages, including those that it allocates.
        role: see `Role`.
        group: over which it communicates, where it says so.
        place: its number in the order of the graph.
    """

    name: str
    op: str
    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    role: Role = "compute"
    group: str | None = None
    place: int = 0

    @property
    def stays(self) -> bool:
        """Whether it has an effect besides its result."""
        return self.role != "compute" and not self.op.startswith("symm_mem::")

    @property
    def communicates(self) -> bool:
        """Whether it takes part in the order of communication."""
        return self.role in ("collective", "opaque")


@dataclass(frozen=True, slots=True)
class NodeSchedule:
    """The nodes of the scheduler in order.

    Attributes:
        units: those that run as one are one unit, whose memory is all there at the same time.
        sizes: bytes of each storage that the graph allocates.
        kept: storages that are never freed: what is returned.
        whole: of which storage a storage is a piece, and allocated with it.
    """

    units: tuple[tuple[ScheduleStep, ...], ...]
    sizes: Mapping[str, int]
    kept: frozenset[str] = frozenset()
    whole: Mapping[str, str] = field(default_factory=dict)

    @property
    def steps(self) -> tuple[ScheduleStep, ...]:
        """All nodes in order."""
        return tuple(step for unit in self.units for step in unit)

    def in_order_of(self, units: Sequence[Sequence[str]]) -> NodeSchedule:
        """The same nodes in another order, given by name."""
        known = {step.name: step for step in self.steps}
        return replace(self, units=tuple(tuple(known[name] for name in unit) for unit in units))

    def only(self, names: Collection[str]) -> NodeSchedule:
        """These nodes of it, those that communicate, and what waits. One-shot collectives are functions: unused ones may go."""
        units = (tuple(one for one in unit if one.name in names or one.stays) for unit in self.units)
        return replace(self, units=tuple(unit for unit in units if unit))


@dataclass(frozen=True, slots=True)
class OrderPromise:
    """What a pass promises besides the meaning of the graph.

    Attributes:
        order: collectives keep the order that they have, across groups too.
        opaque: opaque communication keeps its place: "everywhere", "among its own" or "nowhere".
        budget: by which part of it peak memory may grow; None where nothing is promised.
    """

    order: bool = True
    opaque: Literal["everywhere", "among its own", "nowhere"] = "everywhere"
    budget: float | None = None

    def keeps(self, first: ScheduleStep, second: ScheduleStep) -> bool:
        """Whether two steps that communicate keep their order."""
        opaque = (first.role == "opaque") + (second.role == "opaque")
        if not opaque:
            return self.order
        return self.opaque == "everywhere" or (self.opaque == "among its own" and opaque == 2)


def resolve_waits(steps: Sequence[ScheduleStep]) -> tuple[ScheduleStep, ...]:
    """Let each wait read what the collective reads for which it waits: the last one that writes its storage.

    What the collective reads and writes has waits of its own. A wait that already reads an operand is for the result of that one.
    """
    made: list[ScheduleStep] = []
    for step in steps:
        if step.role == "wait":
            starts = (one for one in reversed(made) if one.role == "collective" and one.writes & step.writes)
            start = next(starts, None)
            if start is not None and step.reads.isdisjoint(start.reads - start.writes):
                step = replace(step, reads=step.reads | (start.reads - start.writes))
        made.append(step)
    return tuple(made)


def defects_of_call(before: NodeSchedule, units: Sequence[Sequence[str]], promise: OrderPromise) -> list[Defect]:
    """What is wrong with the order that a pass has made, in names of nodes, of the nodes that it was given.

    Each defect names one node; the rank is left to the caller.
    """
    lost = _lost([step.name for step in before.steps], [name for unit in units for name in unit])
    if lost is not None:
        return [Defect("nodes", 0, lost)]
    after = before.in_order_of(units)
    found = [find_swapped_dependency(before, after), find_swapped_communication(before, after, promise)]
    if promise.budget is not None:
        found.append(find_memory_growth(before, after, promise.budget))
    return [one for one in found if one is not None]


def _lost(before: list[str], after: list[str]) -> str | None:
    if sorted(before) == sorted(after):
        return None
    missing = [name for name in before if name not in after]
    added = [name for name in after if name not in before]
    twice = sorted({name for name in after if after.count(name) > 1})
    said = [
        f"{what} {', '.join(names)}" for what, names in (("lost", missing), ("new", added), ("twice", twice)) if names
    ]
    return f"the pass returns different nodes: {'; '.join(said)}"


def find_swapped_dependency(before: NodeSchedule, after: NodeSchedule) -> Defect | None:
    """The first two nodes that touch one storage, one of them to write, and have swapped. Waits among themselves may swap."""
    for first, second in _swapped(before.steps, after.steps):
        if first.role == second.role == "wait":
            continue
        for what, shared in (
            ("writes", first.writes & second.reads),
            ("reads", first.reads & second.writes),
            ("also writes", first.writes & second.writes),
        ):
            if shared:
                message = (
                    f"{second.name} ({second.op}) stands before {first.name} ({first.op}) now, which {what} "
                    f"{', '.join(sorted(shared))}: the nodes stood the other way round before the pass"
                )
                return Defect("dependency", 0, message, second.name)
    return None


def find_swapped_communication(before: NodeSchedule, after: NodeSchedule, promise: OrderPromise) -> Defect | None:
    """The first two nodes that communicate, were to keep their order, and have swapped."""
    for first, second in _swapped(before.steps, after.steps, communicating=True):
        if promise.keeps(first, second):
            message = (
                f"{_described(second)} stands before {_described(first)} now: "
                "they stood the other way round before the pass"
            )
            aspect = "opaque-order" if "opaque" in (first.role, second.role) else "collective-order"
            return Defect(aspect, 0, message, second.name)
    return None


def _described(step: ScheduleStep) -> str:
    return f"{step.name} ({step.op}" + (f" on '{step.group}')" if step.group is not None else ")")


def _swapped(
    before: Sequence[ScheduleStep], after: Sequence[ScheduleStep], *, communicating: bool = False
) -> Iterator[tuple[ScheduleStep, ScheduleStep]]:
    """Pairs of steps of which the second stands before the first now.

    What an earlier pass had swapped may return to the order of the graph, in which every node stands behind what it depends on.
    """
    place = {step.name: number for number, step in enumerate(after)}
    looked = [step for step in before if step.communicates] if communicating else before
    for number, second in enumerate(looked):
        for first in looked[:number]:
            if place[second.name] < place[first.name] and first.place <= second.place:
                yield first, second


def find_memory_growth(before: NodeSchedule, after: NodeSchedule, budget: float) -> Defect | None:
    """Whether peak memory has grown by more than a part of what it was."""
    was, now = peak_bytes(before), peak_bytes(after)
    if now <= was * (1 + budget):
        return None
    message = f"peak memory is {now} bytes and was {was} before the pass, which may add {budget:.0%} of that"
    return Defect("peak-memory", 0, message)


def peak_bytes(schedule: NodeSchedule) -> int:
    """The most bytes that are allocated at one time.

    A storage is allocated by the first unit that touches it and freed behind the last one. Memory inside of fused nodes counts,
    as Inductor counts it.
    """
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for number, unit in enumerate(schedule.units):
        touched = set().union(*(step.reads | step.writes for step in unit))
        for storage in touched | {schedule.whole[piece] for piece in touched & schedule.whole.keys()}:
            first.setdefault(storage, number)
            last[storage] = number
    most = now = 0
    for number in range(len(schedule.units)):
        now += sum(size for storage, size in schedule.sizes.items() if first.get(storage) == number)
        most = max(most, now)
        now -= sum(
            size
            for storage, size in schedule.sizes.items()
            if last.get(storage) == number and storage not in schedule.kept
        )
    return most


def find_rank_disagreement(
    given: Sequence[NodeSchedule],
    made: Sequence[NodeSchedule],
    groups: Sequence[Mapping[str, Collection[int]]],
    roles: Collection[Role] = ("collective", "opaque"),
) -> Defect | None:
    """The first rank on which the collectives of a group come in another order than on its peers, and did not before the pass.

    Collectives are identified by their number in the group, in graph order.

    Args:
        given: before the pass, by rank.
        made: after it, by rank.
        groups: the members of each group, by rank and name.
        roles: of what counts.
    """
    for rank, named in enumerate(groups):
        for name, members in named.items():
            for peer in sorted(members):
                if peer >= rank or name not in groups[peer] or set(groups[peer][name]) != set(members):
                    continue
                first, second = (_numbers(made[one], name, roles) for one in (peer, rank))
                agreed = _numbers(given[peer], name, roles) == _numbers(given[rank], name, roles)
                if agreed and first != second:
                    place = next(n for n, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
                    said = (
                        f"communication number {place + 1} on '{name}' is number {first[place] + 1} of the graph on "
                        f"rank {peer}, and number {second[place] + 1} on rank {rank}"
                    )
                    return Defect("collective-order", rank, said)
    return None


def _numbers(schedule: NodeSchedule, group: str, roles: Collection[Role]) -> list[int]:
    """The communication of a group in the order of a schedule, by what its number is in the graph."""
    found = [step for step in schedule.steps if step.role in roles and step.group == group]
    order = sorted(found, key=lambda step: step.place)
    return [order.index(step) for step in found]


__all__ = [
    "NodeSchedule",
    "OrderPromise",
    "ScheduleStep",
    "defects_of_call",
    "find_memory_growth",
    "find_rank_disagreement",
    "find_swapped_communication",
    "find_swapped_dependency",
    "peak_bytes",
    "resolve_waits",
]
