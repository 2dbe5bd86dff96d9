"""Defects of PyTorch that were found: a folder each, below reports/pytorch.

A folder holds `finding.toml` (the facts), `script.py` (shows the defect without tcverify), `issue.md` (a text to be filed) and,
where a subject shows it, `counterexample.json`. Where none does, the facts say why.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from tcverify.errors import UsageError
from tcverify.program import KINDS
from tcverify.pytorch.scripts import run_alone
from tcverify.pytorch.subjects import PREFIX

#: Releases of torch that the findings are followed through; where a script did not run in one, the finding does not name it.
VERSIONS = (
    "2.9.0", "2.9.1", "2.10.0", "2.11.0", "2.12.0", "2.12.1", "2.13.0", "2.14.0", "2.14.1", "2.15.0",
)  # fmt: skip

#: What a user has to do for the defect to show: what is seen with fewer steps comes first.
REACHES = {
    "default": "by the public API as it is: torch.compile, AOTAutograd, DTensor, pipelining, checkpoints",
    "opt-in": "by the public API with a setting, a backend or a group that a user chooses",
    "direct call": "only by calling the pass",
}

#: What a script tells by the code with which it ends; with any other it tells nothing.
OUTCOMES = {1: "bad", 0: "good", 2: "not there"}

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
        reach: what a user has to do for it to show; one of `REACHES`.
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
    reach: str
    unshown: str = ""
    also: tuple[str, ...] = ()

    @property
    def span(self) -> str:
        """The versions that show it, in words; where it is not known which is the first or the last, those that may be."""
        known = [version for version in VERSIONS if version in {*self.affects, *self.unaffected}]
        runs = [list(run) for shows, run in groupby(known, key=self.affects.__contains__) if shows]
        said = ", ".join(_run(run, known) for run in runs)
        between = [
            version
            for left, right in pairwise([None, *known, None])
            if (left in self.affects) != (right in self.affects)
            for version in VERSIONS[VERSIONS.index(left) + 1 if left else 0 : VERSIONS.index(right) if right else None]
        ]
        return f"{said}; not known: {_listed(between)}" if between else said

    def shows_in(self, version: str) -> bool | None:
        """Whether a version of torch is to show it, None if that is not known.

        One that is not among `VERSIONS` is to do as the newest release before it.
        """
        measured = (one for one in VERSIONS if _numbers(one) <= _numbers(version))
        newest = version if version in VERSIONS else max(measured, key=_numbers, default=None)
        return True if newest in self.affects else False if newest in self.unaffected else None

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


def run_script(script: Path, place: Path, seconds: float) -> tuple[str, str]:
    """Run a script in a directory where nothing of this repository can be imported.

    Returns:
        What came of it, "bad" if it shows the defect, "good", "not there", "error" or "timed out"; and what it has printed.
    """
    code, out, errors = run_alone(script, place, seconds, place.parent / "inductor")
    if code is None:
        return "timed out", out + errors
    if "Traceback" in errors and code == 1:
        return "error", out + errors  # an uncaught exception ends a script as a defect does
    return OUTCOMES.get(code, "error"), out + errors


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
        (found.reach in REACHES, f"there is no reach '{found.reach}'", f"it is one of {_listed(REACHES)}"),
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


def _numbers(version: str) -> list[int]:
    """The numbers of a version: 2.16.0.dev20270101+cpu is that of 2.16.0, which it leads to."""
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3]]


def _run(run: list[str], known: list[str]) -> str:
    """Neighbouring versions in words, of those that are known."""
    if run == known:
        return "all"
    if run[-1] == known[-1]:
        return f"since {run[0]}"
    if run[0] == known[0]:
        return f"until {run[-1]}"
    return run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


__all__ = ["REACHES", "VERSIONS", "TorchFinding", "read_finding", "read_findings", "run_script"]
