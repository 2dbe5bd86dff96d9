"""verify(pass, program) -> Verdict: the heart of tcverify."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter
from types import MappingProxyType
from typing import Any, TypeAlias

from tcverify.application import Pair, PassFailure, Subject, subject_of
from tcverify.checks import CHECKS, Evidence
from tcverify.errors import ExecutorError, ProgramError, TcverifyError, UnsupportedOp, UsageError
from tcverify.execution import Comparison, Executor, Exploration, Lockstep, Run, digest, explore, explore_on_cuda
from tcverify.program import Contract, NotSerialisable, Program
from tcverify.program.finding import Doubt, Finding

LOCKSTEP = Lockstep()

#: How far lockstep and a process group may disagree, relative to the sum of magnitudes, beyond the probe.
DIVERGENCE = 2.0**-40


@dataclass(slots=True)
class Verdict:
    """What verification says about one program.

    Attributes:
        status: "passed", "refuted" or "inconclusive".
        findings: what refutes the pass.
        doubts: why it is inconclusive.
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

    @property
    def changed(self) -> bool:
        """Whether the pass changed the program on any rank."""
        return self.pair.changed

    @property
    def executors(self) -> list[str]:
        """The executors that ran both versions."""
        return [comparison.executor for comparison in self.runs]

    def __bool__(self) -> bool:
        return self.status == "passed"


def verify(
    pass_: Any,
    program: Program,
    *,
    contract: Contract | None = None,
    confirm: Executor | None = None,
    checks: Iterable[str] | None = None,
    deep: bool = False,
    always_confirm: bool = False,
) -> Verdict:
    """Verify that a pass keeps the meaning of one program.

    Args:
        pass_: a pass: "module:attribute", a class, a function, an instance, or a prepared `Subject`; or a pipeline:
            "module:first+module:second", or a list of passes. Its findings name the stage that is to blame.
        contract: what the pass promises; by default what it declares.
        confirm: an executor that runs programs which lockstep does not refute, e.g. a `ProcessGroupPool`.
        checks: names of the checks to apply; default all.
        deep: also look for impurity, at about three times the cost.
        always_confirm: run `confirm` also on programs that lockstep refutes by value or by raising.

    Raises:
        PassLoadError: the pass cannot be loaded.
        UsageError: an unknown check.
    """
    chosen = chosen_checks(checks)
    subject = subject_of(pass_)
    try:
        steps = verification(
            subject,
            program,
            contract=contract or subject.contract,
            confirm=confirm,
            checks=chosen,
            deep=deep,
            always_confirm=always_confirm,
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
    deep: bool = False,
    always_confirm: bool = False,
) -> Steps:
    """Verify as `verify` does, in steps, so that several programs can be under way at once.

    1. The program is given to the pass's process. Until step 3 nothing else may be given to the subject.
    2. The original runs in lockstep.
    3. The pass's process has answered.
    4. The rewritten program runs in lockstep and is checked; the confirming executor starts.
    5. The confirming executor has answered.
    """
    clock = _Clock()
    portable = True
    try:
        answer = subject.start(program, deep=deep)
    except NotSerialisable as error:
        hint = "give the pass as an object, to apply it in this process"
        portable, why = False, f"{error.message}; {hint}"
    clock.lap("apply")
    yield

    clock.resume()
    try:
        baseline = LOCKSTEP.run(program)
    except UnsupportedOp as error:
        return Verdict("inconclusive", [], [Doubt("unsupported-op", error.message)], Pair(program))
    clock.lap("lockstep")
    if not baseline.finished:
        return Verdict("inconclusive", [], [Doubt("ill-typed-program", _why(baseline))], Pair(program))
    if not portable:
        return Verdict("inconclusive", [], [Doubt("not-portable", why)], Pair(program))
    yield

    clock.resume()
    pair = answer()
    clock.lap("apply")
    if pair.declined is not None:
        return Verdict("inconclusive", [], [Doubt("declined", pair.declined)], pair, [], clock.laps)
    if pair.failure is not None:
        return Verdict("refuted", _named(pair, [_failure(pair.failure)]), [], pair, [], clock.laps)
    yield

    clock.resume()
    evidence = Evidence(pair, contract, probe=lambda: LOCKSTEP.probe(program, baseline))
    doubts: list[Doubt] = []
    try:
        if pair.judged is not None:
            evidence.runs.append(pair.judged)
        elif pair.foreign is not None:
            doubts.append(Doubt("unsupported-op", pair.foreign))
        elif pair.rewritten is not None:
            after = baseline if pair.rewritten is program else LOCKSTEP.run(pair.rewritten)
            evidence.runs.append(LOCKSTEP.compare_runs(baseline, after))
            if pair.again is not None:
                evidence.again = LOCKSTEP.compare_with(baseline, pair.again)
            if pair.changed and after.finished and "interleavings" in checks:
                on_device = deep and confirm is not None and confirm.name == "nccl"
                evidence.exploration = _explore(pair.rewritten, after, contract, deep, on_device)
    except (UnsupportedOp, ExecutorError) as error:
        doubts.append(_not_executed(error))
    clock.lap("lockstep")
    findings = _apply(checks, evidence, doubts)
    clock.lap("checks")
    if confirm is not None and _worth_confirming(evidence, findings, always_confirm):
        comparison = _start(confirm, pair, doubts)
        clock.lap(confirm.name)
        if comparison is not None:
            yield
            clock.resume()
            findings = _confirm(comparison, evidence, findings, doubts, checks, baseline)
            clock.lap(confirm.name)
    if confirm is not None and pair.foreign is not None and not findings:
        doubts.append(Doubt("not-portable", f"{pair.foreign}; judged in lockstep alone"))
    if not findings and not doubts and not _judged(evidence):
        doubts.append(
            Doubt("not-judged", "the rewritten program did not run, and the check that says why was not chosen")
        )
    if findings and pair.stages:
        findings = _blame(findings, evidence, checks, baseline)
    status = "refuted" if findings else "inconclusive" if doubts else "passed"
    return Verdict(status, findings, doubts, pair, evidence.runs, clock.laps)


