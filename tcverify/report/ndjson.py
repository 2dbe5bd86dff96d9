"""events.ndjson: a log of a run, one JSON object per line, written while it runs.

docs/events.md describes the events, docs/events.schema.json does so for machines. Both are stable: within a version,
events and fields are only added.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tcverify.campaign import (
    CampaignFinished,
    CampaignStarted,
    Crashed,
    Event,
    FindingFound,
    Progress,
    RunStarted,
    Statistics,
)
from tcverify.campaign.search import SearchSummary
from tcverify.cases.baseline import pass_reference
from tcverify.cases.counterexample import FILE_NAME, Counterexample, collect_versions
from tcverify.cases.end_to_end import EndToEnd, encode_end_to_end
from tcverify.cases.fingerprint import fingerprint_of
from tcverify.explain.diagnosis import diagnose
from tcverify.program import KINDS, Blame, encode_blame
from tcverify.report.block import make_block

SCHEMA = "tcverify-events"
VERSION = 1
EVENTS_NAME = "events.ndjson"

#: Seconds between two progress events.
INTERVAL_S = 1.0


class EventLog:
    """Subscribes to runs and appends their events to `report_dir/events.ndjson`, each in one write.

    Args:
        tell: called once with one line if the file cannot be written; the run and attempts to write continue.
        clock: seconds, monotonic.
    """

    def __init__(
        self, report_dir: Path, tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.path = report_dir / EVENTS_NAME
        self.report_dir = report_dir
        self.tell = tell
        self._clock = clock
        self._run = secrets.token_hex(4)
        self._start = clock()
        self._campaign = 0
        self._about: dict[str, Any] = {}
        self._next_progress = 0.0
        self._doubts: set[str] = set()
        self._notes: set[str] = set()
        self._broken = False

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._begin(event)
        elif isinstance(event, CampaignStarted):
            self._begin_campaign(event)
        elif isinstance(event, Progress):
            self._progress(event)
        elif isinstance(event, FindingFound):
            self._write("finding", {**self._about, **self._case(event.counterexample)})
        elif isinstance(event, Crashed):
            self._write("crashed", {**self._about, "path": str(event.path)})
        elif isinstance(event, CampaignFinished):
            self._end_campaign(event)
        else:
            self._write("run-finished", {"exit_code": event.code, "error": event.error})

    def note(self, text: str) -> None:
        """Record a message for the user, such as a report that could not be written."""
        self._write("note", {**self._about, "reason": None, "text": text})

    def _begin(self, event: RunStarted) -> None:
        head = {
            "schema": SCHEMA,
            "version": VERSION,
            "environment": collect_versions(),
            "report_dir": str(self.report_dir),
        }
        self._write(
            "run-started",
            {**head, "passes": list(event.passes), "meshes": list(event.meshes), "seed": event.seed},
        )  # fmt: skip

    def _begin_campaign(self, event: CampaignStarted) -> None:
        self._campaign += 1
        self._about = {"campaign": self._campaign, "pass": pass_reference(event.facts), "mesh": event.mesh}
        self._doubts, self._notes = set(), set()
        self._next_progress = 0.0
        facts = {"name": event.facts.name, "options": dict(event.facts.options), "source": event.facts.source}
        bounds = {"max_examples": event.max_examples, "max_time": event.max_time, "seed": event.seed}
        more = {
            "confirm": event.confirm,
            "domain": event.domain,
            "guarded": event.guarded,
            "earlier_failures": event.earlier,
            "corpus_cases": event.cases,
            "strategy": event.strategy,
        }
        self._write("campaign-started", {**self._about, **facts, **bounds, **more})

    def _progress(self, event: Progress) -> None:
        self._tell_reasons(event.statistics)
        now = self._clock()
        if now >= self._next_progress:
            self._next_progress = now + INTERVAL_S
            about = {**self._about, "phase": event.phase, "causes": event.causes, "behaviours": event.behaviours}
            self._write("progress", {**about, "statistics": _brief(event.statistics)})

    def _tell_reasons(self, counts: Statistics) -> None:
        """One event per reason for an inconclusive program or a note, when it first occurs."""
        for reason in counts.notes:
            if reason not in self._notes:
                self._notes.add(reason)
                self._write("note", {**self._about, "reason": reason, "text": counts.note_details.get(reason, "")})
        for reason in counts.doubts:
            if reason not in self._doubts:
                self._doubts.add(reason)
                detail = counts.doubt_details.get(reason, "")
                self._write("inconclusive", {**self._about, "reason": reason, "detail": detail})

    def _end_campaign(self, event: CampaignFinished) -> None:
        self._tell_reasons(event.statistics)
        known = [
            {"kind": e.kind, "fingerprint": e.fingerprint, "reason": e.reason, "programs": n} for e, n in event.known
        ]
        outcome = {"verdict": event.verdict, "why": event.why, "stop": event.stop, "seed": event.seed}
        ids = [case.id for case in event.counterexamples]
        more: dict[str, Any] = {"statistics": statistics(event.statistics), "searched": _searched(event.searched)}
        more["reached"] = [asdict(one) for one in event.reached]
        self._write("campaign-finished", {**self._about, **outcome, "findings": ids, "known": known, **more})
        self._about = {}

    def _case(self, case: Counterexample) -> dict[str, Any]:
        """The contents of a counterexample's block, as data."""
        finding, path = case.finding, self.report_dir / case.id / FILE_NAME
        facts: dict[str, Any] = {
            "id": case.id,
            "kind": finding.kind,
            "meaning": KINDS.get(finding.kind, ""),
            "check": finding.check,
            "severity": finding.severity,
            "title": finding.title,
            "detail": finding.detail,
            "node": finding.node,
            "rank": finding.rank,
            "stage": finding.data.get("stage"),
            "path": str(path),
            "executors": list(case.executors),
            "domain": case.domain,
            "notes": [{"reason": reason, "text": text} for reason, text in case.notes],
            "values": [{**asdict(v), "index": list(v.index)} for v in case.values],
            "others": [{"kind": other.kind, "title": other.title} for other in case.others],
            "program": {
                "ranks": case.program.world_size,
                "nodes": case.program.size,
                "nodes_drawn": case.size_drawn,
                "seed": case.program.seed,
                "shrink_cut": case.shrink_cut,
            },
            "fingerprint": None,
            "divergence": None,
            "blame": _blame(case.blame),
            "made_by": [asdict(line) for line in case.made_by],
            "end_to_end": _end_to_end(case.end_to_end),
            "graph": [],
            "reproduce": [],
        }
        try:
            diagnosis = diagnose(case.program, case.rewritten, finding)
            block = make_block(case, path, diagnosis)
            facts["fingerprint"] = fingerprint_of(case)
            facts["graph"] = [f"{line.mark} {line.text}" for line in block.graph]
            facts["reproduce"] = block.reproduce
            if diagnosis.first is not None:
                first = diagnosis.first
                facts["divergence"] = {
                    "sentence": str(first),
                    "node": first.node,
                    "relation": first.relation.kind,
                    "original": first.relation.original,
                }
        except Exception as error:  # noqa: BLE001 - what explains a finding must not keep it from being told
            self.tell(
                f"{self.path}: case {case.id} is reported without its explanation: {type(error).__name__}: {error}"
            )
        return facts

    def _write(self, name: str, facts: Mapping[str, Any]) -> None:
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        head = {"event": name, "time": now, "run": self._run, "elapsed": round(self._clock() - self._start, 3)}
        try:
            line = json.dumps(_plain_data({**head, **facts}), allow_nan=False)
            self._append(f"{line}\n".encode())
        except (OSError, ValueError, TypeError) as error:
            if not self._broken:
                self._broken = True
                self.tell(
                    f"{self.path} cannot be written: {getattr(error, 'strerror', None) or error}; the run continues"
                )

    def _append(self, line: bytes) -> None:
        """Append a line; starts a new line first if the last one is incomplete, because its run was killed or the disk
        was full."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line
            while line:
                line = line[os.write(descriptor, line) :]
        finally:
            os.close(descriptor)


def _searched(searched: SearchSummary | None) -> dict[str, Any] | None:
    """The result of a search, in numbers, and the lines that it suspects."""
    if searched is None:
        return None
    numbers = {name: getattr(searched, name) for name in ("behaviours", "tried", "further", "skipped", "exhausted")}
    suspects = [{**asdict(one), "score": round(one.score, 3)} for one in searched.suspects]
    return {"kernels": len(searched.kernels), **numbers, "suspects": suspects}


def _blame(blame: Blame | None) -> dict[str, Any] | None:
    return None if blame is None else {"sentence": str(blame), **encode_blame(blame)}


def _end_to_end(tried: EndToEnd | None) -> dict[str, Any] | None:
    return None if tried is None else {"sentence": str(tried), **encode_end_to_end(tried)}


def statistics(counts: Statistics) -> dict[str, Any]:
    """Return all counts of a campaign as plain data."""
    numbers = ("programs", "changed", "passed", "refuted", "inconclusive", "known", "shrinking", "elapsed")
    tables = (
        "rewrites",
        "fired",
        "ran",
        "findings",
        "hygiene",
        "doubts",
        "doubt_details",
        "notes",
        "note_details",
        "labels",
        "seconds",
    )
    return {name: getattr(counts, name) for name in numbers} | {name: dict(getattr(counts, name)) for name in tables}


def _brief(counts: Statistics) -> dict[str, Any]:
    """The data of a progress display: such an event comes every second, perhaps for hours."""
    left_out = ("rewrites", "doubt_details", "note_details", "labels", "seconds")
    return {name: value for name, value in statistics(counts).items() if name not in left_out}


def _plain_data(value: Any) -> Any:
    """JSON has no NaN and no infinities: these are written as text, like any other value that it does not support."""
    if isinstance(value, Mapping):
        return {str(key): _plain_data(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_data(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value if value is None or isinstance(value, (str, int, float, bool)) else repr(value)


__all__ = ["EVENTS_NAME", "INTERVAL_S", "SCHEMA", "VERSION", "EventLog", "statistics"]
