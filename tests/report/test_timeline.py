"""Timelines of lowered counterexamples: the trace, the drawing in the page, and the line on the terminal."""

from __future__ import annotations

import io
import json
import re
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console
from torch import fx

from tcverify.campaign import FindingFound
from tcverify.cases.counterexample import Counterexample, write_counterexample
from tcverify.checks.streams.replay import replay_streams
from tcverify.cli.main import main
from tcverify.errors import UsageError
from tcverify.passes import Multistream
from tcverify.program import Finding, Program
from tcverify.program.graph import copy_graph
from tcverify.report.block import make_block
from tcverify.report.html import to_html
from tcverify.report.html.streams import MAX_BARS, Chart, draw_schedule
from tcverify.report.markdown import to_markdown
from tcverify.report.terminal import show
from tcverify.report.timetable import time_line, timetable, timetables
from tcverify.report.trace import TRACE_NAME, TraceReport, to_trace
from tests.report.test_html import Reader
from tests.support.html_cases import case as plain_case
from tests.support.schedule_cases import LosesTokens, layers, schedule_case

US = 1e-6
KINDS = [("race", 1), ("race", 3), ("race", 0), ("wrong-schedule", 2)]


def events(case: Counterexample) -> list[dict[str, Any]]:
    return list(json.loads(to_trace(case))["traceEvents"])


def without_costs(case: Counterexample) -> Counterexample:
    """The case with no cost on any op, before or after the pass."""

    def strip(program: Program) -> Program:
        graphs = tuple(
            copy_graph(graph, meta=lambda n: {k: v for k, v in n.meta.items() if k not in ("cost_s", "schedule")})
            for graph in program.graphs
        )
        return replace(program, graphs=graphs)

    assert case.rewritten is not None
    return replace(case, program=strip(case.program), rewritten=strip(case.rewritten))


# ------------------------------------------------------------------------------------------------------------ the trace


@pytest.mark.parametrize(("kind", "number"), KINDS)
def test_a_thread_runs_one_op_at_a_time(kind: str, number: int) -> None:
    threads = defaultdict(list)
    for event in events(schedule_case(kind, number)):
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], event["dur"]))
    assert len(threads) >= 6  # two ranks: one stream before, two after
    for slices in threads.values():
        assert all(dur >= 0 for _, dur in slices)
        assert all(ts + dur <= later + 1e-6 for (ts, dur), (later, _) in pairwise(slices))


@pytest.mark.parametrize(("kind", "number"), KINDS)
def test_every_flow_leads_from_a_slice_to_a_slice(kind: str, number: int) -> None:
    found = events(schedule_case(kind, number))
    slices = [e for e in found if e["ph"] == "X"]
    flows = defaultdict(dict)
    for event in found:
        if event["ph"] in "sf":
            assert event["ph"] not in flows[event["id"]]
            flows[event["id"]][event["ph"]] = event

    def lies_in(end: dict[str, Any]) -> list[str]:
        return [
            e["name"]
            for e in slices
            if (e["pid"], e["tid"]) == (end["pid"], end["tid"]) and e["ts"] <= end["ts"] <= e["ts"] + e["dur"]
        ]

    assert bool(flows) == (number > 0)
    for flow in flows.values():
        start, finish = flow["s"], flow["f"]
        assert start["pid"] == finish["pid"]
        assert start["ts"] <= finish["ts"]
        assert len(lies_in(start)) == 1
        assert lies_in(finish)
        assert start["args"] == finish["args"]
        assert start["args"]["record"].startswith(lies_in(start)[0])


def test_slices_are_what_the_replay_says() -> None:
    case = schedule_case("race")
    assert case.rewritten is not None
    found = [e for e in events(case) if e["ph"] == "X"]
    for rank in range(2):
        for program, pid in ((case.program, 2 * rank), (case.rewritten, 2 * rank + 1)):
            told = {
                (e["name"], e["tid"], e["args"]["op"], e["args"]["resources"]): (e["ts"], e["dur"])
                for e in found
                if e["pid"] == pid and e["cat"] != "output"
            }
            expected = {
                (op.node, op.stream, op.op, ", ".join(op.resources)): (op.start_s, op.end_s)
                for op in replay_streams(program, rank).ops
            }
            assert told.keys() == expected.keys()
            for key, (start, end) in expected.items():
                assert start is not None
                assert end is not None
                assert told[key] == pytest.approx((start * 1e6, (end - start) * 1e6))


