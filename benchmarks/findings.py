"""Runs the script of every finding in PyTorch with the torch that runs this, and compares with what its folder says.

    python benchmarks/findings.py run [--jobs N] [--limit SECONDS] [--log FILE] [NAME]...
    python benchmarks/findings.py record LOG...

`run` prints a row per finding: what `finding.toml` says of this release, or of the newest measured one before it, and what the
script says now. It ends with 1 if a finding is fixed or has come back, or if a script tells neither. `record` writes what logs
of `run` hold into `affects` and `unaffected`; what a script does not tell in a release is in neither of them.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import torch

from tcverify.pytorch.findings import FILE_NAME, VERSIONS, TorchFinding, read_finding, read_findings, run_script

FOUND = Path(__file__).parents[1] / "reports" / "pytorch"
VERSION = torch.__version__.partition("+")[0]

#: What the outcome of a script says of a release: whether it has the defect. Any other says nothing.
SHOWS = {"bad": True, "good": False, "not there": False}


@click.group()
def main() -> None:
    """The findings in PyTorch, in the torch that runs this."""


@main.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--jobs", type=click.IntRange(1), default=2, show_default=True, help="Scripts at a time.")
@click.option("--limit", type=float, default=240.0, show_default=True, help="Seconds per script.")
@click.option("--log", type=click.Path(path_type=Path), help="A line of JSON per script goes there.")
@click.option("--found", type=click.Path(path_type=Path, exists=True), default=FOUND, help="Directory of findings.")
def run(names: tuple[str, ...], jobs: int, limit: float, log: Path | None, found: Path) -> None:
    """Run the scripts of findings (default: all)."""
    findings = [read_finding(found / name) for name in names] or list(read_findings(found))
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(jobs) as pool:
        print(f"torch {torch.__version__}\n\n| finding | said | now | seconds |\n|---|---|---|--:|", flush=True)
        records = list(pool.map(lambda one: ran(one, Path(scratch), limit, log), findings))
    changes = [line for one, record in zip(findings, records, strict=True) if (line := change(one, record))]
    print(f"\n{len(changes)} of {len(findings)} differ from what is said", *changes, sep="\n")
    sys.exit(bool(changes))


def ran(one: TorchFinding, scratch: Path, limit: float, log: Path | None) -> dict[str, Any]:
    """Run one script, print its row, and return its record."""
    place = scratch / one.folder.name
    place.mkdir()
    start = time.monotonic()
    outcome, out = run_script(one.script, place, limit)
    seconds = round(time.monotonic() - start, 1)
    record = {"torch": VERSION, "finding": one.folder.name, "outcome": outcome, "seconds": seconds, "out": out[-2000:]}
    said = {True: "bad", False: "good", None: ""}[one.shows_in(VERSION)]
    print(f"| `{one.folder.name}` | {said} | {outcome} | {seconds} |", flush=True)
    if log is not None:
        with log.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(record) + "\n")
    return record


def change(one: TorchFinding, record: dict[str, Any]) -> str:
    """In words, how a record differs from what the folder says of the release; empty if it does not."""
    said, now = one.shows_in(record["torch"]), SHOWS.get(record["outcome"])
    name = one.folder.name
    if now is None and said is not None:
        last = " ".join(record["out"].split())[-300:]
        return f"{name}: its script tells nothing, {record['outcome']}: {last}"
    if now is None or said is None or now == said:
        return ""
    return f"{name}: is fixed ({record['outcome']})" if said else f"{name}: has come back"


# ----------------------------------------------------------------------------------------------------------- recording


@main.command()
@click.argument("logs", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--found", type=click.Path(path_type=Path, exists=True), default=FOUND, help="Directory of findings.")
def record(logs: tuple[Path, ...], found: Path) -> None:
    """Write what logs say of the releases in VERSIONS into the folders of findings."""
    shown: dict[str, dict[str, bool | None]] = defaultdict(dict)
    for log in logs:
        for line in log.read_text(encoding="utf-8").splitlines():
            one = json.loads(line)
            shown[one["finding"]][one["torch"]] = SHOWS.get(one["outcome"])
    for version in sorted({version for versions in shown.values() for version in versions} - {*VERSIONS}):
        print(f"torch {version} is left out: it is not in VERSIONS of tcverify/pytorch/findings.py")
    for name, versions in sorted(shown.items()):
        finding = read_finding(found / name)
        kept = {**dict.fromkeys(finding.affects, True), **dict.fromkeys(finding.unaffected, False), **versions}
        path = finding.folder / FILE_NAME
        text = path.read_text(encoding="utf-8")
        for key, wanted in (("affects", True), ("unaffected", False)):
            listed = (version for version in VERSIONS if kept.get(version) is wanted)
            text = written(text, key, listed)
        path.write_text(text, encoding="utf-8")
        read_finding(finding.folder)


def written(text: str, key: str, versions: Iterable[str]) -> str:
    """The text of a `finding.toml` with another list of versions; a comment behind the list stays."""
    made = ", ".join(f'"{version}"' for version in versions)
    return re.sub(rf"(?m)^{key} = \[.*?\]", f"{key} = [{made}]", text)


if __name__ == "__main__":
    main()
