"""What passes say of collectives, from the pass to the reports."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from tcverify.application import subject_of
from tcverify.cases.counterexample import (
    Counterexample,
    decode_counterexample,
    encode_counterexample,
    make_counterexample,
)
from tcverify.passes.overlap import SinkWaitsIterative
from tcverify.program import CollectiveStatistics, Contract, Finding, decode_statistics
from tcverify.program.statistics import TABLE_HEADINGS, table_rows
from tcverify.report.html.document import to_html
from tcverify.report.markdown import to_markdown
from tcverify.report.text import to_text
from tcverify.verification.verifier import Verdict, verify
from tests.support.overlap_programs import Builder, program

ROW = CollectiveStatistics(
    "all_reduce", "_c10d_functional::all_reduce", "tp", 2, 1, "the end of the graph", 1e-5, 5e-6, 1e-5, 5e-6
)


def early_wait(b: Builder) -> Any:
    done = b.wait(b.start(b["x"], cost=12))
    return done, b.mm(b["y"], cost=10), b.mm(b["w"], cost=10)


def test_rows_survive_json_and_what_is_none_is_left_out() -> None:
    assert decode_statistics([ROW.as_dict()]) == (ROW,)
    odd: list[Any] = [3, None, {"node": "x"}, {**ROW.as_dict(), "moves": "two"}, {**ROW.as_dict(), "group": None}]
    assert decode_statistics(odd) == ()
    assert decode_statistics("rows") == decode_statistics(None) == ()


def test_a_table_has_a_cell_for_every_heading() -> None:
    rows = table_rows((ROW, replace(ROW, communication_s=None, group="", wait="wait_tensor")))
    assert all(len(row) == len(TABLE_HEADINGS) for row in rows)
    assert rows[0] == ("all_reduce", "tp", "10", "5", "5", "10", "2", "1", "the end of the graph")
    assert rows[1][:3] == ("wait_tensor", "–", "–")


def test_they_travel_from_the_process_of_the_pass() -> None:
    made = program(early_wait)
    here = subject_of(SinkWaitsIterative()).apply(made)
    assert [row.wait for row in here.statistics] == ["wait_tensor"]
    guarded = subject_of("tcverify.passes.overlap:SinkWaitsIterative")
    try:
        assert guarded.apply(made).statistics == here.statistics
    finally:
        guarded.close()


class WithOddStatistics:
    """A pass of somebody else's, which uses the name for something else."""

    name = "odd"
    statistics: ClassVar[Any] = {"anything": 1}

    def __call__(self, gm: Any) -> Any:
        return gm


def test_what_others_call_statistics_does_no_harm() -> None:
    verdict = verify(WithOddStatistics(), program(early_wait), contract=Contract(identity=True))
    assert verdict.status == "passed"
    assert verdict.pair.statistics == ()


def case() -> Counterexample:
    subject = subject_of(SinkWaitsIterative())
    pair = subject.apply(program(early_wait))
    finding = Finding("peak-memory", "memory", "too much", "", "mm", 0, {})
    return make_counterexample(Verdict("refuted", [finding], [], pair), "peak-memory", subject.facts, subject.contract)


def test_counterexamples_keep_them() -> None:
    kept = decode_counterexample(json.loads(json.dumps(encode_counterexample(case()))), "here")
    assert [row.wait for row in kept.statistics] == ["wait_tensor"]
    assert "statistics" not in encode_counterexample(replace(case(), statistics=()))


def test_reports_show_them() -> None:
    shown = case()
    text = to_text(shown, None, 120)
    assert "collectives of rank 0, by the pass" in text
    assert any("wait_tensor" in line and "unexposed by runtime estimates" in line for line in text.splitlines())
    markdown = to_markdown(shown, None)
    assert "| collective | group |" in markdown
    assert "| `wait_tensor` | `tp` |" in markdown
    page = to_html(shown, Path("counterexample.json"))
    assert '<h2 id="moved">Collectives</h2>' in page
    without = replace(shown, statistics=())
    assert "by the pass" not in to_text(without, None, 120) + to_markdown(without, None)
    assert 'id="moved"' not in to_html(without, Path("counterexample.json"))
