"""Finds what can be pipelined with communication: a matmul of what is gathered, and a matmul whose partial products are summed.

Both are recognised by what all ranks of a mesh agree on: the arguments of `set` and `reduce`, layouts, and the stream axis.
Source: the operands that nvFuser's lowering of matmuls to pipelined collectives asks for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx

from tcverify.errors import Unsupported
from tcverify.ops import Layout, Resharding, TensorSpec
from tcverify.ops.dialects.multidevice import REDUCE, SET
from tcverify.passes.editing import known_spec, named_arguments, op_name
from tcverify.passes.resharding.layouts import layout_of, resharding_of, stream_axis_of
from tcverify.passes.resharding.pipelined.order import NodeOrder

#: Names of the operands of what can be pipelined, in order: by position among the arguments of the op.
OPERANDS: dict[str, tuple[str, ...]] = {
    "aten::matmul": ("self", "other"),
    "aten::linear": ("input", "weight", "bias"),
}
#: Products that are not, and the name of their first factor.
_OTHER_PRODUCTS = {"aten::mm": "self", "aten::bmm": "self", "aten::addmm": "mat1", "aten::baddbmm": "batch1"}


@dataclass(frozen=True, slots=True)
class GatherMatmul:
    """A [S, D, M/(S·D), K], sharded on dim 1, is gathered, and multiplied in chunks of dim 0.

    Attributes:
        gather: the `set`.
        matmul: what multiplies its result.
        before: the node before which the pipelined form can be written.
        made: what the `set` asks for.
        rank: whose graph it is.
        product: spec of the result [S, D, M/(S·D), N].
    """

    gather: fx.Node
    matmul: fx.Node
    before: fx.Node
    made: Resharding
    rank: int
    product: TensorSpec

    @property
    def team(self) -> tuple[int, ...]:
        return self.made.source.mesh.ranks


@dataclass(frozen=True, slots=True)
class MatmulScatter:
    """Partial products, one per rank along a dim of extent 1 here, are summed, and each rank keeps its part of the sum.

    Attributes:
        matmul: what makes the partial products.
        reduce: what sums them.
        made: what the `reduce` asks for. The stream axis is dim 0 of its result.
        rank: whose graph it is.
        partial, total: specs of what both make on this rank.
    """

    matmul: fx.Node
    reduce: fx.Node
    made: Resharding
    rank: int
    partial: TensorSpec
    total: TensorSpec

    @property
    def team(self) -> tuple[int, ...]:
        return self.made.source.mesh.ranks

    @property
    def summed(self) -> int:
        """The dim of the partial products that is summed."""
        assert self.made.dim is not None
        return self.made.dim

    @property
    def scattered(self) -> int:
        """The dim of the result of which each rank keeps a part."""
        dim = self.made.target.sharding[0]
        assert dim is not None
        return dim


def find_patterns(graph: fx.Graph) -> list[GatherMatmul | MatmulScatter]:
    """Return what can be pipelined, in the order of the matmuls. A matmul is in one of them at most. Linear in the graph.

    Raises:
        Unsupported: something is meant to be pipelined, by its stream axis, and breaks a precondition. See `match_gather_matmul`.
    """
    streamed = [node for node in graph.nodes if stream_axis_of(node) is not None]
    if not streamed:
        return []
    order = NodeOrder(graph)
    taken: set[fx.Node] = set()
    found: list[GatherMatmul | MatmulScatter] = []
    for node in graph.nodes:
        summed = match_matmul_scatter(node, order)
        if summed is not None:
            taken.add(summed.matmul)
            found.append(summed)
    for node in streamed:
        multiplied = match_gather_matmul(node, order) if node not in taken else None
        if multiplied is not None and multiplied.gather not in taken:  # what is gathered once, others read as a whole
            taken.add(multiplied.gather)
            found.append(multiplied)
    return sorted(found, key=lambda pattern: order.position[pattern.matmul])


# ---------------------------------------------------------------------------------------------------- allgather + matmul


def match_gather_matmul(node: fx.Node, order: NodeOrder) -> GatherMatmul | None:
    """What `node`, which has a stream axis, multiplies after gathering it; None where it needs no communication.

    Raises:
        Unsupported: A is not sharded on dim 1 alone or not with one shard per rank, dim 0 of A is parallel, B, bias or the
            result are sharded, the stream axis is not 0, a layout is not known, the mesh has several dims, or the op is
            another product.
    """
    name = op_name(node)
    if name not in OPERANDS and name not in _OTHER_PRODUCTS:
        return None
    given = named_arguments(node)
    first = given.get(OPERANDS[name][0] if name in OPERANDS else _OTHER_PRODUCTS[name])
    if not isinstance(first, fx.Node):
        return None
    made = resharding_of(first) if op_name(first) == SET else None
    if made is None:
        if name in OPERANDS:
            _require_local(node, first)
        return None
    if made.source.mesh != made.target.mesh or made.target.is_sharded or not _gathers(made, node):
        return None
    if name not in OPERANDS:
        raise Unsupported(
            f"'{node.name}' calls {name}, which cannot be pipelined with the communication of its operand",
            f"use {' or '.join(OPERANDS)}",
        )
    _require_gather(node, first, made)
    _require_operands(node, [(operand, given.get(operand)) for operand in OPERANDS[name][1:]])
    _require_vector(node)
    product = _spec(node)
    others = [value for operand in OPERANDS[name][1:] if isinstance(value := given.get(operand), fx.Node)]
    before = order.place(first, node, others)
    return None if before is None else GatherMatmul(first, node, before, made, named_arguments(first)["rank"], product)


def _gathers(made: Resharding, node: fx.Node) -> bool:
    """Whether ranks have different parts; or on a mesh of one rank, which needs no communication, whether chunks fit."""
    if made.source.is_sharded:
        return True
    fits = len(made.shape) > 2 and made.shape[1] == 1 and stream_axis_of(node) == 0
    return made.source.sharding == (1,) and fits


def _require_local(node: fx.Node, first: fx.Node) -> None:
    """Refuse a product that would be whole on all ranks although its operand is in parts."""
    operand, product = layout_of(first), layout_of(node)
    if operand is not None and product is not None and operand.is_sharded and not product.is_sharded:
        raise Unsupported(
            f"operand '{first.name}' of '{node.name}' is in layout '{operand}', and the result is in '{product}'",
            "bring the operand into the layout of the result with set, or make the result sharded too",
        )


def _require_gather(node: fx.Node, gather: fx.Node, made: Resharding) -> None:
    source, where = made.source, f"'{gather.name}', the first operand of '{node.name}',"
    if source.mesh.ndim != 1:
        raise Unsupported(f"{where} is gathered over mesh {source.mesh}, which has several dims", "use a 1-D mesh")
    axis = stream_axis_of(node)
    if axis != 0:
        raise Unsupported(f"the stream axis of '{node.name}' is dim {axis}, and its chunks are of dim 0", "use dim 0")
    if source.sharding == (0,):
        raise Unsupported(
            f"{where} is gathered along dim 0, which is also the stream axis",
            "split dim 0: chunks on dim 0 and shards on dim 1",
        )
    if source.sharding != (1,):
        raise Unsupported(f"{where} is gathered along dim {source.sharding[0]}", "shard it on dim 1")
    parts, shape = source.mesh.size, list(made.shape)
    if len(shape) < 3 or shape[1] != parts:
        raise Unsupported(
            f"{where} has shape {shape}: dim 1 is not one shard for each of {parts} ranks",
            "give it shape [chunks, ranks, rows, columns]",
        )
    operand = named_arguments(gather)["x"]
    _spec(operand)
    if stream_axis_of(operand) == 0:
        raise Unsupported(
            f"dim 0 of '{operand.name}', which '{gather.name}' gathers, is parallel over streams already",
            "take its stream axis away",
        )


def _require_operands(node: fx.Node, others: Iterable[tuple[str, Any]]) -> None:
    for name, operand in [*others, ("result", node)]:
        if not isinstance(operand, fx.Node):
            continue
        layout: Layout | None = layout_of(operand)
        if layout is None:
            raise Unsupported(
                f"the layout of '{operand.name}', the {name} of '{node.name}', is unknown",
                'write it into meta["layout"]',
            )
        if layout.is_sharded:
            raise Unsupported(
                f"'{operand.name}', the {name} of '{node.name}', is in layout '{layout}', and chunks need the whole of it",
                "make it replicated, or take the stream axis away",
            )
        if operand is not node and len(_spec(operand).shape) > 2:
            raise Unsupported(
                f"'{operand.name}', the {name} of '{node.name}', has shape {list(_spec(operand).shape)}",
                "multiply by a matrix, or take the stream axis away",
            )


def _require_vector(node: fx.Node) -> None:
    """Refuse a bias that is not a vector: chunks of the product would need parts of it."""
    bias = named_arguments(node).get("bias")
    if isinstance(bias, fx.Node) and len(_spec(bias).shape) != 1:
        raise Unsupported(
            f"'{bias.name}', the bias of '{node.name}', has shape {list(_spec(bias).shape)}, and chunks take a vector",
            "add it to the product, or take the stream axis away",
        )


# ----------------------------------------------------------------------------------------------- matmul + reduce_scatter


def match_matmul_scatter(node: fx.Node, order: NodeOrder) -> MatmulScatter | None:
    """The partial products that `node` sums and divides, if they can be computed in chunks; None if that is not requested.

    Raises:
        Unsupported: the stream axis is not dim 0 of the result, or the partial products are of vectors.
    """
    made = resharding_of(node) if op_name(node) == REDUCE else None
    if made is None or made.reduce_op != "sum" or not _sums_parts(made):
        return None
    matmul = named_arguments(node)["x"]
    if not isinstance(matmul, fx.Node) or op_name(matmul) not in OPERANDS:
        return None
    axes = _axes(matmul, node, made)
    if not axes or (made.source.mesh.size == 1 and axes != {0}):
        return None
    if axes != {0}:
        written = " and ".join(f"dim {axis}" if axis >= 0 else "the dim that is summed" for axis in sorted(axes))
        raise Unsupported(
            f"the stream axis of '{matmul.name}', whose sum is '{node.name}', is {written} of the result",
            "use dim 0 of the result",
        )
    operands = [value for value in named_arguments(matmul).values() if isinstance(value, fx.Node)]
    if min([len(_spec(operand).shape) for operand in operands][:2]) < 2:
        raise Unsupported(f"'{matmul.name}' multiplies vectors, which have no chunks", "take the stream axis away")
    _require_vector(matmul)
    if len(matmul.users) > 1 or not order.unwritten(matmul, node, [matmul, *operands]):
        return None
    return MatmulScatter(matmul, node, made, named_arguments(node)["rank"], _spec(matmul), _spec(node))


def _sums_parts(made: Resharding) -> bool:
    """Whether each rank of a 1-D mesh has one addend, and gets a part of their sum."""
    source, target = made.source, made.target
    return (
        source.mesh == target.mesh
        and source.sharding == (made.dim,)
        and target.sharding[0] is not None
        and made.shape[made.dim or 0] == source.mesh.size
    )


def _axes(matmul: fx.Node, reduce: fx.Node, made: Resharding) -> set[int]:
    """The stream axes of both, counted in the result; −1 is the dim that is summed."""
    axes = {axis for axis in [stream_axis_of(reduce)] if axis is not None}
    axis, dim = stream_axis_of(matmul), made.dim or 0
    if axis is not None:
        axes.add(-1 if axis == dim else axis - (axis > dim))
    return axes


def _spec(node: fx.Node) -> TensorSpec:
    spec = known_spec(node)
    if spec is None:
        raise Unsupported(f"the shape of '{node.name}' is not known", 'annotate it with meta["val"]')
    return spec


__all__ = ["OPERANDS", "GatherMatmul", "MatmulScatter", "find_patterns"]
