"""Finds norms over the last dim among aten's ops: RMSNorm and LayerNorm as one op, and RMSNorm as compilers take it apart.

Taken apart it is x · rsqrt(mean(x²) + eps) [· weight], with casts before the weight and at the end, and the operands of
products and sums in either order. x may be a cast itself: that counts as what is normed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import fx

from tcverify.passes.editing import known_spec, named_arguments, op_name
from tcverify.passes.sequence_parallel.layout import CASTS, Norm, Stage, only_casts, shape_of

#: Norms that are one op: the names of their weights, and the stages of what they return.
_FUSED: dict[str, tuple[tuple[str, ...], tuple[Stage, ...]]] = {
    "aten::rms_norm": (("weight",), ()),
    "aten::_fused_rms_norm": (("weight",), ("normed", "statistic")),
    "aten::layer_norm": (("weight", "bias"), ()),
    "aten::native_layer_norm": (("weight", "bias"), ("normed", "statistic", "statistic")),
}
_SUMS, _PRODUCT = ("aten::add.Tensor", "aten::add.Scalar"), "aten::mul.Tensor"


class NormFinder:
    """Finds norms.

    Args:
        same_numbers: names of the calls whose integers are the same on all ranks: an exponent may be one that others have not.
        same_dims: names of those in which they are if they are dims, of which shapes say nothing where sizes are equal; None:
            in all.
    """

    def __init__(self, same_numbers: Collection[str] = (), same_dims: Collection[str] | None = None) -> None:
        self._same_numbers = same_numbers
        self._same_dims = same_dims

    def find(self, graph: fx.Graph) -> dict[fx.Node, Norm]:
        """Return the norms of a graph by what they make."""
        found: dict[fx.Node, Norm] = {}
        for node in graph.nodes:
            op = op_name(node)
            norm = None
            if op in _FUSED and self._settles_dims(node):
                norm = _fused(node, *_FUSED[op])
            elif op == "aten::rsqrt":
                norm = self._taken_apart(node)
            if norm is not None:
                found[norm.node] = norm
        return found

    def _taken_apart(self, rsqrt: fx.Node) -> Norm | None:
        total = rsqrt.args[0]
        mean = _over_eps(total)
        square = self.averaged(mean)
        source = self._squared(square)
        if source is None or mean is None or square is None or not isinstance(total, fx.Node):
            return None
        scaled = next((user for user in rsqrt.users if op_name(user) == _PRODUCT), None)
        if scaled is None or set(scaled.args) != {source, rsqrt} or scaled.kwargs:
            return None
        inside = (square, mean, total, rsqrt)
        if not self.nobody_else_reads(inside):
            return None
        weights: tuple[fx.Node, ...] = ()
        nodes = [*inside, scaled]
        for step in _onward(scaled):
            if op_name(step) == _PRODUCT:
                by = [operand for operand in step.all_input_nodes if operand is not nodes[-1]]
                if weights or len(by) != 1 or step.kwargs or len(step.args) != 2 or not self.is_weight(by[0]):
                    break
                weights = (by[0],)
            elif op_name(step) not in CASTS or not only_casts(step):
                break
            nodes.append(step)
        return Norm(nodes[-1], source, weights, tuple(nodes)) if nodes[-1].users else None

    def _settles_dims(self, node: fx.Node) -> bool:
        """Whether all ranks reduce over the same dims here."""
        return self._same_dims is None or node.name in self._same_dims

    def nobody_else_reads(self, inside: tuple[fx.Node, ...]) -> bool:
        """Whether each of the values inside a norm is read once."""
        return all(len(node.users) == 1 for node in inside)

    def is_weight(self, value: fx.Node) -> bool:
        """Whether a value is one per element of the last dim, the same for all rows."""
        return len(shape_or_none(value) or (0, 0)) == 1

    def averaged(self, mean: fx.Node | None) -> fx.Node | None:
        """square, of the mean of square over its last dim, which stays as one of size 1."""
        if mean is None or op_name(mean) != "aten::mean.dim" or not self._settles_dims(mean):
            return None
        given = named_arguments(mean)
        square, dims = given["self"], given.get("dim")
        before, after = shape_or_none(square), shape_or_none(mean)
        if not before or after is None or not isinstance(dims, list | tuple) or given.get("dtype") is not None:
            return None
        over_last = [dim % len(before) for dim in dims if type(dim) is int] == [len(before) - 1]
        return square if over_last and len(dims) == 1 and after == (*before[:-1], 1) else None

    def _squared(self, square: fx.Node | None) -> fx.Node | None:
        """x, of x² or x · x."""
        if square is None or square.kwargs or len(square.args) != 2:
            return None
        x, by = square.args
        if op_name(square) == _PRODUCT and x is by:
            return x if isinstance(x, fx.Node) else None
        settled = isinstance(by, float) or square.name in self._same_numbers
        if op_name(square) == "aten::pow.Tensor_Scalar" and by == 2 and type(by) in (int, float) and settled:
            return x if isinstance(x, fx.Node) else None
        return None


def _fused(node: fx.Node, names: tuple[str, ...], items: tuple[Stage, ...]) -> Norm | None:
    given = named_arguments(node)
    source = given.get("input")
    spec = known_spec(source)
    if not isinstance(source, fx.Node) or spec is None or list(given["normalized_shape"]) != list(spec.shape[-1:]):
        return None
    if not isinstance(given.get("eps"), float | None):
        return None
    weights = tuple(given[name] for name in names if isinstance(given.get(name), fx.Node))
    return Norm(node, source, weights, (node,), items)


def shape_or_none(node: fx.Node) -> tuple[int, ...] | None:
    """The recorded shape of a value, if it is known."""
    return shape_of(node) if known_spec(node) is not None else None


def _onward(node: fx.Node) -> Iterator[fx.Node]:
    """What alone reads a value, and what alone reads that, and so on."""
    while len(node.users) == 1:
        node = next(iter(node.users))
        yield node


def _over_eps(total: object) -> fx.Node | None:
    """mean, of mean + eps."""
    if not isinstance(total, fx.Node) or op_name(total) not in _SUMS or total.kwargs or len(total.args) != 2:
        return None
    numbers = [value for value in total.args if isinstance(value, float)]
    values = [value for value in total.args if isinstance(value, fx.Node)]
    return values[0] if len(numbers) == len(values) == 1 else None


__all__ = ["NormFinder", "shape_or_none"]
