"""Runs the campaign of one item and says what came of it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from shutil import get_terminal_size
from typing import NoReturn

import torch
from rich.console import Console

from tcverify.application import InProcess, Subject
from tcverify.campaign import Campaign, CampaignPlan, Crashed, Event, Subscriber
from tcverify.campaign.earlier_failures import Failures
from tcverify.campaign.search import search_of
from tcverify.cases.counterexample import FILE_NAME, Counterexample
from tcverify.cli.arguments import require_writable
from tcverify.errors import InternalError, TcverifyError
from tcverify.program import Contract
from tcverify.pytest_plugin.cases import PytestCase
from tcverify.pytest_plugin.failures import Inconclusive, NothingTested, NotVerified, refuted_by
from tcverify.pytest_plugin.options import Options
from tcverify.pytest_plugin.outcome import ItemOutcome
from tcverify.pytest_plugin.session import Session
from tcverify.pytest_plugin.summary import SummaryCase as ListedCase
from tcverify.pytest_plugin.summary import SummaryItem
from tcverify.pytorch.end_to_end import try_end_to_end
from tcverify.report.annotation import annotate
from tcverify.report.block import make_block
from tcverify.report.github import workflow_command
from tcverify.report.html import HtmlReport
from tcverify.report.sanitize import error_text, plural, sanitize
from tcverify.report.script import ScriptReport
from tcverify.report.terminal import show
from tcverify.report.trace import TraceReport
from tcverify.strategies import programs_of
from tcverify.strategies.hostile import with_hostile


def run_case(case: PytestCase, nodeid: str, options: Options, session: Session) -> tuple[ItemOutcome, SummaryItem]:
    """Run the campaign of an item. What it finds is on disk when this returns.

    Returns:
        What came of it, for the test function and for the summary. `require_passed` raises where it failed.

    Raises:
        NotVerified: the pass cannot be loaded, the process group does not start, nothing can be written.
        InternalError: tcverify itself failed.
    """
    notes: list[str] = []

    def note(event: Event) -> None:
        if isinstance(event, Crashed):
            notes.append(f"tcverify failed on a program, which is saved as {event.path}")

    try:
        with _surroundings(options.start_dir):
            require_writable(options.report_dir, "choose another path with --tcverify-report-dir")
            subject = session.subject(case)
            state_dir = options.state_dir / _directory_name(nodeid)
            suits = session.suited(case, state_dir)
            seed = item_seed(nodeid, options.seed)
            programs = (
                case.world.programs if suits is None else programs_of(suits.strategy, case.world.mesh, case.world.size)
            )
            plan = CampaignPlan(
                with_hostile(programs, case.hostile),
                case.world.name,
                options.report_dir,
                state_dir,
                _contract(case, subject),
                max_examples=case.max_examples,
                seed=seed,
                checks=case.checks,
                domain=case.domain,
                shrink_time=case.shrink_time,
                first=() if suits is None else suits.first,
                end_to_end=try_end_to_end if case.confirm != "none" else None,
                search=search_of(subject, seed, case.max_examples) if case.world.searched else None,
            )
            earlier = {known.id for known in Failures(state_dir, subject.facts, plan.mesh)}
            page, trace = HtmlReport(options.report_dir, notes.append), TraceReport(options.report_dir, notes.append)
            subscribers: list[Subscriber] = [ScriptReport(options.report_dir, notes.append), page, trace, note]
            finished = Campaign(subject, plan, session.executor(case), subscribers).run()
            with contextlib.suppress(OSError):
                state_dir.rmdir()  # when it is empty
    except InternalError as error:
        raise InternalError("; ".join([error.message.removeprefix("internal error: "), *notes])) from error
    except TcverifyError as error:
        raise NotVerified(error.message, error_text(error)) from None
    if isinstance(subject, InProcess):
        notes.append("the pass runs in the test's process: if it hangs or crashes, so does the run")
    again = [known.id for known in finished.counterexamples if known.id in earlier]
    if again:
        notes.append(f"failed earlier and was tried first: {', '.join(again)} (cleared by pytest --cache-clear)")
    outcome = ItemOutcome(finished, case.world.name, case.shard, case.shards, case.confirm)
    return outcome, _summary(outcome, nodeid, options, tuple(notes))


def require_passed(case: PytestCase, outcome: ItemOutcome, item: SummaryItem, options: Options) -> None:
    """Raise Refuted, Inconclusive or NothingTested unless the campaign passed."""
    if outcome.status == "refuted":
        _refute(outcome, item, options)
    if not outcome.passed:
        why = outcome.finished.why
        if case.world.thrown_away and not outcome.programs:
            why = f"the strategy drew no program of {case.world.name}"
        name = sanitize(outcome.finished.facts.name)
        doubts = [
            f"inconclusive, {reason}: {plural(number, 'program')} ({sanitize(outcome.statistics.doubt_details[reason])})"
            for reason, number in outcome.statistics.doubts.most_common()
        ]
        headline = f"{outcome.status}: {sanitize(why)}"
        failure = Inconclusive if outcome.status == "inconclusive" else NothingTested
        raise failure(headline, "\n".join([f"{name} on {outcome.world}: {headline}", *doubts, item.line()]))


def _refute(outcome: ItemOutcome, item: SummaryItem, options: Options) -> NoReturn:
    """The one place where findings become an exception."""
    found = outcome.counterexamples
    first = found[0].finding
    blocks = [_block(known, options.shown_dir / known.id / FILE_NAME) for known in found]
    more = f" (and {', '.join(known.finding.kind for known in found[1:])})" if len(found) > 1 else ""
    ending = [f"{sanitize(outcome.finished.facts.name)} on {outcome.world}: {item.line()}", *map(sanitize, item.notes)]
    text = "\n\n".join([*blocks, "\n".join(ending)])
    raise refuted_by(first.kind)(f"{first.kind}: {sanitize(first.title)}, case {found[0].id}{more}", text)


def _block(case: Counterexample, path: Path) -> str:
    """The block of a counterexample as on the terminal, without colour."""
    text = StringIO()
    show(Console(file=text, width=get_terminal_size().columns, color_system=None, highlight=False), case, path)
    return text.getvalue().rstrip()


def item_seed(nodeid: str, seed: int) -> int:
    """Return the seed of an item: 32 bits that depend on its node id and on `--tcverify-seed` alone."""
    return int.from_bytes(hashlib.sha256(f"{seed} {nodeid}".encode()).digest()[:4], "little")


def _directory_name(nodeid: str) -> str:
    readable = "".join(c if c.isascii() and c.isalnum() else "-" for c in nodeid)[-80:]
    return f"{readable}-{hashlib.sha256(nodeid.encode()).hexdigest()[:8]}"


def _contract(case: PytestCase, subject: Subject) -> Contract:
    return case.contract if isinstance(case.contract, Contract) else subject.contract.with_options(case.contract)


def _summary(outcome: ItemOutcome, nodeid: str, options: Options, notes: tuple[str, ...]) -> SummaryItem:
    counts = outcome.statistics
    cases = []
    for known in outcome.counterexamples:
        path = options.shown_dir / known.id / FILE_NAME
        commands = make_block(known, path).reproduce
        command = workflow_command(annotate(known, path)) if os.environ.get("GITHUB_ACTIONS") == "true" else ""
        cases.append(
            ListedCase(known.id, known.finding.kind, known.facts.name, commands[0] if commands else "", command)
        )
    return SummaryItem(
        nodeid,
        outcome.status,
        counts.programs,
        counts.passed,
        counts.refuted,
        counts.inconclusive,
        counts.changed,
        dict(counts.fired),
        dict(counts.doubts),
        outcome.seed,
        tuple(cases),
        notes,
        (
            *(
                f"{why}: {plural(n, 'program')} ({sanitize(counts.note_details[why])})"
                for why, n in counts.notes.items()
            ),
            *(f"hygiene, {kind}: {plural(n, 'program')}" for kind, n in counts.hygiene.most_common()),
            *(f"  {known.finding.title}, case {known.id}" for known in outcome.finished.hygiene),
        ),
    )


@contextlib.contextmanager
def _surroundings(directory: Path) -> Iterator[None]:
    """What the tests around an item have set must not bear on its verdict: threads, warning filters, current directory."""
    threads, before = torch.get_num_threads(), os.getcwd()
    torch.set_num_threads(1)  # the tensors are small: more threads only wait for each other
    os.chdir(directory)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
            yield
    finally:
        os.chdir(before)
        torch.set_num_threads(threads)
