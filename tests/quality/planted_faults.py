"""Puts small faults into a copy of tcverify, one at a time, and runs the tests that can reach each until one fails.

    python -m tests.quality.planted_faults
    python -m tests.quality.planted_faults --only race-waw-forgotten
    python -m tests.quality.planted_faults --sample 10 --seed 42 --jobs 2

The faults are mistakes that an engineer could make: see `fault_list`. One that no test shows is a missing test. The test that a
fault names runs first; where it is gone or passes, test files run nearest first (`nearest`), so that most faults are found in
seconds. Every test that shows one is run once more without any fault, since a test that fails there shows nothing. Exits with 1
where a fault survives or cannot be judged; one whose time is over does neither, and is told.
"""

from __future__ import annotations

import argparse
import itertools
import os
import queue
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tests.quality.fault_list import DoesNotApply, Fault, read_faults
from tests.quality.nearest import ROOT, nearest

#: Seconds for the tests of one fault.
LIMIT = 300.0

#: How many test files are collected together, from the nearest on; the last number again until all are done.
CHUNKS = (3, 7, 20, 60)

#: These tests say that faults fit the sources as they are, and so fail where one is planted.
LEFT_OUT = ("tests/quality/test_planted_faults.py",)

#: Seconds that a single test may take, where the project allows more.
TEST_LIMIT = 120

KILLED, SURVIVED, UNJUDGED, OVERDUE = "killed", "SURVIVED", "NOT JUDGED", "NOT DONE"

_FAILED = re.compile(r"^(?P<what>FAILED|ERROR) (?P<test>tests/\S+?\.py(?P<item>::.*?)?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a fault.

    Attributes:
        result: `KILLED`, `SURVIVED`, `UNJUDGED`, or `OVERDUE` where the time was over before all tests had run.
        test: that failed.
        files: how many test files were run, nearest first, and `reached` how many can reach the fault.
        seconds: how long that took.
        problem: why it could not be judged, or what was left out.
    """

    fault: Fault
    result: str
    test: str = ""
    files: int = 0
    reached: int = 0
    seconds: float = 0.0
    problem: str = ""

    def __str__(self) -> str:
        said = f"by {self.test}" if self.result == KILLED else self.problem
        if self.result in (SURVIVED, OVERDUE):
            said = f"{self.files} of {self.reached} test files{', ' if said else ''}{said}"
        return f"{self.result:8} {self.seconds:6.1f} s  {self.fault.area}: {self.fault.name}  {said}"


# -------------------------------------------------------------------------------------------------------------- copies


def copy_of(root: Path, into: Path) -> Path:
    """Copy a project's sources: what git knows or would add, links as links; without git, all but what is hidden."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        names = [name for name in listed.stdout.split("\0") if name]
    else:
        names = [
            str(path.relative_to(root))
            for path in sorted(root.rglob("*"))
            if (path.is_file() or path.is_symlink()) and not _left_out(path.relative_to(root))
        ]
    for name in dict.fromkeys(names):
        if os.path.lexists(root / name):  # else removed, and not yet committed
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, into / name, follow_symlinks=False)
    return into


def _left_out(path: Path) -> bool:
    return path.parts[0] != ".ci" and any(part.startswith(".") or part == "__pycache__" for part in path.parts)


@contextmanager
def copies(root: Path, number: int) -> Iterator[queue.SimpleQueue[Path]]:
    """So many copies of a project, each beside a folder for the temporary files of its tests."""
    with tempfile.TemporaryDirectory(prefix="planted-", ignore_cleanup_errors=True) as scratch:
        free: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for job in range(number):
            place = Path(scratch) / str(job)
            (place / "t").mkdir(parents=True)
            free.put(copy_of(root, place / "project"))
        yield free


# --------------------------------------------------------------------------------------------------------------- tests


