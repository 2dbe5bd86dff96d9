"""Scales a program down: the same graphs with small sizes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from tcverify.errors import ProgramError
from tcverify.ops import TensorSpec, lookup
from tcverify.program import InputSpec, Program, RankBinding, RankConstant, Recipe
from tcverify.program.graph import add_node, map_structure
from tcverify.scaled_down.relations import (
    MISFIT,
    UNKNOWN,
    SizeRelations,
    infer_result,
    mapped_literals,
    specs_of,
    tie_results,
)
from tcverify.scaled_down.sizes import SMALL, Size, Sizes

#: How often sizes are chosen again if they do not fit.
ROUNDS = 24


class _Misfit(Exception):
    """A node does not fit the chosen sizes; `alike`: because sizes became equal that must differ."""

    def __init__(self, node: str, sizes: Iterable[Size], alike: Sequence[Size] = ()) -> None:
        super().__init__(node)
        self.node, self.sizes, self.alike = node, tuple(sizes), alike


@dataclass(frozen=True, slots=True)
class ScaledPrograms:
    """Programs with small sizes.

    Attributes:
        programs: in the order of the given ones.
        sizes: new sizes of inputs, by old size; some have several.
        wrong: for each program, the first call whose operands do not fit together at the real sizes.
    """

    programs: tuple[Program, ...]
    sizes: Mapping[int, tuple[int, ...]]
    wrong: tuple[str | None, ...]


def scale_down(programs: Sequence[Program], small: int = SMALL) -> ScaledPrograms:
    """Scale down programs that are to be compared with each other: they read the same inputs, and return the same shapes.

    Views and shards keep fitting, and no size except 1 becomes 1. If nothing can be made smaller, a program keeps its
    sizes.

    Args:
        small: sizes up to this one are kept, if possible.

    Raises:
        ProgramError: no choice of sizes fits.
    """
    sizes, inputs, related = _related(programs, small)
    kept: dict[str, None] = {}
    for _ in range(ROUNDS):
        chosen = sizes.solve()
        try:
            made = tuple(
                _Scaling(program, own, sizes, chosen).scaled() for program, own in zip(programs, related, strict=True)
            )
            for program, own in zip(programs, related, strict=True):
                _require_apart(program, own, chosen)
        except _Misfit as misfit:
            if misfit.alike and misfit.node not in kept:  # once: after that they are kept
                for size in misfit.alike:
                    sizes.avoid(size, chosen[size])
            else:
                sizes.pin(misfit.sizes)
            kept[misfit.node] = None
            continue
        became: dict[int, set[int]] = {}
        for size in (size for dims in inputs.values() for size in dims):
            became.setdefault(sizes.number[size], set()).add(chosen[size])
        wrong = tuple(own.wrong for own in related)
        return ScaledPrograms(made, {n: tuple(sorted(small)) for n, small in sorted(became.items())}, wrong)
    raise ProgramError(f"no smaller sizes fit the program: nodes {', '.join(list(kept)[:5])} take others")


def _related(programs: Sequence[Program], small: int) -> tuple[Sizes, dict[str, list[Size]], list[SizeRelations]]:
    sizes = Sizes(small)
    inputs: dict[str, list[Size]] = {}
    precise = all(len(program.graphs) == 1 for program in programs)
    related = [SizeRelations(program, sizes, inputs, precise) for program in programs]
    for program, own in zip(programs, related, strict=True):
        if own is not related[0]:
            tie_results(related[0], own, (programs[0], program))
    return sizes, inputs, related


def _require_apart(program: Program, related: SizeRelations, chosen: Sequence[int]) -> None:
    """Collectives that may meet, of ranks that run different graphs, must not become equal. Raises `_Misfit`."""
    seen: dict[Any, tuple[Sequence[int], Sequence[Size]]] = {}  # by op and small shape: the first of earlier graphs
    for graph in program.graphs if len(program.graphs) > 1 else ():
        own: dict[Any, tuple[Sequence[int], Sequence[Size]]] = {}
        for node in graph.nodes:
            if node.op != "call_function" or not lookup(node.target).collective:
                continue
            for read in node.all_input_nodes:
                for spec, dims in zip(related.specs(read), related.of[read], strict=True):
                    key = node.target, tuple(chosen[size] for size in dims)
                    real, others = seen.get(key, (spec.shape, dims))
                    apart = [place for place, number in enumerate(spec.shape) if real[place] != number]
                    if apart:
                        both = [one[place] for one in (dims, others) for place in apart]
                        raise _Misfit(node.name, both, [dims[apart[0]]])
                    own.setdefault(key, (spec.shape, dims))
        seen = {**own, **seen}


class _Scaling:
    """One program with the chosen sizes."""

    def __init__(self, program: Program, related: SizeRelations, sizes: Sizes, chosen: Sequence[int]) -> None:
        self._program, self._related, self._chosen = program, related, chosen
        self._somewhere: dict[int, int] = {}  # the new value of a number, wherever it is a size
        for size, small in enumerate(chosen):
            number = sizes.number[size]
            self._somewhere[number] = min(small, self._somewhere.get(number, small))
        self._fresh = itertools.count().__next__

    def scaled(self) -> Program:
        """The program. Raises `_Misfit`."""
        program = self._program
        inputs = tuple(map(self._input, program.inputs))
        specs = {spec.name: spec for spec in inputs}
        constants: dict[str, dict[int, int]] = {}
        graphs = []
        for number, graph in enumerate(program.graphs):
            rank = next(r for r, binding in enumerate(program.ranks) if binding.graph == number)
            local = {name: spec.local_shape(program.mesh, rank) for name, spec in specs.items()}
            graphs.append(self._graph(graph, rank, local, constants))
        bindings = tuple(
            RankBinding(b.graph, {n: _mapped(v, constants.get(n, {})) for n, v in b.constants.items()})
            for b in program.ranks
        )
        return replace(program, graphs=tuple(graphs), ranks=bindings, inputs=inputs, sizes="real")

    def _input(self, spec: InputSpec) -> InputSpec:
        """An input at its new size: the parts of ranks shrink as the whole does, or it does not fit."""
        own = self._related.inputs[spec.name]
        shape = tuple(self._chosen[size] for size in own)
        made = replace(spec, shape=shape, recipe=self._recipe(spec, shape))
        for rank in range(self._program.world_size):
            before, after = spec.local_shape(self._program.mesh, rank), made.local_shape(self._program.mesh, rank)
            if any(a * whole != b * small for b, a, whole, small in zip(before, after, spec.shape, shape, strict=True)):
                raise _Misfit(spec.name, own)
        return made

    def _recipe(self, spec: InputSpec, shape: Sequence[int]) -> Recipe:
        recipe = spec.recipe
        if recipe.kind == "integers":
            return replace(recipe, scale=float(self._somewhere.get(int(recipe.scale), int(recipe.scale))))
        if recipe.kind != "given" or tuple(shape) == spec.shape or spec.dtype.is_complex:
            return recipe
        members = len(recipe.values) // max(1, math.prod(spec.shape))
        whole = torch.tensor(recipe.values, dtype=torch.float64).reshape(members, *spec.shape)
        cut = whole[(slice(None), *(slice(n) for n in shape))].reshape(-1).tolist()
        return replace(recipe, values=tuple(cut))

    def _graph(
        self, graph: fx.Graph, rank: int, local: Mapping[str, Sequence[int]], constants: dict[str, dict[int, int]]
    ) -> fx.Graph:
        new = fx.Graph()
        made_of: dict[fx.Node, fx.Node] = {}

        def read(value: Any) -> Any:
            return made_of[value] if isinstance(value, fx.Node) else value

        for node in graph.nodes:
            args, kwargs = node.args, dict(node.kwargs)
            if node.op == "call_function":
                args, kwargs = self._arguments(node, constants)
            args, kwargs = map_aggregate(args, read), dict(map_aggregate(kwargs, read))
            made = made_of[node] = add_node(new, node.op, node.target, args, kwargs, node.name)
            made.type = node.type
            made.meta.update(node.meta)
            if node.op == "placeholder":
                spec = TensorSpec.contiguous(tuple(local[node.name]), node.meta["val"].dtype)
                made.meta["val"] = replace(spec, alias=self._fresh())
            elif "val" in node.meta:
                made.meta["val"] = self._described(node, made, rank, constants)
        return new

    def _arguments(self, node: fx.Node, constants: dict[str, dict[int, int]]) -> tuple[Any, Any]:
        here = {number: self._chosen[size] for number, size in self._related.scopes[node].items()}

        def size(value: Any) -> Any:
            if isinstance(value, RankConstant):
                constants.setdefault(value.name, {}).update(here)
                return value
            return _mapped(value, here)

        def compared(value: Any) -> Any:
            if isinstance(value, RankConstant):
                return value
            return _mapped(value, here if value in here else self._somewhere)

        args, kwargs = mapped_literals(node, self._related.specs, size, compared)
        place, listed = self._related.lists.get(node, (0, []))
        if listed:
            named = [self._chosen[size] if n != -1 else n for size, n in zip(listed, args[place], strict=True)]
            args = (*args[:place], named, *args[place + 1 :])
        return args, kwargs

    def _described(self, node: fx.Node, made: fx.Node, rank: int, constants: Mapping[str, Mapping[int, int]]) -> Any:
        """The new result of a node. Raises `_Misfit` unless it has the expected sizes."""
        shapes = iter([tuple(self._chosen[size] for size in dims) for dims in self._related.of[node]])

        def resized(spec: Any) -> Any:
            return TensorSpec.contiguous(next(shapes), spec.dtype) if isinstance(spec, TensorSpec) else spec

        def elsewhere(spec: Any) -> Any:
            if not isinstance(spec, TensorSpec):
                return spec
            return TensorSpec.contiguous(tuple(self._somewhere.get(n, n) for n in spec.shape), spec.dtype)

        true = self._related.vals[node]
        if _shapes(true) != _shapes(node.meta["val"]):
            return map_structure(elsewhere, node.meta["val"])  # the metadata is wrong, and stays wrong
        wanted = map_structure(resized, true)
        if node.op != "call_function" or self._related.wrong is not None:
            return wanted
        if any("val" not in read.meta for read in made.all_input_nodes):
            return wanted
        own = self._program.ranks[rank].constants
        small = {name: _mapped(value, constants.get(name, {})) for name, value in own.items()}
        groups = self._program.mesh.groups(rank)
        found = infer_result(made, lambda read: read.meta["val"], small, groups, self._fresh)
        if found is UNKNOWN:
            return wanted
        if found is MISFIT or _shapes(found) != _shapes(wanted):
            around = itertools.chain(*(self._related.of[one] for one in (*node.all_input_nodes, node)))
            raise _Misfit(node.name, {*itertools.chain(*around), *self._related.scopes[node].values()})
        return found


def _mapped(value: Any, numbers: Mapping[int, int]) -> Any:
    """The new value of a number, or of each of several."""
    if isinstance(value, (list, tuple)):
        return [_mapped(n, numbers) for n in value]
    if type(value) is not int:
        return value
    return numbers.get(value, value) if value >= 0 else -numbers.get(-value, -value)


def _shapes(value: Any) -> list[tuple[int, ...]]:
    return [spec.shape for spec in specs_of(value)]


__all__ = ["ScaledPrograms", "scale_down"]
