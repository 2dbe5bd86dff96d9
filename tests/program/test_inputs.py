"""Input values: a pure function of seed, input and index; shards of one global tensor."""

import math
import os
from pathlib import Path

import pytest
import torch

from tcverify.domains import FLOAT64, Domain, Exact
from tcverify.errors import ProgramError
from tcverify.program import (
    PARTIAL,
    REPLICATED,
    VARYING,
    InputSpec,
    Mesh,
    MeshDim,
    Placement,
    Recipe,
    dumps,
    loads,
    shard,
    spmd_program,
)
from tcverify.program import inputs as inputs_module
from tcverify.program.inputs import RECIPES, prepare_inputs
from tests import warm

DRAWN = [kind for kind in RECIPES if kind != "given"]
GRID = Mesh.grid({"dp": 2, "tp": 2})

#: What input "x" of shape [2, 3] holds for seed 7: replays on other machines rely on it.
STORED = [
    0.6396005466857269,
    0.27866210176960693,
    -0.943874179279345,
    0.015565863809863911,
    -0.09633968860862319,
    0.5556276283517094,
]


def whole(spec: InputSpec, seed: int = 0) -> torch.Tensor:
    """The global value of a spec, in its dtype."""
    alone = InputSpec(spec.name, spec.shape, spec.dtype, recipe=spec.recipe)
    return alone.values(Mesh.grid({"one": 1}), 0, seed)


# ------------------------------------------------------------------------------------------------- pure function


def test_values_are_these_on_every_machine() -> None:
    values = InputSpec("x", (2, 3), torch.float64).values(GRID, 0, 7)
    assert values.flatten().tolist() == STORED


def test_values_are_equal_in_another_process() -> None:
    code = (
        "import torch; from tcverify.program import InputSpec, Mesh\n"
        "print(InputSpec('x', (2, 3), torch.float64).values(Mesh.grid({'one': 1}), 0, 7).flatten().tolist())"
    )
    ended, said, errors = warm.run("-c", code, cwd=Path.cwd(), env=os.environ)
    assert ended == 0, errors
    assert said.strip() == str(STORED)


@pytest.mark.parametrize("kind", DRAWN)
def test_two_calls_give_equal_values_that_share_nothing(kind: str) -> None:
    spec = InputSpec("x", (4, 6), recipe=Recipe(kind))
    first, second = spec.values(GRID, 0, 3), spec.values(GRID, 0, 3)
    assert torch.equal(first, second)
    first.add_(1)
    assert torch.equal(spec.values(GRID, 0, 3), second)


def test_another_seed_gives_other_values() -> None:
    spec = InputSpec("x", (4, 6))
    assert not (spec.values(GRID, 0, 1) == spec.values(GRID, 0, 2)).any()


def test_another_name_gives_other_values() -> None:
    assert not (InputSpec("x", (4, 6)).values(GRID, 0, 1) == InputSpec("y", (4, 6)).values(GRID, 0, 1)).any()


def test_a_value_depends_on_the_flat_index_alone() -> None:
    wide, tall = InputSpec("x", (4, 6)).values(GRID, 0, 1), InputSpec("x", (8, 3)).values(GRID, 0, 1)
    assert torch.equal(wide.flatten(), tall.flatten())


def test_values_are_spread_evenly_over_the_interval() -> None:
    values = InputSpec("x", (10_000,), torch.float64).values(GRID, 0, 0)
    assert values.abs().max() < 1
    assert abs(values.mean()) < 0.02
    assert abs(values.square().mean() - 1 / 3) < 0.01
    assert abs((values[1:] * values[:-1]).mean()) < 0.02


# ------------------------------------------------------------------------------------------------- placements


@pytest.mark.parametrize("rank", range(4))
def test_a_replicated_input_is_equal_on_all_ranks(rank: int) -> None:
    spec = InputSpec("x", (3, 4), placements=(("tp", REPLICATED),))
    assert torch.equal(spec.values(GRID, rank, 5), whole(spec, 5))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("size", [1, 4, 5, 7])