def test_flows_are_the_arrows_of_the_replay() -> None:
    case = schedule_case("race", 3)
    assert case.rewritten is not None
    told = {(e["args"]["record"], e["args"]["wait"]) for e in events(case) if e["ph"] == "s" and e["pid"] == 3}
    assert told == {(arrow.record, arrow.wait) for arrow in replay_streams(case.rewritten, 1).arrows}


def test_processes_and_threads_are_named_and_sorted() -> None:
    named = {
        (e["name"], e["pid"], e["tid"]): next(iter(e["args"].values()))
        for e in events(schedule_case("race"))
        if e["ph"] == "M"
    }
    assert [named["process_name", pid, 0] for pid in range(4)] == [
        "rank 0 before", "rank 0", "rank 1 before", "rank 1",
    ]  # fmt: skip
    assert [named["process_sort_index", pid, 0] for pid in range(4)] == [0, 1, 2, 3]
    assert named["thread_name", 1, 0] == "stream 0 (compute)"
    assert named["thread_name", 1, 1] == "stream 1 (comm)"
    assert named["thread_name", 0, 0] == "stream 0 (sequential)"
    assert named["thread_sort_index", 1, 1] == 1
    assert "predicted 86 µs, replayed 84 µs" in named["process_labels", 1, 0]


def test_the_ops_of_a_race_are_marked_on_its_rank() -> None:
    marked = {
        e["name"]: (e["pid"], e["args"]["finding"])
        for e in events(schedule_case("race"))
        if "finding" in e.get("args", {})
    }
    assert marked == {"all_reduce": (1, "first"), "add_rms_norm2": (1, "second")}


def test_without_costs_every_op_takes_a_step() -> None:
    case = without_costs(schedule_case("race"))
    found = [e for e in events(case) if e["ph"] == "X" and e["cat"] != "output"]
    assert {e["dur"] for e in found} == {1.0}
    assert not any("cost_us" in e["args"] for e in found)
    before = [e["ts"] for e in found if e["pid"] == 0]
    assert before == list(range(10))


def test_a_trace_of_many_ops_holds_the_rank_of_the_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    from tcverify.report import trace

    monkeypatch.setattr(trace, "MAX_SLICES", 25)
    case = schedule_case("race")
    on_last = replace(case, finding=replace(case.finding, rank=1))
    assert {e["pid"] for e in events(on_last)} == {2, 3}
    assert json.loads(to_trace(on_last))["otherData"]["ranks without streams, or omitted"] == "1"


def test_a_case_without_streams_has_no_trace() -> None:
    with pytest.raises(UsageError, match="has no streams to trace"):
        to_trace(plain_case("wrong-value"))
    with pytest.raises(UsageError, match="has no streams to trace"):
        to_trace(plain_case("pass-raised"))


def test_it_is_written_beside_the_counterexample(tmp_path: Path) -> None:
    told: list[str] = []
    case = schedule_case("race")
    TraceReport(tmp_path, told.append)(FindingFound(case))
    assert told == [f"Timeline:  {tmp_path / case.id / TRACE_NAME} (open it in ui.perfetto.dev)"]
    assert (tmp_path / case.id / TRACE_NAME).read_text() == to_trace(case)


def test_nothing_is_written_for_a_case_without_streams(tmp_path: Path) -> None:
    told: list[str] = []
    TraceReport(tmp_path, told.append)(FindingFound(plain_case("wrong-value")))
    assert told == []
    assert list(tmp_path.iterdir()) == []


def test_a_trace_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    told: list[str] = []
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    TraceReport(blocked, told.append)(FindingFound(schedule_case("race")))
    assert len(told) == 1
    assert "trace.json was not written: UsageError" in told[0]


