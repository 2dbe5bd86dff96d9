"""Every block of code in the documentation runs, and prints what the page says.

| block | is |
|---|---|
| python with a title | written to the file of that name, next to which the page's commands run |
| python | run, all of a page one after the other in one process |
| console | `$ command`, run; the lines below begin lines of its output, in this order; `...` stands for any lines |
| toml, ini, yaml, json | read by a parser; with a title also written to that file |
| text | shown, not run |

A comment `<!-- not run: reason -->` in the line before a block leaves it out.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests import warm

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))

#: Pages whose commands take long, and whose subjects have tests of their own: they run at night.
LONG = {
    f"howto/{name}.md"
    for name in (
        "bisect", "coverage", "deadlocks", "dialect", "domains", "executor", "graphs", "inductor", "many_machines", "races",
        "report", "search", "tensorcast",
    )
}  # fmt: skip
LONG |= {"index.md", "pytorch.md", "resharding.md"}  # the first shows what the tutorial does

_FENCE = re.compile(r"^```(?P<language>\w*)(?: title=\"(?P<title>[^\"]+)\")?$")
_LEFT_OUT = re.compile(r"^<!-- not run: .{8,} -->$")
_SNIPPET = re.compile(r'^--8<-- "([^"]+)"$')


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        line: where it begins in the page.
        title: the file that it is, or "".
    """

    line: int
    language: str
    title: str
    text: str
    left_out: bool


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a page, with files put in where the page names them."""
    found: list[Block] = []
    lines = text.splitlines()
    i = 0
    while i < len(lines):
        if not lines[i].startswith("```"):
            i += 1
            continue
        fence = _FENCE.match(lines[i])
        assert fence is not None, f"line {i + 1}: {lines[i]} names no language, or more than a title"
        end = next(j for j in range(i + 1, len(lines)) if lines[j] == "```")
        body = []
        for line in lines[i + 1 : end]:
            snippet = _SNIPPET.match(line)
            body.append((DOCS / snippet[1]).read_text(encoding="utf-8").rstrip("\n") if snippet else line)
        left_out = i > 0 and _LEFT_OUT.match(lines[i - 1]) is not None
        found.append(Block(i + 1, fence["language"], fence["title"] or "", "\n".join(body) + "\n", left_out))
        i = end + 1
    return found


def read(block: Block) -> None:
    """Parse a block of data."""
    if block.language == "toml":
        tomllib.loads(block.text)
    elif block.language == "ini":
        configparser.ConfigParser().read_string(block.text)
    elif block.language == "yaml":
        yaml.safe_load(block.text)
    elif block.language == "json":
        json.loads(block.text)
    else:
        raise AssertionError(f"line {block.line}: nobody runs {block.language!r}; write text where it is only shown")


def commands(block: Block) -> list[tuple[str, list[str]]]:
    """Return the commands of a console block, each with the lines that it is to print."""
    found: list[tuple[str, list[str]]] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            assert found, f"line {block.line}: the block does not begin with a command"
            found[-1][1].append(line)
    return found


def require_printed(expected: list[str], out: str, where: str) -> None:
    """Assert that lines begin lines of the output, one after the other; behind `...` any may come first."""
    lines = out.splitlines()
    at, free = 0, False
    for wanted in expected:
        if wanted == "...":
            free = True
            continue
        here = [i for i in range(at, len(lines)) if lines[i].startswith(wanted)][:1] if wanted else [at]
        assert here, f"{where}: no line begins with {wanted!r} in\n{out}"
        assert free or here[0] == at, f"{where}: {lines[at]!r} comes before {wanted!r} in\n{out}"
        at, free = here[0] + 1, False


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of the commands that pages use, which run this very tcverify."""
    directory = tmp_path_factory.mktemp("bin")
    pytest_here = ("-m", "pytest", "-p", "tcverify.pytest_plugin", "-p", "no:cacheprovider")
    warm.executables(directory, {"tcverify": ("-m", "tcverify"), "pytest": pytest_here, "python": ()})
    return directory


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] * (page in LONG)) for page in (*PAGES, "../README.md")]
)
def test_the_blocks_of_a_page_work(page: str, tmp_path: Path, programs: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FORCE_COLOR", "PYTEST", "CI"))}
    environment = {
        **kept, "COLUMNS": "80", "NO_COLOR": "1", "PYTHONPATH": str(ROOT), "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTEST_PLUGINS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }  # fmt: skip

    def run(command: str) -> tuple[int, str]:
        finished = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=240, check=False,
        )  # fmt: skip
        return finished.returncode, finished.stdout

    # the pass of the tutorial is on other pages too
    (tmp_path / "sink_all_reduce.py").write_text((DOCS / "sink_all_reduce.py").read_text())
    script = ""
    for block in blocks((DOCS / page).read_text(encoding="utf-8")):
        if block.left_out or block.language == "text":
            continue
        if block.title:
            (tmp_path / block.title).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / block.title).write_text(block.text)
        if block.language == "python":
            script += "" if block.title else f"\n{block.text}"
        elif block.language == "console":
            for command, expected in commands(block):
                code, out = run(command)
                assert code in (0, 1), f"{page}:{block.line}: {command} ends with {code}\n{out}"
                require_printed(expected, out, f"{page}:{block.line}: {command}")
        else:
            read(block)
    if script:
        (tmp_path / "page.py").write_text(script)
        code, out = run("python page.py")
        assert code == 0, f"{page}: {out}"


def test_what_the_pages_are_held_to() -> None:
    """The test itself finds what is wrong: it does not pass because it looks away."""
    first_block = "```console\n$ echo one\none\n```\n"
    second_block = "<!-- not run: a good reason -->\n```python\nx\n```\n"
    page = f'{first_block}{second_block}```python title="a.py"\n--8<-- "late_wait.py"\n```\n'
    first, second, third = blocks(page)
    assert commands(first) == [("echo one", ["one"])]
    assert (second.left_out, first.left_out) == (True, False)
    assert (third.title, "def late_wait" in third.text) == ("a.py", True)
    with pytest.raises(AssertionError, match="names no language"):
        blocks("```python linenums\nx\n```\n")
    with pytest.raises(AssertionError, match="nobody runs 'rust'"):
        read(Block(1, "rust", "", "x", False))
    with pytest.raises(AssertionError, match="no line begins with 'two'"):
        require_printed(["one", "two"], "one\n three\n", "here")
    with pytest.raises(AssertionError, match="'one' comes before 'two'"):
        require_printed(["two"], "one\ntwo\n", "here")
    require_printed(["...", "two"], "one\ntwo and more\n", "here")


def test_every_example_is_on_a_page() -> None:
    shown = {
        name for page in PAGES for name in re.findall(r'--8<-- "([^"]+)"', (DOCS / page).read_text(encoding="utf-8"))
    }
    assert {f"examples/{path.name}" for path in (DOCS / "examples").glob("*.py")} <= shown


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = re.findall(r": ([\w/]+\.md)$", text, re.M)
    made = (
        *(f"reference/{n}.md" for n in ("cli", "contract", "ops", "python", "verdicts")),
        "gallery.md",
        "findings.md",
    )
    assert sorted(named) == sorted({*PAGES, *made})
