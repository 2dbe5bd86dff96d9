"""Makes the twin of a program: the same graphs on small sizes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from tcverify.errors import ProgramError, TcverifyError, UnsupportedOp
from tcverify.ops import ShapeError, TensorSpec, infer
from tcverify.program import InputSpec, Program, RankBinding, RankConstant, Recipe
from tcverify.program.graph import add_node, constant_value, map_structure
from tcverify.twin.relations import mapped_literals, relate, specs_of
from tcverify.twin.sizes import Sizes

#: How often sizes are chosen anew, after what was chosen did not fit.
ROUNDS = 24


class _Misfit(Exception):
    """A node does not fit the sizes that were chosen."""

    def __init__(self, node: str, numbers: Sequence[int]) -> None:
        super().__init__(node)
        self.node, self.numbers = node, numbers


@dataclass(frozen=True, slots=True)
class Twins:
    """Programs on small sizes.

    Attributes:
        programs: in the order of those that they are the twins of.
        sizes: what each number became, those that stayed aside.
        kept: nodes whose numbers stayed what they were, since nothing says what holds between them.
    """

    programs: tuple[Program, ...]
    sizes: Mapping[int, int]
    kept: tuple[str, ...] = ()


def twins_of(programs: Sequence[Program]) -> Twins:
    """Make the twins of programs that are to be compared with each other: the same numbers become the same in all of them.

    Sizes that are equal stay equal, those that differ stay different where they can, none but 1 becomes 1, views and shards go
    on fitting. Where nothing can be made smaller, a twin is as large as its program.

    Raises:
        ProgramError: no choice of sizes fits.
    """
    sizes = Sizes()
    for program in programs:
        relate(program, sizes)
    kept: dict[str, None] = {}
    for _ in range(ROUNDS):
        chosen = sizes.solve()
        try:
            made = tuple(_scaled(program, chosen) for program in programs)
        except _Misfit as misfit:
            kept[misfit.node] = None
            sizes.pin(*misfit.numbers)
            continue
        return Twins(made, {n: small for n, small in chosen.items() if small != n}, tuple(kept))
    raise ProgramError(f"no smaller sizes fit the program: nodes {', '.join(list(kept)[:5])} take others")


def _scaled(program: Program, sizes: Mapping[int, int]) -> Program:
    """The program on these sizes. Raises `_Misfit`."""
    inputs = tuple(_input(spec, program, sizes) for spec in program.inputs)
    specs = {spec.name: spec for spec in inputs}
    bindings = tuple(
        RankBinding(binding.graph, {name: _value(v, sizes) for name, v in binding.constants.items()})
        for binding in program.ranks
    )
    graphs = []
    for number, graph in enumerate(program.graphs):
        rank = next(r for r, binding in enumerate(bindings) if binding.graph == number)
        groups = program.mesh.groups(rank)
        local = {name: spec.local_shape(program.mesh, rank) for name, spec in specs.items()}
        graphs.append(_Maker(graph, sizes, bindings[rank].constants, local, groups).make())
    return replace(program, graphs=tuple(graphs), ranks=bindings, inputs=inputs)


def _value(value: Any, sizes: Mapping[int, int]) -> Any:
    if isinstance(value, (list, tuple)):
        return [_value(n, sizes) for n in value]
    if type(value) is not int:
        return value
    return sizes.get(value, value) if value >= 0 else -sizes.get(-value, -value)


def _input(spec: InputSpec, program: Program, sizes: Mapping[int, int]) -> InputSpec:
    """An input of the size that it becomes: what ranks hold becomes what it should, or it does not fit."""
    shape = tuple(sizes.get(n, n) for n in spec.shape)
    made = replace(spec, shape=shape, recipe=_recipe(spec, shape, sizes))
    for rank in range(program.world_size):
        before, after = spec.local_shape(program.mesh, rank), made.local_shape(program.mesh, rank)
        if after != tuple(sizes.get(n, n) for n in before):
            raise _Misfit(spec.name, [*spec.shape, *before])
    return made


def _recipe(spec: InputSpec, shape: Sequence[int], sizes: Mapping[int, int]) -> Recipe:
    recipe = spec.recipe
    if recipe.kind == "integers":
        below = int(recipe.scale)
        return replace(recipe, scale=float(sizes.get(below, below)))
    if recipe.kind != "given" or tuple(shape) == spec.shape or spec.dtype.is_complex:
        return recipe
    members = len(recipe.values) // max(1, math.prod(spec.shape))
    whole = torch.tensor(recipe.values, dtype=torch.float64).reshape(members, *spec.shape)
    cut = whole[(slice(None), *(slice(n) for n in shape))].reshape(-1).tolist()
    whole_numbers = not spec.dtype.is_floating_point
    values = tuple(sizes.get(int(v), int(v)) if whole_numbers else v for v in cut)
    return replace(recipe, values=values)


#: Stands for what is not known.
UNKNOWN = object()


def _shapes(value: Any) -> list[tuple[int, ...]]:
    return [spec.shape for spec in specs_of(value)]


class _Maker:
    """Makes one graph anew."""

    def __init__(
        self,
        graph: fx.Graph,
        sizes: Mapping[int, int],
        constants: Mapping[str, Any],
        local: Mapping[str, Sequence[int]],
        groups: Mapping[str, Sequence[int]],
    ) -> None:
        self._graph, self._sizes, self._constants, self._local, self._groups = graph, sizes, constants, local, groups
        self._made: dict[fx.Node, fx.Node] = {}
        self._fresh = itertools.count().__next__

    def make(self) -> fx.Graph:
        new = fx.Graph()
        for node in self._graph.nodes:
            args, kwargs = (node.args, dict(node.kwargs))
            if node.op == "call_function":
                args, kwargs = mapped_literals(node, self._small)
            made = add_node(
                new,
                node.op,
                node.target,
                map_aggregate(args, self._read),
                dict(map_aggregate(kwargs, self._read)),
                node.name,
            )
            made.type = node.type
            made.meta.update(node.meta)
            self._made[node] = made
            if "val" in node.meta:
                made.meta["val"] = self._described(node, made)
        return new

    def _small(self, value: Any) -> Any:
        return _value(value, self._sizes)

    def _read(self, value: Any) -> Any:
        return self._made[value] if isinstance(value, fx.Node) else value

    def _described(self, node: fx.Node, made: fx.Node) -> Any:
        """What a node gives now. Raises `_Misfit` unless that is of the sizes that it should be."""
        if node.op == "placeholder":
            spec = node.meta["val"]
            return replace(TensorSpec.contiguous(tuple(self._local[node.name]), spec.dtype), alias=self._fresh())
        wanted = map_structure(self._resized, node.meta["val"])
        if node.op != "call_function":
            return wanted
        found = self._inferred(made)
        if found is UNKNOWN or _shapes(found) == _shapes(wanted):
            return wanted if found is UNKNOWN or found is None else found
        known = self._inferred(node)
        if known is None or _shapes(known) != _shapes(node.meta["val"]):
            return wanted  # it was wrong in the program
        raise _Misfit(node.name, self._numbers(node))

    def _inferred(self, made: fx.Node) -> Any:
        """What a call gives; None where its operands do not fit together, UNKNOWN where nothing is known of the op."""

        def leaf(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return value.meta["val"]
            return constant_value(value, self._constants) if isinstance(value, RankConstant) else value

        if any("val" not in read.meta for read in made.all_input_nodes):
            return UNKNOWN
        args, kwargs = map_aggregate(made.args, leaf), dict(map_aggregate(made.kwargs, leaf))
        try:
            return infer(made.target, args, kwargs, self._fresh, self._groups)
        except UnsupportedOp:
            return UNKNOWN
        except (ShapeError, TcverifyError, ValueError, TypeError, IndexError):
            return None

    def _resized(self, spec: Any) -> Any:
        if not isinstance(spec, TensorSpec):
            return spec
        shape = tuple(self._sizes.get(n, n) for n in spec.shape)
        return TensorSpec.contiguous(shape, spec.dtype)

    @staticmethod
    def _numbers(node: fx.Node) -> list[int]:
        """The sizes of what a node reads and gives."""
        specs = [*specs_of(node), *(spec for read in node.all_input_nodes for spec in specs_of(read))]
        return [number for spec in specs for number in spec.shape]


__all__ = ["Twins", "twins_of"]
