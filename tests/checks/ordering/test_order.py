"""The check of order: races with what is under way, waits that are lost, and promises about order."""

from __future__ import annotations

from typing import Any

import pytest
from torch import fx

from tcverify.program import Program
from tcverify.program.finding import KINDS, Finding
from tests.sizes import by_night
from tests.support.async_programs import DP2_TP2, Functional, calls, edited, judge, kinds, moved, program, reordered

PROMISED = {"order": True, "collective_order": True}


def found(original: Program, rewritten: Program, **promises: Any) -> Finding:
    (finding,) = judge("order", original, rewritten, **promises)
    assert finding.kind in KINDS
    return finding


def overlapped(b: Functional) -> Any:
    """x is reduced beside a product; both are added."""
    started = b.start(b.x)
    product = b.mm(b.x)
    return b.add(b.wait(started), product)


# ---------------------------------------------------------------------------------------------------------------- races


def test_reading_a_result_before_it_has_arrived() -> None:
    def build(b: Functional) -> Any:
        started = b.start(b.x)
        waited = b.wait(started)
        return b.relu(started), waited

    original = program(build)
    assert kinds("order", original, original) == []
    finding = found(original, moved(original, "wait_tensor", before="output"))
    assert (finding.kind, finding.node, finding.rank) == ("async-race", "relu", 0)
    assert finding.title == "'relu' reads the result of 'all_reduce' before the collective has finished"
    assert finding.data["racing"] == "completion"
    assert (finding.data["first"], finding.data["second"], finding.data["wait"]) == (
        "all_reduce",
        "relu",
        "wait_tensor",
    )
    assert "missing: 'wait_tensor' before 'relu'" in finding.detail


def test_writing_into_what_a_start_still_reads() -> None:
    def build(b: Functional) -> Any:
        copy = b.relu(b.x)
        waited = b.wait(b.start(copy, kind="all_gather_into_tensor"))
        return waited, b.add_(copy, b.y)

    original = program(build)
    assert kinds("order", original, original) == []
    finding = found(original, moved(original, "wait_tensor", before="output"))
    assert (finding.kind, finding.node) == ("async-race", "add_")
    assert finding.title == "'add_' writes into 'relu' while 'all_gather_into_tensor' may still read it"
    assert finding.data["racing"] == "input"
    assert finding.data["value"] == "relu"


def test_writing_into_what_a_start_has_copied() -> None:
    """An all_reduce reads its operand at once, and nothing else of the order changes: a start behind the write is wrong."""

    def build(b: Functional) -> Any:
        copy = b.relu(b.x)
        waited = b.wait(b.start(copy))
        return waited, b.add_(copy, b.y)

    original = program(build)
    assert kinds("order", original, moved(original, "wait_tensor", before="output")) == []
    behind = reordered(original, ["relu", "add_", "all_reduce", "wait_tensor"])
    assert found(original, behind, order=True).kind == "broken-order"


def test_views_of_what_is_under_way_are_no_accesses() -> None:
    def build(b: Functional) -> Any:
        started = b.start(b.x)
        view = b.call("aten::view", started, [16])
        like = b.call("aten::zeros_like", started)
        waited = b.wait(view)
        return waited, like, b.relu(started)

    original = program(build)
    reorders = reordered(original, ["all_reduce", "zeros_like", "view", "wait_tensor", "relu"])
    assert kinds("order", original, reorders, **PROMISED) == []


def test_a_result_is_not_written_before_it_has_arrived() -> None:
    def build(b: Functional) -> Any:
        started = b.start(b.x)
        waited = b.wait(started)
        return b.add_(started, b.y), waited

    original = program(build)
    finding = found(original, moved(original, "wait_tensor", before="output"))
    assert finding.title == "'add_' writes into the result of 'all_reduce' before the collective has finished"


def test_an_operand_that_is_reduced_in_place_is_under_way_itself() -> None:
    def build(b: Functional) -> Any:
        copy = b.relu(b.x)
        before = b.mm(copy)
        waited = b.wait(b.start(copy, kind="all_reduce_"))
        return waited, before

    original = program(build)
    finding = found(original, moved(original, "mm", before="wait_tensor"))
    assert finding.title == "'mm' reads 'relu', which 'all_reduce_' writes, before the collective has finished"
    assert (finding.kind, finding.node, finding.data["value"]) == ("async-race", "mm", "relu")


