"""junit.xml: the result of a run, as continuous integration reads it.

A suite per pass and mesh. It has a test case for the campaign, which fails with its first finding, a failed case per
further finding and a skipped case per known finding. A campaign that tested nothing fails; one that was interrupted or has not
ended is an error. If a run does not exit with 0 and no suite says why, an extra suite does: a green file means exit code 0. The
file is rewritten atomically after every event, so that a killed run leaves a file that shows its progress.

Elements and attributes are restricted to those that both the schema of Ant's task ("JUnit.xsd") and that of Jenkins' plugin
allow: properties, test cases, output, in this order; one failure, error or skip per case; no properties of cases.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tcverify.campaign import CampaignFinished, CampaignStarted, Crashed, Event, FindingFound, Progress, RunFinished
from tcverify.campaign.campaign_verdict import tolerated
from tcverify.cases.baseline import pass_reference
from tcverify.cases.counterexample import FILE_NAME, Counterexample
from tcverify.report.coverage import reach_line, unreached_lines
from tcverify.report.known_findings import known_line
from tcverify.report.sanitize import one_line, plural, sanitize
from tcverify.report.text import to_text
from tcverify.system.files import write_atomically

JUNIT_NAME = "junit.xml"

#: Characters that XML 1.0 cannot represent.
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_UNFINISHED = "the campaign has not ended"


@dataclass(slots=True)
class _Suite:
    """Data of a campaign."""

    started: CampaignStarted
    timestamp: str
    cases: list[Counterexample] = field(default_factory=list)
    finished: CampaignFinished | None = None
    elapsed: float = 0.0
    problem: str = _UNFINISHED


class JunitReport:
    """Subscribes to runs and writes `report_dir/junit.xml`.

    Args:
        tell: called once with one line if the file cannot be written; the run and attempts to write continue.
        failing: conditions of `--fail-on`.
        accepting: whether findings are written to a baseline and so do not fail the run.
    """

    def __init__(
        self,
        report_dir: Path,
        tell: Callable[[str], None],
        failing: Collection[str] = (),
        *,
        accepting: bool = False,
    ) -> None:
        self.path = report_dir / JUNIT_NAME
        self.report_dir = report_dir
        self.tell = tell
        self.failing = failing
        self.accepting = accepting
        self._suites: list[_Suite] = []
        self._ended: RunFinished | None = None
        self._broken = False

    def __call__(self, event: Event) -> None:
        if isinstance(event, CampaignStarted):
            self._suites.append(_Suite(event, _now()))
        elif isinstance(event, Progress) and self._suites:
            self._suites[-1].elapsed = event.statistics.elapsed
            return
        elif isinstance(event, FindingFound) and self._suites:
            if event.counterexample.finding.severity == "error":
                self._suites[-1].cases.append(event.counterexample)
        elif isinstance(event, Crashed) and self._suites:
            self._suites[-1].problem = f"tcverify failed on a program, which is saved as {event.path}"
        elif isinstance(event, CampaignFinished) and self._suites:
            self._suites[-1].finished = event
            self._suites[-1].elapsed = event.statistics.elapsed
        elif isinstance(event, RunFinished) and event.error and self._suites and self._suites[-1].finished is None:
            known = self._suites[-1].problem
            self._suites[-1].problem = event.error if known == _UNFINISHED else f"{known}: {event.error}"
        if isinstance(event, RunFinished):
            self._ended = event
        self._write()

    def _write(self) -> None:
        try:
            root = ElementTree.Element("testsuites")
            for number, suite in enumerate(self._suites):
                root.append(self._suite(number, suite))
            if self._ended is not None and self._ended.code and not _red(root):
                root.append(self._run_suite(len(self._suites), self._ended))
            ElementTree.indent(root, " ")
            text = ElementTree.tostring(root, encoding="unicode")
            write_atomically(self.path, f'<?xml version="1.0" encoding="UTF-8"?>\n{_ascii(text)}\n')
        except Exception as error:  # noqa: BLE001 - a file that cannot be written must not end the run
            if not self._broken:
                self._broken = True
                self.tell(f"{self.path} was not written: {one_line(error)}; the run continues")

    def _suite(self, number: int, suite: _Suite) -> ElementTree.Element:
        started, finished = suite.started, suite.finished
        facts = {
            "tcverify.pass": pass_reference(started.facts),
            "tcverify.mesh": started.mesh,
            "tcverify.seed": started.seed,
        }
        if finished is not None:
            counts = finished.statistics
            names = ("programs", "changed", "passed", "refuted", "inconclusive", "known")
            facts |= {f"tcverify.{name}": getattr(counts, name) for name in names}
            facts |= {"tcverify.verdict": finished.verdict, "tcverify.stop": finished.stop}
            never = unreached_lines(finished.reached)
            facts |= {"tcverify.reached": reach_line(finished.reached)} if finished.reached else {}
            facts |= {"tcverify.never-reached": "; ".join(never)} if never else {}
        name = f"{sanitize(started.facts.name)} on {started.mesh}"
        problem = suite.problem if finished is None else ""
        texts = self._output(suite), problem
        return _suite_element(number, name, suite.timestamp, suite.elapsed, facts, self._campaign(suite), texts)

    def _run_suite(self, number: int, ended: RunFinished) -> ElementTree.Element:
        """A suite that says why a run failed although none of its campaigns did."""
        case = ElementTree.Element("testcase", classname="tcverify", name="the run", time="0.000")
        why = sanitize(ended.error) or f"the run ended with exit code {ended.code}"
        _problem(case, "error", "run-failed", why)
        facts = {"tcverify.exit-code": ended.code}
        return _suite_element(number, "tcverify run", _now(), 0.0, facts, [case], ("", why))

    def _campaign(self, suite: _Suite) -> list[ElementTree.Element]:
        """The test cases of a campaign, its own first."""
        started, finished = suite.started, suite.finished
        whole = self._case(started, "preserves the meaning", suite.elapsed)
        if suite.cases:
            self._finding(whole, suite.cases[0])
        elif finished is None:
            _problem(whole, "error", "unfinished", suite.problem)
        elif finished.stop == "interrupted":
            _problem(
                whole, "error", "interrupted", f"interrupted after {plural(finished.statistics.programs, 'program')}"
            )
        elif finished.verdict not in tolerated(self.failing):
            _problem(whole, "failure", finished.verdict.replace(" ", "-"), finished.why or finished.verdict)
        elif finished.statistics.inconclusive and "inconclusive" in self.failing:
            told = f"{plural(finished.statistics.inconclusive, 'program')} inconclusive"
            _problem(whole, "failure", "inconclusive", told)
        cases = [whole]
        for further in suite.cases[1:]:
            cases.append(self._case(started, f"{further.finding.kind} (case {further.id})", 0.0))
            self._finding(cases[-1], further)
        for entry, programs in finished.known if finished is not None else ():
            cases.append(self._case(started, f"{entry.kind}: {entry.fingerprint}", 0.0))
            ElementTree.SubElement(cases[-1], "skipped", message=_xml(known_line(entry, programs)))
        return cases

    def _case(self, started: CampaignStarted, name: str, seconds: float) -> ElementTree.Element:
        where = f"{pass_reference(started.facts)}[{started.mesh}]"
        return ElementTree.Element("testcase", classname=_xml(where), name=_xml(sanitize(name)), time=f"{seconds:.3f}")

    def _finding(self, element: ElementTree.Element, case: Counterexample) -> None:
        told = f"{case.finding.kind}: {case.finding.title}, case {case.id}"
        if self.accepting:
            ElementTree.SubElement(element, "skipped", message=_xml(sanitize(f"added to the baseline: {told}")))
            return
        text = to_text(case, self.report_dir / case.id / FILE_NAME)
        _problem(element, "failure", case.finding.kind, sanitize(told), text)

    def _output(self, suite: _Suite) -> str:
        """What the summary on the terminal says next to the verdict."""
        if suite.finished is None:
            return ""
        counts = suite.finished.statistics
        lines = [
            f"{suite.finished.verdict}: {plural(counts.programs, 'program')}, {counts.changed} changed by the pass"
        ]
        for reason, number in counts.doubts.most_common():
            lines.append(
                f"inconclusive, {reason}: {plural(number, 'program')} ({sanitize(counts.doubt_details[reason])})"
            )
        for kind, number in counts.hygiene.most_common():
            lines.append(f"hygiene, {kind}: {plural(number, 'program')}")
        for reason, number in counts.notes.most_common():
            lines.append(f"{reason}: {plural(number, 'program')} ({sanitize(counts.note_details[reason])})")
        return "\n".join(lines)


def _suite_element(
    number: int,
    name: str,
    timestamp: str,
    elapsed: float,
    facts: Mapping[str, Any],
    cases: Sequence[ElementTree.Element],
    texts: tuple[str, str],
) -> ElementTree.Element:
    """One `testsuite`, with its counts; `texts` are the contents of its two outputs."""
    element = ElementTree.Element("testsuite")
    properties = ElementTree.SubElement(element, "properties")
    for fact, value in facts.items():
        ElementTree.SubElement(properties, "property", name=fact, value=_xml(str(value)) or "-")
    element.extend(cases)
    for tag, text in zip(("system-out", "system-err"), texts, strict=True):
        ElementTree.SubElement(element, tag).text = _xml(text) or None
    element.attrib = {
        "name": _xml(name),
        "package": "tcverify",
        "id": str(number),
        "timestamp": timestamp,
        "hostname": _xml(platform.node()) or "localhost",
        "tests": str(len(cases)),
        "failures": str(sum(case.find("failure") is not None for case in cases)),
        "errors": str(sum(case.find("error") is not None for case in cases)),
        "skipped": str(sum(case.find("skipped") is not None for case in cases)),
        "time": f"{elapsed:.3f}",
    }
    return element


def _red(root: ElementTree.Element) -> bool:
    """Whether a case failed, or is an error."""
    return root.find("*/testcase/failure") is not None or root.find("*/testcase/error") is not None


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds").removesuffix("+00:00")


def _problem(element: ElementTree.Element, tag: str, kind: str, message: str, text: str = "") -> None:
    problem = ElementTree.SubElement(element, tag, type=_xml(sanitize(kind)), message=_xml(message))
    problem.text = _xml(text or message)


def _xml(text: str) -> str:
    """Remove characters that XML documents cannot contain."""
    return _NOT_XML.sub("?", text)


def _ascii(text: str) -> str:
    """Write non-ASCII characters as references: the file is the same in every locale."""
    return text.encode("ascii", "xmlcharrefreplace").decode()


__all__ = ["JUNIT_NAME", "JunitReport"]
