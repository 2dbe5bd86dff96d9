"""Runs campaigns and reports on them: shared by the commands `run` and `check`."""

from __future__ import annotations

import contextlib
import html
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir
from hypothesis.strategies import SearchStrategy
from rich.console import Console

from tcverify.application import Guarded, InProcess, Subject, start_ahead
from tcverify.application.loading import prepare_pass
from tcverify.campaign import (
    DEEP_EVERY,
    Blamer,
    Campaign,
    CampaignFinished,
    CampaignPlan,
    Corpus,
    CorpusCase,
    Coverage,
    Event,
    RunFinished,
    RunStarted,
    Subscriber,
    recover_in_flight,
)
from tcverify.campaign.campaign_verdict import tolerated
from tcverify.campaign.events import CampaignVerdict, Stop
from tcverify.campaign.search import ProgramSearch, search_of
from tcverify.cases.baseline import add_to_baseline, pass_reference
from tcverify.cases.counterexample import Counterexample
from tcverify.cli import arguments
from tcverify.cli.machine import require_backend
from tcverify.cli.settings import FAILED, INTERNAL, INTERRUPTED, PASSED, UNUSABLE, Settings
from tcverify.cli.strategy_choice import choose_strategies
from tcverify.errors import InternalError, TcverifyError, UsageError
from tcverify.execution import Executor, executors, of_any_size
from tcverify.explain.bisection import FindingTerms, bisect
from tcverify.program import Blame, Contract, Mesh, Program
from tcverify.pytorch.end_to_end import try_end_to_end
from tcverify.ray import ray_crew
from tcverify.registry.strategies import is_searchable
from tcverify.report.console import say
from tcverify.report.formats import reports
from tcverify.report.known_findings import baseline_lines
from tcverify.report.sanitize import plural, sanitize
from tcverify.report.script import ScriptReport
from tcverify.report.terminal import TerminalReport
from tcverify.report.text import to_text
from tcverify.report.verdict import frame
from tcverify.strategies import DEFAULT_STRATEGY
from tcverify.verification.verifier import Verdict
from tcverify.workers import Crew, DividedCampaign, DrawPlan, LocalCrew
from tcverify.workers.driver import recover_cases as recover_workers

STATE_DIR = Path(".tcverify")

#: Most strategies that a run lists by name.
NAMED = 5


@dataclass(frozen=True)
class MeshJob:
    """The programs of one mesh.

    Attributes:
        mesh: name of the mesh, or of whatever the programs have in common, for reports.
        drawings: which programs are drawn, for each pass in order.
        programs: the source of programs; made from the drawings, if any.
    """

    mesh: str
    world_size: int
    drawings: Sequence[DrawPlan] = ()
    programs: Sequence[SearchStrategy[Program]] = ()


def prepare_directories(settings: Settings, console: Console) -> None:
    """Make sure that results can be written, and recover what a crashed run left behind.

    Raises:
        UsageError: a directory cannot be written, or the machine lacks the process group.
    """
    require_backend(settings.confirm)
    arguments.require_writable(settings.report_dir, "choose another path with --report-dir")
    arguments.require_writable(STATE_DIR, "run in a writable directory")
    set_hypothesis_home_dir(STATE_DIR / "hypothesis")
    for path in recover_in_flight(STATE_DIR, settings.report_dir):
        say(console, f"An earlier run died while verifying a program, which is saved as {path}", "yellow")
        say(console, f"  show it with: tcverify show {path}; run it again with: tcverify replay {path}", "yellow")
    for case in recover_workers(settings.report_dir):
        say(console, f"An earlier run died before it reported a worker's finding: case {case.id}", "yellow")
        say(console, f"  show it with: tcverify show {case.id}", "yellow")


