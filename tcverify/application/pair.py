"""Pair: a program before and after a pass, and what was observed while the pass ran. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from tcverify.application.coverage.recorder import CodePoint
from tcverify.application.edit_log import EditPlace
from tcverify.execution import Comparison
from tcverify.program import CollectiveStatistics, Program, RewriteRequest

#: Ways in which a pass failed to return; also the kind of the finding.
FailureKind: TypeAlias = Literal["pass-raised", "pass-timeout", "pass-died"]


@dataclass(frozen=True, slots=True)
class PassFailure:
    """The pass did not return: it raised, exceeded its time limit or crashed its process.

    Attributes:
        rank: the rank whose graph it was given, when known.
        detail: the traceback, or the last lines that the process wrote.
    """

    kind: FailureKind
    message: str
    rank: int | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Defect:
    """A defect of what the pass returned, seen on the live graph module.

    Attributes:
        aspect: "return" (not a graph module), "lint", "code", "signature"; or of purity: "input-mutated", "unrepeatable",
            "hash-order", "not-idempotent", "second-application", "surroundings" (it changed torch's
            global state); or of a form of the graph that only the pass sees, reported by the pass in an
            attribute `defects`: "nodes" (lost, new or doubled), "dependency" (two that depend on each other
            have swapped), "collective-order", "opaque-order", "peak-memory", "comm-buffer"; or "estimate" (one that
            the pass makes is wrong).
        stage: of a pipeline, the pass that it is about, if known.
    """

    aspect: str
    rank: int
    message: str
    node: str | None = None
    stage: str | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """One pass of a pipeline, and the program that it returned.

    Attributes:
        program: None for the last stage, whose result is the rewritten program, and if the result is not a program.
    """

    name: str
    program: Program | None = None


@dataclass(frozen=True, slots=True)
class Foreign:
    """The result of the pass cannot leave its process: it contains submodules or foreign functions.

    Attributes:
        judged: the lockstep comparison made in that process, if possible.
    """

    why: str
    judged: Comparison | None = None


@dataclass(slots=True)
class PassTrace:
    """What was recorded of the pass while it ran, as far as requested.

    Attributes:
        rewrites: those that the pass asked for on each rank (see `tcverify.rewrite`), in order.
        reached: locations of the pass's code that it reached for the first time in its process.
        looked: the nodes that each condition of the pass was about, by file and line: those in the variables of the function
            when the condition was evaluated.
        edited: by rank, the lines of the pass that edited each node, by its name.
    """

    rewrites: list[list[RewriteRequest]] = field(default_factory=list)
    reached: list[CodePoint] = field(default_factory=list)
    looked: dict[tuple[str, int], tuple[str, ...]] = field(default_factory=dict)
    edited: list[dict[str, tuple[EditPlace, ...]]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ScaledDown:
    """What a scaled-down program represents.

    Attributes:
        real: the program at its original sizes, given to the pass.
        sizes: the new value of each number that changed.
    """

    real: Program
    sizes: dict[int, tuple[int, ...]]


@dataclass(slots=True)
class Pair:
    """The original and the rewritten program.

    Attributes:
        rewritten: None when the pass failed, declined, or left a graph that cannot run.
        changed: whether any rank's graph changed (except names and metadata, unless it declares orders or buffers), or a
            schedule that the pass judges itself and does not return.
        rewrites: the rewrites that the pass reports, by pattern, summed over ranks.
        declined: the pass's reason for refusing the program (it raised `tcverify.Unsupported`).
        again: the program after a second application, if requested and changed by it.
        foreign: set if the rewritten program cannot leave the process that made it.
        listing: the rewritten graph of rank 0 as text, if `rewritten` is None.
        seconds: time that the pass took, for all ranks together.
        stages: of a pipeline, those that ran; empty for a single pass.
        statistics: what the pass reports about each collective of rank 0; of a pipeline, the reports of its stages in order.
        outgrown: a message if the pass's process took too much memory and was replaced.
        scaled: set if the original here is the scaled-down version of the program given to the pass.
    """

    original: Program
    rewritten: Program | None = None
    changed: bool = False
    rewrites: dict[str, int] = field(default_factory=dict)
    failure: PassFailure | None = None
    defects: list[Defect] = field(default_factory=list)
    declined: str | None = None
    again: Program | None = None
    foreign: Foreign | None = None
    listing: str = ""
    seconds: float = 0.0
    stages: list[Stage] = field(default_factory=list)
    statistics: tuple[CollectiveStatistics, ...] = ()
    trace: PassTrace = field(default_factory=PassTrace)
    outgrown: str | None = None
    scaled: ScaledDown | None = None


@dataclass(frozen=True, slots=True)
class PassFacts:
    """Facts about a loaded pass, JSON-able.

    Attributes:
        name: for people.
        target: "module:attribute", or "" if it cannot be imported by name.
        options: keyword options it was made with.
        source: hash of its source file, to notice when it has changed.
        contract: the promises it declares, by name.
    """

    name: str
    target: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    contract: dict[str, Any] = field(default_factory=dict)