def test_shards_are_the_chunks_of_the_replicated_value(dim: int, size: int) -> None:
    shape = (size, 3) if dim == 0 else (3, size)
    mesh = Mesh.grid({"tp": 3})
    spec = InputSpec("x", shape, placements=(("tp", shard(dim)),))
    chunks = [spec.values(mesh, rank, 0) for rank in range(3)]
    assert torch.equal(torch.cat(chunks, dim), whole(spec))
    expected = [c.shape[dim] for c in whole(spec).chunk(3, dim)]
    assert [c.shape[dim] for c in chunks] == expected + [0] * (3 - len(expected))
    assert [spec.local_shape(mesh, rank) for rank in range(3)] == [tuple(c.shape) for c in chunks]


def test_the_position_in_the_group_picks_the_shard() -> None:
    mesh = Mesh(4, (MeshDim("tp", ((3, 0), (1, 2))),))
    spec = InputSpec("x", (4, 2), placements=(("tp", shard(0)),))
    first, second = whole(spec).chunk(2)
    for rank, expected in enumerate([second, first, second, first]):
        assert torch.equal(spec.values(mesh, rank, 0), expected)


def test_uneven_groups_cut_uneven_shards() -> None:
    mesh = Mesh(3, (MeshDim("tp", ((0,), (1, 2))),))
    spec = InputSpec("x", (4, 2), placements=(("tp", shard(0)),))
    assert [spec.local_shape(mesh, rank) for rank in range(3)] == [(4, 2), (2, 2), (2, 2)]


