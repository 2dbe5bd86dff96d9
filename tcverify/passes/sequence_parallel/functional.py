"""Sequence parallelism on c10d's functional collectives: when it may rewrite at all, and what it puts into the graph.

A rewrite replaces what every member of a group does, so all members must rewrite, and alike. A pass sees one rank's graph; what
it may rely on is in the metadata of its module (`gm.meta`): the rank, the ranks of the groups in order, the groups whose members
run the same graph up to numbers ("alike"), and the calls whose numbers are the same on all of them ("same_numbers"). If these are
missing, as in a compiler that does not provide them, nothing is rewritten. Nor where some group holds ranks of other graphs, for
then a new wait may close a cycle through it; nor where ranks meet by number, which may happen at different nodes of one graph.

Where all ranks run one graph, each blocks at a node on nodes that stand no later, so no wait that is put into all of them at one
place can close a circle. All starts keep their order: a reduce_scatter starts behind the all_reduce that it stands for, on the
same group, and is waited for where that was waited for first, so its operand is read no longer than before. A gather is waited
for at once: passes that move communication decide what to overlap it with.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from tcverify.ops import RECORD, TensorSpec, fake_tensor, lookup, resolve
from tcverify.ops import WAIT as GATE
from tcverify.passes.editing import erase_unused, infer_metadata, known_spec, named_arguments, op_name, set_argument
from tcverify.passes.sequence_parallel.layout import (
    NAMED_GATHER,
    NAMED_SCATTER,
    START,
    VIEWS,
    WAIT,
    Move,
    Rows,
    is_contiguous,
    shape_of,
)
from tcverify.passes.sequence_parallel.moves import Rewriting

#: Ops that compute and never communicate, whatever their meaning.
_LOCAL = frozenset({"aten", "prims", "python"})


@dataclass(frozen=True, slots=True)
class CollectiveFacts:
    """What a graph's functional collectives may be rewritten by.

    Attributes:
        rank: this rank.
        groups: by name, the ranks in order, this one among them. Empty: nothing may be rewritten.
        same_numbers: names of the calls whose numbers are the same on all ranks.
        same_dims: names of those in which dims are, whatever the dialect; None: unknown.
    """

    rank: int = -1
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    same_numbers: Collection[str] = frozenset()
    same_dims: Collection[str] | None = None


def read_collective_facts(graph: fx.Graph) -> CollectiveFacts:
    """Read the facts about a graph in the module's metadata."""
    meta: Mapping[str, Any] = getattr(graph.owning_module, "meta", {})
    rank, groups, numbers = meta.get("rank"), meta.get("groups"), meta.get("same_numbers")
    unknown = CollectiveFacts(same_dims=numbers)
    if (
        type(rank) is not int
        or not isinstance(groups, Mapping)
        or not any(op_name(node) == START for node in graph.nodes)
    ):
        return unknown
    if not set(groups) <= set(meta.get("alike") or ()) or not all(rank in ranks for ranks in groups.values()):
        return unknown
    if any(_meets_by_number(node) for node in graph.nodes):
        return unknown
    return CollectiveFacts(rank, {name: tuple(ranks) for name, ranks in groups.items()}, numbers or (), numbers)


def _meets_by_number(node: fx.Node) -> bool:
    """Whether a node communicates with ranks that it does not name as a group, or may do so, or is gated by streams."""
    if node.op in ("placeholder", "output", "get_attr"):
        return False
    if node.op != "call_function":
        return True
    if isinstance(node.target, torch._ops.OpOverloadPacket):
        return True  # which of its overloads is meant is unknown
    op = lookup(node.target)
    if op.run is None:
        return op.name.split("::")[0] not in _LOCAL
    if op.name in (RECORD, GATE):
        return True
    return op.collective and op.phase != "wait" and op.group is None and "rank_group" not in named_arguments(node)


