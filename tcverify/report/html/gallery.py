"""A page of several counterexamples: classes of defects of passes, each case with its graph and the bad node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tcverify.cases.counterexample import Counterexample, read_counterexample
from tcverify.errors import ProgramError
from tcverify.explain.diagnosis import diagnose
from tcverify.program import KINDS
from tcverify.program.codec import load_json
from tcverify.report.block import make_block
from tcverify.report.html.document import REPORT_NAME, render
from tcverify.report.html.drawings import make_sheets
from tcverify.report.html.graph import Drawing
from tcverify.report.sanitize import plural, sanitize

ABOUT_NAME = "about.json"

#: Size limit of about.json, in bytes.
MAX_ABOUT = 1 << 16

_KEYS: Mapping[str, type] = {"title": str, "class": str, "what": str, "planted": list, "seen_in": list}


@dataclass(frozen=True, slots=True)
class About:
    """What a person says about a case, in the file about.json next to it.

    Attributes:
        title: of the defect.
        group: the class of defects that it belongs to.
        what: one or two sentences on what fails and where such a defect was seen.
        planted: names of the nodes at which the defect was planted.
        seen_in: references to where it was seen.
    """

    title: str
    group: str
    what: str
    planted: tuple[str, ...] = ()
    seen_in: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Exhibit:
    """One case. Every text is one line without control characters, not yet escaped for HTML.

    Attributes:
        anchor: its id in the page.
        blamed: names of the nodes that the report blames: of the finding, and where values first diverge.
        met: whether it blames a node at which the defect was planted; None if that is unknown.
        report: address of its own page, relative to the common folder; "" if there is none.
    """

    anchor: str
    case: str
    about: About
    kind: str
    kind_text: str
    title: str
    divergence: str
    facts: str
    drawing: Drawing | None
    heading: str
    blamed: tuple[str, ...]
    met: bool | None
    command: str
    report: str


@dataclass(frozen=True, slots=True)
class Gallery:
    """All cases by class, in alphabetical order.

    Attributes:
        summary: how many there are, and for how many the report blames the planted node.
    """

    groups: tuple[tuple[str, tuple[Exhibit, ...]], ...]
    summary: str


def to_gallery(paths: Sequence[Path], folder: Path) -> str:
    """Return a page of several counterexamples, to be kept in their folder.

    Args:
        paths: their files.
        folder: what links are relative to.

    Raises:
        ProgramError: a file is damaged, or its about.json is.
    """
    return render("gallery.html.j2", gallery=make_gallery(paths, folder))


def make_gallery(paths: Sequence[Path], folder: Path) -> Gallery:
    """Arrange counterexamples for the page. Arguments and errors as of `to_gallery`."""
    exhibits = [_exhibit(number, path, folder) for number, path in enumerate(paths)]
    groups: dict[str, list[Exhibit]] = {}
    for exhibit in exhibits:
        groups.setdefault(exhibit.about.group, []).append(exhibit)
    known = [e.met for e in exhibits if e.met is not None]
    summary = f"{plural(len(exhibits), 'case')} in {len(groups)} class{'es' * (len(groups) != 1)}"
    if known:
        summary += (
            f"; the report names the planted node in {sum(known)} of the {len(known)} cases with a known location"
        )
    ordered = tuple((group, tuple(sorted(groups[group], key=lambda e: e.about.title))) for group in sorted(groups))
    return Gallery(ordered, summary)


def read_about(folder: Path) -> About | None:
    """Read what is said about the case in a folder; None if nothing is.

    Raises:
        ProgramError: the file cannot be read, or does not match `About`.
    """
    path = folder / ABOUT_NAME
    if not path.exists():
        return None
    try:
        size = path.stat().st_size
        text = path.read_bytes() if size <= MAX_ABOUT else b""
    except OSError as error:
        raise ProgramError(f"{path} cannot be read: {error.strerror or error}") from None
    if size > MAX_ABOUT:
        raise ProgramError(f"{path} has {size} bytes; at most {MAX_ABOUT} are read")
    data = load_json(text, str(path))
    keys = ", ".join(f'"{key}"' for key in _KEYS)
    if not isinstance(data, dict):
        raise ProgramError(f"{path} is not a JSON object", f"it has the keys {keys}")
    unknown = sorted(set(data) - set(_KEYS))
    if unknown:
        raise ProgramError(f"{path} has unknown keys: {', '.join(map(repr, unknown))[:200]}", f"it may have {keys}")
    for key, kind in _KEYS.items():
        _require(path, data, key, kind)
    return About(
        sanitize(data["title"]),
        sanitize(data["class"]),
        sanitize(data["what"]),
        tuple(map(sanitize, data.get("planted", []))),
        tuple(map(sanitize, data.get("seen_in", []))),
    )


def _require(path: Path, data: Mapping[str, Any], key: str, kind: type) -> None:
    if kind is str and not (isinstance(data.get(key), str) and data[key].strip()):
        raise ProgramError(
            f'{path}: "{key}" is missing or not a string', "title, class and what must be non-empty strings"
        )
    if kind is list:
        value = data.get(key, [])
        if not (isinstance(value, list) and all(isinstance(v, str) for v in value)):
            raise ProgramError(f'{path}: "{key}" is not a list of strings', "omit it if there is nothing to list")


def _exhibit(number: int, path: Path, folder: Path) -> Exhibit:
    case = read_counterexample(path)
    told = read_about(path.parent)
    diagnosis = diagnose(case.program, case.rewritten, case.finding)
    block = make_block(case, path, diagnosis)
    sheets = make_sheets(case, diagnosis, ())
    first = diagnosis.first.node if diagnosis.first is not None else None
    blamed = tuple(dict.fromkeys(sanitize(node) for node in (case.finding.node, first) if node is not None))
    about = told or _untold(case)
    page = path.parent / REPORT_NAME
    inside = page.is_file() and page.is_relative_to(folder)
    return Exhibit(
        anchor=f"case-{number + 1}",
        case=case.id,
        about=about,
        kind=sanitize(case.finding.kind),
        kind_text=sanitize(KINDS.get(case.finding.kind, case.finding.check)),
        title=block.title,
        divergence=block.divergence,
        facts=sanitize(
            f"{case.facts.name}; {case.program.world_size} ranks; {plural(case.program.size, 'node')}; "
            f"{case.finding.check} check"
        ),
        drawing=sheets[-1].drawing if sheets else None,
        heading=sheets[-1].heading if sheets else "",
        blamed=blamed,
        met=bool(set(blamed) & set(about.planted)) if about.planted else None,
        command=sanitize(block.reproduce[0]) if block.reproduce else "",
        report=page.relative_to(folder).as_posix() if inside else "",
    )


def _untold(case: Counterexample) -> About:
    """A description of a case without about.json."""
    kind = sanitize(case.finding.kind)
    return About(f"{kind} in {sanitize(case.facts.name)}", kind, sanitize(case.finding.title))


__all__ = ["About", "Exhibit", "Gallery", "make_gallery", "read_about", "to_gallery"]
