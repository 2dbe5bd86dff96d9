"""Reports on the terminal: progress, failures, summary. Rich where there is a terminal, plain text elsewhere."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from tcverify.campaign import CampaignFinished, CampaignStarted, Crashed, Event, FindingFound, Progress
from tcverify.campaign.events import CampaignVerdict, Stop
from tcverify.cases.counterexample import FILE_NAME, Counterexample
from tcverify.report.block import ReportBlock, make_block
from tcverify.report.console import say
from tcverify.report.coverage import kernel_lines, reach_line, searched_line, suspect_lines, unreached_lines
from tcverify.report.known_findings import known_line
from tcverify.report.listing import Sign, columns
from tcverify.report.sanitize import plural, sanitize

_MARK_STYLES: dict[Sign, str] = {"-": "red", "+": "green", " ": ""}
#: What helps if a pass changes nothing.
_ELSEWHERE = "use your own programs: --strategy file.py:name, or your own graphs: tcverify check"
_VERDICT_STYLES: dict[CampaignVerdict, str] = {
    "passed": "bold green",
    "refuted": "bold red",
    "inconclusive": "bold yellow",
    "nothing tested": "bold yellow",
}
_STOPS: dict[Stop, str] = {
    "examples": "all programs drawn",
    "time": "time is up",
    "exhausted": "no more programs to draw",
    "searched": "the search is exhausted, and drawn programs show nothing new",
    "first finding": "stopped at the first finding",
    "interrupted": "interrupted",
}

#: Passes of a run for which it is told what of their code was never reached.
MAX_REACHED = 3

#: Lines on what was never reached of one pass, and entries of each.
MAX_UNREACHED = 5

#: Seconds between two lines on how far a campaign is, where the output is no terminal.
INTERVAL = 60.0

#: Seconds from which on a run says where its time went.
TIMED = 60.0

#: Columns of the line above a counterexample, where the output is not broken into lines of a width.
_RULE = 80


class TerminalReport:
    """Subscribes to campaigns and tells about them on a console.

    Args:
        report_dir: where counterexamples are written, for the commands that it shows.
    """

    def __init__(self, console: Console, report_dir: Path, *, kernels: bool = False) -> None:
        self.console = console
        self._kernels = kernels
        self._rows: dict[tuple[object, ...], str] = {}
        self.report_dir = report_dir
        self.finished: list[CampaignFinished] = []
        self._live: Live | None = None
        self._started: CampaignStarted | None = None
        self._next_update = 0.0

    def __call__(self, event: Event) -> None:
        if isinstance(event, CampaignStarted):
            self._start(event)
        elif isinstance(event, Progress):
            self._progress(event)
        elif isinstance(event, FindingFound):
            if event.counterexample.finding.severity == "error":  # the others are listed at the end
                self._found(event.counterexample)
        elif isinstance(event, Crashed):
            self.close()
            say(self.console, f"  tcverify failed on a program, which is saved as {event.path}", "yellow")
        elif isinstance(event, CampaignFinished):
            self.close()
            self.finished.append(event)
            self._end(event)

    def _found(self, case: Counterexample) -> None:
        """Show a counterexample: whole, unless one of its kind was shown that the same lines of the pass have made."""
        lines = frozenset(one.place for one in case.made_by)
        row = (repr(case.facts), case.finding.kind, lines) if lines else (case.id,)
        before = self._rows.setdefault(row, case.id)
        say(self.console)
        if before == case.id:
            show(self.console, case, self.report_dir / case.id / FILE_NAME)
            return
        block = make_block(case, None)
        size = plural(case.program.size, "node")
        say(self.console, f"{block.name}  case {case.id}, rewritten at the same lines as {before} ({size})", "bold red")
        say(self.console, f"  {block.divergence or block.title}")

    def close(self) -> None:
        """End the progress line."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _start(self, event: CampaignStarted) -> None:
        self._started = event
        bound = plural(event.max_examples, "program") if event.max_examples is not None else f"{event.max_time:g} s"
        tiers = "lockstep" if event.confirm == "none" else f"lockstep, then {event.confirm}"
        earlier = f", {plural(event.earlier, 'earlier failure')} first" if event.earlier else ""
        cases = f", {plural(event.cases, 'case')} first" if event.cases else ""
        line = f"{sanitize(event.facts.name)} on {event.mesh}: {bound}, {tiers}, seed {event.seed}{earlier}{cases}"
        say(self.console, line, "bold")
        if not event.guarded:
            say(self.console, "  the pass runs in this process: if it hangs or crashes, so does the run", "yellow")
        self._next_update = time.monotonic() + INTERVAL
        if self.console.is_interactive:
            self._live = Live(console=self.console, refresh_per_second=4, transient=True)
            self._live.start()

    def _progress(self, event: Progress) -> None:
        now = time.monotonic()
        if self._live is not None:
            text = Text(f"  {self._progress_line(event)}", style="dim", no_wrap=True, overflow="ellipsis")
            self._live.update(text)  # which draws it four times a second
        elif now >= self._next_update:
            self._next_update = now + INTERVAL
            say(self.console, f"  {self._progress_line(event)}")

    def _progress_line(self, event: Progress) -> str:
        """How far the campaign is, the most important first: a narrow terminal shows the beginning."""
        counts, started = event.statistics, self._started
        rate = counts.programs / counts.elapsed if counts.elapsed else 0.0
        most = started.max_examples if started is not None else None
        parts = [
            plural(counts.programs, "program") if most is None else f"{counts.programs} of {plural(most, 'program')}"
        ]
        parts.append(plural(event.causes, "cause"))
        left = (most - counts.programs) / rate if most is not None and rate else None
        if started is not None and started.max_time is not None:
            over = started.max_time - counts.elapsed
            left = over if left is None else min(left, over)
        parts += [f"{max(0.0, left):.0f} s left"] if left is not None else []
        parts += [event.phase] if event.phase != "verifying" else []
        parts += [plural(event.behaviours, "behaviour")] if event.behaviours else []
        parts += [f"changed {_share(counts.changed, counts.programs)}", f"{rate:.0f}/s"]
        return ", ".join(parts)

    def _end(self, event: CampaignFinished) -> None:
        counts = event.statistics
        verdicts = f"{counts.passed} passed, {counts.refuted} refuted, {counts.inconclusive} inconclusive"
        verdicts += f", {counts.known} known" if counts.known else ""
        if event.counterexamples:
            say(self.console)
        style = _VERDICT_STYLES[event.verdict]
        say(self.console, f"  {event.verdict}: {plural(counts.programs, 'program')} ({verdicts})", style)
        if event.why:
            say(self.console, f"  {sanitize(event.why)}", style)
        if event.verdict == "nothing tested" and counts.passed:
            say(self.console, f"  {_ELSEWHERE}", style)
        self._causes(event)
        self._hygiene(event)
        self._numbers(event)

    def _causes(self, event: CampaignFinished) -> None:
        """What refuted programs, and what left them undecided."""
        counts = event.statistics
        cases: dict[str, list[str]] = {}
        for case in event.counterexamples:
            cases.setdefault(case.finding.kind, []).append(case.id)
        for kind, number in counts.findings.most_common():
            ids = cases.get(kind, [])
            which = f", case{'s' if len(ids) > 1 else ''} {', '.join(ids)}" if ids else ""
            say(self.console, f"  {kind}: {plural(number, 'program')}{which}", "red")
        for line in suspect_lines(event.searched) if event.searched is not None else ():
            say(self.console, f"  {line}", "red")
        for entry, number in event.known:
            say(self.console, f"  {known_line(entry, number)}", "yellow")
        for reason, number in counts.doubts.most_common():
            detail = sanitize(counts.doubt_details[reason])
            say(self.console, f"  inconclusive, {reason}: {plural(number, 'program')} ({detail})", "yellow")

    def _numbers(self, event: CampaignFinished) -> None:
        """What was run: it says how much the verdict is worth."""
        counts = event.statistics
        ran = ", ".join(f"{n} in {name}" if name == "lockstep" else f"{n} on {name}" for name, n in counts.ran.items())
        say(self.console, f"  {f'ran {ran}' if ran else 'no program ran'}; {counts.changed} changed by the pass")
        for name, number in sorted(counts.rewrites.items()):
            say(
                self.console,
                f"  {sanitize(name)}: {plural(number, 'rewrite')} in {plural(counts.fired[name], 'program')}",
            )
        rate = round(counts.programs / counts.elapsed) if counts.elapsed else 0
        say(self.console, f"  {counts.elapsed:.1f} s, {plural(rate, 'program')}/s; {_STOPS[event.stop]}")
        for reason, number in counts.notes.most_common():
            detail = sanitize(counts.note_details[reason])
            say(self.console, f"  {reason}: {plural(number, 'program')} ({detail})")
        if event.searched is not None and event.searched.kernels:
            say(self.console, f"  {searched_line(event.searched)}")
            for shown in kernel_lines(event.searched) if self._kernels else ():
                say(self.console, f"  {shown.text}", _MARK_STYLES[shown.mark])

    def _hygiene(self, event: CampaignFinished) -> None:
        """List the hygiene findings, of each cause the smallest program."""
        for kind, number in event.statistics.hygiene.most_common():
            say(self.console, f"  hygiene, {kind}: {plural(number, 'program')}; --strict makes it an error", "yellow")
            for case in (case for case in event.hygiene if case.finding.kind == kind):
                say(self.console, f"    {sanitize(case.finding.title)}, case {case.id}", "yellow")
                if made_by := make_block(case, None).made_by:
                    say(self.console, f"    rewritten at {made_by}", "yellow")

    def summary(self) -> None:
        """Print the table of all campaigns, when there are several, and where their time went."""
        self.close()
        if len(self.finished) > 1:
            rows: list[tuple[str, ...]] = [
                ("pass", "mesh", "programs", "confirmed", "changed", "refuted", "inconclusive", "verdict")
            ]
            rows += [_row(event) for event in self.finished]
            header, *lines = columns(rows, right=range(2, 7))
            say(self.console)
            self.console.print(Text(header, style="bold"), soft_wrap=True)
            for line, event in zip(lines, self.finished, strict=True):
                self.console.print(Text(line, style=_VERDICT_STYLES[event.verdict]), soft_wrap=True)
        self._reach()
        total: Counter[str] = Counter()
        for event in self.finished:
            total.update(event.statistics.seconds)
        elapsed = sum(event.statistics.elapsed for event in self.finished)
        if elapsed >= TIMED:
            parts = [f"{name} {_share(seconds, elapsed)}" for name, seconds in total.most_common()]
            rest = _share(elapsed - sum(total.values()), elapsed)
            say(self.console, f"time: {', '.join(parts)}, the rest {rest}")

    def _reach(self) -> None:
        """Print what was never reached of the passes' code, unless they are many."""
        latest = {repr(event.facts): event for event in self.finished if event.reached}  # a later campaign knows more
        for event in latest.values() if len(latest) <= MAX_REACHED else ():
            if event.stop == "first finding":  # little was run, and the finding is the answer
                continue
            run = [one.statistics for one in self.finished if one.facts == event.facts]
            some = (
                not hasattr(sys, "monitoring")
                and event.searched is None
                and sum(one.programs + one.shrinking for one in run) > 2
            )
            say(self.console, reach_line(event.reached) + (", by the programs that were traced" if some else ""))
            never = unreached_lines(event.reached, MAX_UNREACHED)
            for line in never[:MAX_UNREACHED]:
                say(self.console, f"  never reached: {line}")
            if len(never) > MAX_UNREACHED:
                say(
                    self.console,
                    f"  never reached: {len(never) - MAX_UNREACHED} more lines, in --report ndjson or junit",
                )