class RowRewriting(ABC):
    """What a pass inserts to work on blocks of rows. The pass calls it for moves whose shard is `Rows`."""

    setting: CollectiveFacts = CollectiveFacts()

    def rows_reduced(self, node: fx.Node) -> Rows | None:
        """How the rows of the all_reduce `node` are divided: None unless it sums over a group that divides them."""
        given = named_arguments(node)
        group = self.setting.groups.get(given["group_name"], ())
        spec, addend = known_spec(node), known_spec(given["input"])
        if spec is None or addend is None or spec.shape != addend.shape or len(spec.shape) not in (2, 3):
            return None
        if not self.sums(given["reduce_op"]) or len(group) < 2 or len(set(group)) != len(group) or 0 in spec.shape:
            return None
        if not node.users or any(op_name(user) != WAIT for user in node.users):
            return None
        rows = Rows(self.setting.rank, group, 0, given["group_name"])
        if not rows.can_slice(given["input"]) or not self.divides(spec.numel // spec.shape[-1], len(group)):
            return None
        return rows

    def sums(self, reduce_op: str) -> bool:
        """Whether a reduction may move behind the scatter: only sums are certain to be requested."""
        return reduce_op == "sum"

    @abstractmethod
    def divides(self, tokens: int, members: int) -> bool:
        """Whether every member gets the same number of tokens."""

    @abstractmethod
    def chunk_start(self, chunk: int, shard: Any) -> int:
        """Where this rank's chunk starts, in tokens."""

    @abstractmethod
    def insert(self, state: Rewriting, op: str, args: tuple[Any, ...], name: str) -> fx.Node:
        """Insert a call at the graph's insertion point, with its metadata."""

    # ----------------------------------------------------------------------------------------------- scatter and wait

    def scatter_rows(self, state: Rewriting, move: Move) -> fx.Node:
        """Insert the start of the reduce_scatter, behind that of the all_reduce."""
        shard = move.shard
        assert isinstance(shard, Rows)
        with state.graph.inserting_before(move.node.next):
            value = self.as_rows(state, named_arguments(move.node)["input"], f"{move.node.name}_rows")
            args = (value, "sum", shard.members, self.group_name(shard))
            return self.insert(state, NAMED_SCATTER, args, "reduce_scatter")

    def wait_for_rows(self, state: Rewriting, move: Move, start: fx.Node) -> fx.Node:
        """Return the wait for a reduce_scatter: one for all who wait, where the all_reduce was waited for first."""
        known = next((user for user in start.users if op_name(user) == WAIT), None)
        if known is not None:
            return known
        assert move.source is not None
        with state.graph.inserting_before(self.first_wait(move.source)):
            return self.insert(state, WAIT, (start,), "reduce_scatter_wait")

    def first_wait(self, start: fx.Node) -> fx.Node:
        """The first of the waits for an all_reduce."""
        return min(user for user in start.users if op_name(user) == WAIT)

    def group_name(self, shard: Rows) -> str:
        """The name of the group that is scattered among, and gathered from."""
        return shard.name

    def as_rows(self, state: Rewriting, value: fx.Node, name: str) -> fx.Node:
        """Return a value as a matrix of its rows."""
        shape = shape_of(value)
        if len(shape) == 2:
            return value
        return self.insert(state, "aten::view", (value, [_rows_of(shape), shape[-1]]), name)

    def view_rows(self, state: Rewriting, move: Move, operand: fx.Node) -> fx.Node:
        """Return what a view or a cast makes of a block of rows. Of views that is the block itself."""
        spec, before = known_spec(move.node), known_spec(operand)
        if spec is None or before is None or spec.dtype is before.dtype:
            return operand
        with state.graph.inserting_before(move.node):
            args = (operand, *move.node.args[1:])
            cast = state.graph.create_node(
                "call_function", move.node.target, args, dict(move.node.kwargs), name=f"{move.node.name}_shard"
            )
            infer_metadata(cast)
            return cast

    # ------------------------------------------------------------------------------------------------ norms and addends

    def norm_rows(self, state: Rewriting, move: Move, local: fx.Node) -> None:
        """Let a norm of aten's ops read a block of rows in place of all."""
        assert move.norm is not None
        for node in move.norm.nodes:
            node.replace_input_with(move.norm.source, local)
            if op_name(node) == "aten::mean.dim":
                set_argument(node, "dim", [-1])  # it may have been counted from the left
            self.record(node)

    @abstractmethod
    def record(self, node: fx.Node) -> None:
        """Renew the metadata of a node whose operands have changed."""

    def slice_rows(self, state: Rewriting, addend: fx.Node, move: Move) -> fx.Node:
        """Return this rank's rows of a replicated addend: the part that was gathered, else a slice at its position."""
        shard = move.shard
        assert isinstance(shard, Rows)
        shape = shape_of(addend)
        chunk = _rows_of(shape) // shard.members
        start = self.chunk_start(chunk, shard)
        with state.graph.inserting_before(move.node):
            part = self.gathered_part(state, addend, shard)
            if part is not None:
                state.bypassed.append(_gather_behind(addend))
                return self.as_rows(state, part, "residual_rows")
            rows = self.as_rows(state, addend, "residual_rows")
            return self.insert(state, "aten::slice.Tensor", (rows, 0, start, start + chunk), "residual_shard")

    def gathered_part(self, state: Rewriting, addend: fx.Node, shard: Rows) -> fx.Node | None:
        """What this rank gave to the gather that made the addend, if that divides it alike."""
        last = shape_of(addend)[-1]
        start = _gather_behind(addend)
        if op_name(start) != NAMED_GATHER or known_spec(start) is None:
            return None
        given = named_arguments(start)
        part, spec = given["input"], known_spec(given["input"])
        if (
            spec is None
            or not spec.shape
            or spec.shape[-1] != last
            or shape_of(start)[-1] != last
            or len(spec.shape) < 2
        ):
            return None
        same = given["group_name"] == shard.name and spec.numel * shard.members == _rows_of(shape_of(addend)) * last
        return part if same and is_contiguous(part) and not state.facts.mutated(part) else None

    # ----------------------------------------------------------------------------------------------------------- gather

    def gather_rows(self, state: Rewriting, move: Move, whole: Any) -> fx.Node:
        """Insert the gather of blocks of rows, its wait, and the view that gives it the shape that it had.

        Args:
            whole: the metadata of the value on all tokens. The inserted nodes replace it, and share its storage.
        """
        shard, node = move.shard, move.node
        assert isinstance(shard, Rows)
        shape = tuple(whole.shape)
        spec = TensorSpec.contiguous((_rows_of(shape), shape[-1]), whole.dtype)
        with state.graph.inserting_before(node.next):
            args = (node, shard.members, self.group_name(shard))
            start = state.graph.create_node("call_function", resolve(NAMED_GATHER), args, name="all_gather")
            start.meta["val"] = fake_tensor(spec, whole.fake_mode, whole.untyped_storage(), whole.device)
            gathered = self.insert(state, WAIT, (start,), "all_gather_wait")
            if len(shape) != 2:
                gathered = self.insert(state, "aten::view", (gathered, list(shape)), "all_gather_view")
        gathered.meta["val"] = whole
        state.gathering.add(start)
        return gathered

    # ---------------------------------------------------------------------------------------------------------- erasing

    def erase_waits(self, state: Rewriting) -> list[fx.Node]:
        """Erase the waits for all_reduces and gathers that are unused now, after the unused views and casts.

        One that is read keeps all: it may be the last of several, and what the start reads may be written into behind the first.

        Returns:
            What else may be without readers now.
        """
        candidates = [*state.shards, *state.displaced]
        waits = [node for node in state.shards if op_name(node) == WAIT]
        if not waits:
            return candidates
        starts = dict.fromkeys([*(node.all_input_nodes[0] for node in waits), *state.bypassed])
        chains = [node for node in state.shards if isinstance(state.plan.moves[node].shard, Rows)]
        erase_unused(state.graph, [n for n in (*chains, *state.displaced) if op_name(n) not in (START, WAIT)])
        for start in starts:
            if all(op_name(wait) == WAIT and not wait.users for wait in start.users):
                for wait in list(start.users):
                    state.graph.erase_node(wait)
        left = set(state.graph.nodes)
        return [node for node in (*candidates, *state.bypassed) if node in left]


def _gather_behind(addend: fx.Node) -> fx.Node:
    """The start of the collective that made a value, seen through views that keep rows; else what is viewed."""
    value, last = addend, shape_of(addend)[-1]
    while op_name(value) in VIEWS and known_spec(value) is not None and shape_of(value)[-1] == last:
        value = value.all_input_nodes[0]
    return value.all_input_nodes[0] if op_name(value) == WAIT else value


def _rows_of(shape: tuple[int, ...]) -> int:
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows


__all__ = ["CollectiveFacts", "RowRewriting", "read_collective_facts"]