def test_a_race_of_the_original_is_not_the_fault_of_the_pass() -> None:
    def build(b: Functional) -> Any:
        started = b.start(b.x)
        other = b.mm(b.x)
        early = b.relu(started)
        return b.wait(started), early, other

    racy = program(build)
    assert kinds("order", racy, moved(racy, "mm", before="all_reduce")) == []


def test_another_race_between_the_nodes_that_raced_before_is() -> None:
    def build(b: Functional, written: str) -> Any:
        values = {"other": b.y, "operand": b.relu(b.x)}
        values["result"] = b.start(values["operand"], kind="all_to_all_single")
        b.add_(values[written], b.x)
        return b.wait(values["result"])

    sound, racy, other = (program(lambda b, w=written: build(b, w)) for written in ("other", "operand", "result"))
    assert found(sound, racy).data["racing"] == "input"
    finding = found(racy, other)
    assert (finding.node, finding.data["racing"]) == ("add_", "completion")


def test_waits_that_are_shared_or_repeated_are_sound() -> None:
    def build(b: Functional) -> Any:
        started = b.start(b.x)
        first, second = b.wait(started), b.wait(started)
        return b.add(first, second), b.wait(first)

    original = program(build)
    swapped = reordered(original, ["all_reduce", "wait_tensor_1", "wait_tensor", "add", "wait_tensor_2"])
    assert kinds("order", original, swapped, **PROMISED) == []


def test_tensors_of_a_coalesced_collective_arrive_one_by_one() -> None:
    def build(b: Functional) -> Any:
        left, right = b.relu(b.x), b.relu(b.y)
        started = b.call("_c10d_functional::all_gather_into_tensor_coalesced", [left, right], 2, "dp")
        first, second = b.getitem(started, 0), b.getitem(started, 1)
        a = b.wait(first)
        changed = b.add_(left, b.y)
        return a, changed, b.wait(second)

    original = program(build)
    assert kinds("order", original, original) == []
    finding = found(original, moved(original, "add_", before="wait_tensor"))
    assert finding.title == "'add_' writes into 'relu' while 'all_gather_into_tensor_coalesced' may still read it"
    # what the second one reads is under way until its own wait
    other = edited(original, lambda graph, nodes: nodes["add_"].update_arg(0, nodes["relu_1"]))
    expected = "'add_' writes into 'relu_1' while 'all_gather_into_tensor_coalesced' may still read it"
    assert found(original, other).title == expected


def test_parts_of_a_buffer_that_lie_apart_may_be_under_way_at_once() -> None:
    def build(b: Functional, *ends: int) -> Any:
        buffer = b.relu(b.x)
        parts = [b.call("aten::slice.Tensor", buffer, 0, end - 2, end) for end in ends]
        waits = [b.wait(started) for started in [b.start(part, kind="all_reduce_") for part in parts]]
        last = b.relu(b.call("aten::slice.Tensor", buffer, 0, 3, 4))
        return [*waits, last]

    def beside(made: Program) -> list[str]:
        early = moved(made, "slice_3", before="wait_tensor")
        return kinds("order", made, moved(early, "relu_1", before="wait_tensor"))

    apart, overlapping = program(lambda b: build(b, 2, 4)), program(lambda b: build(b, 2, 3))
    assert kinds("order", program(overlapped), apart) == []
    assert kinds("order", program(overlapped), overlapping) == ["async-race"]
    assert beside(apart) == ["async-race"]
    assert beside(overlapping) == []  # rows 0 to 2 are under way, and row 3 is read


# ---------------------------------------------------------------------------------------------------------------- waits


