"""Reports: what others wrote is shown, and acts on nothing that shows it."""

from __future__ import annotations

import ast
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tcverify.application import PassFacts
from tcverify.counterexample import Counterexample, RankValue
from tcverify.errors import UsageError
from tcverify.program import Finding, GraphBuilder, Program, loads, spmd_program
from tcverify.report import block as blocks
from tcverify.report.block import make_block
from tcverify.report.listing import columns, difference
from tcverify.report.markdown import to_markdown
from tcverify.report.plain import count, error_text, plain, wrap
from tcverify.report.script import to_script
from tcverify.report.terminal import make_console, show
from tests.unit.programs import TP2, X, reduce_then_norm
from tests.unit.test_counterexample import some_case

NASTY = (
    "[red]x[/red] \x1b[31mred\x1b[0m \x07\x9b2J \u202egnp.exe ```\n# head\r\ttab"
    " '''\"\"\" \\ {0} %s $(touch x) \ud800 </script>"
)


def nasty_case(**changes: Any) -> Counterexample:
    finding = Finding("pass-raised", "application", NASTY, f"{NASTY}\n{NASTY}", NASTY, 0)
    facts = PassFacts(NASTY, f"{NASTY}:{NASTY}", {NASTY: NASTY}, NASTY)
    others = (Finding(NASTY, NASTY, NASTY),)
    values = (RankValue(0, NASTY, (0,), float("nan"), 1.0),)
    return some_case(
        finding=finding, facts=facts, others=others, values=values, environment={"torch": NASTY}, **changes
    )


def shown(case: Counterexample, path: Path | None = None, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False, force_terminal=False)
    show(console, case, path)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# ------------------------------------------------------------------------------------------------------- texts of others


@pytest.mark.parametrize("rewritten", [True, False])
def test_no_control_character_reaches_the_terminal(rewritten: bool) -> None:
    case = nasty_case() if rewritten else nasty_case(rewritten=None, listing=NASTY)
    text = shown(case, Path("reports") / case.id / "counterexample.json")
    assert all(c == "\n" or c.isprintable() for c in text)
    assert "[red]x[/red] \\x1b[31mred\\x1b[0m" in text
    assert "\\u202egnp.exe" in text


def test_markup_is_shown_as_it_is() -> None:
    console = make_console()
    with console.capture() as captured:
        show(console, nasty_case(), None)
    assert "[red]x[/red]" in captured.get()


def test_in_markdown_everything_of_others_stands_in_fences() -> None:
    text = to_markdown(nasty_case(listing=NASTY, rewritten=None), None)
    outside, fence = [], ""
    for line in text.splitlines():
        if fence:
            fence = "" if line == fence else fence
        elif line.startswith("```"):
            fence = line.rstrip("abcdefghijklmnopqrstuvwxyz")
        else:
            outside.append(line)
    assert fence == ""
    assert not [line for line in outside if "x1b" in line or "touch" in line or "gnp" in line]


def test_a_fence_is_longer_than_any_inside() -> None:
    finding = Finding("pass-raised", "application", "``````` and ```")
    assert "\n````````\nmine: pass-raised" in to_markdown(some_case(finding=finding), None)


def test_the_script_holds_only_literals_of_others() -> None:
    text = to_script(nasty_case())
    tree = ast.parse(text)
    assigned = {
        target.id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    assert assigned["PASS"] == f"{NASTY}:{NASTY}"
    assert assigned["OPTIONS"] == {NASTY: NASTY}
    assert set(assigned) == {"PASS", "OPTIONS", "CONTRACT", "KIND", "DOMAIN", "DEEP", "PASS_TIMEOUT", "PROGRAM"}
    others = [node for node in tree.body if not isinstance(node, ast.Assign)]
    assert [type(node) for node in others] == [ast.Expr, ast.ImportFrom, ast.ImportFrom, ast.If]
    assert text.isascii()


def test_the_script_holds_the_program() -> None:
    tree = ast.parse(to_script(some_case()))
    (program,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "PROGRAM"
    ]
    assert isinstance(loads(program), Program)


def test_plain_leaves_ordinary_text_alone() -> None:
    assert plain("all_reduce → norm · 2⁻⁵¹ «é» 日本") == "all_reduce → norm · 2⁻⁵¹ «é» 日本"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("a\nb\rc", "a\\nb\\rc"),
        ("\x9b2J", "\\x9b2J"),
        ("\u202e\u2028\ufeff\ud800", "\\u202e\\u2028\\ufeff\\ud800"),
        ("a\tb", "a    b"),
    ],
)
def test_plain_spells_out_what_acts(text: str, expected: str) -> None:
    assert plain(text) == expected


