"""The patterns that a pass knows, as a run shows them: on the terminal, and drawn in kernels.html."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import fx

from tcverify.application import CodePoint, InProcess
from tcverify.application.loading import prepare_pass
from tcverify.campaign import CampaignFinished, Event, RunFinished, Statistics
from tcverify.campaign.search import KernelFound, SearchSummary
from tcverify.campaign.search.kernels import Rewrite, kernel_of
from tcverify.program import Mesh, Program
from tcverify.report.coverage import changed_rank, group_kernels, kernel_lines, rewrite_words
from tcverify.report.formats import reports
from tcverify.report.html import kernels
from tcverify.report.html.kernels import PAGE_NAME, KernelReport, make_kernel_page, to_kernel_page
from tcverify.report.ndjson import EVENTS_NAME
from tcverify.report.terminal import TerminalReport
from tests.report.test_html import HOSTILE, Reader
from tests.support.html_cases import (
    FACTS,
    blocks,
    drops_middle_reduction,
    reductions,
    swaps_on_odd_ranks,
    two_groups,
    widens,
)

ADD = torch.ops.aten.add.Tensor


def leaves_alone(gm: fx.GraphModule) -> None:
    """Changes nothing."""


def swaps_operands(gm: fx.GraphModule) -> None:
    for node in gm.graph.nodes:
        if node.target is ADD:
            node.args = node.args[::-1]


def doubles_instead(gm: fx.GraphModule) -> None:
    node = reductions(gm)[0]
    with gm.graph.inserting_after(node):
        doubled = gm.graph.call_function(ADD, (node.args[0], node.args[0]))
    node.replace_all_uses_with(doubled)
    gm.graph.erase_node(node)


def calls_the_unknown(gm: fx.GraphModule) -> None:
    node = reductions(gm)[0]
    with gm.graph.inserting_after(node):
        gm.graph.call_function(lambda x: x, (node,))


def renames_another_addition(gm: fx.GraphModule) -> None:
    """The same op comes and goes, of another name and with other operands."""
    node = next(node for node in gm.graph.nodes if node.target is ADD)
    with gm.graph.inserting_after(node):
        other = gm.graph.create_node("call_function", ADD, (node.args[1], node.args[1]), name="other")
    node.replace_all_uses_with(other)
    gm.graph.erase_node(node)


def kernel(pass_: Callable[[fx.GraphModule], None], program: Program, new: Sequence[CodePoint] = ()) -> KernelFound:
    subject = InProcess(prepare_pass(pass_, "", {}))
    one = kernel_of(program, (), lambda p, watch: subject.start(p, watch=watch)(), (), ())
    return KernelFound(program, tuple(new), one.rewrite, one.changed, one.rewritten)


def finished(*found: KernelFound, name: str = "mine", mesh: str = "2 ranks") -> CampaignFinished:
    return CampaignFinished(
        replace(FACTS, name=name),
        mesh,
        Statistics(programs=10),
        (),
        "passed",
        "",
        "examples",
        1,
        searched=SearchSummary(found),
    )


@pytest.fixture
def dropping() -> KernelFound:
    return kernel(drops_middle_reduction, blocks(1), [CodePoint("/home/me/mine.py", n, -1) for n in (3, 7, 8, 9)])


# ------------------------------------------------------------------------------------------------------------- in words


@pytest.mark.parametrize(
    ("pass_", "program", "words", "rank"),
    [
        (drops_middle_reduction, blocks(1), "drops all_reduce", 0),
        (widens, blocks(1), "adds all_gather", 0),
        (doubles_instead, blocks(1), "all_reduce ⇒ add", 0),
        (swaps_operands, blocks(1), "rewires add", 0),
        (renames_another_addition, blocks(1), "replaces add, rewires rms_norm", 0),
        (swaps_on_odd_ranks, two_groups(), "moves all_reduce", 1),
        (leaves_alone, blocks(1), "unchanged", 0),
    ],
)
def test_a_rewrite_is_told_by_its_ops(
    pass_: Callable[[fx.GraphModule], None], program: Program, words: str, rank: int
) -> None:
    found = kernel(pass_, program)
    assert rewrite_words(found) == words
    assert changed_rank(found) == rank


@pytest.mark.parametrize(
    ("rewrite", "words"),
    [
        ((("aten::add.Tensor", -2), ("aten::mul.Tensor", 1)), "2 × add ⇒ mul"),
        ((("aten::add.Scalar", 1), ("aten::add.Tensor", -1)), "add.Tensor ⇒ add.Scalar"),
        ((("aten::view", -1), ("prims::view", 1)), "aten::view ⇒ prims::view"),
        ((), "changed"),
    ],
)
def test_ops_are_told_apart_also_where_no_program_came_of_it(rewrite: Rewrite, words: str) -> None:
    assert rewrite_words(KernelFound(blocks(1), (), rewrite, True)) == words


def test_what_is_no_program_is_not_kept() -> None:
    found = kernel(calls_the_unknown, blocks(1))
    assert found.changed
    assert found.rewritten is None
    assert kernel(leaves_alone, blocks(1)).rewritten is None
    assert kernel(widens, blocks(1)).rewritten is not None


def test_of_a_rewrite_the_smallest_kernel_is_shown_and_the_others_are_counted(dropping: KernelFound) -> None:
    more = [replace(kernel(drops_middle_reduction, blocks(n)), rewrite=dropping.rewrite) for n in (3, 2)]
    alone = [kernel(leaves_alone, blocks(n)) for n in (2, 1)]
    searched = SearchSummary((*more, *alone, dropping, kernel(swaps_operands, blocks(1))))
    assert [(one.words, len(one.kernels)) for one in group_kernels(searched)] == [
        ("drops all_reduce", 3),
        ("rewires add", 1),
        ("unchanged", 2),
    ]
    assert [line.text for line in kernel_lines(searched)] == [
        "",
        "kernel: drops all_reduce",
        "  first to reach mine.py:3, mine.py:7-9",
        "    x: [4, 8] = input",
        "    residual: [4, 8] = input",
        "    gain: [8] = input",
        "  - all_reduce: [4, 8] = all_reduce(x, 0, [0, 1])",
        "  - add: [4, 8] = add.Tensor(all_reduce, residual)",
        "  + add: [4, 8] = add.Tensor(x, residual)",
        "    rms_norm: [4, 8] = rms_norm(add, gain, 1e-06)",
        "    silu: [4, 8] = silu(rms_norm)",
        "    return silu",
        "  2 more kernels with this rewrite",
        "",
        "kernel: rewires add",
        "    x: [4, 8] = input",
        "    residual: [4, 8] = input",
        "    gain: [8] = input",
        "    all_reduce: [4, 8] = all_reduce(x, 0, [0, 1])",
        "  - add: [4, 8] = add.Tensor(all_reduce, residual)",
        "  + add: [4, 8] = add.Tensor(residual, all_reduce)",
        "    rms_norm: [4, 8] = rms_norm(add, gain, 1e-06)",
        "    silu: [4, 8] = silu(rms_norm)",
        "    return silu",
        "",
        "kernel: unchanged",
        "    x: [4, 8] = input",
        "    residual: [4, 8] = input",
        "    gain: [8] = input",
        "    all_reduce: [4, 8] = all_reduce(x, 0, [0, 1])",
        "    add: [4, 8] = add.Tensor(all_reduce, residual)",
        "    rms_norm: [4, 8] = rms_norm(add, gain, 1e-06)",
        "    silu: [4, 8] = silu(rms_norm)",
        "    return silu",
        "  1 more kernel unchanged",
    ]


def test_the_rank_is_told_where_it_is_not_the_first() -> None:
    lines = [line.text for line in kernel_lines(SearchSummary((kernel(swaps_on_odd_ranks, two_groups()),)))]
    assert "  on rank 1" in lines
    assert sum(line.startswith(("  - ", "  + ")) for line in lines) == 2


@pytest.mark.parametrize("asked", [True, False])
def test_the_terminal_shows_kernels_where_it_is_asked_to(dropping: KernelFound, tmp_path: Path, asked: bool) -> None:
    console = Console(width=200, record=True, force_terminal=False)
    TerminalReport(console, tmp_path, kernels=asked)(finished(dropping))
    assert ("    - all_reduce: [4, 8] = all_reduce(x, 0, [0, 1])\n" in console.export_text()) == asked


# ------------------------------------------------------------------------------------------------------------- the page


def test_the_page_draws_each_rewrite_and_lists_what_is_left_alone(dropping: KernelFound) -> None:
    alone = kernel(leaves_alone, blocks(1))
    page = Reader(to_kernel_page([finished(alone, dropping, kernel(widens, blocks(1)))]))
    for said in (
        "What mine does",
        "mine on 2 ranks 10 programs, seed 1; searched: 3 kernels",
        "drops all_reduce 4 nodes ⇒ 3; first to reach mine.py:3, mine.py:7-9",
        "− all_reduce: [4, 8] = all_reduce(x, 0, [0, 1])",
        "Kernels that the pass does not change: 1",
    ):
        assert said in page.text
    assert [tag for tag, _ in page.tags].count("svg") == 2
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(set(ids)) == len(ids)
    links = [str(a["href"]) for tag, a in page.tags if tag == "a"]
    assert links == ["#pass-1-rewrite-1", "#pass-1-rewrite-2"]
    assert {link[1:] for link in links} <= set(ids)


def test_the_page_is_whole_in_itself(dropping: KernelFound) -> None:
    text = to_kernel_page([finished(dropping)])
    page = Reader(text)
    assert "default-src 'none'" in text
    assert not {"img", "iframe", "object", "base", "form"} & {tag for tag, _ in page.tags}
    outside = [value for _, a in page.tags for name, value in a.items() if name in ("src", "href")]
    assert all(str(value).startswith(("#", "data:")) for value in outside)
    for tag, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")], tag
        if "scroll" in str(attributes.get("class")).split() and attributes.get("role"):
            assert attributes["tabindex"] == "0"  # what scrolls can be reached by keyboard
            assert attributes["aria-label"]


def test_what_others_wrote_stays_text() -> None:
    program = two_groups(Mesh.grid({"dp": 2, "tp": 2}))
    for node in program.graphs[0].nodes:
        if node.op == "call_function":
            node.name = f"{HOSTILE}{node.name}"
    found = kernel(leaves_alone, program, [CodePoint(f"/home/{HOSTILE}", 1)])
    found = replace(found, rewrite=((f"a::{HOSTILE.replace('.', '')}", 1),), changed=True)
    drawn = replace(found, rewritten=two_groups())
    page = Reader(to_kernel_page([finished(found, drawn, name=HOSTILE, mesh=HOSTILE)]))
    assert not {"img"} & {tag for tag, _ in page.tags}
    assert page.text.count("<img src=x onerror=alert(1)>") >= 8
    assert "\x1b" not in page.text
    assert "\u202e" not in page.text


def test_what_is_no_program_is_listed_and_not_drawn() -> None:
    page = Reader(to_kernel_page([finished(kernel(calls_the_unknown, blocks(1)))]))
    assert "4 nodes; the rewritten graph cannot be shown" in page.text
    assert "svg" not in {tag for tag, _ in page.tags}


def test_each_pass_and_mesh_has_a_section(dropping: KernelFound) -> None:
    page = Reader(to_kernel_page([finished(dropping), finished(dropping, name="other", mesh="4 ranks")]))
    assert "What the passes do" in page.text
    headings = [a["id"] for tag, a in page.tags if tag == "h2"]
    assert headings == ["contents", "pass-1", "pass-2"]
    assert "other on 4 ranks" in page.text


def test_the_page_is_bounded_and_says_what_it_leaves_out(
    dropping: KernelFound, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smallest kernels of each rewrite come first, in all sections."""
    for name, bound in (("MOST_DRAWN", 3), ("MOST_LISTED", 1), ("MOST_LINES", 5)):
        monkeypatch.setattr(kernels, name, bound)
    alone = kernel(leaves_alone, blocks(1))
    first = finished(dropping, dropping, dropping, alone, alone, alone)
    page = make_kernel_page([first, finished(dropping, kernel(widens, blocks(1)))])
    assert [[len(group.plates) for group in section.groups] for section in page.sections] == [[1], [1, 1]]
    assert [len(section.alone) for section in page.sections] == [1, 0]
    text = Reader(
        to_kernel_page([first, finished(dropping, kernel(widens, blocks(1)), kernel(swaps_operands, blocks(1)))])
    ).text
    for said in (
        "Omitted kernels with this rewrite: 2.",
        "Omitted rewrites: 1.",
        "Kernels that the pass does not change: 3",
        "Left out: 2.",
        "4 more lines are omitted.",
    ):
        assert said in text


