"""Counterexample: a program, a pass and what is wrong, as a file that anyone can replay."""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from tcverify.application import PassFacts
from tcverify.cases.end_to_end import EndToEnd, decode_end_to_end, encode_end_to_end
from tcverify.domains import DOMAINS
from tcverify.errors import ProgramError, UsageError
from tcverify.execution import Delta
from tcverify.program import (
    Blame,
    CollectiveStatistics,
    Contract,
    Finding,
    Program,
    decode_blame,
    decode_statistics,
    dumps,
    encode_blame,
)
from tcverify.program.codec import MAX_BYTES, decode, encode, load_json
from tcverify.registry.choices import DomainName, is_one_of
from tcverify.system.files import write_atomically
from tcverify.verification.verifier import Verdict

FORMAT = "tcverify-counterexample"
VERSION = 1
FILE_NAME = "counterexample.json"

#: Ranks whose largest difference is kept.
MAX_VALUES = 16


@dataclass(frozen=True)
class RankValue:
    """Where an output of a rank is furthest from the original's."""

    rank: int
    label: str
    index: tuple[int, ...]
    expected: float
    actual: float


@dataclass(frozen=True)
class EditingLine:
    """A line of the pass that edited a node that a finding is about.

    Attributes:
        what: "creates", "erases", "rewires", "moves" or "retargets".
        file: as seen from the current directory, or from its package on.
        caller: "FILE:LINE in FUNCTION" of the pass that called the function, if that is called from several lines; or "".
    """

    node: str
    what: str
    file: str
    line: int
    function: str
    caller: str = ""

    @property
    def place(self) -> tuple[str, int, str]:
        """Where the pass made the edit: the line, and for whom."""
        return self.file, self.line, self.caller

    def __str__(self) -> str:
        called = f", called at {self.caller}" if self.caller else ""
        return f"{self.file}:{self.line} in {self.function} ({self.what} '{self.node}'){called}"


@dataclass(frozen=True)
class Counterexample:
    """A refuted program.

    Attributes:
        id: hash of the program, the pass reference and the kind of finding.
        rewritten: the program after the pass, if it can be serialized.
        listing: the rewritten graph of rank 0 as text, if it cannot.
        finding: the finding for which it is kept.
        others: further findings on the same program.
        values: the largest difference per rank, for findings about values.
        executors: the executors that ran it; the last one confirmed it.
        contract: the promises against which it was judged.
        size_drawn: compute nodes of the program as first drawn, before shrinking.
        shrink_cut: whether shrinking ran out of time.
        deep: whether the finding needs a deep application (see `verify`).
        pass_timeout: time limit for one application of the pass, in seconds.
        domain: the requested number domain; see `verify`.
        notes: (reason, sentence) of the verdict's notes.
        environment: versions of the software with which it was found.
        statistics: the pass's report on each collective of rank 0.
        blame: which of the pass's rewrites are to blame, if that was determined.
        made_by: the lines of the pass that edited the nodes of the finding, if known.
        real_shapes: of inputs by name, if these are smaller here than in the given program.
        end_to_end: what PyTorch's public API makes of the program, for a pass of PyTorch on which that was tried.
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
    shrink_cut: bool = False
    deep: bool = False
    pass_timeout: float = 20.0
    domain: DomainName = "float64"
    notes: tuple[tuple[str, str], ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    statistics: tuple[CollectiveStatistics, ...] = ()
    blame: Blame | None = None
    made_by: tuple[EditingLine, ...] = ()
    real_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    end_to_end: EndToEnd | None = None

    @property
    def replayable(self) -> bool:
        """Whether another process can find the pass."""
        return bool(self.facts.target)


def collect_versions() -> dict[str, str]:
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
    verdict: Verdict,
    kind: str,
    facts: PassFacts,
    contract: Contract,
    *,
    size_drawn: int = 0,
    shrink_cut: bool = False,
    deep: bool = False,
    pass_timeout: float = 20.0,
    real_shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> Counterexample:
    """Record the finding of this kind of a refuting verdict.

    Args:
        real_shapes: of the inputs of the program as it was given, by name.
    """
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
        shrink_cut=shrink_cut,
        deep=deep,
        pass_timeout=pass_timeout,
        domain=verdict.domain,
        notes=tuple((note.reason, note.detail) for note in verdict.notes),
        environment=collect_versions(),
        statistics=pair.statistics,
        real_shapes={
            spec.name: shape
            for spec in pair.original.inputs
            if (shape := (real_shapes or {}).get(spec.name, spec.shape)) != spec.shape
        },
    )


def _values(verdict: Verdict, finding: Finding) -> tuple[RankValue, ...]:
    """The largest differences of the finding's output, as the last executor saw them in the domain that shows it."""
    label, domain = finding.data.get("label"), finding.domain
    found: dict[str, list[Delta]] = {}  # by domain; of the exact one, by draw
    for comparison in verdict.runs:
        deltas = [d for d in comparison.deltas if d.label == label and d.worst and d.difference > 0]
        if deltas and comparison.domain.partition(":")[0] == domain:
            found[comparison.domain] = deltas
    first = next(iter(found.values()), [])  # of several draws, the one that the finding tells of
    return tuple(RankValue(d.rank, d.label, d.worst, d.expected, d.actual) for d in first[:MAX_VALUES])


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
        "values": [{**asdict(v), "expected": _number(v.expected), "actual": _number(v.actual)} for v in case.values],
        "executors": list(case.executors),
        "size_drawn": case.size_drawn,
        "shrink_cut": case.shrink_cut,
        "deep": case.deep,
        "pass_timeout": case.pass_timeout,
        "domain": case.domain,
        "notes": [list(note) for note in case.notes],
        "environment": dict(case.environment),
        "listing": case.listing,
        "program": encode(case.program),
        "rewritten": encode(case.rewritten) if case.rewritten is not None else None,
        **({"statistics": [row.as_dict() for row in case.statistics]} if case.statistics else {}),
        **({"blame": encode_blame(case.blame)} if case.blame is not None else {}),
        **({"made_by": [asdict(line) for line in case.made_by]} if case.made_by else {}),
        **({"real_shapes": {n: list(shape) for n, shape in case.real_shapes.items()}} if case.real_shapes else {}),
        **({"end_to_end": encode_end_to_end(case.end_to_end)} if case.end_to_end is not None else {}),
    }


