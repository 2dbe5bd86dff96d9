"""Reports: what others wrote is shown, and acts on nothing that shows it."""

from __future__ import annotations

import ast
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from rich.console import Console

from tcverify.application import PassFacts
from tcverify.cases.counterexample import Counterexample, RankValue
from tcverify.errors import UsageError
from tcverify.program import Finding, GraphBuilder, Program, loads, spmd_program
from tcverify.report import block as blocks
from tcverify.report.block import make_block, place_of
from tcverify.report.console import make_console
from tcverify.report.listing import columns, listing_difference
from tcverify.report.markdown import to_markdown
from tcverify.report.sanitize import error_text, plural, sanitize, wrap
from tcverify.report.script import to_script
from tcverify.report.terminal import show
from tcverify.report.text import to_text
from tests.cases.test_counterexample import some_case
from tests.support.programs import TP2, X, reduce_then_norm

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


def test_outputs_of_dicts_are_called_by_their_names() -> None:
    def build(b: GraphBuilder) -> Any:
        x = b.input("x")
        return {"losses": [x], "grads": {"weight": b.call("aten::neg", x)}}

    given = spmd_program(TP2, [X], build)
    for label, place in [
        ("output 0", "output 0[1] (losses.0)"),
        ("output 1", "output 1[1] (grads.weight)"),
        ("output 2", "output 2[1]"),
        ("input 'x' after the run", "input 'x' after the run[1]"),
    ]:
        assert place_of(RankValue(1, label, (1,), 0.0, 1.0), given) == place
    for rank in (-3, 5):
        assert place_of(RankValue(rank, "output 1", (), 0.0, 1.0), given) == "output 1[]"


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


def _rendered(text: str) -> tuple[str, str]:
    """What a reader of Markdown sees outside of code, and in code. HTML is refused but for what folds."""
    outside, code = [], []
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        if token.type == "html_block":
            assert re.fullmatch(r"(<details>\n<summary>[\w ,⇒()+-]*</summary>|</details>)\n?", token.content), (
                token.content
            )
        for one in token.children or [token]:
            assert one.type not in ("html_inline", "link_open", "image"), one
            (code if one.type in ("fence", "code_inline") else outside).append(one.content)
    return "\n".join(outside), "\n".join(code)


@pytest.mark.parametrize("rewritten", [True, False])
def test_in_markdown_everything_of_others_stands_in_code(rewritten: bool) -> None:
    case = nasty_case(
        program=_chain(30, "aten::neg"), rewritten=_chain(30, "aten::abs") if rewritten else None, listing=NASTY
    )
    nasty = replace(case.finding, title="` | `` \\| @someone #1 <b> ` `", node="`|`", data={"stage": "a`|b"})
    outside, code = _rendered(to_markdown(replace(case, finding=nasty), None))
    assert "<details>" in outside
    assert not [word for word in ("x1b", "touch", "gnp", "someone", "<b>", "`", "\\|") if word in outside]
    assert "$(touch x)" in code
    assert "a`|b" in code  # the bar is escaped for the table alone
    assert "` | `` \\| @someone #1 <b> ` `" in code


def test_markdown_says_the_cause_first_and_has_a_table_of_facts() -> None:
    text = to_markdown(some_case(), Path("reports") / some_case().id / "counterexample.json")
    assert text.startswith(
        f"### `wrong-value` in `mine`\n\n**`{some_case().finding.title}`**\n\nAn output differs from"
    )
    assert f"| case | `{some_case().id}` |" in text.splitlines()
    assert "<details>" not in text
    assert f"tcverify replay {some_case().id}" in text
    types = {token.type for token in MarkdownIt("commonmark").enable("table").parse(text)}
    assert {"table_open", "fence", "heading_open"} <= types


def test_what_is_long_is_folded_in_markdown() -> None:
    finding = Finding("pass-raised", "application", "title", "\n".join(f"line {i}" for i in range(21)))
    folded = to_markdown(some_case(finding=finding), None)
    assert "<summary>Detail, 21 lines</summary>\n\n```\nline 0" in folded
    short = replace(finding, detail="\n".join(f"line {i}" for i in range(20)))
    assert "<details>" not in to_markdown(some_case(finding=short), None)


def test_a_fence_is_longer_than_any_inside() -> None:
    finding = Finding("pass-raised", "application", "title", "``````` and ```")
    assert "\n````````\n``````` and ```\n````````\n" in to_markdown(some_case(finding=finding), None)


def test_plain_text_is_the_same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("reports") / some_case().id / "counterexample.json"
    expected = to_text(some_case(), path)
    assert max(map(len, expected.splitlines())) <= 80
    assert not [line for line in expected.splitlines() if line != line.rstrip()]
    for name, value in (("COLUMNS", "200"), ("FORCE_COLOR", "1"), ("TERM", "xterm-256color")):
        monkeypatch.setenv(name, value)
    assert to_text(some_case(), path) == expected
    assert "\x1b" not in expected


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
    assert sanitize("all_reduce → norm · 2⁻⁵¹ «é» 日本") == "all_reduce → norm · 2⁻⁵¹ «é» 日本"


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
    assert sanitize(text) == expected


def test_plain_bounds_the_length() -> None:
    assert len(sanitize("x" * 10**6)) < 1100


# --------------------------------------------------------------------------------------------------------------- shape


def test_plurals() -> None:
    assert [plural(n, "node") for n in (0, 1, 2)] == ["0 nodes", "1 node", "2 nodes"]


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
    assert {line.mark for line in listing_difference(reduce_then_norm(), reduce_then_norm(), 0)} == {" "}


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
