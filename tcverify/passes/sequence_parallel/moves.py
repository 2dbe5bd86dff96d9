"""What moves to the shard, what a pass asks before it lets a value move, and how far it has come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import fx

from tcverify.passes.placements import Placements
from tcverify.passes.sequence_parallel.layout import Move, Shard


class Guards(Protocol):
    """What a pass asks before it lets a value move."""

    patterns: frozenset[str]

    def metadata_allows(self, node: fx.Node) -> bool:
        """Whether the recorded shapes of a node can be relied on."""
        ...

    def reduction(self, node: fx.Node) -> Shard | None:
        """How the result of an all_reduce, of either dialect, is divided, if it can be."""
        ...

    def weight_allows(self, weight: Any, shard: Shard, facts: Placements) -> bool:
        """Whether a norm with this weight may move."""
        ...

    def addend_allows(self, addend: fx.Node, shard: Shard, facts: Placements) -> bool:
        """Whether the other addend may be read as its chunk."""
        ...

    def same_division(self, shard: Shard, other: Shard) -> bool:
        """Whether two values whose divided dims are aligned are divided alike."""
        ...

    def shapes_allow(self, addend: tuple[int, ...], other: tuple[int, ...]) -> bool:
        """Whether two addends of these shapes have the same tokens."""
        ...

    def viewed_dim(self, before: tuple[int, ...], shard: Shard, after: tuple[int, ...]) -> int | None:
        """The dim of a view that is divided when what it views is divided like that; None: it cannot move."""
        ...

    def tuple_allows(self, node: fx.Node) -> bool:
        """Whether the readers of a tuple let its items move."""
        ...

    def marker_stays(self, marker: fx.Node) -> bool:
        """Whether a marker that someone reads in full stays in full."""
        ...

    def expert_weight_allows(self, weight: Any, shard: Shard, facts: Placements) -> bool:
        """Whether a matrix, or those of experts, allow the product by them to move."""
        ...

    def rows_allow(self, rows: Move, choices: Move) -> bool:
        """Whether rows were routed by these choices."""
        ...

    def tokens_allow(self, tokens: Move, choices: Move) -> bool:
        """Whether tokens and choices are divided alike."""
        ...

    def beside_allows(self, operand: Any, result: tuple[int, ...], shard: Shard, facts: Placements) -> bool:
        """Whether an operand that does not move can be combined with tokens that do."""
        ...

    def reduced_dims_allow(self, dims: Sequence[int], shard: Shard) -> bool:
        """Whether a reduction over these dims leaves tokens apart."""
        ...

    def projection_allows(self, operand: Any, weights: list[Any], shard: Shard, facts: Placements) -> bool:
        """Whether attention may be sliced before its projection."""
        ...

    def meets(self, residual: Move) -> bool:
        """Whether a residual is local, so that a projection may be, too."""
        ...


@dataclass(slots=True)
class MovePlan:
    """What moves.

    Attributes:
        moves: by node, in graph order.
        full: the nodes whose value on all tokens is read, too.
        norm_of: the norm of each node that is only part of one.
    """

    moves: dict[fx.Node, Move] = field(default_factory=dict)
    full: set[fx.Node] = field(default_factory=set)
    norm_of: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def reads_shard(self, user: fx.Node, node: fx.Node) -> bool:
        """Whether `user` moves and takes `node` as its shard."""
        return self.taker(user, node) is not None

    def taker(self, user: fx.Node, node: fx.Node) -> Move | None:
        """The move of `user`, or of the norm that it is part of, if that takes `node` as its shard."""
        move = self.moves.get(self.norm_of.get(user, user))
        return move if move is not None and node in move.reads else None

    def takers(self, node: fx.Node) -> list[Move]:
        """All moves that take `node` as its shard."""
        found = (self.taker(user, node) for user in node.users)
        return list({id(move): move for move in found if move is not None}.values())


@dataclass(slots=True)
class Rewriting:
    """A graph on its way.

    Attributes:
        shards: what has been rebuilt on the shard so far, by the value on all tokens.
        gathers: what has been gathered so far, by the node or (tuple, item).
        displaced: addends on all tokens that a norm reads no more.
        gathering: the starts of the gathers that have been inserted.
        bypassed: the starts of gathers of addends whose parts are read now.
    """

    graph: fx.Graph
    facts: Placements
    plan: MovePlan
    shards: dict[fx.Node, fx.Node] = field(default_factory=dict)
    gathers: dict[Any, fx.Node] = field(default_factory=dict)
    displaced: list[fx.Node] = field(default_factory=list)
    gathering: set[fx.Node] = field(default_factory=set)
    bypassed: list[fx.Node] = field(default_factory=list)


__all__ = ["Guards", "MovePlan", "Rewriting"]