def test_the_command_line_prints_a_trace(tmp_path: Path) -> None:
    path = write_counterexample(schedule_case("race"), tmp_path)
    outcome = CliRunner().invoke(main, ["show", str(path), "--format", "trace"])
    assert outcome.exit_code == 0
    assert outcome.output == to_trace(schedule_case("race"))
    other = write_counterexample(plain_case("wrong-value"), tmp_path)
    outcome = CliRunner().invoke(main, ["show", str(other), "--format", "trace"])
    assert outcome.exit_code == 2
    assert "its rewritten graphs have no anchors" in outcome.output
    outcome = CliRunner().invoke(main, ["show", str(tmp_path), "--format", "trace"])
    assert "a trace shows one counterexample, not 2" in outcome.output


# ---------------------------------------------------------------------------------------------------------- the drawing


def charts(case: Counterexample, rank: int = 0) -> list[Chart]:
    drawn = draw_schedule(case, rank)
    assert drawn is not None
    return list(drawn.charts)


@pytest.mark.parametrize(("kind", "number"), KINDS)
def test_bars_of_a_lane_stand_apart_and_inside(kind: str, number: int) -> None:
    drawn = draw_schedule(schedule_case(kind, number), 0)
    assert drawn is not None
    for chart in drawn.charts:
        lanes = defaultdict(list)
        for bar in chart.bars:
            lanes[bar.y].append(bar)
            assert 0 < bar.x < bar.x + bar.width <= drawn.width
            assert chart.y < bar.y < chart.bottom
        assert lanes.keys() <= {lane.y for lane in chart.lanes}
        for bars in lanes.values():
            assert all(a.x + a.width <= b.x + 1e-6 for a, b in pairwise(sorted(bars, key=lambda bar: bar.x)))
        assert chart.bottom < drawn.height


def test_both_charts_have_one_scale() -> None:
    before, after = charts(schedule_case("race"))
    assert before.caption == "Before the pass: 140 µs"
    assert after.caption == "After the pass: 84 µs"
    (wide,) = {round(bar.width, 6) for c in (before, after) for bar in c.bars if bar.text == "all_reduce"}
    (narrow,) = {round(bar.width, 6) for c in (before, after) for bar in c.bars if bar.text == "mm_1"}
    assert wide + 2 == pytest.approx(3 * (narrow + 2))  # 30 µs and 10 µs, and a gap behind each


def test_axes_show_round_times_where_they_are() -> None:
    before, after = charts(schedule_case("race"))
    assert [label for _, label in before.ticks] == ["0", "20", "40", "60", "80", "100", "120", "140"]
    assert [label for _, label in after.ticks] == ["0", "20", "40", "60", "80"]
    ends = {bar.text: bar.x + bar.width + 2 for bar in before.bars}
    assert dict((label, x) for x, label in before.ticks)["40"] == pytest.approx(ends["mm"])


def test_the_ops_of_a_race_are_marked_and_what_they_lack_is_drawn() -> None:
    before, after = charts(schedule_case("race"))
    assert [bar.mark for bar in before.bars if bar.mark] == []
    pins = {bar.pin.text[2:] for bar in after.bars if bar.pin is not None}
    assert pins == {"first: all_reduce", "second: add_rms_norm2"}
    (missing,) = [link for link in after.links if link.kind == "missing"]
    assert missing.title == "missing order: 'add_rms_norm2' does not wait for 'all_reduce'"
    tokens = [link.title for link in after.links if link.kind == "token"]
    assert tokens == [
        "'all_reduce_1' waits for 'add_rms_norm2' (record 'add_rms_norm2_record', wait 'all_reduce_1_wait')",
        "'add_1' waits for 'all_reduce_1' (record 'all_reduce_1_record', wait 'add_1_wait')",
    ]


def test_an_output_that_races_is_drawn_to_where_it_is_read() -> None:
    _, after = charts(schedule_case("race", 0))
    assert after.join is not None
    (missing,) = [link for link in after.links if link.kind == "missing"]
    assert missing.title == "missing order: the output does not wait for 'all_reduce'"
    assert f"{after.join[0] + 2:.1f} " in missing.path  # stream 0 has ended there
    assert after.join[0] == pytest.approx(max(b.x + b.width + 2 for b in after.bars if b.y == after.lanes[0].y))


