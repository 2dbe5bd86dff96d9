"""The stream executor on host IR: what goes wrong in some order of the streams, and that sound programs do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from tcverify.application import Pair
from tcverify.checks import Evidence
from tcverify.checks.streams.happens_before import find_order_violations
from tcverify.checks.streams.interleavings import check_interleavings
from tcverify.execution import Exploration, Lockstep, explore
from tcverify.passes.resharding.layouts import resharding_of
from tcverify.passes.resharding.writing import HostWriter
from tcverify.program import Contract, PlacedBuilder, Program
from tcverify.program.finding import Finding
from tests.support.host_programs import TEAM, Host, nothing, program

Lower = Callable[[fx.GraphModule], None]


def gathered_matmul(chunks: int = 4, mesh: str = "[2, 0, 1]") -> Program:
    """A [S, 3, 2, 5], sharded on dim 1, gathered and multiplied."""
    b = PlacedBuilder(3)
    a = b.input("a", (chunks, 3, 2, 5), f"{mesh} shard(1)")
    w = b.input("w", (5, 6), f"{mesh} replicated")
    return b.build(b.call("aten::matmul", b.set(a, f"{mesh} replicated"), w))


def pipelined(gm: fx.GraphModule, workers: int = 3, *, left_out: str = "", extra: str = "") -> None:
    """All gather and matmul, chunk by chunk on worker streams. Leaves one kind of step out, or frees where it must not."""
    gather, matmul = (node for node in gm.graph.nodes if node.op == "call_function")
    made = resharding_of(gather)
    assert made is not None
    w = HostWriter(gm.graph)
    with w.before(gather):
        caller = w.current_stream()
        whole = w.allocate(made.shape, torch.float32)
        out = w.allocate(matmul.meta["val"].shape, torch.float32)
        for j in range(made.shape[0]):
            w.set_stream(w.stream(j % workers))
            if left_out != "first synchronize":
                w.synchronize(caller)
        for j in range(made.shape[0]):
            stream = w.stream(j % workers)
            w.set_stream(stream)
            shard, chunk = w.call("aten::select.int", gather.args[0], 0, j), w.call("aten::select.int", whole, 0, j)
            posted = w.call("host_ir::all_gather", shard, 0, list(made.source.mesh.ranks), out=chunk)
            if left_out != "wait":
                w.wait(posted)
            product = w.call("aten::matmul", chunk, matmul.args[1])
            w.call("aten::copy_", w.call("aten::select.int", out, 0, j), product)
            if left_out == "wait":  # too late, so that the communication is waited for at all
                w.wait(posted)
            if extra == "free on a worker" and j == 0:
                w.deallocate(whole)
            w.set_stream(caller)
            if left_out != "join":
                w.synchronize(stream)
            if extra == "free too early" and j == 0:
                w.deallocate(whole)
        if extra == "free":
            w.deallocate(whole)
    matmul.replace_all_uses_with(out)
    gm.graph.erase_node(matmul)
    gm.graph.erase_node(gather)


def lowered(program: Program, lower: Lower) -> Program:
    modules = program.graph_modules()
    for gm in modules:
        lower(gm)
    return program.with_graphs([gm.graph for gm in modules])


def played(program: Program) -> Exploration:
    found = explore(program, inputs="stream0", systematic=True)
    assert found is not None
    assert found.complete
    return found


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("chunks", [1, 3, 4])
def test_no_order_goes_wrong_in_a_sound_program(chunks: int, workers: int) -> None:
    program = lowered(gathered_matmul(chunks), lambda gm: pipelined(gm, workers, extra="free"))
    assert not played(program).observations


@pytest.mark.parametrize(
    ("left_out", "kind", "words"),
    [
        ("first synchronize", "RAW", "not yet written by 'the inputs' on the caller's stream"),
        ("wait", "RAW", "not yet written by 'all_gather' on the stream of team [2, 0, 1]"),
        (
            "join",
            "RAW",
            "'output' on the caller's stream reads the storage of 'empty_1', which is not yet written by 'copy_",
        ),
    ],
)
def test_what_is_left_out_shows_in_some_order(left_out: str, kind: str, words: str) -> None:
    program = lowered(gathered_matmul(), lambda gm: pipelined(gm, left_out=left_out))
    assert any(kind == seen.kind and words in seen.text for seen in played(program).observations)


def test_memory_that_is_freed_on_a_worker_while_others_use_it() -> None:
    program = lowered(gathered_matmul(2), lambda gm: pipelined(gm, extra="free on a worker"))
    found = explore(program, inputs="stream0", systematic=True)
    assert found is None  # it does not even run in issue order: a later chunk is used after the free
    run = Lockstep().run(program)
    assert run.error is not None
    assert "has freed" in str(run.error.error)


def test_streams_are_named_in_words() -> None:
    program = lowered(gathered_matmul(), lambda gm: pipelined(gm, left_out="wait"))
    places = {str(event).partition(": ")[0] for seen in played(program).observations for event in seen.events}
    assert "rank 0, the caller's stream" in places
    assert "rank 0, worker stream 0" in places


def test_communications_of_one_team_keep_their_order() -> None:
    """Chunks on different workers share the team, and so the stream that carries its communications."""
    program = lowered(gathered_matmul(), pipelined)
    found = played(program)
    assert not found.observations
    assert all(found.streams[0][f"all_gather{suffix}"] == -1 for suffix in ("", "_1", "_2", "_3"))


def test_chunks_of_large_buffers_are_told_apart() -> None:
    """Four million elements, in chunks on workers of their own."""
    b = PlacedBuilder(2)
    a = b.input("a", (8, 2, 128, 1024), "[0, 1] shard(1)")
    w = b.input("w", (1024, 2), "[0, 1] replicated")
    made = b.build(b.call("aten::matmul", b.set(a, "[0, 1] replicated"), w))
    found = explore(lowered(made, lambda gm: pipelined(gm, 2, extra="free")), inputs="stream0")
    assert found is not None
    assert not found.observations


def test_buffers_in_too_many_pieces_are_not_explored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tcverify.execution.streams.memory_cells._MOST_RUNS", 4)
    assert explore(lowered(gathered_matmul(8), pipelined), inputs="stream0") is None


@pytest.mark.parametrize(
    ("join", "read", "kinds"),
    [
        (True, True, []),
        (True, False, []),
        (False, True, ["race", "unordered-collectives"]),
        (False, False, ["unordered-collectives"]),
    ],
)
def test_a_collective_that_blocks_runs_on_the_current_stream_alone(join: bool, read: bool, kinds: list[str]) -> None:
    """Communications of its team are ordered behind it by streams, if they are; happens-before and the executor agree."""

    def build(b: Host) -> Any:
        caller, worker = b.current(), b.stream(0)
        b.set(worker)
        b.sync(caller)
        summed = b.call("tensor_cast::all_reduce", b.x, b.me, TEAM)
        b.set(caller)
        if join:
            b.sync(worker)
        out = b.empty(8, 4)
        posted = b.gather(summed if read else b.y, out)
        b.wait(posted)
        b.sync(worker)
        return out, summed

    before, after = program(nothing), program(build)
    evidence = Evidence(Pair(before, after, changed=True), Contract(inputs="stream0"))
    evidence.taken["lockstep"] = [Lockstep().compare(before, after)]
    evidence.taken["stream-orders"] = played(after)
    static = find_order_violations(evidence, everything=True)
    assert sorted(finding.kind for finding in static if isinstance(finding, Finding)) == kinds
    assert bool(evidence.exploration.observations) == bool(kinds)
    assert check_interleavings(evidence) == []


def test_a_program_that_only_frees_has_one_order() -> None:
    """Collectives of other dialects in it block as lockstep says, and not as a team's stream does."""

    def free(gm: fx.GraphModule) -> None:
        relu = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)[0]
        w = HostWriter(gm.graph)
        with w.before(gm.graph.output_node()):
            w.deallocate(relu)

    b = PlacedBuilder(2)
    x = b.input("x", (2,), "[0, 1] replicated")
    program = b.build(b.call("aten::neg", b.call("aten::relu", x)))
    assert explore(lowered(program, free)) is None
