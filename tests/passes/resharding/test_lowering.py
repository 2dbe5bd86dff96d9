"""The lowering of resharding to communications and waits: what it writes, and that it keeps what programs mean."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import fx

from tcverify.errors import Unsupported
from tcverify.execution import ProcessGroupPool
from tcverify.ops import DeviceMesh, Layout, Resharding
from tcverify.ops.collective import REDUCTIONS
from tcverify.ops.dialects.host_ir import SCHEMAS
from tcverify.passes import disable_passes
from tcverify.passes.editing import named_arguments, op_name, set_argument
from tcverify.passes.resharding.decisions import BITWISE, plan_resharding
from tcverify.passes.resharding.lowering import ConvertOpToCommunication, identity
from tcverify.program import Program
from tcverify.program.global_view.builder import Placed, PlacedBuilder
from tcverify.verification.verifier import Verdict, verify
from tests.support.naive_layouts import is_resharding

MESHES = ("[0]", "[1]", "[0, 1, 2, 3]", "[0, 2, 3]", "[1, 0, 2]", "[1, 0]")
PLACEMENTS = ("replicated", "shard(0)", "shard(1)")
SHAPES = ((12, 12), (1, 12))
POSTS = {f"host_ir::{name}" for name in SCHEMAS}


def one(
    source: str,
    target: str,
    shape: Sequence[int] = (12, 12),
    *,
    dim: int | None = None,
    op: str = "sum",
    dtype: torch.dtype = torch.float32,
    world_size: int = 4,
) -> Program:
    """A program of one set or reduce."""
    b = PlacedBuilder(world_size)
    x = b.input("x", shape, source, dtype)
    y = b.set(x, target) if dim is None else b.reduce(x, dim, target, op)
    return b.build(y if dtype is torch.bool else b.call("aten::add.Tensor", y, y))


def lowered(program: Program, rank: int) -> fx.GraphModule:
    return ConvertOpToCommunication()(program.graph_module(rank))


def ops(gm: fx.GraphModule) -> list[str]:
    return [op_name(node).split("::")[1].split(".")[0] for node in gm.graph.nodes if op_name(node)]


def assert_sound(program: Program, **options: object) -> Verdict:
    verdict = verify(ConvertOpToCommunication(), program, **options)  # type: ignore[arg-type]
    assert verdict.status == "passed", ([f.title for f in verdict.findings], [d.detail for d in verdict.doubts])
    return verdict


def fits(source: str, target: str, shape: Sequence[int], dim: int | None) -> bool:
    """Whether a row of the table fits. Whatever is no resharding must fit, and take no communication."""
    made = Resharding(Layout.parse(source), Layout.parse(target), tuple(shape), dim, None if dim is None else "sum")
    try:
        found = [plan_resharding(made, rank, torch.float32) for rank in made.ranks]
    except Unsupported:
        assert is_resharding(made)
        return False
    assert is_resharding(made) or not any(decided.communications for decided in found)
    return True


def every_row(source_mesh: str, target_mesh: str, world_size: int) -> Iterator[tuple[Program, int]]:
    """Programs of all rows that fit between two meshes, and how many there are in each."""
    for shape in SHAPES:
        b, rows = PlacedBuilder(world_size), 0
        results: list[Placed] = []
        inputs = {}
        for placement in PLACEMENTS:
            layout = f"{source_mesh} {placement}"
            parts = Layout.parse(layout).parts(0) if placement == "shard(0)" else 1
            if shape[0] % parts == 0:
                inputs[layout] = b.input(f"x{len(inputs)}", shape, layout)
        for (layout, x), placement, dim in itertools.product(inputs.items(), PLACEMENTS, (None, 0, 1)):
            target = f"{target_mesh} {placement}"
            left = [size for at, size in enumerate(shape) if at != dim]
            axis = Layout.parse(target).sharding[0]
            parts = Layout.parse(target).mesh.size
            if (axis is not None and (axis >= len(left) or left[axis] % parts)) or not fits(layout, target, shape, dim):
                continue
            rows += 1
            # two stages: a local op, the resharding, and a local op
            y = b.call("aten::mul.Tensor", x, x)
            z = b.set(y, target) if dim is None else b.reduce(y, dim, target)
            results.append(b.call("aten::add.Tensor", z, z))
        yield b.build(*results), rows


Pools = Callable[[int], ProcessGroupPool]


# --------------------------------------------------------------------------------------------------------- what it means


@pytest.mark.parametrize(
    ("source", "target"),
    [
        # every mesh from and to another and itself; all pairs of them at night
        pytest.param(source, target, marks=[] if (j - i) % len(MESHES) < 2 else pytest.mark.slow)
        for i, source in enumerate(MESHES)
        for j, target in enumerate(MESHES)
    ],
)
def test_every_row_keeps_its_meaning(source: str, target: str) -> None:
    for program, rows in every_row(source, target, 5):
        assert rows >= 4
        assert assert_sound(program).changed


@pytest.mark.parametrize(
    ("source", "target"), [("[1, 0, 2]", "[0, 2, 3]"), ("[0, 1, 2, 3]", "[0, 1, 2, 3]"), ("[1, 0]", "[1]")]
)
def test_every_row_keeps_its_meaning_in_the_exact_domain(source: str, target: str) -> None:
    for program, _ in every_row(source, target, 4):
        assert assert_sound(program, domain="exact").domain == "exact"


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("[1, 0, 2]", "[1, 0, 2]"),
        ("[1, 0, 2]", "[0, 2, 3]"),
        ("[0, 1, 2, 3]", "[0, 1, 2, 3]"),
        ("[0, 2, 3]", "[1]"),
        ("[0]", "[1, 0, 2]"),
        ("[1]", "[0]"),
    ],
)
def test_every_row_keeps_its_meaning_on_gloo(source: str, target: str, pool: Pools) -> None:
    for program, _ in every_row(source, target, 4):
        assert "gloo" in assert_sound(program, confirm=pool(4)).executors


GRID = "[[0, 3, 1], [2, 4, 5]]"


@pytest.mark.parametrize(
    ("source", "target", "shape", "dim", "kind"),
    [
        ("shard(1), shard(0)", "shard(1), replicated", (6, 4), None, "all_gather"),
        ("shard(0), replicated", "replicated, replicated", (6, 4), None, "all_gather"),
        ("shard(0), shard(1)", "shard(0), replicated", (2, 6), None, "all_gather"),
        ("shard(0), shard(2)", "shard(0), shard(1)", (4, 6, 3), None, "all_to_all"),
        ("replicated, shard(0)", "replicated, shard(1)", (6, 3), None, "all_to_all"),
        ("shard(0), shard(1)", "shard(0), replicated", (2, 3, 4), 1, "all_reduce"),
        ("shard(0), shard(1)", "replicated, shard(0)", (4, 6, 4), 0, "all_reduce"),
        ("shard(0), shard(1)", "shard(1), shard(0)", (2, 3, 4), 0, "reduce_scatter"),
        ("shard(0), shard(1)", "shard(1), shard(0)", (4, 3, 4), 0, "reduce_scatter"),
        ("replicated, replicated", "shard(1), shard(0)", (6, 4), None, "clone"),
    ],
)  # fmt: skip
def test_meshes_of_two_dims(source: str, target: str, shape: tuple[int, ...], dim: int | None, kind: str) -> None:
    program = one(f"{GRID} {source}", f"{GRID} {target}", shape, dim=dim, world_size=6)
    assert_sound(program)
    assert kind in ops(lowered(program, 4))


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        # every reduction, and every dtype; all pairs of them at night
        pytest.param(op, dtype, marks=[] if i == 0 or j == 0 else pytest.mark.slow)
        for i, op in enumerate(REDUCTIONS)
        for j, dtype in enumerate([torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
    ],
)
def test_every_reduction_of_every_dtype(op: str, dtype: torch.dtype) -> None:
    b = PlacedBuilder(4)
    x = b.input("x", (6, 6, 2), "[2, 0, 1] shard(0)", dtype)  # local extent 2: reduced locally, then between ranks
    y = b.input("y", (3, 6, 2), "[2, 0, 1] shard(0)", dtype)
    targets = ("[2, 0, 1] replicated", "[2, 0, 1] shard(0)", "[3, 0] replicated")
    program = b.build(*(b.reduce(v, 0, target, op) for v in (x, y) for target in targets))
    if (dtype.is_floating_point and op in BITWISE) or (not dtype.is_floating_point and op == "avg"):
        with pytest.raises(Unsupported, match=f"'reduce': '.*' reduces .* by {op}, which is not supported"):
            lowered(program, 0)
        return
    for domain in ("float64", "exact", "native"):
        assert_sound(program, domain=domain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool])
def test_other_dtypes_on_gloo(dtype: torch.dtype, pool: Pools) -> None:
    b = PlacedBuilder(4)
    x = b.input("x", (6, 6), "[2, 0, 1] shard(0)", dtype)
    gathered = b.set(x, "[2, 0, 1] replicated"), b.set(x, "[1, 3] replicated"), b.set(x, "[2, 0, 1] shard(1)")
    most = b.reduce(x, 0, "[3, 1] replicated", "max"), b.reduce(x, 0, "[2, 0, 1] shard(0)", "max")
    assert_sound(b.build(*gathered, *most), confirm=pool(4))


def test_identities_change_nothing() -> None:
    for op, dtype in itertools.product(REDUCTIONS, (torch.float32, torch.int8, torch.uint8, torch.bool)):
        if op == "avg" or (dtype.is_floating_point and op in BITWISE):
            continue
        values = torch.tensor([-3.5, 0.0, 7.25, float("-inf"), float("inf")]) if dtype is torch.float32 else None
        values = torch.arange(-128, 128).to(dtype) if values is None else values
        if op == "sum" or dtype is torch.float32:
            values = values[values.isfinite()] if dtype.is_floating_point else values
        neutral = torch.full_like(values, identity(op, dtype))
        assert torch.equal(REDUCTIONS[op](values, neutral), values), (op, dtype)


def test_a_rooted_maximum_of_small_numbers() -> None:
    """The smallest positive number is no identity of max."""
    b = PlacedBuilder(3)
    x = b.input("x", (2, 4), "[0, 1] shard(0)")
    negative = b.call("aten::neg", b.call("aten::exp", x))
    assert_sound(b.build(b.reduce(negative, 0, "[2] replicated", "max")))
    b = PlacedBuilder(3)
    x = b.input("x", (2, 4), "[0, 1] shard(0)")
    assert_sound(b.build(b.reduce(b.call("aten::exp", x), 0, "[2] replicated", "min")))


def test_a_pipeline_over_meshes() -> None:
    b = PlacedBuilder(6)
    x = b.input("x", (12, 4), "[5] replicated")
    steps = ("[2, 4] shard(0)", "[0] replicated", "[0, 1, 4] replicated", "[1, 3] shard(0)", "[2] replicated")
    for layout in (*steps, "[4, 5] shard(0)"):
        x = b.call("aten::sin", b.set(x, layout))
    assert_sound(b.build(x))


def test_a_chain_of_everything_on_one_mesh(pool: Pools) -> None:
    b = PlacedBuilder(4)
    mesh = "[1, 3, 0]"
    x = b.input("x", (6, 9), f"{mesh} shard(0)")
    y = b.set(x, f"{mesh} shard(1)")
    z = b.set(b.call("aten::relu", y), f"{mesh} shard(0)")
    whole = b.set(z, f"{mesh} replicated")
    least = b.reduce(x, 0, f"{mesh} shard(0)", "min")
    assert_sound(b.build(whole, b.set(least, f"{mesh} replicated"), y), confirm=pool(4))


@pytest.mark.parametrize(
    ("source", "target", "dim"),
    [
        ("[0, 1] shard(0)", "[0, 1] replicated", None),
        ("[0, 1] shard(0)", "[2] replicated", None),
        ("[0, 1] shard(0)", "[1, 2] shard(0)", None),
        ("[0, 1] shard(0)", "[0, 1] shard(2)", None),
        ("[0, 1] replicated", "[2, 3] replicated", None),
        ("[0, 1] replicated", "[2, 3] shard(0)", None),
        ("[0, 1] replicated", "[0, 1] shard(1)", None),
        ("[0, 1] shard(0)", "[0, 1] replicated", 0),
        ("[0, 1] shard(0)", "[0, 1] shard(0)", 0),
        ("[0, 1] shard(0)", "[2, 0] replicated", 0),
    ],
)
def test_operands_that_are_not_contiguous_are_cloned(source: str, target: str, dim: int | None, pool: Pools) -> None:
    b = PlacedBuilder(4)
    x = b.input("x", (2, 6, 4), source)
    turned = b.call("aten::transpose.int", x, 1, 2)
    y = b.set(turned, target) if dim is None else b.reduce(turned, dim, target)
    program = b.build(b.call("aten::neg", y))
    assert "clone" in ops(lowered(program, 0))
    assert_sound(program, confirm=pool(4))


def test_shards_without_elements() -> None:
    for source, target, dim in (
        ("shard(0)", "replicated", None),
        ("shard(0)", "shard(1)", None),
        ("shard(1)", "replicated", 1),
    ):
        for mesh in ("[1, 0]", "[2, 3]") if target == "replicated" else ("[1, 0]",):
            assert_sound(one(f"[1, 0] {source}", f"{mesh} {target}", (0, 2), dim=dim))


def test_reading_one_result_twice_and_resharding_one_operand_twice() -> None:
    b = PlacedBuilder(3)
    x = b.input("x", (6, 4), "[0, 1, 2] shard(0)")
    whole, twice = b.set(x, "[0, 1, 2] replicated"), b.set(x, "[0, 1, 2] replicated")
    assert_sound(b.build(whole, b.call("aten::add.Tensor", whole, twice)))


# --------------------------------------------------------------------------------------------------------- what it writes


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (
            one("[1, 2] shard(0)", "[0, 2] replicated"),
            {
                0: ["empty", "gather", "wait"],
                1: ["gather", "wait", "gather", "wait"],
                2: ["gather", "wait", "empty", "gather", "wait"],
            },
        ),
        (
            one("[2] replicated", "[1, 0] shard(0)"),
            {0: ["empty", "scatter", "wait"], 1: ["empty", "scatter", "wait"], 2: ["scatter", "wait"]},
        ),
        (
            one("[1, 2] shard(0)", "[0, 1] shard(0)"),
            {0: ["empty", "recv", "wait"], 1: ["send", "wait", "empty", "recv", "wait"], 2: ["send", "wait"]},
        ),
        (one("[2, 3] replicated", "[0, 1] replicated"), {2: ["broadcast", "wait"], 3: []}),
        (one("[0, 1] replicated", "[0, 1] shard(1)"), {0: ["slice", "clone"], 1: ["slice", "clone"]}),
        (one("[0, 1] shard(0)", "[0, 1] shard(0)"), {0: ["clone"]}),
        (one("[0, 1] shard(1)", "[0, 1] shard(0)", dim=0), {0: ["sum", "select", "clone"]}),
        (
            one("[0, 1] shard(0)", "[1, 2] replicated", dim=0, op="max"),
            {
                0: ["amax", "reduce", "wait", "reduce", "wait"],
                1: ["amax", "empty", "unsqueeze", "reduce", "wait", "reduce", "wait"],
                2: ["full", "empty", "unsqueeze", "reduce", "wait"],
            },
        ),
        (
            one("[0, 1] shard(0)", "[2] replicated", (2, 4), dim=0, op="avg"),
            {0: ["reduce", "wait"], 2: ["full", "empty", "unsqueeze", "reduce", "wait", "div"]},
        ),
        (
            one("[0, 1] shard(0)", "[0, 1] shard(1)"),
            {0: ["view", "permute", "clone", "empty", "all_to_all", "wait", "permute", "view"]},
        ),
        (
            one("[0, 1] shard(1)", "[0, 1] shard(0)"),
            {0: ["view", "permute", "empty", "all_to_all", "wait", "permute", "clone", "view"]},
        ),
    ],
)
def test_what_every_rank_does(program: Program, expected: dict[int, list[str]]) -> None:
    for rank, names in expected.items():
        found = ops(lowered(program, rank))
        assert found[: len(names)] == names
        assert found[len(names) :] in ([], ["add"])


def test_every_communication_is_waited_for_at_once_and_outputs_are_allocated_where_they_are_read() -> None:
    for source, target in itertools.product(MESHES, MESHES):
        for program, _ in every_row(source, target, 4):
            for rank in range(4):
                nodes = list(lowered(program, rank).graph.nodes)
                assert not {"multidevice::set", "multidevice::reduce"} & {op_name(node) for node in nodes}
                for node, after in itertools.pairwise(nodes):
                    if op_name(node) in POSTS:
                        assert op_name(after) == "host_ir::wait"
                        assert after.args == (node,)
                        given = named_arguments(node)
                        assert given.get("x") is None or given["x"].meta["val"].is_contiguous()
                        assert rank in given.get("team", [rank])
                    if op_name(node) == "aten::empty.memory_format":
                        assert rank in DeviceMesh.nested(json.loads(target))
                        assert node.users


def test_the_team_and_the_axis_of_a_reduce_scatter() -> None:
    gm = lowered(one("[1, 0, 2] shard(0)", "[1, 0, 2] shard(0)", (3, 6, 4), dim=0), 2)
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.host_ir.reduce_scatter.default)
    assert node.args[1:] == (1, "sum", [1, 0, 2])  # counted in the operand, whose reduced dim stays
    assert tuple(node.meta["val"].shape) == (1, 2, 4)


def test_results_say_their_layout_and_local_ops_keep_their_stream_axis() -> None:
    b = PlacedBuilder(2)
    x = b.input("x", (4, 4), "[0, 1] shard(0)")
    y = b.set(x, "[0, 1] replicated", stream_axis=0)
    gm = lowered(b.build(b.call("aten::relu", y, stream_axis=1)), 0)
    (out,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.empty.memory_format)
    assert out.meta["layout"] == "[0, 1] replicated"
    assert "stream_axis" not in out.meta
    (relu,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    assert relu.args == (out,)
    assert relu.meta["stream_axis"] == 1


def test_it_counts_kinds() -> None:
    program = one("[1, 2] shard(0)", "[0, 2] replicated")
    for rank, kinds in {0: {"gather": 1}, 1: {"gather": 2}, 2: {"gather": 2}}.items():
        chosen = ConvertOpToCommunication()
        chosen(program.graph_module(rank))
        assert {kind: count for kind, count in chosen.rewrites.items() if count} == kinds
    chosen = ConvertOpToCommunication()
    gm = chosen(one("[2, 3] replicated", "[0, 1] replicated").graph_module(3))
    assert (chosen.rewrites["idle"], ops(gm)) == (1, [])


# ------------------------------------------------------------------------------------------------------ what it leaves


def test_disabled_it_changes_nothing() -> None:
    gm = one("[0, 1] shard(0)", "[0, 1] replicated").graph_module(0)
    before = gm.code
    with disable_passes("convert_op_to_communication"):
        assert ConvertOpToCommunication()(gm) is gm
    assert ConvertOpToCommunication(enabled=False)(gm).code == before
    assert ConvertOpToCommunication()(gm).code != before


def test_a_second_application_changes_nothing() -> None:
    gm = lowered(one("[0, 1] shard(0)", "[2] replicated"), 0)
    before = gm.code
    assert ConvertOpToCommunication()(gm).code == before


def test_a_refusal_names_the_op_and_leaves_the_graph_alone() -> None:
    b = PlacedBuilder(4)
    x = b.input("x", (4, 4), "[0, 1] shard(0)")
    fine = b.set(x, "[0, 1] replicated")
    program = b.build(fine, b.set(b.set(x, "[2, 3] shard(0)"), "[0, 1, 2, 3] shard(0)"))
    gm = program.graph_module(2)
    before = gm.code
    with pytest.raises(Unsupported, match=r"^'set_3': .* 2 senders and 4 receivers"):
        ConvertOpToCommunication()(gm)
    assert gm.code == before
    assert [doubt.reason for doubt in verify(ConvertOpToCommunication(), program).doubts] == ["declined"]


def test_a_reduction_that_nobody_knows_is_refused() -> None:
    gm = one("[0, 1] shard(0)", "[0, 1] replicated", dim=0).graph_module(0)
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.multidevice.reduce.default)
    set_argument(node, "reduce_op", "premul")
    with pytest.raises(Unsupported, match="'reduce': reduction 'premul' is not known"):
        ConvertOpToCommunication()(gm)


def test_sizes_that_do_not_divide_are_refused() -> None:
    gm = one("[0, 1, 2] replicated", "[0, 1, 2] shard(0)").graph_module(0)
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.multidevice.set.default)
    set_argument(node, "shape", [13, 12])
    with pytest.raises(Unsupported, match=r"^'set_1': .* cannot divide size 13 of dim 0 evenly by 3 ranks"):
        ConvertOpToCommunication()(gm)


def test_an_operand_without_metadata_is_refused() -> None:
    gm = one("[0, 1] shard(0)", "[0, 1] replicated").graph_module(0)
    del next(iter(gm.graph.nodes)).meta["val"]
    with pytest.raises(Unsupported, match="'set_1': the metadata of its operand 'x'"):
        ConvertOpToCommunication()(gm)


def test_a_rank_that_gets_nothing_and_names_it_has_a_value_without_elements() -> None:
    gm = one("[1, 0] replicated", "[2] replicated").graph_module(0)
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.multidevice.set.default)
    gm.graph.output_node().args = ((node,),)
    ConvertOpToCommunication()(gm)
    (value,) = gm.graph.output_node().args[0]
    assert op_name(value) == "aten::empty.memory_format"
    assert tuple(value.meta["val"].shape) == (0,)


def test_a_chain_of_thousands_of_ops() -> None:
    b = PlacedBuilder(2)
    x = b.input("x", (2, 2), "[0, 1] shard(0)")
    for _ in range(1500):
        x = b.set(b.set(x, "[0, 1] replicated"), "[0, 1] shard(0)")
    chosen = ConvertOpToCommunication()
    chosen(b.build(x).graph_module(0))
    assert (chosen.rewrites["all_gather"], chosen.rewrites["local"]) == (1500, 1500)
