"""verify(pass, program) -> Verdict: the heart of tcverify."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from time import perf_counter
from types import MappingProxyType
from typing import Any, TypeAlias

from tcverify.application import Pair, PassFailure, Subject, Watch, subject_of
from tcverify.arithmetic import DOMAINS, DRAWS, MORE_DRAWS, NATIVE, Exact
from tcverify.checks import CHECKS, Evidence, apply_checks
from tcverify.checks.exact import agrees
from tcverify.checks.op_laws import law_needed
from tcverify.conditions import Unknown, condition
from tcverify.confirmation import confirmed, confirming_domain, not_executed, start, worth_confirming
from tcverify.errors import ExecutorError, ProgramError, UnsupportedOp, UsageError
from tcverify.execution import (
    MAX_RANKS,
    Comparison,
    Executor,
    Exploration,
    Lockstep,
    Run,
    explain,
    explore,
    explore_on_cuda,
    play,
    play_extremes,
    rounding_noise,
    run_in_arena,
)  # fmt: skip
from tcverify.program import Contract, Doubt, Finding, Note, NotSerialisable, Program
from tcverify.twin import small_pair

LOCKSTEP = Lockstep()

_NOT_HERE = "only the pass's process can hold the rewritten graph, and it ran there in float64 alone"


@dataclass(slots=True)
class Verdict:
    """What verification says about one program.

    Attributes:
        status: "passed", "refuted" or "inconclusive".
        findings: what refutes the pass.
        doubts: why it is inconclusive.
        notes: what else there is to say, e.g. that the exact domain had to step aside.
        domain: the number domain that was asked for: "float64", "native" or "exact".
        pair: the program before and after the pass.
        runs: comparisons by executor, the cheapest first.
        seconds: time by phase: "apply", "lockstep", the executor's name, "checks".
    """

    status: str
    findings: list[Finding]
    doubts: list[Doubt]
    pair: Pair
    runs: list[Comparison] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    domain: str = "float64"

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


def verify(
    pass_: Any,
    program: Program,
    *,
    contract: Contract | None = None,
    confirm: Executor | None = None,
    checks: Iterable[str] | None = None,
    domain: str = "float64",
    deep: bool = False,
    always_confirm: bool = False,
    brief: bool = False,
) -> Verdict:
    """Verify that a pass keeps the meaning of one program.

    Args:
        pass_: a pass: "module:attribute", a class, a function, an instance, or a prepared `Subject`; or a pipeline:
            "module:first+module:second", or a list of passes. Its findings name the stage that is to blame.
        contract: what the pass promises; by default what it declares.
        confirm: an executor that runs programs which lockstep does not refute, e.g. a `ProcessGroupPool`.
        checks: names of the checks to apply; default all.
        domain: "float64"; "exact", which also runs both versions in a prime field, where a difference of any size shows; or
            "native", which also runs them in their own dtypes, where rounding shows.
        deep: also look for impurity, at about three times the cost.
        always_confirm: run `confirm` also on programs that lockstep refutes by value or by raising.
        brief: of a rewrite that is right only if inputs are equal on the ranks, do not look for few of them.

    Raises:
        PassLoadError: the pass cannot be loaded.
        UsageError: an unknown check or domain.
    """
    chosen = chosen_checks(checks)
    if domain not in DOMAINS:
        raise UsageError(f"there is no number domain '{domain}'", f"domains are {', '.join(DOMAINS)}")
    subject = subject_of(pass_)
    try:
        steps = verification(
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


#: A verification, to be advanced by `next`; returns the verdict. See `verification`.
Steps: TypeAlias = Generator[None, None, Verdict]


def verification(
    subject: Subject,
    program: Program,
    *,
    contract: Contract,
    confirm: Executor | None,
    checks: list[str],
    domain: str = "float64",
    deep: bool = False,
    always_confirm: bool = False,
    watch: Watch | None = None,
    lean: bool = False,
    brief: bool = False,
) -> Steps:
    """Verify as `verify` does, in steps, so that several programs can be under way at once.

    1. The program is given to the pass's process. Until step 3 nothing else may be given to the subject.
    2. The original runs in lockstep.
    3. The pass's process has answered.
    4. The rewritten program runs in lockstep and is checked; the confirming executor starts.
    5. The confirming executor has answered.

    Args:
        watch: what the pass is watched for.
        lean: whether a program that the pass leaves as it is passes without being run.
        brief: see `verify`.
    """
    clock = _Clock()
    lockstep = Lockstep(contract.collectives == "conservative")
    portable, why = True, ""
    try:
        answer = subject.start(program, deep=deep, watch=watch)
    except NotSerialisable as error:
        hint = "give the pass as an object, to apply it in this process"
        portable, why = False, f"{error.message}; {hint}"
    clock.lap("apply")
    yield

    clock.resume()
    pair: Pair | None = None
    large = program.large
    if (lean or large) and portable:
        pair = answer()
        clock.lap("apply")
        if lean and pair.rewritten is program and not pair.defects:
            return Verdict("passed", [], [], pair, [], clock.laps, domain=domain)
    if large:
        if pair is None:
            return Verdict("inconclusive", [], [Doubt("not-portable", why)], Pair(program), domain=domain)
        try:
            pair = small_pair(pair)
        except ProgramError as error:
            return Verdict("inconclusive", [], [Doubt("too-large", error.message)], pair, [], clock.laps, domain=domain)
        program = pair.original
        clock.lap("scaling")
    try:
        baseline = lockstep.run(program)
    except UnsupportedOp as error:
        return Verdict("inconclusive", [], [Doubt("unsupported-op", error.message)], Pair(program), domain=domain)
    clock.lap("lockstep")
    if not baseline.finished:
        return Verdict("inconclusive", [], [Doubt("ill-typed-program", baseline.why)], Pair(program), domain=domain)
    if not portable:
        return Verdict("inconclusive", [], [Doubt("not-portable", why)], Pair(program), domain=domain)
    yield

    clock.resume()
    if pair is None:
        pair = answer()
        clock.lap("apply")
    if pair.declined is not None:
        return Verdict("inconclusive", [], [Doubt("declined", pair.declined)], pair, [], clock.laps, domain=domain)
    if pair.failure is not None:
        return Verdict("refuted", _named(pair, [_failure(pair.failure)]), [], pair, [], clock.laps, domain=domain)
    yield

    clock.resume()
    how = _How(lockstep, contract, checks, domain, deep, deep and confirm is not None and confirm.name == "nccl")
    judged = _judge(pair, baseline, how, clock)
    if judged.findings and program.unknown and pair.rewritten is not None:
        judged = _conditional(judged, pair, how, clock, brief)
        confirm = confirm if judged.findings else None
    evidence, findings, doubts, notes = judged.evidence, judged.findings, judged.doubts, judged.notes
    clock.lap("checks")
    if confirm is not None and program.world_size > MAX_RANKS:
        why = f"{program.world_size} ranks are more than process groups have here; judged in lockstep alone"
        notes.append(Note("not-confirmed", why))
        confirm = None
    if confirm is not None and worth_confirming(evidence, findings, always_confirm):
        comparison = start(confirm, pair, confirming_domain(evidence, findings, notes), doubts)
        clock.lap(confirm.name)
        if comparison is not None:
            yield
            clock.resume()
            findings = confirmed(comparison, evidence, findings, doubts, notes, checks)
            clock.lap(confirm.name)
    if confirm is not None and pair.foreign is not None and not findings:
        doubts.append(Doubt("not-portable", f"{pair.foreign}; judged in lockstep alone"))
    if not findings and not doubts and not _judged(evidence):
        doubts.append(
            Doubt("not-judged", "the rewritten program did not run, and the check that says why was not chosen")
        )
    if findings and pair.stages:
        findings = _blame(findings, evidence, checks, baseline, domain)
    status = "refuted" if findings else "inconclusive" if doubts else "passed"
    return Verdict(status, findings, doubts, pair, evidence.runs, clock.laps, notes, domain)


@dataclass(frozen=True, slots=True)
class _How:
    """How a pair is judged."""

    lockstep: Lockstep
    contract: Contract
    checks: list[str]
    domain: str
    deep: bool
    on_device: bool


@dataclass(slots=True)
class _Judged:
    """What lockstep and the checks say of a pair."""

    evidence: Evidence
    findings: list[Finding]
    doubts: list[Doubt]
    notes: list[Note]


def _judge(pair: Pair, baseline: Run, how: _How, clock: _Clock) -> _Judged:
    """Run the rewritten program in lockstep, and apply the checks."""
    program, lockstep, checks = pair.original, how.lockstep, how.checks
    evidence = Evidence(
        pair,
        how.contract,
        probe=cache(lambda: lockstep.probe(program, baseline)),
        noise=cache(lambda: rounding_noise(program, baseline)),
        law=cache(lambda rewritten: law_needed(program, rewritten)),
    )
    doubts: list[Doubt] = [Doubt("pass-memory", pair.outgrown)] if pair.outgrown is not None else []
    notes: list[Note] = []
    try:
        if pair.judged is not None:
            evidence.runs.append(pair.judged)
        elif pair.foreign is not None:
            doubts.append(Doubt("unsupported-op", pair.foreign))
        elif pair.rewritten is not None:
            _run(pair, pair.rewritten, baseline, how, evidence, doubts)
    except (UnsupportedOp, ExecutorError) as error:
        doubts.append(not_executed(error))
    clock.lap("lockstep")
    said = ", ".join(f"{n} → {' or '.join(map(str, small))}" for n, small in pair.sizes.items() if small != (n,))
    if said:
        notes.append(Note("small-sizes", f"run on small sizes: {said}"))
    aside = _aside(how.domain, pair, checks)
    if aside is not None and how.domain == "exact" and "equivalence" in checks:
        evidence.aside = aside  # equivalence notes it
    elif aside is not None:
        notes.append(Note(f"{how.domain}-aside", aside))
    return _Judged(evidence, apply_checks(checks, evidence, doubts, notes), doubts, notes)


def _run(pair: Pair, rewritten: Program, baseline: Run, how: _How, evidence: Evidence, doubts: list[Doubt]) -> None:
    lockstep, checks = how.lockstep, how.checks
    after = baseline if rewritten is pair.original else lockstep.run(rewritten, beside=baseline)
    evidence.runs.append(lockstep.compare_runs(baseline, after))
    if after.finished and pair.changed and "equivalence" in checks:
        _run_in(how.domain, evidence, baseline, doubts)
    if pair.again is not None:
        evidence.again = lockstep.compare_with(baseline, pair.again)
    if pair.changed and after.finished and "equivalence" in checks:
        evidence.arena = run_in_arena(rewritten)
    if pair.changed and after.finished and "interleavings" in checks:
        evidence.exploration = _explore(rewritten, after, how.contract, how.deep, how.on_device)
        _play_extremes(evidence, baseline, lockstep, how.deep)


def _conditional(judged: _Judged, pair: Pair, how: _How, clock: _Clock, brief: bool) -> _Judged:
    """Judge a pair that is refuted where inputs of which nothing is known are different, where they are equal as well.

    Findings that are gone then depend on a condition, which is a doubt.
    """

    def where_equal(pairs: Collection[Unknown]) -> _Judged:
        again = pair.again.with_equal(pairs) if pair.again is not None else None
        rewritten = pair.rewritten.with_equal(pairs) if pair.rewritten is not None else None
        equal = replace(pair, original=pair.original.with_equal(pairs), rewritten=rewritten, again=again)
        return _judge(equal, how.lockstep.run(equal.original), how, clock)

    settled = where_equal(pair.original.unknown)
    always = {finding.kind for finding in settled.findings}
    if {finding.kind for finding in judged.findings} <= always:
        return judged
    if brief:
        doubt = Doubt("placement-needed", "right only if inputs of which nothing is known are equal on the ranks")
    else:
        doubt = condition(pair.original, lambda pairs: {f.kind for f in where_equal(pairs).findings} <= always)
    return replace(settled, doubts=[*settled.doubts, doubt], notes=judged.notes)


def _aside(domain: str, pair: Pair, checks: list[str]) -> str | None:
    """Why a changed program that runs in float64 is not run in the domain that was asked for, or None."""
    if domain == "float64" or not pair.changed:
        return None
    if "equivalence" not in checks:
        return "the check 'equivalence', which alone looks at values in it, was not chosen"
    return _NOT_HERE if pair.judged is not None or pair.foreign is not None else None


def _run_in(domain: str, evidence: Evidence, baseline: Run, doubts: list[Doubt]) -> None:
    """Run both versions, which have run in float64, in another domain as well."""
    original, rewritten = evidence.pair.original, evidence.pair.rewritten
    if domain == "float64" or rewritten is None:
        return
    if domain == "native":
        before = LOCKSTEP.run(original, domain=NATIVE)
        if not before.finished:
            doubts.append(Doubt("unsupported-op", f"in its own dtypes the original does not run: {before.why}"))
        else:
            evidence.runs.append(LOCKSTEP.compare_runs(before, LOCKSTEP.run(rewritten, domain=NATIVE), baseline))
        return
    comparisons: list[Comparison] = []
    try:
        for draw in range(MORE_DRAWS):
            if draw >= DRAWS and len({agrees(comparison) for comparison in comparisons}) == 1:
                break  # else more draws decide
            comparison = LOCKSTEP.compare(original, rewritten, Exact(draw))
            if not (comparison.original.finished and comparison.rewritten.finished):
                why = comparison.rewritten.why if comparison.original.finished else comparison.original.why
                evidence.aside = f"it does not end in the exact domain: {why}"
                return
            comparisons.append(comparison)
    except UnsupportedOp as error:
        evidence.aside = error.message
        return
    evidence.runs += comparisons
    draw = next((draw for draw, comparison in enumerate(comparisons) if not agrees(comparison)), 0)
    evidence.explain = lambda: explain(original, rewritten, draw)


def _blame(findings: list[Finding], evidence: Evidence, checks: list[str], baseline: Run, domain: str) -> list[Finding]:
    """Name, for each finding about a pipeline, the first stage behind which the program shows that kind of finding."""
    pair = evidence.pair
    culprits: dict[str, str] = {}
    before: Program | None = pair.original
    kinds: set[str] = set()
    for stage in pair.stages[:-1]:
        if stage.program is not None and stage.program is not before:
            halfway = Evidence(
                Pair(pair.original, stage.program, changed=True),
                evidence.contract,
                probe=evidence.probe,
                noise=evidence.noise,
            )
            try:
                halfway.runs.append(LOCKSTEP.compare_with(baseline, stage.program))
                if halfway.runs[0].rewritten.finished:
                    _run_in(domain, halfway, baseline, [])
                kinds = {finding.kind for finding in apply_checks(checks, halfway, [], [])}
            except UnsupportedOp:
                kinds = set()
            for kind in kinds:
                culprits.setdefault(kind, stage.name)
        before = stage.program
    return _named(pair, findings, culprits)


def _named(pair: Pair, findings: list[Finding], culprits: Mapping[str, str] = MappingProxyType({})) -> list[Finding]:
    """Write into findings which stage of a pipeline is to blame: by kind, else the last one that ran."""
    if not pair.stages:
        return findings
    named = []
    for finding in findings:
        stage = finding.data.get("stage") or culprits.get(finding.kind, pair.stages[-1].name)
        title = f"{finding.title} (stage {stage})"
        named.append(replace(finding, title=title, data={**finding.data, "stage": stage}))
    return named


def _explore(program: Program, run: Run, contract: Contract, deep: bool, on_device: bool) -> Exploration | None:
    """Play other orders of the streams of a program, if it is lowered: few, or on deep verification all that matter.

    Args:
        on_device: whether what those do not refute runs on CUDA streams as well.

    Raises:
        UnsupportedOp: an op has no meaning.
        ExecutorError: the device or its ranks failed.
    """
    found = explore(program, reference=run, boundary=contract.boundary, inputs=contract.inputs, systematic=deep)
    if on_device and found is not None and not found.observations:
        found.observations += explore_on_cuda(program, run, boundary=contract.boundary, inputs=contract.inputs)
        found.failing += dict.fromkeys(observation.order for observation in found.observations)
    return found


def _play_extremes(evidence: Evidence, baseline: Run, lockstep: Lockstep, deep: bool) -> None:
    """Let asynchronous collectives of the rewritten program read and write at other times."""
    rewritten = evidence.pair.rewritten
    if rewritten is not None:
        evidence.extremes = play_extremes(baseline, rewritten, lockstep, deep=deep)
        evidence.play = lambda program, words, timing: play(baseline, program, lockstep, words, timing)


def _judged(evidence: Evidence) -> bool:
    """Whether the rewritten program ran to its end, so that checks had something to look at."""
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
        """Leave out the time since the last lap."""
        self._last = perf_counter()

    def lap(self, name: str) -> None:
        now = perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self._last = now


__all__ = ["Steps", "Verdict", "chosen_checks", "verification", "verify"]
