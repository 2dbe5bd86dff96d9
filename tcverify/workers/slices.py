"""Slices: what a worker is asked for and what it answers, as JSON text, so that any process on any machine can do it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Protocol

from hypothesis.strategies import SearchStrategy

from tcverify import errors
from tcverify.application import CodePoint, PassFacts
from tcverify.campaign import CorpusCase, Statistics
from tcverify.campaign.corpus import decode_case, encode_case
from tcverify.campaign.events import Stop
from tcverify.cases.baseline import KnownFinding
from tcverify.cases.counterexample import Counterexample, decode_counterexample, encode_counterexample
from tcverify.errors import InternalError, TcverifyError
from tcverify.options import Options
from tcverify.program import Contract, Mesh, Program
from tcverify.registry.choices import HostileName
from tcverify.strategies import programs_of
from tcverify.strategies.hostile import with_hostile
from tcverify.strategies.options import with_options


@dataclass(frozen=True)
class DrawPlan:
    """Which programs are drawn.

    Attributes:
        strategy: by the name that `--strategy` takes. None: what suits the pass, which has to be found out first.
        mesh: sizes of the dims of the one mesh of all programs; None draws meshes of `world_size` ranks.
        options: values of the pass's options that are drawn with each program; see `with_options`.
        hostile: what well-behaved compilers do not do to a pass, and programs may do; see `HOSTILE`.
    """

    strategy: str | None
    world_size: int
    mesh: Mapping[str, int] | None = None
    options: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    hostile: Sequence[HostileName] = ()

    def programs(self) -> SearchStrategy[Program]:
        """Return what draws them."""
        if self.strategy is None:
            raise InternalError("programs are drawn before it is known by which strategy")
        mesh = Mesh.grid(self.mesh) if self.mesh is not None else None
        programs = programs_of(self.strategy, mesh, self.world_size)
        return with_options(with_hostile(programs, self.hostile), self.options)


@dataclass(frozen=True, kw_only=True)
class Slice(Options):
    """A part of a campaign: some cases to try, and a range of programs to draw.

    Attributes:
        number: of the slice in its campaign; the seed is its own.
        drawing, mesh: the programs, and what reports call their mesh.
        target, pass_options, pass_timeout: the pass.
        contract: what it promises.
        report_dir: a directory of this slice alone, absolute: what is found stands there before it is told.
        state_dir, corpus: directories that slices may share, absolute. A worker makes what is missing on its machine.
        directory: the driver's current one, absolute; workers go there, if they have it, before they look for the pass.
        known: the baseline's findings; `told`: those of which there are counterexamples already.
        extensions: those of the process that hands out the slices; see `extensions_here`.
        search: whether programs are made of what the pass did with earlier ones of the slice.
        covered: whether it is recorded what the pass reaches of its code, and of which modules; see `Guarded`.

    The others are those of the campaign; failures of earlier runs lie in `state_dir`.
    """

    number: int
    drawing: DrawPlan
    mesh: str
    target: str
    pass_options: Mapping[str, Any]
    pass_timeout: float
    contract: Contract
    confirm: str
    max_examples: int
    directory: str
    report_dir: str
    state_dir: str
    corpus: str | None = None
    collect: bool = False
    known: Sequence[KnownFinding] = ()
    told: Sequence[KnownFinding] = ()
    first: Sequence[CorpusCase] = ()
    extensions: Mapping[str, Any] = field(default_factory=dict)
    covered: Sequence[str] | None = None
    search: bool = False

    @property
    def programs(self) -> int:
        """How many programs it is about."""
        return self.max_examples + len(self.first)

    def dumps(self) -> str:
        """Write it as one line of JSON. Raises NotSerialisable for a program that is none."""
        data = {one.name: getattr(self, one.name) for one in fields(self)}
        data["drawing"], data["contract"] = asdict(self.drawing), asdict(self.contract)
        data["known"], data["told"] = [asdict(e) for e in self.known], [asdict(e) for e in self.told]
        data["first"] = [encode_case(case) for case in self.first]
        return json.dumps(data)

    @classmethod
    def loads(cls, text: str) -> Slice:
        """Read what `dumps` wrote."""
        data = json.loads(text)
        drawing = {**data["drawing"], "hostile": tuple(data["drawing"]["hostile"])}
        data["drawing"], data["contract"] = DrawPlan(**drawing), Contract.of(data["contract"])
        data["known"], data["told"] = (
            [KnownFinding(**e) for e in data["known"]],
            [KnownFinding(**e) for e in data["told"]],
        )
        data["first"] = [decode_case(case, "the slice") for case in data["first"]]
        return cls(**data)


@dataclass(frozen=True)
class SliceOutcome:
    """What came of a slice.

    Attributes:
        facts: of the pass, as the worker loaded it; None where it could not.
        found: counterexamples and cases of hygiene findings; their files are those of the slice.
        known: findings of the baseline, and how many programs showed each.
        stop: why it ended, as of `CampaignFinished`; "failed" with an `error`.
        warnings: what the user is to be told, in lines.
        crashed: files of programs on which tcverify itself failed.
        files: that define the pass, as they are called where the worker is; empty where nothing is recorded.
        reached: places of the pass's code that the worker has reached for the first time.
    """

    statistics: Statistics
    facts: PassFacts | None = None
    found: Sequence[Counterexample] = ()
    known: Sequence[tuple[KnownFinding, int]] = ()
    stop: Stop | Literal["failed"] = "examples"
    warnings: Sequence[str] = ()
    crashed: Sequence[str] = ()
    error: TcverifyError | None = None
    files: Sequence[str] = ()
    reached: Collection[CodePoint] = ()

    def reached_of(self, files: Sequence[str]) -> Iterator[CodePoint]:
        """What was reached, with the names that the files of the pass have elsewhere."""
        names = dict(zip(self.files, files, strict=False))
        return (point._replace(file=names.get(point.file, point.file)) for point in self.reached)

    def dumps(self) -> str:
        """Write it as one line of JSON."""
        error = self.error
        data = {
            "statistics": statistics_as_data(self.statistics),
            "facts": None if self.facts is None else asdict(self.facts),
            "found": [encode_counterexample(case) for case in self.found],
            "known": [[asdict(entry), number] for entry, number in self.known],
            "stop": self.stop,
            "warnings": list(self.warnings),
            "crashed": list(self.crashed),
            "error": None if error is None else encode_error(error),
            "files": list(self.files),
            "reached": sorted(self.reached),
        }
        return json.dumps(data)

    @classmethod
    def loads(cls, text: str) -> SliceOutcome:
        """Read what `dumps` wrote. Raises ProgramError for a counterexample that is none."""
        data = json.loads(text)
        return cls(
            statistics_from_data(data["statistics"]),
            None if data["facts"] is None else PassFacts(**data["facts"]),
            [decode_counterexample(case, "what a worker found") for case in data["found"]],
            [(KnownFinding(**entry), number) for entry, number in data["known"]],
            data["stop"],
            data["warnings"],
            data["crashed"],
            None if data["error"] is None else decode_error(*data["error"]),
            data["files"],
            [CodePoint(*row) for row in data["reached"]],
        )


def statistics_as_data(counts: Statistics) -> dict[str, Any]:
    """Write statistics as JSON-able data."""
    return {one.name: getattr(counts, one.name) for one in fields(counts)}


def statistics_from_data(data: Mapping[str, Any]) -> Statistics:
    """Read what `statistics_as_data` wrote."""
    counts = Statistics()
    for name, value in data.items():
        setattr(counts, name, Counter(value) if isinstance(getattr(counts, name), Counter) else value)
    return counts


def encode_error(error: TcverifyError) -> list[str | None]:
    """Write an error as JSON-able data."""
    return [type(error).__name__, error.message, error.hint]


def decode_error(name: str, message: str, hint: str | None) -> TcverifyError:
    """Read what `encode_error` wrote: an error of the same class, with its hint, also where the class takes other arguments."""
    kind: type[TcverifyError] = getattr(errors, name, InternalError)
    error: TcverifyError = TcverifyError.__new__(kind)
    TcverifyError.__init__(error, message, hint)
    return error


class Crew(Protocol):
    """Workers that do slices, wherever they are. What is sent and answered is the text of `Slice` and `SliceOutcome`."""

    @property
    def size(self) -> int:
        """Workers: so many slices are to be under way at once."""
        ...

    def submit(self, number: int, text: str) -> None:
        """Hand out a slice. There are never more than `size` under way."""
        ...

    def next(self) -> tuple[int, str | None]:
        """Wait for an answer: the number of a slice and its outcome, or None: workers died of it, twice."""
        ...

    def interrupt(self) -> None:
        """Have all workers end what they do, and answer with what they have."""
        ...

    def close(self) -> None:
        """End the workers."""
        ...


__all__ = [
    "Crew",
    "DrawPlan",
    "Slice",
    "SliceOutcome",
    "decode_error",
    "encode_error",
    "statistics_as_data",
    "statistics_from_data",
]
