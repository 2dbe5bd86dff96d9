"""verify(pass, program) -> Verdict: the core of tcverify."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from time import perf_counter
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from tcverify.application import Pair, PassFacts, PassFailure, Subject, Watch, subject_of
from tcverify.checks import CHECKS, Evidence, EvidenceRequest, apply_checks
from tcverify.domains import DOMAINS, FLOAT64
from tcverify.errors import ProgramError, UnsupportedOp, UsageError
from tcverify.execution import MAX_RANKS, Comparison, Executor, Lockstep, Run, device_of
from tcverify.program import Contract, Doubt, Finding, Note, NotSerialisable, Program
from tcverify.registry.choices import DomainName
from tcverify.registry.evidence import EVIDENCE
from tcverify.registry.representations import REPRESENTATIONS
from tcverify.scaled_down import small_pair
from tcverify.verification.conditions import Unknown, condition
from tcverify.verification.confirmation import (
    confirming_domain,
    judge_confirmation,
    start_confirmation,
    worth_confirming,
)

#: The possible results.
Status: TypeAlias = Literal["passed", "refuted", "inconclusive"]


@dataclass(slots=True, repr=False)
class Verdict:
    """Result of verifying a pass on one program.

    Attributes:
        status: "passed", "refuted" or "inconclusive".
        findings: what refutes the pass.
        hygiene: findings that do not refute it; see `Finding.severity`.
        facts, contract: the pass, and its promises.

    `repr` is one line, `str` is the text of the terminal, and a notebook shows the page of the first finding.
        doubts: why it is inconclusive.
        notes: remarks, e.g. that the exact domain was not applicable.
        domain: the requested number domain: "float64", "native" or "exact".
        pair: the program before and after the pass.
        runs: comparisons by executor, cheapest first.
        seconds: time by phase: "apply", "lockstep" (all evidence except the confirming executor's), the name of that executor,
            "checks".
        evidence: the kinds of evidence that were collected, and the seconds that each took.
    """

    status: Status
    findings: list[Finding]
    doubts: list[Doubt]
    pair: Pair
    runs: list[Comparison] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    domain: DomainName = "float64"
    evidence: dict[str, float] = field(default_factory=dict)
    hygiene: list[Finding] = field(default_factory=list)
    facts: PassFacts = field(default_factory=lambda: PassFacts(""))
    contract: Contract = field(default_factory=Contract)

    @property
    def changed(self) -> bool:
        """Whether the pass changed the program on any rank."""
        return self.pair.changed

    @property
    def executors(self) -> list[str]:
        """The executors that ran both versions."""
        return list(dict.fromkeys(comparison.executor for comparison in self.runs))

    def __bool__(self) -> bool:
        return self.status == "passed"

    def __repr__(self) -> str:
        said = [f"{one.kind}, {one.title}" for one in self.findings] or [f"{d.reason}, {d.detail}" for d in self.doubts]
        more = f" (and {len(said) - 1} more)" if len(said) > 1 else ""
        what = f": {said[0]}{more}" if said else "" if self.changed else ": the pass changed nothing"
        return f"<Verdict {self.status}{what}>"

    def __str__(self) -> str:
        return REPRESENTATIONS["text"](self)

    def _repr_html_(self) -> str:
        return REPRESENTATIONS["html"](self)


def verify(
    pass_: Any,
    program: Program,
    *,
    contract: Contract | None = None,
    confirm: Executor | None = None,
    checks: Iterable[str] | None = None,
    domain: DomainName = "float64",
    deep: bool = False,
    always_confirm: bool = False,
    brief: bool = False,
) -> Verdict:
    """Verify that a pass preserves the meaning of one program.

    Args:
        pass_: a pass: a built-in name, "module:attribute", a class, a function, an instance, or a prepared `Subject`; or a
            pipeline: "module:first+module:second", or a list of passes. Its findings name the faulty stage.
        contract: the promises of the pass; by default those that it declares.
        confirm: an executor for programs that lockstep does not refute, e.g. a `ProcessGroupPool`.
        checks: names of the checks to apply; all by default.
        domain: "float64"; "exact", which also runs both versions in a prime field, where differences of any size show; or
            "native", which also runs them in their own dtypes, where rounding shows.
        deep: also look for impurity, at about three times the cost.
        always_confirm: run `confirm` also on programs that lockstep refutes by a wrong value or an exception.
        brief: if a rewrite is correct only when inputs are equal on the ranks, do not search for a small set of such inputs.

    Raises:
        PassLoadError: the pass cannot be loaded.
        UsageError: an unknown check or domain.
    """
    chosen = chosen_checks(checks)
    if domain not in DOMAINS:
        raise UsageError(f"there is no number domain '{domain}'", f"domains are {', '.join(DOMAINS)}")
    subject = subject_of(pass_)
    try:
        steps = verify_in_steps(
            subject,
            program,
            contract=contract or subject.contract,
            confirm=confirm,
            checks=chosen,
            domain=domain,
            deep=deep,
            always_confirm=always_confirm,
            brief=brief,
        )
        while True:
            next(steps)
    except StopIteration as stop:
        verdict: Verdict = stop.value
        return verdict
    finally:
        if subject is not pass_:
            subject.close()


def chosen_checks(names: Iterable[str] | None) -> list[str]:
    """Return the names of the checks to apply, in order; None means all. Raises `UsageError` for an unknown one."""
    if names is None:
        return list(CHECKS)
    chosen = list(names)
    for name in chosen:
        if name not in CHECKS:
            raise UsageError(f"there is no check '{name}'", f"checks are {', '.join(CHECKS)}")
    return chosen


class Phase(Enum):
    """How far a paused verification has come."""

    APPLYING = "the pass's process has the program: nothing else may be given to it"
    RAN = "the original has run"
    ANSWERED = "the pass's process has answered"
    CONFIRMING = "lockstep and checks have judged; the confirming executor has the program"


#: A verification in progress, advanced by `next`; returns the verdict. See `verify_in_steps`.
Steps: TypeAlias = Generator[Phase, None, Verdict]


def verify_in_steps(
    subject: Subject,
    program: Program,
    *,
    contract: Contract,
    confirm: Executor | None,
    checks: list[str],
    domain: DomainName = "float64",
    deep: bool = False,
    always_confirm: bool = False,
    watch: Watch | None = None,
    lean: bool = False,
    brief: bool = False,
) -> Steps:
    """Verify as `verify` does, in steps, so that several programs can be in progress at once.

    Yields each `Phase` that it reaches, in order; the verdict may come before any of them.

    Args:
        watch: what to record of the pass while it runs.
        lean: whether a program that the pass leaves unchanged passes without being run.
        brief: see `verify`.
    """
    clock = _Clock()
    try:
        pair, baseline = yield from _applied(subject, program, contract, clock, _Applying(deep, watch, lean))
    except _Settled as settled:
        return Verdict(
            settled.status, settled.findings, settled.doubts, settled.pair, [], clock.laps, domain=domain,
            facts=subject.facts, contract=contract,
        )  # fmt: skip
    lockstep = Lockstep(contract.collectives == "conservative")
    on_device = deep and confirm is not None and device_of(confirm) == "cuda"
    request = EvidenceRequest(baseline, lockstep, checks, domain, deep, on_device)
    judged = _judge(pair, contract, request, clock)
    if judged.findings and pair.original.unknown and pair.rewritten is not None:
        judged = _conditional(
            judged, brief, lambda equal: _judge(equal, contract, _request_for(equal, request, clock), clock)
        )
        confirm = confirm if judged.findings else None
    evidence, doubts = judged.evidence, judged.doubts
    if confirm is not None:
        yield from _confirm(confirm, judged, checks, clock, always_confirm)
    if not judged.findings and not doubts and not _rewritten_ran(evidence):
        doubts.append(
            Doubt(
                "not-judged",
                "the rewritten program did not run, and the check that reports the reason was not selected",
            )
        )
    findings, hygiene = judged.findings, judged.hygiene
    if (findings or hygiene) and pair.stages:
        findings, hygiene = _blame([findings, hygiene], evidence, request)
    status: Status = "refuted" if findings else "inconclusive" if doubts else "passed"
    return Verdict(
        status, findings, doubts, pair, evidence.runs, clock.laps, judged.notes, domain, dict(evidence.seconds), hygiene,
        subject.facts, contract,
    )  # fmt: skip


class _Settled(Exception):
    """The verdict is known before anything is judged."""

    def __init__(
        self, status: Status, pair: Pair, *, doubt: tuple[str, str] | None = None, findings: Iterable[Finding] = ()
    ) -> None:
        super().__init__(status)
        self.status, self.pair, self.findings = status, pair, list(findings)
        self.doubts = [Doubt(*doubt)] if doubt is not None else []


@dataclass(frozen=True, slots=True)
class _Applying:
    """How a pass is applied: arguments of `verify_in_steps`."""

    deep: bool
    watch: Watch | None
    lean: bool


def _applied(
    subject: Subject, program: Program, contract: Contract, clock: _Clock, how: _Applying
) -> Generator[Phase, None, tuple[Pair, Run]]:
    """Apply the pass, and run the original at the same time. Large programs are replaced by a pair of small sizes.
    Raises `_Settled`."""
    answer, why = _start_pass(subject, program, how)
    clock.lap("apply")
    yield Phase.APPLYING

    clock.resume()
    pair: Pair | None = None
    if answer is not None and (how.lean or program.large):
        pair = answer()
        clock.lap("apply")
        if how.lean and pair.rewritten is program and not pair.defects:
            raise _Settled("passed", pair)
    if program.large:
        if pair is None:
            raise _Settled("inconclusive", Pair(program), doubt=("not-portable", why))
        try:
            pair = small_pair(pair)
        except ProgramError as error:
            raise _Settled("inconclusive", pair, doubt=("too-large", error.message)) from None
        program = pair.original
        clock.lap("scaling")
    baseline = _original(program, contract)
    clock.lap("lockstep")
    if answer is None:
        raise _Settled("inconclusive", Pair(program), doubt=("not-portable", why))
    yield Phase.RAN

    clock.resume()
    if pair is None:
        pair = answer()
        clock.lap("apply")
    if pair.declined is not None:
        raise _Settled("inconclusive", pair, doubt=("declined", pair.declined))
    if pair.failure is not None:
        raise _Settled("refuted", pair, findings=_named(pair, [_failure(pair.failure)]))
    yield Phase.ANSWERED

    clock.resume()
    return pair, baseline


def _start_pass(subject: Subject, program: Program, how: _Applying) -> tuple[Callable[[], Pair] | None, str]:
    """Send the program to the pass's process; None, and the reason, if that is impossible."""
    try:
        return subject.start(program, deep=how.deep, watch=how.watch), ""
    except NotSerialisable as error:
        return None, f"{error.message}; give the pass as an object, to apply it in this process"


def _original(program: Program, contract: Contract) -> Run:
    """Run the original. Raises `_Settled` if it fails."""
    try:
        baseline = Lockstep(contract.collectives == "conservative").run(program)
    except UnsupportedOp as error:
        raise _Settled("inconclusive", Pair(program), doubt=("unsupported-op", error.message)) from None
    if not baseline.finished:
        raise _Settled("inconclusive", Pair(program), doubt=("ill-typed-program", baseline.why))
    return baseline


@dataclass(slots=True)
class _Judged:
    """What lockstep and the checks say about a pair."""

    evidence: Evidence
    findings: list[Finding]
    hygiene: list[Finding]
    doubts: list[Doubt]
    notes: list[Note]


def _judge(pair: Pair, contract: Contract, request: EvidenceRequest, clock: _Clock) -> _Judged:
    """Apply the checks, which collect the evidence that they need."""
    evidence = Evidence(pair, contract, request)
    if pair.outgrown is not None:
        evidence.doubt(Doubt("pass-memory", pair.outgrown))
    sizes = pair.scaled.sizes if pair.scaled is not None else {}
    said = ", ".join(f"{n} → {' or '.join(map(str, small))}" for n, small in sizes.items() if small != (n,))
    notes = [Note("small-sizes", f"run on small sizes: {said}")] if said else []
    evidence.take("lockstep")  # independent of the checks: a verdict says whether the rewritten program ran
    if not (request.domain == "exact" and "equivalence" in request.checks) and evidence.aside:  # which notes it itself
        notes.append(Note(f"{request.domain}-aside", evidence.aside))
    doubts: list[Doubt] = []
    seen = apply_checks(request.checks, evidence, doubts, notes)
    clock.divide("checks", {"lockstep": sum(evidence.seconds.values())})
    if contract.strict:
        seen = [replace(finding, severity="error") for finding in seen]
    findings = [finding for finding in seen if finding.severity == "error"]
    hygiene = [finding for finding in seen if finding.severity == "hygiene"]
    return _Judged(evidence, findings, hygiene, list(dict.fromkeys([*evidence.doubts, *doubts])), notes)


def _request_for(pair: Pair, request: EvidenceRequest, clock: _Clock) -> EvidenceRequest:
    """The request for a pair with another original."""
    baseline = request.lockstep.run(pair.original)
    clock.lap("lockstep")
    return replace(request, baseline=baseline)


def _conditional(judged: _Judged, brief: bool, judge: Callable[[Pair], _Judged]) -> _Judged:
    """Judge a pair again with unconstrained inputs made equal on the ranks, if it is refuted when they differ.

    Findings that disappear depend on a condition, which is a doubt.
    """
    pair = judged.evidence.pair

    def where_equal(pairs: Collection[Unknown]) -> _Judged:
        again = pair.again.with_equal(pairs) if pair.again is not None else None
        rewritten = pair.rewritten.with_equal(pairs) if pair.rewritten is not None else None
        return judge(replace(pair, original=pair.original.with_equal(pairs), rewritten=rewritten, again=again))

    settled = where_equal(pair.original.unknown)
    always = {finding.kind for finding in settled.findings}
    if {finding.kind for finding in judged.findings} <= always:
        return judged
    if brief:
        doubt = Doubt("placement-needed", "right only if inputs with an unknown placement are equal on the ranks")
    else:
        doubt = condition(pair.original, lambda pairs: {f.kind for f in where_equal(pairs).findings} <= always)
    return replace(settled, doubts=[*settled.doubts, doubt], notes=judged.notes)


def _confirm(
    confirm: Executor, judged: _Judged, checks: list[str], clock: _Clock, always: bool
) -> Generator[Phase, None, None]:
    """Run both versions on another executor if that is worthwhile; adds its findings to the judgement."""
    evidence, pair = judged.evidence, judged.evidence.pair
    size = pair.original.world_size
    if size > MAX_RANKS:
        why = f"{size} ranks are more than process groups have here; judged in lockstep only"
        judged.notes.append(Note("not-confirmed", why))
        return
    if worth_confirming(evidence, judged.findings, always):
        domain = confirming_domain(evidence, judged.findings, judged.notes)
        if domain.kind == "exact" and device_of(confirm) == "cuda":
            if judged.findings:
                why = "the exact domain computes on the CPU alone; judged in lockstep only"
                judged.notes.append(Note("not-confirmed", why))
                return
            domain = FLOAT64
        comparison = start_confirmation(confirm, pair, domain, judged.doubts)
        clock.lap(confirm.name)
        if comparison is not None:
            yield Phase.CONFIRMING
            clock.resume()
            judged.findings = judge_confirmation(
                comparison, evidence, judged.findings, judged.doubts, judged.notes, checks
            )
            clock.lap(confirm.name)
    if pair.foreign is not None and not judged.findings:
        judged.doubts.append(Doubt("not-portable", f"{pair.foreign.why}; judged in lockstep only"))


def _blame(found: Sequence[list[Finding]], evidence: Evidence, request: EvidenceRequest) -> list[list[Finding]]:
    """Name, for findings about a pipeline, the first stage after which the program shows that kind of finding."""
    pair = evidence.pair
    culprits: dict[str, str] = {}
    before: Program | None = pair.original
    kinds: set[str] = set()
    for stage in pair.stages[:-1]:
        if stage.program is not None and stage.program is not before:
            kinds = _kinds_behind(stage.program, evidence, request)
            for kind in kinds:
                culprits.setdefault(kind, stage.name)
        before = stage.program
    return [_named(pair, findings, culprits) for findings in found]


def _kinds_behind(program: Program, evidence: Evidence, request: EvidenceRequest) -> set[str]:
    """Kinds of findings that the values of a program show; other orders and timings are not tried."""
    halfway = Pair(evidence.pair.original, program, changed=True)
    untried: dict[str, Any] = dict.fromkeys(("stream-orders", "timings", "arena"))
    seen = Evidence(halfway, evidence.contract, request, untried, measured=evidence)
    if not seen.runs:
        return set()
    return {finding.kind for finding in apply_checks(request.checks, seen, [], [])}


def _named(pair: Pair, findings: list[Finding], culprits: Mapping[str, str] = MappingProxyType({})) -> list[Finding]:
    """Record in findings which stage of a pipeline is to blame: by kind, else the last stage that ran."""
    if not pair.stages:
        return findings
    named = []
    for finding in findings:
        stage = finding.data.get("stage") or culprits.get(finding.kind, pair.stages[-1].name)
        title = f"{finding.title} (stage {stage})"
        named.append(replace(finding, title=title, data={**finding.data, "stage": stage}))
    return named


def _rewritten_ran(evidence: Evidence) -> bool:
    """Whether the rewritten program ran to its end, so that checks had something to judge."""
    return bool(evidence.runs) and all(run.rewritten.finished for run in evidence.runs)


def _failure(failure: PassFailure) -> Finding:
    where = "" if failure.rank is None else f" on the graph of rank {failure.rank}"
    verb = "raised " if failure.kind == "pass-raised" else ""
    return Finding(
        failure.kind, "application", f"the pass {verb}{failure.message}{where}", failure.detail, None, failure.rank
    )


class _Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = perf_counter()

    def resume(self) -> None:
        """Exclude the time since the last lap."""
        self._last = perf_counter()

    def lap(self, name: str) -> None:
        now = perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self._last = now

    def divide(self, name: str, others: Mapping[str, float]) -> None:
        """End a lap, part of which belongs to other phases."""
        self.lap(name)
        for other, seconds in others.items():
            self.laps[name] -= seconds
            self.laps[other] = self.laps.get(other, 0.0) + seconds


EVIDENCE.load()  # processes forked from one that verifies have all providers

__all__ = ["Phase", "Steps", "Verdict", "chosen_checks", "verify", "verify_in_steps"]