def test_two_shards_of_one_dim_nest_in_the_order_given() -> None:
    spec = InputSpec("x", (8,), placements=(("dp", shard(0)), ("tp", shard(0))))
    swapped = InputSpec("x", (8,), placements=(("tp", shard(0)), ("dp", shard(0))))
    assert [spec.bounds(GRID, rank)[0] for rank in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert [swapped.bounds(GRID, rank)[0] for rank in range(4)] == [(0, 2), (4, 6), (2, 4), (6, 8)]


def test_a_shard_of_a_missing_dim_is_refused() -> None:
    spec = InputSpec("x", (8,), placements=(("tp", shard(1)),))
    with pytest.raises(ProgramError, match=r"'x' of shape \[8\] cannot be sharded on dim 1"):
        spec.values(GRID, 0, 0)


@pytest.mark.parametrize("placement", [PARTIAL, VARYING])
def test_addends_differ_between_all_members_of_the_group(placement: object) -> None:
    spec = InputSpec("x", (3, 4), placements=(("tp", placement),))  # type: ignore[arg-type]
    values = [spec.values(GRID, rank, 0) for rank in range(4)]
    assert not (values[0] == values[1]).any()
    # ranks 0 and 2 stand at one position of their tp group, and the input is replicated over dp
    assert torch.equal(values[0], values[2])
    assert torch.equal(values[1], values[3])


def test_addends_are_sharded_over_another_dim() -> None:
    spec = InputSpec("x", (4, 2), placements=(("tp", PARTIAL), ("dp", shard(0))))
    unsharded = InputSpec("x", (4, 2), placements=(("tp", PARTIAL),))
    for rank in range(4):
        assert torch.equal(spec.values(GRID, rank, 0), unsharded.values(GRID, rank, 0).chunk(2)[rank // 2])


# ------------------------------------------------------------------------------------------------- recipes


@pytest.mark.parametrize("mesh", [Mesh.grid({"tp": 2}), Mesh.grid({"tp": 3}), Mesh(2, (MeshDim("tp", ((1, 0),)),))])
def test_cancelling_addends_sum_to_a_millionth_of_their_size(mesh: Mesh) -> None:
    spec = InputSpec("x", (4, 8), torch.float64, (("tp", PARTIAL),), Recipe("cancelling"))
    addends = torch.stack([spec.values(mesh, rank, 0) for rank in range(mesh.world_size)])
    total = addends.sum(0).abs().max()
    assert 1e-8 < total < 2e-6
    assert addends.abs().mean() > 0.1


def test_addends_over_two_dims_cancel_over_both_together() -> None:
    spec = InputSpec("x", (4, 8), torch.float64, (("dp", PARTIAL), ("tp", PARTIAL)), Recipe("cancelling"))
    addends = torch.stack([spec.values(GRID, rank, 0) for rank in range(4)])
    assert 1e-8 < addends.sum(0).abs().max() < 2e-6
    assert len({float(a[0, 0]) for a in addends}) == 4


def test_a_cancelling_input_that_does_not_vary_is_uniform() -> None:
    spec = InputSpec("x", (4, 8), recipe=Recipe("cancelling"))
    assert torch.equal(spec.values(GRID, 3, 0), InputSpec("x", (4, 8)).values(GRID, 3, 0))


def test_norm_weights_stay_between_half_and_three_halves_of_the_scale() -> None:
    values = InputSpec("w", (1000,), recipe=Recipe("norm_weight", 2.0)).values(GRID, 0, 0)
    assert 1.0 < values.min() < 1.1
    assert 2.9 < values.max() < 3.0


def test_a_constant_is_its_scale_everywhere() -> None:
    assert InputSpec("c", (2, 2), recipe=Recipe("constant", -1.5)).values(GRID, 0, 0).tolist() == [[-1.5] * 2] * 2


def test_integers_take_every_value_below_the_scale() -> None:
    values = InputSpec("i", (200,), torch.int64, recipe=Recipe("integers", 5)).values(GRID, 0, 0)
    assert values.dtype is torch.int64
    assert set(values.tolist()) == {0, 1, 2, 3, 4}


def test_wide_integers_are_none_that_floating_point_has() -> None:
    values = InputSpec("n", (200,), torch.int64, recipe=Recipe("wide")).values(GRID, 0, 0)
    assert (values.double().to(torch.int64) != values).all()
    assert 0 < (values < 0).sum() < 200
    short = InputSpec("n", (200,), torch.int32, recipe=Recipe("wide")).values(GRID, 0, 0)
    assert (short.float().double() != short).sum() > 150


def test_every_row_of_a_mask_may_attend_to_its_first_column() -> None:
    mask = InputSpec("m", (100, 20), torch.bool, recipe=Recipe("mask")).values(GRID, 0, 0)
    assert mask.dtype is torch.bool
    assert bool(mask[:, 0].all())
    assert 0.7 < mask[:, 1:].double().mean() < 0.8


def test_about_half_of_the_rows_are_zero_and_the_same_ones_for_all_addends() -> None:
    spec = InputSpec("x", (100, 4), placements=(("tp", PARTIAL),), recipe=Recipe("zero_rows"))
    zero = [(spec.values(GRID, rank, 0) == 0).all(1) for rank in (0, 1)]
    assert 30 < int(zero[0].sum()) < 70
    assert torch.equal(zero[0], zero[1])
    assert bool((spec.values(GRID, 0, 0)[~zero[0]] != 0).all())


@pytest.mark.parametrize("kind", DRAWN)
def test_every_recipe_makes_scalars_and_empty_tensors(kind: str) -> None:
    assert InputSpec("x", (), recipe=Recipe(kind)).values(GRID, 0, 0).shape == ()
    assert InputSpec("x", (2, 0), recipe=Recipe(kind)).values(GRID, 0, 0).shape == (2, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_are_rounded_to_the_dtype(dtype: torch.dtype) -> None:
    exact = InputSpec("x", (50,), torch.float64).values(GRID, 0, 0)
    rounded = InputSpec("x", (50,), dtype).values(GRID, 0, 0)
    assert rounded.dtype is dtype
    assert torch.equal(rounded, exact.to(dtype))
    assert not torch.equal(rounded.double(), exact)


def test_values_are_contiguous() -> None:
    spec = InputSpec("x", (4, 6), torch.float64, (("tp", shard(1)),))
    assert spec.values(GRID, 1, 0).stride() == (3, 1)


def test_an_unknown_recipe_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ProgramError, match="'gauss' is not an input recipe\n  hint: use one of uniform"):
        Recipe("gauss")


@pytest.mark.parametrize("scale", [math.inf, -math.inf, math.nan])
def test_a_scale_that_is_not_finite_is_refused(scale: float) -> None:
    with pytest.raises(ProgramError, match="is not finite"):
        Recipe("uniform", scale)


@pytest.mark.parametrize("kind", DRAWN)
def test_values_made_together_are_those_made_alone(kind: str) -> None:
    specs = [
        InputSpec("a", (4, 6), placements=(("tp", VARYING),), recipe=Recipe(kind)),
        InputSpec("b", (0, 3), recipe=Recipe(kind)),
        InputSpec("c", (), recipe=Recipe(kind)),
        InputSpec("a2", (3,), recipe=Recipe(kind, 2.0)),
    ]
    alone = [spec.values(GRID, 1, 41) for spec in specs]
    inputs_module._UNITS.clear()
    prepare_inputs(specs, GRID, 1, 41)
    assert all(torch.equal(x, spec.values(GRID, 1, 41)) for x, spec in zip(alone, specs, strict=True))


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("domain", [FLOAT64, Exact(1)], ids=lambda domain: domain.name)
@pytest.mark.parametrize("placement", [VARYING, PARTIAL, REPLICATED, shard(0)], ids=str)
def test_values_of_several_ranks_are_those_of_each(kind: str, domain: Domain, placement: Placement) -> None:
    values = tuple(float(n) for n in range(6)) if kind == "given" else ()
    recipe = Recipe(kind, 9.0 if kind == "integers" else 1.0, values)
    spec = InputSpec("x", (2, 3), torch.int64 if kind == "wide" else torch.float32, (("dp", placement),), recipe)
    ranks = [3, 0, 1]
    together = spec.values_of(GRID, ranks, 7, domain)
    assert torch.equal(together, torch.stack([spec.values(GRID, rank, 7, domain) for rank in ranks]))
    assert together.dtype == spec.values(GRID, 0, 7, domain).dtype


def test_given_values_are_the_same_for_all_members_or_told_by_coordinates() -> None:
    mesh = Mesh.grid({"dp": 2, "tp": 2})
    table = InputSpec("table", (2, 2), torch.int64, recipe=Recipe("given", values=(0, 1, 2, 3)))
    assert all(table.values(mesh, rank, 0).tolist() == [[0, 1], [2, 3]] for rank in range(4))
    offset = InputSpec("offset", (1,), torch.int64, (("tp", VARYING),), Recipe("given", values=(0, 6)))
    assert [offset.values(mesh, rank, 0).item() for rank in range(4)] == [0, 6, 0, 6]


def test_given_values_survive_files_and_the_exact_domain() -> None:
    mask = InputSpec("mask", (3,), recipe=Recipe("given", values=(0.5, -math.inf, 2.0)))
    program = spmd_program(Mesh.grid({"tp": 2}), [mask], lambda b: b.call("aten::neg", b.input("mask")))
    assert loads(dumps(program)).values(0)[0].tolist() == [0.5, -math.inf, 2.0]
    exact = mask.values(program.mesh, 0, 0, Exact(0))
    assert exact[1] == -math.inf
    assert (exact[0] * 2) % 1048573 == 1


def test_a_program_refuses_inputs_that_are_given_too_few_values() -> None:
    short = InputSpec("x", (3,), recipe=Recipe("given", values=(1.0, 2.0)))
    with pytest.raises(ProgramError, match="is given 2 values"):
        spmd_program(Mesh.grid({"tp": 2}), [short], lambda b: b.call("aten::neg", b.input("x")))