def test_other_ranks_bear_no_marks() -> None:
    assert not any(bar.mark for chart in charts(schedule_case("race"), 1) for bar in chart.bars)


def test_long_graphs_are_drawn_around_the_finding() -> None:
    case = schedule_case("race", 40)
    assert case.rewritten is not None
    last = [op.node for op in replay_streams(case.rewritten, 0).ops][-30]
    moved = replace(case, finding=replace(case.finding, data={}, node=last))
    for given, name in ((case, "add_rms_norm2"), (moved, last)):
        drawn = draw_schedule(given, 0)
        assert drawn is not None
        assert [len(chart.bars) for chart in drawn.charts] == [MAX_BARS, MAX_BARS]
        assert [bar.title.split(":")[0] for bar in drawn.charts[1].bars if bar.mark][-1] == name
        assert drawn.note == f"{361 - MAX_BARS} ops unrelated to the finding are not drawn."
        assert drawn.rows_left_out == 361 - MAX_BARS
        assert all(bar.x + bar.width <= drawn.width for chart in drawn.charts for bar in chart.bars)


def test_accesses_that_are_far_apart_show_the_second() -> None:
    case = schedule_case("race", 40)
    assert case.rewritten is not None
    names = [op.node for op in replay_streams(case.rewritten, 0).ops]
    far = replace(case, finding=replace(case.finding, node=None, data={"first": names[0], "second": names[-1]}))
    _, after = charts(far)
    assert [bar.mark for bar in after.bars if bar.mark] == ["second"]
    assert not any(link.kind == "missing" for link in after.links)


def test_the_page_shows_streams_of_lowered_programs_alone() -> None:
    page = Reader(to_html(schedule_case("race"), None))
    assert "Streams of rank 0" in page.text
    assert "predicted 86 µs replayed 84 µs serial 140 µs critical path 80 µs exposed communication 2 µs" in page.text
    assert "◀ first" in page.text
    for kind in ("wrong-value", "pass-raised"):
        text = to_html(plain_case(kind), None)
        assert "Streams of rank" not in text
        assert "svg.streams" not in text


def test_the_streams_come_first_where_the_finding_is_about_them() -> None:
    race, values = schedule_case("race"), replace(schedule_case("race"), finding=_about_values())
    headings = [re.findall(r"<h2[^>]*>([^<]*)<", to_html(case, None)) for case in (race, values)]
    streams = [list(h).index("Streams of rank 0") for h in headings]
    graphs = [next(i for i, text in enumerate(h) if text.startswith("The program on rank 0")) for h in headings]
    assert streams[0] < graphs[0]
    assert streams[1] > graphs[1]


def _about_values() -> Finding:
    return Finding("wrong-value", "equivalence", "output 0 differs", rank=0)


@pytest.mark.parametrize(("kind", "number"), KINDS)
def test_ids_of_the_page_are_unique(kind: str, number: int) -> None:
    page = Reader(to_html(schedule_case(kind, number), None))
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(set(ids)) == len(ids)
    named = [str(a["aria-labelledby"]).split() for _, a in page.tags if "aria-labelledby" in a]
    assert {name for names in named for name in names} <= set(ids)


def test_without_costs_steps_are_drawn() -> None:
    drawn = draw_schedule(without_costs(schedule_case("race")), 0)
    assert drawn is not None
    assert drawn.unit == "steps"
    assert drawn.facts == ()
    assert "Not every op has a cost" in drawn.note
    assert [chart.caption for chart in drawn.charts] == ["Before the pass: 10 steps", "After the pass: 8 steps"]
    assert [label for _, label in drawn.charts[0].ticks] == [str(n) for n in range(11)]


def test_an_original_without_costs_takes_those_of_the_ops_of_its_names() -> None:
    case = schedule_case("race")
    bare = replace(case, program=without_costs(case).program)
    found = timetables(bare, 0)
    assert found is not None
    before, _ = found
    assert before is not None
    assert before.end == pytest.approx(140 * US)
    renamed = timetable(bare.program, 0, {"nothing": 1.0})
    assert not renamed.timed


