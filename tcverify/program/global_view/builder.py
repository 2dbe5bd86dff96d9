"""Builds programs whose tensors carry layouts: written once for all ranks; each rank runs the ops in which it takes part."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from tcverify.errors import InternalError, ProgramError
from tcverify.ops import DeviceMesh, Layout, Resharding, TensorSpec, infer, resolve, schema_of
from tcverify.ops.dialects.multidevice import REDUCE, SET
from tcverify.ops.leaves import leaves
from tcverify.ops.reductions import ReduceOp
from tcverify.program.graph import RankBinding, add_node
from tcverify.program.inputs import InputSpec, Recipe
from tcverify.program.mesh import Mesh, MeshDim
from tcverify.program.placement import shard
from tcverify.program.program import Program
from tcverify.program.sharing import share


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A tensor of a program under construction.

    Attributes:
        shape: of the whole.
        nodes: by rank of its mesh, the node of the rank's part.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    nodes: dict[int, fx.Node]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of each rank's part."""
        return self.layout.local_shape(self.shape)


@dataclass(frozen=True, slots=True)
class _Call:
    """One op on all participating ranks."""

    name: str
    operands: list[Placed]
    nodes: dict[int, fx.Node]
    writes: bool


class PlacedBuilder:
    """Builds a program of several ranks from ops on whole tensors.

    Each rank's graph contains only the ops in which the rank takes part. Nodes for parts of one tensor have the same name on
    all ranks. `meta["layout"]` of inputs and local ops gives their layouts; `set` and `reduce` have theirs as arguments.

    Example:
        >>> b = PlacedBuilder(4)
        >>> x = b.input("x", (8, 4), "[0, 1] shard(0)")
        >>> y = b.set(x, "[1, 0, 2] replicated")
        >>> program = b.build(b.call("aten::relu", y))
    """

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise ProgramError(f"a world of {world_size} ranks cannot be")
        self.world_size = world_size
        self._graphs = [fx.Graph() for _ in range(world_size)]
        self._aliases = [0] * world_size
        self._inputs: list[InputSpec] = []
        self._dims: dict[DeviceMesh, list[MeshDim]] = {}
        self._calls: list[_Call] = []
        self._names: dict[str, int] = {}
        self._built = False

    def input(
        self,
        name: str,
        shape: Sequence[int],
        layout: Layout | str,
        dtype: torch.dtype = torch.float32,
        recipe: Recipe | None = None,
    ) -> Placed:
        """Add an input; all of them before the first call.

        Args:
            shape: of the whole.

        Raises:
            ProgramError: the layout is impossible, or the input is added too late.
        """
        layout = self._layout(layout)
        if any(spec.name == name for spec in self._inputs):
            raise ProgramError(f"input '{name}' is added twice")
        if self._calls:
            raise ProgramError(f"input '{name}' is added after a call", "add all inputs first, then call ops")
        local = layout.local_shape(shape)
        dims = self._mesh_dims(layout.mesh)
        placements = tuple(
            (dim.name, shard(axis)) for dim, axis in zip(dims, layout.sharding, strict=True) if axis is not None
        )
        self._inputs.append(InputSpec(name, tuple(shape), dtype, placements, recipe or Recipe()))
        nodes = {}
        for rank in sorted(layout.mesh.ranks):
            node = self._graphs[rank].placeholder(name)
            if node.name != name:
                raise ProgramError(f"'{name}' cannot be the name of an input", "use another Python identifier")
            plain = TensorSpec.contiguous(local, dtype)
            node.meta["val"] = TensorSpec(local, plain.stride, dtype, 0, self._fresh(rank))
            node.meta["layout"] = str(layout)
            nodes[rank] = node
        return Placed(tuple(shape), dtype, layout, nodes)

    def call(
        self, op: str, *args: Any, layout: Layout | str | None = None, stream_axis: int | None = None, **kwargs: Any
    ) -> Placed:
        """Add a local op on every rank of the mesh that its operands have in common.

        Args:
            args, kwargs: with `Placed` for tensors.
            layout: of the result, on the same mesh; by default that of the first operand. Applying the op to the parts must be
                equivalent to applying it to the whole.
            stream_axis: dim of the result whose parts may be computed on separate streams.

        Raises:
            ProgramError: operands on different meshes, or none; several results; a result for which the layout is impossible, or
                without such a dim.
            ShapeError: the parts do not fit together.
        """
        operands = leaves((args, kwargs), Placed)
        if not operands or any(operand.layout.mesh != operands[0].layout.mesh for operand in operands):
            meshes = ", ".join(str(operand.layout.mesh) for operand in operands)
            raise ProgramError(f"{op} takes operands on meshes {meshes or 'none'}", "bring them to one mesh with set")
        result = operands[0].layout if layout is None else self._layout(layout)
        if result.mesh != operands[0].layout.mesh:
            raise ProgramError(f"{op} on mesh {operands[0].layout.mesh} cannot have a result on {result.mesh}")
        nodes = {}
        call = self._begin(op, operands)
        for rank in sorted(result.mesh.ranks):
            node = nodes[rank] = call.nodes[rank] = self._add(rank, call.name, op, args, kwargs)
            node.meta["layout"] = str(result)
            if stream_axis is not None:
                node.meta["stream_axis"] = stream_axis
        spec = nodes[result.mesh.ranks[0]].meta["val"]
        if not isinstance(spec, TensorSpec):
            raise ProgramError(f"{op} has several results, or none", "use an op with one tensor as its result")
        if any(dim is not None and dim >= len(spec.shape) for dim in result.sharding):
            raise ProgramError(
                f"layout '{result}' cannot be that of a result of {op}: its shape is {list(spec.shape)}",
                "say by layout= how the result lies",
            )
        _check_axis(op, stream_axis, spec.shape)
        return Placed(result.global_shape(spec.shape), spec.dtype, result, nodes)

    def set(self, x: Placed, layout: Layout | str, *, stream_axis: int | None = None) -> Placed:
        """Convert a tensor to another layout. Raises `ProgramError` if the layout is impossible."""
        made = Resharding(x.layout, self._layout(layout), x.shape)
        return self._reshard(made, x, SET, (), stream_axis)

    def reduce(
        self, x: Placed, dim: int, layout: Layout | str, reduce_op: ReduceOp = "sum", *, stream_axis: int | None = None
    ) -> Placed:
        """Reduce a tensor over a dim, and convert the result to a layout. Raises as `set` does."""
        made = Resharding(x.layout, self._layout(layout), x.shape, dim, reduce_op)
        return self._reshard(made, x, REDUCE, (dim, reduce_op), stream_axis)

    def build(self, *outputs: Placed, seed: int = 0, labels: Sequence[str] = ()) -> Program:
        """Return the program. Every rank returns its parts of the outputs; ops that no output and no other rank needs are
        dropped.

        Raises:
            ProgramError: it has been built already.
        """
        if self._built:
            raise ProgramError("the program has been built already", "make one builder per program")
        self._built = True
        self._drop_dead(outputs)
        for rank, graph in enumerate(self._graphs):
            graph.output(tuple(placed.nodes[rank] for placed in outputs if rank in placed.nodes))
        known = [{"rank": rank} for rank in range(self.world_size)]
        graphs, bindings = share(self._graphs, known)
        mesh = Mesh(self.world_size, tuple(dim for dims in self._dims.values() for dim in dims) or self._whole())
        ranks = tuple(RankBinding(b.graph, {"rank": r, **b.constants}) for r, b in enumerate(bindings))
        return Program(mesh, graphs, ranks, tuple(self._inputs), seed, tuple(labels))

    def _reshard(
        self, made: Resharding, x: Placed, op: str, reduction: tuple[Any, ...], stream_axis: int | None
    ) -> Placed:
        if any(rank >= self.world_size for rank in made.ranks):
            raise ProgramError(f"'{made}' names a rank that {self.world_size} ranks do not have")
        _check_axis(op, stream_axis, made.result_shape)
        nodes = {}
        call = self._begin(op, [x])
        for rank in sorted(made.ranks):
            layouts = str(made.source), str(made.target)
            operand = x if rank in x.nodes else None
            args = operand, *reduction, *layouts, list(made.shape), x.dtype, rank
            node = call.nodes[rank] = self._add(rank, call.name, op, args, {})
            if rank in made.target.mesh:
                nodes[rank] = node
            if stream_axis is not None:  # of the whole result: ranks that only contribute take the same number of steps
                node.meta["stream_axis"] = stream_axis
        return Placed(made.result_shape, x.dtype, made.target, nodes)

    def _begin(self, op: str, operands: list[Placed]) -> _Call:
        stem = op.split("::")[1].split(".")[0]
        first = 1 if stem in vars(builtins) else 0  # FX numbers such names from 1
        number = self._names.get(stem, first - 1) + 1
        taken = {spec.name for spec in self._inputs}  # on any rank
        while (name := f"{stem}_{number}" if number else stem) in taken:
            number += 1
        self._names[stem] = number
        schema = schema_of(resolve(op))
        writes = schema is not None and schema.is_mutable
        self._calls.append(_Call(name, operands, {}, writes))
        return self._calls[-1]

    def _add(self, rank: int, name: str, op: str, args: Any, kwargs: Any) -> fx.Node:
        target = resolve(op)

        def node_of(value: Any) -> Any:
            return value.nodes[rank] if isinstance(value, Placed) else value

        def spec_of(value: Any) -> Any:
            return value.nodes[rank].meta["val"] if isinstance(value, Placed) else value

        val = infer(
            target, map_aggregate(args, spec_of), dict(map_aggregate(kwargs, spec_of)), lambda: self._fresh(rank)
        )
        given = map_aggregate(args, node_of), map_aggregate(kwargs, node_of)
        node = add_node(self._graphs[rank], "call_function", target, *given, name)
        if node.name != name:
            raise InternalError(f"a call of {op} is named '{node.name}' on rank {rank}, and '{name}' on others")
        node.meta["val"] = val
        return node

    def _drop_dead(self, outputs: Sequence[Placed]) -> None:
        """Drop unused ops, on all ranks alike."""
        live = {node for placed in outputs for node in placed.nodes.values()}
        for call in reversed(self._calls):
            if call.writes or not live.isdisjoint(call.nodes.values()):
                live.update(node for operand in call.operands for node in operand.nodes.values())
            else:
                for rank, node in call.nodes.items():
                    self._graphs[rank].erase_node(node)

    def _layout(self, layout: Layout | str) -> Layout:
        found = Layout.parse(layout) if isinstance(layout, str) else layout
        if any(rank >= self.world_size for rank in found.mesh.ranks):
            raise ProgramError(f"layout '{found}' names a rank that {self.world_size} ranks do not have")
        return found

    def _mesh_dims(self, mesh: DeviceMesh) -> list[MeshDim]:
        """Mesh dims of the program, one for each device mesh; ranks outside of it form groups of one."""
        if mesh not in self._dims:
            number = sum(len(dims) for dims in self._dims.values())
            alone = tuple((rank,) for rank in range(self.world_size) if rank not in mesh)
            self._dims[mesh] = [MeshDim(f"m{number + dim}", (*mesh.slices(dim), *alone)) for dim in range(mesh.ndim)]
        return self._dims[mesh]

    def _whole(self) -> tuple[MeshDim, ...]:
        return (MeshDim("m0", (tuple(range(self.world_size)),)),)

    def _fresh(self, rank: int) -> int:
        self._aliases[rank] += 1
        return self._aliases[rank] - 1


def _check_axis(op: str, axis: int | None, shape: Sequence[int]) -> None:
    if axis is not None and not 0 <= axis < len(shape):
        raise ProgramError(f"stream axis {axis} of {op}, whose result is of shape {list(shape)}")


__all__ = ["Placed", "PlacedBuilder"]
