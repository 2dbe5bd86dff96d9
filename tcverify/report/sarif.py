"""tcverify.sarif: findings at lines of the pass, for editors and code scanning.

SARIF 2.1.0 of OASIS. A result per counterexample, a rule per kind that was found. The
file is rewritten atomically after each finding: a killed run leaves its findings, and the fact that it did not end.
A sound run leaves a file without results, so that code scanning closes earlier alerts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tcverify import __version__
from tcverify.campaign import Crashed, Event, FindingFound, Progress, RunFinished
from tcverify.cases.baseline import pass_reference
from tcverify.cases.counterexample import FILE_NAME, Counterexample
from tcverify.program import KINDS
from tcverify.report.annotation import annotate
from tcverify.report.sanitize import one_line, sanitize
from tcverify.system.files import write_atomically

SARIF_NAME = "tcverify.sarif"

#: Base of relative paths: the current directory.
_ROOT = "%SRCROOT%"

#: Exit codes of runs with a verdict.
_VERDICTS = (0, 1)

#: A bracket that would start a link in SARIF messages.
_LINK = re.compile(r"\[(?=[^\]]*\]\()")


class SarifReport:
    """Subscribes to runs and writes `report_dir/tcverify.sarif`.

    Args:
        tell: called once with one line if the file cannot be written; the run and attempts to write continue.
        accepting: whether findings are written to a baseline and so do not fail the run: then they are notes.
    """

    def __init__(self, report_dir: Path, tell: Callable[[str], None], *, accepting: bool = False) -> None:
        self.accepting = accepting
        self.path = report_dir / SARIF_NAME
        self.report_dir = report_dir
        self.tell = tell
        self._rules: dict[str, dict[str, Any]] = {}
        self._results: list[dict[str, Any]] = []
        self._invocation: dict[str, Any] = {"executionSuccessful": False}
        self._broken = False

    def __call__(self, event: Event) -> None:
        if isinstance(event, Progress):
            return
        if isinstance(event, FindingFound):
            self._results.append(self._result(event.counterexample))
        elif isinstance(event, Crashed):
            self._notify(f"tcverify failed on a program, which is kept as {event.path}")
        elif isinstance(event, RunFinished):
            self._invocation |= {"executionSuccessful": event.code in _VERDICTS, "exitCode": event.code}
            if event.error:
                self._notify(event.error)
        self._write()

    def _notify(self, text: str) -> None:
        notice = {"level": "error", "message": {"text": _text(sanitize(text))}}
        self._invocation.setdefault("toolExecutionNotifications", []).append(notice)

    def _write(self) -> None:
        driver = {"name": "tcverify", "version": __version__, "rules": list(self._rules.values())}
        run = {
            "tool": {"driver": driver},
            "invocations": [self._invocation],
            "originalUriBaseIds": {_ROOT: {"uri": f"{Path.cwd().as_uri()}/"}},
            "columnKind": "unicodeCodePoints",
            "results": self._results,
        }
        schema = "https://json.schemastore.org/sarif-2.1.0.json"
        try:
            write_atomically(
                self.path, json.dumps({"$schema": schema, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"
            )
        except Exception as error:  # noqa: BLE001 - a file that cannot be written must not end the run
            if not self._broken:
                self._broken = True
                self.tell(f"{self.path} was not written: {one_line(error)}; the run continues")

    def _result(self, case: Counterexample) -> dict[str, Any]:
        path = self.report_dir / case.id / FILE_NAME
        shown = annotate(case, path, accepting=self.accepting)
        kind = sanitize(case.finding.kind)
        beside = {
            "id": 1,
            "message": {"text": "the counterexample"},
            "physicalLocation": {"artifactLocation": _artifact(str(path))},
        }
        region = {"startLine": shown.line}
        self._rules.setdefault(kind, _rule(kind))
        return {
            "ruleId": kind,
            "ruleIndex": list(self._rules).index(kind),
            "level": "error" if shown.error else "note",
            "message": {"text": _text("\n".join(shown.message))},
            "locations": [{"physicalLocation": {"artifactLocation": _artifact(shown.file), "region": region}}],
            "relatedLocations": [beside],
            **({"partialFingerprints": {"tcverify/v1": shown.fingerprint}} if shown.fingerprint else {}),
            "properties": {
                "case": case.id,
                "pass": sanitize(pass_reference(case.facts)),
                "ranks": case.program.world_size,
            },
        }


def _rule(kind: str) -> dict[str, Any]:
    meaning = KINDS.get(kind, "a finding of a registered check")
    said = _text(f"{meaning[0].upper()}{meaning[1:]}.")
    how = "`tcverify show CASE` shows the case, `tcverify replay CASE` runs it with the pass as it is now."
    return {
        "id": kind,
        "shortDescription": {"text": said},
        "fullDescription": {"text": said},
        "help": {"text": f"{said} {how.replace('`', '')}", "markdown": f"{said}\n\n{how}"},
        "defaultConfiguration": {"level": "error"},
    }


def _text(text: str) -> str:
    """Text of a message, in which nothing is a link."""
    return _LINK.sub(r"\\[", text)


def _artifact(file: str) -> dict[str, str]:
    """Location of a file: relative to the current directory if it is below it."""
    path = Path(file)
    below = Path.cwd() / path
    if below.is_relative_to(Path.cwd()) and (below.exists() or path.is_absolute()):
        return {"uri": quote(below.relative_to(Path.cwd()).as_posix()), "uriBaseId": _ROOT}
    return {"uri": path.as_uri() if path.is_absolute() else quote(path.as_posix())}


__all__ = ["SARIF_NAME", "SarifReport"]
