"""Small passes of the kind that engineers write, each sound, and each with one defect put back: fused and erased collectives."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from torch import fx

from tcverify.ops import lookup
from tcverify.passes.editing import named_arguments, op_name
from tests.mutants.foreign import ADD, ALL_REDUCE, REDUCE_SCATTER, Foreign, shape, writes, written

# ------------------------------------------------------------------------------------------------------- fused collectives


class FuseMatmul(Foreign):
    """a @ b → all_reduce ⇒ matmul_all_reduce(a, b)"""

    def visit(self, graph: fx.Graph, node: fx.Node) -> None:
        if op_name(node) != ALL_REDUCE:
            return
        product, rank, group = named_arguments(node).values()
        if op_name(product) not in ("aten::mm", "aten::matmul") or len(product.users) > 1:
            return
        a, b = product.args
        if len(shape(a)) >= 2 and len(shape(b)) == 2:
            self.fuse(node, a, b, rank, group)

    def fuse(self, node: fx.Node, a: Any, b: Any, rank: int, group: list[int]) -> None:
        """Put the fused op in place of the all_reduce."""
        self.replace(node, self.put(node, "tensor_cast::matmul_all_reduce", a, b, None, rank, group))


class FusedOverWorld(FuseMatmul):
    """The fused op sums over all ranks, whatever group the all_reduce had (wrong-value, …).

    Args:
        world_size: how many ranks there are.
    """

    def __init__(self, *, world_size: int = 4) -> None:
        self.world = list(range(int(world_size)))

    def fuse(self, node: fx.Node, a: Any, b: Any, rank: int, group: list[int]) -> None:
        super().fuse(node, a, b, rank, self.world)


class BiasOnEveryRank(FuseMatmul):
    """The bias behind the sum goes into the fused op, which adds it on every rank (wrong-value)."""

    def fuse(self, node: fx.Node, a: Any, b: Any, rank: int, group: list[int]) -> None:
        adds = [user for user in node.users if op_name(user) == ADD and not user.kwargs]
        biases = [arg for add in adds[:1] for arg in add.args if len(shape(arg)) == 1]
        if len(node.users) == 1 and biases:
            self.replace(adds[0], self.put(adds[0], "tensor_cast::matmul_all_reduce", a, b, biases[0], rank, group))


# ----------------------------------------------------------------------------------------------------------------- buckets


class Bucket(Foreign):
    """Two all_reduces of one group and dtype ⇒ one all_reduce of both, flattened and put one behind the other."""

    def begin(self, graph: fx.Graph) -> None:
        self.first: dict[Hashable, fx.Node] = {}
        self.order = {node: number for number, node in enumerate(graph.nodes)}
        self.kept = written(graph)

    def key(self, node: fx.Node) -> Hashable:
        """What two collectives have in common that share a bucket."""
        return (op_name(node), tuple(named_arguments(node)["rank_group"]), node.meta["val"].dtype)

    def kinds(self) -> tuple[str, ...]:
        return (ALL_REDUCE,)

    def visit(self, graph: fx.Graph, node: fx.Node) -> None:
        if self.kept or op_name(node) not in self.kinds() or not node.users:
            return
        first = self.first.pop(self.key(node), None)
        if first is None:
            self.first[self.key(node)] = node
        elif self.fits(first, node):
            self.merge(first, node)

    def fits(self, first: fx.Node, second: fx.Node) -> bool:
        """Whether all of both members' operands stand before the first reader of either: there, both can start."""
        return min(self.order[user] for user in first.users) > self.order[second]

    def place(self, first: fx.Node, second: fx.Node) -> fx.Node:
        """Where the bucket is put: the members' results are there when it is through."""
        return second

    def merge(self, first: fx.Node, second: fx.Node) -> None:
        at, given = self.place(first, second), named_arguments(first)
        dtype = first.meta["val"].dtype
        flat = [self.put(at, "aten::reshape", named_arguments(member)["x"], [-1]) for member in (first, second)]
        flat = [
            part if part.meta["val"].dtype is dtype else self.put(at, "aten::_to_copy", part, dtype=dtype)
            for part in flat
        ]
        bucket = self.put(at, ALL_REDUCE, self.put(at, "tensor_cast::cat", flat, 0), given["rank"], given["rank_group"])
        start = 0
        for member, part in zip((first, second), flat, strict=True):
            size = member.meta["val"].numel()
            piece = self.put(at, "aten::slice.Tensor", bucket, 0, start, start + size)
            restored = self.put(at, "aten::reshape", piece, list(shape(member)))
            own = member.meta["val"].dtype
            if own is dtype:
                self.replace(member, self.put(at, "aten::clone", restored))
            else:
                self.replace(member, self.put(at, "aten::_to_copy", restored, dtype=own))
            start += part.meta["val"].numel()


class BucketOfAllGroups(Bucket):
    """What shares a bucket need not share a group: the second member is summed over the first one's (wrong-value)."""

    def key(self, node: fx.Node) -> Hashable:
        return (op_name(node), node.meta["val"].dtype)


class BucketOfAllKinds(Bucket):
    """reduce_scatters share buckets with all_reduces: every rank takes the first chunk of the sum (wrong-value)."""

    def kinds(self) -> tuple[str, ...]:
        return (ALL_REDUCE, REDUCE_SCATTER)

    def key(self, node: fx.Node) -> Hashable:
        return (tuple(named_arguments(node)["rank_group"]), node.meta["val"].dtype)


class BucketAtFirstMember(Bucket):
    """The bucket stands where its first member stood, whose readers may be what the second one sums (malformed-graph)."""

    def fits(self, first: fx.Node, second: fx.Node) -> bool:
        return True

    def place(self, first: fx.Node, second: fx.Node) -> fx.Node:
        return first


class BucketOfAllDtypes(Bucket):
    """A bucket has the dtype of its first member, and a second one of more digits is rounded to it (wrong-value)."""

    def key(self, node: fx.Node) -> Hashable:
        return (op_name(node), tuple(named_arguments(node)["rank_group"]))


# ------------------------------------------------------------------------------------------------------------- dead code


class EraseUnread(Foreign):
    """Erases calls that nobody reads, if that cannot be seen from outside: no collectives, nothing that writes."""

    def begin(self, graph: fx.Graph) -> None:
        for node in self.unread(graph):
            graph.erase_node(node)

    def unread(self, graph: fx.Graph) -> Iterator[fx.Node]:
        for node in reversed(list(graph.nodes)):
            if node.op == "call_function" and not node.users and not self.has_effect(node):
                yield node

    def has_effect(self, node: fx.Node) -> bool:
        return lookup(node.target).collective or writes(node)


class WriteErased(EraseUnread):
    """A write whose result nobody reads is erased: the tensor keeps what it held (wrong-value)."""

    def has_effect(self, node: fx.Node) -> bool:
        return lookup(node.target).collective


class CollectiveErased(EraseUnread):
    """A collective that this rank does not read is erased, and the others wait for it (deadlock, collective-mismatch)."""

    def has_effect(self, node: fx.Node) -> bool:
        return writes(node)
