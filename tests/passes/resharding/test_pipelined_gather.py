"""A matmul pipelined with the gathering of its first operand."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from tcverify.execution import ProcessGroupPool
from tcverify.passes.resharding.pipelined import PipelinedMatmul
from tcverify.passes.resharding.pipelined.gather import GATHER_FORMS
from tcverify.program import PlacedBuilder, Program
from tcverify.verification.verifier import verify
from tests.sizes import by_night
from tests.support.pipelined_programs import MESHES, calls, gathered, holds, outputs, pipelined, sound_in_all_orders


@pytest.mark.parametrize(
    ("form", "world", "mesh"),
    [
        # every form on two meshes, and every mesh; all pairs of them at night
        pytest.param(form, world, mesh, marks=[] if (j - i) % len(MESHES) < 2 else pytest.mark.slow)
        for i, form in enumerate(GATHER_FORMS)
        for j, (world, mesh) in enumerate(MESHES)
    ],
)
def test_forms_compute_the_product_on_every_mesh(form: str, world: int, mesh: tuple[int, ...]) -> None:
    for chunks, streams, op in ((1, 2, "matmul"), (2, 3, "bias"), (5, 4, "linear")):
        holds(gathered(world, mesh, chunks, op), form=form, number_of_streams=streams)


@pytest.mark.parametrize("form", GATHER_FORMS)
def test_chunks_and_streams_of_all_numbers(form: str) -> None:
    for chunks in by_night((1, 2, 3, 5, 8), (1, 3)):
        program = gathered(3, (1, 0, 2), chunks, "bias")
        first, *others = (
            outputs(pipelined(program, form=form, number_of_streams=streams, sync_streams=sync))
            for streams, sync in ((1, False), (2, False), (3, True), (4, False))
        )
        plain = outputs(program)
        for rank, expected in enumerate(plain):
            assert torch.allclose(first[rank][0], expected[0], rtol=1e-12, atol=1e-12)
            assert all(torch.equal(first[rank][0], other[rank][0]) for other in others)  # streams never change a bit


@pytest.mark.parametrize("form", GATHER_FORMS)
def test_products_are_exact(form: str) -> None:
    holds(gathered(4, (2, 0, 3, 1), 3, "bias"), domain="exact", form=form, sync_streams=True)


@pytest.mark.parametrize("form", GATHER_FORMS)
def test_applied_once_more_the_pass_changes_nothing(form: str) -> None:
    holds(gathered(2, (1, 0), 3), deep=True, form=form)
    program = pipelined(gathered(2, (1, 0), 3), form=form)
    for gm in program.graph_modules():
        before = str(gm.graph)
        done = PipelinedMatmul(form=form)
        assert str(done(gm).graph) == before
        assert not any(done.rewrites.values())


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("form", GATHER_FORMS)
def test_no_order_of_the_streams_goes_wrong(form: str, sync: bool) -> None:
    for world, mesh, chunks, streams in ((3, (2, 0, 1), 1, 2), (2, (1, 0), 3, 2), (2, (0, 1), 2, 3)):
        program = gathered(world, mesh, chunks)
        sound_in_all_orders(pipelined(program, form=form, number_of_streams=streams, sync_streams=sync))


@pytest.mark.parametrize("form", ["collective", "ring"])
def test_larger_matrices(form: str) -> None:
    """M = 64, K = 32, N = 16, S = 8 on four ranks and three streams."""
    holds(gathered(4, (0, 1, 2, 3), 8, rows=2, inner=32, columns=16), form=form, number_of_streams=3)


def test_without_chunks_nothing_is_communicated() -> None:
    program = gathered(2, (0, 1), 0)
    holds(program)
    (graph, _) = (gm.graph for gm in pipelined(program).graph_modules())
    assert calls(graph) == ["host_ir::current_stream", *["aten::empty.memory_format"] * 2, "aten::relu"]


@pytest.mark.parametrize("sizes", [{"rows": 0}, {"inner": 0}, {"columns": 0}])
@pytest.mark.parametrize("form", GATHER_FORMS)
def test_nobody_races_for_what_has_no_elements(form: str, sizes: dict[str, int]) -> None:
    holds(gathered(2, (1, 0), 3, **sizes), form=form)


def test_what_one_rank_does() -> None:
    graph = pipelined(gathered(2, (0, 1), 2), number_of_streams=4).graph_modules()[0].graph
    first, step = (
        ["host_ir::set_current_stream", "host_ir::synchronize"],
        ["host_ir::set_current_stream", *["aten::select.int"] * 2, "host_ir::all_gather", "host_ir::wait"],
    )
    step += ["aten::matmul", "aten::select.int", "aten::copy_", "host_ir::set_current_stream", "host_ir::synchronize"]
    streams = ["host_ir::current_stream", "host_ir::stream", "host_ir::stream"]
    expected = [*streams, *["aten::empty.memory_format"] * 2, *first, *first, *step, *step, "aten::relu"]
    assert calls(graph) == expected


@pytest.mark.parametrize(
    ("form", "communication", "each"),
    [("collective", "all_gather", 3), ("broadcast", "broadcast", 12), ("p2p", "permute", 9), ("ring", "permute", 9)],
)
def test_how_much_is_communicated(form: str, communication: str, each: int) -> None:
    for gm in pipelined(gathered(4, (2, 0, 3, 1), 3), form=form).graph_modules():
        assert calls(gm.graph).count(f"host_ir::{communication}") == each
        assert calls(gm.graph).count("host_ir::wait") == each


def test_what_has_come_is_passed_on_before_it_is_multiplied() -> None:
    """In a ring, a chunk is under way to the next rank while it is multiplied here."""
    (graph, *_) = (gm.graph for gm in pipelined(gathered(3, (0, 1, 2), 1), form="ring").graph_modules())
    kinds = {"host_ir::permute": "post", "host_ir::wait": "wait", "aten::matmul": "multiply"}
    steps = [kinds[name] for name in calls(graph) if name in kinds]
    assert steps == ["post", "multiply", "wait", "post", "multiply", "wait", "multiply"]


def test_a_relabelled_mesh_relabels_the_result() -> None:
    """What position 0 of a mesh sends is what rank 0 sends in the mesh that is in order."""
    sent = {
        mesh: [
            node.args[1:]
            for gm in (pipelined(gathered(3, mesh, 1), form="p2p").graph_modules()[mesh[0]],)
            for node in gm.graph.nodes
            if node.name.startswith("permute")
        ]
        for mesh in ((0, 1, 2), (1, 0, 2))
    }
    assert sent[0, 1, 2] == [([2, 0, 1], [0, 1, 2]), ([1, 2, 0], [0, 1, 2])]
    assert sent[1, 0, 2] == [([2, 0, 1], [1, 0, 2]), ([1, 2, 0], [1, 0, 2])]


def shared(*, mul: bool = False) -> Program:
    """What is gathered is multiplied twice, and returned."""
    b = PlacedBuilder(2)
    a = b.input("a", (3, 2, 2, 3), "[1, 0] shard(1)")
    w = b.input("w", (3, 3), "[1, 0] replicated")
    whole = b.set(a, "[1, 0] replicated")
    y = b.call("aten::matmul", whole, w, stream_axis=0)
    z = b.call("aten::matmul", whole, b.call("aten::relu", w), stream_axis=0)
    if mul:
        b.call("aten::mul_.Tensor", whole, 2.0)
    return b.build(y, z, whole)


@pytest.mark.parametrize("form", GATHER_FORMS)
def test_others_read_what_is_gathered(form: str) -> None:
    for mul in (False, True):
        holds(shared(mul=mul), form=form)
        pipelined(shared(mul=mul), form=form)


def late(kind: str) -> Program:
    """The second operand is known only after the gathering, and something happens in between."""
    b = PlacedBuilder(2)
    a = b.input("a", (3, 2, 2, 3), "[0, 1] shard(1)")
    w = b.input("w", (3, 3), "[0, 1] replicated")
    other = b.input("v", (3, 3), "[0, 1] replicated")
    whole = b.set(a, "[0, 1] replicated")
    more = []
    if kind == "read":
        more.append(b.call("aten::relu", whole))
    elif kind != "nothing":
        written = {"A": a, "gathered": whole, "B": w, "other": other}[kind]
        b.call("aten::mul_.Tensor", written, 2.0)
    weight = w if kind == "B" else b.call("aten::relu", w)
    return b.build(b.call("aten::matmul", whole, weight, stream_axis=0), whole, *more)


@pytest.mark.parametrize(
    ("kind", "times"), [("nothing", 1), ("other", 1), ("read", 0), ("A", 0), ("gathered", 0), ("B", 0)]
)
def test_where_the_work_cannot_move_it_stays(kind: str, times: int) -> None:
    pipelined(late(kind), times)
    verdict = verify(PipelinedMatmul(), late(kind))
    assert (verdict.status, verdict.changed) == ("passed", times > 0)


def test_pipelines_follow_each_other() -> None:
    """The first product is the second factor's source, and the communication of both stays in order."""
    b = PlacedBuilder(3)
    a = b.input("a", (2, 3, 1, 3), "[1, 0, 2] shard(1)")
    w = b.input("w", (3, 3), "[1, 0, 2] replicated")
    x = b.call("aten::relu", b.call("aten::matmul", b.set(a, "[1, 0, 2] replicated"), w, stream_axis=0))
    y = b.set(b.set(x, "[1, 0, 2] shard(1)"), "[1, 0, 2] replicated")
    program = b.build(b.call("aten::matmul", y, w, stream_axis=0))
    for form in GATHER_FORMS:
        pipelined(program, 2, form=form)
        holds(program, form=form, number_of_streams=2)