@dataclass(frozen=True, repr=False)
class RunResult:
    """The result of a run.

    Attributes:
        code: the exit code of the command.
        campaigns: per mesh and pass, its verdict, counts and counterexamples.
    """

    code: int
    campaigns: tuple[CampaignFinished, ...]

    @property
    def counterexamples(self) -> tuple[Counterexample, ...]:
        """All counterexamples, in the order in which they were found."""
        return tuple(case for campaign in self.campaigns for case in campaign.counterexamples)

    @property
    def status(self) -> CampaignVerdict:
        """The worst verdict of all campaigns."""
        verdicts = {campaign.verdict for campaign in self.campaigns}
        return next((one for one in get_args(CampaignVerdict)[1:] if one in verdicts), "passed")

    def __bool__(self) -> bool:
        return self.status == "passed"

    def __repr__(self) -> str:
        found = ", ".join(f"{case.finding.kind} ({case.id})" for case in self.counterexamples)
        programs = plural(sum(campaign.statistics.programs for campaign in self.campaigns), "program")
        return f"<RunResult {self.status}: {found or programs}>"

    def __str__(self) -> str:
        rows = [f"{one.facts.name} on {one.mesh}: {one.verdict}{one.why and f', {one.why}'}" for one in self.campaigns]
        return "\n".join([*rows, *(f"\n{to_text(case, None)}" for case in self.counterexamples)])

    def _repr_html_(self) -> str:
        if not self.counterexamples:
            return f"<pre>{html.escape(str(self))}</pre>"
        return frame(self.counterexamples[0])


def run_campaigns(settings: Settings, jobs: Sequence[MeshJob], console: Console) -> RunResult:
    """Verify every pass on every job's programs.

    Raises:
        TcverifyError, or any exception that a bug of tcverify itself raises.
    """
    terminal = TerminalReport(console, settings.report_dir, kernels=settings.kernels)

    def tell(line: str) -> None:
        say(console, sanitize(line))

    accepting = settings.write_baseline is not None
    subscribers: list[Subscriber] = [
        ScriptReport(settings.report_dir, tell),
        terminal,
        *reports(settings.report, settings.report_dir, tell, settings.fail_on, accepting=accepting),
    ]
    stop = ""
    with contextlib.ExitStack() as stack:
        started = RunStarted(tuple(map(str, settings.targets)), tuple(job.mesh for job in jobs), settings.seed)
        end = stack.enter_context(_announced(subscribers, started))
        stack.callback(terminal.close)
        crew = stack.enter_context(_crew(settings, tell))
        corpus = Corpus(settings.corpus, tell) if settings.corpus is not None else None
        unasked = () if settings.search else None
        subjects = [
            stack.enter_context(contextlib.closing(_subject(target, settings, covered)))
            for target, covered in zip(settings.targets, settings.covered or itertools.repeat(unasked), strict=False)
        ]
        if settings.ray is None and (settings.max_examples is None or settings.max_examples >= DEEP_EVERY):
            start_ahead()  # now that the first workers have their inputs; this matters on machines with few cores
        coverages = [
            Coverage(subject.files) if settings.covered is not None and isinstance(subject, Guarded) else None
            for subject in subjects
        ]
        promises = {**settings.contract, **({"strict": "true"} if settings.strict else {})}
        contracts = [subject.contract.with_options(promises) for subject in subjects]
        try:
            jobs, tried = _with_strategies(jobs, settings, tell)
            searches = [_search(subject, settings, jobs[0], number) for number, subject in enumerate(subjects)]
            for job in jobs:
                with executors(settings.confirm if crew is None else "none") as executor_of:
                    executor = of_any_size(settings.confirm, executor_of, job.world_size)
                    for number, (subject, promised, programs, coverage) in enumerate(
                        zip(subjects, contracts, job.programs, coverages, strict=True)
                    ):
                        kept = corpus.cases(pass_reference(subject.facts), job.mesh) if corpus is not None else ()
                        first = [*(tried[number] if job is jobs[0] else ()), *kept]
                        plan = CampaignPlan(
                            programs,
                            job.mesh,
                            settings.report_dir,
                            STATE_DIR,
                            promised,
                            **settings.shared(),
                            baseline=settings.known,
                            collect=accepting or not settings.fail_fast,
                            blame=_blamer(settings, promised) if settings.bisect else None,
                            end_to_end=try_end_to_end if settings.confirm != "none" else None,
                            coverage=coverage,
                            first=first,
                            corpus=corpus,
                            strategy=job.drawings[number].strategy if job.drawings else None,
                            search=searches[number],
                        )
                        if crew is None or not isinstance(subject, Guarded):  # workers cannot import such a pass
                            finished = Campaign(subject, plan, executor, subscribers).run()
                        else:
                            drawing = job.drawings[number]
                            finished = DividedCampaign(
                                subject, plan, drawing, settings.confirm, crew, tell, subscribers
                            ).run()
                        stop = finished.stop
                        if stop in _LAST:
                            break
                if stop in _LAST:
                    break
        except KeyboardInterrupt:  # between campaigns
            stop = "interrupted"
        terminal.summary()
        if settings.baseline is not None and settings.known is not None:
            for line in baseline_lines(settings.known, settings.baseline, terminal.finished):
                say(console, line)
        if settings.write_baseline is not None:
            found = [case for event in terminal.finished for case in event.counterexamples]
            say(console, sanitize(add_to_baseline(settings.write_baseline, settings.known, found)))
        failing = _exit_code(terminal.finished, settings.fail_on, accepting=accepting)
        code = INTERRUPTED if stop == "interrupted" else failing
        end(code)
    return RunResult(code, tuple(terminal.finished))


