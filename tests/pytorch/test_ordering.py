"""What Inductor's scheduler makes of the order of a graph, and of memory that all ranks map."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch._inductor import comms

from tcverify import verify
from tcverify.ops import RESIZE
from tcverify.program import Contract, InputSpec, Mesh, Program, RankBinding, spmd_program
from tcverify.pytorch import SUBJECTS
from tcverify.pytorch.comm_buffers import CommLowering, find_leaked_buffers, find_one_shot_mismatch, one_shot
from tcverify.pytorch.fsdp_graphs import RemoveUnsharded, without_out
from tcverify.pytorch.ordering import DecideOrdering
from tcverify.pytorch.schedules import OrderPromise, ScheduleStep, find_rank_disagreement
from tcverify.pytorch.scheduling import SimpleOverlap
from tcverify.pytorch.subjects import release
from tests.pytorch.test_schedules import independent, judged, kinds, planted, program, schedule, step, swap

MESH = Mesh.grid({"tp": 2})
C10D = "_c10d_functional::"


# ------------------------------------------------------------------------------------------------ on plain data


@pytest.mark.parametrize(
    ("opaque", "with_collective", "with_opaque"),
    [("everywhere", True, True), ("among its own", False, True), ("nowhere", False, False)],
)
def test_how_far_the_order_of_opaque_communication_counts(opaque, with_collective, with_opaque):
    start, send = step("a", "x", "y", "collective", "tp"), step("b", role="opaque")
    promise = OrderPromise(opaque=opaque)
    assert judged(schedule(start, send), "b a", promise) == ["opaque-order"] * with_collective
    assert judged(schedule(send, step("c", role="opaque")), "c b", promise) == ["opaque-order"] * with_opaque


def test_nodes_that_only_compute_may_be_gone():
    given = schedule(step("a"), step("b", role="wait"), step("c"))
    assert [one.name for one in given.only({"c"}).steps] == ["b", "c"]


def test_only_roles_that_count_are_compared():
    given = schedule(step("a", role="opaque", group="tp"), step("b", role="opaque", group="tp"))
    turned, groups = given.in_order_of([["b"], ["a"]]), [{"tp": (0, 1)}, {"tp": (0, 1)}]
    assert find_rank_disagreement([given, given], [given, turned], groups) is not None
    assert find_rank_disagreement([given, given], [given, turned], groups, ("collective",)) is None


def test_ranks_choose_one_shot_alike():
    groups = [{"tp": (0, 1)}, {"tp": (0, 1)}]
    first, second = (
        schedule(ScheduleStep("a", op, role="collective", group="tp"), step("b", role="collective", group="tp"))
        for op in ("symm_mem::one_shot_all_reduce", "_c10d_functional::all_reduce_")
    )
    assert one_shot(first) == {"tp": [True, False]}
    assert find_one_shot_mismatch([one_shot(first), one_shot(first)], groups) is None
    found = find_one_shot_mismatch([one_shot(first), one_shot(second)], groups)
    assert found is not None
    assert (found.aspect, found.rank) == ("comm-buffer", 1)


def test_mapped_memory_is_not_returned():
    given = schedule(step("a", "", "s"), step("b", "s", "t"), kept="t")
    assert find_leaked_buffers(given, {"a"}) == []
    assert [one.node for one in find_leaked_buffers(given, {"b"})] == ["b"]


# ------------------------------------------------------------------------------------------------ in Inductor


def test_the_order_of_collectives_is_decided():
    subject = DecideOrdering()
    assert verify(subject, program(independent)).status == "passed"
    assert [step.role for step in subject._given[-1].steps].count("collective") == 2


def test_an_order_that_nobody_decides_is_found():
    with mock.patch.object(comms, "decide_global_ordering_of_comms", lambda nodes, *_: nodes):
        assert kinds(DecideOrdering(), program(independent)) == {"reordered-collectives"}


def test_an_order_that_is_lost_behind_is_found():
    def change(nodes: list[Any]) -> list[Any]:
        return swap(nodes, comms.contains_collective, comms.contains_collective)

    with planted("raise_comms", change):
        assert "reordered-collectives" in kinds(
            DecideOrdering(passes=("sink_waits", "raise_comms")), program(independent)
        )


@pytest.mark.skipif(not SUBJECTS["comms.simple_overlap"].here, reason="torch before 2.15 has no simple_overlap")
def test_simple_overlap():
    subject = SimpleOverlap()
    assert verify(subject, program()).status == "passed"
    assert any(step.role == "collective" for step in subject._given[-1].steps)
    with planted("simple_overlap", lambda nodes: swap(nodes, comms.contains_collective, comms.contains_wait)):
        assert "broken-order" in kinds(SimpleOverlap(), program())


# ------------------------------------------------------------------------------------------------ memory that is mapped


def reduced(b: Any, value: Any) -> Any:
    return b.call(C10D + "wait_tensor", b.call(C10D + "all_reduce", value, "sum", "tp"))


#: torch 2.9 gives operands of collectives a fixed layout first, and such memory is not mapped there.
mapping = pytest.mark.skipif(release(torch.__version__) < (2, 11), reason="torch 2.9 makes no all_reduce one-shot")


def computed(b: Any) -> Any:
    return reduced(b, b.call("aten::relu", b.input("x")))


@mapping
def test_small_all_reduces_become_one_shot():
    subject = CommLowering()
    assert verify(subject, program(computed)).status == "passed"
    assert subject._chosen[-1] == {"tp": [True]}
    large = CommLowering(one_shot_all_reduce_threshold_bytes=0)
    assert verify(large, program(computed)).status == "passed"
    assert large._chosen[-1] == {"tp": [False]}


@mapping
def test_an_all_reduce_that_nobody_reads_may_go_once_it_is_one_shot():
    def unread(b: Any) -> Any:
        x = b.input("x")
        reduced(b, b.call("aten::mm", x, x))
        return b.call("aten::sin", x)

    assert kinds(CommLowering(), program(unread)) == set()
    assert kinds(CommLowering(one_shot_all_reduce_threshold_bytes=0), program(unread)) == set()


@mapping
def test_one_that_a_single_rank_reads_may_not_go_on_the_others():
    def summed(reads: bool) -> Any:
        def build(b: Any) -> Any:
            x = b.input("x")
            total = reduced(b, b.call("aten::mm", x, x))
            return b.call("aten::sin", total if reads else x)

        return spmd_program(MESH, [InputSpec("x", (4, 4))], build)

    read, unread = summed(True), summed(False)
    one = replace(read, graphs=read.graphs + unread.graphs, ranks=(RankBinding(0, {}), RankBinding(1, {})))
    assert kinds(CommLowering(), one) == {"buffer-mismatch"}
    assert kinds(CommLowering(one_shot_all_reduce_threshold_bytes=0), one) == set()


@mapping
def test_mapped_memory_that_is_returned_is_found():
    """Found in torch, see reports/pytorch/comm-buffer-returned: the guard against it does not see it."""

    def returned(b: Any) -> Any:
        value = b.call("aten::relu", b.input("x"))
        return reduced(b, value), value

    assert kinds(CommLowering(), program(returned)) == {"buffer-mismatch"}


@mapping
def test_ranks_that_choose_differently_are_found():
    """An input cannot be mapped, what is computed can."""

    def given(b: Any) -> Any:
        return reduced(b, b.input("x"))

    def made(b: Any) -> Any:
        return reduced(b, b.call("aten::mul.Tensor", b.input("x"), 0.0))

    alike, other = (spmd_program(MESH, [InputSpec("x", (4, 4))], build) for build in (given, made))
    one = replace(alike, graphs=alike.graphs + other.graphs, ranks=(RankBinding(0, {}), RankBinding(1, {})))
    assert kinds(CommLowering(), one) == {"buffer-mismatch"}
    assert kinds(CommLowering(), alike) == set()


# ------------------------------------------------------------------------------------------------ parameters of FSDP2


def unsharded(use: Callable[[Any, Any, Any], Any]) -> Program:
    """Two parameters are freed, allocated, copied into, used, and freed again."""

    def build(b: Any) -> Any:
        x, first, second = (b.input(name) for name in ("x", "first", "second"))
        for full in (first, second):
            b.call(RESIZE, full, 0)
        for full in (first, second):
            b.call(RESIZE, full, 16)
            b.call("fsdp::copy_", full, b.call("aten::mul.Tensor", x, 2))
        made = use(b, first, second)
        for full in (first, second):
            b.call(RESIZE, full, 0)
        return made

    return spmd_program(MESH, [InputSpec(name, (2, 2)) for name in ("x", "first", "second")], build)


old = pytest.mark.skipif(
    not SUBJECTS["remove_fsdp2_unsharded_param_graph_input_usage"].here, reason="torch 2.13 and later have no such pass"
)


@old
def test_parameters_are_used_as_they_were_gathered():
    one = unsharded(lambda b, first, second: b.call("aten::mm", first, second))
    assert verify(RemoveUnsharded(), one).status == "passed"
    module = one.graph_modules()[0]
    RemoveUnsharded()(module)
    assert not any("fsdp" in str(node.target) for node in module.graph.nodes)


@old
def test_a_use_that_is_forgotten_is_found():
    """Found in torch, see reports/pytorch/unsharded-parameters-in-lists: what is in a list is not looked at."""
    one = unsharded(lambda b, first, second: b.call("aten::cat", [first, second]))
    assert "use-after-free" in kinds(RemoveUnsharded(), one)


def test_ops_that_write_into_new_memory_become_functional():
    def build(b: Any) -> Any:
        x = b.input("x")
        memory = [b.call("aten::empty.memory_format", [8]) for _ in range(2)]
        b.call("fsdp::split_with_sizes_copy", x, [2, 2], 1, out=[b.call("aten::view", one, [4, 2]) for one in memory])
        joined = b.call("aten::empty.memory_format", [16])
        b.call("fsdp::chunk_cat", [x], 0, 2, out=b.call("aten::view", joined, [2, -1]))
        return (*memory, joined)

    one = spmd_program(MESH, [InputSpec("x", (4, 4))], build)

    class Rewrite:
        contract = Contract(metadata=False)

        def __call__(self, gm: torch.fx.GraphModule) -> None:
            without_out(gm.graph)

    assert verify(Rewrite(), one).status == "passed"
    module = one.graph_modules()[0]
    without_out(module.graph)
    assert not any("fsdp" in str(node.target) for node in module.graph.nodes)
