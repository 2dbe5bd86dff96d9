"""Sequence parallelism: what follows an all_reduce works only on this rank's tokens, up to where all tokens are needed.

A chain is an all_reduce, seen through region markers and views that keep the chunks of the tokens together.

P1: chain → rms_norm | add_rms_norm becomes reduce_scatter → the chain on the shard → norm → all_gather. Other readers of the
    all_reduce keep it.
P2: chain + residual → add_rms_norm2: likewise; of its two outputs those are gathered that someone reads on all tokens.
P3: chain + residual → add → [markers and views] → rms_norm: likewise; and add_rms_norm with a residual that P2 or P3 left
    local. The sum is gathered only where someone reads it on all tokens.
P4: a mixture of experts behind any of these stays on the shard, with its gate and shared expert; see `experts`.
P5: attention that all ranks compute in full is sliced before a replicated projection whose result is added to a residual that
    is local; see `attention`.

A residual is taken as the shard that P1 to P3 left of it, else as the part that it was gathered from, else sliced at this rank's
position. It stays local from layer to layer: `plan` analyses the whole graph before anything is rewritten.

Placements decide, never shapes. The precondition is that of `placements`: the ranks run one graph up to rank constants. Then
all members of a group take the same decision, and what is inserted stands at the same place of the program on each.

Both dialects: tensor_cast's blocking collectives, whose shards are chunks of a dim (`Shard`), and c10d's functional ones, whose
shards are blocks of rows (`Rows`, see `layout` for why) and which are rewritten where the ranks are known to run one
graph (see `functional`). Behind the latter, norms may be aten's: one op, or RMSNorm taken apart (`norms`); a chain
then holds waits and casts, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import fx

from tcverify.ops import resolve
from tcverify.passes.base import Pass
from tcverify.passes.editing import (
    has_exact_metadata,
    infer_metadata,
    known_spec,
    named_arguments,
    op_name,
    set_argument,
)
from tcverify.passes.placements import Placements, propagate
from tcverify.passes.sequence_parallel.attention import PROJECTED, AttentionGuards
from tcverify.passes.sequence_parallel.experts import ExpertGuards
from tcverify.passes.sequence_parallel.functional import CollectiveFacts, RowRewriting, read_collective_facts
from tcverify.passes.sequence_parallel.layout import (
    ADD_RMS_NORM,
    ALL_GATHER,
    GETITEM,
    MARKERS,
    REDUCE_SCATTER,
    RMS_NORM,
    START,
    WAIT,
    Move,
    Rows,
    Shard,
    drop_batch_dims,
    is_contiguous,
    shape_of,
    token_dim,
)
from tcverify.passes.sequence_parallel.moves import Rewriting
from tcverify.passes.sequence_parallel.norms import NormFinder
from tcverify.passes.sequence_parallel.plan import plan_moves
from tcverify.program import Contract


class SequenceParallel(RowRewriting, ExpertGuards, AttentionGuards, Pass):
    """Runs norms and residual sums behind an all_reduce on the rank's shard of the tokens.

    Args:
        patterns: which rewrites run, separated by commas.
        options: those of `Pass`.
    """

    name = "sequence_parallel"
    contract: ClassVar[Contract] = Contract(metadata=True, idempotent=True)
    PATTERNS = ("P1", "P2", "P3", "P4", "P5")
    finder: ClassVar[type[NormFinder]] = NormFinder

    def __init__(self, *, patterns: str = "P1,P2,P3,P4,P5", **options: Any) -> None:
        super().__init__(**options)
        self.patterns = self._choice("patterns", patterns, self.PATTERNS)

    def rewrite(self, graph: fx.Graph) -> Iterable[fx.Node]:
        """Analyse first, then rewrite in graph order. See `Pass.rewrite`."""
        self.setting = self.facts_beside(graph)
        facts = self.placements(graph)
        finder = self.finder(self.setting.same_numbers, self.setting.same_dims)
        norms = finder.find(graph) if self.setting.groups else {}
        state = Rewriting(graph, facts, plan_moves(graph, facts, self, norms))
        for move in state.plan.moves.values():
            if move.in_place:
                self.apply(state, move)
            if move.pattern:
                self.rewrites[move.pattern] += 1
        return self.erase_waits(state)

    # -------------------------------------------------------------------------------------------------------- guards

    def facts_beside(self, graph: fx.Graph) -> CollectiveFacts:
        """Facts about ranks and groups in the graph's metadata."""
        return read_collective_facts(graph)

    def placements(self, graph: fx.Graph) -> Placements:
        """What is known of the placements of the graph's values."""
        return propagate(graph, self.setting.groups, self.setting.same_numbers, self.setting.same_dims)

    def metadata_allows(self, node: fx.Node) -> bool:
        """Whether the recorded shapes of a node can be relied on: they are those that its operands' imply."""
        return has_exact_metadata(node)

    def reduction(self, node: fx.Node) -> Shard | None:
        """How the result of the all_reduce `node` is divided, unless its tokens cannot be divided among its group."""
        if op_name(node) == START:
            return self.rows_reduced(node) if self.setting.groups else None
        given = named_arguments(node)
        rank, group = given["rank"], given["rank_group"]
        spec, addend = known_spec(node), known_spec(given["x"])
        if spec is None or addend is None or spec.shape != addend.shape or len(spec.shape) not in (2, 3):
            return None
        if any(type(member) is not int for member in (rank, *group)) or len(set(group)) != len(group):
            return None
        if rank not in group or len(group) < 2 or 0 in spec.shape:
            return None
        dim = token_dim(spec.shape)
        return Shard(rank, tuple(group), dim) if self.divides(spec.shape[dim], len(group)) else None

    def divides(self, tokens: int, members: int) -> bool:
        """Whether every member gets the same number of tokens."""
        return tokens % members == 0

    def weight_allows(self, weight: Any, shard: Shard, facts: Placements) -> bool:
        """Whether the norm's weight is the same on all members and extends over the hidden dim alone."""
        spec = known_spec(weight)
        return spec is not None and len(spec.shape) == 1 and facts.replicated(weight, shard.group)

    def addend_allows(self, addend: fx.Node, shard: Shard, facts: Placements) -> bool:
        """Whether the other addend is the same on all members, so that each may take its chunk of it."""
        return facts.replicated(addend, shard.group)

    def same_division(self, shard: Shard, other: Shard) -> bool:
        """Whether two addends are divided alike: over one group, in one order, along one dim as counted from the right."""
        return shard == other

    def shapes_allow(self, addend: tuple[int, ...], other: tuple[int, ...]) -> bool:
        """Whether two addends have the same tokens: they differ by leading dims of size 1 at most."""
        return drop_batch_dims(addend) == drop_batch_dims(other)

    def viewed_dim(self, before: tuple[int, ...], shard: Shard, after: tuple[int, ...]) -> int | None:
        """The dim of a view that is divided when what it views is, if chunks of the one are chunks of the other."""
        return shard.viewed_dim(before, after)

    def tuple_allows(self, node: fx.Node) -> bool:
        """Whether only items of a tuple are read: who takes it whole gets both results on all tokens."""
        val = node.meta.get("val")
        items = len(val) if isinstance(val, (tuple, list)) else 0
        return all(
            op_name(user) == GETITEM and type(user.args[1]) is int and -items <= user.args[1] < items
            for user in node.users
        )

    def marker_stays(self, marker: fx.Node) -> bool:
        """Whether a marker that someone reads in full stays in full."""
        return True

    # ---------------------------------------------------------------------------------------------------- rewriting

    def apply(self, state: Rewriting, move: Move) -> None:
        """Move one node to the shard, and gather its result where someone reads it on all tokens."""
        node, whole = move.node, move.node.meta["val"]
        if move.source is None:
            self.slice_attention(state, move)
            return
        if move.norm is not None:
            self.norm_rows(state, move, self.local(state, move.source))
        elif move.op != GETITEM:
            set_argument(node, move.operand, self.local(state, move.source))
        if move.other is not None:
            addend = named_arguments(node)[move.slot]  # as the graph stands now
            state.displaced.append(addend)
            chunk = self.local(state, move.other) if move.local else self.sliced(state, addend, move)
            set_argument(node, move.slot, chunk)
        self.record(node)
        if self.is_gathered(state, move):
            self.redirect(state, node, self.gather(state, move, whole))

    def local(self, state: Rewriting, value: fx.Node) -> fx.Node:
        """Return this rank's shard of a value that moves, made once for all that read it."""
        path = []
        while value not in state.shards and not state.plan.moves[value].in_place:
            path.append(state.plan.moves[value])
            if path[-1].source is None:
                break
            value = path[-1].source
        found = state.shards.get(value, value)
        for move in reversed(path):
            found = self.scatter(state, move) if move.source is None else self.local_view(state, move, found)
            state.shards[move.node] = found
        return found

    def scatter(self, state: Rewriting, move: Move) -> fx.Node:
        """Insert the reduce_scatter, next to the all_reduce."""
        if isinstance(move.shard, Rows):
            return self.scatter_rows(state, move)
        value = named_arguments(move.node)["x"]  # as the graph stands now
        args = (value, self.scatter_dim(move), move.shard.rank, list(move.shard.group))
        with state.graph.inserting_after(move.node):
            return self.insert(state, REDUCE_SCATTER, args, "reduce_scatter")

    def scatter_dim(self, move: Move) -> int:
        """The dim that is scattered."""
        return move.shard.dim

    def local_view(self, state: Rewriting, move: Move, operand: fx.Node) -> fx.Node:
        """Insert the view of the shard: it has the static shape of the shard."""
        if move.op == WAIT:
            return self.wait_for_rows(state, move, operand)
        if isinstance(move.shard, Rows):
            return self.view_rows(state, move, operand)
        with state.graph.inserting_before(move.node):
            return self.insert(state, "aten::view", (operand, self.local_shape(move)), f"{move.node.name}_shard")

    def local_shape(self, move: Move) -> list[int]:
        """The shape of the shard of a view."""
        return move.shard.local_shape(shape_of(move.node))

    def sliced(self, state: Rewriting, addend: fx.Node, move: Move) -> fx.Node:
        """Return this rank's chunk of a replicated addend: the part it was gathered from, else a slice."""
        assert move.source is not None
        if isinstance(move.shard, Rows):
            return self.slice_rows(state, addend, move)
        shape, shard = shape_of(addend), move.shard
        dim = state.plan.moves[move.source].shard.dim - len(shape_of(move.source)) + len(shape)
        if op_name(addend) == ALL_GATHER:
            given = named_arguments(addend)
            part: fx.Node = given["x"]
            gathered = Shard(given["rank"], tuple(given["rank_group"]), given["dim"] % len(shape))
            if self.same_division(shard.along(dim), gathered) and is_contiguous(part) and not state.facts.mutated(part):
                return part
        chunk = shape[dim] // shard.members
        start = self.chunk_start(chunk, shard)
        with state.graph.inserting_before(move.node):
            return self.insert(state, "aten::slice.Tensor", (addend, dim, start, start + chunk), "residual_shard")

    def slice_attention(self, state: Rewriting, move: Move) -> None:
        """Let a projection read this rank's chunk of the attention."""
        addend = named_arguments(move.node)[move.operand]
        shape = shape_of(addend)
        chunk = shape[move.shard.dim] // move.shard.members
        start = self.chunk_start(chunk, move.shard)
        with state.graph.inserting_before(move.node):
            args = (addend, move.shard.dim, start, start + chunk)
            part = self.insert(state, "aten::slice.Tensor", args, "attention_shard")
        set_argument(move.node, move.operand, part)
        self.record(move.node)

    def chunk_start(self, chunk: int, shard: Shard) -> int:
        """Where this rank's chunk starts, in tokens."""
        return chunk * shard.position

    def is_gathered(self, state: Rewriting, move: Move) -> bool:
        """Whether a value that has moved is gathered: if it has a reader that needs all tokens.

        A single unused norm is gathered too: an unused collective is one that other ranks may wait for.
        """
        if move.op in MARKERS or move.items or move.stage == PROJECTED:
            return False
        return move.node in state.plan.full or (move.op in (RMS_NORM, ADD_RMS_NORM) and not move.node.users)

    def gather(self, state: Rewriting, move: Move, whole: Any) -> fx.Node:
        """Return the all_gather of a value that has moved; made once for all that take the same item of a tuple.

        Args:
            whole: the metadata of the value on all tokens.
        """
        item: tuple[Any, int] = (move.node, 0)
        if move.op == GETITEM:
            assert move.source is not None
            index = move.node.args[1]
            assert isinstance(index, int)
            item = move.source, index % len(state.plan.moves[move.source].items)
        if item not in state.gathers and isinstance(move.shard, Rows):
            state.gathers[item] = self.gather_rows(state, move, whole)
        elif item not in state.gathers:
            args = (move.node, self.gather_dim(move), move.shard.rank, self.gather_group(move.shard))
            with state.graph.inserting_after(move.node):
                gathered = state.graph.create_node("call_function", resolve(ALL_GATHER), args, name="all_gather")
            # The value on all tokens is the same as before, and the metadata of its views refers to this one's storage.
            gathered.meta["val"] = whole
            state.gathers[item] = gathered
        return state.gathers[item]

    def gather_dim(self, move: Move) -> int:
        """The dim that is gathered."""
        return move.shard.dim

    def gather_group(self, shard: Shard) -> list[int]:
        """The group that is gathered from, in order."""
        return list(shard.group)

    def redirect(self, state: Rewriting, node: fx.Node, gathered: fx.Node) -> None:
        """Let all that read `node` on all tokens read the gathered value."""

        def reads_in_full(user: fx.Node) -> bool:
            move = state.plan.moves.get(user)
            copied = user in state.plan.full and move is not None and not move.in_place  # it stays, with its shard
            return (
                user is not gathered
                and user not in state.gathering
                and (copied or not state.plan.reads_shard(user, node))
            )

        node.replace_all_uses_with(gathered, delete_user_cb=reads_in_full)

    def insert(self, state: Rewriting, op: str, args: tuple[Any, ...], name: str) -> fx.Node:
        """Insert a call at the graph's insertion point, with its metadata."""
        node = state.graph.create_node("call_function", resolve(op), args, name=name)
        infer_metadata(node)
        return node

    def record(self, node: fx.Node) -> None:
        """Renew the metadata of a node whose operands have changed."""
        infer_metadata(node)