def _subject(target: Any, settings: Settings, covered: Sequence[str] | None = None) -> Subject:
    """A pass in a process of its own or, without a reference, in this process."""
    if isinstance(target, str):
        return Guarded(target, settings.pass_option, timeout=settings.pass_timeout, covered=covered)
    return InProcess(prepare_pass(target, "", settings.pass_option))


def _with_strategies(
    jobs: Sequence[MeshJob], settings: Settings, tell: Callable[[str], None]
) -> tuple[list[MeshJob], list[tuple[CorpusCase, ...]]]:
    """Find strategies for passes without one, and create all strategies now, so that errors show before the run.

    Each pass is tried on programs like those of the first job, in a process of its own, so that this does not count as coverage.

    Returns:
        The jobs with strategies, and for each pass the program that its first job verifies first.
    """
    drawings = list(jobs[0].drawings)
    first: list[tuple[CorpusCase, ...]] = [()] * len(settings.targets)
    for number, drawing in enumerate(drawings):
        if drawing.strategy is None:
            mesh = Mesh.grid(drawing.mesh) if drawing.mesh is not None else None
            with contextlib.closing(_subject(settings.targets[number], settings)) as subject:
                found = choose_strategies(
                    subject, STATE_DIR, jobs[0].mesh, drawing.world_size, mesh,
                    max_examples=settings.max_examples, max_time=settings.max_time,
                )  # fmt: skip
            drawings[number] = replace(drawing, strategy=found.strategy)
            if found.names != (DEFAULT_STRATEGY,):
                shown, more = found.names[:NAMED], len(found.names) - NAMED
                others = f" and {more} more" if more > 0 else ""
                tell(f"strategies: {', '.join(shown)}{others} (changed most by {subject.facts.name})")
            first[number] = found.first
    made = []
    for job in jobs:
        own = [replace(a, strategy=b.strategy) for a, b in zip(job.drawings, drawings, strict=True)]
        made.append(replace(job, drawings=own, programs=job.programs or [one.programs() for one in own]))
    return made, first


def _search(subject: Subject, settings: Settings, job: MeshJob, number: int) -> ProgramSearch | None:
    """The search that derives programs for the pass of this number from earlier ones, if enabled."""
    if not settings.search or not job.drawings or not is_searchable(job.drawings[number].strategy):
        return None
    return search_of(subject, settings.seed, settings.max_examples)


