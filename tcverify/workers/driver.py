"""A campaign whose programs are drawn and judged by workers: hands out slices, and puts together what comes of them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tcverify.application import Guarded
from tcverify.campaign import (
    CampaignFinished,
    CampaignPlan,
    CampaignRecord,
    CorpusCase,
    Crashed,
    Statistics,
    Subscriber,
)
from tcverify.campaign.events import Stop
from tcverify.campaign.findings import tried_end_to_end
from tcverify.campaign.interrupts import Interrupts
from tcverify.cases.baseline import KnownFinding, known_of
from tcverify.cases.counterexample import FILE_NAME, Counterexample, read_counterexample, write_counterexample
from tcverify.errors import ExecutorError, TcverifyError
from tcverify.registry.extensions import extensions_here
from tcverify.workers.slices import Crew, DrawPlan, Slice, SliceOutcome

#: Programs of a slice. Which programs a seed draws does not depend on how many workers there are.
RANGE = 50

#: The same where programs are searched, at least and at most, and how many slices there are in between: each learns by itself.
SEARCHED, SEARCHED_PARTS = (100, 500), 4

#: Slices in a row of which workers died, after which something is wrong with the machine or with the run.
LOST_LIMIT = 8

#: Below the report directory: what workers have found and the driver has not told yet.
WORKERS_DIR = ".workers"


class DividedCampaign:
    """Verifies one pass on one mesh with the workers of a crew.

    Args:
        plan: what to do; its programs are left to `drawing`.
        confirm: name of the executor that confirms, or "none".
        tell: is told, in lines, what happens to workers.
        subscribers: are told what happens, as by a campaign without workers. Progress comes with each slice.
    """

    def __init__(
        self, subject: Guarded, plan: CampaignPlan, drawing: DrawPlan, confirm: str, crew: Crew, tell: Callable[[str], None],
        subscribers: Iterable[Subscriber] = (),
    ) -> None:  # fmt: skip
        self.subject = subject
        self.plan = plan
        self.drawing = drawing
        self.confirm = confirm
        self.crew = crew
        self.record = CampaignRecord(subject, plan, confirm, subscribers)
        self._say = tell
        self._said: set[str] = set()
        self._known = tuple(plan.baseline.of(subject.facts)) if plan.baseline is not None else ()
        self._told: dict[tuple[str, str], KnownFinding] = {}
        self._interrupts = Interrupts()
        self._under_way: dict[int, Slice] = {}
        self._lost = 0  # slices, in a row
        self._ending = False
        self._unkept = False
        run = f"{socket.gethostname()}-{os.getpid()}"
        self._place = plan.report_dir.absolute() / WORKERS_DIR / run

    def run(self) -> CampaignFinished:
        """Run to the end and return the summary. A KeyboardInterrupt ends it early; what the workers have found is kept.

        Raises:
            TcverifyError: of a worker; or workers die of everything that they are given.
        """
        self.record.start()
        try:
            with self._interrupts:
                stop = self._slices()
        except KeyboardInterrupt:
            stop = "interrupted"
            self._end()
        except BaseException:
            self._end()
            raise
        finally:
            for part in self._under_way.values():  # Ctrl-C again, or the crew itself has failed
                self._find(self._left_by(part))
            self._clear()
        spent: dict[str, Any] = dict(
            self.record.statistics.seconds
        )  # by all workers; a share of the time that passed is meant
        self.record.statistics.seconds = Counter({phase: seconds / self.crew.size for phase, seconds in spent.items()})
        return self.record.finish(stop)

    # ----------------------------------------------------------------------------------------------------------- slices

    def _slices(self) -> Stop:
        """Hand out slices until nothing is left to do; return why it ended."""
        cases = deque(tuple(self.plan.first[i : i + RANGE]) for i in range(0, len(self.plan.first), RANGE))
        number, drawn = 0, 0
        stop: Stop | None = None
        most = _range(self.plan)
        while True:
            while stop is None and len(self._under_way) < self.crew.size:
                self._interrupts.check()
                left = most if self.plan.max_examples is None else min(most, self.plan.max_examples - drawn)
                if self.record.remaining == 0:
                    stop = "time"
                elif cases:
                    self._submit(number, 0, cases.popleft())
                    number += 1
                elif left:
                    self._submit(number, left, ())
                    number, drawn = number + 1, drawn + left
                else:
                    stop = "examples"
            if stop is not None and not self._under_way:
                return stop
            outcome = self._receive()
            if outcome is None:
                continue
            if outcome.error is not None:
                raise outcome.error
            if outcome.stop == "interrupted":  # by somebody who knows the worker
                raise KeyboardInterrupt
            if outcome.stop == "exhausted":
                stop = "exhausted"  # all that can be drawn has been drawn by one of them
            if self.record.counterexamples and self.plan.fail_fast:
                self._end()
                return "first finding"

    def _submit(self, number: int, programs: int, first: tuple[CorpusCase, ...]) -> None:
        plan, subject = self.plan, self.subject
        corpus = plan.corpus.directory.absolute() if plan.corpus is not None else None
        own = {
            "max_examples": programs,
            "max_time": self.record.remaining,
            "seed": _seed(plan.seed, number),
            "earlier": plan.earlier and number == 0,
        }
        part = Slice(
            **plan.shared(**own),
            number=number,
            drawing=self.drawing,
            mesh=plan.mesh,
            target=subject.target,
            pass_options=subject.options,
            pass_timeout=subject.timeout,
            contract=self.record.contract,
            confirm=self.confirm,
            directory=str(Path.cwd()),
            report_dir=str(self._place / str(number)),
            state_dir=str(plan.state_dir.absolute()),
            corpus=None if corpus is None else str(corpus),
            collect=plan.collect,
            known=self._known,
            told=tuple(self._told.values()),
            first=first,
            extensions=extensions_here(),
            covered=subject.covered if plan.coverage is not None or plan.search is not None else None,
            search=plan.search is not None,
        )
        self._under_way[number] = part
        self.crew.submit(number, part.dumps())

    def _receive(self) -> SliceOutcome | None:
        """Wait for an outcome and take it in; None where a slice is lost."""
        with self._interrupts.open() if not self._ending else contextlib.nullcontext():
            number, text = self.crew.next()
        part = self._under_way.pop(number)
        if text is None:
            self._lose(part)
            return None
        self._lost = 0
        outcome = SliceOutcome.loads(text)
        for line in outcome.warnings:
            if line not in self._said:
                self._said.add(line)
                self._say(line)
        self.record.statistics.add(outcome.statistics)
        self.record.seen.update(dict(outcome.known))
        if self.plan.coverage is not None:
            self.plan.coverage.add(outcome.reached_of(self.plan.coverage.files))
        ids = {case.id for case in outcome.found}
        self._find([*outcome.found, *(case for case in self._left_by(part) if case.id not in ids)])
        for path in outcome.crashed:
            self.record.tell(Crashed(self._kept(Path(path))))
        self.record.progress()
        return outcome

    def _lose(self, part: Slice) -> None:
        """Workers died of a slice: nothing is known of its programs but what they had found."""
        self._find(self._left_by(part))
        if self._ending:
            return
        lost = Statistics(programs=part.programs, inconclusive=part.programs)
        lost.doubts["worker-died"] = part.programs
        lost.doubt_details["worker-died"] = f"workers died twice in slice {part.number}, of seed {part.seed}"
        self.record.statistics.add(lost)
        self.record.progress()
        self._lost += 1
        if self._lost == LOST_LIMIT:
            raise ExecutorError(
                f"{LOST_LIMIT} slices in a row were lost because workers died",
                "is there enough memory? try fewer --workers",
            )

    def _end(self) -> None:
        """Have the workers end, and take in what they have."""
        self._ending = True
        self.crew.interrupt()
        while self._under_way:
            with contextlib.suppress(TcverifyError):  # one is being raised, or the user has had enough
                self._receive()

    # --------------------------------------------------------------------------------------------------------- findings

    def _find(self, found: Iterable[Counterexample]) -> None:
        """Keep and tell counterexamples of findings that are news."""
        for case in found:
            entry = known_of(case)
            if (entry.kind, entry.fingerprint) in self._told:
                continue
            if any((entry.kind, entry.fingerprint) == (known.kind, known.fingerprint) for known in self._known):
                continue
            self._told[entry.kind, entry.fingerprint] = entry
            try:
                write_counterexample(case, self.plan.report_dir)
                if not self._ending:
                    with self._interrupts.open():
                        case = tried_end_to_end(case, self.plan)
            except TcverifyError:
                self._unkept = True  # but for the worker's file
                raise
            finally:  # shown it is, also where there is no place to keep it
                self.record.find(case)
            if self.plan.earlier and case.finding.severity == "error":
                self.record.failures.add(case)

    def _left_by(self, part: Slice) -> list[Counterexample]:
        """What a slice has left on this machine's disk: more than the outcome says, if a worker died."""
        found = []
        for path in sorted(Path(part.report_dir).glob(f"*/{FILE_NAME}")):
            with contextlib.suppress(TcverifyError):
                found.append(read_counterexample(path))
        return found

    def _clear(self) -> None:
        """Remove what workers have left, now that it is told and kept."""
        if not self._unkept:
            shutil.rmtree(self._place, ignore_errors=True)
            with contextlib.suppress(OSError):
                self._place.parent.rmdir()  # unless workers of others have something there

    def _kept(self, path: Path) -> Path:
        """The file of a crash, moved to where it stays; where it lies if that is on another machine."""
        target = self.plan.report_dir / path.name
        try:
            shutil.move(path, target)
        except OSError:
            return path
        return target


def _range(plan: CampaignPlan) -> int:
    """How many programs a slice has at most."""
    if plan.search is None:
        return RANGE
    least, most = SEARCHED
    return most if plan.max_examples is None else max(least, min(most, plan.max_examples // SEARCHED_PARTS))


def _seed(seed: int, number: int) -> int:
    """The seed of a slice."""
    return int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:4], "little")


def recover_cases(report_dir: Path) -> list[Counterexample]:
    """Return what workers of runs of this machine that have died had found and nobody had told, and put it where it belongs."""
    found = []
    for directory in sorted((report_dir / WORKERS_DIR).glob(f"{socket.gethostname()}-*")):
        number = directory.name.rpartition("-")[2]
        if not number.isdecimal() or Path(f"/proc/{number}").exists():
            continue
        for path in sorted(directory.glob(f"*/*/{FILE_NAME}")):
            with contextlib.suppress(TcverifyError):
                case = read_counterexample(path)
                write_counterexample(case, report_dir)
                found.append(case)
        shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):
        (report_dir / WORKERS_DIR).rmdir()
    return found


__all__ = ["LOST_LIMIT", "RANGE", "WORKERS_DIR", "DividedCampaign", "recover_cases"]
