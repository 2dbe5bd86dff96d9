"""Site: a program that is edited, and what edits of it are made of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

from tcverify.campaign.search.calls import CallPattern, Type
from tcverify.campaign.search.editor import Editor, operands
from tcverify.shrink.graph.sketch import Sketch, SketchStep
from tcverify.shrink.graph.step_facts import Facts

#: Existing values that are tried as one operand, the nearest first.
NEAREST = 1


@dataclass(frozen=True, eq=False)
class Site:
    """A program that is edited.

    Attributes:
        calls: patterns of calls that edits may add.
        integers, floats: numbers that the pass names.
        kernels: programs of one graph that it may be joined with, on the same mesh.
        options: values of options of the pass, by name.
        apart: whether ranks may do different things.
    """

    facts: Facts
    calls: Sequence[CallPattern]
    integers: Sequence[int] = ()
    floats: Sequence[float] = ()
    kernels: Sequence[Facts] = ()
    options: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    apart: bool = False

    def type(self, name: str) -> Type | None:
        """Shape and dtype of a value that is one tensor, of one type on all ranks."""
        found = self.facts.types(name)
        return found[0] if found and len(set(found)) == 1 else None

    @cached_property
    def values(self) -> list[str]:
        """Every value of the program, inputs first, in order."""
        steps = (step for graph in self.facts.sketch.graphs for step in graph)
        return list(dict.fromkeys(step.name for step in steps if step.op != "output"))

    @cached_property
    def steps(self) -> list[SketchStep]:
        """Every call, once; selections of one result of several are left out."""
        return [step for step in self.all_steps.values() if step.calls and not step.selects]

    @cached_property
    def all_steps(self) -> dict[str, SketchStep]:
        return {step.name: step for graph in reversed(self.facts.sketch.graphs) for step in graph}

    @cached_property
    def edges(self) -> dict[str, list[tuple[str, int]]]:
        """By value, the places where it is read: reader, and number of the operand."""
        found: dict[str, list[tuple[str, int]]] = {}
        for step in self.all_steps.values():
            for slot, name in enumerate(operands(step)):
                found.setdefault(name, []).append((step.name, slot))
        return found

    def beside(self, names: Collection[str]) -> frozenset[str]:
        """What some steps read, and what reads them."""
        read = {name for one in names if one in self.all_steps for name in operands(self.all_steps[one])}
        return frozenset(read.union(reader for name in names for reader, _ in self.edges.get(name, ())))

    def is_input(self, name: str) -> bool:
        return self.all_steps[name].op == "placeholder"

    def like(self, type_: Type, before: str | None = None, limit: int = NEAREST) -> list[str]:
        """Values of a type that stand before a step, the nearest first."""
        end = len(self.values) if before is None else self.values.index(before)
        return [name for name in self.values[:end] if self.type(name) == type_][::-1][:limit]

    def editor(self) -> Editor:
        return Editor(self.facts)


@dataclass(frozen=True, slots=True)
class Edit:
    """An edit that can be made.

    Attributes:
        make: makes it; None where it comes to nothing.
        at: the steps of the program that it changes the surroundings of.
        about: the op or the number that it brings in, if it does.
    """

    make: Callable[[], Sketch | None]
    at: tuple[str, ...]
    about: Any = None


#: All edits of a kind. They are listed at once, and made one at a time.
Family: TypeAlias = Callable[[Site], Iterator[Edit]]

__all__ = ["NEAREST", "Edit", "Family", "Site"]
