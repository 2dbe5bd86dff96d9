"""The reducer on programs whose tensors carry layouts: it edits what all ranks do, never one rank alone."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from tcverify.execution import Lockstep
from tcverify.ops import DeviceMesh
from tcverify.ops.dialects.multidevice import REDUCE, SET
from tcverify.program import Mesh, Placed, PlacedBuilder, PlacedPlan, Program
from tcverify.shrink import reduce
from tcverify.shrink.global_view.reading import plan_of
from tcverify.strategies import DECODERS, RESHARDING_WORLD_SIZES, timing
from tcverify.strategies.resharding import programs as resharding
from tests.support.predicates import has_neg, named

Shows = Callable[[Program], bool]


def drawn(count: int, seed: int) -> list[Program]:
    generator = random.Random(seed)
    sizes = [generator.choice(RESHARDING_WORLD_SIZES) for _ in range(count)]
    return [resharding.plan_of(size, generator.randbytes(resharding.WIDTH)).build() for size in sizes]


def plan(program: Program) -> PlacedPlan:
    found = plan_of(program)
    assert found is not None
    return found


def smallest(program: Program, shows: Shows) -> PlacedPlan:
    """The plan of what is left; every program on the way to it runs, or is refused."""

    def asked(trial: Program) -> bool:
        return Lockstep().run(trial).finished and shows(trial)

    assert asked(program)
    reduction = reduce(program, asked)
    assert asked(reduction.program)
    return plan(reduction.program)


def sets(program: Program, source: int | None = None, target: int | None = None) -> bool:
    """Whether there is a set from a mesh of so many ranks to one of so many others."""
    found = [step for step in plan(program).steps if step.op == SET]
    tensors = plan(program).tensors()[1]
    meshes = [(tensors[step.reads[0]].layout.mesh, step.layout.mesh) for step in found]
    return any((source in (None, a.size)) and (target in (None, b.size)) and a != b for a, b in meshes)


# ------------------------------------------------------------------------------------------------------------- reading


def test_the_plan_of_a_drawn_program_makes_it_again() -> None:
    for program in drawn(80, seed=1):
        again = plan(program).build()
        first, second = Lockstep().run(program), Lockstep().run(again)
        for mine, other in zip(first.ranks, second.ranks, strict=True):
            assert all(map(torch.equal, mine.outputs, other.outputs))
        assert (again.mesh.world_size, again.seed, again.labels) == (program.world_size, program.seed, program.labels)
        assert again.inputs == program.inputs
        calls = [Counter(str(n.target) for n in p.graph(0).nodes) for p in (program, again)]
        assert calls[0] == calls[1]


def chain(world_size: int, *layouts: str, relu: bool = False) -> Program:
    b = PlacedBuilder(world_size)
    x = b.input("x", (12, 2), layouts[0])
    for layout in layouts[1:]:
        x = b.set(x, layout)
        x = b.call("aten::relu", x) if relu else x
    return b.build(x)


def test_there_is_no_plan_without_layouts() -> None:
    program = chain(2, "[0] replicated", "[0, 1] replicated", relu=True)
    assert plan_of(program) is not None
    for graph in program.graphs:
        for node in graph.nodes:
            if "relu" in node.name:
                del node.meta["layout"]
    assert plan_of(program) is None


def test_there_is_no_plan_where_ranks_do_different_things_under_one_name() -> None:
    program = chain(2, "[0] replicated", "[0, 1] replicated", "[1] replicated")
    assert plan_of(program) is not None
    node = next(n for n in program.graphs[-1].nodes if n.name == "set_2")
    node.args = (*node.args[:2], "[0] replicated", *node.args[3:])
    assert plan_of(program) is None


def test_there_is_no_plan_where_ranks_do_things_in_orders_that_contradict_each_other() -> None:
    b = PlacedBuilder(2)
    x = b.input("x", (4, 2), "[0, 1] replicated")
    program = b.build(b.call("aten::relu", x), b.call("aten::neg", x))
    assert plan_of(program) is not None
    graphs = [program.graph(rank) for rank in range(2)]
    for graph in graphs:
        for node in graph.nodes:
            node.meta.pop("placement", None)
    first, second = (node for node in graphs[1].nodes if node.op == "call_function")
    second.append(first)
    assert plan_of(program.with_graphs(graphs)) is None


def test_programs_of_other_kinds_have_no_plan() -> None:
    for name, decoder in DECODERS.items():
        if name not in ("resharding", "mixed"):
            assert plan_of(decoder.decode(Mesh.grid({"tp": 2}), random.Random(name).randbytes(decoder.width))) is None


# ----------------------------------------------------------------------------------------------------------- reduction


def test_a_chain_over_many_meshes_becomes_one_set_between_two_ranks() -> None:
    program = chain(
        6,
        "[5] replicated",
        "[2, 4] shard(0)",
        "[0] replicated",
        "[0, 1, 4] shard(0)",
        "[1, 3] replicated",
        "[2] replicated",
    )
    left = smallest(program, sets)
    assert [step.op for step in left.steps] == [SET]
    assert (left.world_size, len(left.inputs), len(left.outputs)) == (2, 1, 1)
    assert left.inputs[0].shape == (1,)
    assert str(left.inputs[0].layout) == "[0] replicated"
    assert str(left.steps[0].layout) == "[1] replicated"


def test_what_is_looked_for_keeps_its_meshes() -> None:
    program = chain(6, "[5, 2, 0] shard(0)", "[4, 1] replicated", "[0, 1, 2] shard(0)", "[3] replicated", relu=True)
    left = smallest(program, lambda trial: sets(trial, 3, 1))
    (step,) = left.steps
    assert left.inputs[0].layout.mesh == DeviceMesh.of(0, 1, 2)
    assert step.layout.mesh.ranks in ((0,), (1,), (2,))
    assert left.world_size == 3


def test_two_sets_in_a_row_become_one() -> None:
    b = PlacedBuilder(4)
    x = b.input("x", (4, 2), "[0, 1] shard(0)")
    y = b.set(b.set(b.call("aten::neg", x), "[0, 1] replicated"), "[3] replicated")

    def shows(trial: Program) -> bool:
        return has_neg(trial) and any(step.layout.mesh.size == 1 for step in plan(trial).steps if step.op == SET)

    assert [step.op for step in smallest(b.build(y), shows).steps] == ["aten::neg", SET]


def test_a_grid_becomes_a_row() -> None:
    b = PlacedBuilder(6)
    x = b.input("x", (2, 6, 6), "[[0, 1, 2], [3, 4, 5]] shard(0), shard(1)")
    y = b.reduce(x, 0, "[[0, 1, 2], [3, 4, 5]] replicated, shard(0)")
    left = smallest(b.build(y), lambda trial: any(s.op == REDUCE for s in plan(trial).steps))
    (step,) = left.steps
    assert (step.layout.mesh.ndim, left.world_size, left.inputs[0].shape) == (1, 2, (1,))


def test_products_shrink_together_with_their_weights() -> None:
    b = PlacedBuilder(3)
    x = b.input("x", (8, 3, 2, 5), "[2, 0, 1] shard(1)", dtype=torch.bfloat16)
    weight = b.input("w", (5, 4), "[2, 0, 1] replicated", dtype=torch.bfloat16)
    y = b.call("aten::matmul", b.set(x, "[2, 0, 1] replicated"), weight, stream_axis=0)

    left = smallest(b.build(y), lambda trial: [s.op for s in plan(trial).steps] == [SET, "aten::matmul"])
    assert [spec.shape for spec in left.inputs] == [(1,)]  # one vector, times itself
    assert {spec.dtype for spec in left.inputs} == {torch.float32}
    assert all(step.stream_axis is None for step in left.steps)


def test_what_a_stream_axis_is_needed_for_keeps_it() -> None:
    b = PlacedBuilder(2)
    x = b.input("x", (8, 4), "[0, 1] replicated")
    program = b.build(b.call("aten::neg", b.call("aten::relu", x, stream_axis=0), stream_axis=0))
    (left,) = smallest(program, lambda trial: any(s.stream_axis == 0 for s in plan(trial).steps)).steps
    assert left.stream_axis == 0


def test_writes_and_what_nobody_needs_go() -> None:
    b = PlacedBuilder(3)
    x, y = b.input("x", (4, 2), "[0, 2] shard(0)"), b.input("y", (4, 2), "[0, 2] shard(0)")
    z = b.call("aten::add.Tensor", x, y)
    b.call("aten::relu_", z)
    w = b.set(z, "[1] replicated")
    left = smallest(b.build(w, z, b.call("aten::neg", w)), has_neg)
    assert [step.op for step in left.steps] == ["aten::neg"]
    assert (len(left.inputs), len(left.outputs)) == (1, 1)


def test_costs_that_matter_are_kept() -> None:
    program = timing.with_timing(
        chain(2, "[0] replicated", "[0, 1] replicated", relu=True), timing.decode_timing(b"\x05" * 9)
    )
    assert program.streams is not None
    left = reduce(program, lambda trial: trial.streams is not None and bool(named(trial, SET))).program
    assert left.streams is not None
    assert len(named(left, SET)) <= 2


def test_the_deadline_ends_it() -> None:
    (program,) = drawn(1, seed=3)
    reduction = reduce(program, lambda trial: True, time.monotonic() - 1)
    assert (reduction.program is program, reduction.cut, reduction.trials) == (True, True, 0)


def test_a_long_chain_is_halved_not_walked() -> None:
    layouts = [f"[{number % 3}] replicated" for number in range(1500)]
    trials = 0

    def shows(trial: Program) -> bool:
        nonlocal trials
        trials += 1
        return len(named(trial, SET)) > 0

    before = time.perf_counter()
    reduction = reduce(chain(3, *layouts), shows)
    assert len(plan(reduction.program).steps) == 1
    assert trials < 60
    assert time.perf_counter() - before < 30


@pytest.mark.parametrize("seed", range(3))
def test_drawn_programs_are_reduced_to_one_reduction(seed: int) -> None:
    programs = [p for p in drawn(60, seed) if named(p, REDUCE)][:6]
    for program in programs:
        left = smallest(program, lambda trial: bool(named(trial, REDUCE)))
        (step,) = left.steps
        assert (left.world_size, len(left.inputs), len(left.outputs)) == (2, 1, 1)
        assert step.args[2] == "sum"
        assert max(left.inputs[0].shape) == 1


def test_values_of_a_placed_tensor_are_told_by_shape_and_layout() -> None:
    made = plan(chain(2, "[0] replicated", "[0, 1] shard(0)")).tensors()[1]
    assert all(isinstance(value, Placed) for value in made.values())
    assert made["set_1"].local_shape == (6, 2)
