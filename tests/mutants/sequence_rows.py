"""Sequence parallelism on functional collectives with one defect put back in each class."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import fx

from tcverify.ops import ShapeError
from tcverify.passes import SequenceParallel
from tcverify.passes.editing import infer_metadata, known_spec, named_arguments, op_name, set_argument
from tcverify.passes.placements import Placements
from tcverify.passes.sequence_parallel.functional import CollectiveFacts
from tcverify.passes.sequence_parallel.layout import WAIT, Move, Rows, Shard, shape_of
from tcverify.passes.sequence_parallel.norms import NormFinder, shape_or_none
from tcverify.passes.sequence_parallel.sequence_parallel import Rewriting


class Mutant(SequenceParallel):
    """The sound pass; subclasses put a defect back and carry their own name."""

    def __init_subclass__(cls) -> None:
        cls.name = cls.__name__


# ------------------------------------------------------------------------------------------------- scatters and their waits


class AverageTakenForSum(Mutant):
    """An average becomes a reduce_scatter of sums (wrong-value)."""

    def sums(self, reduce_op: str) -> bool:
        return reduce_op in ("sum", "avg")


class ScatterNotWaitedFor(Mutant):
    """What the reduce_scatter makes is read while it is under way (async-race, missing-wait)."""

    def wait_for_rows(self, state: Rewriting, move: Move, start: fx.Node) -> fx.Node:
        return start


class WaitsWhereItIsReadLast(Mutant):
    """The reduce_scatter is waited for where the all_reduce last was: its operand may be written by then (async-race)."""

    def first_wait(self, start: fx.Node) -> fx.Node:
        return max(user for user in start.users if op_name(user) == WAIT)


class WaitsErasedOneByOne(Mutant):
    """A wait that nobody reads goes although the all_reduce stays: its operand is written before the other one (async-race)."""

    def erase_waits(self, state: Rewriting) -> list[fx.Node]:
        left = super().erase_waits(state)
        for node in [node for node in state.graph.nodes if op_name(node) == WAIT and not node.users]:
            start = node.all_input_nodes[0]
            if len(start.users) > 1:
                state.graph.erase_node(node)
        return left


class AllReduceStaysOnFirstRank(Mutant):
    """The useless all_reduce is erased on all members but the first (collective-mismatch, deadlock)."""

    def erase_waits(self, state: Rewriting) -> list[fx.Node]:
        first = any(move.shard.position == 0 for move in state.plan.moves.values() if isinstance(move.shard, Rows))
        return [] if first else super().erase_waits(state)


class ScatterSunkOnOddRanks(Mutant):
    """Odd members start the reduce_scatter where it is waited for, behind another collective (collective-mismatch, deadlock)."""

    def wait_for_rows(self, state: Rewriting, move: Move, start: fx.Node) -> fx.Node:
        wait = super().wait_for_rows(state, move, start)
        if move.shard.position % 2 and wait.prev is not start:
            wait.prepend(start)
        return wait


class GatherNotWaitedFor(Mutant):
    """What the gather makes is read while it is under way (async-race, missing-wait)."""

    def gather_rows(self, state: Rewriting, move: Move, whole: Any) -> fx.Node:
        gathered = super().gather_rows(state, move, whole)
        wait = gathered if op_name(gathered) == WAIT else gathered.all_input_nodes[0]
        start = wait.all_input_nodes[0]
        wait.replace_all_uses_with(start)
        state.graph.erase_node(wait)
        return start if gathered is wait else gathered


class GatherOverAnotherGroup(Mutant):
    """Rows are gathered from another group of as many members (collective-mismatch, wrong-value, deadlock)."""

    def gather_rows(self, state: Rewriting, move: Move, whole: Any) -> fx.Node:
        gathered = super().gather_rows(state, move, whole)
        sizes = {name: len(ranks) for name, ranks in self.setting.groups.items()}
        assert isinstance(move.shard, Rows)
        others = [name for name in sizes if name != move.shard.name and sizes[name] == move.shard.members]
        start = gathered
        while "group_name" not in named_arguments(start):
            start = start.all_input_nodes[0]
        if others:
            set_argument(start, "group_name", others[0])
        return gathered


# ------------------------------------------------------------------------------------------------------ norms and rows


class InsideReadersIgnored(Mutant):
    """What is inside a norm becomes a shard although others read it (rewritten-raises, wrong-value, pass-raised)."""

    class finder(NormFinder):
        def nobody_else_reads(self, inside: tuple[fx.Node, ...]) -> bool:
            return True


class MeanOverTokensTaken(Mutant):
    """A mean over the tokens counts as one over the last dim (wrong-value, rewritten-raises, …)."""

    class finder(NormFinder):
        def averaged(self, mean: fx.Node | None) -> fx.Node | None:
            taken = super().averaged(mean)
            if taken is not None or mean is None or op_name(mean) != "aten::mean.dim":
                return taken
            square = named_arguments(mean)["self"]
            return square if len(shape_or_none(square) or ()) == len(shape_or_none(mean) or ()) else None

    def record(self, node: fx.Node) -> None:
        with suppress(ShapeError):
            super().record(node)


class MeanKeepsItsDim(Mutant):
    """The dim of a mean is counted as it was before the batches became one matrix (pass-raised, rewritten-raises)."""

    def norm_rows(self, state: Rewriting, move: Move, local: fx.Node) -> None:
        assert move.norm is not None
        for node in move.norm.nodes:
            node.replace_input_with(move.norm.source, local)
            self.record(node)


class NumbersTrusted(Mutant):
    """Rank constants count as the same on all ranks: exponents, so that some rewrite and some do not, and places of slices
    (collective-mismatch, deadlock, wrong-value)."""

    def facts_beside(self, graph: fx.Graph) -> CollectiveFacts:
        return replace(super().facts_beside(graph), same_numbers=[node.name for node in graph.nodes])


class VaryingWeightTaken(Mutant):
    """A norm moves although its weight differs between the members (wrong-value)."""

    def weight_allows(self, weight: Any, shard: Shard, facts: Placements) -> bool:
        spec = known_spec(weight)
        return spec is not None and len(spec.shape) == 1


class WeightPerRowTaken(Mutant):
    """A weight with a value for every token multiplies the shard (pass-raised)."""

    class finder(NormFinder):
        def is_weight(self, value: fx.Node) -> bool:
            return True

    def weight_allows(self, weight: Any, shard: Shard, facts: Placements) -> bool:
        return facts.replicated(weight, shard.group)


class StatisticStaysLocal(Mutant):
    """Who reads a statistic of a norm gets that of this rank's rows (rewritten-raises, wrong-value, …)."""

    def is_gathered(self, state: Rewriting, move: Move) -> bool:
        return super().is_gathered(state, move) and move.stage != "statistic"


