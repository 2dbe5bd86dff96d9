"""The events of AOTAutograd's backward: what it lacks is a race, and with it nothing is found."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from tcverify.errors import Unsupported
from tcverify.program import VARYING, GraphBuilder, InputSpec, Mesh, Program, spmd_program
from tcverify.pytorch import SUBJECTS
from tcverify.pytorch.backward_streams import BackwardStreams
from tcverify.pytorch.streams import readers_of
from tcverify.strategies import DECODERS
from tcverify.verification.verifier import verify
from tests.pytorch.stream_ties import tie

if not SUBJECTS["backward_streams"].here:
    pytest.skip("this torch puts no events into a backward", allow_module_level=True)
streams = importlib.import_module("torch._functorch._aot_autograd.streams")

TP2 = Mesh.grid({"tp": 2})
#: What ties events to the nodes around them.
TIES = "wrap_all_sync_nodes_with_control_deps"
X = InputSpec("x", (2, 2), placements=(("tp", VARYING),))


def program(build: Any, **options: Any) -> Program:
    made = spmd_program(TP2, [X], lambda b: build(b, b.input("x")))
    return replace(made, options={"run": 1, "sums": False, "order": "traced", "reuse": False, **options})


def two_readers(b: GraphBuilder, x: fx.Node) -> Any:
    """On three streams, each reader has one of its own."""
    made = b.call("aten::relu", x)
    return [b.call("aten::neg", made), b.call("aten::abs", made)]


def read_aside(b: GraphBuilder, x: fx.Node) -> Any:
    """On two streams: the last reader is on the stream of what it reads, the one before it is not."""
    made = b.call("aten::relu", x)
    return [b.call("aten::neg", made), b.call("aten::abs", made), b.call("aten::exp", x)]


def waits_for_every_producer(graph: fx.Graph, consumer: fx.Node, producer: fx.Node, events: dict[Any, int]) -> None:
    """`insert_sync`, mended."""
    if producer not in events:
        events[producer] = streams.new_event()
        streams.insert_record_event_after_node(graph, producer, events[producer])
    streams.insert_wait_event_before_node(graph, consumer, events[producer])


def frees_behind_every_reader(gm: fx.GraphModule) -> None:
    """`sync_deallocations`, mended: where another stream reads a value, its own one waits at the end."""
    work = [node for node in gm.graph.nodes if node.op == "call_function" and "custom" in node.meta]
    for node in work:
        for reader in [one for one in readers_of(node) if one in work]:
            event = streams.new_event()
            streams.insert_record_event_after_node(gm.graph, reader, event)
            with gm.graph.inserting_after(next(iter(reversed(gm.graph.nodes))).prev):
                gm.graph.call_function(
                    torch.ops.streams.sync_dealloc.default, (event, streams.get_stream(node) or 0, node)
                )


def kinds(made: Program) -> set[str]:
    return {finding.kind for finding in verify(BackwardStreams(), made).findings}


def test_the_second_reader_of_a_gradient_does_not_wait() -> None:
    verdict = verify(BackwardStreams(), program(two_readers, streams=3))
    assert [finding.kind for finding in verdict.findings] == ["race"]
    assert "'abs_1' on stream 2 reads 'relu' before its write on stream 0 is complete" in verdict.findings[0].title
    assert kinds(program(two_readers, streams=2)) == set()


def test_memory_is_used_again_while_another_stream_reads_it() -> None:
    verdict = verify(BackwardStreams(), program(read_aside, streams=2, reuse=True))
    assert [finding.kind for finding in verdict.findings] == ["race"]
    assert "writes into 'relu' before its read by 'neg' on stream 1 is complete" in verdict.findings[0].title
    assert kinds(program(read_aside, streams=2)) == set()


def test_memory_is_used_again_while_another_stream_reads_a_view() -> None:
    def build(b: GraphBuilder, x: fx.Node) -> Any:
        made = b.call("aten::relu", b.call("aten::exp", x))
        return b.call("aten::neg", b.call("aten::view", made, [4]))

    verdict = verify(BackwardStreams(), program(build, run=2, streams=2, reuse=True))
    assert [finding.kind for finding in verdict.findings] == ["race"]
    assert "writes into 'relu' before its read by 'neg' on stream 1 is complete" in verdict.findings[0].title


def one_reader(b: GraphBuilder, x: fx.Node) -> Any:
    return b.call("aten::neg", b.call("aten::relu", x))


def test_events_move_as_far_as_control_deps_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any, a wait moves behind its reader."""
    if not hasattr(streams, TIES):
        pytest.skip("this torch ties events to nothing")
    assert kinds(program(one_reader, streams=2, order="early")) == set()
    monkeypatch.setattr(streams, TIES, lambda _: None)
    assert kinds(program(one_reader, streams=2, order="late")) == {"race"}
    monkeypatch.setattr(streams, TIES, tie)
    assert kinds(program(one_reader, streams=2, order="late")) == set()
    assert kinds(program(read_aside, streams=2, order="late")) == set()


def test_an_event_covers_what_its_stream_waits_for() -> None:
    """Stream 1 only views what stream 0 computes, and stream 2 waits for that view alone."""

    def build(b: GraphBuilder, x: fx.Node) -> Any:
        return b.call("aten::neg", b.call("aten::view", b.call("aten::relu", x), [4]))

    assert kinds(program(build, streams=3)) == set()


@pytest.mark.parametrize(("order", "reuse"), [("traced", False), ("traced", True), ("late", False), ("early", False)])
def test_with_every_event_nothing_is_found(monkeypatch: pytest.MonkeyPatch, order: str, reuse: bool) -> None:
    if order != "traced":
        if not hasattr(streams, TIES):
            pytest.skip("this torch ties events to nothing")
        monkeypatch.setattr(streams, TIES, tie)
    monkeypatch.setattr(streams, "insert_sync", waits_for_every_producer)
    monkeypatch.setattr(streams, "sync_deallocations", frees_behind_every_reader)
    fired = 0
    decoder = DECODERS["wild"]
    for seed in range(60):
        made = decoder.decode(TP2, bytes((seed * 37 + k * 101) % 251 for k in range(decoder.width)))
        options = {"streams": 3, "run": 1 + seed % 2, "order": order, "reuse": reuse}
        verdict = verify(BackwardStreams(), replace(made, options=options))
        assert not verdict.findings, verdict.findings
        fired += verdict.status == "passed" and verdict.changed
    assert fired > 20


def test_an_event_that_is_lost_is_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "insert_sync", lambda *_: None)
    assert kinds(program(two_readers, streams=2)) == {"race"}


def test_sums_take_the_stream_of_their_reader() -> None:
    """Where they count as accumulations of gradients."""

    def build(b: GraphBuilder, x: fx.Node) -> Any:
        parts = [b.call("aten::neg", x), b.call("aten::abs", x), b.call("aten::exp", x)]
        return b.call("aten::relu", b.call("aten::add.Tensor", parts[0], parts[1])), parts[2]

    def stream_of_sum(sums: bool) -> Any:
        gm = program(build, streams=2, sums=sums).graph_module(0)
        BackwardStreams()(gm)
        (made,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
        return made.args[0].args[1]

    assert (stream_of_sum(sums=False), stream_of_sum(sums=True)) == (1, 0)


def test_what_writes_in_place_is_declined() -> None:
    made = program(lambda b, x: b.call("aten::add_.Tensor", b.call("aten::relu", x), 1), streams=2)
    with pytest.raises(Unsupported, match="writes in place"):
        BackwardStreams()(made.graph_module(0))