def _row(event: CampaignFinished) -> tuple[str, ...]:
    counts = event.statistics
    return (
        sanitize(event.facts.name),
        event.mesh,
        str(counts.programs),
        str(sum(n for name, n in counts.ran.items() if name != "lockstep")),
        f"{counts.changed} ({_share(counts.changed, counts.programs)})",
        str(counts.refuted),
        str(counts.inconclusive),
        event.verdict,
    )


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "0 %"


def show(console: Console, case: Counterexample, path: Path | None) -> None:
    """Print the block of a counterexample.

    Args:
        path: its file, see `make_block`.
    """
    block = make_block(case, path)
    say(console, f"{block.name}  case {case.id} ".ljust(min(console.width, _RULE), "─"), "bold red")
    _show_finding(console, block)
    say(console)
    _show_program(console, block)
    _show_runs(console, block)
    say(console, block.footer, "dim")
    _show_commands(console, block.reproduce)


def _exactly(console: Console, text: str) -> None:
    """Print a line as it is, never broken."""
    console.print(Text(text), soft_wrap=True)


def _show_finding(console: Console, block: ReportBlock) -> None:
    """Print what was found, and where it comes from."""
    say(console, block.headline, "bold red")
    say(console, block.title, "bold")
    for text in block.detail:
        (_exactly if block.literal else say)(console, f"  {text}")
    for text in block.times:
        say(console, text)
    if block.divergence:
        say(console, f"first divergence: {block.divergence}")
    if block.made_by:
        say(console, f"rewritten at {block.made_by}")
    if block.blame:
        say(console, f"root cause: {block.blame}", "bold")
    if block.end_to_end:
        say(console, f"end to end: {block.end_to_end}", "bold")


