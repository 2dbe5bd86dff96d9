"""A matmul pipelined with the sum of its partial products, which is divided over the ranks."""

from __future__ import annotations

import pytest
import torch

from tcverify.execution import ProcessGroupPool
from tcverify.passes.resharding.pipelined import PipelinedMatmul
from tcverify.passes.resharding.pipelined.scatter import SCATTER_FORMS
from tcverify.program import PlacedBuilder, Program
from tcverify.verification.verifier import verify
from tests.sizes import by_night
from tests.support.pipelined_programs import MESHES, calls, holds, outputs, pipelined, scattered, sound_in_all_orders


@pytest.mark.parametrize(
    ("form", "world", "mesh"),
    [
        # every form on two meshes, and every mesh; all pairs of them at night
        pytest.param(form, world, mesh, marks=[] if (j - i) % len(MESHES) < 2 else pytest.mark.slow)
        for i, form in enumerate(SCATTER_FORMS)
        for j, (world, mesh) in enumerate(MESHES)
    ],
)
def test_forms_sum_on_every_mesh(form: str, world: int, mesh: tuple[int, ...]) -> None:
    for chunks, dim, op in ((1, 1, "matmul"), (3, 2, "linear"), (2, 1, "linear"), (4, 2, "matmul")):
        holds(scattered(world, mesh, chunks, dim, op), reduce_form=form, number_of_streams=2)
    holds(scattered(world, mesh, None, 0), reduce_form=form)


@pytest.mark.parametrize("form", SCATTER_FORMS)
def test_chunks_and_streams_of_all_numbers(form: str) -> None:
    for chunks in by_night((1, 2, 3, 5, 8), (1, 3)):
        program = scattered(3, (1, 0, 2), chunks)
        first, *others = (
            outputs(pipelined(program, reduce_form=form, number_of_streams=streams, sync_streams=sync))
            for streams, sync in ((1, False), (2, False), (3, True), (4, False))
        )
        plain = outputs(program)
        for rank, expected in enumerate(plain):
            assert torch.allclose(first[rank][0], expected[0], rtol=1e-12, atol=1e-12)
            assert all(torch.equal(first[rank][0], other[rank][0]) for other in others)  # streams never change a bit


@pytest.mark.parametrize("form", SCATTER_FORMS)
def test_sums_are_exact(form: str) -> None:
    holds(scattered(4, (2, 0, 3, 1), 3, 2, "linear"), domain="exact", reduce_form=form, sync_streams=True)


@pytest.mark.parametrize("form", SCATTER_FORMS)
def test_applied_once_more_the_pass_changes_nothing(form: str) -> None:
    holds(scattered(2, (1, 0), 3), deep=True, reduce_form=form)


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("form", SCATTER_FORMS)
def test_no_order_of_the_streams_goes_wrong(form: str, sync: bool) -> None:
    for world, mesh, chunks, streams in ((3, (2, 0, 1), 1, 2), (2, (1, 0), 3, 2), (2, (0, 1), 2, 3)):
        program = scattered(world, mesh, chunks)
        sound_in_all_orders(pipelined(program, reduce_form=form, number_of_streams=streams, sync_streams=sync))


@pytest.mark.parametrize("axis_on", ["matmul", "reduce"])
@pytest.mark.parametrize("chunks", [None, 2])
def test_matmul_or_reduce_carries_the_stream_axis(axis_on: str, chunks: int | None) -> None:
    program = scattered(2, (0, 1), chunks, 0 if chunks is None else 1, axis_on=axis_on)
    for form in SCATTER_FORMS:
        pipelined(program, reduce_form=form)
        holds(program, reduce_form=form)


@pytest.mark.parametrize("form", SCATTER_FORMS)
def test_without_chunks_nothing_is_communicated(form: str) -> None:
    program = scattered(2, (0, 1), 0)
    holds(program, reduce_form=form)
    for gm in pipelined(program, reduce_form=form).graph_modules():
        assert not any(name.startswith("host_ir") for name in calls(gm.graph) if name != "host_ir::current_stream")


@pytest.mark.parametrize(
    ("form", "communication", "each"),
    [("collective", "reduce_scatter", 3), ("reduce", "reduce", 12), ("p2p", "permute", 9), ("ring", "permute", 9)],
)
def test_how_much_is_communicated(form: str, communication: str, each: int) -> None:
    for gm in pipelined(scattered(4, (2, 0, 3, 1), 3), reduce_form=form).graph_modules():
        assert calls(gm.graph).count(f"host_ir::{communication}") == each
        assert calls(gm.graph).count("host_ir::wait") == each


