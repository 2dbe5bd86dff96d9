"""The time of a node: hand-computed rooflines and collectives, on specs and on fake tensors alike."""

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tcverify.cost import (
    MIN_COST_S,
    PROFILES,
    DeviceProfile,
    Interconnect,
    LaunchCosts,
    collective_time,
    node_cost,
)
from tcverify.errors import ProgramError
from tcverify.ops import TensorSpec, infer, new_fake_mode, resolve
from tcverify.program import GraphBuilder, InputSpec, Mesh, Program, spmd_program
from tcverify.program.graph import RankConstant

F32, BF16, I64 = torch.float32, torch.bfloat16, torch.int64
SWITCH = Interconnect("switch", 4, "clos", 1e9, 1e-6)
NETWORK = Interconnect("network", 4, "clos", 1e8, 1e-5)
#: A byte of memory takes a nanosecond, a FLOP of a product too, another FLOP ten.
SLOW = DeviceProfile("slow", (NETWORK, SWITCH), {F32: 1e9, BF16: 2e9}, {F32: 1e8, BF16: 2e8}, 1e9, 1 << 30)
LAUNCH = DeviceProfile(
    "launch", (SWITCH,), {F32: 1e18}, {F32: 1e18}, 1e18, 1 << 30, launch=LaunchCosts(3e-6, 2e-6, 5e-6)
)


def spec(*shape: int, dtype: torch.dtype = F32) -> TensorSpec:
    return TensorSpec.contiguous(shape, dtype)


