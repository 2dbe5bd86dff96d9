"""Sequence parallelism with one defect put back in each class."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import fx

from tcverify.ops import ShapeError, resolve
from tcverify.passes import SequenceParallel
from tcverify.passes.editing import known_spec, named_arguments, op_name, set_argument
from tcverify.passes.placements import Placements
from tcverify.passes.sequence_parallel.layout import (
    ADD,
    ALL_REDUCE,
    GETITEM,
    RMS_NORM,
    Move,
    Shard,
    shape_of,
    token_dim,
)
from tcverify.passes.sequence_parallel.moves import Rewriting


class Mutant(SequenceParallel):
    """The sound pass; subclasses put a defect back and carry their own name."""

    def __init_subclass__(cls) -> None:
        cls.name = cls.__name__


# ------------------------------------------------------------------------------------------------- residuals and sums


class ResidualNotSliced(Mutant):
    """The residual stays on all tokens while the norm has a shard: shapes do not fit (rewritten-raises)."""

    def sliced(self, state: Rewriting, addend: fx.Node, move: Move) -> fx.Node:
        return addend

    def record(self, node: fx.Node) -> None:
        with suppress(ShapeError):  # the sound pass would stop here; this one goes on
            super().record(node)


class RankNumberPicksShard(Mutant):
    """The residual is sliced at the rank's number (modulo the members) instead of its position in the group (wrong-value)."""

    def chunk_start(self, chunk: int, shard: Shard) -> int:
        return chunk * (shard.rank % shard.members)


class FirstChunkForAll(Mutant):
    """Every rank adds the first chunk of the residual (wrong-value)."""

    def chunk_start(self, chunk: int, shard: Shard) -> int:
        return 0


class VaryingAddendSliced(Mutant):
    """An addend that differs between the members is sliced as if it were replicated (wrong-value)."""

    def addend_allows(self, addend: fx.Node, shard: Shard, facts: Placements) -> bool:
        return True


class BroadcastAddendSliced(Mutant):
    """An addend with other tokens, such as one row for all of them, is sliced like a residual (rewritten-raises, wrong-value)."""

    def shapes_allow(self, addend: tuple[int, ...], other: tuple[int, ...]) -> bool:
        return len(other) >= 2

    def record(self, node: fx.Node) -> None:
        with suppress(ShapeError):
            super().record(node)


class ResidualAddedTwice(Mutant):
    """The norm behind a sum becomes one that adds the residual again (wrong-value)."""

    def apply(self, state: Rewriting, move: Move) -> None:
        super().apply(state, move)
        sums = state.plan.moves.get(move.source) if move.source is not None else None
        if move.op == RMS_NORM and sums is not None and sums.op == ADD:
            node, given = move.node, named_arguments(move.node)
            residual = named_arguments(sums.node)[sums.slot]
            node.target = resolve("tensor_cast::add_rms_norm")
            node.args, node.kwargs = (given["x"], residual, given["weight"], given["eps"]), {}


class ResidualOfAnotherGroup(Mutant):
    """A residual that is local is taken as it is, whatever group it is local to (wrong-value, …)."""

    def addend_allows(self, addend: fx.Node, shard: Shard, facts: Placements) -> bool:
        return super().addend_allows(addend, shard, facts) or op_name(addend) == GETITEM

    def same_division(self, shard: Shard, other: Shard) -> bool:
        return shard.dim == other.dim and shard.members == other.members


class ResidualInAnotherOrder(Mutant):
    """A residual divided among the same ranks in another order is taken as it is (wrong-value)."""

    def same_division(self, shard: Shard, other: Shard) -> bool:
        return replace(shard, group=()) == replace(other, group=()) and sorted(shard.group) == sorted(other.group)


class ResidualGatheredAlongAnotherDim(Mutant):
    """The part of a residual that was gathered along another dim is taken as its chunk (rewritten-raises, wrong-value)."""

    def same_division(self, shard: Shard, other: Shard) -> bool:
        return shard.group == other.group

    def record(self, node: fx.Node) -> None:
        with suppress(ShapeError):
            super().record(node)


class LocalResidualReturned(Mutant):
    """A residual that stayed local is returned by the program as if it were on all tokens (wrong-value, changed-signature)."""

    def redirect(self, state: Rewriting, node: fx.Node, gathered: fx.Node) -> None:
        move = state.plan.moves[node]
        outputs = [user for user in node.users if user.op == "output"] if move.stage in ("residual", "added") else []
        super().redirect(state, node, gathered)
        for output in outputs:
            output.replace_input_with(gathered, node)


class LocalReadersHideFullOnes(Mutant):
    """A value that someone reads as its shard is not gathered for those who read it in full (rewritten-raises, …)."""

    def is_gathered(self, state: Rewriting, move: Move) -> bool:
        hidden = any(state.plan.reads_shard(user, move.node) for user in move.node.users)
        return super().is_gathered(state, move) and not hidden


# ------------------------------------------------------------------------------------------------- scatter and gather


