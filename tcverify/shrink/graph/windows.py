"""Cuts large programs down before single moves are tried: a window of the program, or a few, in place of the whole.

The window reads inputs in place of removed values: of the same shape and dtype, and equal on all ranks on which the
value was equal in the whole program. It returns the values that the rest read. So a pass still gets the context of its
error, as far as needed.

With w the width of what the finding needs, the trials come to about three times the whole program, whatever its size: windows
of half the size are tried at three places, so that one of them holds what is needed as long as that is no wider than a quarter.
What is needed at several places is found by leaving out chunks of what is in between.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from tcverify.ops import TensorSpec
from tcverify.program import InputSpec
from tcverify.shrink.graph.async_groups import phase_of
from tcverify.shrink.graph.inseparable_calls import Place, units_of
from tcverify.shrink.graph.legalize import legalize_edit
from tcverify.shrink.graph.narrowing import is_wide, narrow
from tcverify.shrink.graph.replacements import POSITIVE, Values, stand_ins
from tcverify.shrink.graph.search import LARGE, SketchSearch
from tcverify.shrink.graph.sketch import Graph, Ref, Sketch, SketchStep, refs, result_of, with_result
from tcverify.shrink.graph.step_facts import Facts

#: Units that single moves deal with well.
FEW = 12

#: Units around a suspect that are tried first, on each side; four times as many each time after that.
NEAR = 4

#: The same at most, of a wide program that has not been made narrow.
CLOSE = 64

#: Number of suspects that are examined.
MOST_SUSPECTS = 6

#: The smallest chunk that is left out, as a share of what there is: the cost of smaller ones is that of single moves.
LEAST_SHARE = 16


def cut_down(search: SketchSearch, suspects: Sequence[str] = ()) -> None:
    """Keep as few units of a large program as the finding needs, roughly.

    Args:
        suspects: names of nodes near which the finding shows, the likeliest first; they save trials, and decide nothing else.
    """
    if search.largest <= LARGE:
        return
    cutting = _Cutting(search)
    if is_wide(search) and not cutting.around(suspects, CLOSE):
        narrow(search)
        cutting = _Cutting(search)
    cutting.around(suspects)
    cutting.cut()


def keep_around(search: SketchSearch, names: Sequence[str]) -> None:
    """Keep as few units as will do of those nearest to some nodes in the flow of data: these alone, then ever more with them.

    For small programs: each number of units is a trial.
    """
    cutting = _Cutting(search)
    cutting.nearest(names)


class _Cutting:
    """Cuts of one program: each is a set of its units.

    Attributes:
        kept: the units that are left, as numbers in order.
    """

    def __init__(self, search: SketchSearch) -> None:
        self._search, self._facts, self._values = search, search.facts, search.values
        self._units = units_of(self._facts, self._values.run)
        self._owner: dict[Place, int] = {p: i for i, unit in enumerate(self._units) for p in unit.places}
        self.kept = list(range(len(self._units)))

    def cut(self) -> None:
        """Reduce what is left, wherever it is."""
        while len(self.kept) > FEW and (self._halve() or self._thin()):
            pass

    def attempt(self, numbers: Sequence[int]) -> bool:
        """Try to keep these units alone."""
        self._search.check_time()
        keep = [{name for i, name in self._places(numbers) if i == graph} for graph in range(len(self._facts.steps))]
        edit = keep_calls(self._facts, self._values, keep)
        if edit is None or not self._search.attempt_as(legalize_edit(self._facts, edit)):
            return False
        self.kept = list(numbers)
        return True

    def _places(self, numbers: Iterable[int]) -> Iterator[Place]:
        return (place for number in numbers for place in self._units[number].places)

    def around(self, suspects: Sequence[str], most: float = math.inf) -> bool:
        """Keep a window around a suspect, or around all of them, near ones first: in order, and along the flow of data.

        Args:
            most: units on each side.

        Returns:
            Whether one is kept.
        """
        at = [sorted(self._units_called(name)) for name in dict.fromkeys(suspects)]
        centres = [numbers for numbers in at if numbers][:MOST_SUSPECTS]
        if len(centres) > 1:
            centres.append(sorted({number for numbers in centres for number in numbers}))
        reach = NEAR
        while centres and reach <= most and 4 * reach < len(self.kept):
            for numbers in centres:
                near = {n for number in numbers for n in range(number - reach, number + reach + 1)}
                linked = self._linked(numbers, 2 * reach)
                if self.attempt([n for n in self.kept if n in near]) or (
                    linked != near and self.attempt(sorted(linked))
                ):
                    return True
            reach *= 4
        return False

    def nearest(self, names: Sequence[str]) -> None:
        """Keep as few of the units nearest to some nodes as will do, twice as many each time."""
        centres = sorted(set().union(*map(self._units_called, names)))
        most = len(centres)
        while centres and most < len(self.kept) and not self.attempt(sorted(self._linked(centres, most))):
            most *= 2

    def _units_called(self, name: str) -> set[int]:
        return {self._owner[i, name] for i in self._facts.where(name) if (i, name) in self._owner}

    def _linked(self, centres: Sequence[int], most: int) -> set[int]:
        """The units nearest to some in the flow of data, whichever way."""
        found = dict.fromkeys(centres)
        level = list(centres)
        while level and len(found) < most:
            following = (
                self._owner.get((i, other)) for i, name in self._places(level) for other in self._beside(i, name)
            )
            level = [n for n in dict.fromkeys(following) if n is not None and n not in found]
            found.update(dict.fromkeys(level[: most - len(found)]))
        return set(found)

    def _beside(self, graph: int, name: str) -> list[str]:
        return [*self._facts.steps[graph][name].reads, *(user.name for user in self._facts.users[graph][name])]

    def _halve(self) -> bool:
        """Keep half of what is left: the middle, the first or the last."""
        size = (len(self.kept) + 1) // 2
        return any(
            self.attempt(self.kept[s : s + size]) for s in (len(self.kept) - size, 0, (len(self.kept) - size) // 2)
        )

    def _thin(self) -> bool:
        """Leave out chunks, large ones first; whether one size of them did."""
        size, count = len(self.kept) // 4, len(self.kept)
        while size and (size * LEAST_SHARE >= count or count <= LEAST_SHARE * FEW):
            start, before = len(self.kept), len(self.kept)
            while start > 0:
                start = max(start - size, 0)
                self.attempt([*self.kept[:start], *self.kept[start + size :]])
            if len(self.kept) < before:
                return True
            size //= 2
        return False


# ------------------------------------------------------------------------------------------------------------ the edit


def keep_calls(facts: Facts, values: Values, keep: Sequence[set[str]]) -> Sketch | None:
    """The sketch with only some of its calls.

    Args:
        values: what a run of it showed.
        keep: per graph the names of the calls.

    Returns:
        None if no input can replace a needed value.
    """
    wanted: dict[str, list[int]] = {}
    for number, graph in enumerate(facts.sketch.graphs):
        for step in graph:
            if step.name in keep[number]:
                for name in step.reads:
                    if facts.steps[number][name].calls and name not in keep[number]:
                        wanted.setdefault(name, []).append(number)
    added: list[InputSpec] = []
    new: list[dict[str, str]] = [{} for _ in facts.sketch.graphs]
    for name, numbers in wanted.items():
        for spec, where in _inputs_for(facts, values, name, sorted(set(numbers))):
            if spec is None:
                return None
            added.append(spec)
            for number in where:
                new[number][name] = spec.name
    graphs = tuple(_cut(facts, i, names, new[i]) for i, names in enumerate(keep))
    return replace(facts.sketch, graphs=graphs, inputs=(*facts.sketch.inputs, *added))


def _inputs_for(
    facts: Facts, values: Values, name: str, graphs: list[int]
) -> Iterator[tuple[InputSpec | None, list[int]]]:
    """An input that replaces a value in these graphs, or one for each of them if it is not one value."""
    specs = stand_ins(facts, values, name, graphs)
    if specs or len(graphs) == 1:
        yield (_like(values, name, specs[0]) if specs else None), graphs
        return
    for graph in graphs:
        own = stand_ins(facts, values, name, [graph])
        yield (replace(_like(values, name, own[0]), name=f"%{name}%{graph}") if own else None), [graph]


def _like(values: Values, name: str, spec: InputSpec) -> InputSpec:
    """The input with values above zero where all were: of what stands under a root, or a fraction's bar, they must be."""
    return replace(spec, recipe=POSITIVE) if values.positive(name) else spec


