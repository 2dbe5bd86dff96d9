"""The reference pages hold all that they are about, since they are made from it; and the site builds without a warning."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import click
import pytest

import tcverify
from tcverify.cli import main
from tcverify.ops import Op, registered_dialects
from tcverify.ops.table import _DIALECTS, register_dialect
from tcverify.passes import BUILTIN
from tcverify.program import KINDS, Contract
from tcverify.pytorch.findings import read_findings
from tcverify.registry.glossary import GLOSSARY
from tcverify.strategies import STRATEGIES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pages(generate: ModuleType) -> dict[str, str]:
    found: dict[str, str] = generate.pages()
    return found


def test_every_verb_and_option_is_there(pages: dict[str, str]) -> None:
    page = pages["reference/cli.md"]
    for name, command in main.COMMANDS.items():
        part = page.partition(f"## tcverify {name}\n")[2].partition("\n## ")[0]
        assert part
        for option in command.params:
            if isinstance(option, click.Option):
                assert option.opts[-1] in part, (name, option.opts)
    assert all(f"| `{name}` |" in page for name in (*BUILTIN, *STRATEGIES))


def test_every_public_name_is_there_once(pages: dict[str, str]) -> None:
    page = pages["reference/python.md"]
    for name in (*tcverify.__all__, "verifies"):
        assert len(re.findall(rf"(?m)^::: [\w.]+\.{name}$|^\| `{name}` \|", page)) == 1, name


def test_the_table_of_terms_is_up_to_date(generate: ModuleType) -> None:
    text = generate.GLOSSARY_PAGE.read_text(encoding="utf-8")
    assert generate.glossary(text) == text, "python docs/generate.py writes it again"
    assert all(f"**{term}** |" in text for term in GLOSSARY)
    assert list(GLOSSARY) == sorted(GLOSSARY, key=str.lower)
    assert '| <a id="near-miss"></a>**near miss** |' in text


def test_every_promise_and_kind_is_there(pages: dict[str, str]) -> None:
    contract = pages["reference/contract.md"]
    assert all(f"| `{field.name}` |" in contract for field in dataclasses.fields(Contract))
    assert all(
        f"| `{kind}` | {meaning.split('[')[0]}" in pages["reference/verdicts.md"] for kind, meaning in KINDS.items()
    )


def test_every_op_is_there(pages: dict[str, str], generate: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for namespace, ops in registered_dialects().items():
        part = pages["reference/ops.md"].partition(f"## {namespace}\n")[2].partition("\n## ")[0]
        for op in ops:
            assert (f"| `{op.name.partition('::')[2]}` |" if op.run is not None else f"| `{op.name}` |") in part, (
                op.name
            )
    monkeypatch.setitem(_DIALECTS, "docstest", {})
    register_dialect("docstest", [Op("docstest::half", lambda x: x / 2, signature="(Tensor x) -> Tensor")])
    assert "| `half` | `(Tensor x) -> Tensor` | local | compute |" in generate.ops()


def test_what_a_page_says_is_no_markup(generate: ModuleType) -> None:
    assert generate.cell("a | b [x] <y>\n  c") == "a \\| b \\[x] &lt;y> c"
    assert generate.documented_attributes(Contract)["memory_budget"].startswith("peak memory grows by at most")


def test_the_gallery_holds_every_exhibit(exhibits: ModuleType) -> None:
    page = exhibits.pages()["gallery.md"]
    folders = [path.parent for path in (ROOT / "reports" / "gallery").glob("*/counterexample.json")]
    assert len(folders) > 50
    for folder in folders:
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        kind = json.loads((folder / "counterexample.json").read_text(encoding="utf-8"))["finding"]["kind"]
        group = page.partition(f"## {about['class'].capitalize()}\n")[2].partition("\n## ")[0]
        part = group.partition(f"### {exhibits.prose(about['title'])} {{ #{folder.name} }}\n")[2].partition("\n### ")[0]
        assert exhibits.prose(about["what"]) in part, folder.name
        assert f"[`{kind}`](" in part
        assert f"](gallery/{folder.name}.html)" in part
    assert len(re.findall(r"(?m)^### ", page)) == len(folders)


def test_the_findings_in_pytorch_are_all_there(exhibits: ModuleType) -> None:
    page = exhibits.pages()["findings.md"]
    found = read_findings(ROOT / "reports" / "pytorch")
    for one in found:
        name = one.folder.name
        subject = page.partition(f"## `{one.subject}`\n")[2].partition("\n## ")[0]
        part = subject.partition(f"### {exhibits.prose(one.title)} {{ #{name} }}\n")[2].partition("\n### ")[0]
        assert f"- **Cause**: `{one.cause}`\n- **Reach**: {one.reach}, " in part, name
        assert f"- **Versions**: {one.span}: shown in torch {', '.join(one.affects)}" in part
        assert ("not reported" if one.reported == "unreported" else f"({one.reported})") in part
        assert f"](findings/{name}.py)" in part
        assert (f"](findings/{name}.html)" in part) == (one.counterexample is not None)
        assert '??? note "Text of the issue"\n' in part
    assert len(re.findall(r"(?m)^### ", page)) == len(found)


def test_texts_of_people_are_no_markup(exhibits: ModuleType) -> None:
    assert exhibits.prose("_a_ [b] <c>\n `_d_ [e]` `f`") == "\\_a\\_ \\[b\\] &lt;c> `_d_ [e]` `f`"
    assert exhibits._issue("# [a][b] Title\n\n#131023, see https://a.b/c.\n") == (
        "    **\\[a\\]\\[b\\] Title**\n\n    [#131023](https://github.com/pytorch/pytorch/issues/131023), see <https://a.b/c>.\n"
    )


def test_the_site_builds(tmp_path: Path, exhibits: ModuleType) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install -e '.[docs]'")
    ran = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path / "site")],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    page = (tmp_path / "site" / "reference" / "python" / "index.html").read_text(encoding="utf-8")
    assert 'id="tcverify.verification.verifier.verify"' in page
    index = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert not re.findall(
        r'(?:src|href)="https?://(?!github\.com|squidfunk|hypothesis)[^"]*"', index
    )  # nothing from the network
    reports = exhibits.reports()
    assert len(reports) > 100
    for path, text in reports.items():
        assert (tmp_path / "site" / path).read_text(encoding="utf-8") == text
        assert str(ROOT) not in text
        assert not re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(?!data:)', text)  # one file
    for one in read_findings(ROOT / "reports" / "pytorch"):
        assert (tmp_path / "site" / "findings" / f"{one.folder.name}.py").read_bytes() == one.script.read_bytes()
