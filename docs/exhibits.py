"""Adds the gallery of defects and the findings in PyTorch to the site, each with its report, when mkdocs builds it.

mkdocs calls `on_files`. The pages and reports come from reports/gallery and reports/pytorch.
"""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from tcverify.cases.counterexample import FILE_NAME, Counterexample, read_counterexample
from tcverify.program import KINDS
from tcverify.pytorch.findings import REACHES, TorchFinding, read_findings
from tcverify.report.html import to_html
from tcverify.report.html.gallery import About, read_about

ROOT = Path(__file__).parents[1]
GALLERY = ROOT / "reports" / "gallery"
FOUND = ROOT / "reports" / "pytorch"

KINDS_PAGE = "reference/verdicts.md#kinds-of-findings"

#: Repositories by the prefix of a reference: PT-165962 is issue or pull request 165962 of PyTorch.
REPOSITORIES = {
    "DS": "deepspeedai/DeepSpeed", "MG": "NVIDIA/Megatron-LM", "NVF": "NVIDIA/Fuser", "PT": "pytorch/pytorch",
    "TREC": "meta-pytorch/torchrec", "TT": "pytorch/torchtitan", "VLLM": "vllm-project/vllm",
}  # fmt: skip


class Exhibit(NamedTuple):
    """A counterexample of the gallery.

    Attributes:
        name: of its folder.
    """

    name: str
    about: About
    case: Counterexample


def on_files(files: Any, config: Any) -> Any:
    """The hook of mkdocs: adds the pages, the reports and the scripts."""
    from mkdocs.structure.files import File

    for path, text in {**pages(), **reports()}.items():
        files.append(File.generated(config, path, content=text))
    for one in read_findings(FOUND):
        files.append(File.generated(config, f"findings/{one.folder.name}.py", abs_src_path=str(one.script)))
    return files


def pages() -> dict[str, str]:
    """Return the text of the two pages, by path below docs/."""
    return {"gallery.md": gallery(read_gallery()), "findings.md": findings(read_findings(FOUND))}


def reports() -> dict[str, str]:
    """Return the HTML report of every counterexample, by path below docs/."""
    return {
        f"{page}/{path.parent.name}.html": to_html(read_counterexample(path), path.relative_to(ROOT))
        for page, folder in (("gallery", GALLERY), ("findings", FOUND))
        for path in sorted(folder.glob(f"*/{FILE_NAME}"))
    }


def prose(text: str) -> str:
    """Text as Markdown in which only `code` is markup."""
    parts = " ".join(text.split()).split("`")
    plain = (re.sub(r"([\\*_\[\]])", r"\\\1", part).replace("<", "&lt;") for part in parts[::2])
    return "".join(f"{one}`{code}`" for one, code in zip(plain, [*parts[1::2], ""], strict=True)).removesuffix("``")


# ----------------------------------------------------------------------------------------------------------- gallery


def read_gallery(directory: Path = GALLERY) -> list[Exhibit]:
    """Read the counterexamples of a directory, by class and title."""
    found = []
    for path in sorted(directory.glob(f"*/{FILE_NAME}")):
        about = read_about(path.parent)
        if about is None:
            raise ValueError(f"{path.parent} has no about.json")
        found.append(Exhibit(path.parent.name, about, read_counterexample(path)))
    return sorted(found, key=lambda one: (one.about.group, one.about.title))


