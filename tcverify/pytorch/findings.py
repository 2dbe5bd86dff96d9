"""Defects of PyTorch that were found: a folder each, below reports/pytorch.

A folder holds `finding.toml` (the facts), `script.py` (shows the defect without tcverify), `issue.md` (a text to be filed) and,
where a subject shows it, `counterexample.json`. Where none does, the facts say why.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tcverify.errors import UsageError
from tcverify.program import KINDS
from tcverify.pytorch.subjects import PREFIX

#: What PyTorch is verified in.
VERSIONS = ("2.9.1", "2.11.0", "2.13.0", "2.15.0")

#: How a user comes to the defect.
ENTRIES = ("torch.compile", "make_fx + pass", "pass as in torch's tests", "DTensor API", "pipelining API")

FILE_NAME = "finding.toml"

#: Facts that are no text, or need not be there.
_OTHERS = ("affects", "unaffected", "unshown", "also")


@dataclass(frozen=True, slots=True)
class TorchFinding:
    """A defect of PyTorch.

    Attributes:
        folder: where it is written down.
        title: one line on it.
        subject: what shows it, with the prefix.
        kind: of what tcverify finds; see `KINDS`.
        cause: file:function of torch.
        why: how it comes about.
        contract: what PyTorch says that it breaks, and where.
        affects: versions of torch in which the script showed it.
        unaffected: versions in which the script did not.
        reported: the address of a public report, or "unreported".
        entry: how a user comes to it; one of `ENTRIES`.
        unshown: why no subject shows it; empty where one does, and there is a counterexample.
        also: what other counterexamples of it are known by, which were read: "kind: fingerprint".
    """

    folder: Path
    title: str
    subject: str
    kind: str
    cause: str
    why: str
    contract: str
    affects: tuple[str, ...]
    unaffected: tuple[str, ...]
    reported: str
    entry: str
    unshown: str = ""
    also: tuple[str, ...] = ()

    @property
    def script(self) -> Path:
        """Shows it without tcverify: ends with 1 where it does, 0 where not, 2 where this torch lacks what it is about."""
        return self.folder / "script.py"

    @property
    def counterexample(self) -> Path | None:
        """What tcverify wrote of it, where a subject shows it."""
        path = self.folder / "counterexample.json"
        return path if path.is_file() else None

    @property
    def about(self) -> dict[str, Any]:
        """What pages of several counterexamples say of it: the content of about.json."""
        seen = [self.cause] if self.reported == "unreported" else [self.cause, self.reported]
        return {"title": self.title, "class": self.subject, "what": " ".join(self.why.split()), "seen_in": seen}


def read_findings(directory: Path) -> tuple[TorchFinding, ...]:
    """Read the folders of a directory, by name.

    Raises:
        UsageError: one is not as it has to be.
    """
    return tuple(read_finding(path.parent) for path in sorted(directory.glob(f"*/{FILE_NAME}")))


def read_finding(folder: Path) -> TorchFinding:
    """Read a folder.

    Raises:
        UsageError: its facts cannot be read, are incomplete or contradict each other, or a file is missing.
    """
    path = folder / FILE_NAME
    facts = _facts(path)
    known = [one.name for one in fields(TorchFinding) if one.name != "folder"]
    unknown = sorted(facts.keys() - {*known})
    if unknown:
        raise UsageError(f"{path} has an unknown key '{unknown[0]}'", f"its keys are {_listed(known)}")
    found = TorchFinding(
        folder,
        affects=_versions(path, "affects", facts),
        unaffected=_versions(path, "unaffected", facts),
        unshown=_text(path, "unshown", facts) if "unshown" in facts else "",
        also=_prints(path, facts.get("also", [])),
        **{name: _text(path, name, facts) for name in known if name not in _OTHERS},
    )
    _require_sense(found, path)
    return found


def _facts(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None


def _text(path: Path, name: str, facts: dict[str, Any]) -> str:
    value = facts.get(name)
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"{path}: {name} is {value!r:.60}", "write a text that is not empty")
    return value


def _prints(path: Path, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(
        isinstance(one, str) and one.partition(": ")[0] in KINDS for one in value
    ):
        raise UsageError(f"{path}: also is {value!r:.60}", "write a list of 'kind: fingerprint'")
    return tuple(value)


def _versions(path: Path, name: str, facts: dict[str, Any]) -> tuple[str, ...]:
    value = facts.get(name)
    if not isinstance(value, list) or not set(map(str, value)) <= set(VERSIONS) or len(set(value)) != len(value):
        raise UsageError(f"{path}: {name} is {value!r:.60}", f"write a list of what is among {_listed(VERSIONS)}")
    return tuple(sorted(value, key=VERSIONS.index))


def _require_sense(found: TorchFinding, path: Path) -> None:
    """Raise unless the facts are possible, and the files there."""
    twice = sorted({*found.affects} & {*found.unaffected})
    reported = found.reported == "unreported" or found.reported.startswith("https://")
    for right, says, hint in (
        (found.subject.startswith(PREFIX), f"subject is '{found.subject}'", f"write {PREFIX} and its name"),
        (found.kind in KINDS, f"there is no kind '{found.kind}'", f"kinds are {_listed(KINDS)}"),
        (found.entry in ENTRIES, f"there is no entry '{found.entry}'", f"it is one of {_listed(ENTRIES)}"),
        (found.cause.startswith("torch/") and found.cause.count(":") == 1, f"cause is '{found.cause}'",
         "write torch/path/to/file.py:function"),
        (found.affects, "no version is affected", "a defect is one that a script has shown in a version of torch"),
        (not twice, f"{_listed(twice)} cannot be affected and unaffected", "measure again"),
        (reported, f"reported is '{found.reported}'", "give the address of a public report, or say unreported"),
        (found.script.is_file(), "there is no script.py beside it", "every defect is shown without tcverify"),
        (found.counterexample or found.unshown, "there is neither a counterexample.json beside it nor 'unshown'",
         "keep what a subject shows, or say in 'unshown' why none does"),
        (not (found.counterexample and found.unshown), "'unshown' stands beside a counterexample.json", "remove one"),
        ((found.folder / "issue.md").is_file(), "there is no issue.md beside it", "write what is to be filed"),
    ):  # fmt: skip
        if not right:
            raise UsageError(f"{path}: {says}", hint)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


__all__ = ["ENTRIES", "VERSIONS", "TorchFinding", "read_finding", "read_findings"]
