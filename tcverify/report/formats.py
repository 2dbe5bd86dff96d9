"""The reports that a run can be asked for, by name."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from tcverify.campaign import Subscriber
from tcverify.registry.choices import REPORTS
from tcverify.report.github import GithubReport
from tcverify.report.html import HtmlReport
from tcverify.report.html.kernels import KernelReport
from tcverify.report.junit import JunitReport
from tcverify.report.ndjson import EventLog
from tcverify.report.sarif import SarifReport
from tcverify.report.trace import TraceReport


def reports(
    names: Collection[str],
    report_dir: Path,
    tell: Callable[[str], None],
    failing: Collection[str] = (),
    *,
    accepting: bool = False,
) -> list[Subscriber]:
    """Return the subscribers that write these reports.

    The log of events records messages of the others, so it comes before them, except for the page of kernels, which reports its
    path at the end of the run while the log is still open.

    Args:
        names: of `REPORTS`.
        tell, failing, accepting: see `JunitReport`.
    """
    chosen: list[Subscriber] = []
    told = tell
    if "ndjson" in names:
        log = EventLog(report_dir, tell)
        chosen.append(log)

        def told(line: str) -> None:
            tell(line)
            log.note(line)

    if "html" in names:
        chosen = [KernelReport(report_dir, told), *chosen, HtmlReport(report_dir, told), TraceReport(report_dir, told)]
    if "junit" in names:
        chosen.append(JunitReport(report_dir, told, failing, accepting=accepting))
    if "sarif" in names:
        chosen.append(SarifReport(report_dir, told, accepting=accepting))
    if "github" in names:
        chosen.append(GithubReport(report_dir, told, accepting=accepting))
    return chosen


__all__ = ["REPORTS", "reports"]
