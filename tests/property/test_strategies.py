"""What holds of every drawn program."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from tcverify.domains import FLOAT64
from tcverify.execution import Lockstep
from tcverify.ops import TensorSpec, qualified_name
from tcverify.program import Program, RankConstant, dumps, loads
from tcverify.strategies import WORLD_SIZES, all_meshes, decode, transformer_programs
from tcverify.strategies.choices import WIDTH
from tests.sizes import by_night

EXAMPLES = settings(
    max_examples=by_night(100, 40),
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=False,
)
SIZES = pytest.mark.parametrize("world_size", WORLD_SIZES)


def sample(count: int, seed: int = 0, world_sizes: Sequence[int] = WORLD_SIZES) -> Iterator[Program]:
    """Uniform choices on all meshes: what a campaign draws, without Hypothesis' mutation and shrinking."""
    generator = random.Random(seed)
    meshes = [mesh for size in world_sizes for mesh in all_meshes(size)]
    for _ in range(count):
        yield decode(generator.choice(meshes), generator.randbytes(WIDTH))


def calls(graph: fx.Graph, *names: str) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op == "call_function" and qualified_name(n.target).split("::")[1] in names]


@SIZES
@EXAMPLES
@given(data=st.data())
def test_programs_run_and_their_metadata_says_what_they_compute(data: st.DataObject, world_size: int) -> None:
    program = data.draw(transformer_programs(world_size=world_size))
    run = Lockstep().run(program, observe=True)
    assert run.finished, run.hang or run.mismatch or run.error
    for result, binding in zip(run.ranks, program.ranks, strict=True):
        assert all(bool(value.isfinite().all()) for value in pytree.tree_leaves(result.outputs))
        assert result.values is not None
        for node in program.graphs[binding.graph].nodes:
            if node.op == "output":
                continue
            specs = pytree.tree_leaves(node.meta["val"], is_leaf=lambda leaf: isinstance(leaf, TensorSpec))
            for spec, value in zip(specs, pytree.tree_leaves(result.values[node.name]), strict=True):
                assert tuple(value.shape) == spec.shape, node.name
                assert value.dtype.is_floating_point == spec.dtype.is_floating_point, node.name


@settings(EXAMPLES, max_examples=25)
@given(transformer_programs())
def test_metadata_is_what_torch_propagates(program: Program) -> None:
    graph = program.graph(program.world_size - 1)
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), _val)
        with _mode(graph), torch.no_grad():
            found = pytree.tree_leaves(node.target(*args, **kwargs))
        expected = pytree.tree_leaves(node.meta["val"])
        assert [TensorSpec.of(v).layout for v in found] == [TensorSpec.of(v).layout for v in expected], node.name


def _val(value: object) -> object:
    return value.meta["val"] if isinstance(value, fx.Node) else value


def _mode(graph: fx.Graph) -> FakeTensorMode:
    return next(node.meta["val"].fake_mode for node in graph.nodes)


@EXAMPLES
@given(transformer_programs())
def test_every_rank_has_a_graph_of_its_own_that_lints(program: Program) -> None:
    for rank in range(program.world_size):
        graph = program.graph(rank)
        graph.lint()
        assert not any(isinstance(a, RankConstant) for n in graph.nodes for a in pytree.tree_leaves((n.args, n.kwargs)))
        assert all("val" in node.meta for node in graph.nodes if node.op != "output")


@EXAMPLES
@given(transformer_programs())
def test_nothing_is_dead(program: Program) -> None:
    for graph in program.graphs:
        assert [n.name for n in graph.nodes if not n.users and n.op != "output"] == []
    names = {n.name for graph in program.graphs for n in graph.nodes if n.op == "placeholder"}
    assert names == {spec.name for spec in program.inputs}


@EXAMPLES
@given(transformer_programs())
def test_files_round_trip(program: Program) -> None:
    text = dumps(program)
    again = loads(text)
    assert dumps(again) == text
    assert (again.mesh, again.inputs, again.seed, again.labels) == (
        program.mesh,
        program.inputs,
        program.seed,
        program.labels,
    )


@EXAMPLES
@given(transformer_programs())
def test_declared_placements_are_true(program: Program) -> None:
    # as float64: torch has no `equal` for numbers of 8 bits
    carried = [FLOAT64.carry(list(program.values(r))) for r in range(program.world_size)]
    values = [dict(zip(_placeholders(program, r), carried[r], strict=True)) for r in range(program.world_size)]
    for spec in program.inputs:
        for rank in range(program.world_size):
            for group, placement in program.placements(spec.name, rank).items():
                mine, first = values[rank][spec.name], values[group[0]][spec.name]
                if placement.kind == "replicated":
                    assert torch.equal(mine, first), f"{spec.name} over {group}"
                elif placement.kind == "shard":
                    assert placement.dim is not None
                    total = sum(values[member][spec.name].shape[placement.dim] for member in group)
                    parts = len({p for d, p in spec.placements if p.kind == "shard" and p.dim == placement.dim})
                    assert parts > 1 or total == spec.shape[placement.dim], f"{spec.name} over {group}"
                elif placement.kind == "partial" and rank != group[0] and spec.recipe.kind == "uniform":
                    assert not torch.equal(mine, first), f"{spec.name} over {group}"


def _placeholders(program: Program, rank: int) -> list[str]:
    return [n.name for n in program.graphs[program.ranks[rank].graph].nodes if n.op == "placeholder"]


