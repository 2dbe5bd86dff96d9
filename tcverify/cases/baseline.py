"""The baseline: a file of known findings, which do not fail a run.

    {
      "format": "tcverify-baseline", "version": 1,
      "known": [
        {"pass": "mycompiler.passes:MyPass", "kind": "wrong-value", "fingerprint": "norm is unrelated, reads shard",
         "title": "output 0 is wrong on ranks 0, 1", "case": "3f9c2a1b", "reason": "accepted until the new planner lands"}
      ]
    }

Pass, kind and fingerprint define which findings an entry covers (see `fingerprint`). Title and case are those of the
original finding. The reason is for people: summaries show it, and only people change it.

Reading a baseline does not import torch, so errors in it show at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tcverify.errors import UsageError
from tcverify.system.files import write_atomically

if TYPE_CHECKING:
    from tcverify.application import PassFacts
    from tcverify.cases.counterexample import Counterexample

FORMAT = "tcverify-baseline"
VERSION = 1

#: Largest file that is read, in bytes.
MAX_BYTES = 16 << 20

_HINT = "tcverify run --write-baseline FILE writes one"
_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|[][{}]')


@dataclass(frozen=True, slots=True)
class KnownFinding:
    """One entry: a finding that is known.

    Attributes:
        target: the pass, as "module:attribute", or its name where it has no reference.
        kind, fingerprint: which of its findings.
        title, case: of the finding that the entry was written for.
        reason: why it does not fail the run, in the user's words.
    """

    target: str
    kind: str
    fingerprint: str
    title: str = ""
    case: str = ""
    reason: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """What identifies it."""
        return self.target, self.kind, self.fingerprint


@dataclass(frozen=True, slots=True)
class Baseline:
    """Known findings, in the order of the file."""

    known: tuple[KnownFinding, ...] = ()

    def of(self, facts: PassFacts) -> Iterator[KnownFinding]:
        """Yield the known findings of one pass."""
        return (entry for entry in self.known if entry.target == pass_reference(facts))

    def with_cases(self, cases: Iterable[Counterexample]) -> Baseline:
        """Return a baseline that holds these cases, too. Entries that it has stay as they are, with their reasons."""
        found = {entry.key: entry for entry in self.known}
        for case in cases:
            entry = known_of(case)
            found.setdefault(entry.key, entry)
        return Baseline(tuple(found.values()))


def pass_reference(facts: PassFacts) -> str:
    """Return what a baseline calls a pass."""
    return facts.target or facts.name


def known_of(case: Counterexample) -> KnownFinding:
    """Return the entry that covers the finding of a case."""
    from tcverify.cases.fingerprint import fingerprint_of  # which takes torch; who has a case has it

    finding = case.finding
    return KnownFinding(pass_reference(case.facts), finding.kind, fingerprint_of(case), finding.title, case.id)


def add_to_baseline(path: Path, baseline: Baseline | None, cases: Sequence[Counterexample]) -> str:
    """Add cases to what a baseline holds, write that to `path`, and say so in one line.

    Raises:
        UsageError: it cannot be written.
    """
    before = baseline or Baseline()
    after = before.with_cases(cases)
    write_baseline(after, path)
    new = len(after.known) - len(before.known)
    return f"baseline {path}: {len(after.known)} known, {new} of them new; fill in their reasons"


def write_baseline(baseline: Baseline, path: Path) -> None:
    """Write a baseline atomically. Raises UsageError when it cannot be written."""
    entries = [{"pass": entry.target, **asdict(entry)} for entry in baseline.known]
    for entry in entries:
        del entry["target"]
    data = {"format": FORMAT, "version": VERSION, "known": entries}
    write_atomically(path, json.dumps(data, indent=1, ensure_ascii=True) + "\n", "choose another path for the baseline")


def read_baseline(path: Path) -> Baseline:
    """Read a baseline.

    Raises:
        UsageError: there is none, or it is malformed; the message names the line.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UsageError(f"{path} is larger than {MAX_BYTES} bytes: not a baseline", _HINT)
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"there is no baseline {path}", _HINT) from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UsageError(f"{path}, line {line}: not UTF-8 text", _HINT) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}", _HINT) from None
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        hint = "does it hold a merge conflict?" if "<<<<<<<" in text else _HINT
        raise UsageError(f"{path}, line {error.lineno}: not JSON: {error.msg}", hint) from None
    except RecursionError:
        raise UsageError(f"{path}, line 1: nested too deeply", _HINT) from None
    except ValueError:  # Python reads no numbers of thousands of digits
        raise UsageError(f"{path} holds a number that is too long", _HINT) from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise UsageError(f'{path}, line 1: not a baseline: its "format" must be "{FORMAT}"', _HINT)
    if type(data.get("version")) is not int or data["version"] != VERSION:
        raise UsageError(
            f"{path}, line {_line(text, 'version')}: version {str(data.get('version'))[:40]}; this tcverify reads {VERSION}",
            "use the tcverify that wrote it",
        )
    entries = data.get("known")
    if not isinstance(entries, list):
        raise UsageError(f'{path}, line {_line(text, "known")}: "known" must be a list of findings', _HINT)
    for key in data:
        if key not in ("format", "version", "known"):
            raise UsageError(f'{path}, line {_line(text, key)}: unknown key "{key[:40]}"', _HINT)
    lines = iter(_entry_lines(text))
    line = _line(text, "known")
    known = []
    for entry in entries:
        line = next(lines, line) if isinstance(entry, dict) else line
        known.append(_known(entry, f"{path}, line {line}"))
    return Baseline(tuple(known))


def _known(entry: Any, where: str) -> KnownFinding:
    if not isinstance(entry, dict):
        raise UsageError(f"{where}: an entry is an object, not {json.dumps(entry)[:40]}", _HINT)
    needed, optional = ("pass", "kind", "fingerprint"), ("title", "case", "reason")
    for name in needed:
        if name not in entry:
            raise UsageError(f'{where}: the entry lacks "{name}"', f"it takes {', '.join(needed)}")
    for name, value in entry.items():
        if name not in needed + optional:
            raise UsageError(f'{where}: unknown key "{name[:40]}"', f"keys are {', '.join(needed + optional)}")
        if not isinstance(value, str):
            raise UsageError(f'{where}: "{name}" is {json.dumps(value)[:40]}, not a string', "write it in quotes")
    return KnownFinding(entry["pass"], *(entry.get(name, "") for name in (*needed[1:], *optional)))


def _line(text: str, key: str) -> int:
    """The line of a key of the outermost object, 1 where it is missing."""
    found = re.search(rf'"{re.escape(key)}"\s*:', text)
    return text[: found.start()].count("\n") + 1 if found is not None else 1


def _entry_lines(text: str) -> list[int]:
    """The lines on which the entries begin, as far as they are objects. The text is JSON."""
    lines = []
    open_: list[str] = []
    for token in _TOKEN.finditer(text):
        if token[0] in "[{":
            if open_ == ["{", "["] and token[0] == "{":
                lines.append(text[: token.start()].count("\n") + 1)
            open_.append(token[0])
        elif token[0] in "]}":
            open_.pop()
    return lines


__all__ = [
    "Baseline",
    "KnownFinding",
    "add_to_baseline",
    "known_of",
    "pass_reference",
    "read_baseline",
    "write_baseline",
]
