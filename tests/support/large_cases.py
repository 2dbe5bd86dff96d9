"""Large programs that refute passes with planted defects, of every kind of finding: for tests and for a benchmark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from tcverify.program import Contract, Program
from tests.mutants.catalogue import MUTANTS
from tests.mutants.foreign_catalogue import MUTANTS as FOREIGN
from tests.support import large_programs as large


class HoistsWeights:
    """Values computed only from weights are computed first, and live until their layer (peak-memory)."""

    name = "HoistsWeights"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        first = next(node for node in gm.graph.nodes if node.op == "call_function")
        for node in list(gm.graph.nodes):
            if node.op == "call_function" and all(n.op == "placeholder" for n in node.all_input_nodes):
                first.prepend(node)
        gm.recompile()
        return gm


@dataclass(frozen=True, slots=True)
class Case:
    """A program of about the given number of nodes, and the defect that refutes a pass on it.

    Attributes:
        make: from the number of nodes.
        defect: the pass.
        kind: of the finding that is reduced.
        most: compute nodes of what it is reduced to.
        contract: what the pass promises, where it does not say.
    """

    name: str
    make: Callable[[int], Program]
    defect: Callable[[], object]
    kind: str
    most: int
    contract: Contract | None = None


def _case(name: str, make: Callable[[int], Program], mutant: str, kind: str, most: int) -> Case:
    return Case(name, make, {**FOREIGN, **MUTANTS}[mutant], kind, most)


def _transformer(ranks: int, *, one_place: bool = False, **options: int) -> Callable[[int], Program]:
    return lambda nodes: large.transformer(nodes // 7, ranks, nodes // 13 if one_place else None, **options)


def _gradients(ranks: int) -> Callable[[int], Program]:
    return lambda nodes: large.data_parallel(nodes // 10, ranks, nodes // 25)


def _decomposed(nodes: int) -> Program:
    return large.tensor_parallel(nodes // 15, 2, nodes // 25, large.copy_then_write)


def _uneven(nodes: int) -> Program:
    return large.uneven_readers(nodes // 6, 4, nodes // 13)


def _pipeline(nodes: int, *, one_place: bool) -> Program:
    batches = max(2, nodes // 60)
    return large.pipeline(batches, 20, 4, batches // 2 if one_place else None)


def _streams(nodes: int) -> Program:
    return large.branches(nodes // 8, 2, nodes // 17)


_WIDE = _transformer(2, one_place=True, tokens=64, hidden=128)

#: All dialects, one place and everywhere, two and four ranks, one graph and several, each kind of finding.
CASES: tuple[Case, ...] = (
    _case("transformer, one place", _transformer(2, one_place=True), "SunkBelowConstant", "wrong-value", 2),
    _case("transformer, wide", _WIDE, "SunkBelowConstant", "wrong-value", 2),
    _case("transformer, everywhere", _transformer(4), "ContributionLost", "wrong-value", 1),
    _case("transformer, residual", _transformer(2), "ResidualAddedTwice", "wrong-value", 3),
    _case("transformer, one rank", _transformer(4), "AllReduceErasedOnFirstRank", "collective-mismatch", 2),
    _case("transformer, metadata", _transformer(2), "StaleMetadata", "stale-metadata", 2),
    _case("transformer, raises", _transformer(4, tokens=6), "IndivisibleTokensAccepted", "pass-raised", 2),
    _case("decomposed, one place", _decomposed, "CopyDropped", "wrong-value", 3),
    _case("decomposed, everywhere", lambda n: large.tensor_parallel(n // 15, 4), "WrittenWhileRead", "wrong-value", 2),
    _case("gradients, one place", _gradients(2), "WriteDuringReadAllowed", "async-race", 3),
    _case("gradients, order", _gradients(4), "StartsSinkWithWaits", "broken-order", 4),
    _case("gradients, buffers", _gradients(2), "FreesAtTheStart", "overlapping-buffers", 4),
    _case("pipeline, one place", lambda n: _pipeline(n, one_place=True), "SunkBelowConstant", "wrong-value", 2),
    _case("pipeline, everywhere", lambda n: _pipeline(n, one_place=False), "ContributionLost", "wrong-value", 1),
    _case("uneven, one place", _uneven, "DeadCollectivesErased", "deadlock", 2),
    _case("streams, one place", _streams, "WriteAfterReadUntracked", "race", 3),
    _case("far apart", lambda n: large.far_apart(n // 4), "MergedAcrossWrite", "wrong-value", 4),
    Case(
        "weights, everywhere", lambda n: large.prepared_weights(n // 4), HoistsWeights, "peak-memory", 8,
        Contract(memory_budget=0.25),
    ),
)  # fmt: skip

__all__ = ["CASES", "Case", "HoistsWeights"]