class BatchScattered(Mutant):
    """[B, S, H] is scattered on dim 0 and gathered on dim 1 (wrong-value, rewritten-raises, pass-raised)."""

    def scatter_dim(self, move: Move) -> int:
        return 0


class BatchGathered(Mutant):
    """[B, S, H] is scattered on dim 1 and gathered on dim 0 (wrong-value, changed-signature, …)."""

    def gather_dim(self, move: Move) -> int:
        return 0


class OutputNotGathered(Mutant):
    """Calls read the gathered norm, the program's output is a shard (wrong-value, changed-signature)."""

    def redirect(self, state: Rewriting, node: fx.Node, gathered: fx.Node) -> None:
        outputs = [user for user in node.users if user.op == "output"]
        super().redirect(state, node, gathered)
        for output in outputs:
            output.replace_input_with(gathered, node)


class GatherOrderLost(Mutant):
    """The norm is gathered in order of rank numbers instead of group order (wrong-value, collective-mismatch)."""

    def gather_group(self, shard: Shard) -> list[int]:
        return sorted(shard.group)


class GatherOverFirstGroup(Mutant):
    """Everything is gathered over the group of the graph's first collective (collective-mismatch, wrong-value, …)."""

    def gather(self, state: Rewriting, move: Move, whole: Any) -> fx.Node:
        gathered = super().gather(state, move, whole)
        first = next((node for node in state.graph.nodes if op_name(node) == ALL_REDUCE), None)
        if first is not None:
            set_argument(gathered, "rank_group", list(named_arguments(first)["rank_group"]))
        return gathered


class GatherSkippedOnFirstRank(Mutant):
    """The first member does not gather what only the output reads: the others wait for it (deadlock, collective-mismatch)."""

    def is_gathered(self, state: Rewriting, move: Move) -> bool:
        spared = move.shard.position == 0 and all(user.op == "output" for user in move.node.users)
        return super().is_gathered(state, move) and not spared


class AllReduceErasedOnFirstRank(Mutant):
    """The useless all_reduce is erased on the first member alone (collective-mismatch, deadlock)."""

    def rewrite(self, graph: fx.Graph) -> list[fx.Node]:
        def erased(node: fx.Node) -> bool:
            return op_name(node) != ALL_REDUCE or node.args[1] == named_arguments(node)["rank_group"][0]

        return [node for node in super().rewrite(graph) if erased(node)]


class ScatterMovedOnOddRanks(Mutant):
    """Ranks with an odd position scatter where the first reader stands, others where the all_reduce stood (deadlock, …)."""

    def scatter(self, state: Rewriting, move: Move) -> fx.Node:
        scattered = super().scatter(state, move)
        if move.shard.position % 2:
            reader = min(user for user in move.node.users if state.plan.reads_shard(user, move.node))
            reader.prepend(scattered)
        return scattered


class OneScatterForAllGroups(Mutant):
    """all_reduces of one value over several groups share one reduce_scatter (wrong-value, rewritten-raises)."""

    def scatter(self, state: Rewriting, move: Move) -> fx.Node:
        for user in named_arguments(move.node)["x"].users:
            if user.name.startswith("reduce_scatter") and user.args[1] == move.shard.dim:
                return user
        return super().scatter(state, move)


class IndivisibleTokensAccepted(Mutant):
    """Tokens that the group does not divide are scattered all the same (pass-raised)."""

    def divides(self, tokens: int, members: int) -> bool:
        return True


# ------------------------------------------------------------------------------------- readers, markers, views, tuples


class OtherReadersTakeShard(Mutant):
    """Readers of the all_reduce that need all tokens get the shard (rewritten-raises, wrong-value, stale-metadata)."""

    def scatter(self, state: Rewriting, move: Move) -> fx.Node:
        scattered = super().scatter(state, move)
        move.node.replace_all_uses_with(
            scattered, delete_user_cb=lambda user: not state.plan.reads_shard(user, move.node)
        )
        return scattered


class MarkerMovesAlone(Mutant):
    """A region marker moves to the shard although others read it in full (rewritten-raises, wrong-value, stale-metadata)."""

    def marker_stays(self, marker: fx.Node) -> bool:
        return False


class ViewKeepsAllTokens(Mutant):
    """The static shape of a view is not made the shard's (pass-raised)."""

    def local_shape(self, move: Move) -> list[int]:
        return list(shape_of(move.node))


class ViewMergesTokens(Mutant):
    """A view that merges the tokens of all batches moves as if each rank's chunk of them were one piece (wrong-value)."""

    def viewed_dim(self, before: tuple[int, ...], shard: Shard, after: tuple[int, ...]) -> int | None:
        dim = token_dim(after)
        return dim if dim >= 0 and after[dim] % shard.members == 0 else None


class TupleLeftLocal(Mutant):
    """A tuple that is read whole hands out shards (wrong-value, changed-signature, …)."""

    def tuple_allows(self, node: fx.Node) -> bool:
        return True


