"""report.html: says what is wrong, holds everything itself, and lets nothing of others act."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tcverify.application import PassFacts
from tcverify.campaign import FindingFound
from tcverify.cases.counterexample import Counterexample, RankValue, read_counterexample, write_counterexample
from tcverify.program import Finding, GraphBuilder, InputSpec, Mesh, spmd_program
from tcverify.registry.glossary import GLOSSARY
from tcverify.report.html import HtmlReport, to_html
from tcverify.report.html.document import REPORT_NAME
from tcverify.report.html.folding import BOX_HEIGHT
from tcverify.report.html.page import make_page
from tests.sizes import by_night
from tests.support.html_cases import blocks, case

GALLERY = sorted((Path(__file__).parents[2] / "reports" / "gallery").glob("*/counterexample.json"))
KINDS = ("wrong-value", "deadlock", "rewritten-raises", "pass-raised")
HOSTILE = "</script></style><img src=x onerror=alert(1)>\"'&<!--\u202e\x1b[31m"
VOID = {"meta", "link", "br", "img", "hr", "input"}


class Reader(HTMLParser):
    """Reads a page and insists that tags are balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.titles: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-2:] == ["g", "title"]:
            self.titles.append((data, self.tags[-2][1]))
        if not self.open or self.open[-1] not in ("script", "style"):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def boxes(self, panel: str) -> dict[str, dict[str, str | None]]:
        """The boxes of a graph ("pb" before, "pa" after) by what they say of themselves."""
        return {title: a for title, a in self.titles if (a.get("id") or "").startswith(panel)}


def hostile_case() -> Counterexample:
    def build(b: GraphBuilder) -> object:
        return b.call("tensor_cast::all_reduce", b.input("x"), b.rank, b.group(HOSTILE))

    program = spmd_program(Mesh.grid({HOSTILE: 2}), [InputSpec("x", (2, 4))], build)
    return Counterexample(
        id="0123abcd",
        program=program,
        rewritten=None,
        listing=f"{HOSTILE}\n{HOSTILE}",
        facts=PassFacts(HOSTILE, f"{HOSTILE}:{HOSTILE}", {HOSTILE: HOSTILE}, HOSTILE, {}),
        finding=Finding(HOSTILE, HOSTILE, HOSTILE, f"more {HOSTILE}\n{HOSTILE}", HOSTILE, 1, {"label": HOSTILE}),
        others=(Finding(HOSTILE, HOSTILE, HOSTILE),),
        values=(RankValue(0, HOSTILE, (0,), float("nan"), float("inf")),),
        executors=(HOSTILE,),
        environment={HOSTILE: HOSTILE},
    )


# -------------------------------------------------------------------------------------------------------- what it says


def test_a_wrong_value_is_traced_to_the_first_node_that_differs() -> None:
    page = Reader(to_html(case("wrong-value", 3), None))
    assert "it reads 'silu', a partial sum of the original's 'all_reduce_1' over tp [0, 1]" in page.text
    (flagged,) = [label for label, a in page.boxes("pa").items() if "flagged" in str(a["class"])]
    assert flagged.startswith("add_1:")
    assert flagged.endswith("values first diverge here")


def test_the_largest_difference_of_each_rank_is_shown() -> None:
    found = case("wrong-value")
    text = Reader(to_html(found, None)).text
    assert len(found.values) == 2
    for value in found.values:
        assert f"{value.expected:.9g} {value.actual:.9g}" in text
        assert f"rank {value.rank} output 0" in text


def test_ranks_of_which_no_value_is_kept_are_not_passed_over() -> None:
    found = case("wrong-value")
    value = found.values[0]
    many = replace(
        found, program=blocks(1, Mesh.grid({"tp": 20})), values=tuple(replace(value, rank=r) for r in range(16))
    )
    text = Reader(to_html(replace(many, rewritten=None), None)).text
    assert "ranks 0–15 output 0" in text
    assert "Of 16 ranks that differ; values of the others are not stored." in text
    assert "no value is kept" not in Reader(to_html(found, None)).text


def test_the_domain_and_what_the_verdict_notes_are_told() -> None:
    found = replace(
        case("wrong-value"), domain="exact", notes=(("exact-aside", "the exact domain steps aside for conv"),)
    )
    text = Reader(to_html(found, None)).text
    assert "Number domain exact" in text
    assert "the exact domain steps aside for conv" in text
    assert "computed in float64: " in text


