"""Defects of multistream scheduling: each is found in a program made for it, in which the sound pass is not refuted."""

from __future__ import annotations

from typing import Any

import pytest

from tcverify.program import Program, StreamSettings
from tests.mutants.multistream import EXPECTED, MUTANTS
from tests.support.stream_programs import US, Builder, check, findings, is_lowered, lowered, node, program


def overlapping(b: Builder) -> Any:
    return b.add(b.all_reduce(b["x"]), b.mm(b.mm(b["v"])))


def two_outputs(b: Builder) -> Any:
    return b.all_reduce(b["x"]), b.mm(b.mm(b["v"]))


def behind_compute(b: Builder) -> Any:
    """A collective whose operand is computed, beside other work."""
    return b.add(b.all_reduce(b.mm(b["v"])), b.mm(b.mm(b["r"])))


def of_a_tuple(b: Builder) -> Any:
    both = b.pair(b["v"], b["r"])
    return b.all_reduce(b.item(both, 0)), b.mm(b.mm(b.item(both, 1)))


def of_a_view(b: Builder) -> Any:
    value = b.mm(b["v"])
    return b.all_reduce(b.view(value, 4, 16)), b.mm(b.mm(value))


def of_a_list(b: Builder) -> Any:
    return b.call("cat", [b.mm(b.mm(b["v"])), b.all_reduce(b["x"])], 0)


def read_then_written(b: Builder) -> Any:
    """The collective reads a value that is written into while it runs."""
    value = b.mm(b["v"])
    reduced = b.all_reduce(value)
    written = b.call("aten::add_.Tensor", value, b.mm(b["r"]))
    return reduced, b.mm(written), b.mm(b.mm(b["r"]))


def written_then_read(b: Builder) -> Any:
    """The collective reads a value that has been written into, by the name that it had before."""
    value = b.mm(b["v"])
    b.call("aten::add_.Tensor", value, b["r"])
    return b.all_reduce(value), b.mm(b.mm(b["r"]))


def read_late_then_written(b: Builder) -> Any:
    """By its rank alone, the write would come first."""
    value = b.mm(b["v"])
    aside = b.add(value, b["r"], cost=1)
    written = b.call("aten::add_.Tensor", value, b["r"])
    return aside, b.mm(b.mm(b.mm(written))), b.all_reduce(b["x"])


def input_written(b: Builder) -> Any:
    b.call("aten::add_.Tensor", b["v"], b.mm(b["r"]), cost=30)
    return b.all_reduce(b["x"], cost=20)


def on_two_streams(b: Builder) -> Any:
    """With streams 0 for both roles and 1 for collectives, the first collective runs beside the product, the second behind it."""
    return b.all_reduce(b["x"], cost=5), b.all_reduce(b.mm(b["v"], cost=20))


def two_collectives_read(b: Builder) -> Any:
    first, second = b.all_reduce(b["x"]), b.all_reduce(b["r"])
    return b.mm(first), b.mm(second), b.mm(b.mm(b["v"]))


def with_a_fused_op(b: Builder) -> Any:
    fused = b.call("matmul_all_reduce", b["v"], b["w"], None, b.graph.rank, b.graph.group("tp"), cost=20)
    return b.all_reduce(b["x"], cost=15), fused, b.mm(b["r"], cost=12), b.mm(b["v"])


def two_tokens(b: Builder) -> Any:
    """Of the outputs, only the collective may be a copy, and waits for both streams."""
    product = b.mm(b["v"])
    return product, b.view(product, 64), b.all_reduce(b["x"])


def shared_by_readers(b: Builder) -> Any:
    """A value of the other stream is read on both."""
    reduced = b.all_reduce(b["x"])
    return b.mm(reduced), b.all_reduce(reduced), b.mm(b.mm(b["r"]))


def collective_behind_view(b: Builder) -> Any:
    reduced = b.view(b.all_reduce(b["x"]), 8, 8)
    return b.mm(reduced), b.mm(b.mm(b["v"]))


def summed_into(b: Builder) -> Any:
    value = b.mm(b["v"])
    b.call("aten::add_.Tensor", value, b.all_reduce(b["x"]))
    return b.mm(value), b.mm(b["r"])


def serial(b: Builder) -> Any:
    return b.mm(b.all_reduce(b.mm(b["v"])))


def stalling(b: Builder) -> Any:
    """As the ops stand, compute waits for the collective before it does what could hide it."""
    waiting = b.mm(b.all_reduce(b["x"]))
    return waiting, b.mm(b.mm(b.mm(b["r"]))), b.all_reduce(b["v"], cost=5)