def test_plain_bounds_the_length() -> None:
    assert len(plain("x" * 10**6)) < 1100


# --------------------------------------------------------------------------------------------------------------- shape


def test_plurals() -> None:
    assert [count(n, "node") for n in (0, 1, 2)] == ["0 nodes", "1 node", "2 nodes"]


def test_lines_are_broken_at_blanks_and_indented() -> None:
    assert wrap("  aaa bbb ccc", 9) == ["  aaa bbb", "    ccc"]
    assert wrap("short", 9) == ["short"]
    assert wrap("a" * 20, 9) == ["a" * 20]


def test_columns_stand_below_each_other() -> None:
    assert columns([("a", "1", "x"), ("bbb", "20", "")], right={1}) == ["a     1  x", "bbb  20"]


def test_nothing_is_wider_than_the_terminal_but_commands_and_tracebacks() -> None:
    text = shown(some_case(), Path("a/rather/long/directory/for/reports") / some_case().id / "counterexample.json")
    assert [
        line for line in text.splitlines() if len(line) > 80 and "repro.py" not in line and "replay" not in line
    ] == []


def test_commands_name_the_case_where_it_lies() -> None:
    case = some_case()
    at = Path("reports") / case.id / "counterexample.json"
    assert make_block(case, at).reproduce == [f"tcverify replay {case.id}", f"python reports/{case.id}/repro.py"]
    elsewhere = Path("my reports") / case.id / "counterexample.json"
    assert make_block(case, elsewhere).reproduce[0] == f"tcverify replay {case.id} --report-dir 'my reports'"
    assert make_block(case, Path("x.json")).reproduce == ["tcverify replay x.json"]


def test_a_pass_without_a_name_cannot_be_reproduced() -> None:
    case = some_case(facts=PassFacts("closure"))
    assert make_block(case, Path("x.json")).reproduce == []


def test_a_detail_that_the_title_tells_is_not_told_twice() -> None:
    finding = Finding("malformed-graph", "structure", "the graph is malformed: node 'x' is stray", "node 'x' is stray")
    assert make_block(some_case(finding=finding), None).detail == []


def test_the_node_to_blame_is_marked() -> None:
    assert "rms_norm(all_reduce, gain, 1e-06)  ◀ here" in shown(some_case())


def test_a_long_detail_is_cut_in_the_middle() -> None:
    finding = Finding("pass-raised", "application", "title", "\n".join(f"line {i}" for i in range(100)))
    detail = make_block(some_case(finding=finding), None).detail
    assert len(detail) == blocks.MAX_DETAIL_LINES + 1
    assert (detail[0], detail[-1]) == ("line 0", "line 99")
    assert "… 76 lines, see counterexample.json …" in detail


def _chain(length: int, last: str) -> Program:
    def build(b: GraphBuilder) -> object:
        value = b.input("x")
        for _ in range(length):
            value = b.call("aten::neg", value)
        return b.call(last, value)

    return spmd_program(TP2, [X], build)


def test_of_a_long_graph_only_the_change_is_shown() -> None:
    case = some_case(program=_chain(1000, "aten::neg"), rewritten=_chain(1000, "aten::abs"))
    block = make_block(case, None)
    assert len(block.graph) < 15
    assert block.graph[0].text == "… 998 nodes …"
    assert [line.mark for line in block.graph].count("+") == 2  # the node and the return


def test_the_difference_of_equal_programs_has_no_marks() -> None:
    assert {line.mark for line in difference(reduce_then_norm(), reduce_then_norm(), 0)} == {" "}


def test_an_unchanged_program_is_called_so() -> None:
    assert make_block(some_case(), None).caption == "rank 1, unchanged by the pass"


def test_errors_are_told_with_their_hint_below() -> None:
    assert error_text(UsageError("no \x1b such", "do\nthis")) == "Error: no \\x1b such\n  hint: do\n  this"


def test_an_ascii_terminal_gets_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", stream)
    make_console().print("a → b")
    stream.flush()
    assert stream.buffer.getvalue() == b"a \\u2192 b\n"  # type: ignore[attr-defined]
