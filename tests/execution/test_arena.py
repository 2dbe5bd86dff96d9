"""Programs whose communication buffers lie in an arena: what is planted shows, and sound plans compute what they did."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import fx

from tcverify.execution import ArenaRun, Clobber, Lockstep, compare_ranks, has_buffers, run_in_arena
from tcverify.passes import CommBuffers
from tcverify.program import Program
from tcverify.verification.verifier import verify
from tests.passes.comm_buffers.test_comm_buffers import Build, Builder, program
from tests.support.buffer_programs import clash, drawn, lower

Places = Mapping[str, tuple[int, int]]


def with_places(given: Program, places: Places) -> Program:
    """The program with buffers at these (offset, bytes), by the names of nodes."""
    modules = given.graph_modules()
    for module in modules:
        for node in module.graph.nodes:
            if node.name in places:
                offset, nbytes = places[node.name]
                node.meta["comm_buffer"] = {"group": "tp", "offset": offset, "nbytes": nbytes}
    return given.with_graphs([module.graph for module in modules])


def run(build: Build, places: Places, iterations: int = 3) -> ArenaRun:
    found = run_in_arena(with_places(program(build), places), iterations)
    assert found is not None
    return found


def same(found: ArenaRun) -> bool:
    """Whether the program computes in the arena what it computes elsewhere, bit for bit."""
    return all(c.rewritten.finished and not any(d.problem or d.difference for d in c.deltas) for c in found.comparisons)


def async_pair(b: Builder, begin: Callable[[Builder, fx.Node], fx.Node] = lambda b, x: b.start(x, "avg")) -> Any:
    """Two collectives; the second operand is made while the first one is under way."""
    first = begin(b, b.made())
    second = b.made(b.relu(b.x))
    total = b.wait(first)
    return b.relu(total), b.relu(b.wait(b.start(second, "avg")))


def test_programs_without_buffers_do_not_run_at_all() -> None:
    plain = program(async_pair)
    assert not has_buffers(plain)
    assert run_in_arena(plain) is None


def test_places_that_are_apart_change_nothing() -> None:
    found = run(async_pair, {"mm": (0, 128), "mm_1": (256, 128)})
    assert (len(found.comparisons), found.buffers, found.clobbers) == (3, 4, [])
    assert same(found)


def test_iterations_have_other_inputs_and_the_arena_stays() -> None:
    found = run(async_pair, {"mm": (0, 128)})
    first, second = (comparison.rewritten.ranks[0].outputs[0] for comparison in found.comparisons[:2])
    assert not torch.equal(first, second)


def exchange(b: Builder, x: fx.Node) -> fx.Node:
    return b.call("all_to_all_single", x, [2, 2], [2, 2], "tp")


@pytest.mark.parametrize("offset", [0, 64, 124])
def test_an_operand_that_is_under_way_is_overwritten(offset: int) -> None:
    found = run(lambda b: async_pair(b, exchange), {"mm": (0, 128), "mm_1": (offset, 128)})
    assert found.clobbers[0] == Clobber(0, 0, "mm_1", "mm", "wait_tensor")
    assert {clobber.rank for clobber in found.clobbers} == {0, 1}
    assert not same(found)
    assert str(found.clobbers[0]) == (
        "on rank 0, in iteration 1, 'mm_1' overwrites the buffer of 'mm', which 'wait_tensor' needs"
    )


def test_peers_read_a_buffer_until_the_wait() -> None:
    """Outside of buffers an all_reduce works on a copy; of what lies in one, compilers leave that copy out."""
    found = run(async_pair, {"mm": (0, 128), "mm_1": (0, 128)})
    assert found.clobbers[0] == Clobber(0, 0, "mm_1", "mm", "wait_tensor")


def test_a_place_is_free_when_the_wait_is_past() -> None:
    def build(b: Builder) -> Any:
        total = b.relu(b.wait(b.start(b.made(), "avg")))
        return b.relu(b.wait(b.start(b.made(total), "avg")))

    found = run(build, {"mm": (0, 128), "mm_1": (0, 128)})
    assert not found.clobbers
    assert same(found)


def test_what_is_made_from_a_buffer_cannot_lie_in_it() -> None:
    def build(b: Builder) -> Any:
        return b.relu(b.wait(b.start(b.made(b.made()), "avg")))

    found = run(build, {"mm": (0, 128), "mm_1": (0, 128)})
    assert found.clobbers[0] == Clobber(0, 0, "mm_1", "mm", "mm_1")


def test_an_output_in_the_arena_is_lost_in_the_next_iteration() -> None:
    def build(b: Builder) -> Any:
        return b.made(), b.relu(b.wait(b.start(b.x, "avg")))

    found = run(build, {"mm": (0, 128)})
    assert found.clobbers[0] == Clobber(1, 0, "mm", "mm", "")
    assert str(found.clobbers[0]).endswith("which is an output")
    assert not same(found)
    assert same(run(build, {"mm": (0, 128)}, iterations=1))


def test_a_value_that_is_used_again_behind_the_plan_is_gone() -> None:
    """A runtime poisons nothing: here it is the next buffer in the same place that shows the late use."""

    def build(b: Builder) -> Any:
        x = b.made()
        total = b.relu(b.wait(b.start(x, "avg")))
        other = b.relu(b.wait(b.start(b.made(total), "avg")))
        return b.add(x, other)

    found = run(build, {"mm": (0, 128), "mm_1": (0, 128)})
    assert found.clobbers[0] == Clobber(0, 0, "mm_1", "mm", "add")
    assert not same(found)


def test_views_and_selections_need_no_contents() -> None:
    def build(b: Builder) -> Any:
        x = b.made()
        total = b.relu(b.wait(b.start(x, "avg")))
        other = b.made(total)
        view = b.call("aten::view", x, [8, 4])
        return b.relu(b.wait(b.start(other, "avg"))), b.call("aten::new_zeros", view, [2])

    found = run(build, {"mm": (0, 128), "mm_1": (0, 128)})
    assert [clobber.reader for clobber in found.clobbers[:1]] == ["new_zeros"]


@pytest.mark.parametrize(
    ("dtype", "itemsize"), [(torch.bfloat16, 2), (torch.float64, 8), (torch.int32, 4), (torch.bool, 1)]
)
def test_dtypes_of_all_sizes_lie_side_by_side(dtype: torch.dtype, itemsize: int) -> None:
    def build(b: Builder) -> Any:
        cast = b.call("aten::_to_copy", b.made(), dtype=dtype)
        gathered = b.wait(b.call("all_gather_into_tensor", cast, 2, "tp"))
        return b.relu(b.wait(b.start(b.made(), "avg"))), b.call("aten::_to_copy", gathered, dtype=torch.float32)

    size = 32 * itemsize
    places = {"_to_copy": (0, size), "mm": (size, 128), "mm_1": (size + 128, 128)}
    assert same(run(build, places))
    assert not run(build, places).clobbers
    wrong = run(build, {**places, "mm": (size - 1, 128)})
    assert [clobber.lost for clobber in wrong.clobbers[:1]] == ["mm"]


def test_large_offsets_take_no_memory() -> None:
    found = run(async_pair, {"mm": (0, 128), "mm_1": (1 << 40, 128)})
    assert same(found)
    assert not found.clobbers


# --------------------------------------------------------------------------------------------------- drawn programs


@pytest.mark.parametrize("reuse", [True, False])
def test_plans_for_drawn_programs_hold(reuse: bool) -> None:
    buffers = 0
    for original in drawn(15, seed=11):
        rewritten = lower(original, reuse=reuse, unsafe_alike=True)  # the places of one rank are its own matter here
        found = run_in_arena(rewritten)
        if found is None:
            continue
        buffers += found.buffers
        assert not found.clobbers
        assert same(found)
        for iteration, comparison in enumerate(found.comparisons):  # and it is what the original computes
            plain = Lockstep().run(Program(**{**vars_of(original), "seed": original.seed + iteration}))
            for before, after in zip(plain.ranks, comparison.rewritten.ranks, strict=True):
                assert not any(d.problem or d.difference > 1e-9 * d.scale for d in compare_ranks(before, after))
    assert buffers > 40


def vars_of(original: Program) -> dict[str, Any]:
    names = ("mesh", "graphs", "ranks", "inputs", "labels", "modules", "streams")
    return {name: getattr(original, name) for name in names}


def test_what_the_arena_shows_the_plan_could_have_told() -> None:
    """Offsets drawn at random: whatever is overwritten clashes in the plan. The converse holds but for what nobody reads."""
    draw = random.Random(3)
    shown = clashing = 0
    for original in drawn(25, seed=12):
        modules = original.graph_modules()
        clashes = []
        for module in modules:
            done = CommBuffers(unsafe_alike=True)
            done(module)
            nodes = {node.name: node for node in module.graph.nodes}
            moved = []
            for buffer in done.plan.buffers:
                offset = draw.choice((0, 0, 64, 128, buffer.offset))
                nodes[buffer.node].meta["comm_buffer"] = {**nodes[buffer.node].meta["comm_buffer"], "offset": offset}
                moved.append(type(buffer)(**{**fields_of(buffer), "offset": offset}))
            clashes.append({frozenset((a.node, b.node)) for a, b in combinations(moved, 2) if clash(a, b)})
        found = run_in_arena(original.with_graphs([module.graph for module in modules]))
        if found is None:
            continue
        for clobber in found.clobbers:
            assert frozenset((clobber.node, clobber.lost)) in clashes[clobber.rank]
        if not found.clobbers:
            assert same(found)
        shown += bool(found.clobbers)
        clashing += any(clashes)
    assert 3 < shown <= clashing
    assert shown >= 0.9 * clashing


def fields_of(buffer: Any) -> dict[str, Any]:
    return {name: getattr(buffer, name) for name in buffer.__dataclass_fields__}


# ------------------------------------------------------------------------------------------------------ as a finding


class Everywhere(CommBuffers):
    """Puts all buffers in one place."""

    name = "everywhere"

    def rewrite(self, graph: fx.Graph) -> Any:
        result = super().rewrite(graph)
        for node in graph.nodes:
            if "comm_buffer" in node.meta:
                node.meta["comm_buffer"] = {**node.meta["comm_buffer"], "offset": 0}
        return result


class Returned(CommBuffers):
    """Puts a result that is returned into a buffer."""

    name = "returned"

    def rewrite(self, graph: fx.Graph) -> Any:
        result = super().rewrite(graph)
        for node in graph.nodes:
            if node.name == "relu":
                node.meta["comm_buffer"] = {"group": "tp", "offset": 4096, "nbytes": 128}
        return result


@pytest.mark.parametrize(
    ("pass_", "title"),
    [
        (Everywhere, "in iteration 1, 'mm_1' overwrites the buffer of 'mm', which 'relu' needs"),
        (Returned, "in iteration 2, 'relu' overwrites the buffer of 'relu', which is an output"),
    ],
)
def test_it_is_a_part_of_equivalence(pass_: Callable[[], CommBuffers], title: str) -> None:
    def build(b: Builder) -> Any:
        first = b.start(b.made(), "avg")
        second = b.made(b.call("aten::neg", b.x))
        total = b.wait(first)
        return b.relu(total), b.call("aten::neg", b.wait(b.start(second, "avg")))

    verdict = verify(pass_(), program(build), checks=["equivalence"])
    (finding,) = verdict.findings
    assert (finding.kind, finding.check) == ("arena-mismatch", "equivalence")
    assert finding.title == f"a communication buffer is overwritten too early: on rank 0, {title}"
    assert "output" in finding.detail
    assert " has bytes " in finding.detail.splitlines()[0]
    assert verify(CommBuffers(), program(build), checks=["equivalence"]).status == "passed"
