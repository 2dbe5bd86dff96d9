"""Laws that hold whatever layouts a tensor goes through: of what `set` and `reduce` mean, and of what passes make of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx

from tcverify import verify
from tcverify.application import LoadedPass, apply_pass, load_pass
from tcverify.application.loading import prepare_pass
from tcverify.execution import Lockstep, ProcessGroupPool
from tcverify.execution.asynchrony import TIMINGS
from tcverify.ops import DeviceMesh, Layout
from tcverify.passes import BUILTIN, disable_passes
from tcverify.program import Mesh, Placed, PlacedBuilder, Program, Recipe
from tcverify.strategies import resharding_programs
from tcverify.strategies.resharding.programs import WIDTH, decode_resharding
from tests.sizes import by_night

ROOT = Path(__file__).parents[2]
WORLD = 6
SHAPE = (12, 12)
INTEGERS = Recipe("integers", 100.0)  # sums are exact, in whatever order
LOWERING = "convert_op_to_communication"
Build = Callable[[PlacedBuilder, Placed], Placed]

few = settings(
    max_examples=by_night(25, 12), database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@st.composite
def layouts(draw: st.DrawFn, dims: int = 2) -> Layout:
    """On one to six of the ranks, in any order; mesh dims divide 12."""
    shape = draw(st.sampled_from([(1,), (2,), (3,), (4,), (6,), (2, 2), (2, 3), (3, 2), (1, 2), (3, 1)]))
    size = int(torch.tensor(shape).prod())
    ranks = tuple(draw(st.permutations(range(WORLD)))[:size])
    free: list[int | None] = draw(st.permutations([*range(dims), None, None]))
    return Layout(DeviceMesh(shape, ranks), tuple(free[: len(shape)]))


relabellings = st.permutations(range(WORLD))


def program(source: Layout, build: Build, shape: tuple[int, ...] = SHAPE, seed: int = 0) -> Program:
    b = PlacedBuilder(WORLD)
    return b.build(build(b, b.input("x", shape, source, recipe=INTEGERS)), seed=seed)


@cache
def loaded(target: str, **options: Any) -> LoadedPass:
    return prepare_pass(BUILTIN[target], target, options) if target in BUILTIN else load_pass(target, options)


def versions(made: Program, pass_: str = LOWERING) -> list[Program]:
    """The program, and what a pass makes of it unless it declines."""
    pair = apply_pass(loaded(pass_), made)
    assert pair.failure is None, pair.failure
    assert not pair.defects, pair.defects
    return [made] if pair.rewritten is None or not pair.changed else [made, pair.rewritten]


def held(made: Program, **how: Any) -> dict[int, list[torch.Tensor]]:
    """What each rank holds in the end."""
    run = Lockstep().run(made, **how)
    assert run.finished, run.why
    return {result.rank: result.outputs for result in run.ranks if result.outputs}


def equal(a: dict[int, list[torch.Tensor]], b: dict[int, list[torch.Tensor]]) -> bool:
    """Bit for bit."""
    return a.keys() == b.keys() and all(
        len(a[rank]) == len(b[rank]) and all(torch.equal(x, y) for x, y in zip(a[rank], b[rank], strict=True))
        for rank in a
    )


def agree(first: Program, second: Program, pass_: str = LOWERING) -> bool:
    """Whether two programs are the same, both before and after they are lowered."""
    expected, *others = [held(made) for program in (first, second) for made in versions(program, pass_)]
    return all(equal(expected, other) for other in others)


# ------------------------------------------------------------------------------------------------------------------ laws


@few
@given(layouts(), layouts(), relabellings)
def test_a_relabelled_mesh_relabels_the_result(source: Layout, target: Layout, new: list[int]) -> None:
    assert relabelling_holds(source, target, new, LOWERING)


def relabelling_holds(source: Layout, target: Layout, new: list[int], pass_: str) -> bool:
    plain = versions(program(source, lambda b, x: b.set(x, target)), pass_)
    turned = versions(program(source.relabelled(new), lambda b, x: b.set(x, target.relabelled(new))), pass_)
    expected = {new[rank]: outputs for rank, outputs in held(plain[0]).items()}
    return all(equal({new[r]: t for r, t in held(made).items()}, expected) for made in plain[1:]) and all(
        equal(held(made), expected) for made in turned
    )


@few
@given(layouts(), layouts(), relabellings, st.integers(0, 2), st.sampled_from(["sum", "max", "min"]))
def test_a_relabelled_mesh_relabels_reductions(
    source: Layout, target: Layout, new: list[int], dim: int, op: str
) -> None:
    def made(s: Layout, t: Layout) -> list[Program]:
        return versions(program(s, lambda b, x: b.reduce(x, dim, t, op), (12, 12, 12)))

    plain, turned = made(source, target), made(source.relabelled(new), target.relabelled(new))
    assert len(plain) == len(turned), "one is lowered, and the other declined"
    expected = {new[rank]: outputs for rank, outputs in held(plain[0]).items()}
    assert all(equal(held(one), expected) for one in turned)


@few
@given(st.permutations(range(WORLD)), st.sampled_from([2, 3, 4, 6]), st.sampled_from(["sum", "max", "product"]))
def test_reduce_scatter_then_all_gather_is_all_reduce(ranks: list[int], size: int, op: str) -> None:
    mesh = DeviceMesh.of(*ranks[:size])
    partial, scattered, whole = Layout.sharded(mesh, 0), Layout.sharded(mesh, 0), Layout.replicated(mesh)
    shape = (size, 12, 4)
    at_once = program(partial, lambda b, x: b.reduce(x, 0, whole, op), shape)
    in_two = program(partial, lambda b, x: b.set(b.reduce(x, 0, scattered, op), whole), shape)
    assert [len(versions(made)) for made in (at_once, in_two)] == [2, 2], "both are lowered"
    assert agree(at_once, in_two)


@few
@given(layouts(), layouts())
def test_there_and_back_is_where_it_was(source: Layout, target: Layout) -> None:
    assert agree(
        program(source, lambda b, x: b.set(b.set(x, target), source)),
        program(source, lambda b, x: b.call("aten::clone", x)),
    )


@few
@given(layouts(), layouts(), layouts())
def test_two_steps_are_one(source: Layout, between: Layout, target: Layout) -> None:
    assert agree(
        program(source, lambda b, x: b.set(b.set(x, between), target)),
        program(source, lambda b, x: b.set(x, target)),
    )


@few
@given(layouts(), layouts(), st.booleans())
def test_replicas_are_equal(source: Layout, target: Layout, reducing: bool) -> None:
    made = program(
        source,
        lambda b, x: b.reduce(x, 0, target) if reducing else b.set(x, target),
        (12, 12, 12) if reducing else SHAPE,
    )
    for version in versions(made):
        parts: dict[tuple[slice, ...], torch.Tensor] = {}
        for rank, [part] in held(version).items():
            place = tuple((at.start, at.stop) for at in target.place(rank, SHAPE if not reducing else (12, 12)))
            assert torch.equal(parts.setdefault(place, part), part), rank  # type: ignore[arg-type, call-overload]


def test_laws_are_tried_on_programs_that_are_lowered() -> None:
    """Of the draws, how many the lowering takes: laws over declined programs would say nothing of it."""
    counts = [0, 0]

    @settings(few, max_examples=150, derandomize=True)
    @given(layouts(), layouts())
    def count(source: Layout, target: Layout) -> None:
        counts[len(versions(program(source, lambda b, x: b.set(x, target)))) - 1] += 1

    count()
    assert counts[1] > 50, counts


# --------------------------------------------------------------------------------------- of the passes, on drawn programs


def drawn(count: int, seed: int) -> list[Program]:
    """Programs of the strategy, which the composite pass changes."""
    chance, found = random.Random(seed), list[Program]()
    while len(found) < count:
        made = decode_resharding(Mesh.grid({"w": 4}), chance.randbytes(WIDTH))
        pair = apply_pass(loaded("resharding"), made)
        if pair.changed and any("stream_axis" in node.meta for graph in made.graphs for node in graph.nodes):
            found.append(made)
    return found


def with_streams(made: Program, target: str, number: int) -> Program:
    pair = apply_pass(loaded(target, number_of_streams=number), made)
    assert pair.rewritten is not None, pair.declined
    return pair.rewritten


def independent_of_streams(made: Program, target: str = "resharding") -> bool:
    """Whether results are the same bits for any number of streams, at all times at which communications read and write."""
    first, *others = [
        held(with_streams(made, target, number), timing=timing) for number in (1, 2, 3, 7) for timing in TIMINGS
    ]
    return all(equal(first, other) for other in others)


def test_results_do_not_depend_on_the_number_of_streams() -> None:
    for made in drawn(by_night(12, 4), seed=1):
        assert independent_of_streams(made)


def test_a_disabled_pass_is_the_identity() -> None:
    for made in drawn(4, seed=2):
        for name in ("resharding", LOWERING, "insert_deallocations", "stream_parallel_type", "pipelined_matmul"):
            with disable_passes(name):
                assert not apply_pass(loaded(name), made).changed, name
            assert not apply_pass(loaded(name, enabled=False), made).changed, name


def test_iterations_leave_nothing_behind(pool: Callable[[int], ProcessGroupPool]) -> None:
    """The same lowered program again, on other inputs, in the same processes: what an iteration leaves pending, or in memory that
    the next one gets, would show there."""
    for made in drawn(3, seed=3):
        lowered = with_streams(made, "resharding", 2)
        for seed in (0, 1, 2):
            original, rewritten = replace(made, seed=seed), replace(lowered, seed=seed)
            comparison = pool(4).compare(original, rewritten)
            assert comparison.rewritten.finished, comparison.rewritten.why
            assert verify_same(original, rewritten)


def verify_same(original: Program, rewritten: Program) -> bool:
    a, b = held(original), held(rewritten)
    return a.keys() == b.keys() and all(
        torch.allclose(x, y, rtol=1e-9, atol=1e-9) for rank in a for x, y in zip(a[rank], b[rank], strict=True)
    )


@settings(few, max_examples=12)
@given(resharding_programs(world_size=4), st.integers(1, 2**31))
def test_what_holds_on_one_input_holds_on_others(made: Program, seed: int) -> None:
    pair = apply_pass(loaded("resharding"), made)
    if pair.changed and pair.rewritten is not None:
        assert verify_same(replace(made, seed=seed), replace(pair.rewritten, seed=seed))


# ------------------------------------------------------------------------------------------------------- planted defects


def test_counting_ranks_by_number_breaks_relabelling() -> None:
    pass_ = f"{ROOT}/docs/gather_in_rank_order.py:gather_in_rank_order"
    source, target = Layout.parse("[0, 1, 2] shard(0)"), Layout.parse("[0, 1, 2] replicated")
    assert relabelling_holds(source, target, [3, 4, 5, 0, 1, 2], pass_), "order is kept"
    assert not relabelling_holds(source, target, [2, 0, 1, 3, 4, 5], pass_)


def test_counting_ranks_by_number_breaks_there_and_back() -> None:
    pass_ = f"{ROOT}/docs/gather_in_rank_order.py:gather_in_rank_order"
    source, target = Layout.parse("[2, 0] shard(0)"), Layout.parse("[2, 0] replicated")
    first = program(source, lambda b, x: b.set(b.set(x, target), source))
    second = program(source, lambda b, x: b.call("aten::clone", x))
    assert agree(first, second)
    assert not agree(first, second, pass_)


class ByStreams:
    """A pass whose results depend on its number of streams."""

    def __init__(self, number_of_streams: int = 1) -> None:
        self.number = number_of_streams

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        [output] = gm.graph.find_nodes(op="output")
        for node in list(output.all_input_nodes):
            with gm.graph.inserting_before(output):
                scaled = gm.graph.call_function(torch.ops.aten.mul.Scalar, (node, 1 + 1e-12 * self.number))
            scaled.meta["val"] = node.meta["val"]
            output.replace_input_with(node, scaled)
        gm.recompile()
        return gm


def test_a_pass_that_depends_on_its_streams_shows() -> None:
    made = drawn(1, seed=1)[0]
    assert not independent_of_streams(made, "tests.property.test_resharding_laws:ByStreams")


def test_what_reads_memory_that_nobody_wrote_differs_from_the_original() -> None:
    """Left over from an earlier iteration, it would look right."""
    made = program(Layout.parse("[0, 1] shard(0)"), lambda b, x: b.set(x, "[0, 1] replicated"))

    def forgets(gm: fx.GraphModule) -> fx.GraphModule:
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.host_ir.all_gather.default):
            for wait in [user for user in node.users if user.target is torch.ops.host_ir.wait.default]:
                gm.graph.erase_node(wait)
            node.replace_all_uses_with(node.kwargs["out"])
            gm.graph.erase_node(node)
        gm.recompile()
        return gm

    lowered = versions(made)[1]
    assert verify_same(made, lowered)
    assert verify(forgets, lowered).status == "refuted"