class BrokenRowsTaken(Mutant):
    """A view that divides rows counts as one that keeps them (pass-raised)."""

    def viewed_dim(self, before: tuple[int, ...], shard: Shard, after: tuple[int, ...]) -> int | None:
        return 0 if isinstance(shard, Rows) else super().viewed_dim(before, shard, after)


class EveryNthRow(Mutant):
    """A residual is sliced row by row in turn, not block by block (wrong-value)."""

    def slice_rows(self, state: Rewriting, addend: fx.Node, move: Move) -> fx.Node:
        sliced = super().slice_rows(state, addend, move)
        if op_name(sliced) == "aten::slice.Tensor":
            rows = shape_of(sliced.all_input_nodes[0])[0]
            sliced.args = (sliced.all_input_nodes[0], 0, move.shard.position, rows, move.shard.members)
            infer_metadata(sliced)
        return sliced


_LOUD = frozenset({"rewritten-raises", "wrong-value", "changed-signature", "stale-metadata", "pass-raised"})
_MATCHING = frozenset({"deadlock", "collective-mismatch"})
_RACE = frozenset({"async-race", "missing-wait"})

#: Every mutant, with the kinds of finding of which one at least must be there.
EXPECTED: dict[str, frozenset[str]] = {
    "AverageTakenForSum": frozenset({"wrong-value"}),
    "ScatterNotWaitedFor": _RACE,
    "WaitsWhereItIsReadLast": _RACE,
    "WaitsErasedOneByOne": _RACE,
    "AllReduceStaysOnFirstRank": _MATCHING,
    "ScatterSunkOnOddRanks": _MATCHING,
    "GatherNotWaitedFor": _RACE,
    "GatherOverAnotherGroup": _MATCHING | {"wrong-value"},
    "InsideReadersIgnored": _LOUD,
    "MeanOverTokensTaken": _LOUD,
    "MeanKeepsItsDim": _LOUD,
    "NumbersTrusted": _MATCHING | {"wrong-value"},
    "VaryingWeightTaken": frozenset({"wrong-value"}),
    "WeightPerRowTaken": _LOUD,
    "StatisticStaysLocal": _LOUD,
    "BrokenRowsTaken": _LOUD,
    "EveryNthRow": frozenset({"wrong-value"}),
}

MUTANTS: dict[str, type[Mutant]] = {name: globals()[name] for name in EXPECTED}
