"""Relation: how one value of a rewritten program relates to one of the original. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

#: Kinds of relations, each explained in a few words in `BRIEF`.
RelationKind: TypeAlias = Literal[
    "equal",
    "reshaped",
    "transposed",
    "shard",
    "gathered",
    "partial",
    "reduced",
    "nested",
    "step",
    "bundle",
    "chunk",
    "wrong-shard",
    "scaled",
    "addends",
    "sum",
    "permuted",
    "other-rank",
    "dtype",
    "partly",
    "not-finite",
    "unmet",
    "misplaced",
    "other",
    "unrelated",
]

#: Kinds that say what a value is, on every rank.
EXPLAINED: frozenset[RelationKind] = frozenset(
    {"equal", "reshaped", "transposed", "shard", "gathered", "partial", "reduced", "nested", "step", "bundle", "chunk"}
)

#: Kinds of values that hold all of the original's, in its order.
IN_FULL: tuple[RelationKind, ...] = ("equal", "reshaped")

#: Every kind, in a few words for drawings and tables.
BRIEF: dict[RelationKind, str] = {
    "equal": "equal",
    "reshaped": "reshaped",
    "transposed": "dims in another order",
    "shard": "shard",
    "gathered": "gathered",
    "partial": "partial sum",
    "reduced": "summed",
    "nested": "divided twice",
    "step": "step of an op",
    "bundle": "side by side",
    "chunk": "chunk",
    "wrong-shard": "wrong shard",
    "scaled": "scaled",
    "addends": "addends lost or doubled",
    "sum": "something added",
    "permuted": "another order",
    "other-rank": "another rank's value",
    "dtype": "another dtype",
    "partly": "differs in part",
    "not-finite": "not finite",
    "unmet": "not joined by all",
    "misplaced": "out of place",
    "other": "another value",
    "unrelated": "differs",
}


@dataclass(frozen=True, slots=True)
class Relation:
    """How the value of a rewritten node relates to the original's, over all ranks that have the node.

    Attributes:
        kind: those of `EXPLAINED` say what the value is on every rank; no sound rewrite is known to leave the others behind,
            but they say what went wrong.
        original: the original's node, None when unrelated to any.
        text: the relation in words, to follow "it is".
        dim: the dim of a shard or gather.
        ranks: where an unexplained value differs.
        groups: by rank, the group over which the value is divided, gathered or summed.
        loses: whether the ranks together no longer hold what the original holds: each has kept its chunk of a value that
            differs between them.
        view: the shape in which the original's value has to be viewed for that, if different from its own.
        alike: of addends, whether they are equal on all ranks, so that each is as well a fraction of the original's value.
        parts, sizes: of values concatenated along `dim`, their relations and lengths.
    """

    kind: RelationKind
    original: str | None
    text: str
    dim: int | None = None
    ranks: tuple[int, ...] = ()
    groups: Mapping[int, tuple[int, ...]] = field(default_factory=dict, compare=False, repr=False)
    loses: bool = False
    view: tuple[int, ...] = ()
    alike: bool = False
    parts: tuple[Relation, ...] = field(default=(), repr=False)
    sizes: tuple[int, ...] = ()

    @property
    def explained(self) -> bool:
        return self.kind in EXPLAINED

    @property
    def brief(self) -> str:
        """The kind in a few words."""
        return BRIEF.get(self.kind, self.kind)
