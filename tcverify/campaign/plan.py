"""Plan: what a campaign does. Data only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from hypothesis.strategies import SearchStrategy

from tcverify.application import Subject
from tcverify.campaign.corpus import Corpus, CorpusCase
from tcverify.campaign.coverage import Coverage
from tcverify.campaign.search import ProgramSearch
from tcverify.cases.baseline import Baseline, KnownFinding
from tcverify.cases.counterexample import Counterexample
from tcverify.cases.end_to_end import EndToEnd
from tcverify.execution import Executor
from tcverify.options import Options
from tcverify.program import Blame, Contract, Program
from tcverify.verification.verifier import Verdict

#: See `CampaignPlan.blame`.
Blamer: TypeAlias = Callable[[Subject, Verdict, str, bool, Executor | None], Blame]


@dataclass(frozen=True)
class CampaignPlan(Options):
    """What a campaign does; the bounds are in programs beside `first`.

    Attributes:
        programs: draws the programs.
        mesh: names the mesh for reports, e.g. "2 ranks".
        report_dir: where counterexamples are written, each as soon as it is found.
        state_dir: where the program in flight and earlier failures are kept.
        baseline: known findings, which are counted apart. None: there is none, and one counterexample per kind is kept.
        blame: names the rewrites that a finding comes from: called with the pass, the verdict and the kind, whether it takes a
            deep application, and what confirms. None: nobody asks.
        end_to_end: tries a case of a pass of PyTorch in its public API; None of cases that it is not for. None: nobody asks.
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
    contract: Contract | None = None
    baseline: Baseline | None = None
    collect: bool = False
    blame: Blamer | None = None
    end_to_end: Callable[[Counterexample], EndToEnd | None] | None = None
    coverage: Coverage | None = None
    told: Sequence[KnownFinding] = ()
    first: Sequence[CorpusCase] = ()
    corpus: Corpus | None = None
    search: ProgramSearch | None = None
    strategy: str | None = None
