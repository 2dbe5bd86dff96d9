"""A long run, watched from outside: whether memory stays flat, and whether anything is left when it has ended.

    python benchmarks/soak.py [--programs N] [--confirm none|gloo] [--rows N] [--markdown] [PASS]

Starts `tcverify run` on 2 ranks as a user would, and follows the events that it writes. A row per --rows-th part of the
programs but the last: how much memory the run's own process, the pass's and the ranks hold (PSS: shared pages are divided among
those that share them), how many processes, threads and files there are. What is left after its end, as processes or in the
temporary directory, is said in the last lines; the exit code is 1 if the run was not "passed", if anything was left, or if the
last quarter of the rows holds more than 10 % over the second.

Needs psutil: pip install -e '.[benchmarks]'.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import psutil

#: Seconds between two readings of the events.
LOOK = 0.5

#: Seconds that processes may take to end after the run has.
GRACE = 5.0

PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Row:
    """Resources of the run after this many programs; memory in MiB."""

    programs: int
    minutes: float
    own: float
    rest: float
    processes: int
    threads: int
    files: int

    @property
    def memory(self) -> float:
        return self.own + self.rest

    def show(self, markdown: bool) -> None:
        cells = (
            f"{self.programs:,}", f"{self.minutes:.0f}", f"{self.own:.0f}", f"{self.rest:.0f}", str(self.processes),
            str(self.threads), str(self.files),
        )  # fmt: skip
        show(cells, markdown)


def show(cells: tuple[str, ...], markdown: bool) -> None:
    print(f"| {' | '.join(cells)} |" if markdown else "".join(f"{cell:>14}" for cell in cells), flush=True)


def held(run: psutil.Process, programs: int, start: float) -> Row:
    """Look at all processes of a run."""
    own = rest = 0.0
    processes = threads = files = 0
    for one in (run, *run.children(recursive=True)):
        try:
            with one.oneshot():
                pss = one.memory_full_info().pss / 2**20
                threads += one.num_threads()
                files += one.num_fds()
        except psutil.Error:
            continue  # it has just ended
        processes += 1
        if one == run:
            own = pss
        else:
            rest += pss
    return Row(programs, (time.monotonic() - start) / 60, own, rest, processes, threads, files)


def verified(events: Path) -> Iterator[tuple[int, str]]:
    """Programs so far and the verdict, "" until there is one, at each reading."""
    programs, verdict, position = 0, "", 0
    while True:
        if events.is_file():
            with events.open() as lines:
                lines.seek(position)
                while (line := lines.readline()).endswith("\n"):
                    position = lines.tell()
                    event = json.loads(line)
                    if "statistics" in event:
                        programs = event["statistics"]["programs"]
                    if event["event"] == "campaign-finished":
                        verdict = event["verdict"]
        yield programs, verdict
        time.sleep(LOOK)


def watch(command: list[str], directory: Path, programs: int, rows: int, markdown: bool) -> tuple[list[Row], str, int]:
    """Run a command in a directory to its end and return its resources, its verdict and its exit code."""
    found: list[Row] = []
    step = programs // rows
    start = time.monotonic()
    environment = {**os.environ, "TMPDIR": str(directory / "tmp")}
    with (directory / "output.txt").open("w") as output:
        run = psutil.Popen(command, cwd=directory, env=environment, stdout=output, stderr=subprocess.STDOUT)
        for seen, verdict in verified(directory / "reports" / "events.ndjson"):
            if run.poll() is not None:
                return found, verdict, run.returncode
            if seen >= step * (len(found) + 1) and not verdict:  # at the end, ranks and pass are gone already
                found.append(held(run, seen, start))
                found[-1].show(markdown)
    raise AssertionError("events never end")


def left(directory: Path) -> list[str]:
    """What a run has left: processes, which are handed to this one when their parents end, and temporary files."""
    _, alive = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=GRACE)
    files = [path for path in (directory / "tmp").rglob("*") if not path.is_dir()]
    return [*(f"process {one.pid}: {one.name()}" for one in alive), *(f"file {one.name}" for one in files)]


@click.command()
@click.argument("subject", metavar="[PASS]", default="sequence_parallel")
@click.option("--programs", type=click.IntRange(100), default=10_000, show_default=True)
@click.option("--confirm", type=click.Choice(["none", "gloo"]), default="none", show_default=True)
@click.option("--rows", type=click.IntRange(4, 100), default=10, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True)
@click.option("--markdown", is_flag=True)
def main(subject: str, programs: int, confirm: str, rows: int, seed: int, markdown: bool) -> None:
    # A process that outlives its parent becomes a child of this process, and is found.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        (directory / "tmp").mkdir()
        options = f"--world-size 2 --confirm {confirm} --max-examples {programs} --seed {seed} --report ndjson".split()
        command = [sys.executable, "-m", "tcverify", "run", subject, *options]
        print(f"{subject} on 2 ranks, {'lockstep, then gloo' if confirm == 'gloo' else 'lockstep'}\n")
        names = ("programs", "minutes", "run, MiB", "others, MiB", "processes", "threads", "open files")
        show(names, markdown)
        if markdown:
            show(("--:",) * len(names), markdown)
        found, verdict, code = watch(command, directory, programs, rows, markdown)
        remains = left(directory)
        output = (directory / "output.txt").read_text()
    quarter = max(1, len(found) // 4)
    early, late = found[quarter : 2 * quarter], found[-quarter:]
    growth = sum(row.memory for row in late) / max(1.0, sum(row.memory for row in early)) - 1
    print(f"\nverdict {verdict or 'none'}, exit code {code}; left behind: {', '.join(remains) or 'nothing'}")
    print(f"memory, last quarter of the rows against the second: {growth:+.1%}")
    if verdict != "passed" or code or remains or growth > 0.1:
        print(f"\n{output[-4000:]}")
        sys.exit(1)


if __name__ == "__main__":
    main()
