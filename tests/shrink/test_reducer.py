"""The reducer: pure predicates over programs, and the smallest programs for which they hold."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx

from tcverify.checks.metadata import _inconsistent as wrong_metadata
from tcverify.execution import Lockstep
from tcverify.ops import OPEN_END, TensorSpec
from tcverify.program import (
    PARTIAL,
    VARYING,
    GraphBuilder,
    InputSpec,
    Mesh,
    Program,
    RankConstant,
    Recipe,
    compute_nodes,
    dumps,
    loads,
    program_id,
    spmd_program,
)
from tcverify.shrink import Reduction, greedy, reduce
from tcverify.shrink.graph.sketch import SketchStep
from tcverify.shrink.graph.static_shapes import refit_call, reshape_like
from tcverify.strategies import all_meshes, decode
from tests.support.predicates import has_neg, is_call, named, ops, reduced_then_normed
from tests.support.programs import TP2, reduce_then_norm
from tests.support.sequence_programs import GRID, REVERSED, STRIDED, TP4, UNEVEN

aten = torch.ops.aten
Shows = Callable[[Program], bool]


def drawn(shows: Shows, meshes: list[Mesh], count: int) -> list[Program]:
    """The first programs of the structured strategy, large ones, for which a predicate holds."""
    found: list[Program] = []
    for number in itertools.count():
        source = random.Random(number)
        program = decode(source.choice(meshes), source.randbytes(300))
        if program.size >= 15 and shows(program):
            found.append(program)
        if len(found) == count:
            return found
    raise AssertionError


def outputs(graph: fx.Graph) -> list[fx.Node]:
    return next(node for node in graph.nodes if node.op == "output").all_input_nodes


def chain(length: int, at: int, mesh: Mesh = TP2) -> Program:
    """A chain of relu, with one neg at a place."""
    x = InputSpec("x", (2, 2), placements=(("tp", VARYING),))

    def build(b: GraphBuilder) -> fx.Node:
        value = b.input("x")
        for i in range(length):
            value = b.call("aten::neg" if i == at else "aten::relu", value)
        return value

    return spmd_program(mesh, [x], build)


# ----------------------------------------------------------------------------------------------------- known minima


def summed_over_two_groups(program: Program) -> bool:
    """An output depends on all_reduces over two groups of several ranks."""
    for node in outputs(program.graphs[0]):
        groups, pending, seen = set(), [node], {node}
        while pending:
            one = pending.pop()
            if is_call(one, "tensor_cast::all_reduce"):
                groups.add(tuple(program.ranks[0].constants[one.args[2].name]))  # type: ignore[union-attr]
            fresh = [n for n in one.all_input_nodes if n not in seen]
            seen.update(fresh)
            pending += fresh
        if len([group for group in groups if len(group) > 1]) > 1:
            return True
    return False


def chained_residual(program: Program) -> bool:
    """One result of an add_rms_norm2 is an operand of another."""
    return any(
        is_call(n.args[1], "python::getitem") and is_call(n.args[1].args[0], "tensor_cast::add_rms_norm2")  # type: ignore[union-attr]
        for n in named(program, "tensor_cast::add_rms_norm2")
    )


@pytest.mark.parametrize(
    ("shows", "meshes", "minimum"),
    [
        (reduced_then_normed, all_meshes(4), ["all_reduce", "rms_norm"]),
        (chained_residual, all_meshes(3), ["add_rms_norm2", "add_rms_norm2"]),
    ],
)
def test_reaches_the_known_minimum(shows: Shows, meshes: list[Mesh], minimum: list[str]) -> None:
    for program in drawn(shows, meshes, 3):
        found = reduce(program, shows)
        assert ops(found.program) == minimum
        assert not found.cut


def test_sums_over_two_groups_keep_both_groups() -> None:
    (program,) = drawn(summed_over_two_groups, [GRID], 1)
    found = reduce(program, summed_over_two_groups).program
    assert ops(found).count("all_reduce") == 2
    assert found.size <= 3
    assert len(found.mesh.dims) == 2


def test_everything_else_becomes_plain() -> None:
    (program,) = drawn(reduced_then_normed, all_meshes(4), 1)
    found = reduce(program, reduced_then_normed).program
    assert (found.mesh.world_size, [dim.groups for dim in found.mesh.dims]) == (2, [((0, 1),)])
    assert [spec.recipe for spec in found.inputs] == [Recipe(), Recipe()]
    assert {spec.dtype for spec in found.inputs} == {torch.float32}
    assert max(size for spec in found.inputs for size in spec.shape) <= 2
    assert found.seed == 0
    assert found.labels == program.labels
    assert sorted(node.name for node in compute_nodes(found.graphs[0])) == ["all_reduce", "rms_norm"]
    assert len(found.graphs) == 1
    assert (
        next(n for n in found.graphs[0].nodes if n.op == "output").args[0] is named(found, "tensor_cast::rms_norm")[0]
    )


def test_sizes_shrink_to_what_is_needed_and_keep_together() -> None:
    def five_rows_of_three(program: Program) -> bool:
        found = [n.meta["val"].shape for n in named(program, "tensor_cast::rms_norm")]
        return any(shape[-1] >= 3 and shape[-2] >= 5 for shape in found)

    for program in drawn(five_rows_of_three, all_meshes(2), 3):
        found = reduce(program, five_rows_of_three).program
        assert ops(found) == ["rms_norm"]
        assert sorted(spec.shape for spec in found.inputs) == [(3,), (5, 3)]


def test_views_follow_the_sizes_of_their_operands() -> None:
    x = InputSpec("x", (4, 6, 8))

    def build(b: GraphBuilder) -> fx.Node:
        flat = b.call("aten::view", b.input("x"), [24, 8])
        return b.call("aten::view", b.call("aten::relu", flat), [4, -1, 2, 4])

    def two_views(program: Program) -> bool:
        views = named(program, "aten::view")
        return len(views) == 2 and [len(v.meta["val"].shape) for v in views] == [2, 4] and -1 in views[1].args[1]

    found = reduce(spmd_program(TP2, [x], build), two_views).program
    assert [spec.shape for spec in found.inputs] == [(1, 2)]
    assert [node.args[1] for node in named(found, "aten::view")] == [[1, 2], [1, -1, 2, 1]]


def test_arguments_are_plain_unless_the_failure_needs_them_as_they_are() -> None:
    def build(b: GraphBuilder) -> fx.Node:
        part = b.call("aten::slice.Tensor", b.input("x"), -1, 1, OPEN_END)
        return b.call("aten::sum.dim_IntList", part, [-1])

    program = spmd_program(TP2, [InputSpec("x", (2, 4))], build)

    def both(program: Program) -> bool:
        return bool(named(program, "aten::slice.Tensor") and named(program, "aten::sum.dim_IntList"))

    def from_the_end(program: Program) -> bool:
        return both(program) and named(program, "aten::sum.dim_IntList")[0].args[1] == [-1]

    for fails, dim in ((both, 1), (from_the_end, -1)):
        found = reduce(program, fails).program
        assert named(found, "aten::slice.Tensor")[0].args[1:] == (1, 1, 2)
        assert named(found, "aten::sum.dim_IntList")[0].args[1] == [dim]


@pytest.mark.parametrize(
    ("before", "result", "after", "expected"),
    [
        ((2, 6, 4), (12, 4), (1, 6, 4), (6, 4)),
        ((12, 4), (2, 6, 4), (6, 4), (1, 6, 4)),
        ((4, 8), (1, 4, 8), (2, 8), (1, 2, 8)),
        ((1, 4, 8), (4, 8), (1, 4, 2), (4, 2)),
        ((4, 8), (4, 2, 4), (4, 2), (4, 2, 1)),
        ((), (1, 1), (), (1, 1)),
        ((4, 6), (3, 8), (4, 6), (3, 8)),
        ((5, 3), (15,), (4, 2), (8,)),
        ((2, 3), (3, 2), (2, 5), (5, 2)),
        ((0, 3), (3, 0), (1, 3), None),
        ((4, 4), (2, 2, 4), (4,), None),
    ],
)
def test_shapes_of_views(before: Any, result: Any, after: Any, expected: Any) -> None:
    assert reshape_like(before, result, after) == expected


def test_of_several_dims_either_may_give_way() -> None:
    assert reshape_like((12,), (2, 6), (24,), "first") == (4, 6)
    assert reshape_like((12,), (2, 6), (24,), "last") == (2, 12)


@pytest.mark.parametrize(
    ("before", "after", "sizes"),
    [((1, 2), (1, 3), [4, 3]), ((1, 2), (5, 1, 2), [4, 2])],
    ids=["follows", "another number of dims"],
)
def test_the_sizes_of_expand_follow_an_operand_of_as_many_dims(
    before: tuple[int, ...], after: tuple[int, ...], sizes: list[int]
) -> None:
    step = SketchStep("expand", "call_function", aten.expand.default, ("x", [4, 2]))
    assert refit_call(step, before, TensorSpec((4, 2), (0, 1), torch.float32), after, "first").args == ("x", sizes)


# ------------------------------------------------------------------------------------------------------------- meshes


def test_a_group_keeps_its_order_where_that_matters() -> None:
    def out_of_order(program: Program) -> bool:
        groups = [
            b.constants.get(n.args[2].name) for b in program.ranks for n in named(program, "tensor_cast::all_reduce")
        ]  # type: ignore[union-attr]
        return any(group != sorted(group) for group in groups if group)

    for mesh in (REVERSED, STRIDED):
        found = reduce(reduce_then_norm(mesh), out_of_order).program
        assert found.mesh == REVERSED
        assert ops(found) == ["all_reduce"]


def test_groups_come_into_natural_order() -> None:
    assert reduce(reduce_then_norm(STRIDED), reduced_then_normed).program.mesh == TP2


def test_of_an_uneven_partition_the_larger_group_stays() -> None:
    def really_reduces(program: Program) -> bool:
        lengths = [len(b.constants.get("tp", [])) for b in program.ranks]
        return bool(named(program, "tensor_cast::all_reduce")) and max(lengths) > 1

    found = reduce(reduce_then_norm(UNEVEN), really_reduces).program
    assert found.mesh == TP2


def test_ranks_that_are_needed_stay() -> None:
    def of_four(program: Program) -> bool:
        return any(len(b.constants.get("tp", [])) >= 3 for b in program.ranks) and reduced_then_normed(program)

    found = reduce(reduce_then_norm(TP4), of_four).program
    assert found.mesh == Mesh.grid({"tp": 3})
    assert [b.constants["rank"] for b in found.ranks] == [0, 1, 2]


def test_a_constant_that_is_a_rank_and_an_offset_becomes_two() -> None:
    """Ranks get other numbers; their offsets stay."""
    x = InputSpec("x", (4, 2), placements=(("tp", PARTIAL),))

    def build(b: GraphBuilder) -> fx.Node:
        total = b.call("tensor_cast::all_reduce", b.input("x"), b.rank, b.group("tp"))
        return b.call("aten::slice.Tensor", total, 0, b.rank, 4)

    def slices(program: Program) -> bool:
        return any(is_call(n.args[0], "tensor_cast::all_reduce") for n in named(program, "aten::slice.Tensor"))

    found = reduce(spmd_program(REVERSED, [x], build), slices).program
    assert found.mesh == TP2
    (total,), (part,) = named(found, "tensor_cast::all_reduce"), named(found, "aten::slice.Tensor")
    ranks, starts = total.args[1], part.args[2]
    assert isinstance(ranks, RankConstant)
    assert isinstance(starts, RankConstant)
    assert [(b.constants[ranks.name], b.constants[starts.name]) for b in found.ranks] == [(0, 1), (1, 0)]


# ------------------------------------------------------------------------------------------- what is asked about


def asked(program: Program, shows: Shows) -> Iterator[Program]:
    """The programs that a reduction asks about, in order."""
    seen: list[Program] = []

    def look(one: Program) -> bool:
        seen.append(one)
        return shows(one)

    reduce(program, look)
    yield from seen


@pytest.mark.parametrize("shows", [reduced_then_normed, chained_residual])
def test_what_is_asked_about_is_well_typed(shows: Shows) -> None:
    for program in drawn(shows, all_meshes(2) + all_meshes(3), 3):
        for one in asked(program, shows):
            assert wrong_metadata(one) == []
            assert dumps(loads(dumps(one))) == dumps(one)
            assert Lockstep().run(one).finished


def test_nothing_is_asked_twice() -> None:
    (program,) = drawn(reduced_then_normed, all_meshes(4), 1)
    ids = [program_id(one) for one in asked(program, reduced_then_normed)]
    assert len(set(ids)) == len(ids)


def test_what_is_equal_on_all_members_stays_so() -> None:
    """A pass may rest on it: a residual that is replicated never becomes one that is not."""

    def residuals_differ(program: Program) -> bool:
        run = Lockstep().run(program, observe=True)
        names = [n.args[1].name for n in named(program, "tensor_cast::add_rms_norm")]  # type: ignore[union-attr]
        first, *others = [rank.values or {} for rank in run.ranks]
        return any(not torch.equal(first[name], other[name]) for name in names for other in others)

    def shows(program: Program) -> bool:
        return any(is_call(n.args[0], "tensor_cast::all_reduce") for n in named(program, "tensor_cast::add_rms_norm"))

    for program in drawn(lambda one: shows(one) and not residuals_differ(one), [TP2], 3):
        assert not any(map(residuals_differ, asked(program, shows)))


def test_addends_of_a_sum_stay_addends() -> None:
    (program,) = drawn(reduced_then_normed, [TP2], 1)
    found = reduce(program, reduced_then_normed).program
    addend = named(found, "tensor_cast::all_reduce")[0].args[0]
    assert {spec.name: spec.placements for spec in found.inputs}[addend.name] == (("tp", PARTIAL),)  # type: ignore[union-attr]


def test_integers_that_are_indices_stay_in_range() -> None:
    inputs = [InputSpec("x", (5, 3)), InputSpec("i", (4,), torch.int64, recipe=Recipe("integers", 5.0))]

    def build(b: GraphBuilder) -> fx.Node:
        x, i = b.input("x"), b.input("i")
        index = b.call("aten::add.Tensor", b.call("aten::relu", i), 0)
        return b.call("aten::index_select", x, 0, index)

    def selects(program: Program) -> bool:
        return bool(named(program, "aten::index_select")) and Lockstep().run(program).finished

    found = reduce(spmd_program(TP2, inputs, build), selects)
    assert ops(found.program) == ["index_select"]


# --------------------------------------------------------------------------------------------------------- metadata


def with_val(program: Program, op: str, val: Any) -> Program:
    """The program with other metadata on the calls of an op; None drops it."""
    copy = loads(dumps(program))
    for node in named(copy, op):
        del node.meta["val"]
        if val is not None:
            node.meta["val"] = val
    return copy


def test_metadata_that_is_missing_stays_missing() -> None:
    (program,) = drawn(reduced_then_normed, [TP4], 1)
    bare = with_val(program, "tensor_cast::all_reduce", None)
    found = reduce(bare, reduced_then_normed).program
    assert ops(found) == ["all_reduce", "rms_norm"]
    lacking = [n.name for n in found.graphs[0].nodes if n.op != "output" and "val" not in n.meta]
    assert lacking == ["all_reduce"]
    assert named(found, "tensor_cast::rms_norm")[0].meta["val"].shape == (1, 2)


def test_metadata_that_is_wrong_stays_wrong() -> None:
    wrong = TensorSpec.contiguous((7, 5), torch.bfloat16)
    program = with_val(reduce_then_norm(TP4), "tensor_cast::all_reduce", wrong)
    found = reduce(program, reduced_then_normed).program
    assert named(found, "tensor_cast::all_reduce")[0].meta["val"] == wrong
    assert named(found, "tensor_cast::rms_norm")[0].meta["val"].shape == (1, 2)


def test_metadata_that_follows_from_wrong_metadata_goes_on_following() -> None:
    program = with_val(chain(6, 2), "aten::neg", TensorSpec.contiguous((3, 3), torch.float32))
    for node in itertools.dropwhile(lambda n: n.name != "neg", list(program.graphs[0].nodes)):
        if "val" in node.meta:
            node.meta["val"] = TensorSpec.contiguous((3, 3), torch.float32)

    def read(one: Program) -> bool:
        return any(is_call(n.args[0], "aten::neg") for n in named(one, "aten::relu"))

    found = reduce(program, read).program
    assert ops(found) == ["neg", "relu"]
    assert [n.meta["val"].shape for n in compute_nodes(found.graphs[0])] == [(3, 3), (3, 3)]


def test_storages_that_are_shared_stay_shared() -> None:
    x = InputSpec("x", (4, 6))

    def build(b: GraphBuilder) -> fx.Node:
        return b.call("aten::relu", b.call("aten::view", b.call("aten::relu", b.input("x")), [24]))

    found = reduce(spmd_program(TP2, [x], build), lambda one: bool(named(one, "aten::view"))).program
    assert ops(found) == ["view"]
    first, second = (n.meta["val"].alias for n in found.graphs[0].nodes if n.op != "output")
    assert first == second == 0


# ---------------------------------------------------------------------------------------------------- time and order


def test_without_time_nothing_is_asked() -> None:
    program = chain(5, 2)
    found = reduce(program, has_neg, deadline=0.0)
    assert found == Reduction(program, True, 0)


def test_a_deadline_cuts_it_short(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(greedy.time, "monotonic", lambda: next(clock))
    found = reduce(chain(60, 30), has_neg, deadline=3)
    assert (found.cut, found.trials) == (True, 4)
    assert found.program.size < 60
    assert has_neg(found.program)


def test_a_minimal_program_needs_no_time() -> None:
    smallest = reduce(chain(5, 2), has_neg).program
    assert reduce(smallest, lambda _: False).program is smallest


def test_equal_programs_reduce_equally() -> None:
    (program,) = drawn(reduced_then_normed, all_meshes(4), 1)
    first, second = reduce(program, reduced_then_normed), reduce(loads(dumps(program)), reduced_then_normed)
    assert dumps(first.program) == dumps(second.program)
    assert first.trials == second.trials


def test_trials_grow_with_the_logarithm_of_what_is_removed() -> None:
    trials = [reduce(chain(length, length // 3), has_neg).trials for length in (16, 256, 1024)]
    assert trials[2] - trials[1] <= 6
    assert trials[2] <= 40
