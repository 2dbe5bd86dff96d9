"""Streams of host IR: how they are read, and what happens-before and the check of order find; beside each defect a sound
neighbour of which they say nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from tcverify import Contract, verify
from tcverify.application import Pair
from tcverify.checks import CHECKS, Evidence
from tcverify.checks.streams.anchors import is_lowered, reading_of
from tcverify.checks.streams.reading import BEGINNING
from tcverify.checks.streams.replay import Arrow, replay_streams
from tcverify.execution import Lockstep, explore
from tcverify.passes.resharding.writing import HostWriter
from tcverify.program import Mesh, PlacedBuilder
from tcverify.program.finding import Doubt
from tests.support.host_programs import CHUNKED, TEAM, Build, Host, findings, found, judge, kinds, pipelined, program

ORDER = ("happens-before", "order")


def shows(build: Build, **options: Any) -> bool:
    """Whether some order of the streams shows something."""
    played = explore(program(build, **options), inputs="stream0", systematic=True)
    assert played is not None
    return bool(played.observations)


# --------------------------------------------------------------------------------------------------------- the reading


def on_a_worker(b: Host, *, begin: bool = True, join: bool = True) -> Any:
    caller, worker = b.current(), b.stream(0)
    b.set(worker)
    if begin:
        b.sync(caller)
    product = b.mm(b.x)
    b.set(caller)
    if join:
        b.sync(worker)
    return product


def test_ops_run_on_the_current_stream_and_wait_for_what_it_is_synchronised_with() -> None:
    reading = reading_of(program(on_a_worker), 0)
    assert reading.host
    assert reading.lowered
    assert [(op.name, op.stream, op.after) for op in reading.ops] == [("mm", 1, (BEGINNING,))]
    assert reading.output is not None
    assert (reading.output.stream, reading.output.after) == (0, (0,))
    assert reading.left_on == 0


def test_a_communication_runs_on_the_stream_of_its_team_behind_where_it_is_posted() -> None:
    def build(b: Host) -> Any:
        out = b.empty(8, 4)
        posted = b.gather(b.x, out)
        own = b.relu(b.x)
        b.wait(posted)
        return b.relu(posted), own

    reading = reading_of(program(build), 0)
    assert [(op.name, op.stream, op.queued_on, op.after) for op in reading.ops] == [
        ("empty", 0, 0, ()), ("all_gather", -1, 0, (0,)), ("relu", 0, 0, ()), ("relu_1", 0, 0, (1,)),
    ]  # fmt: skip
    assert reading.teams == {-1: (0, 1)}
    assert reading.landed == {1: (5, 0)}
    assert is_lowered(program(build).graphs[0])


def test_what_a_stream_waits_for_binds_streams_that_wait_for_it() -> None:
    """Also when nothing has run on the one in between."""

    def build(b: Host) -> Any:
        caller, first, second = b.current(), b.stream(0), b.stream(1)
        made = b.mm(b.x)
        b.set(first)
        b.sync(caller)
        b.set(second)
        b.sync(first)
        later = b.relu(made)
        b.set(caller)
        b.sync(second)
        return later

    assert reading_of(program(build), 0).ops[1].after == (0,)
    assert kinds(build, streams=2) == []
    assert not shows(build)


def test_messages_to_a_peer_are_communications_of_two() -> None:
    def build(b: Host) -> Any:
        out = b.empty(4, 4)
        posted = b.post("send", b.x, 1) if b.me == 0 else b.post("recv", out, 0)
        b.wait(posted)
        return out if b.me else b.relu(b.x)

    made = program(build)
    assert [reading_of(made, rank).teams for rank in (0, 1)] == [{-1: (0, 1)}, {-1: (0, 1)}]
    assert kinds(build) == []


# --------------------------------------------------------------------------------------------------------------- races


def test_a_worker_that_does_not_wait_for_the_inputs() -> None:
    assert kinds(on_a_worker, streams=1) == []
    finding = found(lambda b: on_a_worker(b, begin=False), streams=1)
    assert (finding.kind, finding.check, finding.node) == ("race", "happens-before", "mm")
    assert finding.title == (
        "'mm' on worker stream 0 reads input 'x' before its write on the caller's stream is complete: worker stream 0 is not "
        "synchronised with the caller's stream before"
    )
    assert "worker stream 0: [mm]" in finding.detail
    assert kinds(lambda b: on_a_worker(b, begin=False), inputs="ready") == []
    assert shows(lambda b: on_a_worker(b, begin=False))


def test_an_output_whose_worker_is_not_joined() -> None:
    finding = found(lambda b: on_a_worker(b, join=False), streams=1)
    assert finding.kind == "race"
    assert finding.data["kind"] == "output"
    assert finding.title == (
        "output 'mm' is read on the caller's stream before its write on worker stream 0 is complete: the caller's stream is not "
        "synchronised with worker stream 0 behind 'mm'"
    )
    assert kinds(lambda b: on_a_worker(b, join=False), boundary="lenient") == []
    assert shows(lambda b: on_a_worker(b, join=False))


def waited_for_elsewhere(b: Host, *, on: int) -> Any:
    """Worker 0 posts and waits; worker `on` uses what has arrived."""
    caller, first = b.current(), b.stream(0)
    out = b.empty(8, 4)
    for j in (0, 1):
        b.set(b.stream(j))
        b.sync(caller)
    b.set(first)
    posted = b.gather(b.x, out)
    b.wait(posted)
    b.set(b.stream(on))
    used = b.relu(posted)
    b.set(caller)
    b.sync(b.stream(0))
    b.sync(b.stream(1))
    return used


def test_a_wait_binds_the_stream_that_waits_and_no_other() -> None:
    assert kinds(lambda b: waited_for_elsewhere(b, on=0), streams=2) == []
    finding = found(lambda b: waited_for_elsewhere(b, on=1), streams=2)
    assert (finding.kind, finding.node) == ("race", "relu")
    assert finding.title == (
        "'relu' on worker stream 1 reads 'all_gather' before its write on the stream of team [0, 1] is complete: worker "
        "stream 1 does not wait for 'all_gather', and is not synchronised with worker stream 0, which does, behind 'wait'"
    )
    assert shows(lambda b: waited_for_elsewhere(b, on=1))


def freed_elsewhere(b: Host, *, join: bool) -> Any:
    caller, worker = b.current(), b.stream(0)
    made = b.relu(b.x)
    b.set(worker)
    b.sync(caller)
    used = b.mm(made)
    b.set(caller)
    if join:
        b.sync(worker)
    b.free(made)
    b.sync(worker)
    return used


def test_what_is_freed_while_another_stream_uses_it() -> None:
    assert kinds(lambda b: freed_elsewhere(b, join=True), streams=1, deallocation=True) == []
    finding = found(lambda b: freed_elsewhere(b, join=False), streams=1, deallocation=True)
    assert (finding.kind, finding.node, finding.data["kind"]) == ("race", "deallocate", "WAR")
    assert finding.title == (
        "'deallocate' on the caller's stream frees 'relu' before its read by 'mm' on worker stream 0 is complete: the caller's "
        "stream is not synchronised with worker stream 0 behind 'mm'"
    )
    assert shows(lambda b: freed_elsewhere(b, join=False))


def test_a_worker_that_writes_into_what_is_allocated_behind_its_synchronisation() -> None:
    def build(b: Host, *, early: bool) -> Any:
        caller, worker = b.current(), b.stream(0)
        out = b.empty(4, 4) if early else None
        b.set(worker)
        b.sync(caller)
        b.set(caller)
        out = b.empty(4, 4) if out is None else out
        b.set(worker)
        b.put(out, b.x)
        b.set(caller)
        b.sync(worker)
        return out

    assert kinds(lambda b: build(b, early=True), streams=1) == []
    finding = found(lambda b: build(b, early=False), streams=1)
    assert (finding.kind, finding.node, finding.data["first"]) == ("race", "copy_", "empty")
    assert shows(lambda b: build(b, early=False))


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
@pytest.mark.parametrize("streams", [1, 2, 3, 4])
def test_chunks_of_one_buffer_on_streams_of_their_own_are_no_race(streams: int, dim: int) -> None:
    def build(b: Host) -> Any:
        return pipelined(b, streams, dim=dim, free=True)

    assert kinds(build, given=CHUNKED, streams=streams, deallocation=True, lowered=True) == []
    assert Lockstep().run(program(build, given=CHUNKED)).finished


@pytest.mark.parametrize("dim", [0, 1])
def test_chunks_that_overlap_are_a_race(dim: int) -> None:
    def build(b: Host, *, apart: bool) -> Any:
        caller = b.current()
        out = b.empty(4, 4)
        for j in (0, 1):
            b.set(b.stream(j))
            b.sync(caller)
            begin = 2 * j if apart else j
            b.put(
                b.call("aten::slice.Tensor", out, dim, begin, begin + 2), b.call("aten::slice.Tensor", b.x, dim, 0, 2)
            )
        b.set(caller)
        b.sync(b.stream(0))
        b.sync(b.stream(1))
        return out

    assert kinds(lambda b: build(b, apart=True), streams=2) == []
    finding = found(lambda b: build(b, apart=False), streams=2)
    assert (finding.kind, finding.node, finding.data["kind"]) == ("race", "copy__1", "WAW")
    assert shows(lambda b: build(b, apart=False))
    assert not shows(lambda b: build(b, apart=True))


@pytest.mark.parametrize(
    ("left_out", "kind"),
    [("begin", "race"), ("join", "race"), ("wait", "missing-wait"), ("restore", "stream-not-restored")],
)
def test_each_step_of_the_pipeline_is_needed(left_out: str, kind: str) -> None:
    seen = kinds(lambda b: pipelined(b, **{left_out: False}), given=CHUNKED, streams=2)
    assert kind in seen
    assert set(seen) <= {kind, "race"}


def test_without_a_promise_of_inputs_and_streams_little_is_asked() -> None:
    assert kinds(lambda b: pipelined(b, 3, begin=False), given=CHUNKED, streams=None) == ["race"]  # with the allocation
    assert kinds(lambda b: on_a_worker(b, begin=False, join=False), inputs="ready", boundary="lenient") == []


# ------------------------------------------------------------------------------------------ communications under way


def ring(b: Host, *, waits: bool = True, reads: bool = True) -> Any:
    """Passes chunk 0 of a buffer on into chunk 1, and meanwhile reads chunk 0."""
    buffer = b.empty(2, 4, 4)
    b.put(b.part(buffer, 0), b.x)
    posted = b.post("permute", b.part(buffer, 0), [1, 0], TEAM, out=b.part(buffer, 1))
    meanwhile = b.mm(b.part(buffer, 0 if reads else 1))
    if waits:
        b.wait(posted)
    return b.add(meanwhile, b.part(buffer, 1))


def test_parts_of_a_buffer_may_be_sent_and_received_side_by_side() -> None:
    assert kinds(ring) == []
    finding = found(lambda b: ring(b, reads=False))
    assert (finding.kind, finding.node) == ("async-race", "mm")
    assert shows(lambda b: ring(b, reads=False))
    assert kinds(lambda b: ring(b, waits=False)) == ["missing-wait"]


def under_way(b: Host, meddle: Callable[[Host, fx.Node, fx.Node, fx.Node], Any]) -> Any:
    given, out = b.relu(b.x), b.empty(8, 4)
    posted = b.gather(given, out)
    meddle(b, given, out, posted)
    b.wait(posted)
    return b.relu(posted)


@pytest.mark.parametrize(
    ("meddle", "words"),
    [
        (lambda b, given, out, posted: b.free(given), "'deallocate' frees 'relu' while 'all_gather' may still read it"),
        (lambda b, given, out, posted: b.free(out), "'deallocate' frees 'empty', which 'all_gather' writes, before"),
        (lambda b, given, out, posted: b.put(given, b.x), "'copy_' writes into 'relu' while 'all_gather' may still read it"),
        (lambda b, given, out, posted: b.relu(out), "'relu_1' reads 'empty', which 'all_gather' writes, before the"),
        (lambda b, given, out, posted: b.relu(b.part(posted, 0)), "'relu_1' reads 'empty', which 'all_gather' writes, before"),
    ],
)  # fmt: skip
def test_what_comes_too_close_to_a_communication_is_one_finding(meddle: Any, words: str) -> None:
    seen = [f for f in findings(lambda b: under_way(b, meddle), *ORDER)]
    assert [finding.kind for finding in seen] == ["async-race"]
    assert words in seen[0].title
    assert kinds(lambda b: under_way(b, lambda *_: None), *ORDER) == []
    assert kinds(lambda b: under_way(b, lambda b, given, out, posted: b.mm(given)), *ORDER) == []


def to_rank_0(b: Host, *, waits: int = 2, free: bool = False) -> Any:
    """A gather into rank 0; the other rank gets nothing."""
    given = b.relu(b.x)
    out = b.empty(8, 4) if b.me == 0 else None
    posted = b.post("gather", given, 0, 0, TEAM, out=out)
    if free:
        b.free(given)
    for _ in range(waits):
        b.wait(posted)
    if not free:
        b.free(given)
    return posted if out is not None else b.relu(b.x)


def test_a_rank_that_gets_nothing_waits_all_the_same() -> None:
    assert kinds(to_rank_0, deallocation=True) == []
    assert kinds(lambda b: to_rank_0(b, waits=1), deallocation=True) == []
    seen = found(lambda b: to_rank_0(b, waits=1 if b.me == 0 else 0))
    assert (seen.kind, seen.rank, seen.node) == ("missing-wait", 1, "gather")
    seen = found(lambda b: to_rank_0(b, free=True))
    assert (seen.kind, seen.rank, seen.node) == ("async-race", 0, "deallocate")

    def lost(b: Host) -> Any:
        out = b.empty(8, 4) if b.me == 0 else None
        posted = b.post("gather", b.x, 0, 0, TEAM, out=out)
        if out is not None:
            b.wait(posted)
        return posted if out is not None else b.relu(b.x)

    seen = found(lost)
    assert (seen.kind, seen.rank, seen.title) == ("missing-wait", 1, "no node waits for 'gather'")


@pytest.mark.parametrize("through", ["out", "view", "posted"])
def test_a_wait_may_take_an_alias(through: str) -> None:
    def build(b: Host) -> Any:
        out = b.empty(8, 4)
        posted = b.gather(b.x, out)
        b.wait({"out": out, "view": b.part(posted, 0), "posted": posted}[through])
        return b.relu(out)

    assert kinds(build) == []
    assert not shows(build)


def test_each_of_several_communications_into_one_buffer_is_waited_for() -> None:
    def build(b: Host, *, both: bool) -> Any:
        out = b.empty(2, 4, 4)
        if b.me == 0:
            for part in (b.x, b.y):
                b.wait(b.post("send", part, 1))
            return b.relu(b.x)
        posted = [b.post("recv", b.part(out, j), 0) for j in (0, 1)]
        for each in posted if both else posted[1:]:
            b.wait(each)
        return b.relu(out)

    assert kinds(lambda b: build(b, both=True)) == []
    seen = found(lambda b: build(b, both=False), "order")
    assert (seen.kind, seen.rank, seen.node) == ("missing-wait", 1, "recv")


# ------------------------------------------------------------------------------------------------- what cannot be read


def test_a_stream_that_is_none() -> None:
    def build(b: Host) -> Any:
        b.set(b.relu(b.x))
        return b.mm(b.x)

    finding = found(build)
    assert (finding.kind, finding.node) == ("stream-conflict", "set_current_stream")
    assert "names no stream" in finding.title


def test_anchors_and_host_ir_do_not_mix() -> None:
    def build(b: Host) -> Any:
        b.set(b.current())
        return b.call("tensor_cast::_internal_wait_and_bind", b.mm(b.x), 1, [])

    (doubt,) = set(judge("happens-before", build))
    assert isinstance(doubt, Doubt)
    assert doubt.detail == (
        "'_internal_wait_and_bind' is an anchor, and 'current_stream' is host IR: the graph is not checked for races"
    )


# ------------------------------------------------------------------------------------------------ with what is executed


def gathered(team: str = "[1, 0]") -> Any:
    b = PlacedBuilder(2)
    return b.build(b.call("aten::relu", b.set(b.input("x", (4, 4), f"{team} shard(0)"), f"{team} replicated")))


def lowering(*, join: bool) -> Callable[[fx.GraphModule], fx.GraphModule]:
    def lower(gm: fx.GraphModule) -> fx.GraphModule:
        writer = HostWriter(gm.graph)
        _, asked, _, end = gm.graph.nodes
        with writer.before(asked):
            caller, worker = writer.current_stream(), writer.stream(0)
            writer.set_stream(worker)
            writer.synchronize(caller)
            out = writer.allocate((4, 4), torch.float32)
            posted = writer.communicate("all_gather", asked.args[0], 0, [1, 0], out=out)
            writer.set_stream(caller)
            if join:
                writer.synchronize(worker)
        asked.replace_all_uses_with(posted)
        gm.graph.erase_node(asked)
        with writer.before(end):
            writer.deallocate(posted)
        gm.recompile()
        return gm

    return lower


def test_a_lowering_is_verified_with_all_checks() -> None:
    contract = Contract(inputs="stream0", streams=1, lowered=True, deallocation=True)
    verdict = verify(lowering(join=True), gathered(), contract=contract)
    assert (verdict.status, verdict.doubts) == ("passed", [])
    verdict = verify(lowering(join=False), gathered(), contract=contract)
    assert [finding.kind for finding in verdict.findings] == ["race"]
    assert "an order that shows it" in verdict.findings[0].detail


def test_cost_is_linear_in_the_graph() -> None:
    """Ten thousand trips of a loop."""

    def build(b: Host) -> Any:
        caller = b.current()
        value = b.relu(b.x)
        workers = [b.stream(0), b.stream(1)]
        for j in range(3_000):
            b.set(workers[j % 2])
            b.sync(caller)
            value = b.relu(value)
            b.set(caller)
            b.sync(workers[j % 2])
        return value

    made = program(build, mesh=Mesh.grid({"tp": 1}))
    pair = Pair(program(lambda b: b.relu(b.x), mesh=Mesh.grid({"tp": 1})), made, changed=True)
    evidence = Evidence(pair, Contract(inputs="stream0", streams=2, deallocation=False))
    assert [CHECKS[check](evidence) for check in ("happens-before", "host-program", "order", "memory")] == [
        [],
        [],
        [],
        [],
    ]


def test_times_and_drawings_name_streams_and_teams() -> None:
    found = replay_streams(program(lambda b: pipelined(b, 2), given=CHUNKED), 0)
    assert found.lanes == {0: "caller", 1: "worker 0", 2: "worker 1", -1: "team [0, 1]"}
    assert Arrow("", "wait", "all_gather", "matmul") in found.arrows
    assert [arrow.source for arrow in found.arrows if arrow.target == "output"] == ["copy__2", "copy__3"]