def _number(value: float) -> float | str:
    """JSON has no NaN and no infinities: these are written as text."""
    return value if math.isfinite(value) else repr(value)


def write_counterexample(case: Counterexample, directory: Path) -> Path:
    """Write `directory/<id>/counterexample.json` atomically and return its path.

    Raises:
        UsageError: the directory cannot be written.
    """
    target = directory / case.id / FILE_NAME
    write_atomically(target, json.dumps(encode_counterexample(case), indent=1, allow_nan=False) + "\n")
    return target


def read_counterexample(path: Path) -> Counterexample:
    """Read a counterexample.

    Raises:
        ProgramError: it is not one, or is damaged.
    """
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ProgramError(f"{path} has {size} bytes; at most {MAX_BYTES} are read")
        text = path.read_bytes()
    except OSError as error:
        raise ProgramError(f"{path} cannot be read: {error.strerror or error}") from None
    return decode_counterexample(load_json(text, str(path)), str(path))


def decode_counterexample(data: Any, where: str) -> Counterexample:
    """Read a counterexample from JSON-able data. Raises as `read_counterexample` does."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ProgramError(f"{where} is not a tcverify counterexample", f'its "format" must be "{FORMAT}"')
    if data.get("version") != VERSION:
        raise ProgramError(
            f"{where} has version {str(data.get('version'))[:40]}; this tcverify reads version {VERSION}",
            "use the tcverify that wrote it",
        )
    program = decode(data.get("program"), f"{where}: program")
    rewritten = decode(data["rewritten"], f"{where}: rewritten") if data.get("rewritten") is not None else None
    if rewritten is not None and rewritten.world_size != program.world_size:
        raise ProgramError(
            f"{where}: the program has {program.world_size} ranks, the rewritten one {rewritten.world_size}"
        )
    try:
        return Counterexample(
            id=_id(data["id"]),
            program=program,
            rewritten=rewritten,
            listing=_typed(data["listing"], str),
            facts=_facts(data["pass"]),
            finding=_finding(data["finding"], program.world_size),
            others=tuple(_finding(f, program.world_size) for f in data["others"]),
            values=tuple(_value(v) for v in data["values"]),
            executors=tuple(_typed(e, str) for e in data["executors"]),
            contract=_contract(data["contract"]),
            size_drawn=_typed(data["size_drawn"], int),
            shrink_cut=_typed(data["shrink_cut"], bool),
            deep=_typed(data["deep"], bool),
            pass_timeout=_timeout(data["pass_timeout"]),
            domain=_domain(data.get("domain", "float64")),  # files of before there was a choice have none
            notes=tuple((_typed(reason, str), _typed(detail, str)) for reason, detail in data.get("notes", [])),
            environment={_typed(k, str): _typed(v, str) for k, v in data["environment"].items()},
            statistics=decode_statistics(data.get("statistics", [])),
            blame=decode_blame(data["blame"]) if data.get("blame") is not None else None,
            made_by=tuple(map(_made_by, data.get("made_by", []))),
            real_shapes={
                _typed(n, str): tuple(_typed(size, int) for size in shape)
                for n, shape in data.get("real_shapes", {}).items()
            },
            end_to_end=decode_end_to_end(data["end_to_end"]) if data.get("end_to_end") is not None else None,
        )
    except KeyError as error:
        raise ProgramError(f"{where}: malformed counterexample: it lacks {error}") from None
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ProgramError(f"{where}: malformed counterexample: {error}") from None


def _made_by(data: Any) -> EditingLine:
    texts = (_typed(data[key], str) for key in ("node", "what", "file", "function"))
    node, what, file, function = texts
    return EditingLine(node, what, file, _typed(data["line"], int), function, _typed(data.get("caller", ""), str))


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{repr(value)[:60]} is not of type {kind.__name__}")
    return value


def _contract(value: Any) -> Contract:
    try:
        return Contract.of(_typed(value, dict))
    except UsageError as error:
        raise TypeError(error.message) from None


def _id(value: Any) -> str:
    if not isinstance(value, str) or len(value) != 8 or set(value) - set("0123456789abcdef"):
        raise TypeError(f"{repr(value)[:60]} is not an id: 8 hexadecimal digits")
    return value


def _domain(value: Any) -> DomainName:
    if not is_one_of(value, DOMAINS):
        raise TypeError(f"{repr(value)[:60]} is not a number domain: {', '.join(DOMAINS)}")
    return value


def _timeout(value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value <= 86400:
        raise TypeError(f"{repr(value)[:60]} is not a time-out between 0 and 86400 s")
    return float(value)


def _finding(data: Any, world_size: int) -> Finding:
    known = {f.name for f in fields(Finding)}
    if not isinstance(data, dict) or set(data) - known:
        raise TypeError("a finding has unknown fields")
    rank = data.get("rank")
    if rank is not None and not 0 <= _typed(rank, int) < world_size:
        raise TypeError(f"a finding is about rank {rank} of {world_size}")
    if data.get("node") is not None:
        _typed(data["node"], str)
    for key in ("kind", "check", "title", "detail"):
        _typed(data[key], str)
    _typed(data["data"], dict)
    return Finding(**data)


def _facts(data: Any) -> PassFacts:
    for key in ("name", "target", "source"):
        _typed(data[key], str)
    _typed(data["options"], dict)
    _contract(data["contract"])
    return PassFacts(**data)


def _value(data: Any) -> RankValue:
    index = tuple(_typed(i, int) for i in data["index"])
    return RankValue(
        _typed(data["rank"], int), _typed(data["label"], str), index, float(data["expected"]), float(data["actual"])
    )


def find_counterexamples(where: str, directory: Path) -> list[Path]:
    """Return the counterexample files for an id (or its prefix), a file or a directory.

    Args:
        where: what the user typed.
        directory: where reports are kept.

    Raises:
        UsageError: nothing matches, or several cases do.
    """
    path = Path(where)
    try:
        if path.is_file():
            return [path]
        if path.is_dir():
            own = path / FILE_NAME
            found = [own] if own.is_file() else sorted(path.glob(f"*/{FILE_NAME}"))
            if not found:
                raise UsageError(f"there is no counterexample in {path}", "tcverify run writes them, one folder each")
            return found
        by_id = where.isascii() and where.isalnum()
        matches = sorted(directory.glob(f"{where}*/{FILE_NAME}")) if by_id else []
    except (OSError, ValueError) as error:
        raise UsageError(f"'{where[:60]}' cannot be read: {error}", "give a file, a directory or an id") from None
    if not matches:
        raise UsageError(f"there is no counterexample '{where}'", f"give a file, or the id of a folder in {directory}")
    if len(matches) > 1:
        ids = ", ".join(match.parent.name for match in matches[:8])
        raise UsageError(f"'{where}' matches {len(matches)} counterexamples", f"give more digits of the id: {ids}")
    return matches


__all__ = [
    "Counterexample",
    "RankValue",
    "case_id",
    "collect_versions",
    "decode_counterexample",
    "encode_counterexample",
    "find_counterexamples",
    "make_counterexample",
    "read_counterexample",
    "write_counterexample",
]
