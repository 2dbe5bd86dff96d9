"""Output for GitHub Actions: annotations at lines of the pass, and a summary of the job.

Annotations are commands on standard output, "::error file=…,line=…,title=…::message". The summary is Markdown, appended to the
file that GITHUB_STEP_SUMMARY names: a row per pass and mesh, and the cases, collapsed. Without that variable there is no summary.
"""

from __future__ import annotations

import html
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.text import Text

from tcverify.campaign import CampaignFinished, CampaignStarted, Event, FindingFound, RunFinished
from tcverify.cases.counterexample import FILE_NAME, Counterexample
from tcverify.report.annotation import Annotation, annotate
from tcverify.report.console import make_console
from tcverify.report.markdown import code_span, table_cell, to_markdown
from tcverify.report.sanitize import one_line, plural, sanitize

#: Names the file for the summary of a job.
SUMMARY = "GITHUB_STEP_SUMMARY"

#: Size limit of a step's summary in bytes: GitHub drops summaries above 1 MiB. Leaves room for the text after the cases.
MAX_SUMMARY = (1 << 20) - 4096

_HEADINGS = ("pass", "programs of", "verdict", "programs", "changed", "findings")


@dataclass(slots=True)
class _Campaign:
    """Data of a campaign."""

    started: CampaignStarted
    cases: list[Counterexample] = field(default_factory=list)
    finished: CampaignFinished | None = None


class GithubReport:
    """Subscribes to runs; prints an annotation per finding, and writes the summary when a run ends.

    Args:
        report_dir: where counterexamples are kept.
        tell: called with one line if the summary cannot be written.
        accepting: whether findings are written to a baseline and so do not fail the run: then they are warnings.
    """

    def __init__(self, report_dir: Path, tell: Callable[[str], None], *, accepting: bool = False) -> None:
        self.accepting = accepting
        self.report_dir = report_dir
        self.tell = tell
        self._console = make_console()
        self._campaigns: list[_Campaign] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, CampaignStarted):
            self._campaigns.append(_Campaign(event))
        elif isinstance(event, FindingFound):
            case = event.counterexample
            command = workflow_command(annotate(case, self._path(case), accepting=self.accepting))
            self._console.print(Text(command), soft_wrap=True)
            self._campaigns[-1].cases.append(case)
        elif isinstance(event, CampaignFinished):
            self._campaigns[-1].finished = event
        elif isinstance(event, RunFinished) and os.environ.get(SUMMARY):
            self._append(Path(os.environ[SUMMARY]), event)

    def _path(self, case: Counterexample) -> Path:
        return self.report_dir / case.id / FILE_NAME

    def _append(self, path: Path, ended: RunFinished) -> None:
        try:
            room = MAX_SUMMARY - (path.stat().st_size if path.exists() else 0)
            text = "\n".join(self._summary(ended, room))
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{text}\n")
        except Exception as error:  # noqa: BLE001 - what cannot be written must not end the run
            self.tell(f"{path} was not written: {one_line(error)}; the run continues")

    def _summary(self, ended: RunFinished, room: int) -> Iterator[str]:
        """Yield the parts of the summary: the table, then as many cases as fit into the size limit."""
        head = ["## tcverify", ""]
        head += [f"The run ended early: {code_span(sanitize(ended.error))}", ""] if ended.error else []
        head += [_row(_HEADINGS), "|---" * len(_HEADINGS) + "|", *(_row(_cells(one)) for one in self._campaigns), ""]
        yield (text := "\n".join(head))
        room -= len(text.encode())
        left_out = 0
        for case in (case for one in self._campaigns for case in one.cases):
            text = self._folded(case)
            size = len(text.encode()) + 1
            if size <= room:
                room -= size
                yield text
            else:
                left_out += 1
        if left_out:
            yield f"{plural(left_out, 'more case')}: no room here, see {code_span(sanitize(str(self.report_dir)))}.\n"

    def _folded(self, case: Counterexample) -> str:
        title = sanitize(f"{case.id}: {case.finding.kind} in {case.facts.name}")
        body = to_markdown(case, self._path(case))
        return f"<details><summary>{html.escape(title)}</summary>\n\n{body}\n\n</details>\n"


def workflow_command(shown: Annotation) -> str:
    """Return the command that makes GitHub show an annotation: one line for standard output."""
    level = "error" if shown.error else "warning"
    facts = {"file": _from_workspace(shown.file), "line": str(shown.line), "title": shown.title}
    said = ",".join(f"{name}={_property(value)}" for name, value in facts.items())
    return f"::{level} {said}::{_data(chr(10).join(shown.message))}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _from_workspace(file: str) -> str:
    """The path of a file relative to the root of the checkout, which need not be the current directory."""
    root, path = os.environ.get("GITHUB_WORKSPACE"), Path.cwd() / file
    return str(path.relative_to(root)) if root and path.is_relative_to(root) and path.exists() else file


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(table_cell(cell) for cell in cells)} |"


def _cells(one: _Campaign) -> tuple[str, ...]:
    found = Counter((case.finding.kind, case.finding.severity) for case in one.cases)
    kinds = [
        f"{number} {code_span(sanitize(kind))}{' (hygiene)' if severity == 'hygiene' else ''}"
        for (kind, severity), number in found.items()
    ]
    name, mesh = code_span(sanitize(one.started.facts.name)), code_span(sanitize(one.started.mesh))
    if one.finished is None:
        return name, mesh, "**not finished**", "", "", ", ".join(kinds)
    counts, verdict = one.finished.statistics, one.finished.verdict
    told = verdict if verdict == "passed" else f"**{verdict}**"
    told += f": {code_span(sanitize(one.finished.why))}" if one.finished.why else ""
    return name, mesh, told, str(counts.programs), str(counts.changed), ", ".join(kinds) or "none"


__all__ = ["MAX_SUMMARY", "SUMMARY", "GithubReport", "workflow_command"]
