"""The iterative overlap passes with one defect put back in each class: what they reckon of memory and of time.

The sound passes judge their result anew and would give up what these defects lead to. That net is off here: a pass without it is
sound as well, and what it catches would never be seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from tcverify.passes.overlap import CommGraph, ReorderCommunicationPreservingPeakMemory, SinkWaitsIterative
from tcverify.passes.overlap.iterative import IterativePass, MoveSetting, Round
from tcverify.passes.overlap.iterative_raising import Raising, Rise
from tcverify.passes.overlap.iterative_sinking import Sinking
from tcverify.passes.overlap.memory import Footprint, Handover, OrderMemory, StorageWalk
from tcverify.passes.overlap.timeline import OrderTimeline


class _Unjudged(IterativePass):
    """Without the net of the sound pass; subclasses put a defect back and carry their own name."""

    course: ClassVar[type[Round]]

    def __init_subclass__(cls) -> None:
        cls.name = cls.__name__

    def round(self, setting: MoveSetting, order: Sequence[int]) -> Round:
        return self.course(setting, order)

    def judge(self, setting: MoveSetting, order: Sequence[int]) -> None:
        pass

    def is_worse(self, replayed: OrderTimeline, before: OrderTimeline) -> bool:
        return False


class RaiseUnjudged(_Unjudged, ReorderCommunicationPreservingPeakMemory):
    """The sound pass without its net."""

    course: ClassVar[type[Raising]] = Raising


class SinkUnjudged(_Unjudged, SinkWaitsIterative):
    """The sound pass without its net."""

    course: ClassVar[type[Sinking]] = Sinking


# -------------------------------------------------------------------------------------------------------------- memory


class _NothingChangesHands(OrderMemory):
    def before(self, candidate: int, latest: Mapping[int, int]) -> list[Handover]:
        return []


class LastUserStays(SinkUnjudged):
    """When two nodes that touch a storage change places, the one that was the last still frees it (peak-memory)."""

    class course(Sinking):
        memory_of = _NothingChangesHands


class _OneNumber(OrderMemory):
    def peak(self, level: int, nodes: Iterable[int], handovers: Sequence[Handover] = ()) -> int:
        found = 0
        for node in nodes:
            level += self.allocated[node] - self.freed[node]
            found = max(found, level)
        return found


class AllocatedLessFreed(SinkUnjudged):
    """A node counts by what it allocates less what it frees, as if it gave up its operands before it runs (peak-memory)."""

    class course(Sinking):
        memory_of = _OneNumber


class BudgetWithoutInputs(RaiseUnjudged):
    """The inputs are part of what memory may reach, and not of what it is said to reach (peak-memory)."""

    class course(Raising):
        def too_much(self, peak: int) -> str | None:
            return super().too_much(peak - self.memory.footprint.initial)


class _InputsFreed(StorageWalk):
    def kept(self, inputs: frozenset[int], kept: set[int]) -> set[int]:
        return kept - inputs


class InputsAreFreed(SinkUnjudged):
    """An input is taken to be gone behind its last use (peak-memory)."""

    def footprint(self, found: CommGraph) -> Footprint:
        return _InputsFreed(found).footprint()


class _FreedAtStart(StorageWalk):
    def extend(self, touched: Sequence[dict[int, None]]) -> None:
        pass


class OperandsFreedAtStart(SinkUnjudged):
    """What a collective reads is taken to be gone behind its start, though it is read until the wait (peak-memory)."""

    def footprint(self, found: CommGraph) -> Footprint:
        return _FreedAtStart(found).footprint()


class _DeadAtWait(StorageWalk):
    def extend(self, touched: Sequence[dict[int, None]]) -> None:
        super().extend(touched)
        gone: set[int] = set()
        for node, of in zip(self._found.nodes, touched, strict=True):
            if node.op == "output":
                continue
            for storage in gone & of.keys():
                del of[storage]
            if self._found.kind(node) == "wait":
                gone.update(storage for storage, _ in self._held[node])


class ResultsDeadAtWait(RaiseUnjudged):
    """The storage of a collective's result is taken to be gone with the wait, since readers name another value (peak-memory)."""

    def footprint(self, found: CommGraph) -> Footprint:
        return _DeadAtWait(found).footprint()


class _OfOneNode(OrderMemory):
    def peak(self, level: int, nodes: Iterable[int], handovers: Sequence[Handover] = ()) -> int:
        return super().peak(level, list(nodes)[:1], handovers)


class PeakOfTheFirstNode(RaiseUnjudged):
    """When a group changes places with a node, only what lives while its first node runs is compared (peak-memory)."""

    class course(Raising):
        memory_of = _OfOneNode


# ---------------------------------------------------------------------------------------------------------------- time


class OthersExposureIgnored(RaiseUnjudged):
    """A start rises as long as its own communication is covered better, whatever it delays (exposed-communication)."""

    class course(Raising):
        def rise(self, node: int) -> Rise:
            return _Regardless(self, node)


class _Regardless(Rise):
    def delays(self, candidate: int) -> bool:
        return False


# -------------------------------------------------------------------------------------------------------------- groups


class GroupDependenciesForgotten(RaiseUnjudged):
    """What is taken along takes its own dependencies not into account (malformed-graph, broken-order, pass-raised)."""

    class course(Raising):
        def rise(self, node: int) -> Rise:
            return _Careless(self, node)


class _Careless(Rise):
    def take_along(self, candidate: int) -> None:
        needed = set(self.needed)
        super().take_along(candidate)
        self.needed = needed


def _kinds(*names: str) -> frozenset[str]:
    return frozenset(names)


_MEMORY, _TIME = _kinds("peak-memory"), _kinds("exposed-communication")

#: Every mutant, with the kinds of finding of which one at least must be there.
EXPECTED: dict[str, frozenset[str]] = {
    "LastUserStays": _MEMORY,
    "AllocatedLessFreed": _MEMORY,
    "BudgetWithoutInputs": _MEMORY,
    "InputsAreFreed": _MEMORY,
    "OperandsFreedAtStart": _MEMORY,
    "ResultsDeadAtWait": _MEMORY,
    "PeakOfTheFirstNode": _MEMORY,
    "OthersExposureIgnored": _TIME,
    "GroupDependenciesForgotten": _kinds("malformed-graph", "broken-order", "pass-raised", "async-race"),
}

MUTANTS: dict[str, type[Any]] = {name: globals()[name] for name in EXPECTED}

#: Sound: what is verified of the net-less passes themselves.
SOUND: tuple[type[Any], ...] = (RaiseUnjudged, SinkUnjudged)