# ----------------------------------------------------------------------------------------------------- when it is written


def test_the_page_is_written_when_a_campaign_ends_and_named_when_the_run_does(
    dropping: KernelFound, tmp_path: Path
) -> None:
    told: list[str] = []
    report = KernelReport(tmp_path, told.append)
    path = tmp_path / PAGE_NAME
    report(finished(dropping))
    assert "other on" not in path.read_text()
    report(finished(dropping, name="other"))
    assert "other on 2 ranks" in path.read_text()
    assert told == []
    report(RunFinished(0))
    assert told == [f"kernels: {path}"]


@pytest.mark.parametrize(
    "event",
    [
        replace(finished(), searched=None),
        finished(),
        finished(kernel(leaves_alone, blocks(1))),
    ],
    ids=["no search", "no kernel", "none that changes"],
)
def test_without_a_pattern_there_is_no_page(event: Event, tmp_path: Path) -> None:
    report = KernelReport(tmp_path, pytest.fail)
    report(event)
    report(RunFinished(0))
    assert list(tmp_path.iterdir()) == []


def test_a_page_that_cannot_be_written_does_not_end_the_run(
    dropping: KernelFound, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> str:
        raise ValueError("oops")

    monkeypatch.setattr(kernels, "to_kernel_page", fails)
    told: list[str] = []
    report = KernelReport(tmp_path, told.append)
    report(finished(dropping))
    report(RunFinished(0))
    assert told == [f"{tmp_path / PAGE_NAME} was not written: ValueError: oops"]


def test_only_the_html_report_draws_kernels_and_the_log_notes_where(dropping: KernelFound, tmp_path: Path) -> None:
    told: list[str] = []
    for names in (("ndjson", "junit"), ("html", "ndjson")):
        folder = tmp_path / names[0]
        for event in (finished(dropping), RunFinished(0)):
            for subscriber in reports(names, folder, told.append):
                subscriber(event)
        assert (folder / PAGE_NAME).exists() == ("html" in names)
    subscribers = reports(("html", "ndjson"), tmp_path / "noted", told.append)
    for event in (finished(dropping), RunFinished(0)):
        for subscriber in subscribers:
            subscriber(event)
    assert told == [f"kernels: {tmp_path / 'noted' / PAGE_NAME}"]
    events = (tmp_path / "noted" / EVENTS_NAME).read_text().splitlines()
    assert ['"event": "campaign-finished"' in events[0], told[0] in events[1]] == [True, True]
    assert '"event": "run-finished"' in events[-1]