@pytest.mark.parametrize(
    ("a", "w", "axes", "dim", "target"),
    [
        ((3, 2, 4, 5), (5, 4), (1, None), 1, 1),  # one matrix for all
        ((2, 4, 5), (3, 2, 5, 4), (0, 1), 1, 1),  # A is the same in all chunks
        ((3, 2, 4, 5), (1, 2, 5, 4), (1, 1), 1, 2),  # so is B, of extent 1
        ((4, 5), (3, 2, 5, 4), (None, 1), 1, 1),
        ((3, 1, 2, 4, 5), (6, 1, 5, 4), (2, None), 2, 1),  # a dim that both have, divided
        ((3, 2, 5), (5, 4), (1, None), 1, 1),  # the rows are what is summed
        ((3, 4, 5), (5, 2), (None, 1), 2, 1),  # the columns are
        ((4, 5), (2, 5, 6), (None, 0), 0, 0),
    ],
)
@pytest.mark.parametrize("form", ["collective", "ring"])
def test_operands_of_all_shapes(
    form: str, a: tuple[int, ...], w: tuple[int, ...], axes: tuple[int | None, ...], dim: int, target: int
) -> None:
    b = PlacedBuilder(2)
    layouts = ["[1, 0] replicated" if axis is None else f"[1, 0] shard({axis})" for axis in axes]
    first, second = b.input("a", a, layouts[0]), b.input("w", w, layouts[1])
    partial = b.call("aten::matmul", first, second, layout=f"[1, 0] shard({dim})")
    program = b.build(b.reduce(partial, dim, f"[1, 0] shard({target})", stream_axis=0))
    holds(program, reduce_form=form, number_of_streams=2)
    pipelined(program, reduce_form=form)


def sums_of_both(kind: str) -> Program:
    """One partial product per rank, of which something is special."""
    b = PlacedBuilder(2)
    a = b.input("a", (3, 2, 4, 3), "[1, 0] shard(1)")
    w = b.input("w", (2, 3, 4), "[1, 0] shard(0)")
    p = b.call("aten::matmul", a, w)
    if kind == "written":
        b.call("aten::mul_.Tensor", w, 2.0)
    op = "max" if kind == "max" else "sum"
    target = (
        "[1, 0] replicated" if kind == "replicated" else "[0, 1] shard(1)" if kind == "elsewhere" else "[1, 0] shard(1)"
    )
    total = b.reduce(p, 1, target, op, stream_axis=None if kind == "no axis" else 0)
    return b.build(total, *([b.call("aten::relu", p)] if kind == "read" else []))


@pytest.mark.parametrize(
    ("kind", "times"),
    [("nothing", 1), ("read", 0), ("written", 0), ("max", 0), ("replicated", 0), ("elsewhere", 0), ("no axis", 0)],
)
def test_other_sums_are_left_alone(kind: str, times: int) -> None:
    pipelined(sums_of_both(kind), times)
    verdict = verify(PipelinedMatmul(), sums_of_both(kind))
    assert (verdict.status, verdict.changed) == ("passed", times > 0)


def test_gathering_and_summing_in_one_program() -> None:
    """A [S, D, m, K] is gathered and multiplied; partial products of the result are summed and divided."""
    b = PlacedBuilder(2)
    a = b.input("a", (3, 2, 1, 4), "[1, 0] shard(1)")
    w = b.input("w", (4, 4), "[1, 0] replicated")
    v = b.input("v", (2, 4, 2), "[1, 0] shard(0)")
    x = b.call("aten::matmul", b.set(a, "[1, 0] replicated"), w, stream_axis=0)
    flat = b.call("aten::view", x, [3, 1, 2, 4])
    p = b.call("aten::matmul", flat, v, layout="[1, 0] shard(1)")
    program = b.build(b.reduce(p, 1, "[1, 0] shard(1)", stream_axis=0))
    for form in SCATTER_FORMS:
        options = {"reduce_form": form, "form": "broadcast" if form == "reduce" else form}
        pipelined(program, 2, **options)
        holds(program, number_of_streams=2, **options)


def test_process_groups_agree() -> None:
    with ProcessGroupPool(2) as pool:
        for form in SCATTER_FORMS:
            verdict = verify(PipelinedMatmul(reduce_form=form), scattered(2, (1, 0), 3), confirm=pool)
            assert (verdict.status, pool.name in verdict.executors) == ("passed", True)


@pytest.mark.slow
def test_process_groups_of_four_agree() -> None:
    with ProcessGroupPool(4) as pool:
        for form in SCATTER_FORMS:
            for world, mesh in ((4, (2, 0, 3, 1)), (4, (3, 1))):
                verdict = verify(PipelinedMatmul(reduce_form=form), scattered(world, mesh, 2), confirm=pool)
                assert (verdict.status, pool.name in verdict.executors) == ("passed", True)
