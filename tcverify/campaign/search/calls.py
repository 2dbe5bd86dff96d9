"""How ops are called: patterns of calls that were seen in programs, to be made anew with other operands."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx.node import map_aggregate

from tcverify.campaign.search.editor import Editor, operands
from tcverify.ops import TensorSpec, qualified_name
from tcverify.program import Mesh, RankConstant
from tcverify.shrink.graph.sketch import Ref, SketchStep
from tcverify.shrink.graph.static_shapes import refit_call
from tcverify.shrink.graph.step_facts import Facts

Type = tuple[tuple[int, ...], torch.dtype]

#: Patterns of one op that are kept.
MOST = 4


class EditDoesNotFit(Exception):
    """An edit comes to nothing."""


@dataclass(frozen=True, slots=True)
class Hole:
    """Stands in the arguments of a pattern for an operand, by its number."""

    number: int


@dataclass(frozen=True, slots=True)
class Role:
    """What a rank constant is, so that it can be made on another mesh.

    Attributes:
        kind: "rank", its number; "peer", that of the other rank of a pair; "group" or "position", its group of a mesh dim, or its
            position there; else "given".
        dim: number of the mesh dim.
        values: of one that is given, on each rank.
        size: ranks in a group of that dim; 0 where nobody knows.
    """

    kind: str
    dim: int = 0
    values: tuple[Any, ...] = ()
    size: int = 0

    def fitting(self, mesh: Mesh) -> Role:
        """The same role over the dim of another mesh whose groups are as large, or else of more than one rank."""

        def misfit(number: int) -> tuple[bool, bool, bool, int]:
            size = len(mesh.dims[number].group(0))
            return size != self.size, size == 1, number != self.dim, number

        return replace(self, dim=min(range(len(mesh.dims)), key=misfit))

    def on(self, mesh: Mesh) -> list[Any] | None:
        """Its value on each rank of a mesh; None where that cannot be told."""
        ranks = range(mesh.world_size)
        dim = mesh.dims[min(self.dim, len(mesh.dims) - 1)]
        if self.kind == "given":
            return [*self.values] if len(self.values) == len(ranks) else None
        if self.kind == "rank":
            return [*ranks]
        if self.kind == "peer":
            return [rank ^ 1 for rank in ranks] if len(ranks) % 2 == 0 else None
        return [[*dim.group(rank)] if self.kind == "group" else dim.position(rank) for rank in ranks]


def role_of(values: Sequence[Any], mesh: Mesh) -> Role:
    """The role of a constant with a value on each rank."""
    plain = [list(value) if isinstance(value, (list, tuple)) else value for value in values]
    roles = [
        Role("rank"),
        Role("peer"),
        *(
            Role(kind, number, size=len(dim.group(0)))
            for number, dim in enumerate(mesh.dims)
            for kind in ("group", "position")
        ),
    ]
    return next((role for role in roles if role.on(mesh) == plain), Role("given", values=tuple(values)))


@dataclass(frozen=True, slots=True)
class CallPattern:
    """A call as it was seen once.

    Attributes:
        args, kwargs: with a `Hole` for every operand.
        types: shape and dtype of the operands.
        result: what it made: a spec or a tuple of them.
        constants: the roles of the rank constants in it, by name.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    types: tuple[Type, ...]
    result: Any
    constants: Mapping[str, Role] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return qualified_name(self.target)

    def types_for(self, hole: int, given: Type) -> list[Type]:
        """The types of all operands where one of them is of a given type: dims that were equal stay equal."""
        (old, old_dtype), (new, new_dtype) = self.types[hole], given
        sizes = dict(zip(reversed(old), reversed(new), strict=False))
        found: list[Type] = []
        for number, (shape, dtype) in enumerate(self.types):
            kept = new_dtype if dtype == old_dtype else dtype
            if number == hole or shape == old:
                found.append((new, kept))
                continue
            made = []
            for back, size in enumerate(reversed(shape), 1):
                aligned = back <= len(old) and back <= len(new) and old[-back] == size
                made.append(new[-back] if aligned else sizes.get(size, size))
            found.append((tuple(reversed(made)), kept))
        return found

    def types_making(self, index: int, given: Type) -> list[Type] | None:
        """Types of operands for which (one of) the result is of a given type, as far as sizes tell; None where they do not."""
        result = self.result[index] if isinstance(self.result, (tuple, list)) else self.result
        if not isinstance(result, TensorSpec):
            return None
        if any(shape == result.shape for shape, _ in self.types):
            hole = next(number for number, (shape, _) in enumerate(self.types) if shape == result.shape)
            return self.types_for(hole, given)
        if len(result.shape) != len(given[0]):
            return self._types_in_proportion(result, given)
        sizes = dict(zip(reversed(result.shape), reversed(given[0]), strict=True))
        types: list[Type] = []
        for shape, dtype in self.types:
            made = []
            for back, size in enumerate(reversed(shape), 1):
                place = result.shape[-back] if back <= len(result.shape) else 0
                now = given[0][-back] if place else 0
                if place and len(shape) == len(result.shape) and size * now % place == 0:
                    made.append(size * now // place)
                else:
                    made.append(sizes.get(size, size))
            types.append((tuple(reversed(made)), given[1] if dtype == result.dtype else dtype))
        return types

    def _types_in_proportion(self, result: TensorSpec, given: Type) -> list[Type] | None:
        """Types of operands that are as much larger or smaller than the result, in the same dims, as they were."""
        if not given[0] or any(len(shape) != len(result.shape) for shape, _ in self.types):
            return None
        types: list[Type] = []
        for shape, dtype in self.types:
            made = list(given[0])
            for place, (size, was) in enumerate(zip(shape, result.shape, strict=True)):
                place = min(place, len(made) - 1)
                if size != was and (not was or made[place] * size % was):
                    return None
                made[place] = made[place] * size // was if size != was else made[place]
            types.append((tuple(made), given[1] if dtype == result.dtype else dtype))
        return types

    def add(self, editor: Editor, refs: list[Ref], first: Type, behind: str | None = None) -> Ref:
        """Add the call to an edit.

        Args:
            first: type of its first operand.

        Raises:
            Misfit: it has a rank constant that the program's mesh does not have.
        """
        names: dict[str, RankConstant] = {}
        for name, role in self.constants.items():
            values = role.fitting(editor.facts.sketch.mesh).on(editor.facts.sketch.mesh)
            if values is None:
                raise EditDoesNotFit
            names[name] = editor.constant(name, values)

        def leaf(value: Any) -> Any:
            if isinstance(value, Hole):
                return refs[value.number]
            return names[value.name] if isinstance(value, RankConstant) else value

        args, kwargs = map_aggregate((self.args, self.kwargs), leaf)
        step = SketchStep("", "call_function", self.target, tuple(args), dict(kwargs))
        if self.types and self.types[0][0] != first[0]:
            step = refit_call(step, self.types[0][0], self.result, first[0], "first")
        return editor.call(self.target, step.args, step.kwargs, behind)


def patterns_of(facts: Facts) -> Iterator[CallPattern]:
    """The calls of a program, as patterns; those whose operands are not all tensors, or that ranks know less of, are left out."""
    for number, graph in enumerate(facts.sketch.graphs):
        for step in graph:
            if step.op == "call_function" and not step.selects:
                pattern = _pattern(facts, number, step)
                if pattern is not None:
                    yield pattern


def _pattern(facts: Facts, graph: int, step: SketchStep) -> CallPattern | None:
    real = facts.typings[graph].real
    specs = [spec for name in operands(step) if isinstance(spec := real.get(name), TensorSpec)]
    if not specs or len(specs) < len(operands(step)):
        return None
    holes = itertools.count()
    constants: dict[str, list[Any]] = {}

    def leaf(value: Any) -> Any:
        if isinstance(value, RankConstant):
            constants[value.name] = [binding.constants.get(value.name) for binding in facts.sketch.ranks]
        return Hole(next(holes)) if isinstance(value, Ref) else value

    args, kwargs = map_aggregate((step.args, step.kwargs), leaf)
    if any(value is None for values in constants.values() for value in values):
        return None
    types = tuple((spec.shape, spec.dtype) for spec in specs)
    roles = {name: role_of(values, facts.sketch.mesh) for name, values in constants.items()}
    return CallPattern(step.target, tuple(args), dict(kwargs), types, real.get(step.name), roles)


class Calls:
    """The patterns of calls that programs have shown, those of the ops that a pass names first."""

    def __init__(self, named: Iterable[str] = ()) -> None:
        self._named = set(named)
        self._patterns: dict[str, dict[Any, CallPattern]] = {}
        self._guessed: set[str] = set()

    def learn(self, facts: Facts) -> None:
        """Take note of the calls of a program. What programs show takes the place of what was guessed."""
        for pattern in patterns_of(facts):
            if pattern.name in self._guessed:
                self._guessed.discard(pattern.name)
                del self._patterns[pattern.name]
            self._keep(pattern)

    def guess(self, patterns: Iterable[CallPattern]) -> None:
        """Take patterns that no program has shown."""
        for pattern in patterns:
            self._guessed.add(pattern.name)
            self._keep(pattern)

    def _keep(self, pattern: CallPattern) -> None:
        known = self._patterns.setdefault(pattern.name, {})
        if len(known) < MOST:
            known.setdefault(_outline(pattern), pattern)

    def named(self) -> list[CallPattern]:
        """Patterns of the ops that the pass names."""
        return [one for name, known in sorted(self._patterns.items()) if name in self._named for one in known.values()]

    def others(self) -> list[CallPattern]:
        """Patterns of all other ops."""
        return [
            one for name, known in sorted(self._patterns.items()) if name not in self._named for one in known.values()
        ]


def _outline(pattern: CallPattern) -> Any:
    """Equal for patterns that differ in sizes, numbers of dims and floats alone."""
    first = pattern.types[0][0]
    shapes = tuple("same" if shape == first else _beside(shape, first) for shape, _ in pattern.types)

    def leaf(value: Any) -> Any:
        return "size" if type(value) is int and value > 1 else "float" if isinstance(value, float) else value

    return str((shapes, map_aggregate((pattern.args, dict(pattern.kwargs)), leaf)))


def _beside(shape: tuple[int, ...], first: tuple[int, ...]) -> tuple[Any, ...]:
    """The dims of an operand, each as the dim of the first operand that has its size, counted from the end."""
    return tuple(next((back for back, n in enumerate(reversed(first)) if n == size), "size") for size in shape)


__all__ = ["CallPattern", "Calls", "EditDoesNotFit", "Hole", "Role", "Type", "patterns_of"]