def call(op: str, *args: Any, constants: dict[str, Any] | None = None, **kwargs: Any) -> fx.Node:
    """A node that calls `op`, its metadata `TensorSpec`s; specs among the arguments become placeholders."""
    graph = fx.Graph()
    values: dict[fx.Node, Any] = {}

    def operand(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            node = graph.placeholder(f"x{len(graph.nodes)}")
            node.meta["val"] = values[node] = value
            return node
        return [operand(v) for v in value] if isinstance(value, list) else value

    def known(value: Any) -> Any:
        if isinstance(value, RankConstant):
            return (constants or {})[value.name]
        if isinstance(value, list):
            return [known(v) for v in value]
        return values[value] if isinstance(value, fx.Node) else value

    given_args, given_kwargs = [operand(a) for a in args], {k: operand(v) for k, v in kwargs.items()}
    target = resolve(op)
    node = graph.call_function(target, tuple(given_args), given_kwargs)
    node.meta["val"] = infer(
        target,
        [known(a) for a in given_args],
        {k: known(v) for k, v in given_kwargs.items()},
        itertools.count(100).__next__,
    )
    return node


def cost(node: fx.Node, device: DeviceProfile | None = SLOW, **constants: Any) -> float:
    found = node_cost(node, device, constants)
    assert found is not None
    return found


# -------------------------------------------------------------------------------------------------------------- compute


def test_a_large_product_is_bound_by_the_matrix_units() -> None:
    node = call("aten::mm", spec(100, 200), spec(200, 300))
    assert cost(node) == pytest.approx(2 * 100 * 200 * 300 / 1e9)


def test_a_thin_product_is_bound_by_memory() -> None:
    node = call("aten::mm", spec(1, 1, dtype=BF16), spec(1, 5000, dtype=BF16))
    assert cost(node) == pytest.approx((1 + 5000 + 5000) * 2 / 1e9)


def test_the_rate_is_that_of_the_dtype() -> None:
    wide = cost(call("aten::mm", spec(100, 200), spec(200, 300)))
    assert cost(call("aten::mm", spec(100, 200, dtype=BF16), spec(200, 300, dtype=BF16))) == pytest.approx(wide / 2)


@pytest.mark.parametrize(
    ("node", "flops"),
    [
        (call("aten::bmm", spec(3, 40, 50), spec(3, 50, 60)), 2 * 3 * 40 * 50 * 60),
        (call("aten::addmm", spec(300), spec(100, 200), spec(200, 300)), 2 * 100 * 200 * 300),
        (call("aten::linear", spec(4, 100, 200), spec(300, 200)), 2 * 400 * 200 * 300),
        (call("aten::matmul", spec(2, 100, 200), spec(200, 300)), 2 * 200 * 200 * 300),
        (call("python::matmul", spec(100, 200), spec(200, 300)), 2 * 100 * 200 * 300),
        # 8 heads of 32: queries × keys, then × values
        (
            call("tensor_cast::attention", spec(2, 64, 256), spec(2, 96, 4, 32), spec(2, 96, 4, 32), *[None] * 5),
            2 * 2 * (2 * 64 * 256) * 96,
        ),
        # each routed row by the matrix of one expert
        (
            call("tensor_cast::routed_matmul", spec(640, 200), spec(4, 200, 300), None, spec(320, 2, dtype=I64)),
            2 * 640 * 200 * 300,
        ),
        (
            call("tensor_cast::grouped_matmul", [spec(140, 200), spec(500, 200)], [spec(200, 300)] * 2, [None, None]),
            2 * 640 * 200 * 300,
        ),
    ],
    ids=["bmm", "addmm", "linear", "matmul", "python", "attention", "routed", "grouped"],
)
def test_flops_of_products(node: fx.Node, flops: int) -> None:
    assert cost(node) == pytest.approx(flops / 1e9)


@pytest.mark.parametrize(
    ("node", "flops_per_element"),
    [
        (call("aten::add.Tensor", spec(1000), spec(1000)), 1),
        (call("tensor_cast::rms_norm", spec(10, 100), spec(100), 1e-6), 4),
        (call("tensor_cast::add_rms_norm2", spec(10, 100), spec(10, 100), spec(100), 1e-6), 5),
        (call("aten::_softmax", spec(10, 100), 1, False), 5),
        (call("aten::sum.dim_IntList", spec(10, 100), [1]), 1),
        (call("tensor_cast::moe_gating_top_k_softmax", spec(10, 100), 4), 6),
    ],
    ids=["add", "rms_norm", "add_rms_norm2", "softmax", "sum", "gating"],
)
def test_elementwise_arithmetic_runs_on_the_vector_units(node: fx.Node, flops_per_element: int) -> None:
    fast_memory = DeviceProfile("m", (SWITCH,), {F32: 1e9}, {F32: 1e8}, 1e15, 1 << 30)
    assert cost(node, fast_memory) == pytest.approx(flops_per_element * 1000 / 1e8)


def test_what_moves_bytes_alone_is_bound_by_memory() -> None:
    assert cost(call("aten::clone", spec(1000))) == pytest.approx(8000 / 1e9)
    assert cost(call("aten::cat", [spec(400), spec(600)])) == pytest.approx(8000 / 1e9)
    routed = call("tensor_cast::init_routing_v2", spec(10, 100), spec(10, 2, dtype=I64))
    assert cost(routed) == pytest.approx((4000 + 160 + 8000) / 1e9)
    assert cost(call("aten::full", [1000], 1.0, dtype=F32)) == pytest.approx(1000 / 1e8)


def test_the_bytes_of_every_result_count() -> None:
    fast = DeviceProfile("m", (SWITCH,), {F32: 1e18}, {F32: 1e18}, 1e9, 1 << 30)
    one = cost(call("tensor_cast::add_rms_norm", spec(10, 100), spec(10, 100), spec(100), 1e-6), fast)
    two = cost(call("tensor_cast::add_rms_norm2", spec(10, 100), spec(10, 100), spec(100), 1e-6), fast)
    assert two - one == pytest.approx(4000 / 1e9)


def test_an_embedding_reads_the_rows_it_picks() -> None:
    node = call("aten::embedding", spec(50_000, 100), spec(8, dtype=I64))
    fast = DeviceProfile("m", (SWITCH,), {F32: 1e18}, {F32: 1e18}, 1e9, 1 << 30)
    assert cost(node, fast) == pytest.approx((2 * 8 * 100 * 4 + 8 * 8) / 1e9)


def test_arguments_by_name_count_as_those_by_position() -> None:
    positional = call("aten::mm", spec(100, 200), spec(200, 300))
    assert cost(call("aten::mm", self=spec(100, 200), mat2=spec(200, 300))) == cost(positional)


def test_launches_cost_by_class() -> None:
    assert cost(call("aten::mm", spec(2, 2), spec(2, 2)), LAUNCH) == pytest.approx(3e-6)
    assert cost(call("aten::relu", spec(2, 2)), LAUNCH) == pytest.approx(2e-6)
    assert cost(call("tensor_cast::all_reduce", spec(2, 2), 0, [0]), LAUNCH) == pytest.approx(5e-6)


# ---------------------------------------------------------------------------------------------------------- collectives


@pytest.mark.parametrize(
    ("node", "kind", "contribution", "members"),
    [
        (call("tensor_cast::all_reduce", spec(1000), 0, [0, 1]), "all_reduce", 4000, 2),
        (call("tensor_cast::all_reduce", spec(1000, dtype=BF16), 3, [3, 2, 1, 0]), "all_reduce", 2000, 4),
        (call("tensor_cast::reduce_scatter", spec(1000), 0, 0, [0, 1]), "reduce_scatter", 4000, 2),
        (call("tensor_cast::all_gather", spec(1000), 0, 0, [0, 1]), "all_gather", 4000, 2),
        (call("tensor_cast::all_to_all", spec(8, 100), [9, 1], [4, 4], 0, [0, 1]), "all_to_all", 4000, 2),
        (call("tensor_cast::pipeline_send_recv", spec(1000), 0, 1, 0, 1), "send_recv", 4000, 2),
    ],
    ids=["all_reduce", "all_reduce 4", "reduce_scatter", "all_gather", "all_to_all", "send_recv"],
)
def test_collectives_take_what_the_model_says(node: fx.Node, kind: str, contribution: int, members: int) -> None:
    assert cost(node) == pytest.approx(max(collective_time(kind, contribution, members, SWITCH), _moved(node) / 1e9))


def _moved(node: fx.Node) -> int:
    return (
        4
        * sum(n.meta["val"].numel for n in (node, *node.all_input_nodes))
        // (2 if node.meta["val"].dtype is BF16 else 1)
    )


def test_the_group_decides_over_what_it_goes() -> None:
    near = cost(call("tensor_cast::all_reduce", spec(1000), 0, [0, 1]))
    far = cost(call("tensor_cast::all_reduce", spec(1000), 0, [0, 4]))
    assert far == pytest.approx(collective_time("all_reduce", 4000, 2, NETWORK))
    assert far > 5 * near


def test_a_fused_op_takes_the_longer_of_both_parts() -> None:
    compute_bound = call("tensor_cast::matmul_all_reduce", spec(10, 5000), spec(5000, 10), None, 0, [0, 1])
    assert cost(compute_bound) == pytest.approx(2 * 10 * 5000 * 10 / 1e9)
    comm_bound = call("tensor_cast::matmul_all_reduce", spec(100, 2), spec(2, 100), None, 0, [0, 4])
    assert cost(comm_bound) == pytest.approx(collective_time("all_reduce", 40_000, 2, NETWORK))


def test_quantised_linears_multiply_as_many_elements_as_they_hold() -> None:
    rest = None, None, None, None, torch.float32
    bytes_of_x, bytes_of_w = spec(500, 400, dtype=torch.uint8), spec(400, 500, dtype=torch.uint8)
    scales = spec(500, 25), spec(500, 25)
    plain = call("aten::mm", spec(500, 400), spec(400, 500))
    int8 = call("tensor_cast::static_quant_linear", spec(500, 400), bytes_of_w, spec(1), *rest)
    int4 = call("tensor_cast::static_quant_linear_int4", spec(500, 800), bytes_of_w, spec(1), *rest)
    mxfp4 = call("tensor_cast::mxfp4_linear", bytes_of_x, bytes_of_w, *scales, None, torch.float32)
    assert cost(int8) == pytest.approx(cost(plain))
    assert cost(int4) == pytest.approx(2 * cost(int8))
    assert cost(mxfp4) == pytest.approx(cost(int4))


def test_a_fused_quantised_linear_reduces_its_result() -> None:
    operands = spec(100, 2), spec(2, 100, dtype=torch.int8), spec(1), None, None, None, None
    wide = call("tensor_cast::static_quant_linear_all_reduce", *operands, torch.float32, 0, [0, 4])
    narrow = call("tensor_cast::static_quant_linear_all_reduce", *operands, torch.bfloat16, 0, [0, 4])
    assert cost(wide) == pytest.approx(collective_time("all_reduce", 40_000, 2, NETWORK))
    assert cost(narrow) == pytest.approx(collective_time("all_reduce", 20_000, 2, NETWORK))


def test_groups_may_be_rank_constants() -> None:
    group = RankConstant("tp")
    node = call("tensor_cast::all_reduce", spec(1000), RankConstant("rank"), group, constants={"tp": [0, 1], "rank": 0})
    assert cost(node, SLOW, rank=0, tp=[0, 1]) == cost(call("tensor_cast::all_reduce", spec(1000), 0, [0, 1]))
    assert cost(node, SLOW, rank=0, tp=[0, 4]) == cost(call("tensor_cast::all_reduce", spec(1000), 0, [0, 4]))
    with pytest.raises(ProgramError, match="rank constant 'rank' has no value"):
        node_cost(node, SLOW)


# ------------------------------------------------------------------------------------------ given, unknown and least costs


def test_a_given_cost_goes_before_the_model() -> None:
    node = call("aten::mm", spec(100, 200), spec(200, 300))
    node.meta["cost_s"] = 0.25
    assert node_cost(node, SLOW) == 0.25
    assert node_cost(node, None) == 0.25
    node.meta["cost_s"] = 1e-9
    assert node_cost(node, None) == MIN_COST_S


def test_without_a_cost_and_a_device_nothing_is_known() -> None:
    node = call("aten::mm", spec(2, 2), spec(2, 2))
    assert node_cost(node, None) is None
    node.meta["cost_s"] = 2e-6
    assert node_cost(node, None) == 2e-6


def test_no_op_takes_less_than_a_microsecond() -> None:
    assert cost(call("aten::add.Tensor", spec(1), spec(1))) == MIN_COST_S
    assert cost(call("aten::add.Tensor", spec(0), spec(0))) == MIN_COST_S


def test_what_has_no_metadata_takes_a_microsecond() -> None:
    node = call("aten::mm", spec(1000, 1000), spec(1000, 1000))
    del node.args[0].meta["val"]  # type: ignore[union-attr]
    assert cost(node) == MIN_COST_S
    node = call("aten::mm", spec(1000, 1000), spec(1000, 1000))
    del node.meta["val"]
    assert cost(node) == MIN_COST_S


def test_symbolic_sizes_take_a_microsecond() -> None:
    mode = torch._subclasses.FakeTensorMode(shape_env=ShapeEnv())
    given = torch.empty(1000, 1000)
    torch._dynamo.mark_dynamic(given, 0)
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = mode.from_tensor(given)
    assert not isinstance(x.meta["val"].shape[0], int)
    doubled = graph.call_function(torch.ops.aten.add.Tensor, (x, x))
    with mode:
        doubled.meta["val"] = x.meta["val"] + x.meta["val"]
    size = graph.call_function(torch.ops.aten.sym_size.int, (x, 0))
    size.meta["val"] = x.meta["val"].shape[0]
    viewed = graph.call_function(torch.ops.aten.reshape.default, (x, [size, 1000]))
    viewed.meta["val"] = torch.empty(1000, 1000, device="meta")
    assert cost(doubled) == MIN_COST_S
    assert cost(size) == MIN_COST_S
    assert cost(viewed) == MIN_COST_S


def test_ops_without_a_meaning_count_their_bytes() -> None:
    def mystery(x: torch.Tensor) -> torch.Tensor:
        return x

    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = spec(1000)
    node = graph.call_function(mystery, (x,))
    node.meta["val"] = spec(1000)
    slow_memory = DeviceProfile("m", (SWITCH,), {F32: 1e18}, {F32: 1e18}, 1e6, 1 << 30)
    assert cost(node, slow_memory) == pytest.approx(8000 / 1e6)
    method = graph.call_method("relu", (x,))
    method.meta["val"] = spec(1000)
    assert cost(method, slow_memory) == MIN_COST_S


# ---------------------------------------------------------------------------------------------------- both kinds of graph


def _program() -> Program:
    def build(b: GraphBuilder) -> object:
        x, w, gain = b.input("x"), b.input("w"), b.input("gain")
        y = b.call("aten::mm", x, w)
        y = b.call("tensor_cast::all_reduce", y, b.rank, b.group("tp"))
        both = b.call("tensor_cast::add_rms_norm2", y, y, gain, 1e-6)
        z = b.call("tensor_cast::matmul_all_reduce", b.getitem(both, 0), w, None, b.rank, b.group("tp"))
        return b.call("aten::cat", [z, b.getitem(both, 1)], 1)

    inputs = [InputSpec("x", (64, 128)), InputSpec("w", (128, 128)), InputSpec("gain", (128,))]
    return spmd_program(Mesh.grid({"dp": 2, "tp": 4}), inputs, build)


def calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("profile", PROFILES.values(), ids=list(PROFILES))
def test_graphs_of_programs_and_of_ranks_cost_the_same(profile: DeviceProfile) -> None:
    program = _program()
    for rank in (0, 5):
        shared = program.graphs[program.ranks[rank].graph]
        bound = program.graph(rank)
        in_program = [cost(node, profile, **program.ranks[rank].constants) for node in calls(shared)]
        in_rank = [cost(node, profile) for node in calls(bound)]
        assert in_program == in_rank
        assert min(in_rank) >= MIN_COST_S


OPS: dict[str, Callable[[int], fx.Node]] = {
    "mm": lambda n: call("aten::mm", spec(n, 64), spec(64, 64)),
    "add": lambda n: call("aten::add.Tensor", spec(n, 64), spec(n, 64)),
    "rms_norm": lambda n: call("tensor_cast::rms_norm", spec(n, 64), spec(64), 1e-6),
    "attention": lambda n: call(
        "tensor_cast::attention", spec(1, n, 64), spec(1, n, 2, 32), spec(1, n, 2, 32), *[None] * 5
    ),
    "all_reduce": lambda n: call("tensor_cast::all_reduce", spec(n, 64), 0, [0, 1]),
    "all_gather": lambda n: call("tensor_cast::all_gather", spec(n, 64), 0, 0, [0, 1]),
    "matmul_all_reduce": lambda n: call("tensor_cast::matmul_all_reduce", spec(n, 64), spec(64, 64), None, 0, [0, 1]),
    "fp8_linear": lambda n: call("tensor_cast::fp8_linear", spec(n, 64), spec(64, 64), spec(1), spec(64), None, None),
}


@settings(deadline=None)
@given(
    st.sampled_from(sorted(OPS)),
    st.integers(1, 4096),
    st.integers(1, 4096),
    st.sampled_from([SLOW, *PROFILES.values()]),
)
def test_larger_shapes_never_take_less_time(op: str, a: int, b: int, profile: DeviceProfile) -> None:
    small, large = sorted((a, b))
    assert cost(OPS[op](small), profile) <= cost(OPS[op](large), profile)


def test_costs_of_ten_thousand_nodes_are_known_at_once() -> None:
    mode = new_fake_mode()
    with mode:
        value = torch.empty(64, 64)
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = value
    for _ in range(5_000):
        x = graph.call_function(torch.ops.aten.mm.default, (x, x))
        x.meta["val"] = value
        x = graph.call_function(resolve("tensor_cast::all_reduce"), (x, 0, [0, 1, 2, 3]))
        x.meta["val"] = value
    graph.output(x)
    profile = PROFILES["h100-sxm"]
    started = time.perf_counter()
    costs = [node_cost(node, profile) for node in calls(graph)]
    seconds = time.perf_counter() - started
    assert len(costs) == 10_000
    assert len(set(costs)) == 2
    assert seconds < 1.0  # 0.05 s on an idle core


# ------------------------------------------------------------------------------------------------------------- host IR


@pytest.mark.parametrize(
    ("op", "given", "kind", "share"),
    [
        ("all_gather", (spec(2, 4), 0, [0, 1, 2]), "all_gather", 32),
        ("all_reduce", (spec(2, 4), "sum", [0, 1, 2]), "all_reduce", 32),
        ("permute", (spec(2, 4), [1, 2, 0], [0, 1, 2]), "permute", 32),
        ("broadcast", (None, 0, [0, 1, 2]), "broadcast", 192),
        ("gather", (None, 0, 0, [0, 1, 2]), "gather", 96),
        ("gather", (spec(4, 4), 0, 0, [0, 1, 2]), "gather", 64),
        ("scatter", (None, 0, 0, [0, 1, 2]), "scatter", 192),
        ("reduce", (spec(12, 4), "sum", 0, [0, 1, 2]), "reduce", 192),
    ],
)
def test_communications_of_host_ir(op: str, given: tuple[Any, ...], kind: str, share: int) -> None:
    shape = {"all_gather": (6, 4), "all_reduce": (2, 4), "permute": (2, 4)}.get(op, (12, 4))
    node = call(f"host_ir::{op}", *given, out=spec(*shape))
    took = node_cost(node, LAUNCH)
    assert took == pytest.approx(collective_time(kind, share, 3, SWITCH) + LAUNCH.launch.comm)


def test_a_scatter_from_a_rank_that_keeps_nothing() -> None:
    took = node_cost(call("host_ir::scatter", spec(12, 4), 0, 0, [0, 1, 2], out=None), LAUNCH)
    assert took == pytest.approx(collective_time("scatter", 96, 3, SWITCH) + LAUNCH.launch.comm)


@pytest.mark.parametrize("op", ["wait", "deallocate", "synchronize", "set_current_stream"])
def test_streams_waits_and_frees_take_no_time(op: str) -> None:
    assert node_cost(call(f"host_ir::{op}", spec(4)), LAUNCH) == 0.0
