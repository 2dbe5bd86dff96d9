"""Vocabulary of sequence parallelism: its ops, shards, and how dims of a value relate to dims of values computed from it.

tensor_cast's collectives take a dim, and tokens are the second dim from the right in every layout: [S, H], [B, S, H] and the
rank-reduced forms of one batch. c10d's work on dim 0 alone, so there the tokens of all batches count as the rows of one matrix
[B·S, H], and a rank has a block of consecutive rows. Norms and sums of residuals work row by row, so they cannot tell; the group
has to divide B·S only; every view that keeps rows whole keeps the blocks; and neither scatter nor gather copies anything, as
it would if dim 1 were split and concatenated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from torch import fx

from tcverify.ops import TensorSpec
from tcverify.passes.editing import known_spec

ALL_REDUCE = "tensor_cast::all_reduce"
ALL_GATHER = "tensor_cast::all_gather"
REDUCE_SCATTER = "tensor_cast::reduce_scatter"
GETITEM = "python::getitem"
#: Identities that mark where a region begins, ends or is copied.
MARKERS = frozenset(
    f"tensor_cast::{name}"
    for name in ("_internal_mark_region_begin", "_internal_mark_region_end", "_internal_copy_region")
)
VIEWS = frozenset(
    f"aten::{name}"
    for name in ("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "squeeze.dim", "squeeze.dims")
)
#: What keeps rows as they are, besides the views.
_ROW_KEEPING = frozenset({"aten::alias", "aten::detach", "aten::flatten.using_ints", "aten::unflatten.int"})
CASTS = frozenset({"aten::_to_copy", "prims::convert_element_type"})
START, WAIT, NAMED_SCATTER, NAMED_GATHER = (
    f"_c10d_functional::{name}"
    for name in ("all_reduce", "wait_tensor", "reduce_scatter_tensor", "all_gather_into_tensor")
)
ADD, RMS_NORM, ADD_RMS_NORM, ADD_RMS_NORM2 = (
    "aten::add.Tensor",
    "tensor_cast::rms_norm",
    "tensor_cast::add_rms_norm",
    "tensor_cast::add_rms_norm2",
)
#: The ops that move to the shard, and their addends in the order in which they are tried.
ADDENDS = {
    ADD: ("self", "other"),
    RMS_NORM: ("x",),
    ADD_RMS_NORM: ("x", "residual"),
    ADD_RMS_NORM2: ("x", "residual"),
}


@dataclass(frozen=True, slots=True)
class Shard:
    """How a value that all ranks of a group have in full is divided among them.

    Attributes:
        rank: this rank.
        group: the ordered group; position in it picks the chunk.
        dim: the dim of the value that is divided.
    """

    rank: int
    group: tuple[int, ...]
    dim: int

    @property
    def members(self) -> int:
        """Ranks of the group."""
        return len(self.group)

    @property
    def position(self) -> int:
        """Position of this rank in the group."""
        return self.group.index(self.rank)

    def along(self, dim: int) -> Shard:
        """The same division of a value in which the divided dim is `dim`."""
        return replace(self, dim=dim)

    def handed_on_by(self, op: str) -> bool:
        """Whether the op of this name, a view, may keep the chunks as they are; see `viewed_dim`."""
        return op in VIEWS

    def viewed_dim(self, before: tuple[int, ...], after: tuple[int, ...]) -> int | None:
        """The dim of a view that is divided when this one divides what it views; None: its chunks are no slices of the view."""
        return viewed_dim(before, self.dim, after, self.members)

    def local_shape(self, shape: tuple[int, ...]) -> list[int]:
        """The shape of a chunk of a value of this shape."""
        return [size // self.members if dim == self.dim else size for dim, size in enumerate(shape)]

    def can_slice(self, value: fx.Node) -> bool:
        """Whether a chunk of a value that is there on all tokens can be had as a view of it."""
        return True


@dataclass(frozen=True, slots=True)
class Rows(Shard):
    """How the rows of a value, which are its last dim, are divided: a rank has a block of them, a matrix.

    Attributes:
        dim: 0, the rows.
        name: the name of the group.
    """

    name: str = ""

    def along(self, dim: int) -> Rows:
        """The same division: rows are rows, whatever dims lie before them."""
        return self

    def handed_on_by(self, op: str) -> bool:
        """Views, and casts."""
        return op in VIEWS or op in _ROW_KEEPING or op in CASTS

    def viewed_dim(self, before: tuple[int, ...], after: tuple[int, ...]) -> int | None:
        """0 if the view keeps rows as they are."""
        return 0 if after and before[-1] == after[-1] else None

    def local_shape(self, shape: tuple[int, ...]) -> list[int]:
        """The matrix that is a block of the rows."""
        return [math.prod(shape[:-1]) // self.members, shape[-1]]

    def can_slice(self, value: fx.Node) -> bool:
        """Whether its blocks of rows lie in memory in one piece, as c10d wants what it sends."""
        return is_contiguous(value)


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm over the last dim that is one op of aten, or made of several.

    Attributes:
        node: its result: the normed value, or a tuple.
        source: its operand.
        weights: what it multiplies by, or adds, per element of the last dim.
        nodes: all its ops, in graph order; the results of those before the last have no other readers.
        items: of a tuple, the stages of its items; see `Move`.
    """

    node: fx.Node
    source: fx.Node
    weights: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    items: tuple[Stage, ...] = ()


