"""The state of a reduction: the smallest program so far, what is known of it, and what has been tried."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import torch
from torch.fx.node import map_aggregate

from tcverify.errors import ProgramError
from tcverify.ops import OPEN_END
from tcverify.program import Program, StreamSettings
from tcverify.shrink.graph.async_groups import count_untidy
from tcverify.shrink.graph.legalize import facts_of, legalize_edit
from tcverify.shrink.graph.replacements import Values
from tcverify.shrink.graph.sketch import Ref, Sketch, program_of, refs, result_of, sketch_of
from tcverify.shrink.graph.step_facts import Facts
from tcverify.shrink.greedy import Greedy

#: What an eps is when it does not matter.
PLAIN_EPS = 1e-6

#: The same for other numbers; a factor of 1 may hide what it is there for.
PLAIN_NUMBERS = (1.0, 2.0)

#: Costs in seconds that read easily: the shorter is the plainer.
PLAIN_COSTS = (1e-6, 1e-5)

#: Compute nodes on the largest rank beyond which an edit takes time, whether or not it is tried; see `windows`.
LARGE = 150


class SketchSearch(Greedy):
    """Tries edits of the smallest program so far and keeps those that are smaller and still show what is looked for.

    The smallest program is `program`, what is known of it `facts`.
    """

    def __init__(self, program: Program, shows: Callable[[Program], bool], deadline: float | None) -> None:
        super().__init__(shows, deadline)
        self._take(program, facts_of(sketch_of(program)))
        self._untidy = count_untidy(self.facts)

    def _take(self, program: Program, facts: Facts) -> None:
        self.program, self.facts = program, facts
        self._weight = weight(facts.sketch)
        self.__dict__.pop("values", None)

    @property
    def sketch(self) -> Sketch:
        return self.facts.sketch

    @cached_property
    def values(self) -> Values:
        """What a run shows of the values of the program."""
        return Values(self.program)

    @property
    def largest(self) -> int:
        """Compute nodes on the largest rank."""
        return int(self._weight[0])

    def attempt(self, *edits: Sketch | None, prefer: str = "first") -> bool:
        """Try edits in order until one is kept; returns whether one is.

        Args:
            prefer: see `legalize_edit`.

        Raises:
            OutOfTime: the deadline has passed, and there is something to try.
        """
        for edit in edits:
            if edit is None:
                continue
            if self.largest > LARGE:
                self.check_time()
            if self.attempt_as(legalize_edit(self.facts, edit, prefer)):
                return True
        return False

    def attempt_as(self, facts: Facts | None) -> bool:
        """Try what an edit has become. See `attempt`."""
        if facts is None or not weight(facts.sketch) < self._weight or count_untidy(facts) > self._untidy:
            return False
        try:
            program = program_of(facts.sketch)
        except ProgramError:
            return False
        if not self.ask(program):
            return False
        self._take(program, facts)
        return True

    def in_chunks(self, items: Iterable[Any], edit: Callable[[list[Any]], Sketch | None], least: int = 1) -> bool:
        """Apply `edit` to as many of the items as it can be kept for: to halves first, then to ever smaller chunks.

        Args:
            edit: makes one edit of the program so far, for items that may be gone by then.
            least: of the sizes of chunks.
        """
        left = list(items)
        size = (len(left) + 1) // 2
        any_kept = False
        while size >= least and left:
            start = 0
            while start < len(left):
                if self.attempt(edit(left[start : start + size])):
                    del left[start : start + size]
                    any_kept = True
                else:
                    start += size
            size = size // 2
        return any_kept


def weight(sketch: Sketch) -> tuple[Any, ...]:
    """How large a program is: what counts more comes first. An edit is kept only where this decreases."""
    running = [binding.graph for binding in sketch.ranks]
    compute = [sum(step.calls and not step.selects for step in graph) for graph in sketch.graphs]
    calls = [sum(step.op != "placeholder" for step in graph) for graph in sketch.graphs]
    leaves = [len(refs(result_of(graph))) for graph in sketch.graphs]
    listed = [[rank for group in dim.groups for rank in group] for dim in sketch.mesh.dims]
    disorder = sum(a > b for ranks in listed for a, b in itertools.pairwise(ranks))
    placements = sum(placement.kind != "replicated" for spec in sketch.inputs for _, placement in spec.placements)
    return (
        max(compute, default=0),
        sum(compute[i] for i in running),
        sum(calls[i] for i in running),
        len(running),
        sum(leaves[i] for i in running),
        len(sketch.inputs),
        len(listed),
        disorder,
        sum(math.prod(spec.shape) for spec in sketch.inputs),
        sum(sum(spec.shape) for spec in sketch.inputs),
        placements,
        sum(len(step.after) for graph in sketch.graphs for step in graph),
        len(sketch.graphs),
        len(sketch.options),
        *_details(sketch),
        *_timing(sketch),
        sketch.seed,
        sum(len(step.name) for graph in sketch.graphs for step in graph),
    )


#: How far recipes are from the plainest; 1 where it is not said.
_RECIPES = {"uniform": 0, "given": 3}


def _details(sketch: Sketch) -> tuple[int, ...]:
    """Recipes, dtypes, constants and structure that are not the plainest, how far arguments reach, and how many integers
    count from the end."""
    recipes = sum(_RECIPES.get(spec.recipe.kind, 1) + (spec.recipe.scale != 1.0) for spec in sketch.inputs)
    odd = sum(spec.dtype not in (torch.float32, torch.bool) for spec in sketch.inputs)
    constants = nested = reach = negative = 0
    numbers: list[float] = []
    for graph in sketch.graphs:
        positions = {step.name: i for i, step in enumerate(graph)}

        def look(leaf: Any, positions: dict[str, int] = positions) -> Any:
            nonlocal odd, reach, negative
            if isinstance(leaf, Ref):
                reach += positions[leaf.name]
            elif isinstance(leaf, int):
                negative += leaf < 0 or leaf == OPEN_END
            elif isinstance(leaf, float):
                numbers.append(leaf)
            elif isinstance(leaf, torch.dtype):
                odd += leaf.is_floating_point and leaf is not torch.float32
            return leaf

        for step in graph:
            map_aggregate((step.args, step.kwargs), look)
            constants += sum(number not in plain_numbers(step.target) for number in numbers)
            numbers.clear()
        nested += _containers(result_of(graph))
    return recipes, odd, constants, nested, reach, negative


@functools.cache
def plain_numbers(target: Any) -> tuple[float, ...]:
    """Numbers that read easily as arguments of an op, the plainest first."""
    schema = getattr(target, "_schema", None)
    has_eps = schema is not None and any(argument.name == "eps" for argument in schema.arguments)
    return (PLAIN_EPS,) if has_eps else PLAIN_NUMBERS


def _timing(sketch: Sketch) -> tuple[int, ...]:
    """Number of settings, devices and costs, of settings that are not defaults, and of costs that are not plain."""
    costs = [step.meta["cost_s"] for graph in sketch.graphs for step in graph if "cost_s" in step.meta]
    odd = sum(_oddity(cost) for cost in costs), len(set(costs)), sum(cost != PLAIN_COSTS[0] for cost in costs)
    s, plain = sketch.streams, StreamSettings()
    if s is None:
        return 0, 0, len(costs), 0, *odd
    streams = [len(own) - 1 + (own != default) for own, default in ((s.compute, plain.compute), (s.comm, plain.comm))]
    overhead = 0 if s.sync_overhead_s == 0 else 1 if s.sync_overhead_s == PLAIN_COSTS[0] else 2
    return 1, int(s.device is not None), len(costs), sum(streams) + overhead, *odd


def _oddity(cost: Any) -> int:
    """0 for a plain cost, 1 for another of one digit, 2 for the rest."""
    return 0 if cost in PLAIN_COSTS else 1 if cost == float(f"{cost:.0e}") else 2


def _containers(result: Any) -> int:
    """How many containers a result is nested in; dicts and lists count more, since a tuple is plainer."""
    pending, count = [result], 0
    while pending:
        value = pending.pop()
        if isinstance(value, (list, tuple)):
            count += 1 if isinstance(value, tuple) else 2
            pending += value
        elif isinstance(value, dict):
            count += 2
            pending += value.values()
    return count


__all__ = ["LARGE", "PLAIN_COSTS", "SketchSearch", "plain_numbers", "weight"]