def _has_reduce_norm(program: Program) -> bool:
    """all_reduce → [region_begin] → rms_norm | add_rms_norm, over a real group that divides the sequence."""
    for binding in program.ranks:
        for norm in calls(program.graphs[binding.graph], "rms_norm", "add_rms_norm"):
            for operand in norm.args[:2]:
                if operand in calls(program.graphs[binding.graph], "_internal_mark_region_begin"):
                    operand = operand.args[0]
                if operand not in calls(program.graphs[binding.graph], "all_reduce"):
                    continue
                shape, members = operand.meta["val"].shape, len(binding.constants[operand.args[2].name])
                if members > 1 and shape[0 if len(shape) == 2 else 1] % members == 0:
                    return True
    return False


def test_at_least_four_in_ten_programs_show_the_reduce_norm_pattern() -> None:
    found = [_has_reduce_norm(program) for program in sample(by_night(400, 150))]
    assert sum(found) >= 0.4 * len(found), f"{sum(found)} of {len(found)}"


def _has_shared_marker(program: Program) -> bool:
    """all_reduce → region_begin, which a norm reads and something else in full."""
    graph = program.graphs[0]
    norms = calls(graph, "rms_norm", "add_rms_norm")
    return any(
        marker.args[0] in calls(graph, "all_reduce")
        and any(user in norms for user in marker.users)
        and any(user not in norms for user in marker.users)
        for marker in calls(graph, "_internal_mark_region_begin")
    )


def _has_normed_twins(program: Program) -> bool:
    """One value is summed over two groups of more than one rank, and a norm reads each sum."""
    binding, groups = program.ranks[-1], defaultdict(set)
    graph = program.graphs[binding.graph]
    for node in calls(graph, "all_reduce"):
        group = binding.constants[node.args[2].name]
        if len(group) > 1 and any(user in calls(graph, "rms_norm", "add_rms_norm") for user in node.users):
            groups[node.args[0]].add(tuple(group))
    return any(len(found) > 1 for found in groups.values())


@SIZES
@pytest.mark.parametrize("shows", [_has_shared_marker, _has_normed_twins])
def test_three_in_a_hundred_programs_show_what_few_defects_need(
    shows: Callable[[Program], bool], world_size: int
) -> None:
    found = [shows(program) for program in sample(by_night(400, 200), seed=5, world_sizes=(world_size,))]
    assert sum(found) >= 0.03 * len(found), f"{sum(found)} of {len(found)}"


def test_one_in_twenty_is_degenerate(label_counts: Counter[str]) -> None:
    assert 0.02 <= label_counts["degenerate"] / label_counts["programs"] <= 0.08


@pytest.mark.parametrize(
    ("label", "share"),
    [
        ("fused-residual", 0.3), ("unfused-residual", 0.2), ("carried-residual", 0.1), ("region", 0.3), ("view", 0.2),
        ("attention", 0.3), ("mlp", 0.3), ("bias", 0.2), ("fused-reduce", 0.1), ("extra-outputs", 0.2), ("bf16", 0.2),
        ("mixed-dtypes", 0.05), ("two-groups", 0.2), ("over-dp", 0.05), ("uneven", 0.1), ("reordered", 0.3),
        ("few-tokens", 0.03), ("scatter-gather", 0.03), ("uneven-features", 0.03), ("rank-reduced", 0.05),
        ("bsh", 0.2), ("sbh", 0.05), ("flat", 0.1), ("layers=1", 0.3), ("layers=2", 0.1), ("layers=3", 0.03),
        ("layers=4", 0.01), ("entry-norm", 0.3), ("mask", 0.05), ("transpose", 0.05),
        ("quantised", 0.08), ("int8", 0.02), ("int4", 0.02), ("fp8", 0.01), ("mxfp4", 0.01),
    ],
)  # fmt: skip
def test_programs_contain_what_shows_defects(label: str, share: float, label_counts: Counter[str]) -> None:
    assert label_counts[label] >= share * label_counts["programs"]


@pytest.fixture(scope="module")
def label_counts() -> Counter[str]:
    counts: Counter[str] = Counter()
    for program in sample(600, seed=2):
        counts.update({"programs", *program.labels})
    return counts


def test_attention_logits_stay_within_eight() -> None:
    largest = 0.0
    for program in sample(by_night(150, 50), seed=3):
        run = Lockstep().run(program, observe=True)
        for result, binding in zip(run.ranks, program.ranks, strict=True):
            values = result.values
            assert values is not None
            for node in calls(program.graphs[binding.graph], "attention"):
                query, key = values[node.args[0].name], values[node.args[1].name]
                kv_heads, size = key.shape[-2:]
                heads = query.unflatten(-1, (-1, size)).transpose(-2, -3)
                keys = key.repeat_interleave(heads.shape[-3] // kv_heads, -2).transpose(-2, -3)
                largest = max(largest, float((heads @ keys.mT).abs().max()) / math.sqrt(size))
    assert 0.1 < largest <= 8


def test_norms_read_rows_of_ordinary_size() -> None:
    """rms of at least 0.1 in all but a few rows, degenerate programs aside."""
    small = rows = 0
    for program in sample(by_night(150, 50), seed=4):
        if "degenerate" in program.labels:
            continue
        result, binding = Lockstep().run(program, observe=True).ranks[0], program.ranks[0]
        assert result.values is not None
        for node in calls(program.graphs[binding.graph], "rms_norm"):
            rms = result.values[node.args[0].name].square().mean(-1).sqrt()
            small, rows = small + int((rms < 0.1).sum()), rows + rms.numel()
    assert rows > 1000
    assert small <= 0.01 * rows, f"{small} of {rows} rows"
