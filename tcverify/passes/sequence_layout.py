"""What sequence parallelism looks at: its ops, shards, and how dims of a value relate to dims of what is made of it.

Tokens are the second dim from the right in every layout: [S, H], [B, S, H] and the rank-reduced forms of one batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

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
ADD, RMS_NORM, ADD_RMS_NORM, ADD_RMS_NORM2 = (
    "aten::add.Tensor",
    "tensor_cast::rms_norm",
    "tensor_cast::add_rms_norm",
    "tensor_cast::add_rms_norm2",
)
#: The ops that move to the shard, and their addends in the order in which they are looked at.
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


@dataclass(slots=True)
class Move:
    """A value that this rank can have as its shard alone.

    Attributes:
        node: the value on all tokens.
        op: qualified name of its op.
        shard: how it is divided.
        stage: "reduced": an all_reduce, seen through markers and views; "added": the sum of one and a residual, likewise;
            "residual": that sum as add_rms_norm2 returns it; "normed": a norm. Those of experts and attention: see
            `sequence_experts` and `sequence_attention`.
        source: the operand whose shard it is computed from; None for an all_reduce.
        operand: the name of that argument.
        other: the other addend, where there is one.
        slot: the name of that argument.
        local: whether the other addend is taken as the shard that is there anyway, and not sliced.
        pattern: the pattern that this move completes, if any: "P1" to "P5".
        items: the stages of the items, of a tuple.
        routing: of routed rows, what their tokens were routed by; see `sequence_experts.routing_of`.
    """

    node: fx.Node
    op: str
    shard: Shard
    stage: str
    source: fx.Node | None = None
    operand: str = ""
    other: fx.Node | None = None
    slot: str = ""
    local: bool = False
    pattern: str = ""
    items: tuple[str, ...] = ()
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
        return self.op != ALL_REDUCE and self.op not in VIEWS


def token_dim(shape: tuple[int, ...]) -> int:
    """The dim of the tokens."""
    return len(shape) - 2


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The recorded shape of a value; it is known."""
    return tuple(node.meta["val"].shape)


def unbatched(shape: tuple[int, ...]) -> tuple[int, ...]:
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


def is_contiguous(node: fx.Node) -> bool:
    """Whether the recorded layout is row-major, as that of a gathered value is."""
    spec = known_spec(node)
    return spec is not None and spec.layout == TensorSpec.contiguous(spec.shape, spec.dtype).layout