def test_terms_that_the_page_uses_are_explained_on_it() -> None:
    value = Reader(to_html(case("wrong-value"), None)).text.partition("Terms on this page")[2]
    for term in ("divergence", "lockstep"):
        assert f"{term} {GLOSSARY[term]}" in value
    assert GLOSSARY["near miss"] not in value
    assert GLOSSARY["program"] not in value
    raised = Reader(to_html(case("pass-raised"), None)).text.partition("Terms on this page")[2]
    assert GLOSSARY["divergence"] not in raised


def test_between_residues_there_is_no_distance() -> None:
    shown = case("wrong-value")
    exactly = replace(shown.finding, data={**shown.finding.data, "domain": "exact"})
    found = replace(
        shown, domain="exact", finding=exactly, values=(RankValue(1, "output 0", (0, 1), -256081.0, 266549.0),)
    )
    (contrast,) = make_page(found, None).contrasts
    assert (contrast.where, contrast.expected, contrast.computed, contrast.difference) == (
        "rank 1",
        "-256081",
        "266549",
        "",
    )
    page = make_page(replace(found, finding=shown.finding), None)  # asked for, but float64 shows it already
    assert page.contrasts[0].difference == "5.23e+05 (204 %)"
    assert ("Number domain", "exact; float64 shows it") in page.facts


def test_only_rows_that_differ_are_marked() -> None:
    before, after = make_page(case("wrong-value", 9), None).timelines
    assert before.headings == ["ranks 0, 1"]
    assert [number for number, _, differs in before.rows if differs] == ["5"]
    assert not [number for number, _, differs in after.rows if differs]
    before, after = make_page(case("wrong-value", 40), None).timelines
    assert before.omitted == "rows 1 to 14, rows 39 to 40"
    assert [number for number, _, differs in before.rows if differs] == ["21"]
    assert before.rows[-1][0] == "end"


def test_a_cycle_of_many_ranks_is_drawn_in_lines() -> None:
    drawn = make_page(case("ring"), None).waiting
    assert drawn is not None
    assert drawn.cycle
    assert drawn.ranks == tuple(range(16))
    assert len(drawn.arrows) == 16
    assert len({(s.x, s.y) for s in drawn.stations}) == 16
    assert all(s.x >= 0 and s.x + 134 <= drawn.width and s.y + 44 <= drawn.height for s in drawn.stations)


def test_what_is_unchanged_stands_at_the_same_height_in_both_graphs() -> None:
    drawing = make_page(case("wrong-value", 3), None).sheets[0].drawing
    before, after = ({box.id[2:]: box for box in panel.boxes} for panel in drawing.panels)
    twins = before.keys() & after.keys()
    assert len(twins) == len(after)
    assert all(before[i].y == after[i].y for i in twins)
    assert {before[i].mark for i in before.keys() - twins} == {"removed"}


def test_marks_are_told_without_colours() -> None:
    page = Reader(to_html(case("wrong-value"), None))
    assert [label for label in page.boxes("pb") if label.endswith(", removed")]
    assert "− removed" in page.text


def test_boxes_stand_apart_and_edges_lead_to_boxes() -> None:
    drawing = make_page(case("wrong-value", 8), None).sheets[0].drawing
    for panel in drawing.panels:
        ids = {box.id for box in panel.boxes}
        seen = [box for box in panel.boxes if not box.away]
        assert {end for line in panel.lines for end in (line.source, line.target)} <= ids
        places = [(b.x, b.y, b.x + b.width, b.y + BOX_HEIGHT) for b in seen]
        for i, (left, top, right, bottom) in enumerate(places):
            assert 0 <= left < right <= panel.width
            assert all(right <= l or r <= left or bottom <= t or b <= top for l, t, r, b in places[:i])  # noqa: E741


def test_a_deadlock_shows_its_cycle_and_where_every_rank_waits() -> None:
    found = make_page(case("deadlock"), None)
    assert found.waiting is not None
    assert found.waiting.cycle
    assert found.waiting.ranks == (0, 2, 3, 1)
    before, after = found.timelines
    assert [state for _, cells, _ in before.rows for state in {c.state for c in cells if c}] == ["", "", "ended"]
    assert [number for number, _, _ in after.rows] == ["never", "end"]
    assert all(cell is not None and cell.state == "waits" for cell in after.rows[0][1])
    assert "rank 0 waits in all_reduce #1 of group [0, 2]" in Reader(to_html(case("deadlock"), None)).text