def cheap(b: Builder) -> Any:
    return b.all_reduce(b["x"], cost=0.25), b.mm(b["v"], cost=0.5), b.mm(b["r"], cost=3)


def with_unused_collective() -> Program:
    """On rank 1, nobody reads the result of a collective."""
    original = program(lambda b: (b.all_reduce(b["x"]), b.add(b.all_reduce(b["r"]), b["v"]), b.mm(b.mm(b["v"]))))
    graphs = [original.graph(0), original.graph(1)]
    add = node(graphs[1], "add")
    add.args = (node(graphs[1], "r"), add.args[1])
    return original.with_graphs(graphs)


def with_uneven_costs() -> Program:
    """On rank 1, what follows the second collective takes longer than what follows the first."""
    original = program(two_collectives_read)
    graphs = [original.graph(0), original.graph(1)]
    for name, cost in (("mm", 2.0), ("mm_1", 200.0)):
        node(graphs[1], name).meta["cost_s"] = cost * US
    return original.with_graphs(graphs)


SHOWN_BY: dict[str, Program] = {
    "TupleDependencyUntracked": program(of_a_tuple),
    "ViewDependencyUntracked": program(of_a_view),
    "ListDependencyUntracked": program(of_a_list),
    "WriteAfterReadUntracked": program(read_then_written),
    "WriteMovedBeforeRead": program(read_late_then_written),
    "WritesUnknown": program(written_then_read),
    "CollectivesUnordered": program(on_two_streams, streams=StreamSettings((0,), (0, 1), 1e-6)),
    "CostsOrderCollectives": with_uneven_costs(),
    "FusedOpUnordered": program(with_a_fused_op),
    "TokenSharedByCollectives": program(two_collectives_read),
    "WaitNamesMainStream": program(overlapping),
    "RecordNamesMainStream": program(overlapping),
    "WaitForAnotherProducer": program(behind_compute),
    "OneTokenPerWait": program(two_tokens, streams=StreamSettings((3,), (1,))),
    "FirstWaitLost": program(behind_compute),
    "WaitSharedByReaders": program(shared_by_readers),
    "GateBehindAView": program(collective_behind_view),
    "WrittenOperandGated": program(summed_into),
    "PreviousOpRecorded": program(overlapping),
    "RecordedWhereNeeded": program(behind_compute),
    "OutputsNotJoined": program(two_outputs),
    "WritesIntoInputsNotJoined": program(input_written, streams=StreamSettings((3,), (0,))),
    "JoinErasedAsDead": program(two_outputs),
    "DeadCollectiveErased": with_unused_collective(),
    "ProgramOrder": program(stalling),
    "OverheadForgotten": program(overlapping, streams=StreamSettings(sync_overhead_s=3 * US)),
    "ResourcesShared": program(two_collectives_read, streams=StreamSettings((0, 3), (1,))),
    "FusedOpTakesOneResource": program(with_a_fused_op, streams=StreamSettings((0, 3), (1,))),
    "GuardInverted": program(serial),
    "NoGuard": program(serial),
    "CommunicationIsFree": program(overlapping),
    "CheapOpsAreFree": program(cheap),
    "OldMakespanDeclared": program(stalling),
    "WaitsShareStorage": program(overlapping),
    "TokensLookLikeValues": program(overlapping),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_defect_is_found(name: str) -> None:
    found = findings(SHOWN_BY[name], MUTANTS[name]())
    assert found & EXPECTED[name], f"found {found}"


@pytest.mark.parametrize("name", MUTANTS)
def test_the_sound_pass_is_not_refuted_there(name: str) -> None:
    original = SHOWN_BY[name]
    if name in ("GuardInverted", "NoGuard"):
        assert not is_lowered(lowered(original))
        assert findings(original) == set()
    else:
        check(original)


def test_mutants_are_told_apart_by_name() -> None:
    assert {mutant.name for mutant in MUTANTS.values()} == set(MUTANTS) == set(SHOWN_BY)


@pytest.mark.parametrize("name", MUTANTS)
def test_docstrings_name_the_findings(name: str) -> None:
    """Or the first of them, where there are several ("…")."""
    said = (MUTANTS[name].__doc__ or "").rpartition("(")[2].rstrip(".)").replace(", …", "").split(", ")
    assert set(said) <= EXPECTED[name]
