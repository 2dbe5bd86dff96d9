"""Sequence parallelism with one defect put back in each class: experts on local tokens, and attention that is sliced."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import fx

from tcverify.ops import ShapeError, resolve
from tcverify.passes.editing import named_arguments, set_argument
from tcverify.passes.placements import Placements
from tcverify.passes.sequence_parallel.experts import RETURN, ROUTE
from tcverify.passes.sequence_parallel.layout import ADDENDS, Move, Shard, shape_of
from tcverify.passes.sequence_parallel.sequence_parallel import Rewriting
from tests.mutants.sequence_parallel import Mutant

_SLICE = "aten::slice.Tensor"


def _whole(state: Rewriting, pass_: Mutant, value: fx.Node) -> fx.Node:
    """What a value that has moved is on all tokens."""
    whole = value.meta["val"]
    move = state.plan.moves[value]
    shape = [size * (move.shard.members if dim == move.shard.dim else 1) for dim, size in enumerate(whole.shape)]
    return pass_.gather(state, move, whole.new_empty(shape))


class ExpertSumStaysFull(Mutant):
    """A sum takes the residual as its shard, and what the experts made of all tokens beside it (rewritten-raises).

    TC-1999628: the shard went into the slot of the residual, and the sum of the experts stayed on all tokens.
    """

    def apply(self, state: Rewriting, move: Move) -> None:
        super().apply(state, move)
        source = state.plan.moves.get(move.source) if move.source is not None else None
        if source is None or source.stage != "experts" or move.stage == "experts":
            return
        if move.op in ADDENDS and move.other is not None:
            set_argument(move.node, move.operand, _whole(state, self, source.node))

    def record(self, node: fx.Node) -> None:
        with suppress(ShapeError):
            super().record(node)


class GateOnAllTokens(Mutant):
    """The gate stays on all tokens, and experts are given the tokens of this rank (pass-raised)."""

    def apply(self, state: Rewriting, move: Move) -> None:
        if move.op == ROUTE:
            choices = named_arguments(move.node)["topk_indices"]
            super().apply(state, move)
            set_argument(move.node, "topk_indices", _whole(state, self, choices))
            self.record(move.node)
        else:
            super().apply(state, move)


class ChoicesOfFirstRank(Mutant):
    """Every rank routes its tokens as the first one does (wrong-value)."""

    def apply(self, state: Rewriting, move: Move) -> None:
        super().apply(state, move)
        if move.op == ROUTE:
            choices = named_arguments(move.node)["topk_indices"]
            shard = state.plan.moves[choices].shard
            whole = _whole(state, self, choices)
            chunk = shape_of(choices)[shard.dim]
            with state.graph.inserting_before(move.node):
                first = self.insert(state, _SLICE, (whole, shard.dim, 0, chunk), "first_choices")
            set_argument(move.node, "topk_indices", first)
            self.record(move.node)


class RowsLeftByExpert(Mutant):
    """Rows are taken as if they stood by token when they stand by expert (wrong-value)."""

    def apply(self, state: Rewriting, move: Move) -> None:
        super().apply(state, move)
        if move.op == RETURN:
            node, rows = move.node, named_arguments(move.node)["x"]
            node.target = resolve("aten::view")
            node.args, node.kwargs = (rows, list(shape_of(node))), {}
            self.record(node)


class CapacityOfLocalTokens(Mutant):
    """Experts take as many rows as three quarters of this rank's tokens would be, and drop the others (wrong-value)."""

    def apply(self, state: Rewriting, move: Move) -> None:
        super().apply(state, move)
        if move.op == RETURN:
            rows = named_arguments(move.node)["x"]
            number = shape_of(rows)[0]
            capacity = number * 3 // 4
            with state.graph.inserting_before(move.node):
                kept = self.insert(state, _SLICE, (rows, 0, 0, capacity), "kept_rows")
                padded = self.insert(
                    state, "aten::constant_pad_nd", (kept, [0, 0, 0, number - capacity], 0.0), "padded_rows"
                )
            set_argument(move.node, "x", padded)