def _cut(facts: Facts, number: int, keep: set[str], new: dict[str, str]) -> Graph:
    """One graph with these calls, in which `new` names the inputs that are read in place of others."""
    gone = {name for name, step in facts.steps[number].items() if step.calls and name not in keep}

    def leaf(value: Any) -> Any:
        if not isinstance(value, Ref) or value.name not in gone:
            return value
        return Ref(new[value.name]) if value.name in new else None

    def changed(step: SketchStep) -> SketchStep:
        return step.mapped(leaf) if any(name in gone for name in (*step.reads, *step.after)) else step

    graph = facts.sketch.graphs[number]
    given = [step for step in graph if step.op == "placeholder"]
    added = [SketchStep(name, "placeholder", name, ()) for name in new.values()]
    rest = [changed(step) for step in graph if step.op not in ("placeholder", "output") and step.name not in gone]
    return with_result((*given, *added, *rest, graph[-1]), _result(facts, number, keep, gone))


def _result(facts: Facts, number: int, keep: set[str], gone: set[str]) -> Any:
    """Outputs of a cut graph: the remaining ones of the graph, and values that removed nodes read."""
    old = result_of(facts.sketch.graphs[number])
    real, users = facts.typings[number].real, facts.users[number]
    returned = [name for name in refs(old) if name in keep]
    border = [
        step.name
        for step in facts.sketch.graphs[number]
        if step.name in keep
        and isinstance(real.get(step.name), TensorSpec)
        and phase_of(step) != "start"
        and any(user.name in gone for user in users[step.name])
    ]
    return tuple(Ref(name) for name in dict.fromkeys((*returned, *border)))


__all__ = ["cut_down", "keep_around", "keep_calls"]
