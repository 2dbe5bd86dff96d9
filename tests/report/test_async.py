"""How reports show findings about asynchronous graphs: the block, the trace, the page."""

from __future__ import annotations

import io
import json
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console
from torch import fx

from tcverify.application import PassFacts
from tcverify.cases.counterexample import Counterexample, make_counterexample
from tcverify.errors import UsageError
from tcverify.program import Contract
from tcverify.report.block import make_block
from tcverify.report.html import to_html
from tcverify.report.html.streams import draw_schedule
from tcverify.report.terminal import show
from tcverify.report.timetable import timed_ranks, timetables
from tcverify.report.trace import to_trace
from tcverify.verification.verifier import verify
from tests.report.test_html import Reader
from tests.support.async_programs import Functional, program

US = 1e-6
FACTS = PassFacts("mine", "mine.py:Pass", {}, "abc", {})


def two_layers(b: Functional, timed: bool = True) -> Any:
    cost = (lambda microseconds: microseconds * US) if timed else (lambda microseconds: None)
    first = b.start(b.x, cost_s=cost(8))
    second = b.start(b.y, cost_s=cost(4))
    product = b.mm(b.x, cost_s=cost(3))
    total = b.add(b.wait(first), product, cost_s=cost(2))
    return b.add(total, b.wait(second), cost_s=cost(2))


class Delays:
    """Moves the product behind the wait: communication is exposed for longer."""

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        nodes = {node.name: node for node in gm.graph.nodes}
        nodes["wait_tensor"].append(nodes["mm"])
        gm.recompile()
        return gm


class Loses:
    """Reads the first result before the collective has finished."""

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        nodes = {node.name: node for node in gm.graph.nodes}
        nodes["add"].update_arg(0, nodes["all_reduce"])
        nodes["add"].append(nodes["wait_tensor"])
        gm.recompile()
        return gm


@cache
def case(kind: str, timed: bool = True) -> Counterexample:
    made = program(lambda b: two_layers(b, timed))
    if kind == "exposed-communication":
        contract = Contract(overlap=True)
        return make_counterexample(verify(Delays(), made, contract=contract), kind, FACTS, contract)
    return make_counterexample(verify(Loses(), made), kind, FACTS, Contract())


def told(counterexample: Counterexample) -> str:
    written = io.StringIO()
    show(Console(file=written, width=100, highlight=False, markup=False, emoji=False), counterexample, None)
    return written.getvalue()


def test_the_block_names_both_nodes_of_a_race_and_the_wait() -> None:
    text = told(case("async-race"))
    assert "'add' reads the result of 'all_reduce' before the collective has finished" in text
    assert "'all_reduce' writes it at any time until the first wait for its result, 'wait_tensor'" in text
    assert "graph order: all_reduce, … 2 more …, add, wait_tensor" in text
    assert "◀ here" in text


def test_the_block_tells_the_time_before_and_after() -> None:
    block = make_block(case("exposed-communication"), None)
    assert block.times[0] == (
        "time of rank 0: 5 ops, 2 of them asynchronous; makespan 15 µs, serial 19 µs, critical path 14 µs, "
        "exposed communication 8 µs"
    )
    assert block.times[1].startswith("before the pass: 5 ops, 2 of them asynchronous; makespan 14 µs")
    assert "compute waits at 'wait_tensor' for 'all_reduce': 8 µs, 5 µs before" in told(case("exposed-communication"))


def test_without_costs_there_is_no_time_to_tell() -> None:
    untimed = case("async-race", timed=False)
    assert timetables(untimed, 0) is None
    assert timed_ranks(untimed) == []
    assert make_block(untimed, None).times == []
    assert draw_schedule(untimed, 0) is None
    with pytest.raises(UsageError, match="and no asynchronous collectives with costs"):
        to_trace(untimed)


def test_the_trace_has_a_thread_for_compute_and_one_for_communication() -> None:
    events = json.loads(to_trace(case("exposed-communication")))["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {(pid, tid): lane for pid in range(4) for tid, lane in enumerate(("compute", "comm"))}
    after = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
    assert [(e["name"], e["tid"], e["ts"], e["dur"]) for e in after if e["cat"] == "comm"] == [
        ("all_reduce", 1, 0.0, pytest.approx(8)), ("all_reduce_1", 1, pytest.approx(8), pytest.approx(4)),
    ]  # fmt: skip
    assert next(e for e in after if e["name"] == "all_reduce_1")["args"]["issued_us"] == 0.0
    (stall,) = [e for e in after if e["cat"] == "stall"]
    assert (stall["name"], stall["tid"], stall["ts"], stall["dur"]) == (
        "waits for all_reduce",
        0,
        0.0,
        pytest.approx(8),
    )
    assert stall["args"] == {"node": "wait_tensor", "waits for": "all_reduce", "finding": "finding"}
    for thread in (0, 1):
        slices = sorted((e["ts"], e["dur"]) for e in after if e["tid"] == thread)
        assert all(ts + dur <= later + 1e-6 for (ts, dur), (later, _) in pairwise(slices))
    flows = [e for e in events if e["ph"] in "sf" and e["pid"] == 1]
    assert [(e["ph"], e["tid"]) for e in flows] == [("s", 1), ("f", 0)]
    assert flows[0]["ts"] <= flows[1]["ts"] <= stall["ts"] + stall["dur"]


def test_the_page_draws_communication_beside_compute() -> None:
    found = case("exposed-communication")
    drawn = draw_schedule(found, 0)
    assert drawn is not None
    before, after = drawn.charts
    assert [lane.name for lane in after.lanes] == ["compute", "comm"]
    assert (drawn.heading, drawn.streams, drawn.queues) == ("Timeline of rank 0", False, True)
    assert drawn.kinds == ("compute", "comm", "stall")
    stalls = [[bar.node for bar in chart.bars if bar.kind == "stall"] for chart in (before, after)]
    assert stalls == [["wait_tensor", "wait_tensor_1"], ["wait_tensor"]]
    assert [bar.mark for bar in after.bars if bar.kind == "stall"] == ["finding"]
    assert [link.title for link in after.links] == ["'all_reduce_1' is issued 8 µs before its communication begins"]
    text = to_html(found, None)
    page = Reader(text)
    assert "Timeline of rank 0" in page.texts
    assert "compute waits for communication" in page.texts
    assert "a wait of one stream" not in text
    assert "all_reduce: _c10d_functional::all_reduce, 0 µs to 8 µs (8 µs), comm" in text
