"""The check of host programs: what a lowering promises of streams, and of what it leaves."""

from __future__ import annotations

from typing import Any

import pytest

from tcverify.application import Pair
from tcverify.checks import CHECKS, Evidence
from tcverify.program import Contract, PlacedBuilder, Program
from tcverify.program.finding import KINDS, Finding
from tests.support.host_programs import CHUNKED, Host, found, kinds, pipelined

CHECK = "host-program"


def workers(b: Host, *indices: int, begin: bool = True, join: bool = True, back: bool = True) -> Any:
    """A product on each of some workers."""
    caller = b.current()
    made = []
    for index in indices:
        worker = b.stream(index)
        b.set(worker)
        if begin:
            b.sync(caller)
        made.append(b.mm(b.x))
        b.set(caller)
        if join:
            b.sync(worker)
    if not back:
        b.set(b.stream(indices[-1]))
    return tuple(made)


def test_indices_are_below_what_is_promised() -> None:
    assert kinds(lambda b: workers(b, 0, 1, 2), streams=3) == []
    assert kinds(lambda b: workers(b, 0, 5)) == []  # nothing is promised
    finding = found(lambda b: workers(b, 0, 3, 4), streams=3)
    assert (finding.kind, finding.check, finding.node, finding.rank) == ("stream-index", CHECK, "stream_1", 0)
    assert finding.title == "'stream_1' names worker stream 3, and there are 3"
    assert finding.data == {"index": 3, "streams": 3}
    assert kinds(lambda b: workers(b, 0), streams=0) == ["stream-index"]


def test_no_index_is_below_zero_whatever_is_promised() -> None:
    assert kinds(lambda b: workers(b, 0), CHECK) == []
    finding = found(lambda b: workers(b, 0, -1), CHECK)
    assert finding.title == "'stream_1' names worker stream -1: indices begin at 0"


def test_the_callers_stream_is_current_again() -> None:
    assert kinds(lambda b: workers(b, 0, 1), streams=2) == []
    finding = found(lambda b: workers(b, 0, 1, back=False), streams=2)
    assert (finding.kind, finding.node) == ("stream-not-restored", "set_current_stream_4")
    assert finding.title == "worker stream 1 is current at the end, not the caller's stream"
    assert kinds(lambda b: workers(b, 0, 1, back=False)) == []


def test_a_loop_without_trips_leaves_nothing() -> None:
    assert kinds(lambda b: (b.set(b.current()), b.relu(b.x))[1], streams=1, lowered=True, deallocation=True) == []


def own_work(b: Host, *, begin: bool) -> Any:
    """A worker that touches nothing of the caller's."""
    caller, worker = b.current(), b.stream(0)
    b.set(worker)
    if begin:
        b.sync(caller)
    made = b.relu(b.empty(4, 4))
    b.set(caller)
    b.sync(worker)
    return made


def test_a_worker_begins_behind_the_callers_stream() -> None:
    assert kinds(lambda b: own_work(b, begin=True), streams=1) == []
    finding = found(lambda b: own_work(b, begin=False), streams=1)
    assert (finding.kind, finding.node) == ("worker-not-synchronised", "empty")
    assert "'empty' is the first op on worker stream 0" in finding.title
    assert kinds(lambda b: own_work(b, begin=False)) == []
    assert kinds(lambda b: own_work(b, begin=False), streams=1, inputs="ready") == ["worker-not-synchronised"]


def test_what_a_race_says_is_not_said_twice() -> None:
    seen = kinds(lambda b: workers(b, 0, 1, begin=False), streams=2)
    assert seen == ["race"]
    assert kinds(lambda b: pipelined(b, 3, begin=False), given=CHUNKED, streams=3) == ["race"]


def test_a_worker_may_wait_for_the_caller_through_another_one() -> None:
    def build(b: Host) -> Any:
        caller, first, second = b.current(), b.stream(0), b.stream(1)
        b.set(first)
        b.sync(caller)
        b.set(second)
        b.sync(first)
        made = b.mm(b.x)
        b.set(caller)
        b.sync(second)
        return made

    assert kinds(build, streams=2) == []


# ------------------------------------------------------------------------------------------------------- what is left


def resharded(*, reduce: bool = False, axis: int | None = None) -> Program:
    b = PlacedBuilder(3)
    x = b.input("x", (4, 4), "[1, 2] shard(0)")
    y = b.reduce(x, 0, "[1, 2] replicated", "sum") if reduce else b.set(x, "[1, 2] replicated")
    return b.build(b.call("aten::relu", y, stream_axis=axis))


def judged(rewritten: Program, *, changed: bool = True, **promises: Any) -> list[Finding]:
    pair = Pair(resharded(), rewritten, changed=changed)
    return [f for f in CHECKS[CHECK](Evidence(pair, Contract(**promises))) if isinstance(f, Finding)]


@pytest.mark.parametrize("reduce", [False, True])
def test_a_lowering_leaves_no_resharding(reduce: bool) -> None:
    (finding,) = judged(resharded(reduce=reduce), lowered=True)
    name = "reduce" if reduce else "set"
    assert (finding.kind, finding.rank) == ("resharding-left", 1)
    assert f"(multidevice::{name}) is not lowered" in finding.title
    assert "'[1, 2] shard(0)' to '[1, 2] replicated'" in finding.detail
    assert judged(resharded(reduce=reduce)) == []
    assert judged(resharded(reduce=reduce), lowered=True, changed=False) == []


def test_a_lowering_leaves_no_stream_axis() -> None:
    seen = judged(resharded(axis=1), lowered=True)
    assert [finding.kind for finding in seen] == ["resharding-left", "stream-axis-left"]
    assert seen[1].title == "dim 1 of 'relu' is a stream axis, but no loop runs over it"
    assert judged(resharded(axis=1)) == []


def test_kinds_are_known() -> None:
    kinds = {
        "stream-index", "stream-not-restored", "worker-not-synchronised", "resharding-left", "stream-axis-left",
    }  # fmt: skip
    assert kinds <= KINDS.keys()
