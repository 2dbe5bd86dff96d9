"""Costs of asynchronous collectives, which name their group, and of the ops of fully sharded data parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed.fsdp._fully_shard._fsdp_collectives  # defines the ops
from torch import fx

from tcverify.cost import MIN_COST_S, DeviceProfile, collective_time, load_device_profile, node_cost, takes_no_time
from tcverify.program import InputSpec, Mesh, spmd_program

H100 = load_device_profile("h100-sxm")
NEAR = {"tp": (0, 1, 2, 3)}
FAR = {"tp": (0, 8, 16, 24)}


def node(op: str, *args: Any, shape: tuple[int, ...] = (1 << 12, 64), **kwargs: Any) -> fx.Node:
    """The call of `op` on a float32 input, "x" in the arguments; four ranks."""
    mesh = Mesh.grid({"tp": 4})

    def build(b: Any) -> Any:
        x = b.input("x")
        given = [
            [x if item == "x" else item for item in a] if isinstance(a, list) else x if a == "x" else a for a in args
        ]
        return b.call(op, *given, **kwargs)

    graph = spmd_program(mesh, [InputSpec("x", shape)], build).graphs[0]
    return next(each for each in graph.nodes if each.op == "call_function")


def cost(call: fx.Node, groups: Mapping[str, Any] = NEAR, profile: DeviceProfile | None = H100) -> float:
    found = node_cost(call, profile, groups=groups)
    assert found is not None
    return found


BYTES = (1 << 12) * 64 * 4


@pytest.mark.parametrize(
    ("op", "args", "kind", "contribution"),
    [
        ("all_reduce", ("x", "sum", "tp"), "all_reduce", BYTES),
        ("all_reduce_", ("x", "sum", "tp"), "all_reduce", BYTES),
        ("all_gather_into_tensor", ("x", 4, "tp"), "all_gather", BYTES),
        ("reduce_scatter_tensor", ("x", "sum", 4, "tp"), "reduce_scatter", BYTES),
        ("broadcast", ("x", 1, "tp"), "broadcast", BYTES),
        ("all_to_all_single", ("x", [1 << 10] * 4, [1 << 10] * 4, "tp"), "all_to_all", BYTES),
        ("all_reduce_coalesced", (["x", "x"], "sum", "tp"), "all_reduce", 2 * BYTES),
    ],
)
def test_a_start_costs_its_communication(op: str, args: tuple[Any, ...], kind: str, contribution: int) -> None:
    start = node(f"_c10d_functional::{op}", *args)
    for groups in (NEAR, FAR):
        link = H100.between(groups["tp"])
        assert link is not None
        expected = collective_time(kind, contribution, 4, link) + H100.launch.comm
        assert cost(start, groups) == pytest.approx(expected, rel=1e-12)
    assert cost(start, FAR) > cost(start, NEAR)


def test_of_an_unknown_group_the_size_counts() -> None:
    gather = node("_c10d_functional::all_gather_into_tensor", "x", 4, "tp")
    assert cost(gather, {}) == cost(gather, NEAR)
    reduce = node("_c10d_functional::all_reduce", "x", "sum", "tp")
    slowest = min(each.effective_bandwidth for each in H100.interconnects)
    assert cost(reduce, {}) == pytest.approx(BYTES / slowest + H100.launch.comm)


def test_a_group_of_one_costs_its_launch() -> None:
    start = node("_c10d_functional::all_reduce", "x", "sum", "tp", shape=(4,))
    assert cost(start, {"tp": (2,)}) == pytest.approx(H100.launch.comm, rel=0.01)


def test_a_wait_takes_no_time_whatever_is_written_on_it() -> None:
    start = node("_c10d_functional::all_reduce", "x", "sum", "tp")
    with start.graph.inserting_after(start):
        wait = start.graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (start,))
    wait.meta["cost_s"] = 0.5
    assert takes_no_time(wait)
    assert not takes_no_time(start)
    assert cost(wait) == cost(wait, profile=None) == 0.0
    start.meta["cost_s"] = 0.25
    assert cost(start, profile=None) == 0.25


def test_one_shot_reads_from_every_other_rank() -> None:
    start = node("symm_mem::one_shot_all_reduce", "x", "sum", "tp")
    link = H100.between(NEAR["tp"])
    assert link is not None
    expected = collective_time("one_shot_all_reduce", BYTES, 4, link) + H100.launch.comm
    assert cost(start) == pytest.approx(expected)
    assert collective_time("one_shot_all_reduce", BYTES, 4, link) > collective_time("all_reduce", BYTES, 4, link)


def test_a_barrier_costs_a_launch_and_a_transfer_its_bytes() -> None:
    assert cost(node("p2p::barrier", "tp")) == pytest.approx(H100.launch.comm)
    slowest = min(each.effective_bandwidth for each in H100.interconnects)
    assert cost(node("p2p::send", "x", 1)) == pytest.approx(BYTES / slowest + H100.launch.comm)


def test_copies_around_sharded_parameters_cost_their_bytes() -> None:
    x, buffer = fx.Graph().placeholder("x"), fx.Graph().placeholder("buffer")
    x.meta["val"], buffer.meta["val"] = torch.empty(1 << 20, device="meta"), torch.empty(1 << 22, device="meta")
    graph = fx.Graph()
    copy_in = graph.call_function(torch.ops.aten.clone.default, (x,))  # stands for the time of reading and writing x
    copy_in.meta["val"] = x.meta["val"]
    gathering = graph.call_function(torch.ops.fsdp.all_gather_copy_in.default, ([x], buffer, [1 << 20], 1 << 20, 0))
    gathering.meta["val"] = (x.meta["val"], buffer.meta["val"])
    copying = graph.call_function(torch.ops.fsdp.copy_.default, (buffer, buffer))
    copying.meta["val"] = None
    assert node_cost(gathering, H100) == pytest.approx(node_cost(copy_in, H100), rel=1e-6)
    assert node_cost(copying, H100) == pytest.approx(2 * 4 * (1 << 22) / H100.memory_rate + H100.launch.vector)
    assert cost(copying) > MIN_COST_S


@pytest.mark.parametrize(
    ("op", "args", "kind"),
    [
        ("_c10d_functional_autograd::all_gather_into_tensor", ("x", 4, "tp"), "all_gather"),
        ("_c10d_functional_autograd::reduce_scatter_tensor", ("x", "sum", 4, "tp"), "reduce_scatter"),
        ("_c10d_functional_autograd::all_to_all_single", ("x", [1 << 10] * 4, [1 << 10] * 4, "tp"), "all_to_all"),
        ("_dtensor::shard_dim_alltoall", ("x", 0, 1, "tp"), "all_to_all"),
        ("_c10d_functional::isend", ("x", 1, 0, "tp"), "send_recv"),
        ("_c10d_functional::irecv", ("x", 1, 0, "tp"), "send_recv"),
        ("symm_mem::_low_contention_all_gather", ("x", "tp"), "all_gather"),
        ("symm_mem::two_shot_all_reduce_", ("x", "sum", "tp"), "all_reduce"),
    ],
)
def test_other_dialects_cost_what_their_collectives_do(op: str, args: tuple[Any, ...], kind: str) -> None:
    link = H100.between(NEAR["tp"])
    assert link is not None
    expected = collective_time(kind, BYTES, 4, link) + H100.launch.comm
    assert cost(node(op, *args)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("op", "more", "products"),
    [
        ("_scaled_dot_product_flash_attention", (), 2),
        ("_scaled_dot_product_efficient_attention", (None, True), 2),
        ("scaled_dot_product_attention", (), 2),
    ],
)
def test_attention_costs_its_products(op: str, more: tuple[Any, ...], products: int) -> None:
    shape = (4, 16, 1 << 12, 128)
    x = InputSpec("x", shape)

    def build(b: Any) -> Any:
        given = b.input("x")
        return b.call(f"aten::{op}", given, given, given, *more)

    program = spmd_program(Mesh.grid({"tp": 4}), [x], build)
    call = next(n for n in program.graphs[0].nodes if n.op == "call_function")
    flops = 2.0 * products * 4 * 16 * (1 << 12) ** 2 * 128
    assert cost(call) == pytest.approx(flops / H100.matmul_rate(torch.float32) + H100.launch.matmul, rel=1e-6)