def _blamer(settings: Settings, contract: Contract) -> Blamer:
    """Names the rewrites that cause a finding, for `--bisect`."""

    def blame(subject: Subject, verdict: Verdict, kind: str, deep: bool, confirm: Executor | None) -> Blame:
        return bisect(subject, verdict, FindingTerms(kind, contract, confirm, settings.checks, settings.domain, deep))

    return blame


@contextlib.contextmanager
def _crew(settings: Settings, tell: Callable[[str], None]) -> Iterator[Crew | None]:
    """The workers that share the campaigns; None if this process does all the work.

    Raises:
        UsageError: an option that workers do not support.
    """
    if settings.bisect and (settings.ray is not None or (settings.workers or 1) > 1):
        raise UsageError("workers do not bisect", "run `tcverify replay ID --bisect` afterwards")
    if settings.ray is not None:
        with ray_crew(settings.ray, settings.workers, tell) as crew:
            yield crew
    elif settings.workers is not None and settings.workers > 1:
        with LocalCrew(settings.workers, tell) as crew:
            yield crew
    else:
        yield None


@contextlib.contextmanager
def _announced(subscribers: Sequence[Subscriber], started: RunStarted) -> Iterator[Callable[[int], None]]:
    """Report the start of a run to subscribers and, however the run terminates, its end. Yields a function that
    receives the exit code."""

    def tell(event: Event) -> None:
        for subscriber in subscribers:
            subscriber(event)

    codes: list[int] = []
    tell(started)
    try:
        yield codes.append
    except KeyboardInterrupt:
        tell(RunFinished(INTERRUPTED, "interrupted"))
        raise
    except BrokenPipeError:
        tell(RunFinished(FAILED, "the output was closed"))
        raise
    except TcverifyError as error:
        tell(RunFinished(INTERNAL if isinstance(error, InternalError) else UNUSABLE, error.message))
        raise
    except Exception as error:
        tell(RunFinished(INTERNAL, f"{type(error).__name__}: {error}"))
        raise
    tell(RunFinished(codes[-1]))


#: Reasons to end a campaign after which no other campaign starts.
_LAST: tuple[Stop, ...] = ("interrupted", "first finding")


def _exit_code(finished: Sequence[CampaignFinished], failing: Sequence[str], *, accepting: bool) -> int:
    """The exit code of a run; findings that are written to a baseline (`accepting`) do not fail it.

    Args:
        failing: conditions of `--fail-on`.
    """
    fine = tolerated(failing)
    for event in finished:
        accepted = accepting and event.verdict == "refuted" and event.statistics.passed
        if event.verdict not in fine and not accepted:
            return FAILED
    if "inconclusive" in failing and any(event.statistics.inconclusive for event in finished):
        return FAILED
    return PASSED


def draw_with_seeds(program: Program, draws: int) -> SearchStrategy[Program]:
    """The program with its own seed, and then with the following seeds."""
    return st.sampled_from([replace(program, seed=program.seed + number) for number in range(draws)])


def describe_program(program: Program) -> list[str]:
    """Describe a program that the user has just loaded, in a few lines."""
    graphs = len(program.graphs)
    what = "one graph" if graphs == 1 else f"{graphs} graphs"
    placed: dict[str, list[str]] = {}
    for spec in program.inputs:
        for dim, placement in spec.placements:
            placed.setdefault(f"{placement} over {dim}", []).append(spec.name)
    lines = [f"program: {program.mesh}; {what}, {plural(program.size, 'node')}, {plural(len(program.inputs), 'input')}"]
    lines += [f"  {how}: {plural(len(names), 'input')}" for how, names in placed.items()]
    return lines


__all__ = [
    "STATE_DIR",
    "MeshJob",
    "RunResult",
    "describe_program",
    "draw_with_seeds",
    "prepare_directories",
    "run_campaigns",
]
