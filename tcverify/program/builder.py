"""Builds programs whose ranks run one graph up to rank constants (SPMD): for strategies, tests and users."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import fx
from torch.fx.node import map_aggregate

from tcverify.errors import ProgramError
from tcverify.ops import TensorSpec, infer, lookup, resolve, schema_of
from tcverify.program.graph import RankBinding, RankConstant, add_node
from tcverify.program.inputs import InputSpec
from tcverify.program.mesh import Mesh
from tcverify.program.program import Program


class GraphBuilder:
    """Builds the graph that a class of ranks shares, with `meta["val"]` on every node.

    Attributes:
        rank: placeholder for the rank's number.
        representative: the rank of the class whose shapes the metadata shows; all ranks of a class have the same shapes.
    """

    def __init__(self, mesh: Mesh, inputs: Mapping[str, InputSpec], representative: int) -> None:
        self.mesh = mesh
        self.representative = representative
        self.rank = RankConstant("rank")
        self._groups = mesh.groups(representative)
        self._inputs = inputs
        self._graph = fx.Graph()
        self._aliases = 0
        self._called = False
        self._constants: dict[str, Callable[[int], Any]] = {"rank": lambda rank: rank}

    def input(self, name: str) -> fx.Node:
        """Add the placeholder of an input; all of them before the first call."""
        try:
            spec = self._inputs[name]
        except KeyError:
            raise ProgramError(f"the program has no input '{name}'") from None
        if self._called:
            raise ProgramError(f"input '{name}' is added after a call", "add all inputs first, then call ops")
        node = self._graph.placeholder(name)
        if node.name != name:
            raise ProgramError(f"'{name}' cannot be the name of a placeholder", "use another Python identifier")
        shape = spec.local_shape(self.mesh, self.representative)
        plain = TensorSpec.contiguous(shape, spec.dtype)
        node.meta["val"] = TensorSpec(shape, plain.stride, spec.dtype, 0, self._fresh())
        return node

    def group(self, dim: str) -> RankConstant:
        """Placeholder for the rank's ordered group of a mesh dim."""
        return self.constant(dim, lambda rank: list(self.mesh.dim(dim).group(rank)))

    def constant(self, name: str, value: Callable[[int], Any]) -> RankConstant:
        """Placeholder for an integer or list of integers that depends on the rank, given as a function of it."""
        self._constants[name] = value
        return RankConstant(name)

    def call(self, op: str, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call of an op, by qualified name ("aten::add.Tensor"), and infer its metadata.

        Raises:
            ShapeError: the arguments do not fit together.
            UnsupportedOp: the op is in no table.
        """
        self._called = True
        target = resolve(op)

        def known(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return value.meta["val"]
            return self._constants[value.name](self.representative) if isinstance(value, RankConstant) else value

        val = infer(target, map_aggregate(args, known), dict(map_aggregate(kwargs, known)), self._fresh, self._groups)
        node = add_node(self._graph, "call_function", target, args, kwargs, op.split("::")[1].split(".")[0])
        node.meta["val"] = val
        return node

    def getitem(self, value: fx.Node, index: int) -> fx.Node:
        """Add the selection of one result of a tuple."""
        node = self._graph.call_function(operator.getitem, (value, index))
        node.meta["val"] = value.meta["val"][index]
        return node

    def shape(self, value: fx.Node) -> tuple[int, ...]:
        """Shape of a value on the ranks of this class."""
        return tuple(value.meta["val"].shape)

    def _fresh(self) -> int:
        self._aliases += 1
        return self._aliases - 1

    def finish(self, result: Any, keep: Collection[fx.Node] = ()) -> fx.Graph:
        """Add the output node and return the graph, without dead code except the nodes to `keep`."""
        self._graph.output(result)
        self._graph.eliminate_dead_code(is_impure_node=lambda node: node in keep or has_effect(node))
        return self._graph

    def bindings(self, rank: int) -> dict[str, Any]:
        """Values of the rank constants on `rank`."""
        return {name: value(rank) for name, value in self._constants.items()}


def has_effect(node: fx.Node) -> bool:
    """Whether a node is kept although its result is unused. Collectives are not: they are dropped on all ranks alike."""
    if node.op in ("placeholder", "output"):
        return True
    schema = schema_of(node.target)
    return schema is not None and bool(schema.is_mutable or lookup(node.target).effect)


def spmd_program(
    mesh: Mesh,
    inputs: Sequence[InputSpec],
    build: Callable[[GraphBuilder], Any],
    *,
    seed: int = 0,
    labels: Sequence[str] = (),
) -> Program:
    """Build a program that all ranks run, up to rank constants and shapes.

    Args:
        build: adds nodes to the builder and returns the output: a node or nested tuples, lists and dicts of nodes. Called
            once for every class of ranks that have equal local shapes and group sizes.

    Dead nodes, including collectives, are dropped on every rank alike. Inputs that no rank reads are kept.

    Example:
        >>> mesh = Mesh.grid({"tp": 2})
        >>> x = InputSpec("x", (4, 8), placements=(("tp", PARTIAL),))
        >>> program = spmd_program(mesh, [x], lambda b: b.call("tensor_cast::all_reduce", b.input("x"), b.rank, b.group("tp")))
    """
    by_name = {spec.name: spec for spec in inputs}
    classes: dict[Any, tuple[int, GraphBuilder]] = {}
    graphs: list[fx.Graph] = []
    ranks = []
    for rank in range(mesh.world_size):
        shapes = tuple(spec.local_shape(mesh, rank) for spec in inputs)
        key = (shapes, tuple(len(dim.group(rank)) for dim in mesh.dims))
        if key not in classes:
            builder = GraphBuilder(mesh, by_name, rank)
            classes[key] = len(graphs), builder
            graphs.append(builder.finish(build(builder)))
        index, builder = classes[key]
        ranks.append(RankBinding(index, builder.bindings(rank)))
    return Program(mesh, tuple(graphs), tuple(ranks), tuple(inputs), seed, tuple(labels))