def test_ranks_that_take_no_part_do_nothing() -> None:
    graphs = [gm.graph for gm in pipelined(gathered(4, (3, 1), 2)).graph_modules()]
    assert [bool(calls(graph)) for graph in graphs] == [False, True, False, True]


# ------------------------------------------------------------------------------------------------------ planted defects


def planted(defect: str, form: str) -> object:
    """The pass, followed by something that breaks what it wrote."""

    def broken(gm: fx.GraphModule) -> fx.GraphModule:
        PipelinedMatmul(form=form, number_of_streams=2)(gm)
        graph, found = gm.graph, list(gm.graph.nodes)
        named = {kind: [n for n in found if n.name.startswith(kind)] for kind in ("synchronize", "wait", "permute")}
        if defect == "no first synchronize":
            graph.erase_node(named["synchronize"][0])
        elif defect == "no join":
            graph.erase_node(named["synchronize"][-1])
        elif defect == "no wait":
            graph.erase_node(named["wait"][0])
        elif defect == "team of sorted ranks":
            for node in found:
                if node.name.startswith(("all_gather", "permute")):
                    node.args = (*node.args[:2], sorted(node.args[2]))
        else:
            for node in named["permute"]:
                targets = node.args[1]
                node.args = (node.args[0], [targets.index(i) for i in range(len(targets))], node.args[2])
        gm.recompile()
        return gm

    return broken


