"""The exhibits of reports/gallery: which defect each shows, on what programs it is looked for, and how its case is made.

A case is made anew from nothing but this: programs are drawn by a seeded generator until one refutes the mutant with the expected
kind of finding while the sound pass passes on it, and that program is reduced as long as all of that stays so. What nothing draws
often enough has a program of its own.
"""

from __future__ import annotations

import fnmatch
import json
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from torch import fx

from tcverify.application import InProcess, Pair
from tcverify.application.loading import load_pass
from tcverify.cases.counterexample import Counterexample, encode_counterexample, make_counterexample
from tcverify.explain.diagnosis import diagnose
from tcverify.program import Finding, Program
from tcverify.report.script import to_script
from tcverify.shrink import reduce
from tcverify.strategies import DECODERS, all_meshes
from tcverify.system.files import write_atomically
from tcverify.verification.verifier import Verdict, verify

ROOT = Path(__file__).parents[2]
GALLERY = ROOT / "reports" / "gallery"

#: Programs that are drawn for one exhibit at most.
MOST_DRAWN = 1_500


Planted: TypeAlias = tuple[str, ...] | Callable[[fx.Node], bool]


@dataclass(frozen=True)
class Exhibit:
    """One class of defects.

    Attributes:
        slug: name of its folder.
        title: one line.
        family: which of a few large classes it belongs to, for pages that group them.
        what: what goes wrong, why nobody notices, where it was seen.
        mutant, sound: passes, as module:class. The sound one passes on the program that refutes the mutant.
        kind: of the finding.
        planted: which nodes of the rewritten graph the defect got wrong: patterns of their names, or a predicate.
        seen_in: known bugs of this class.
        strategy, world_size: what programs are drawn, on how many ranks.
        made: makes the program where none is drawn.
        options: of the mutant.
        deep: whether to verify deeply.
        domain: the arithmetic that shows it.
        data: what the finding's data must say.
    """

    slug: str
    title: str
    family: str
    what: str
    mutant: str
    sound: str
    kind: str
    planted: Planted = ()
    seen_in: tuple[str, ...] = ()
    strategy: str = "mixed"
    world_size: int = 2
    made: Callable[[], Program] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    deep: bool = False
    domain: str = "float64"
    data: dict[str, Any] = field(default_factory=dict)

    def subject(self) -> InProcess:
        return InProcess(load_pass(self.mutant, self.options))

    def sound_subject(self) -> InProcess:
        return InProcess(load_pass(self.sound))

    def finding(self, verdict: Verdict) -> Finding | None:
        """The finding that the exhibit is about."""
        for finding in verdict.findings:
            if finding.kind == self.kind and self.data.items() <= finding.data.items():
                return finding
        return None


def judge(exhibit: Exhibit, subject: InProcess, program: Program) -> Verdict:
    """Verify in lockstep, in this process, in the exhibit's domain."""
    return verify(subject, program, domain=exhibit.domain, deep=exhibit.deep)


def hidden(exhibit: Exhibit, subject: InProcess, program: Program) -> bool:
    """Whether float64 does not show a defect that another domain is there to show."""
    return exhibit.domain == "float64" or verify(subject, program).status == "passed"


def planted(exhibit: Exhibit, pair: Pair) -> list[str]:
    """The names of the planted nodes, over all ranks. A graph that is malformed is known as a listing alone."""
    wanted = exhibit.planted
    nodes = [node for graph in (pair.rewritten.graphs if pair.rewritten is not None else ()) for node in graph.nodes]
    if callable(wanted):
        return list(dict.fromkeys(node.name for node in nodes if node.op == "call_function" and wanted(node)))
    names = [node.name for node in nodes if node.op != "placeholder"] or [
        *re.findall(r"%(\w+) :.*call_function", pair.listing),
        "output",
    ]
    return [name for name in dict.fromkeys(names) if any(fnmatch.fnmatchcase(name, one) for one in wanted)]


def drawn(exhibit: Exhibit, seed: int = 0) -> Iterator[Program]:
    """The programs to look at, the same ones each time."""
    if exhibit.made is not None:
        yield exhibit.made()
        return
    random_bytes = random.Random(f"{seed} {exhibit.slug}")
    meshes, decoder = all_meshes(exhibit.world_size), DECODERS[exhibit.strategy]
    for _ in range(MOST_DRAWN):
        yield decoder.decode(random_bytes.choice(meshes), random_bytes.randbytes(decoder.width))


@dataclass(frozen=True)
class Made:
    """A case, and the names of its planted nodes."""

    case: Counterexample
    planted: list[str]


def make_case(exhibit: Exhibit, seconds: float = 60.0) -> Made | None:
    """Look for a program that shows the defect, reduce it, and return the counterexample; None where none is found.

    Args:
        seconds: that reducing may take.
    """
    subject, sound = exhibit.subject(), exhibit.sound_subject()
    best: Verdict | None = None

    def shows(program: Program) -> bool:
        nonlocal best
        verdict = judge(exhibit, subject, program)
        if exhibit.finding(verdict) is None or (exhibit.planted and not planted(exhibit, verdict.pair)):
            return False
        if judge(exhibit, sound, program).status != "passed" or not hidden(exhibit, subject, program):
            return False
        best = verdict
        return True

    first = next((program for program in drawn(exhibit) if shows(program)), None)
    if first is None:
        return None
    reduction = reduce(first, shows, time.monotonic() + seconds)
    assert best is not None
    case = make_counterexample(
        best,
        exhibit.kind,
        subject.facts,
        subject.contract,
        size_drawn=first.size,
        shrink_cut=reduction.cut,
        deep=exhibit.deep,
        pass_timeout=subject.timeout,
    )
    return Made(case, planted(exhibit, best.pair))


def write_case(exhibit: Exhibit, made: Made) -> Path:
    """Write the folder of an exhibit."""
    folder, case = GALLERY / exhibit.slug, made.case
    about = {
        "title": exhibit.title,
        "class": exhibit.family,
        "what": exhibit.what,
        "planted": made.planted,
        "seen_in": list(exhibit.seen_in),
    }
    encoded = json.dumps(encode_counterexample(case), indent=1, allow_nan=False)
    encoded = encoded.replace(f"{ROOT}/", "")  # tracebacks name files as this machine has them
    write_atomically(folder / "counterexample.json", encoded + "\n")
    write_atomically(folder / "repro.py", to_script(case))
    write_atomically(folder / "about.json", json.dumps(about, indent=1, ensure_ascii=False) + "\n")
    return folder


def first_bad_node(case: Counterexample) -> str | None:
    """The node of the rewritten graph that the report of a case names first."""
    first = diagnose(case.program, case.rewritten, case.finding).first
    return first.node if first is not None else case.finding.node