def test_ops_take_before_the_pass_at_least_what_they_take_in_a_schedule() -> None:
    program = layers(cost=lambda op: 0.2 if "add" in op else 10.0)
    rewritten = program.with_graphs([Multistream()(gm).graph for gm in program.graph_modules()])
    found = timetables(replace(schedule_case("race"), program=program, rewritten=rewritten), 0)
    assert found is not None
    before, after = found
    assert before is not None
    assert before.end == pytest.approx(after.serial)
    assert min(op.end - op.start for op in before.ops) == pytest.approx(1e-6)


def test_hostile_names_become_no_markup() -> None:
    case = schedule_case("race")
    hostile = "</script><img src=x onerror=alert(1)>"
    data = {"first": hostile, "second": hostile}
    page = Reader(to_html(replace(case, finding=replace(case.finding, node=hostile, data=data)), None))
    assert "img" not in {tag for tag, _ in page.tags}


def test_thousands_of_ops_make_a_drawing_of_ordinary_size() -> None:
    program = layers(300)
    rewritten = program.with_graphs([Multistream()(gm).graph for gm in program.graph_modules()])
    case = replace(schedule_case("race"), program=program, rewritten=rewritten)
    drawn = draw_schedule(case, 0)
    assert drawn is not None
    assert sum(len(chart.bars) for chart in drawn.charts) <= 2 * MAX_BARS
    assert len(to_trace(case)) < 3_000 * 2 * 2 * 800


# --------------------------------------------------------------------------------------------------------- the terminal


def test_the_block_tells_the_times_of_a_lowered_program() -> None:
    expected = (
        "streams of rank 0: 10 ops on 2 streams; predicted 86 µs, replayed 84 µs, serial 140 µs, critical path 80 µs, "
        "exposed communication 2 µs"
    )
    given = (
        "given to the pass: 30 µs for 'all_reduce' and 'all_reduce_1'; 10 µs for 'mm', 'mm_1', 'mm_2', 'add_rms_norm2' and "
        "4 more; "
        "compute on streams 0 and 2, communication on stream 1; synchronisation takes 2 µs"
    )
    case = schedule_case("race")
    assert make_block(case, None).times == [expected, given]
    out = io.StringIO()
    show(Console(file=out, width=1000), case, None)
    assert expected in out.getvalue()
    assert expected.partition(": ")[2] in to_markdown(case, None)


@pytest.mark.parametrize("kind", ["wrong-value", "deadlock", "pass-raised"])
def test_the_block_of_other_programs_tells_nothing_of_streams(kind: str) -> None:
    case = plain_case(kind)
    assert make_block(case, None).times == []
    assert "### Streams" not in to_markdown(case, None)


def test_a_prediction_that_comes_true_is_told_once() -> None:
    found = timetables(schedule_case("race"), 0)
    assert found is not None
    table = replace(found[1], declared=found[1].replayed)
    assert time_line(table).startswith("10 ops on 2 streams; makespan 84 µs as predicted, serial 140 µs, ")


def test_a_prediction_that_is_off_by_a_bit_shows_all_digits() -> None:
    case = schedule_case("race")
    found = timetables(case, 0)
    assert found is not None
    table = replace(found[1], declared=8.4e-05, replayed=8.400000000000002e-05)
    assert "predicted 8.4e-05 s, replayed 8.400000000000002e-05 s, serial 140 µs" in time_line(table)


def test_without_costs_the_block_tells_no_times() -> None:
    (given,) = make_block(without_costs(schedule_case("race")), None).times
    assert (
        given == "given to the pass: compute on streams 0 and 2, communication on stream 1; synchronisation takes 2 µs"
    )


def test_the_case_is_what_it_is_said_to_be() -> None:
    graph: fx.Graph = LosesTokens()(layers().graph_module(0)).graph
    assert sum(1 for n in graph.nodes if "wait_and_bind" in str(n.target) and not n.args[2]) == 2
