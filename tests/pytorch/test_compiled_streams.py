"""Code on several streams as Inductor compiles it: where a buffer is used again that another stream reads there is a race."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from tcverify.program import VARYING, GraphBuilder, InputSpec, Mesh, Program, spmd_program
from tcverify.pytorch import SUBJECTS
from tcverify.pytorch.compiled_streams import CompiledStreams
from tcverify.pytorch.subjects import release
from tcverify.strategies import DECODERS
from tcverify.verification.verifier import verify
from tests.pytorch.stream_ties import tie

if not SUBJECTS["compiled_streams"].here:
    pytest.skip("this torch writes no streams into compiled code", allow_module_level=True)
graph_capture = importlib.import_module("torch._functorch._aot_autograd.graph_capture")

TP2 = Mesh.grid({"tp": 2})
#: What ties events to the nodes around them.
TIES = "wrap_all_sync_nodes_with_control_deps"
INPUTS = [InputSpec(name, (2, 2), placements=(("tp", VARYING),)) for name in "xv"]


def program(build: Any, **options: Any) -> Program:
    made = spmd_program(TP2, INPUTS, lambda b: build(b, b.input("x"), b.input("v")))
    return replace(made, options={"run": 1, "streams": 2, **options})


def read_aside(b: GraphBuilder, x: fx.Node, v: fx.Node) -> Any:
    """Stream 1 reads what stream 0 computes, and stream 0 computes something else of the same size."""
    made = b.call("aten::mm", x, v)
    return [b.call("aten::mm", made, v), b.call("aten::mm", v, x)]


def read_before_waiting(b: GraphBuilder, x: fx.Node, v: fx.Node) -> Any:
    """Stream 0 waits for what stream 1 reads before it allocates anything."""
    made = b.call("aten::mm", x, v)
    return b.call("aten::mm", b.call("aten::mm", made, v), v)


def chained(b: GraphBuilder, x: fx.Node, v: fx.Node) -> Any:
    """With two nodes in a row per stream, only stream 1 allocates behind what it reads of stream 0."""
    made = b.call("aten::mm", b.call("aten::mm", x, v), v)
    return b.call("aten::mm", b.call("aten::mm", made, v), v)


def read_aside_of_a_larger_one(b: GraphBuilder, x: fx.Node, v: fx.Node) -> Any:
    """What stream 0 computes next does not fit into the memory that stream 1 reads."""
    made = b.call("aten::mm", x, v)
    return [b.call("aten::mm", made, v), b.call("aten::repeat", v, [8, 32])]


def kinds(made: Program) -> set[str]:
    return {finding.kind for finding in verify(CompiledStreams(), made).findings}


def test_a_buffer_that_another_stream_reads_is_used_again() -> None:
    verdict = verify(CompiledStreams(), program(read_aside))
    assert [finding.kind for finding in verdict.findings] == ["race"]
    assert "before its read by 'mm_default_1' on stream 1 is complete" in verdict.findings[0].title
    assert kinds(program(read_aside, allow_buffer_reuse=False)) == set()


def test_memory_that_another_stream_reads_is_given_out_again() -> None:
    options = {"allow_buffer_reuse": False, "caching": True}
    verdict = verify(CompiledStreams(), program(read_aside, **options))
    assert [finding.kind for finding in verdict.findings] == ["race"]
    title = verdict.findings[0].title
    assert "'empty_strided_default_overwritten' on stream 0 writes into" in title
    assert "'mm_default_1' on stream 1" in title
    assert kinds(program(read_aside, caching=True)) == {"race"}  # where code itself uses the buffer again


@pytest.mark.parametrize(("build", "run"), [(read_before_waiting, 1), (chained, 2), (read_aside_of_a_larger_one, 1)])
def test_memory_goes_back_to_its_stream_and_to_what_fits(build: Any, run: int) -> None:
    verdict = verify(CompiledStreams(), program(build, run=run, allow_buffer_reuse=False, caching=True))
    assert verdict.status == "passed", verdict.findings or verdict.doubts
    assert verdict.changed


def test_memory_that_is_never_deleted_is_not_given_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.scheduler.Scheduler.free_buffers", lambda _: None)
    assert kinds(program(read_aside, caching=True)) == set()


def test_ops_run_on_the_streams_that_generated_code_enters() -> None:
    gm = program(read_aside, allow_buffer_reuse=False).graph_module(0)
    made = CompiledStreams()(gm)
    assert made is not None
    places = {str(node): node.args[0].args[1] for node in made.graph.nodes if node.name.startswith("mm_default")}
    assert places == {"mm_default": 0, "mm_default_1": 1, "mm_default_2": 0}


def test_an_event_that_is_lost_is_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """What users write is sound; without their events, stream 1 reads too early."""
    monkeypatch.setattr("tcverify.pytorch.user_streams._Waits.write", lambda _: None)
    assert kinds(program(read_aside, allow_buffer_reuse=False)) == {"race"}


@pytest.mark.skipif(
    release(torch.__version__) < (2, 15),
    reason="Inductor of torch 2.13 runs readers in front of the control_deps that they read",
)
def test_where_events_keep_their_places_and_buffers_live_on_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_capture, TIES, tie)
    monkeypatch.setattr("torch._inductor.scheduler.Scheduler.free_buffers", lambda _: None)
    fired = 0
    decoder = DECODERS["wild"]
    for seed in range(16):
        made = decoder.decode(TP2, bytes((seed * 37 + k * 101) % 251 for k in range(decoder.width)))
        options = {"streams": 3, "run": 1 + seed % 2, "caching": True, "inplace_buffers": False}
        verdict = verify(CompiledStreams(), replace(made, options=options))
        assert not verdict.findings, verdict.findings
        fired += verdict.status == "passed" and verdict.changed
    assert fired > 8
