"""Counterexample: a program, a pass and what is wrong, as a file that anyone can replay."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from tcverify.application import PassFacts
from tcverify.errors import ProgramError, UsageError
from tcverify.program import Contract, Finding, Program, dumps
from tcverify.program.codec import decode, encode, load_json
from tcverify.verifier import Verdict

FORMAT = "tcverify-counterexample"
VERSION = 1
FILE_NAME = "counterexample.json"


@dataclass(frozen=True)
class RankValue:
    """Where an output of a rank is furthest from the original's."""

    rank: int
    label: str
    index: tuple[int, ...]
    expected: float
    actual: float


@dataclass(frozen=True)
class Counterexample:
    """A refuted program.

    Attributes:
        id: hash of the program, the pass reference and the kind of finding.
        rewritten: the program after the pass, where it can be written down.
        listing: the rewritten graph of rank 0 as text, where it cannot.
        finding: the finding that it is kept for.
        others: further findings on the same program.
        values: the largest difference per rank, for findings about values.
        executors: who ran it, the last one confirming.
        contract: promises that it was judged by.
        size_drawn: compute nodes of the program as first drawn, before shrinking.
        deep: whether the finding needs a deep application (see `verify`).
        environment: versions of what it was found with.
    """

    id: str
    program: Program
    rewritten: Program | None
    listing: str
    facts: PassFacts
    finding: Finding
    others: tuple[Finding, ...] = ()
    values: tuple[RankValue, ...] = ()
    executors: tuple[str, ...] = ()
    contract: Contract = field(default_factory=Contract)
    size_drawn: int = 0
    deep: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def replayable(self) -> bool:
        """Whether another process can find the pass."""
        return bool(self.facts.target)


def environment() -> dict[str, str]:
    """Versions of everything that a result may depend on."""
    import hypothesis

    from tcverify import __version__

    return {
        "tcverify": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "hypothesis": hypothesis.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
    }


def case_id(program: Program, facts: PassFacts, kind: str) -> str:
    """Return the id of a case: 8 hexadecimal digits."""
    text = json.dumps([dumps(program), facts.target or facts.name, sorted(map(str, facts.options.items())), kind])
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def make_counterexample(
    verdict: Verdict, kind: str, facts: PassFacts, contract: Contract, *, size_drawn: int = 0, deep: bool = False
) -> Counterexample:
    """Record the finding of this kind of a refuting verdict."""
    pair = verdict.pair
    finding = next(f for f in verdict.findings if f.kind == kind)
    others = tuple(f for f in verdict.findings if f is not finding)
    return Counterexample(
        id=case_id(pair.original, facts, kind),
        program=pair.original,
        rewritten=pair.rewritten if pair.foreign is None else None,
        listing=pair.listing,
        facts=facts,
        finding=finding,
        others=others,
        values=_values(verdict, finding),
        executors=tuple(verdict.executors),
        contract=contract,
        size_drawn=size_drawn or pair.original.size,
        deep=deep,
        environment=environment(),
    )


def _values(verdict: Verdict, finding: Finding) -> tuple[RankValue, ...]:
    label = finding.data.get("label")
    for comparison in reversed(verdict.runs):
        found = [d for d in comparison.deltas if d.label == label and d.worst and d.difference > 0]
        if found:
            return tuple(RankValue(d.rank, d.label, d.worst, d.expected, d.actual) for d in found[:16])
    return ()


# -------------------------------------------------------------------------------------------------------------- files