def _show_program(console: Console, block: ReportBlock) -> None:
    """Print the program, and what the pass made of it."""
    say(console, f"program: {block.program}")
    for text in block.inputs:
        say(console, f"  {text}")
    say(console, block.caption)
    for entry in block.graph:
        arrow = "  ◀ here" if entry.node == block.blamed and entry.mark != "-" else ""
        say(console, f"  {entry.mark} {entry.text}{arrow}", _MARK_STYLES[entry.mark])
    if block.listing:
        say(console, "rank 0, after the pass")
        for text in block.listing:
            say(console, f"    {text}")


def _show_runs(console: Console, block: ReportBlock) -> None:
    """Print what the runs showed beside the finding."""
    if block.values:
        say(console, "largest difference per rank")
        for text in block.values:
            say(console, f"  {text}")
    if block.statistics:
        say(console, "collectives of rank 0, by the pass (times in µs)")
        for text in columns(block.statistics, right=range(2, 8)):
            say(console, f"  {text}")
    for text in block.others:
        say(console, f"also: {text}")


def _show_commands(console: Console, commands: Sequence[str]) -> None:
    """Print what reproduces a case: on one line where that is wide enough."""
    if not commands:
        return
    together = f"Reproduce with:  {'   |   '.join(commands)}"
    if len(together) <= console.width:
        say(console, together)
        return
    say(console, "Reproduce with:")
    for text in commands:
        _exactly(console, f"  {text}")  # it is there to be copied