def _apply(checks: list[str], evidence: Evidence, doubts: list[Doubt]) -> list[Finding]:
    findings = []
    for name in checks:
        for found in CHECKS[name](evidence):
            if isinstance(found, Finding):
                findings.append(found)
            elif found not in doubts:
                doubts.append(found)
    return findings


def _blame(findings: list[Finding], evidence: Evidence, checks: list[str], baseline: Run) -> list[Finding]:
    """Name, for each finding about a pipeline, the first stage behind which the program shows that kind of finding."""
    pair = evidence.pair
    culprits: dict[str, str] = {}
    before: Program | None = pair.original
    kinds: set[str] = set()
    for stage in pair.stages[:-1]:
        if stage.program is not None and stage.program is not before:
            halfway = Evidence(
                Pair(pair.original, stage.program, changed=True), evidence.contract, probe=evidence.probe
            )
            try:
                halfway.runs.append(LOCKSTEP.compare_with(baseline, stage.program))
                kinds = {finding.kind for finding in _apply(checks, halfway, [])}
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
        stage = culprits.get(finding.kind, pair.stages[-1].name)
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


def _judged(evidence: Evidence) -> bool:
    """Whether the rewritten program ran to its end, so that checks had something to look at."""
    return bool(evidence.runs) and all(run.rewritten.finished for run in evidence.runs)


def _worth_confirming(evidence: Evidence, findings: list[Finding], always: bool) -> bool:
    """Whether to run the process group: never a program that would hang there, and refuted ones only when asked."""
    pair = evidence.pair
    if pair.rewritten is None or pair.foreign is not None or not evidence.runs:
        return False
    rewritten = evidence.runs[0].rewritten
    if rewritten.hang is not None or rewritten.mismatch is not None:
        return False
    return always or not findings


