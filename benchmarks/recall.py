"""Which of the known defects of PyTorch a stock run of their subjects finds, with the search and by drawing alone.

    python benchmarks/recall.py [--seconds N] [--world-size 2,4] [--seed N] [--side both|search|draw] [--keep DIR] [SUBJECT]...

The defects are those in reports/pytorch that this torch has and that a subject shows. Each of the subjects (or those named, as
torch:NAME) is verified as `tcverify run` does by default, but in lockstep alone, for --seconds by the clock, shared evenly by the
numbers of ranks. A defect counts as found if a counterexample has its kind, and either its fingerprint (of a wrong value, and one
of its ops; of DTensor, exactly its ops), or a program that contains that of the defect or is contained in it; or an exception
from the same statement; or a kind and a fingerprint listed in its facts, because a person has confirmed that such a
counterexample shows this defect. Counterexamples that show none of them are counted after the CPU time of the run: some are the
same defects in other forms, and the others deserve a review.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import click
import torch

from tcverify.campaign.patterns import ProgramPattern
from tcverify.cases.counterexample import FILE_NAME, Counterexample, read_counterexample
from tcverify.cases.fingerprint import fingerprint_of, raising_frame
from tcverify.ops import qualified_name
from tcverify.program import Program
from tcverify.pytorch.findings import TorchFinding, read_findings

ROOT = Path(__file__).resolve().parent.parent

#: Seconds between two readings of the CPU time of a run.
LOOK = 0.2

#: Subjects whose programs are whole tensors: a defect of theirs is one of an op, and what is left of a program when it is shrunk.
WHOLE = frozenset({"torch:dtensor"})

TICKS = os.sysconf("SC_CLK_TCK")

VERSION = torch.__version__.split("+")[0]


@dataclass(frozen=True)
class Known:
    """A defect, and how it is recognised.

    Attributes:
        ops: what the program computes; see `ops_of`.
        raised_by: the statement that raises, if it is in the function at fault; see `raising_statement`.
    """

    finding: TorchFinding
    fingerprint: str
    pattern: ProgramPattern
    ops: frozenset[str]
    raised_by: tuple[str, ...] | None

    def shown_by(self, case: Counterexample) -> bool:
        """Whether a counterexample shows it."""
        shown = fingerprint_of(case)
        if f"{case.finding.kind}: {shown}" in self.finding.also:
            return True
        if case.finding.kind != self.finding.kind:
            return False
        if self.raised_by is not None and raising_statement(case) == self.raised_by:
            return True
        ops, pattern = ops_of(case.program), ProgramPattern(case.program)
        if case.finding.kind == "pass-raised":
            alike = shown == self.fingerprint
        elif self.finding.subject in WHOLE and self.ops:
            alike = self.ops == ops
        else:
            alike = shown == self.fingerprint and (not self.ops or bool(self.ops & ops))
        if alike:
            return True
        return self.pattern.within(pattern) or pattern.within(self.pattern)


def defects_of(subjects: tuple[str, ...]) -> dict[str, list[Known]]:
    """The defects by subject."""
    by_subject: dict[str, list[Known]] = defaultdict(list)
    for finding in read_findings(ROOT / "reports" / "pytorch"):
        path = finding.counterexample
        if path is None or VERSION not in finding.affects or (subjects and finding.subject not in subjects):
            continue
        case = read_counterexample(path)
        statement = raising_statement(case)
        if statement is not None and not f"/{finding.cause}".endswith("/{}:{}".format(*statement)):
            statement = None  # a helper, which may raise for many reasons
        pattern = ProgramPattern(case.program)
        known = Known(finding, fingerprint_of(case), pattern, ops_of(case.program), statement)
        by_subject[finding.subject].append(known)
    return by_subject


def ops_of(program: Program) -> frozenset[str]:
    """What a program computes: its ops, whatever their overload, without collectives, waits, copies and parts of tuples."""
    names = {qualified_name(node.target) for node in program.graphs[0].nodes if node.op == "call_function"}
    plain = {name.partition(".")[0].rstrip("_") for name in names if not name.startswith("_c10d_functional")}
    return frozenset(plain - {"aten::clone", "python::getitem"})


def raising_statement(case: Counterexample) -> tuple[str, ...] | None:
    """The file, the function and the line of code that raised, if the pass raised."""
    frame = raising_frame(case.finding.detail) if case.finding.kind == "pass-raised" else None
    if frame is None:
        return None
    code = frame.string[frame.end() :].lstrip("\n").partition("\n")[0]
    return Path(frame["file"]).name, frame["function"], code.strip()


def verified(subject: str, side: str, seconds: float, sizes: str, seed: int, reports: Path) -> float:
    """Verify a subject and keep the counterexamples; return the CPU seconds that it took."""
    count = len(sizes.split(","))
    options = f"--world-size {sizes} --confirm none --max-time {seconds / count:.0f}s --seed {seed} --report ndjson"
    reports.mkdir(parents=True)
    command = [sys.executable, "-m", "tcverify", "run", subject, f"--{side}", "--report-dir", str(reports)]
    used: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as directory, (reports / "output.txt").open("w") as output:
        run = subprocess.Popen(
            [*command, *options.split()], cwd=directory, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        while run.poll() is None:
            time.sleep(LOOK)
            used.update(cpu_of_session(run.pid))
    return sum(used.values())


def cpu_of_session(session: int) -> dict[int, float]:
    """CPU seconds so far of each process of a session."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                found[int(path.parent.name)] = (int(fields[11]) + int(fields[12])) / TICKS
    return found


@click.command()
@click.argument("subjects", nargs=-1, metavar="[SUBJECT]...")
@click.option("--seconds", type=click.FloatRange(1), default=300.0, show_default=True)
@click.option("--world-size", default="2,4", show_default=True)
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True)
@click.option("--side", type=click.Choice(["both", "search", "draw"]), default="both", show_default=True)
@click.option("--keep", type=click.Path(path_type=Path), help="Where counterexamples are kept.  [default: nowhere]")
def main(subjects: tuple[str, ...], seconds: float, world_size: str, seed: int, side: str, keep: Path | None) -> None:
    """See the module."""
    sides = ("draw", "search") if side == "both" else (side,)
    totals: Counter[str] = Counter()
    defects = 0
    print("| subject | defect | " + " | ".join(f"{one}" for one in sides) + " |\n|---|---|" + "---|" * len(sides))
    with tempfile.TemporaryDirectory() as scratch:
        for subject, known in defects_of(subjects).items():
            found: dict[str, list[Counterexample]] = {}
            cells = []
            for one in sides:
                reports = (keep or Path(scratch)) / one / subject.replace(":", ".")
                spent = verified(subject, one, seconds, world_size, seed, reports)
                found[one] = [read_counterexample(path) for path in sorted(reports.glob(f"*/{FILE_NAME}"))]
                others = sum(not any(defect.shown_by(case) for defect in known) for case in found[one])
                cells.append(f"{spent:.0f} CPU s, {others} others")
            for defect in known:
                shown = [any(map(defect.shown_by, found[one])) for one in sides]
                totals.update(one for one, yes in zip(sides, shown, strict=True) if yes)
                row = (subject, defect.finding.folder.name, *("found" if yes else "-" for yes in shown))
                print("| " + " | ".join(row) + " |", flush=True)
            defects += len(known)
            print("| " + " | ".join((subject, "", *cells)) + " |", flush=True)
    print("\n" + ", ".join(f"{one}: {totals[one]} of {defects}" for one in sides))


if __name__ == "__main__":
    main()
