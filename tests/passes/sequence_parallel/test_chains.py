"""P2 and P3: residuals that stay local from norm to norm and from layer to layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tcverify.passes import SequenceParallel
from tcverify.program import Mesh, MeshDim
from tests.sizes import by_night
from tests.support.sequence_programs import (
    ALL_MESHES,
    GRID,
    LAYOUTS,
    STRIDED,
    Builder,
    apply,
    check,
    findings,
    ops,
    program,
)


@pytest.mark.parametrize("shape", LAYOUTS, ids=str)
@pytest.mark.parametrize("mesh", ALL_MESHES.values(), ids=ALL_MESHES)
def test_residuals_of_two_results(mesh: Mesh, shape: tuple[int, ...]) -> None:
    def build(b: Builder) -> Any:
        hidden, residual = b.fused(b.all_reduce(b["x"]), b["r"])
        return b.fused(b.all_reduce(b.add(hidden, b["v"])), residual)

    check(build, {"P2": 2}, shape, mesh)


@pytest.mark.parametrize("shape", LAYOUTS, ids=str)
@pytest.mark.parametrize("mesh", ALL_MESHES.values(), ids=ALL_MESHES)
def test_sums_and_norms(mesh: Mesh, shape: tuple[int, ...]) -> None:
    def build(b: Builder) -> Any:
        first = b.add(b["r"], b.all_reduce(b["x"]))
        second = b.add(first, b.all_reduce(b.add(b.rms_norm(first), b["v"])))
        return b.rms_norm(b.copy(b.copy(b.end(second)))), second

    check(build, {"P3": 2}, shape, mesh)


def test_only_what_is_read_in_full_is_gathered() -> None:
    def build(b: Builder) -> Any:
        hidden, residual = b.fused(b.all_reduce(b["x"]), b["r"])
        return b.fused(b.all_reduce(b["y"]), residual)[0], hidden

    rewritten = check(build, {"P2": 2})
    assert ops(rewritten).count("all_gather") == 2  # the two norms, not the residual
    assert "all_reduce" not in ops(rewritten)


def test_a_residual_that_others_read_in_full_is_gathered_for_them_alone() -> None:
    def build(b: Builder) -> Any:
        hidden, residual = b.fused(b.all_reduce(b["x"]), b["r"])
        return b.fused(b.all_reduce(b["y"]), residual), hidden, residual

    rewritten = check(build, {"P2": 2})
    assert ops(rewritten).count("all_gather") == 4
    assert ops(rewritten).count("slice") == 1  # of the replicated input alone


def test_a_shard_of_p1_starts_the_chain_of_p2() -> None:
    def build(b: Builder) -> Any:
        embedded = b.all_reduce(b["x"])
        hidden = b.add(b.rms_norm(embedded), b["v"])
        return b.fused(b.all_reduce(hidden), embedded)

    rewritten = check(build, {"P1": 1, "P2": 1})
    assert ops(rewritten).count("reduce_scatter") == 2
    assert "slice" not in ops(rewritten)
    assert "all_reduce" not in ops(rewritten)


def test_p3_adds_the_residual_that_p2_left_local() -> None:
    def build(b: Builder) -> Any:
        hidden, residual = b.fused(b.all_reduce(b["x"]), b["r"])
        return b.rms_norm(b.end(b.add(residual, b.all_reduce(b.add(hidden, b["v"])))))

    rewritten = check(build, {"P2": 1, "P3": 1})
    assert ops(rewritten).count("all_gather") == 2
    assert ops(rewritten).count("slice") == 1


@pytest.mark.parametrize("swapped", [False, True])
def test_a_fused_tail(swapped: bool) -> None:
    def build(b: Builder) -> Any:
        hidden, residual = b.fused(b.all_reduce(b["x"]), b["r"])
        addends = b.all_reduce(b.add(hidden, b["v"])), residual
        return b.add_rms_norm(*(addends[::-1] if swapped else addends))

    rewritten = check(build, {"P2": 1, "P3": 1})
    assert ops(rewritten).count("all_gather") == 2


def test_views_between_the_all_reduce_and_the_sum() -> None:
    def build(b: Builder) -> Any:
        hidden, residual = b.fused(b.all_reduce(b["x"]), b["r"])
        return b.rms_norm(b.add(residual, b.view(b.all_reduce(b.view(hidden, 12, 8)), 1, 12, 8)))

    rewritten = check(build, {"P2": 1, "P3": 1}, (1, 12, 8))
    assert "all_reduce" not in ops(rewritten)


def test_a_view_of_the_residual() -> None:
    def build(b: Builder) -> Any:
        hidden, residual = b.fused(b.all_reduce(b["x"]), b["r"])
        flat = b.view(b.all_reduce(hidden), 12, 8)
        return b.fused(flat, b.view(residual, 12, 8))

    assert ops(check(build, {"P2": 2}, (1, 12, 8))).count("slice") == 1


def test_a_view_that_gives_every_batch_to_one_rank() -> None:
    """[B·S, H] → [B, S, H]: the chunks of dim 0 stay chunks of dim 0."""
    rewritten = check(lambda b: b.rms_norm(b.view(b.all_reduce(b["x"]), 4, 3, 8)), 1)
    assert ops(rewritten) == ["reduce_scatter", "view", "rms_norm", "all_gather"]


def test_norms_of_other_groups_slice_what_was_gathered() -> None:
    mesh = Mesh(2, (MeshDim("dp", ((1, 0),)), MeshDim("tp", ((0, 1),))))

    def build(b: Builder) -> Any:
        _, residual = b.fused(b.all_reduce(b["x"], "dp"), b["r"])
        return b.fused(b.all_reduce(b["y"], "tp"), residual)

    rewritten = check(build, {"P2": 2}, mesh=mesh)
    assert ops(rewritten).count("all_gather") == 3
    assert ops(rewritten).count("slice") == 2


def test_equal_items_are_gathered_once() -> None:
    def build(b: Builder) -> Any:
        both = b.add_rms_norm2(b.all_reduce(b["x"]), b["r"])
        return [b.graph.getitem(both, index) for index in (-2, 1, 0, -1)]

    assert ops(check(build, {"P2": 1})).count("all_gather") == 2


def test_a_marker_on_the_residual_moves() -> None:
    def build(b: Builder) -> Any:
        hidden, residual = b.fused(b.all_reduce(b["x"]), b["r"])
        return b.fused(b.all_reduce(hidden), b.begin(residual))

    assert ops(check(build, {"P2": 2})).count("slice") == 1


def test_a_marker_that_others_read_keeps_its_sum_in_full_but_not_the_sum_before() -> None:
    def build(b: Builder) -> Any:
        first = b.add(b.all_reduce(b["x"]), b["r"])
        second = b.end(b.add(b.all_reduce(b["y"]), first))
        return b.rms_norm(first), b.rms_norm(second), second

    rewritten = check(build, {"P3": 1})
    assert ops(rewritten).count("all_reduce") == 1


def test_a_residual_of_another_placement_ends_the_chain() -> None:
    def build(b: Builder) -> Any:
        hidden, residual = b.fused(b.all_reduce(b["x"]), b["r"])
        return hidden, b.fused(b.all_reduce(b["y"]), b.add(residual, b["v"]))

    check(build, {"P2": 1})


def test_single_patterns() -> None:
    def build(b: Builder) -> Any:
        embedded = b.all_reduce(b["x"])
        hidden, residual = b.fused(b.all_reduce(b.rms_norm(embedded)), embedded)
        total = b.add(residual, b.all_reduce(hidden))
        return b.add_rms_norm(b.all_reduce(b.rms_norm(total)), total)

    original = program(build)
    for patterns in ("P1", "P2", "P3", "P1,P2", "P1,P3", "P2,P3", "P1,P2,P3"):
        pass_ = SequenceParallel(patterns=patterns)
        assert findings(original, pass_) == set()
        pass_(original.graph_module(0))
        fired = {pattern for pattern, times in pass_.rewrites.items() if times}
        assert fired == set(patterns.split(","))


def test_a_stack_of_layers_stays_local() -> None:
    def build(b: Builder) -> Any:
        embedded = b.all_reduce(b["x"])
        hidden, residual = b.rms_norm(embedded), embedded
        for _ in range(5):
            hidden, residual = b.fused(b.all_reduce(b.call("aten::mul.Tensor", hidden, b["v"])), residual)
        return b.rms_norm(b.add(b.all_reduce(hidden), residual))

    rewritten = check(build, {"P1": 1, "P2": 5, "P3": 1}, (3, 12, 8), STRIDED)
    names = ops(rewritten)
    assert (names.count("reduce_scatter"), names.count("all_gather")) == (7, 7)
    assert "all_reduce" not in names
    assert "slice" not in names


def test_chains_of_two_groups_beside_each_other() -> None:
    def build(b: Builder) -> Any:
        first = b.fused(b.all_reduce(b["x"], "tp"), b["r"])
        second = b.fused(b.all_reduce(b["q"], "dp"), b["r"])
        return b.fused(b.all_reduce(b["y"], "tp"), first[1]), b.fused(b.all_reduce(b["r"], "dp"), second[1])

    check(build, {"P2": 4}, mesh=GRID)


@pytest.mark.parametrize("norms", [False, True])
def test_a_long_chain_of_sums_is_linear_and_without_recursion(norms: bool) -> None:
    """Each sum moves for the sake of the norm at the end; without one, all are taken back."""

    def build(b: Builder) -> Any:
        value = b["r"]
        for _ in range(by_night(1500, 500)):
            value = b.end(b.add(b.all_reduce(b["x"]), value))
        return b.rms_norm(value) if norms else value

    _, fired = apply(program(build), SequenceParallel())
    assert fired == (by_night(3000, 1000) if norms else 0)


def test_taking_back_goes_up_and_down_the_graph() -> None:
    """Every norm loses its source to a marker read in full, and with it the next sum its only norm."""

    def build(b: Builder) -> Any:
        returned, total = [], b.add(b.all_reduce(b["x"]), b["r"])
        for _ in range(by_night(400, 150)):
            marked = b.end(total)
            total = b.add(b.all_reduce(b["y"]), marked)
            returned.append(b.add_rms_norm(b.begin(b.all_reduce(b["x"])), marked))
        return [*returned, b.end(total)]

    assert findings(program(build, (4, 4)), SequenceParallel()) == set()


def test_mesh_of_uneven_groups() -> None:
    mesh = Mesh(3, (MeshDim("tp", ((0,), (2, 1))),))
    check(lambda b: b.fused(b.all_reduce(b["x"]), b["r"]), {"P2": 1}, mesh=mesh)


def test_the_residual_keeps_its_dtype() -> None:
    def build(b: Builder) -> Any:
        wide = b.call("aten::_to_copy", b.all_reduce(b["x"]), dtype=torch.float64)
        return b.rms_norm(b.add(b.all_reduce(b["y"]), wide))

    assert ops(check(build, {"P3": 1})).count("slice") == 1
