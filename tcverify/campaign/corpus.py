"""The corpus: a directory of programs that are worth running again, for many campaigns on many machines.

Its files are cases: a program, the pass and the mesh that it was run for, and why it is kept. The name of a file is the hash of
what is in it, files come whole or not at all, and nobody changes or removes one. So campaigns share a directory, also one on a
network, without knowing of each other: at worst two of them keep two programs for one reason.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tcverify.application import CodePoint
from tcverify.errors import ProgramError, TcverifyError, UsageError
from tcverify.execution import MAX_RANKS
from tcverify.program import Program, dumps
from tcverify.program.codec import MAX_BYTES, decode, load_json
from tcverify.system.files import remove_unfinished, source_name, write_atomically

FORMAT = "tcverify-case"
VERSION = 1

#: Damaged or foreign files of which each is named; that there are more is told once.
NAMED = 8

#: What the reasons begin with for which kernels are kept.
KERNEL = "kernel: "

_NAME = re.compile(r"[0-9a-f]{32}\.json")
_HINT = "choose another path with --corpus"


@dataclass(frozen=True, slots=True)
class CorpusCase:
    """A program to be tried before any is drawn.

    Attributes:
        target: the pass, as a baseline calls it (see `pass_reference`).
        mesh: names the mesh of the campaign that kept it.
        reasons: what it shows, e.g. "wrong-value: norm is unrelated" or "fuse × all_reduce".
        kind: of the finding that it was shrunk for, or "".
        deep: whether the pass has to be applied deeply (see `verify`).
    """

    target: str
    mesh: str
    program: Program
    reasons: tuple[str, ...]
    kind: str = ""
    deep: bool = False


@dataclass(frozen=True, slots=True)
class _Known:
    """What is remembered of a file: programs are many, and are read when they are asked for."""

    path: Path
    target: str
    mesh: str
    reasons: tuple[str, ...]
    size: int


class Corpus:
    """A directory of cases, made when missing.

    Args:
        warn: is told in one line of each file that is not a case, or damaged, and when a case cannot be written. A run goes on.

    Raises:
        UsageError: the directory cannot be made or read.
    """

    def __init__(self, directory: Path, warn: Callable[[str], None]) -> None:
        self.directory = directory
        self._warn = warn
        self._read: set[str] = set()
        self._known: list[_Known] = []
        self._reasons: set[tuple[str, str, str]] = set()
        self._told = 0
        self._broken = False
        try:
            directory.mkdir(parents=True, exist_ok=True)
            list(directory.iterdir())
        except OSError as error:
            raise UsageError(f"the corpus {directory} cannot be used: {error.strerror or error}", _HINT) from None
        remove_unfinished(directory)
        self.refresh()

    def refresh(self) -> None:
        """Take note of files that have come since."""
        try:
            found = sorted(path for path in self.directory.iterdir() if path.name not in self._read)
        except OSError as error:
            self._warn(
                f"the corpus {self.directory} cannot be read: {error.strerror or error}; its cases are not tried"
            )
            return
        for path in found:
            if path.name.startswith("."):  # somebody is writing it, or died while writing it
                continue
            self._read.add(path.name)
            try:
                self._note(path, *_load(path))
            except TcverifyError as error:
                self._complain(error)

    def cases(self, target: str, mesh: str) -> list[CorpusCase]:
        """Return the cases of a pass on a mesh: findings first, small programs first, one for each reason."""
        self.refresh()
        chosen: list[CorpusCase] = []
        reached: set[str] = set()
        for known in sorted(self._known, key=lambda one: (one.size, one.path.name)):
            if (known.target, known.mesh) != (target, mesh) or reached.issuperset(known.reasons):
                continue
            try:
                case = decode_case(_load(known.path)[0], known.path.name)
            except TcverifyError as error:
                self._known.remove(known)
                self._complain(error)
            else:
                reached.update(case.reasons)
                chosen.append(case)
        return sorted(chosen, key=lambda case: not case.kind)

    def add(self, case: CorpusCase) -> bool:
        """Keep a case, if there is none for one of its reasons; whether it was kept. That it cannot be written is told once."""
        if all((case.target, case.mesh, reason) in self._reasons for reason in case.reasons):
            return False
        try:
            text = json.dumps(encode_case(case), separators=(",", ":"), allow_nan=False)
            path = self.directory / f"{_hash(text.encode())}.json"
            write_atomically(path, text, _HINT)
        except TcverifyError as error:
            if not self._broken:
                self._warn(f"a case was not saved: {error.message}; the run continues")
            self._broken = True
            return False
        self._read.add(path.name)
        self._note(path, encode_case(case), len(text))
        return True

    def _note(self, path: Path, data: dict[str, Any], size: int) -> None:
        known = _Known(path, data["pass"], data["mesh"], tuple(data["reasons"]), size)
        self._known.append(known)
        self._reasons.update((known.target, known.mesh, reason) for reason in known.reasons)

    def _complain(self, error: TcverifyError) -> None:
        self._told += 1
        if self._told <= NAMED:
            self._warn(f"the corpus {self.directory}: {error.message}; skipped")
        elif self._told == NAMED + 1:
            self._warn(f"the corpus {self.directory}: more such files are skipped")


def reasons_of(patterns: Iterable[str], labels: Iterable[str]) -> list[str]:
    """Return the reasons to keep a program: each pattern that fired × each feature of the program."""
    features = sorted(set(labels))
    return [f"{pattern} × {label}" for pattern in sorted(set(patterns)) for label in features or ["any program"]]


def reasons_of_kernel(rewrite: Iterable[tuple[str, int]], places: Iterable[CodePoint]) -> list[str]:
    """Return the reasons to keep a kernel of a search: its rewrite, and each place of the pass that it was the first to reach."""
    ops = " ".join(f"{'+' if number > 0 else '-'}{op}" for op, number in rewrite)
    outcomes = {0: " is false", 1: " is true"}
    reached = [f"{KERNEL}{source_name(p.file)}:{p.line}{outcomes.get(p.outcome, '')}" for p in sorted(places)]
    return [*([KERNEL + ops] if ops else []), *reached]


def is_kernel(case: CorpusCase) -> bool:
    """Whether a case was kept as a kernel of a search."""
    return any(reason.startswith(KERNEL) for reason in case.reasons)


# -------------------------------------------------------------------------------------------------------------- files


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def encode_case(case: CorpusCase) -> dict[str, Any]:
    """Write a case as JSON-able data."""
    return {
        "format": FORMAT, "version": VERSION, "pass": case.target, "mesh": case.mesh, "reasons": list(case.reasons),
        "kind": case.kind, "deep": case.deep, "program": json.loads(dumps(case.program)),
    }  # fmt: skip


def _load(path: Path) -> tuple[dict[str, Any], int]:
    """Read a file as far as it can be read without its program; and its size in bytes. Raises ProgramError."""
    if not _NAME.fullmatch(path.name):
        raise ProgramError(f"{path.name} is not a case")
    try:
        if path.exists() and not path.is_file():  # to read a pipe takes for ever
            raise ProgramError(f"{path.name} is not a file")
        if path.stat().st_size > MAX_BYTES:
            raise ProgramError(f"{path.name} is larger than {MAX_BYTES} bytes")
        content = path.read_bytes()
    except OSError as error:
        raise ProgramError(f"{path.name} cannot be read: {error.strerror or error}") from None
    if _hash(content) != path.stem:
        raise ProgramError(f"{path.name} is damaged: its name is not the hash of its content")
    data = load_json(content, path.name)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ProgramError(f'{path.name} is not a case: its "format" must be "{FORMAT}"')
    if type(data.get("version")) is not int or data["version"] != VERSION:
        raise ProgramError(f"{path.name} has version {str(data.get('version'))[:40]}; this tcverify reads {VERSION}")
    reasons = data.get("reasons")
    texts = [data.get("pass"), data.get("mesh"), data.get("kind"), *(reasons if isinstance(reasons, list) else [None])]
    if not all(isinstance(text, str) for text in texts) or type(data.get("deep")) is not bool:
        raise ProgramError(f"{path.name} is a malformed case")
    return data, len(content)


def decode_case(data: dict[str, Any], where: str) -> CorpusCase:
    """Read a case whose own fields are known to be of their types. Raises ProgramError for its program."""
    program = decode(data.get("program"), where)
    if program.world_size > MAX_RANKS:
        raise ProgramError(f"{where} holds a program of {program.world_size} ranks, more than {MAX_RANKS}")
    return CorpusCase(data["pass"], data["mesh"], program, tuple(data["reasons"]), data["kind"], data["deep"])


__all__ = ["Corpus", "CorpusCase", "decode_case", "encode_case", "is_kernel", "reasons_of", "reasons_of_kernel"]
