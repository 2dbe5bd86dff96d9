"""Pair: a program before and after a pass, and what was observed while the pass ran. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from tcverify.application.coverage.recorder import CodePoint
from tcverify.application.edit_log import EditPlace
from tcverify.execution import Comparison
from tcverify.program import CollectiveStatistics, Program, RewriteRequest

#: How a pass failed to return; also the kind of the finding.
FailureKind: TypeAlias = Literal["pass-raised", "pass-timeout", "pass-died"]


@dataclass(frozen=True, slots=True)
class PassFailure:
    """The pass did not return: it raised, ran out of time or took its process down.

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
    """Something wrong with what the pass returned, seen on the live graph module.

    Attributes:
        aspect: "return" (not a graph module), "lint", "code", "signature"; or of purity: "input-mutated", "unrepeatable",
            "hash-order", "not-idempotent", "second-application", "surroundings" (it changed torch's
            global state); or of what the pass does to a form of the graph that only it sees, where it says so itself in an
            attribute `defects`: "nodes" (lost, new or doubled), "dependency" (two that depend on each other
            have swapped), "collective-order", "peak-memory", "comm-buffer".
        stage: of a pipeline, the pass that it is about, where that is known.
    """

    aspect: str
    rank: int
    message: str
    node: str | None = None
    stage: str | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """One pass of a pipeline, and the program that it left.

    Attributes:
        program: None for the last stage, which leaves the rewritten program, and where a program cannot be made of it.
    """

    name: str
    program: Program | None = None


@dataclass(frozen=True, slots=True)
class Foreign:
    """What the pass left cannot leave the process that made it: it holds submodules or foreign functions.

    Attributes:
        judged: the lockstep comparison made in that process, where it could be made.
    """

    why: str
    judged: Comparison | None = None


@dataclass(slots=True)
class PassTrace:
    """What was recorded of the pass at work, as far as that was asked for.

    Attributes:
        rewrites: those that the pass asked for on each rank (see `tcverify.rewrite`), in order.
        reached: places of the pass's code that it reached for the first time in its process.
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
    """What a program on small sizes stands for.

    Attributes:
        real: the program that the pass was given.
        sizes: what each number of it became, those that stayed aside.
    """

    real: Program
    sizes: dict[int, tuple[int, ...]]


@dataclass(slots=True)
class Pair:
    """The original and the rewritten program.

    Attributes:
        rewritten: None when the pass failed, declined, or left a graph that cannot run.
        changed: whether any rank's graph changed (names aside, and metadata but for orders and places that it declares).
        rewrites: what the pass says it rewrote, by pattern, summed over ranks.
        declined: the pass's reason for refusing the program (it raised `tcverify.Unsupported`).
        again: the program after a second application, when that was asked for and changed it.
        foreign: set where the rewritten program cannot leave the process that made it.
        listing: the rewritten graph of rank 0 as text, where `rewritten` is None.
        seconds: time that the pass took, all ranks together.
        stages: of a pipeline, those that ran; empty for a single pass.
        statistics: what the pass says of each collective of rank 0; of a pipeline, what its stages say, one after the other.
        outgrown: says that the pass's process took too much memory and was replaced.
        scaled: set where the original here is the twin on small sizes of the program that the pass was given.
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
    """What loading a pass tells about it, JSON-able.

    Attributes:
        name: for people.
        target: "module:attribute", or "" when it cannot be imported by name.
        options: keyword options it was made with.
        source: hash of its source file, to notice when it has changed.
        contract: the promises it declares, by name.
    """

    name: str
    target: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    contract: dict[str, Any] = field(default_factory=dict)