def encode_counterexample(case: Counterexample) -> dict[str, Any]:
    """Write a counterexample as JSON-able data."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "id": case.id,
        "pass": asdict(case.facts),
        "contract": asdict(case.contract),
        "finding": asdict(case.finding),
        "others": [asdict(f) for f in case.others],
        "values": [asdict(v) for v in case.values],
        "executors": list(case.executors),
        "size_drawn": case.size_drawn,
        "deep": case.deep,
        "environment": dict(case.environment),
        "listing": case.listing,
        "program": encode(case.program),
        "rewritten": encode(case.rewritten) if case.rewritten is not None else None,
    }


def write_counterexample(case: Counterexample, directory: Path) -> Path:
    """Write `directory/<id>/counterexample.json` atomically and return its path.

    Raises:
        UsageError: the directory cannot be written.
    """
    target = directory / case.id / FILE_NAME
    write_atomically(target, json.dumps(encode_counterexample(case), indent=1) + "\n")
    return target


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror or error}", "choose another place with --report-dir"
        ) from None


def read_counterexample(path: Path) -> Counterexample:
    """Read a counterexample.

    Raises:
        ProgramError: it is not one, or is damaged.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ProgramError(f"{path} cannot be read: {error.strerror or error}") from None
    return decode_counterexample(load_json(text, str(path)), str(path))


def decode_counterexample(data: Any, where: str) -> Counterexample:
    """Read a counterexample from JSON-able data. Raises as `read_counterexample` does."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ProgramError(f"{where} is not a tcverify counterexample", f'its "format" must be "{FORMAT}"')
    if data.get("version") != VERSION:
        raise ProgramError(f"{where} has version {data.get('version')!r}; this tcverify reads version {VERSION}")
    program = decode(data.get("program"), f"{where}: program")
    rewritten = data.get("rewritten")
    try:
        return Counterexample(
            id=_typed(data["id"], str),
            program=program,
            rewritten=decode(rewritten, f"{where}: rewritten") if rewritten is not None else None,
            listing=_typed(data["listing"], str),
            facts=_facts(data["pass"]),
            finding=_finding(data["finding"]),
            others=tuple(_finding(f) for f in data["others"]),
            values=tuple(_value(v) for v in data["values"]),
            executors=tuple(_typed(e, str) for e in data["executors"]),
            contract=Contract(**{k: _typed(v, bool) for k, v in data["contract"].items()}),
            size_drawn=_typed(data["size_drawn"], int),
            deep=_typed(data["deep"], bool),
            environment={_typed(k, str): _typed(v, str) for k, v in data["environment"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProgramError(f"{where}: malformed counterexample: {type(error).__name__}: {error}") from None


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value


def _finding(data: Any) -> Finding:
    known = {f.name for f in fields(Finding)}
    if not isinstance(data, dict) or set(data) - known:
        raise TypeError("a finding has unknown fields")
    for key in ("kind", "check", "title", "detail"):
        _typed(data[key], str)
    _typed(data["data"], dict)
    return Finding(**data)


def _facts(data: Any) -> PassFacts:
    for key in ("name", "target", "source"):
        _typed(data[key], str)
    _typed(data["options"], dict)
    return PassFacts(**data)


def _value(data: Any) -> RankValue:
    index = tuple(_typed(i, int) for i in data["index"])
    return RankValue(
        _typed(data["rank"], int), _typed(data["label"], str), index, float(data["expected"]), float(data["actual"])
    )


def find_counterexamples(where: str, directory: Path) -> list[Path]:
    """Return the counterexample files that an id (or its beginning), a file or a directory stands for.

    Args:
        where: what the user typed.
        directory: where reports are kept.

    Raises:
        UsageError: it stands for nothing, or for several cases.
    """
    path = Path(where)
    if path.is_file():
        return [path]
    if path.is_dir():
        own = path / FILE_NAME
        found = [own] if own.is_file() else sorted(path.glob(f"*/{FILE_NAME}"))
        if not found:
            raise UsageError(f"there is no counterexample in {path}")
        return found
    matches = sorted(directory.glob(f"{where}*/{FILE_NAME}")) if where.isalnum() else []
    if not matches:
        raise UsageError(f"there is no counterexample '{where}'", f"give a file, or the id of a folder in {directory}")
    if len(matches) > 1:
        raise UsageError(f"'{where}' stands for {len(matches)} counterexamples", "give more digits of the id")
    return matches


__all__ = [
    "Counterexample",
    "RankValue",
    "case_id",
    "decode_counterexample",
    "encode_counterexample",
    "environment",
    "find_counterexamples",
    "make_counterexample",
    "read_counterexample",
    "write_atomically",
    "write_counterexample",
]