def run_tests(project: Path, tests: Sequence[str], seconds: float, *, stop: bool = True) -> tuple[int | None, str]:
    """Run tests of a project in a process of their own; returns its exit code, None where time was up, and what it said.

    Args:
        stop: at the first that fails.
    """
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--tb=short",
        "--color=no",
        "--no-header",
    ]
    command += ["-x"] if stop else []
    command += [f"--timeout={TEST_LIMIT}", *tests]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_", "TCVERIFY_"))
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # bytecode is kept: what has not changed is compiled once
    environment |= {
        "PYTHONPATH": str(project),
        "CI": "true",  # Hypothesis draws the same examples every time
        "TMPDIR": str(project.parent / "t"),
    }
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        running = subprocess.Popen(
            command, cwd=project, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = running.wait(max(seconds, 0.1))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(running)
        said.seek(0)
        return code, said.read()


def end(running: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a process, of its children, and of its group."""
    for process in [*_children(running.pid), running.pid]:
        with suppress(ProcessLookupError, PermissionError):
            (os.killpg if process == running.pid else os.kill)(process, signal.SIGKILL)
    running.wait()


def _children(parent: int) -> list[int]:
    """All processes below one, where the system says so."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    found = [parent]
    for process in found:
        found += parents.get(process, [])
    return found[1:]


def judge(project: Path, fault: Fault, limit: float = LIMIT) -> Outcome:
    """Plant a fault in a copy of a project, and run the tests that can reach it until one fails."""
    began = time.monotonic()

    def outcome(result: str, **more: object) -> Outcome:
        return replace(Outcome(fault, result, seconds=time.monotonic() - began), **more)

    tests = [str(test) for test in nearest([fault.file], project) if str(test) not in LEFT_OUT]
    done = 0
    try:
        with fault.planted(project):
            for chunk in _chunks(fault, tests):
                known = chunk == [fault.test]
                code, said = run_tests(project, chunk, limit - (time.monotonic() - began))
                if code is None:
                    left = f"and then {limit:.0f} s were over"
                    return outcome(OVERDUE, files=done, reached=len(tests), problem=left)
                done += 0 if known else len(chunk)
                failed = _FAILED.search(said)
                if failed is not None and failed["item"]:
                    return outcome(KILLED, test=failed["test"], files=done, reached=len(tests))
                if code not in (0, 5) and not known:  # 5: all of them are left out
                    return outcome(UNJUDGED, problem=f"pytest exits with {code}: {_last(said)}")
    except DoesNotApply as error:
        return outcome(UNJUDGED, problem=str(error))
    return outcome(SURVIVED, files=done, reached=len(tests))


def _chunks(fault: Fault, tests: Sequence[str]) -> Iterator[list[str]]:
    """What is run together: the test that a fault names, which need not be there any more, and then test files."""
    if fault.test:
        yield [fault.test]
    begin = 0
    for size in itertools.chain(CHUNKS, itertools.repeat(CHUNKS[-1])):
        if begin >= len(tests):
            return
        yield list(tests[begin : begin + size])
        begin += size


def _last(said: str) -> str:
    """The line that says most of why pytest could not run tests."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("E  ")]
    return (errors or lines or ["nothing said"])[-1].removeprefix("E").strip()


def without_faults(project: Path, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Run once more the tests that have shown faults, in the project as it is; what fails there has shown nothing."""
    tests = sorted({one.test for one in outcomes if one.result == KILLED})
    if not tests:
        return list(outcomes)
    code, said = run_tests(project, tests, LIMIT + TEST_LIMIT * len(tests), stop=False)
    failing = {match["test"] for match in _FAILED.finditer(said)}
    if code != 0 and not failing:
        failing = set(tests)
    problem = "the test that fails also fails without it:"
    return [
        replace(one, result=UNJUDGED, problem=f"{problem} {one.test}")
        if any(one.test == test or one.test.startswith(f"{test}::") for test in failing)
        else one
        for one in outcomes
    ]


def judge_all(faults: Sequence[Fault], *, root: Path = ROOT, jobs: int = 1, limit: float = LIMIT) -> Iterator[Outcome]:
    """Judge faults, at most so many at a time, and yield what became of them, in order; raises nothing."""
    with copies(root, jobs) as free:

        def one(fault: Fault) -> Outcome:
            project = free.get()
            try:
                return judge(project, fault, limit)
            finally:
                free.put(project)

        with ThreadPoolExecutor(jobs) as pool:
            outcomes = []
            for outcome in pool.map(one, faults):
                print(outcome, file=sys.stderr, flush=True)
                outcomes.append(outcome)
        yield from without_faults(free.get(), outcomes)


# ------------------------------------------------------------------------------------------------------------ the output


def as_markdown(outcomes: Sequence[Outcome]) -> str:
    """A table of what became of faults."""
    rows = ["| area | fault | found by | s |", "|---|---|---|---|"]
    for one in outcomes:
        said = f"`{one.test}`" if one.result == KILLED else f"**{one.result}** {one.problem}".strip()
        rows.append(f"| {one.fault.area} | {one.fault.name} | {said} | {one.seconds:.1f} |")
    return "\n".join(rows)


def chosen(faults: Sequence[Fault], only: Sequence[str], sample: int | None, seed: str) -> list[Fault]:
    """The faults of these names, or a sample of all that depends on the seed alone. Raises `SystemExit`."""
    unknown = set(only) - {fault.name for fault in faults}
    if unknown:
        raise SystemExit(f"no fault is named {', '.join(sorted(unknown))}")
    by_name = {fault.name: fault for fault in faults}
    found = [by_name[name] for name in dict.fromkeys(only)] or list(faults)
    if sample is None or sample >= len(found):
        return found
    picked = set(random.Random(seed).sample([fault.name for fault in found], sample))
    return [fault for fault in found if fault.name in picked]


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Plant small faults in a copy of tcverify, and say which test shows each."
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these faults")
    parser.add_argument("--sample", type=int, metavar="N", help="so many faults, which --seed picks")
    parser.add_argument("--seed", default="0", help="any text, such as the name of a commit")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="how many faults at a time")
    parser.add_argument("--limit", type=float, default=LIMIT, metavar="SECONDS", help="for the tests of one fault")
    parser.add_argument("--markdown", action="store_true", help="print a table")
    options = parser.parse_args()
    began = time.monotonic()
    faults = chosen(read_faults(), options.only, options.sample, options.seed)
    outcomes = list(judge_all(faults, jobs=options.jobs, limit=options.limit))
    if options.markdown:
        print(as_markdown(outcomes))
    for one in outcomes:
        if one.result != KILLED:
            print(f"{one}\n  {one.fault.file}: {one.fault.why}")
    killed = sum(one.result == KILLED for one in outcomes)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{killed} of {len(outcomes)} planted faults are found by a test; {time.monotonic() - began:.0f} s, "
        f"{used.ru_utime + used.ru_stime:.0f} s of CPU time"
    )
    return 0 if all(one.result in (KILLED, OVERDUE) for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
