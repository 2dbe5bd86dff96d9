"""Reports on the terminal: progress, failures, summary. Rich where there is a terminal, plain text elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tcverify.campaign import CampaignFinished, CampaignStarted, Event, FindingFound, Progress
from tcverify.counterexample import Counterexample
from tcverify.report.block import make_block

_MARK_STYLES = {"-": "red", "+": "green", " ": ""}
_VERDICT_STYLES = {"passed": "bold green", "refuted": "bold red", "nothing tested": "bold yellow"}


class TerminalReport:
    """Subscribes to campaigns and tells about them on a console.

    Args:
        report_dir: where counterexamples are written, for the commands that it shows.
    """

    def __init__(self, console: Console, report_dir: Path) -> None:
        self.console = console
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
            show(self.console, event.counterexample, self.report_dir)
        else:
            self.close()
            self.finished.append(event)
            self._end(event)

    def close(self) -> None:
        """End the progress line."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _start(self, event: CampaignStarted) -> None:
        self._started = event
        bound = f"{event.max_examples} programs" if event.max_examples is not None else f"{event.max_time:g} s"
        tiers = "lockstep" if event.confirm == "none" else f"lockstep, then {event.confirm}"
        self.console.print(
            Text.assemble((event.facts.name, "bold"), f" on {event.mesh}: {bound}, {tiers}, seed {event.seed}"),
            soft_wrap=True,
        )
        if not event.guarded:
            self.console.print("  the pass runs in this process: if it hangs or dies, so does the run", style="yellow")
        if self.console.is_terminal:
            self._live = Live(console=self.console, refresh_per_second=4, transient=True)
            self._live.start()

    def _progress(self, event: Progress) -> None:
        now = time.monotonic()
        if self._live is None or now < self._next_update:
            return
        self._next_update = now + 0.25
        self._live.update(Text(f"  {self._progress_line(event)}", style="dim"))

    def _progress_line(self, event: Progress) -> str:
        counts, started = event.statistics, self._started
        rate = counts.programs / counts.elapsed if counts.elapsed else 0.0
        parts = [f"{counts.programs} programs", f"{rate:.0f}/s", f"changed {_share(counts.changed, counts.programs)}"]
        parts += [f"{name} {_share(n, counts.programs)}" for name, n in sorted(counts.fired.items())]
        parts.append(f"{sum(counts.findings.values())} findings")
        parts.append(f"{counts.elapsed:.0f} s")
        if started is not None and started.max_examples is not None and rate:
            parts.append(f"{max(0.0, (started.max_examples - counts.programs) / rate):.0f} s to go")
        elif started is not None and started.max_time is not None:
            parts.append(f"{max(0.0, started.max_time - counts.elapsed):.0f} s to go")
        if event.phase != "verifying":
            parts.append(event.phase)
        return ", ".join(parts)

    def _end(self, event: CampaignFinished) -> None:
        counts = event.statistics
        style = _VERDICT_STYLES[event.verdict]
        ran = ", ".join(f"{n} on {name}" for name, n in counts.ran.items()) or "none ran"
        self.console.print(
            Text.assemble(
                "  ", (event.verdict, style), f": {counts.programs} programs ({ran}), changed {counts.changed}"
            ),
            soft_wrap=True,
        )
        rate = counts.programs / counts.elapsed if counts.elapsed else 0.0
        line = f"  {counts.passed} passed, {counts.refuted} refuted, {counts.inconclusive} inconclusive"
        self.console.print(
            f"{line}; {counts.elapsed:.1f} s, {rate:.0f} programs/s; stopped by {event.stop}", soft_wrap=True
        )
        if counts.rewrites:
            fired = ", ".join(
                f"{name} {n} times in {counts.fired[name]} programs" for name, n in sorted(counts.rewrites.items())
            )
            self.console.print(f"  rewrites: {fired}", soft_wrap=True)
        if event.why:
            self.console.print(f"  {event.why}", style="yellow", soft_wrap=True)
        for reason, number in counts.doubts.most_common():
            self.console.print(f"  inconclusive, {reason}: {number} ({counts.doubt_details[reason]})", soft_wrap=True)
        known = {case.finding.kind: case.id for case in event.counterexamples}
        for kind, number in counts.findings.most_common():
            case = f", case {known[kind]}" if kind in known else ""
            self.console.print(f"  {kind}: {number} programs{case}", style="red", soft_wrap=True)

    def summary(self) -> None:
        """Print the table of all campaigns."""
        self.close()
        if not self.finished:
            return
        table = Table(title=None, box=None, pad_edge=False, header_style="bold")
        for name in ("pass", "mesh"):
            table.add_column(name, overflow="fold")
        for name in ("programs", "on group", "fired", "refuted", "unsure"):
            table.add_column(name, justify="right")
        table.add_column("verdict", no_wrap=True)
        for event in self.finished:
            counts = event.statistics
            table.add_row(
                event.facts.name,
                event.mesh,
                str(counts.programs),
                str(sum(n for name, n in counts.ran.items() if name != "lockstep")),
                f"{counts.changed} ({_share(counts.changed, counts.programs)})",
                str(counts.refuted),
                str(counts.inconclusive),
                Text(event.verdict, style=_VERDICT_STYLES[event.verdict]),
            )
        self.console.print()
        self.console.print(table)

    def phases(self) -> None:
        """Print where the time of all campaigns went."""
        total: Counter[str] = Counter()
        for event in self.finished:
            total.update(event.statistics.seconds)
        elapsed = sum(event.statistics.elapsed for event in self.finished)
        if elapsed:
            rest = elapsed - sum(total.values())
            parts = [f"{name} {_share(seconds, elapsed)}" for name, seconds in total.most_common()]
            self.console.print(
                f"time: {', '.join(parts)}, drawing and the rest {_share(rest, elapsed)}", soft_wrap=True
            )


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "0 %"


def show(console: Console, case: Counterexample, report_dir: Path) -> None:
    """Print the block of a counterexample."""
    block = make_block(case, report_dir)

    def line(text: str = "", style: str = "") -> None:
        console.print(Text(text, style=style), soft_wrap=True)

    line()
    console.rule(Text(f"{case.facts.name}  case {case.id}", style="bold"), align="left", style="red", characters="─")
    line(block.headline, "bold red")
    line(block.title, "bold")
    for text in block.detail:
        line(f"  {text}")
    line()
    line(f"program   {block.program}")
    for text in block.inputs:
        line(f"  {text}")
    if block.graph:
        line(f"rank {block.rank}, before ⇒ after the pass (- removed, + added)")
        for entry in block.graph:
            arrow = "  ◀ here" if entry.node == block.blamed and entry.mark != "-" else ""
            line(f"  {entry.mark} {entry.text}{arrow}", _MARK_STYLES[entry.mark])
    elif block.listing:
        line("rank 0, after the pass")
        for text in block.listing.splitlines():
            line(f"    {text}")
    if block.values:
        line("largest difference per rank")
        for text in block.values:
            line(f"  {text}")
    for text in block.others:
        line(f"also      {text}")
    line(block.footer, "dim")
    line(f"Reproduce with:  {block.reproduce}")