def gallery(exhibits: list[Exhibit]) -> str:
    """The page of defects, class by class."""
    groups = [(group, list(members)) for group, members in groupby(exhibits, key=lambda one: one.about.group)]
    parts = [
        "# Gallery\n",
        f"{len(exhibits)} defects of compiler passes in {len(groups)} classes. Each text says what goes wrong, and why "
        "it is hard to notice. Each report shows the smallest program with the defect, before ⇒ after the pass. "
        "The passes are planted mutants; some repeat a defect from a public bug tracker, which is linked. "
        "The tests replay all of them.\n",
        "The counterexamples are in `reports/gallery`: `tcverify replay reports/gallery/NAME/counterexample.json`. "
        "[Findings in PyTorch](findings.md) shows defects of real passes.\n",
    ]
    for group, members in groups:
        parts.append(f"## {group.capitalize()}\n")
        for name, about, case in members:
            kind = case.finding.kind
            parts += [
                f"### {prose(about.title)} {{ #{name} }}\n",
                f"{prose(about.what)}\n",
                f"Found as [`{kind}`]({KINDS_PAGE}): {prose(KINDS[kind])}.{_seen(about)} "
                f"[Report](gallery/{name}.html)\n",
            ]
    return "\n".join(parts)


def _seen(about: About) -> str:
    links = []
    for reference in about.seen_in:
        prefix, number = reference.split("-")[:2]
        repository = REPOSITORIES.get(prefix)
        address = f"https://github.com/{repository}/issues/{number}"
        links.append(f"[{repository}#{number}]({address})" if repository else prose(reference))
    return f" Seen in {', '.join(links)}." if links else ""


# ---------------------------------------------------------------------------------------------------------- findings


def findings(found: tuple[TorchFinding, ...]) -> str:
    """The page of defects of PyTorch, subject by subject."""
    ordered = sorted(found, key=lambda one: (one.subject, [*REACHES].index(one.reach), one.title))
    public = sum(one.reported != "unreported" for one in found)
    parts = [
        "# Findings in PyTorch\n",
        f"{len(found)} defects of PyTorch's own passes and of DTensor, by subject; {public} have a public report. "
        "[PyTorch's own passes](pytorch.md) explains the subjects, the versions and the campaigns.\n",
        "Each script shows its defect without tcverify: it exits with 1 if the installed torch has the defect. "
        "Each report shows the smallest program. The files are in `reports/pytorch`.\n",
    ]
    for subject, members in groupby(ordered, key=lambda one: one.subject):
        parts.append(f"## `{subject}`\n")
        for one in members:
            parts.append(_finding(one))
    return "\n".join(parts)


def _finding(one: TorchFinding) -> str:
    name = one.folder.name
    number = "/".join(one.reported.rsplit("/", 2)[1:])
    links = f"[script](findings/{name}.py)"
    if one.counterexample is not None:
        links = f"[report](findings/{name}.html), {links}"
    facts = {
        "Kind": f"[`{one.kind}`]({KINDS_PAGE}): {prose(KINDS[one.kind])}",
        "Cause": f"`{one.cause}`",
        "Reach": f"{one.reach}, {REACHES[one.reach]}",
        "Versions": f"{one.span}: shown in torch {', '.join(one.affects)}",
        "Status": "not reported" if one.reported == "unreported" else f"public report: [{number}]({one.reported})",
        "Files": links,
    }
    if one.unshown:
        facts["No report"] = prose(one.unshown)
    return "\n".join([
        f"### {prose(one.title)} {{ #{name} }}\n",
        f"{prose(one.why)}\n",
        *(f"- **{label}**: {text}" for label, text in facts.items()),
        '\n??? note "Text of the issue"\n',
        _issue(one.folder.joinpath("issue.md").read_text(encoding="utf-8")),
    ])  # fmt: skip


def _issue(text: str) -> str:
    """The text of an issue inside a block that opens on demand: headings are bold, so that the contents of the page omit them."""
    text = re.sub(r"(?m)^#+ (.*)$", lambda heading: f"**{prose(heading[1])}**", text)
    text = re.sub(r"(?<![(<])https://[\w./#-]*\w", r"<\g<0>>", text)
    text = re.sub(r"(?<![\w/])#(\d{4,})\b", r"[#\1](https://github.com/pytorch/pytorch/issues/\1)", text)
    return "".join(f"    {line}".rstrip() + "\n" for line in text.splitlines())