def erase_wait(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
    nodes["wait_tensor"].replace_all_uses_with(nodes["all_reduce"])
    graph.erase_node(nodes["wait_tensor"])


def test_a_start_that_nobody_waits_for_any_more() -> None:
    original = program(overlapped)
    finding = found(original, edited(original, erase_wait))
    assert (finding.kind, finding.node) == ("missing-wait", "all_reduce")
    assert finding.title == "no node waits for 'all_reduce', whose result is used"
    assert "in the original, 'wait_tensor' waits for it" in finding.detail
    assert "'add' reads it, whether the collective has finished or not" in finding.detail


def test_a_wait_for_what_nobody_reads_may_not_go_either() -> None:
    def build(b: Functional) -> Any:
        b.wait(b.start(b.x))
        return b.mm(b.x)

    original = program(build)
    finding = found(original, edited(original, erase_wait))
    assert finding.title == "no node waits for 'all_reduce'"


def test_a_start_that_nobody_ever_waited_for_or_read() -> None:
    def build(b: Functional) -> Any:
        b.start(b.x)
        return b.mm(b.x)

    original = program(build)
    assert kinds("order", original, reordered(original, ["mm", "all_reduce"])) == []


def test_a_wait_that_stands_before_its_start() -> None:
    def build(b: Functional) -> Any:
        copy = b.relu(b.x)
        b.start(copy, kind="all_reduce_")
        b.wait(copy)
        return b.mm(copy)

    original = program(build)
    assert kinds("order", original, original) == []
    finding = found(original, moved(original, "wait_tensor", before="all_reduce_"))
    assert (finding.kind, finding.node) == ("wait-before-start", "wait_tensor")
    assert finding.title == "'wait_tensor' precedes 'all_reduce_', which it should wait for, and waits for nothing"


def test_an_input_that_is_reduced_in_place_arrives_before_the_graph_ends() -> None:
    def build(b: Functional) -> Any:
        b.wait(b.start(b.x, kind="all_reduce_"))
        return b.mm(b.y)

    original = program(build)
    assert kinds("order", original, original) == []

    def erase(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
        graph.erase_node(nodes["wait_tensor"])

    finding = found(original, edited(original, erase))
    assert (finding.kind, finding.node) == ("missing-wait", "all_reduce_")
    assert "the caller reads it, whether the collective has finished or not" in finding.detail


# ----------------------------------------------------------------------------------------------------- promises of order


def test_a_sound_permutation_is_silent() -> None:
    original = program(overlapped)
    assert calls(original) == ["all_reduce", "mm", "wait_tensor", "add"]
    assert kinds("order", original, reordered(original, ["mm", "all_reduce", "wait_tensor", "add"]), **PROMISED) == []


def test_a_pass_that_promises_order_changes_no_node() -> None:
    original = program(overlapped)
    dropped = edited(original, lambda graph, nodes: (
        nodes["add"].replace_all_uses_with(nodes["mm"]), graph.erase_node(nodes["add"]),
    ))  # fmt: skip
    finding = found(original, dropped, order=True)
    assert (finding.kind, finding.title) == ("changed-nodes", "node 'add' of the original is missing")
    rewired = edited(original, lambda graph, nodes: nodes["mm"].update_arg(1, nodes["x"]))
    finding = found(original, rewired, order=True)
    assert (finding.kind, finding.node) == ("changed-nodes", "mm")
    assert found(dropped, original, order=True).title == "the original has no node 'add'"
    assert kinds("order", original, rewired) == []


def edges(b: Functional) -> Any:
    copy = b.relu(b.x)
    first = b.mm(copy)
    b.add_(copy, b.y)
    second = b.mm(copy)
    b.add_(copy, b.x)
    return first, second, copy


@pytest.mark.parametrize(
    ("name", "before", "edge", "title"),
    [
        ("add_", "mm", "write after read", "'add_' writes into 'relu' before 'mm' has read what was there"),
        ("mm_1", "add_", "read after write", "'mm_1' reads 'relu' before 'add_' has written it"),
        ("mm", "mm_1", "write after read", "'add_' writes into 'relu' before 'mm' has read what was there"),
    ],
)
def test_edges_through_storage(name: str, before: str, edge: str, title: str) -> None:
    original = program(edges)
    finding = found(original, moved(original, name, before=before), order=True)
    assert (finding.kind, finding.data["edge"], finding.title) == ("broken-order", edge, title)


def test_writes_keep_their_order() -> None:
    def build(b: Functional) -> Any:
        copy = b.relu(b.x)
        b.call("aten::fill_.Scalar", copy, 1.0)
        b.call("aten::zero_", copy)
        return copy

    original = program(build)
    finding = found(original, moved(original, "zero_", before="fill_"), order=True)
    assert finding.data["edge"] == "write after write"
    assert (finding.data["first"], finding.data["second"]) == ("fill_", "zero_")


def communicating(b: Functional) -> Any:
    first = b.start(b.x)
    second = b.start(b.y)
    b.call("p2p::barrier", "dp")
    third = b.start(b.x)
    return [b.wait(value) for value in (first, second, third)]


@pytest.mark.parametrize(
    ("name", "before", "kind", "edge"),
    [
        ("barrier", "all_reduce_1", "broken-order", "effect"),
        ("all_reduce_2", "barrier", "broken-order", "effect"),
        ("wait_tensor", "all_reduce_2", "broken-order", "wait after start"),
        ("wait_tensor", "barrier", "broken-order", "wait after start"),
    ],
)
def test_edges_of_communication(name: str, before: str, kind: str, edge: str) -> None:
    original = program(communicating)
    finding = found(original, moved(original, name, before=before), order=True)
    assert (finding.kind, finding.data["edge"]) == (kind, edge)


def test_starts_keep_their_order_where_that_is_promised() -> None:
    original = program(communicating)
    swapped = moved(original, "all_reduce_1", before="all_reduce")
    assert kinds("order", original, swapped, order=True) == []
    both = judge("order", original, swapped, **PROMISED)
    assert [f.kind for f in both] == ["reordered-collectives", "broken-order"]
    assert both[1].data["edge"] == "start order"


def test_a_start_may_rise_above_waits() -> None:
    def build(b: Functional) -> Any:
        first = b.wait(b.start(b.x))
        second = b.wait(b.start(b.y))
        return b.add(first, second)

    original = program(build)
    raised = moved(original, "all_reduce_1", before="wait_tensor")
    assert kinds("order", original, raised, **PROMISED) == []
    assert kinds("order", raised, original, order=True) == ["broken-order"]


def test_declared_edges_hold_whatever_is_promised() -> None:
    original = program(overlapped)

    def declare(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
        nodes["all_reduce"].meta["after"] = ["mm", "nowhere"]

    finding = found(original, edited(original, declare))
    assert finding.title == "'all_reduce' precedes 'mm', although its meta['after'] requires the opposite"
    assert finding.data["edge"] == "declared"
    kept = moved(edited(original, declare), "mm", before="all_reduce")
    assert kinds("order", original, kept, **PROMISED) == []
    # an edge of the original that the pass has dropped still holds where order is promised
    assert kinds("order", kept, moved(original, "all_reduce", before="mm"), order=True) == ["broken-order"]


# ---------------------------------------------------------------------------------------------------- collective order


def test_collectives_of_a_communicator_keep_their_order_in_passes_that_change_nodes() -> None:
    def build(b: Functional, *order: str) -> Any:
        started = [b.start(b.x, group, kind) for group, kind in (item.split() for item in order)]
        return [b.wait(value) for value in started]

    def made(*order: str) -> Program:
        return program(lambda b: build(b, *order), mesh=DP2_TP2)

    original = made("dp all_reduce", "tp all_reduce", "dp all_gather_into_tensor")
    other = made("tp all_reduce", "dp all_reduce", "dp all_gather_into_tensor")
    assert kinds("order", original, other, collective_order=True) == []  # other communicators
    swapped = made("dp all_gather_into_tensor", "dp all_reduce", "tp all_reduce")
    finding = found(original, swapped, collective_order=True)
    assert finding.kind == "reordered-collectives"
    assert "collective of group 'dp' [0, 2] number 1" in finding.title
    assert kinds("order", original, swapped) == []
    gone = found(original, made("dp all_reduce", "tp all_reduce"), collective_order=True)
    assert "number 2, 'all_gather_into_tensor' (all_gather), is missing" in gone.title


def test_ops_with_an_effect_keep_their_order() -> None:
    def build(b: Functional, *names: str) -> Any:
        for name in names:
            b.call(f"p2p::{name}", *(["dp"] if name == "barrier" else [b.x, 1]))
        return b.mm(b.x)

    original = program(lambda b: build(b, "barrier", "send"))
    finding = found(original, program(lambda b: build(b, "send", "barrier")), collective_order=True)
    assert finding.title == "'send' (send) is now op with an effect number 1, where 'barrier' (barrier) was"


def test_long_graphs_are_checked_whole() -> None:
    count = by_night(2500, 700)

    def build(b: Functional) -> Any:
        x = b.x
        for _ in range(count):
            started = b.start(x)
            product = b.mm(x)
            x = b.add(b.wait(started), product)
        return x

    original = program(build)
    assert len(calls(original)) == 4 * count
    sound = moved(original, f"mm_{count - 1}", before=f"all_reduce_{count - 1}")
    assert kinds("order", original, sound, **PROMISED) == []
    assert kinds("memory", original, sound, memory_budget=0.0) == []
    late = edited(sound, lambda graph, nodes: nodes[f"add_{count - 1}"].update_arg(0, nodes[f"all_reduce_{count - 1}"]))
    assert [f.node for f in judge("order", original, late)] == []  # the wait is there, and nobody needs its value
    late = moved(late, f"wait_tensor_{count - 1}", before="output")
    assert [(f.kind, f.node) for f in judge("order", original, late)] == [("async-race", f"add_{count - 1}")]
