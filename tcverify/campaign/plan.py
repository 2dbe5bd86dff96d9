"""Plan: what a campaign does. Data only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from hypothesis.strategies import SearchStrategy

from tcverify.application import Subject
from tcverify.baseline import Baseline, Known
from tcverify.campaign.corpus import Case, Corpus
from tcverify.campaign.coverage import Coverage
from tcverify.campaign.search import Search
from tcverify.execution import Executor
from tcverify.program import Blame, Contract, Program
from tcverify.verifier import Verdict

#: See `Plan.blame`.
Blamer: TypeAlias = Callable[[Subject, Verdict, str, bool, Executor | None], Blame]


@dataclass(frozen=True)
class Plan:
    """What a campaign does.

    Attributes:
        programs: draws the programs.
        mesh: names the mesh for reports, e.g. "2 ranks".
        report_dir: where counterexamples are written, each as soon as it is found.
        state_dir: where the program in flight and earlier failures are kept.
        max_examples, max_time: bounds, in programs beside `first` and in seconds; at least one is set.
        domain: the number domain that values are judged in: "float64", "native" or "exact"; see `verify`.
        shrink_time: seconds after which no new trial of shrinking one finding begins; a trial that hangs then still takes
            its time-out.
        fail_fast: stop at the first finding that is not known.
        baseline: known findings, which are counted apart. None: there is none, and one counterexample per kind is kept.
        earlier: try what failed in earlier runs first, and remember what fails in this one.
        deep: apply the pass deeply (see `verify`) to every program, not to some.
        blame: names the rewrites that a finding comes from: called with the pass, the verdict and the kind, whether it takes a
            deep application, and what confirms. None: nobody asks.
        coverage: gathers what the pass reaches of its code, for passes that are asked to record that; see `Guarded`.
        collect: keep one counterexample per fingerprint instead of one per kind, to write a baseline.
        told: findings of which there are counterexamples already: they count, but are not kept again.
        first: cases that are tried before programs are drawn.
        corpus: where programs that show something new are kept.
        search: makes programs of what the pass did with earlier ones. None: all are drawn.
        strategy: what `programs` is called in records; None: programs that come from elsewhere.
    """

    programs: SearchStrategy[Program]
    mesh: str
    report_dir: Path
    state_dir: Path
    max_examples: int | None = 200
    max_time: float | None = None
    seed: int = 0
    contract: Contract | None = None
    checks: Sequence[str] | None = None
    domain: str = "float64"
    shrink_time: float = 30.0
    fail_fast: bool = False
    baseline: Baseline | None = None
    collect: bool = False
    earlier: bool = True
    deep: bool = False
    blame: Blamer | None = None
    coverage: Coverage | None = None
    told: Sequence[Known] = ()
    first: Sequence[Case] = ()
    corpus: Corpus | None = None
    search: Search | None = None
    strategy: str | None = None
