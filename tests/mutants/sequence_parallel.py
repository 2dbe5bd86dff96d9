"""P1 of sequence parallelism with one defect put back in each class."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from torch import fx

from tcverify.ops import ShapeError
from tcverify.passes import SequenceParallel
from tcverify.passes.editing import arguments, known_spec, op_name
from tcverify.passes.placements import Placements
from tcverify.passes.sequence_layout import Match, Reduction, token_dim


class Mutant(SequenceParallel):
    """The sound pass; subclasses put a defect back and carry their own name."""

    def __init_subclass__(cls) -> None:
        cls.name = cls.__name__


class ResidualNotSliced(Mutant):
    """The residual stays on all tokens while the norm has a shard: shapes do not fit (rewritten-raises)."""

    def local_addend(self, graph: fx.Graph, addend: fx.Node, match: Match, facts: Placements) -> fx.Node:
        return addend

    def record(self, node: fx.Node) -> None:
        with suppress(ShapeError):  # the sound pass would stop here; this one goes on
            super().record(node)


class RankNumberPicksShard(Mutant):
    """The residual is sliced at the rank's number (modulo the members) instead of its position in the group (wrong-value)."""

    def chunk_start(self, chunk: int, reduction: Reduction) -> int:
        return chunk * (reduction.rank % len(reduction.group))


class FirstChunkForAll(Mutant):
    """Every rank adds the first chunk of the residual (wrong-value)."""

    def chunk_start(self, chunk: int, reduction: Reduction) -> int:
        return 0


class BatchScattered(Mutant):
    """[B, S, H] is scattered on dim 0 and gathered on dim 1 (wrong-value, rewritten-raises, pass-raised)."""

    def scatter_dim(self, shape: tuple[int, ...]) -> int:
        return 0


class OutputNotGathered(Mutant):
    """Calls read the gathered norm, the program's output is a shard (wrong-value, changed-signature)."""

    def redirect(self, norm: fx.Node, gathered: fx.Node) -> None:
        norm.replace_all_uses_with(gathered, delete_user_cb=lambda user: user is not gathered and user.op != "output")


class GatherOrderLost(Mutant):
    """The norm is gathered in order of rank numbers instead of group order (wrong-value, collective-mismatch)."""

    def gather_group(self, reduction: Reduction) -> list[int]:
        return sorted(reduction.group)


class GatherSkippedOnFirstRank(Mutant):
    """The first member does not gather what only the output reads: the others wait for it (deadlock, collective-mismatch)."""

    def gather(self, graph: fx.Graph, match: Match) -> fx.Node:
        if match.reduction.position == 0 and all(user.op == "output" for user in match.norm.users):
            self.record(match.norm)
            return match.norm
        return super().gather(graph, match)


class AllReduceErasedOnFirstRank(Mutant):
    """The useless all_reduce is erased on the first member alone (collective-mismatch, deadlock)."""

    def rewrite(self, graph: fx.Graph) -> Iterable[fx.Node]:
        def erased(node: fx.Node) -> bool:
            return op_name(node) != "tensor_cast::all_reduce" or node.args[1] == arguments(node)["rank_group"][0]

        return [node for node in super().rewrite(graph) if erased(node)]


class OtherReadersTakeShard(Mutant):
    """Readers of the all_reduce that need all tokens get the shard (rewritten-raises, wrong-value, stale-metadata)."""

    def apply(self, graph: fx.Graph, match: Match, shards: dict[fx.Node, fx.Node], facts: Placements) -> list[fx.Node]:
        displaced = super().apply(graph, match, shards, facts)
        match.reduction.node.replace_all_uses_with(shards[match.reduction.node])
        return displaced


class MarkerMovesAlone(Mutant):
    """A region marker moves to the shard although others read it in full (rewritten-raises, wrong-value, stale-metadata)."""

    def marker_moves(self, marker: fx.Node, local_readers_only: set[fx.Node]) -> bool:
        return True


class VaryingAddendSliced(Mutant):
    """An addend that differs between the members is sliced as if it were replicated (wrong-value)."""

    def addend_allows(self, addend: fx.Node, reduction: Reduction, facts: Placements) -> bool:
        return True


class VaryingWeightAccepted(Mutant):
    """A weight that differs between the members scales their tokens alone (wrong-value)."""

    def weight_allows(self, weight: Any, reduction: Reduction, facts: Placements) -> bool:
        return known_spec(weight) is not None


class StaleMetadata(Mutant):
    """Nodes that moved to the shard keep the metadata of all tokens (stale-metadata)."""

    def record(self, node: fx.Node) -> None:
        pass


class ViewKeepsAllTokens(Mutant):
    """The static shape of a view is not made the shard's (pass-raised)."""

    def local_view(self, graph: fx.Graph, view: fx.Node, operand: fx.Node, members: int) -> fx.Node:
        return super().local_view(graph, view, operand, 1)


class IndivisibleTokensAccepted(Mutant):
    """Tokens that the group does not divide are scattered all the same (pass-raised)."""

    def divides(self, tokens: int, members: int) -> bool:
        return True


class OneScatterForAllGroups(Mutant):
    """all_reduces of one value over several groups share one reduce_scatter (wrong-value, rewritten-raises)."""

    def scatter(self, graph: fx.Graph, reduction: Reduction) -> fx.Node:
        dim = token_dim(tuple(reduction.node.meta["val"].shape))
        for user in reduction.value.users:
            if user.name.startswith("reduce_scatter") and user.args[1] == dim:
                return user
        return super().scatter(graph, reduction)


#: Every mutant, with the kinds of finding of which one at least must be there.
EXPECTED: dict[str, frozenset[str]] = {
    "ResidualNotSliced": frozenset({"rewritten-raises"}),
    "RankNumberPicksShard": frozenset({"wrong-value"}),
    "FirstChunkForAll": frozenset({"wrong-value"}),
    "BatchScattered": frozenset({"wrong-value", "rewritten-raises", "pass-raised"}),
    "OutputNotGathered": frozenset({"wrong-value", "changed-signature"}),
    "GatherOrderLost": frozenset({"wrong-value", "collective-mismatch"}),
    "GatherSkippedOnFirstRank": frozenset({"deadlock", "collective-mismatch"}),
    "AllReduceErasedOnFirstRank": frozenset({"collective-mismatch", "deadlock"}),
    "OtherReadersTakeShard": frozenset({"rewritten-raises", "wrong-value", "changed-signature", "stale-metadata"}),
    "MarkerMovesAlone": frozenset({"rewritten-raises", "wrong-value", "changed-signature", "stale-metadata"}),
    "VaryingAddendSliced": frozenset({"wrong-value"}),
    "VaryingWeightAccepted": frozenset({"wrong-value"}),
    "StaleMetadata": frozenset({"stale-metadata"}),
    "ViewKeepsAllTokens": frozenset({"pass-raised"}),
    "IndivisibleTokensAccepted": frozenset({"pass-raised"}),
    "OneScatterForAllGroups": frozenset({"wrong-value", "rewritten-raises"}),
}

MUTANTS: dict[str, type[Mutant]] = {name: globals()[name] for name in EXPECTED}
