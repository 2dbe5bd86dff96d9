"""Pictures of overlap: text and trace."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tcverify.errors import UsageError
from tcverify.passes.overlap import VisualizeOverlap, comm_graph, overlap_trace, visualize_overlap
from tcverify.passes.overlap.visualize import WIDTH
from tests.support.overlap_programs import GRID, Builder, names, program

PICTURE = """\
2 asynchronous collectives; 45 µs in all, of which 30 µs without compute
          0  ╷         all_reduce                          start         30
          0  │╷        all_reduce_1                        start         10
          0  ││        mm                                  compute       10
         10  ╵│        wait_tensor                         wait              exposed 20
         30   │        relu                                compute        5
         35   ╵        wait_tensor_1                       wait              exposed 5
         40            all_reduce_2                        both           5  exposed 5
         45            end"""


def build(b: Builder) -> Any:
    first, second = b.start(b["x"], cost=30), b.start(b["y"], "dp", cost=10)
    made = b.mm(b["w"], cost=10)
    done = b.relu(b.wait(first), cost=5)
    got = b.wait(second)
    return made, done, b.call("tensor_cast::all_reduce", got, b.graph.rank, b.graph.group("tp"), cost=5)


def test_a_graph_as_text() -> None:
    assert visualize_overlap(comm_graph(program(build, GRID).graph_module(0).graph)) == PICTURE


def test_without_times_the_picture_has_none() -> None:
    text = visualize_overlap(comm_graph(program(lambda b: b.wait(b.start(b["x"], cost=None))).graph_module(0).graph))
    assert text.splitlines()[0] == "1 asynchronous collective; times are not known"
    assert [line.split()[:2] for line in text.splitlines()[1:]] == [["╷", "all_reduce"], ["╵", "wait_tensor"]]


def test_many_collectives_and_long_names_fit() -> None:
    def many(b: Builder) -> Any:
        starts = [b.start(b["x"], cost=1) for _ in range(12)]
        return [b.wait(start) for start in starts]

    gm = program(many).graph_module(0)
    next(node for node in gm.graph.nodes if node.op == "call_function").name = "a_" * 60
    lines = visualize_overlap(comm_graph(gm.graph)).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert "│││││││…" in "".join(lines)


def test_a_graph_as_a_trace() -> None:
    found = overlap_trace(comm_graph(program(build, GRID).graph_module(0).graph))
    assert json.loads(json.dumps(found)) == found
    slices = {(e["name"], e["tid"]): (e["ts"], e["dur"]) for e in found["traceEvents"] if e["ph"] == "X"}
    assert slices["all_reduce_1", 1] == pytest.approx((30, 10))
    assert slices["wait_tensor", 0] == pytest.approx((10, 20))
    assert slices["all_reduce_2", 0] == slices["all_reduce_2", 1]
    ends = [[e["ts"] for e in found["traceEvents"] if e["ph"] == phase] for phase in ("s", "f")]
    assert ends == [pytest.approx([0, 30]), pytest.approx([30, 40])]
    unknown = comm_graph(program(lambda b: b.wait(b.start(b["x"], cost=None))).graph_module(0).graph)
    assert overlap_trace(unknown)["traceEvents"] == []


def test_the_pass_writes_or_logs_and_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gm = program(build, GRID).graph_module(0)
    before = names(gm.graph)
    VisualizeOverlap(output=str(tmp_path / "overlap.txt"))(gm)
    assert (tmp_path / "overlap.txt").read_text() == PICTURE + "\n"
    VisualizeOverlap(output=tmp_path / "overlap.json")(gm)
    assert json.loads((tmp_path / "overlap.json").read_text()) == overlap_trace(comm_graph(gm.graph))
    with caplog.at_level(logging.INFO):
        VisualizeOverlap()(gm)
    assert PICTURE in caplog.text
    assert names(gm.graph) == before
    with pytest.raises(UsageError, match="cannot write"):
        VisualizeOverlap(output=tmp_path / "no" / "where.txt")(gm)