@pytest.mark.parametrize(
    ("defect", "form"),
    [
        ("no wait", "collective"),
        ("no wait", "p2p"),
        ("no wait", "ring"),
        ("team of sorted ranks", "collective"),
        ("the other way round", "p2p"),
        ("the other way round", "ring"),
        *[(defect, form) for defect in ("no first synchronize", "no join") for form in GATHER_FORMS],
    ],
)
def test_planted_defects_are_refuted(defect: str, form: str) -> None:
    verdict = verify(planted(defect, form), gathered(3, (1, 0, 2), 3), contract=PipelinedMatmul().contract)
    assert verdict.status == "refuted"


# --------------------------------------------------------------------------------------------------------------- gloo


def test_process_groups_agree() -> None:
    with ProcessGroupPool(2) as pool:
        for form in GATHER_FORMS:
            verdict = verify(PipelinedMatmul(form=form), gathered(2, (1, 0), 3, "bias"), confirm=pool)
            assert (verdict.status, pool.name in verdict.executors) == ("passed", True)


@pytest.mark.slow
def test_process_groups_of_four_agree() -> None:
    with ProcessGroupPool(4) as pool:
        for form in GATHER_FORMS:
            for world, mesh in ((4, (2, 0, 3, 1)), (4, (3, 1))):
                verdict = verify(PipelinedMatmul(form=form), gathered(world, mesh, 2), confirm=pool)
                assert (verdict.status, pool.name in verdict.executors) == ("passed", True)