#: What a value that moves is; see `Move`, `experts` and `attention`.
Stage: TypeAlias = Literal[
    "reduced", "added", "residual", "normed", "tokens", "rows", "experts", "projected", "statistic"
]


@dataclass(slots=True)
class Move:
    """A value of which this rank can have only its shard.

    Attributes:
        node: the value on all tokens.
        op: qualified name of its op.
        shard: how it is divided.
        stage: "reduced": an all_reduce, seen through markers and views; "added": the sum of one and a residual, likewise;
            "residual": that sum as add_rms_norm2 returns it; "normed": a norm. Those of experts and attention: see
            `experts` and `attention`.
        source: the operand whose shard it is computed from; None for an all_reduce.
        operand: the name of that argument.
        other: the other addend, if there is one.
        slot: the name of that argument.
        local: whether the other addend is used as an existing shard, and not sliced.
        pattern: the pattern that this move completes, if any: "P1" to "P5".
        items: of a tuple, the stages of its items; that of a number per row is "statistic".
        norm: what else belongs to a norm that is made of aten's ops.
        routing: of routed rows, what their tokens were routed by; see `experts.routing_of`.
    """

    node: fx.Node
    op: str
    shard: Shard
    stage: Stage
    source: fx.Node | None = None
    operand: str = ""
    other: fx.Node | None = None
    slot: str = ""
    local: bool = False
    pattern: str = ""
    items: tuple[Stage, ...] = ()
    norm: Norm | None = None
    routing: tuple[fx.Node, int] | None = None

    @property
    def reads(self) -> tuple[fx.Node, ...]:
        """The operands that are read as shards."""
        if self.source is None:
            return ()
        if self.other is None or self.other is self.source or not self.local:
            return (self.source,)
        return (self.source, self.other)

    @property
    def in_place(self) -> bool:
        """Whether the node itself moves; all_reduces and views may be there twice, in full and as shards."""
        if self.norm is not None:
            return True  # though it may end with a cast
        return self.op not in (ALL_REDUCE, START, WAIT) and not self.shard.handed_on_by(self.op)


def token_dim(shape: tuple[int, ...]) -> int:
    """The dim of the tokens."""
    return len(shape) - 2


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The recorded shape of a value; it is known."""
    return tuple(node.meta["val"].shape)


def drop_batch_dims(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape without leading dims of size 1: what a rank-reduced value of one batch has."""
    leading = next((i for i, size in enumerate(shape) if size != 1), len(shape))
    return shape[leading:]


def viewed_dim(before: tuple[int, ...], dim: int, after: tuple[int, ...], members: int) -> int | None:
    """The dim of a view that is divided when `dim` of what it views is, or None when its chunks are no slices of the view.

    Both shapes are of one number of elements. The chunks stay slices where as many elements lie behind the dims left of the
    new dim as behind those left of the old one, and the new dim can be divided too.
    """
    outer = math.prod(before[:dim])
    found = 1
    for new, size in enumerate(after):
        if found == outer and size != 1:
            return new if size % members == 0 else None
        found *= size
    return None


def only_casts(node: fx.Node) -> bool:
    """Whether a cast, if it is one, has no say in how its result lies in memory."""
    return not {"memory_format", "pin_memory"} & {name for name, value in node.kwargs.items() if value is not None}


def is_contiguous(node: fx.Node) -> bool:
    """Whether the recorded layout is row-major, as that of a gathered value is."""
    spec = known_spec(node)
    return spec is not None and spec.layout == TensorSpec.contiguous(spec.shape, spec.dtype).layout
