"""What of a program goes or stays together when it is cut: calls that mean nothing without each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tcverify.execution import Run
from tcverify.program.specs import storages_of
from tcverify.shrink.graph.async_groups import phase_of
from tcverify.shrink.graph.step_facts import Facts

#: A call: the number of its graph, and its name.
Place = tuple[int, str]


@dataclass(frozen=True, slots=True)
class Unit:
    """Calls that are kept together.

    They are a call with the selections of its results, what it starts with the waits for it, and the calls of other ranks that
    it meets.

    Attributes:
        at: how far through their graphs the first of them stand, from 0 to 1.
        places: the calls, in order.
    """

    at: float
    places: tuple[Place, ...]


def units_of(facts: Facts, run: Run | None) -> list[Unit]:
    """The units of a program, in the order in which they come.

    Args:
        run: a run of the program, which shows which calls match; None if there is none. It is needed if graphs differ.
    """
    joined = _Joined()
    for number, graph in enumerate(facts.sketch.graphs):
        real = facts.typings[number].real
        under_way: dict[int, str] = {}
        for step in graph:
            if not step.calls:
                continue
            joined.add((number, step.name))
            read = step.reads
            if step.selects and read and facts.steps[number][read[0]].calls:
                joined.join((number, step.name), (number, read[0]))
            own = storages_of(real.get(step.name))
            if phase_of(step) == "start":
                under_way.update(dict.fromkeys(own, step.name))
            elif phase_of(step) == "wait":
                for begun in {under_way[storage] for storage in own if storage in under_way}:
                    joined.join((number, step.name), (number, begun))
    if facts.aligned:
        for names in zip(*(steps for steps in facts.steps), strict=True):
            for number, name in enumerate(names):
                if facts.steps[0][name].calls:
                    joined.join((0, name), (number, name))
    for first, *others in meetings(facts, run):
        for other in others:
            joined.join(first, other)
    order = [{name: i / len(steps) for i, name in enumerate(steps)} for steps in facts.steps]

    def unit(places: Sequence[Place]) -> Unit:
        return Unit(min(order[number][name] for number, name in places), tuple(places))

    return sorted(map(unit, joined.sets()), key=lambda one: (one.at, one.places))


def meetings(facts: Facts, run: Run | None) -> Iterable[list[Place]]:
    """The calls of collectives that meet, by the order in which members call them."""
    if run is None or not run.finished:
        return
    called: dict[object, dict[int, list[Place]]] = defaultdict(lambda: defaultdict(list))
    for result in run.ranks:
        for call in result.calls:
            place = facts.sketch.ranks[result.rank].graph, call.node
            called[call.collective.channel][result.rank].append(place)
    for by_rank in called.values():
        for met in zip(*by_rank.values(), strict=False):
            yield list(dict.fromkeys(met))


class _Joined:
    """Disjoint sets of places."""

    def __init__(self) -> None:
        self._above: dict[Place, Place] = {}

    def add(self, place: Place) -> None:
        self._above.setdefault(place, place)

    def _top(self, place: Place) -> Place:
        top = place
        while self._above[top] != top:
            top = self._above[top]
        while self._above[place] != top:
            self._above[place], place = top, self._above[place]
        return top

    def join(self, one: Place, other: Place) -> None:
        self._above[self._top(other)] = self._top(one)

    def sets(self) -> list[list[Place]]:
        found: dict[Place, list[Place]] = defaultdict(list)
        for place in self._above:
            found[self._top(place)].append(place)
        return list(found.values())


__all__ = ["Place", "Unit", "meetings", "units_of"]
