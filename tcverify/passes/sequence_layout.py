"""What sequence parallelism looks at: all_reduces, the chains of markers and views behind them, and norms.

Tokens are the second dim from the right in every layout: [S, H], [B, S, H] and the rank-reduced forms of one batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from tcverify.passes.editing import arguments, known_spec

ALL_REDUCE = "tensor_cast::all_reduce"
ALL_GATHER = "tensor_cast::all_gather"
REGION_BEGIN = "tensor_cast::_internal_mark_region_begin"
VIEWS = frozenset(
    f"aten::{name}" for name in ("view", "reshape", "unsqueeze", "squeeze", "squeeze.dim", "squeeze.dims")
)
#: The norms of P1, and their operands that may carry the all_reduce, in the order in which they are tried.
NORM_OPERANDS = {"tensor_cast::rms_norm": ("x",), "tensor_cast::add_rms_norm": ("x", "residual")}


@dataclass(frozen=True, slots=True)
class Reduction:
    """An all_reduce that may become a reduce_scatter.

    Attributes:
        node: the all_reduce.
        rank: this rank.
        group: the ordered group.
    """

    node: fx.Node
    rank: int
    group: tuple[int, ...]

    @property
    def value(self) -> fx.Node:
        """What this rank contributes, as the graph stands now: an earlier rewrite may have moved it."""
        return arguments(self.node)["x"]  # type: ignore[no-any-return]

    @property
    def position(self) -> int:
        """Position of this rank in the group: what picks its shard."""
        return self.group.index(self.rank)


@dataclass(frozen=True, slots=True)
class Match:
    """A norm that can work on the shard.

    Attributes:
        norm: the norm.
        reduction: the all_reduce that it reads.
        operand: the name of the argument that does.
        source: that argument: the all_reduce, or the last of a chain of markers and views.
    """

    norm: fx.Node
    reduction: Reduction
    operand: str
    source: fx.Node


def token_dim(shape: tuple[int, ...]) -> int:
    """The dim of the tokens."""
    return len(shape) - 2


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The recorded shape of a value; it is known."""
    return tuple(node.meta["val"].shape)


def unbatched(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape without a leading batch of one."""
    return shape[1:] if len(shape) == 3 and shape[0] == 1 else shape


def keeps_tokens(view: fx.Node) -> bool:
    """Whether a view adds or drops a batch of one and changes nothing else."""
    result, operand = known_spec(view), known_spec(view.args[0]) if view.args else None
    if result is None or operand is None or len(result.shape) not in (2, 3):
        return False
    return unbatched(result.shape) == unbatched(operand.shape)


def other_addend(match: Match) -> fx.Node | None:
    """The addend of the norm that is not the all_reduce, if it has two."""
    given = arguments(match.norm)
    other = given.get("residual") if match.operand == "x" else given["x"]
    return other if isinstance(other, fx.Node) else None


def reads_as_source(user: fx.Node, node: fx.Node, norms: dict[fx.Node, Match]) -> bool:
    """Whether `user` is a norm that P1 rewrites and reads `node` as nothing but what it takes from the shard."""
    match = norms.get(user)
    if match is None or match.source is not node:
        return False
    others = [v for k, v in arguments(user).items() if k not in ("x", "residual")]
    return all(other is not node for other in others)