def test_ranks_that_disagree_are_drawn_against_each_other() -> None:
    headings = [sheet.heading for sheet in make_page(case("deadlock"), None).sheets]
    assert headings == ["The program on rank 0, before ⇒ after the pass", "After the pass, rank 0 against rank 2"]


def test_a_mismatch_marks_the_calls_that_disagree() -> None:
    path = next(p for p in GALLERY if read_counterexample(p).finding.kind == "collective-mismatch")
    after = make_page(read_counterexample(path), path).timelines[1]
    (row,) = [cells for number, cells, _ in after.rows if number == "never"]
    assert [(c.state, c.head) for c in row if c] == [("mismatch", "reduce_scatter"), ("mismatch", "all_reduce")]
    assert after.headings == ["rank 0", "rank 1"]


def test_a_rewritten_program_that_raises_tells_what_the_node_reads() -> None:
    found = make_page(case("rewritten-raises"), None)
    assert found.divergence.startswith(
        "'add' raises: it reads 'all_gather_default', the original's 'all_reduce' gathered"
    )
    assert found.timelines[1].rows[-1][1][0].state == "raised"  # type: ignore[union-attr]


def test_a_pass_that_raised_leaves_the_program_before_and_its_traceback() -> None:
    found = make_page(case("pass-raised"), None)
    (sheet,) = found.sheets
    assert sheet.heading == "The program on rank 0"
    assert len(sheet.drawing.panels) == 1
    assert any("Traceback" in line for line in found.detail)
    assert [t.caption for t in found.timelines] == ["Before the pass"]


def test_a_rewritten_graph_that_is_text_alone_is_shown_as_text() -> None:
    foreign = replace(case("wrong-value"), rewritten=None, listing="graph():\n    %mine : call_module")
    text = Reader(to_html(foreign, None)).text
    assert "%mine : call_module" in text
    assert "Before the pass" in text


def test_a_program_that_ended_a_run_is_not_run_to_be_shown() -> None:
    died = replace(case("pass-raised"), finding=Finding("run-died", "application", "the run died"))
    found = make_page(died, None)
    assert found.timelines == ()
    assert "so it is not run to be shown" in Reader(to_html(died, None)).text


def test_placements_say_what_each_rank_holds() -> None:
    by_name = {i.name: i for i in make_page(case("wrong-value"), None).inputs}
    assert by_name["x"].parts == ("addend 1 of 2", "addend 2 of 2")
    assert by_name["gain"].parts == ("all", "all")


def test_everything_else_that_is_known_is_there(tmp_path: Path) -> None:
    found = replace(
        case("wrong-value"),
        others=(Finding("stale-metadata", "metadata", "wrong shape"),),
        size_drawn=17,
        environment={"torch": "9.9"},
        facts=PassFacts("mine", "mine.py:Pass", {"depth": "3"}, "abc", {}),
    )
    text = Reader(to_html(found, write_counterexample(found, tmp_path))).text
    for part in (
        found.id,
        "shrunk from 17",
        "stale-metadata : wrong shape",
        "9.9",
        "option depth 3",
        "idempotent False",
    ):
        assert part in text
    assert f"tcverify replay {found.id}" in text
    assert f"{found.id}/repro.py" in text


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.parent.name)
def test_the_gallery_has_pages(path: Path) -> None:
    found = read_counterexample(path)
    assert found.finding.title in Reader(to_html(found, path)).text


def test_the_page_of_a_file_is_the_page_of_the_case(tmp_path: Path) -> None:
    for kind in KINDS:
        path = write_counterexample(case(kind), tmp_path)
        assert to_html(read_counterexample(path), path) == to_html(case(kind), path)


# ------------------------------------------------------------------------------------------------- what others wrote


def test_nothing_of_others_becomes_markup() -> None:
    page = Reader(to_html(hostile_case(), Path("reports") / HOSTILE / "counterexample.json"))
    tags = {tag for tag, _ in page.tags}
    assert "img" not in tags
    scripts = [a for tag, a in page.tags if tag == "script"]
    assert [a.get("type") for a in scripts] in ([None], ["application/json", None])
    assert not [a for _, a in page.tags if any(name.startswith("on") for name in a)]
    assert "<img src=x onerror=alert(1)>" in page.text
    assert not {"\u202e", "\x1b"} & set(page.text)