class NegativeItemMistaken(Mutant):
    """The item −1 of a tuple is taken for its first (wrong-value)."""

    def gather(self, state: Rewriting, move: Move, whole: Any) -> fx.Node:
        if move.op == GETITEM and move.node.args[1] == -1:
            move.node.update_arg(1, 0)
        return super().gather(state, move, whole)


class EqualItemsGatheredTwice(Mutant):
    """What two nodes take as the same item of a tuple becomes two tensors (wrong-alias)."""

    def gather(self, state: Rewriting, move: Move, whole: Any) -> fx.Node:
        state.gathers.clear()
        return super().gather(state, move, whole)


# ------------------------------------------------------------------------------------- weights, writes, metadata


class WeightPerTokenAccepted(Mutant):
    """A weight with the shape of all tokens is left as it is (pass-raised)."""

    def weight_allows(self, weight: Any, shard: Shard, facts: Placements) -> bool:
        return known_spec(weight) is not None and facts.replicated(weight, shard.group)


class WritesIgnored(Mutant):
    """What the graph writes into is moved like everything else (wrong-value)."""

    def placements(self, graph: fx.Graph) -> Placements:
        return replace(super().placements(graph), _mutated=frozenset())


class StaleMetadata(Mutant):
    """Nodes that moved to the shard keep the metadata of all tokens (stale-metadata)."""

    def record(self, node: fx.Node) -> None:
        pass


class GatherHasLocalMetadata(Mutant):
    """Gathered values carry the metadata of the shard (stale-metadata)."""

    def gather(self, state: Rewriting, move: Move, whole: Any) -> fx.Node:
        gathered = super().gather(state, move, whole)
        gathered.meta["val"] = move.node.meta["val"]
        return gathered


class ScattersShareStorage(Mutant):
    """Reduce_scatters of one shape carry one fake tensor: a memory planner would take them for one (stale-metadata)."""

    def scatter(self, state: Rewriting, move: Move) -> fx.Node:
        scattered = super().scatter(state, move)
        for known in state.shards.values():
            if op_name(known) == op_name(scattered) and known.meta["val"].shape == scattered.meta["val"].shape:
                scattered.meta["val"] = known.meta["val"]
        return scattered


_LOUD = frozenset({"rewritten-raises", "wrong-value", "changed-signature", "stale-metadata", "pass-raised"})
_MATCHING = frozenset({"deadlock", "collective-mismatch"})

#: Every mutant, with the kinds of finding of which one at least must be there.
EXPECTED: dict[str, frozenset[str]] = {
    "ResidualNotSliced": frozenset({"rewritten-raises"}),
    "RankNumberPicksShard": frozenset({"wrong-value"}),
    "FirstChunkForAll": frozenset({"wrong-value"}),
    "VaryingAddendSliced": frozenset({"wrong-value"}),
    "BroadcastAddendSliced": _LOUD,
    "ResidualAddedTwice": frozenset({"wrong-value"}),
    "ResidualOfAnotherGroup": frozenset({"wrong-value"}),
    "ResidualInAnotherOrder": frozenset({"wrong-value"}),
    "ResidualGatheredAlongAnotherDim": _LOUD,
    "LocalResidualReturned": frozenset({"wrong-value", "changed-signature"}),
    "LocalReadersHideFullOnes": _LOUD,
    "BatchScattered": frozenset({"wrong-value", "rewritten-raises", "pass-raised"}),
    "BatchGathered": _LOUD,
    "OutputNotGathered": frozenset({"wrong-value", "changed-signature"}),
    "GatherOrderLost": frozenset({"wrong-value", "collective-mismatch"}),
    "GatherOverFirstGroup": _LOUD | _MATCHING,
    "GatherSkippedOnFirstRank": _MATCHING,
    "AllReduceErasedOnFirstRank": _MATCHING,
    "ScatterMovedOnOddRanks": _MATCHING,
    "OneScatterForAllGroups": frozenset({"wrong-value", "rewritten-raises"}),
    "IndivisibleTokensAccepted": frozenset({"pass-raised"}),
    "OtherReadersTakeShard": _LOUD,
    "MarkerMovesAlone": _LOUD,
    "ViewKeepsAllTokens": frozenset({"pass-raised"}),
    "ViewMergesTokens": _LOUD,
    "TupleLeftLocal": _LOUD,
    "NegativeItemMistaken": frozenset({"wrong-value"}),
    "EqualItemsGatheredTwice": frozenset({"wrong-alias"}),
    "WeightPerTokenAccepted": _LOUD,
    "WritesIgnored": frozenset({"wrong-value"}),
    "StaleMetadata": frozenset({"stale-metadata"}),
    "GatherHasLocalMetadata": frozenset({"stale-metadata"}),
    "ScattersShareStorage": frozenset({"stale-metadata"}),
}

MUTANTS: dict[str, type[Mutant]] = {name: globals()[name] for name in EXPECTED}