class ExpertWeightsNotCompared(Mutant):
    """Gates and experts that differ between the ranks, or are divided over them, move too (wrong-value)."""

    def expert_weight_allows(self, weight: Any, shard: Shard, facts: Placements) -> bool:
        return True


class SharedExpertNotSummed(Mutant):
    """Of a shared expert that is divided over the ranks, a rank adds its own part alone (wrong-value)."""

    def scatter(self, state: Rewriting, move: Move) -> fx.Node:
        takers = [state.plan.moves[user] for user in move.node.users if state.plan.reads_shard(user, move.node)]
        if not any(taker.stage == "experts" for taker in takers):
            return super().scatter(state, move)
        value, shard = named_arguments(move.node)["x"], move.shard
        chunk = shape_of(value)[shard.dim] // shard.members
        with state.graph.inserting_after(move.node):
            start = chunk * shard.position
            return self.insert(state, _SLICE, (value, shard.dim, start, start + chunk), "shared_part")


class ChoicesLeftLocal(Mutant):
    """Integers are not gathered for those who read the choices of all tokens (wrong-value, changed-signature)."""

    def is_gathered(self, state: Rewriting, move: Move) -> bool:
        value = move.node.meta["val"]
        return super().is_gathered(state, move) and not (isinstance(value, torch.Tensor) and value.dtype is torch.int64)


class ExpertsNotGathered(Mutant):
    """What the experts made is not gathered for those who read it on all tokens (rewritten-raises, wrong-value, …)."""

    def is_gathered(self, state: Rewriting, move: Move) -> bool:
        return super().is_gathered(state, move) and move.stage != "experts"


class AttentionSlicedByRankNumber(Mutant):
    """Attention is sliced at the rank's number (modulo the members) instead of its position in the group (wrong-value)."""

    by_number = False

    def slice_attention(self, state: Rewriting, move: Move) -> None:
        self.by_number = True
        super().slice_attention(state, move)
        self.by_number = False

    def chunk_start(self, chunk: int, shard: Shard) -> int:
        return chunk * (shard.rank % shard.members) if self.by_number else super().chunk_start(chunk, shard)


class FirstChunkOfAttention(Mutant):
    """Every rank projects the first chunk of the attention (wrong-value)."""

    def slice_attention(self, state: Rewriting, move: Move) -> None:
        super().slice_attention(state, move)
        part = named_arguments(move.node)[move.operand]
        chunk = shape_of(part)[move.shard.dim]
        part.args = (*part.args[:2], 0, chunk)


class AddendsTakenForSums(Mutant):
    """A projection whose operands differ between the ranks is sliced, as if it were the same on all (wrong-value)."""

    def projection_allows(self, operand: Any, weights: list[Any], shard: Shard, facts: Placements) -> bool:
        return True


_LOUD = frozenset({"rewritten-raises", "wrong-value", "changed-signature", "stale-metadata", "pass-raised"})
_WRONG = frozenset({"wrong-value"})

#: Every mutant, with the kinds of finding of which one at least must be there.
EXPECTED: dict[str, frozenset[str]] = {
    "ExpertSumStaysFull": _LOUD,
    "GateOnAllTokens": frozenset({"pass-raised"}),
    "ChoicesOfFirstRank": _WRONG,
    "RowsLeftByExpert": _WRONG,
    "CapacityOfLocalTokens": _WRONG,
    "ExpertWeightsNotCompared": _WRONG,
    "SharedExpertNotSummed": _WRONG,
    "ChoicesLeftLocal": _LOUD,
    "ExpertsNotGathered": _LOUD,
    "AttentionSlicedByRankNumber": _WRONG,
    "FirstChunkOfAttention": _WRONG,
    "AddendsTakenForSums": _WRONG,
}

MUTANTS: dict[str, type[Mutant]] = {name: globals()[name] for name in EXPECTED}
