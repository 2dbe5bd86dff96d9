"""The strategies' tables and their total decoding."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
from torch import fx

from tcverify.errors import ProgramError, UsageError
from tcverify.execution import Lockstep
from tcverify.ops import qualified_name
from tcverify.program import Mesh, MeshDim, Program, dumps
from tcverify.registry.strategies import ALONE
from tcverify.strategies import STRATEGIES, WORLD_SIZES, all_meshes, decode, transformer_programs
from tcverify.strategies.choices import (
    BLOCK,
    HEADER,
    WIDTH,
    BlockChoices,
    TransformerSetting,
    decode_choices,
    encode_choices,
)
from tcverify.strategies.transformer.experts import decode_experts
from tcverify.strategies.transformer.overlap import decode_overlap
from tcverify.strategies.transformer.roles import roles_of
from tcverify.strategies.wild.programs import decode_wild

TP2 = Mesh.grid({"tp": 2})
GRID = Mesh.grid({"dp": 2, "tp": 2})


def drawn(mesh: Mesh, *blocks: dict[str, Any], **setting: Any) -> Program:
    return decode(mesh, encode_choices(setting, list(blocks)))


def ops(program: Program) -> list[str]:
    nodes = program.graphs[0].nodes
    return [qualified_name(n.target).split("::")[1] for n in nodes if n.op == "call_function"]


def group_names(program: Program) -> set[str]:
    reduces = [n for n in program.graphs[0].nodes if n.op == "call_function" and "all_reduce" in str(n.target)]
    return {n.args[-1].name for n in reduces}


def test_the_tables_are_in_the_order_of_the_records() -> None:
    assert [f.name for f in fields(TransformerSetting)] == list(HEADER)
    assert [f.name for f in fields(BlockChoices)] == list(BLOCK)


def test_no_choices_give_the_program_that_returns_its_input() -> None:
    program = decode(TP2, b"")
    assert program.size == 0
    assert [spec.name for spec in program.inputs] == ["x"]


@pytest.mark.parametrize("choices", [b"\xff" * WIDTH, b"\xff" * 3, bytes(range(256)), b"\0" * (2 * WIDTH)])
def test_bytes_of_any_length_and_value_decode(choices: bytes) -> None:
    setting, blocks = decode_choices(choices)
    assert len(blocks) == 2 * setting.layers
    assert Lockstep().run(decode(TP2, choices)).finished


def test_equal_choices_give_equal_programs() -> None:
    choices = bytes(i * 37 % 256 for i in range(WIDTH))
    assert dumps(decode(GRID, choices)) == dumps(decode(GRID, choices))


def test_choices_encode_what_they_decode_to() -> None:
    block = {"mixer": "swiglu", "norm": "fused2", "region": "begin-end", "tie": True}
    setting, blocks = decode_choices(encode_choices({"batch": 2, "dtypes": "bf16"}, [{}, block]))
    assert (setting.batch, setting.dtypes) == (2, "bf16")
    assert {name: getattr(blocks[1], name) for name in block} == block


@pytest.mark.parametrize("write", [decode, decode_overlap, decode_wild, decode_experts])
def test_sizes_may_be_many_times_as_large(write: Callable[[Mesh, bytes, int], Program]) -> None:
    choices = random.Random(3).randbytes(400)
    small, large = write(TP2, choices, 1), write(TP2, choices, 8)
    most = [max(size for spec in program.inputs for size in spec.shape) for program in (small, large)]
    assert most[1] >= 4 * most[0]  # heads and experts stay as few
    assert Lockstep().run(large).finished
    settings = [decode_choices(choices, times)[0] for times in (1, 8)]
    assert settings[1].hidden == 8 * settings[0].hidden


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(ValueError, match="no such choices: \\['normalise'\\]"):
        encode_choices({}, [{"normalise": True}])


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({"reduce": "all_reduce", "norm": "rms"}, ["all_reduce", "rms_norm"]),
        ({"reduce": "all_reduce", "norm": "fused"}, ["all_reduce", "add_rms_norm"]),
        ({"mixer": "direct", "reduce": "all_reduce", "norm": "unfused"}, ["all_reduce", "add.Tensor", "rms_norm"]),
        ({"mixer": "row", "reduce": "all_reduce"}, ["mm", "all_reduce"]),
        ({"mixer": "row", "reduce": "fused"}, ["matmul_all_reduce"]),
        ({"mixer": "row", "reduce": "fused", "bias": "before"}, ["matmul_all_reduce"]),
        ({"mixer": "row", "bias": "before"}, ["mm", "add.Tensor"]),
        ({"mixer": "row", "linear": "int8"}, ["static_quant_linear"]),
        ({"mixer": "row", "linear": "int4", "bias": "before"}, ["static_quant_linear_int4"]),
        ({"mixer": "row", "linear": "fp8", "reduce": "all_reduce"}, ["_to_copy", "fp8_linear", "all_reduce"]),
        ({"mixer": "row", "linear": "mxfp4", "reduce": "fused"}, ["mxfp4_linear_all_reduce"]),
        ({"mixer": "none", "linear": "int8", "norm": "rms"}, ["rms_norm"]),
        ({"reduce": "scatter-gather"}, ["reduce_scatter", "all_gather"]),
        ({"mixer": "bare-attention"}, ["view", "view", "attention"]),
        ({"mixer": "attention"}, ["mm", "mm", "mm", "view", "view", "attention", "mm"]),
        ({"region": "begin", "norm": "rms"}, ["_internal_mark_region_begin", "rms_norm"]),
        ({"region": "end-copy"}, ["_internal_mark_region_end", "_internal_copy_region"]),
        ({"reduce": "all_reduce", "view": "between"}, ["all_reduce", "view"]),
        ({"reduce": "all_reduce", "view": "before"}, ["view", "all_reduce"]),
        ({"norm": "fused2"}, ["add_rms_norm2", "getitem"]),
        ({"norm": "fused2", "keep": "tuple"}, ["add_rms_norm2", "getitem"]),
        ({"norm": "layer"}, ["layer_norm"]),
        ({"reduce": "all_reduce", "users": "gelu"}, ["all_reduce", "gelu"]),
        ({"reduce": "all_reduce", "users": "norm"}, ["all_reduce", "rms_norm"]),
        ({"reduce": "all_reduce", "users": "gelu", "inside": True}, ["all_reduce", "gelu"]),
    ],
)
def test_a_choice_adds_its_part_alone(block: dict[str, Any], expected: list[str]) -> None:
    assert ops(drawn(TP2, block)) == expected


@pytest.mark.parametrize("linear", ["int8", "int4", "fp8", "mxfp4"])
@pytest.mark.parametrize("layout", ["flat", "bsh", "sbh"])
@pytest.mark.parametrize("reduce", ["all_reduce", "fused"])
def test_a_quantised_projection_gives_results_of_ordinary_size(linear: str, layout: str, reduce: str) -> None:
    block = {"mixer": "attention", "linear": linear, "reduce": reduce}
    program = drawn(GRID, block, layout=layout, batch=2, hidden=8, entry="norm")
    (out,) = Lockstep().run(program).ranks[0].outputs
    assert out.shape == {"flat": (4, 8), "bsh": (2, 2, 8), "sbh": (2, 2, 8)}[layout]
    assert 0.1 < float(out.square().mean().sqrt()) < 4


def test_an_int4_weight_whose_rows_do_not_pair_up_on_a_rank_is_int8_instead() -> None:
    block = {"mixer": "gelu", "linear": "int4"}
    assert "static_quant_linear_int4" in ops(drawn(TP2, {}, block | {"width": 1}))  # two columns per rank
    assert "static_quant_linear" in ops(drawn(TP2, {}, block | {"width": 0}))


@pytest.mark.parametrize("mixer", ["bare-silu", "silu", "gelu", "swiglu"])
def test_mlp_mixers(mixer: str) -> None:
    op = mixer.removeprefix("bare-")
    assert op in ops(drawn(TP2, {}, {"mixer": mixer}))


def test_a_residual_of_a_batch_of_one_may_keep_its_rank() -> None:
    block = {"reduce": "all_reduce", "view": "between", "norm": "fused"}
    assert ops(drawn(TP2, block)).count("view") == 1
    assert ops(drawn(TP2, block | {"align": True})).count("view") == 2


def test_tied_weights_are_one_input() -> None:
    block = {"reduce": "all_reduce", "norm": "rms"}
    untied = drawn(TP2, block, block)
    tied = drawn(TP2, block, block | {"tie": True})
    assert len(untied.inputs) == len(tied.inputs) + 1


@pytest.mark.parametrize(("mesh", "expected"), [(GRID, {"dp"}), (TP2, {"tp"})])
def test_a_block_runs_over_dp_where_there_is_one(mesh: Mesh, expected: set[str]) -> None:
    assert group_names(drawn(mesh, {"mixer": "direct", "reduce": "all_reduce", "dp": True})) == expected


MARKER = "tensor_cast::_internal_mark_region_begin"


@pytest.mark.parametrize(
    ("inside", "users", "expected"),
    [
        (True, "output", ["output", "rms_norm"]),
        (True, "gelu", ["gelu", "rms_norm"]),
        (True, "add", ["add.Tensor", "rms_norm"]),
        (False, "output", ["rms_norm"]),
        (False, "add", ["rms_norm"]),
    ],
)
def test_others_read_a_region_s_value_behind_its_marker_or_before(
    inside: bool, users: str, expected: list[str]
) -> None:
    block = {"reduce": "all_reduce", "region": "begin", "norm": "rms", "users": users, "inside": inside}
    (marker,) = (n for n in drawn(TP2, block).graphs[0].nodes if qualified(n) == MARKER)
    assert sorted(qualified(user).split("::")[-1] for user in marker.users) == expected


def qualified(node: fx.Node) -> str:
    return qualified_name(node.target) if node.op == "call_function" else node.op


@pytest.mark.parametrize("dp", [False, True])
def test_a_twin_is_the_sum_of_the_same_addends_over_the_other_dim(dp: bool) -> None:
    block = {"mixer": "direct", "reduce": "all_reduce", "norm": "rms", "dp": dp, "twin": True}
    program = drawn(GRID, block)
    assert ops(program) == ["all_reduce", "rms_norm", "all_reduce", "rms_norm"]
    reduces = [n for n in program.graphs[0].nodes if qualified(n) == "tensor_cast::all_reduce"]
    assert reduces[0].args[0] is reduces[1].args[0]
    assert group_names(program) == {"dp", "tp"}


@pytest.mark.parametrize(("mesh", "norm"), [(TP2, "rms"), (GRID, "none")], ids=["one dim", "no norm"])
def test_where_nothing_has_a_twin(mesh: Mesh, norm: str) -> None:
    block = {"mixer": "direct", "reduce": "all_reduce", "norm": norm}
    assert dumps(drawn(mesh, block | {"twin": True})) == dumps(drawn(mesh, block))


def test_batches_are_sharded_over_dp() -> None:
    program = drawn(GRID, layout="bsh", data="shard", batch=2)
    assert [str(p) for _, p in program.inputs[0].placements] == ["shard(0)"]
    assert program.inputs[0].shape[0] == 4


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_listed_meshes_are_aligned(world_size: int) -> None:
    for mesh in all_meshes(world_size):
        assert mesh.world_size == world_size
        if not twice_all_ranks(mesh):
            assert not any(roles_of(mesh).astray.values()), f"{mesh}"


def twice_all_ranks(mesh: Mesh) -> bool:
    return len(mesh.dims) == 2 and all(len(dim.groups) == 1 for dim in mesh.dims)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_listed_meshes_have_ranks_with_two_groups_of_more_than_one(world_size: int) -> None:
    found = all_meshes(world_size)
    crossing = [m for m in found if len(m.dims) == 2 and all(len(g) > 1 for dim in m.dims for g in dim.groups)]
    assert len(crossing) >= 0.25 * len(found)
    assert all(m.dims[0].groups != m.dims[1].groups for m in crossing)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_meshes_cover_orders_and_two_groups(world_size: int) -> None:
    found = all_meshes(world_size)
    assert any(len(mesh.dims) == 2 for mesh in found)
    assert any(list(group) != sorted(group) for mesh in found for dim in mesh.dims for group in dim.groups)
    assert world_size == 2 or any(len({len(g) for g in dim.groups}) > 1 for mesh in found for dim in mesh.dims)


def test_a_world_size_without_meshes_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="no meshes are listed for world size 7"):
        transformer_programs(world_size=7)


def test_a_mesh_without_dims_is_a_program_error() -> None:
    with pytest.raises(ProgramError, match="at least one dim"):
        decode(Mesh(2, ()), b"")


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh.grid({"dp": 3, "tp": 2}),
        Mesh.grid({"pp": 2, "dp": 2, "tp": 2}),
        Mesh.grid({"model": 2}),
        Mesh(4, (MeshDim("dp", ((0, 2), (1, 3))), MeshDim("tp", ((0, 1), (3, 2))))),
        Mesh(3, (MeshDim("dp", ((0, 1), (2,))), MeshDim("tp", ((0,), (1, 2))))),
    ],
    ids=str,
)
def test_any_mesh_of_the_user_runs(mesh: Mesh) -> None:
    for i in range(20):
        program = decode(mesh, bytes((i * 91 + j * j * 57) % 256 for j in range(WIDTH)))
        run = Lockstep().run(program)
        assert run.finished, run.error


def test_what_is_sharded_over_tp_varies_over_a_dim_that_is_not_aligned() -> None:
    mesh = Mesh(4, (MeshDim("dp", ((0, 2), (1, 3))), MeshDim("tp", ((0, 1), (3, 2)))))
    program = drawn(mesh, {"mixer": "direct"})
    (spec,) = program.inputs
    assert {dim: str(p) for dim, p in spec.placements} == {"tp": "partial(sum)", "dp": "varying"}


@pytest.mark.parametrize(
    ("setting", "label"),
    [
        ({"dtypes": "bf16"}, "bf16"),
        ({"dtypes": "bf16-norm32"}, "mixed-dtypes"),
        ({"sequence": (0, 1)}, "few-tokens"),
        ({"layout": "sbh"}, "sbh"),
        ({"layout": "flat"}, "rank-reduced"),
        ({"degenerate": "zero_rows"}, "degenerate"),
        ({"entry": "reduce", "degenerate": "cancelling"}, "degenerate"),
    ],
)
def test_labels_name_the_setting(setting: dict[str, Any], label: str) -> None:
    assert label in drawn(TP2, **setting).labels


def test_labels_leave_out_what_is_dead() -> None:
    overwritten = {"norm": "rms"}
    assert "region" not in drawn(TP2, {"region": "copy"} | overwritten, {"mixer": "direct"}).labels


def test_layers_are_counted_by_what_is_alive() -> None:
    block = {"reduce": "all_reduce", "norm": "rms"}
    assert "layers=2" in drawn(TP2, block, block, block).labels
    assert "layers=0" in drawn(TP2, layers=4).labels


def test_strategies_by_name() -> None:
    blocking = ["structured", "near-miss", "aimed", "moe", "wild", "overlap"]
    asynchronous = ["functional", "sequence-functional", "data-parallel", "async-tp", "fsdp"]
    behind_autograd = ["traced", "peephole", "gram", "bucketing", "compiled", "effects"]
    assert set(STRATEGIES) == {
        "mixed",
        *blocking,
        *asynchronous,
        *behind_autograd,
        "resharding",
        *ALONE,
    }
    assert STRATEGIES["structured"] is transformer_programs


def test_tensor_parallelism_takes_the_dim_that_has_groups() -> None:
    alone, together = MeshDim("tp", ((0,), (1,))), MeshDim("dp", ((1, 0),))
    assert roles_of(Mesh(2, (together, alone))).main == "dp"
    assert roles_of(Mesh(2, (alone,))).main == "tp"
