"""The capture of one rank: the graph in plain form, its inputs, and the groups that it names. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import fx

from tcverify.ops import TensorSpec
from tcverify.program import Placement, Recipe

DRAWN = Recipe()


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """A group that a graph names, as one rank knows it.

    Attributes:
        label: what the group is to all ranks (the mesh dim "tp"), where that is known: names of process groups differ from rank
            to rank.
        ranks: its members in group order.
    """

    label: str | None
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupSize:
    """A group of which a file says no more than its number of ranks, and which of them the graph is of."""

    size: int
    position: int


#: What an input of a captured graph is to the model.
InputRole: TypeAlias = Literal["input", "parameter", "buffer", "constant", "tangent"]


@dataclass(frozen=True, slots=True)
class CapturedInput:
    """One tensor that a captured graph reads.

    Attributes:
        name: of its placeholder.
        spec: what this rank holds.
        role: what it is to the model; a "tangent" is the gradient of an output.
        placements: (group label or name, placement) pairs; None where nothing is known.
        shape: global shape, where it is known.
        recipe: how its values are made.
        digest: tells the values that this rank holds from those of others, where they are known and not kept.
    """

    name: str
    spec: TensorSpec
    role: InputRole = "input"
    placements: tuple[tuple[str, Placement], ...] | None = None
    shape: tuple[int, ...] | None = None
    recipe: Recipe = DRAWN
    digest: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """The normalised graph of one rank: placeholders are tensors and come first, shapes are numbers, `meta["val"]` has specs.

    Attributes:
        groups: by the name that the graph uses.
        sizes: of groups whose ranks are not known.
        rank: the rank of the graph, if known.
        module: owner of submodules, for graphs that have some: they cannot be written to files.
        notes: changes made to the graph, for the user.
    """

    graph: fx.Graph
    inputs: tuple[CapturedInput, ...]
    groups: dict[str, GroupFacts] = field(default_factory=dict)
    sizes: dict[str, GroupSize] = field(default_factory=dict)
    rank: int | None = None
    module: torch.nn.Module | None = None
    notes: tuple[str, ...] = ()


__all__ = ["Captured", "CapturedInput", "GroupFacts", "GroupSize"]