def _start(confirm: Executor, pair: Pair, doubts: list[Doubt]) -> Callable[[], Comparison] | None:
    """Let the confirming executor start on both versions; None where it cannot."""
    if pair.rewritten is None:
        return None
    try:
        return confirm.start_comparison(pair.original, pair.rewritten)
    except (UnsupportedOp, ExecutorError, ProgramError) as error:
        doubts.append(_not_executed(error))
    return None


def _not_executed(error: TcverifyError) -> Doubt:
    return Doubt("unsupported-op" if isinstance(error, UnsupportedOp) else "executor-failed", error.message)


def _confirm(
    compare: Callable[[], Comparison],
    evidence: Evidence,
    findings: list[Finding],
    doubts: list[Doubt],
    checks: list[str],
    baseline: Run,
) -> list[Finding]:
    """Judge what the confirming executor saw; its disagreement with lockstep is a finding of its own."""
    pair = evidence.pair
    try:
        comparison = compare()
    except (UnsupportedOp, ExecutorError, ProgramError) as error:
        doubts.append(_not_executed(error))
        return findings
    name = comparison.executor
    alone = Evidence(pair, evidence.contract, [comparison], probe=evidence.probe)
    evidence.runs.append(comparison)
    if not comparison.original.finished:
        title = f"the original runs in lockstep, but not on {name}: {_why(comparison.original)}"
        return [*findings, Finding("executor-divergence", "equivalence", title)]
    seen = _apply([c for c in checks if c in ("collectives", "equivalence")], alone, doubts)
    kinds, confirmed = {f.kind for f in findings if f.check == "equivalence"}, {f.kind for f in seen}
    if kinds != confirmed and "equivalence" in checks:
        detail = f"lockstep: {', '.join(sorted(kinds)) or 'passed'}\n{name}: {', '.join(sorted(confirmed)) or 'passed'}"
        detail += "".join(f"\n{f.title}: {f.detail}" for f in seen)
        title = f"lockstep and {name} disagree about the rewritten program"
        findings = [*findings, Finding("executor-divergence", "equivalence", title, detail)]
    disagreement = _divergence(baseline, comparison.original, evidence)
    if disagreement is not None:
        findings = [*findings, Finding("executor-divergence", "equivalence", disagreement)]
    return findings


def _divergence(lockstep: Run, other: Run, evidence: Evidence) -> str | None:
    """Compare the original's outputs in lockstep with their digests from another executor."""
    probe: dict[str, float] | None = None
    for mine, theirs in zip(lockstep.ranks, other.ranks, strict=True):
        if not theirs.digest:
            continue
        for i, ((a, size), (b, _)) in enumerate(zip(digest(mine.outputs), theirs.digest, strict=True)):
            if abs(a - b) <= DIVERGENCE * size or a == b or a != a:
                continue
            probe = evidence.probe() if probe is None else probe
            elements = mine.outputs[i].numel()
            if not abs(a - b) <= DIVERGENCE * size + 16 * elements * probe.get(f"output {i}", 0.0):
                return f"output {i} of the original on rank {mine.rank} is not the same in lockstep and on {other.executor}"
    return None


def _failure(failure: PassFailure) -> Finding:
    where = "" if failure.rank is None else f" on the graph of rank {failure.rank}"
    verb = "raised " if failure.kind == "pass-raised" else ""
    return Finding(
        failure.kind, "application", f"the pass {verb}{failure.message}{where}", failure.detail, None, failure.rank
    )


def _why(run: Run) -> str:
    """Why a run did not finish, in one sentence."""
    if run.mismatch is not None:
        return run.mismatch[0]
    if run.hang is not None:
        return str(run.hang)
    failed = run.error
    return f"on rank {failed.rank}, {failed.error}" if failed is not None else "it did not finish"


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
