"""Runs on a disk that is full: `python -m tests.faults.full_disk DISK [BYTES]…`, in a mount namespace where DISK is small.

Prints one line of JSON per run. With numbers of bytes, each run has so much room: how it ended, what it told, and what is on the
disk that is not whole. Without, processes are started while there is no room, and again when there is.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tcverify import ProcessGroupPool, verify
from tcverify.application import Guarded, InProcess
from tcverify.application.loading import prepare_pass
from tcverify.campaign import Campaign, CampaignPlan, Corpus, Event, FindingFound
from tcverify.cases.counterexample import read_counterexample
from tcverify.errors import TcverifyError
from tcverify.report.formats import REPORTS, reports
from tcverify.report.script import ScriptReport
from tcverify.strategies import transformer_programs
from tcverify.system import scratch


def fill(disk: Path, room: int) -> None:
    """Leave so many bytes."""
    with (disk / "filler").open("wb", buffering=0) as file:
        usage = os.statvfs(disk)
        file.truncate(0)
        os.posix_fallocate(file.fileno(), 0, max(1, usage.f_bavail * usage.f_frsize - room))


def damaged(disk: Path) -> Iterator[str]:
    """What is on the disk and not whole. Of events, the last line may be: whatever reads them expects that of a run that died."""
    for path in disk.rglob("*"):
        if not path.is_file() or path.name == "filler":
            continue
        text = path.read_text()
        try:
            if path.name.startswith("."):
                raise ValueError("half-written")
            if path.name == "counterexample.json":
                read_counterexample(path)
            elif path.suffix in (".json", ".sarif"):
                json.loads(text)
            elif path.suffix == ".xml":
                ElementTree.fromstring(text)
            elif path.suffix == ".py":
                compile(text, str(path), "exec")
            elif path.suffix == ".html":
                assert text.rstrip().endswith("</html>")
            elif path.suffix == ".ndjson":
                for line in text.splitlines()[:-1]:
                    json.loads(line)
        except (ValueError, SyntaxError, AssertionError, TcverifyError, ElementTree.ParseError) as error:
            yield f"{path.relative_to(disk)}: {error}"


def campaign(disk: Path, room: int) -> None:
    """Run a campaign with a pass that has a finding, and everything that is written."""
    from tests.faults.test_campaign_faults import raises

    for path in disk.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    fill(disk, room)
    lines: list[str] = []
    kinds: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, FindingFound):
            kinds.append(event.counterexample.finding.kind)

    try:
        place = disk / "reports"
        plan = CampaignPlan(
            transformer_programs(world_size=2), "2 ranks", place, disk / "state", max_examples=5, shrink_time=2.0,
            corpus=Corpus(disk / "corpus", lines.append),
        )  # fmt: skip
        written = set(REPORTS) - {"github"}  # which prints
        subscribers = [listen, ScriptReport(place, lines.append), *reports(written, place, lines.append)]
        end = Campaign(InProcess(prepare_pass(raises, "", {})), plan, None, subscribers).run().verdict
    except TcverifyError as error:
        end = f"{type(error).__name__}: {error.message}"
    print(json.dumps({"end": end, "found": kinds, "told": lines, "damaged": list(damaged(disk))}), flush=True)


def processes(disk: Path) -> None:
    """Start ranks and a pass while there is no room, and again."""
    from tests.faults.test_pool_faults import summing

    place = scratch.directory()
    said: dict[str, Any] = {"inside": place.startswith(str(disk))}
    fill(disk, 0)
    with ProcessGroupPool(2, timeout=60) as pool:
        try:
            pool.run(summing())
        except TcverifyError as error:
            said["ranks"] = error.message
        with Guarded("tests.faults.passes:says_much") as subject:
            said["pass"] = verify(subject, summing()).status
        (disk / "filler").unlink()
        said["then"] = pool.run(summing()).finished
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    for size in sys.argv[2:]:
        campaign(Path(sys.argv[1]), int(size))
    if not sys.argv[2:]:
        processes(Path(sys.argv[1]))