def test_only_the_script_of_the_page_may_run() -> None:
    page = Reader(to_html(case("wrong-value"), None))
    (policy,) = [a["content"] for tag, a in page.tags if tag == "meta" and a.get("http-equiv")]
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    assert "script-src 'sha256-" in policy


@pytest.mark.parametrize("kind", KINDS)
def test_it_needs_nothing_from_elsewhere(kind: str) -> None:
    text = to_html(case(kind, 1), None)
    page = Reader(text)
    references = [
        a[name] for _, a in page.tags for name in ("src", "href", "xlink:href", "data", "action") if name in a
    ]
    assert references[0] == "data:,"
    assert all(str(r).startswith("#") for r in references[1:])
    ids = {a["id"] for _, a in page.tags if "id" in a}
    assert {str(r)[1:] for r in references[1:]} <= ids
    assert not re.search(r"https?://|//[a-z]|@import|url\((?!#)", text)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_unique_and_ranks_below_headings(kind: str) -> None:
    page = Reader(to_html(case(kind), None))
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(set(ids)) == len(ids)
    named = [str(a["aria-labelledby"]).split() for _, a in page.tags if "aria-labelledby" in a]
    assert {name for names in named for name in names} <= set(ids)
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b <= a + 1 for a, b in pairwise(levels))


# --------------------------------------------------------------------------------------------------------------- size


def test_long_graphs_are_folded_away_from_the_difference() -> None:
    found = make_page(case("wrong-value", 30), None)
    drawing = found.sheets[0].drawing
    before, after = drawing.panels
    assert all(re.fullmatch(r"\d\d unchanged nodes", mark.text) for panel in drawing.panels for mark in panel.folds)
    assert [mark.note for mark in before.folds] == ["", ""]
    assert [mark.note for mark in after.folds] == ["", "values differ"]
    assert sum(not box.away for box in before.boxes) < 10
    assert len(before.boxes) == 120 + 3 + 1
    assert drawing.folded + sum(not box.away for box in before.boxes) == len(before.boxes)


def _calls(number: int) -> int:
    """Python calls that it takes to render a program of so many blocks."""
    found = case("wrong-value", number)
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        to_html(found, None)
    finally:
        sys.setprofile(None)
    return calls


def test_work_is_linear_in_nodes() -> None:
    to_html(case("wrong-value"), None)  # what is made once is made now
    assert _calls(60) < 2.2 * _calls(30)


def test_thousands_of_nodes_make_a_page_of_ordinary_size() -> None:
    number = by_night(2500, 500)
    before, after = blocks(number), blocks(number - 1)
    found = replace(case("wrong-value"), program=before, rewritten=after)
    text = to_html(found, None)
    page = Reader(text)
    assert len(text) < 1_500_000
    hidden = r"9\d\d\d" if number == 2500 else r"1\d\d\d"
    assert re.search(rf"{hidden} more are not drawn", page.text)
    assert [title for title in page.boxes("pa") if re.fullmatch(f"{hidden} unchanged nodes, not drawn", title)]


# ------------------------------------------------------------------------------------------------------------ writing


def test_it_is_written_beside_the_counterexample(tmp_path: Path) -> None:
    told: list[str] = []
    found = case("wrong-value")
    HtmlReport(tmp_path, told.append)(FindingFound(found))
    assert told == [f"HTML report:  {tmp_path / found.id / REPORT_NAME}"]
    page = (tmp_path / found.id / REPORT_NAME).read_text()
    assert page == to_html(found, tmp_path / found.id / "counterexample.json")


def test_a_page_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    told: list[str] = []
    found = case("wrong-value")
    (tmp_path / found.id / REPORT_NAME).mkdir(parents=True)
    HtmlReport(tmp_path, told.append)(FindingFound(found))
    (line,) = told
    assert f"{REPORT_NAME} was not written: UsageError" in line


def test_a_page_that_cannot_be_made_ends_nothing(tmp_path: Path) -> None:
    told: list[str] = []
    broken = replace(case("wrong-value"), values=(None,))  # type: ignore[arg-type]
    HtmlReport(tmp_path, told.append)(FindingFound(broken))
    (line,) = told
    assert "was not written: AttributeError" in line
