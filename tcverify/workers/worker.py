"""What a worker does with a slice: a campaign of its own, on a part of the programs."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis.configuration import set_hypothesis_home_dir
from hypothesis.strategies import SearchStrategy

from tcverify.application import Guarded
from tcverify.application.guarded import LOAD_TIMEOUT
from tcverify.campaign import Campaign, CampaignPlan, Corpus, Coverage, Crashed, Event, Statistics
from tcverify.campaign.search import search_of
from tcverify.cases.baseline import Baseline
from tcverify.errors import InternalError, TcverifyError, UsageError
from tcverify.execution import Executor, executors, of_any_size
from tcverify.program import Program
from tcverify.registry.extensions import load_extensions_of
from tcverify.system.scratch import lasting_directory
from tcverify.workers.slices import Slice, SliceOutcome

#: Makes what gives executors: see `executors`.
Executors = Callable[[str], contextlib.AbstractContextManager[Callable[[int], Executor | None]]]


class Worker:
    """Does slices, one after the other. Passes, process groups and corpora live on from one to the next.

    Args:
        executors_of: makes the process groups that confirm.
    """

    def __init__(self, executors_of: Executors = executors) -> None:
        self._executors_of = executors_of
        self._open = contextlib.ExitStack()
        self._subjects: dict[str, Guarded] = {}
        self._executors: dict[str, Callable[[int], Executor | None]] = {}
        self._corpora: dict[str, Corpus] = {}
        self._strategies: dict[str, SearchStrategy[Program]] = {}
        self._elsewhere: dict[str, Path] = {}
        self._warnings: list[str] = []

    def __enter__(self) -> Worker:
        torch.set_num_threads(1)  # as `tcverify run` does
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def work(self, text: str, *warnings: str, beat: Callable[[float], None] = lambda patience: None) -> str:
        """Do a slice and return its outcome, whatever becomes of it. A KeyboardInterrupt ends it early.

        Args:
            warnings: lines that the user is to be told with it.
            beat: is told with each program that it goes on, and how many seconds it may take until it is told again.
        """
        crashed: list[str] = []
        self._warnings = list(warnings)
        campaign: Campaign | None = None

        def note(event: Event) -> None:
            if campaign is not None:
                beat(longest_silence(campaign.subject.timeout, campaign.confirm))
            if isinstance(event, Crashed):
                crashed.append(str(event.path))

        try:
            campaign = self._campaign(Slice.loads(text), note)
            finished = campaign.run()
        except TcverifyError as error:
            return self._failed(campaign, crashed, error)
        except KeyboardInterrupt:
            return SliceOutcome(Statistics(), stop="interrupted").dumps()
        except Exception as error:  # noqa: BLE001 - the driver tells it, as a run without workers does
            return self._failed(campaign, crashed, InternalError(f"{type(error).__name__}: {error}"))
        outcome = SliceOutcome(
            finished.statistics, finished.facts, [*finished.counterexamples, *finished.hygiene], finished.known,
            finished.stop, self._warnings,
            **_reached(campaign),
        )  # fmt: skip
        return outcome.dumps()

    def _failed(self, campaign: Campaign | None, crashed: list[str], error: TcverifyError) -> str:
        """What was counted and found before the error."""
        statistics = campaign.record.statistics if campaign is not None else Statistics()
        found = campaign.record.counterexamples if campaign is not None else []
        facts = campaign.subject.facts if campaign is not None else None
        reached = _reached(campaign) if campaign is not None else {}
        return SliceOutcome(statistics, facts, found, (), "failed", self._warnings, crashed, error, **reached).dumps()

    def _campaign(self, part: Slice, note: Callable[[Event], None]) -> Campaign:
        with contextlib.suppress(OSError):  # this machine may not have it: then the pass is found by its name, or not
            os.chdir(part.directory)
        load_extensions_of(part.extensions)
        state_dir = self._here(part.state_dir)
        set_hypothesis_home_dir(state_dir / "hypothesis")
        subject = self._subject(part)
        if part.search:
            subject.forget()  # so that a slice finds the same, whatever this worker has done before
        plan = CampaignPlan(
            self._programs(part),
            part.mesh,
            self._here(part.report_dir),
            state_dir,
            part.contract,
            **part.shared(),
            baseline=Baseline(tuple(part.known)) if part.known else None,
            collect=part.collect,
            told=part.told,
            first=part.first,
            corpus=self._corpus(part.corpus),
            coverage=Coverage(subject.files) if part.covered is not None else None,
            search=search_of(subject, part.seed, part.max_examples) if part.search else None,
        )
        return Campaign(subject, plan, self._executor(part), [note])

    def _here(self, directory: str) -> Path:
        """A directory that the driver names, made if it is missing; another one where this machine cannot have it."""
        if directory not in self._elsewhere:
            path = Path(directory)
            try:
                path.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=path):
                    pass
            except OSError:
                path = Path(tempfile.mkdtemp(prefix="tcverify-worker-", dir=lasting_directory()))
                self._warnings.append(
                    f"a worker cannot write to {directory}; its findings are saved in {path} on that machine"
                )
            self._elsewhere[directory] = path
        return self._elsewhere[directory]

    def _programs(self, part: Slice) -> SearchStrategy[Program]:
        key = repr(part.drawing)
        if key not in self._strategies:
            self._strategies[key] = part.drawing.programs()
        return self._strategies[key]

    def _subject(self, part: Slice) -> Guarded:
        key = repr((part.target, part.pass_options, part.pass_timeout, part.covered))
        if key not in self._subjects:
            subject = Guarded(part.target, part.pass_options, timeout=part.pass_timeout, covered=part.covered)
            self._subjects[key] = self._open.enter_context(subject)
        return self._subjects[key]

    def _executor(self, part: Slice) -> Executor | None:
        if part.confirm not in self._executors:
            self._executors[part.confirm] = self._open.enter_context(self._executors_of(part.confirm))
        return of_any_size(part.confirm, self._executors[part.confirm], part.drawing.world_size)

    def _corpus(self, directory: str | None) -> Corpus | None:
        if directory is None:
            return None
        if directory not in self._corpora:
            try:
                # the driver, which reads the corpus too, tells of its damaged files
                self._corpora[directory] = Corpus(Path(directory), self._warn_of_corpus)
            except UsageError as error:
                self._warnings.append(f"a worker continues without a corpus: {error.message}")
                return None
        corpus = self._corpora[directory]
        corpus.refresh()
        return corpus

    def _warn_of_corpus(self, line: str) -> None:
        if line not in self._warnings:
            self._warnings.append(line)


def longest_silence(pass_timeout: float, confirm: Executor | None) -> float:
    """Return the most seconds that a sound campaign may need from one program, or trial of shrinking, to the next.

    A verification has as long as its pass (five time-outs when it is applied deeply, in two processes that may have to be
    started), and its executor, for two pairs. Two more verifications may lie between programs that are told, when a finding
    is to be kept; and as much again is for all that has no limit, on a machine that is busy.
    """
    executor = getattr(confirm, "timeout", 0.0) if confirm is not None else 0.0
    return 2 * 3 * (5 * pass_timeout + 2 * LOAD_TIMEOUT + 2 * executor)


def _reached(campaign: Campaign) -> dict[str, Any]:
    """What a campaign has reached of its pass, as fields of a `SliceOutcome`."""
    coverage = campaign.plan.coverage
    return {} if coverage is None else {"files": coverage.files, "reached": coverage.points}


__all__ = ["Executors", "Worker", "longest_silence"]
