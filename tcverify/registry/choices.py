"""Options that take one of a few words."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, TypeAlias, TypeGuard, TypeVar, get_args

#: Names by which users choose a number domain.
DomainName: TypeAlias = Literal["float64", "native", "exact"]
DOMAINS: tuple[DomainName, ...] = get_args(DomainName)

#: Sizes that a program may run on: its own where these fit into memory, else small ones; its own; small ones.
SizesName: TypeAlias = Literal["auto", "real", "small"]
SIZES: tuple[SizesName, ...] = get_args(SizesName)

#: What programs may do to a pass that no well-behaved compiler does, by the name that `--hostile` takes.
HostileName: TypeAlias = Literal["metadata"]
HOSTILE: tuple[HostileName, ...] = get_args(HostileName)

#: What each report is, by the name that `--report` takes.
REPORTS = {
    "html": "report.html and, for streams, trace.json for every counterexample",
    "junit": "junit.xml for continuous integration",
    "ndjson": "events.ndjson, a log of events that is written during the run",
    "sarif": "tcverify.sarif, findings at lines of the pass, for editors and code scanning",
    "github": "annotations and a summary of the job, for GitHub Actions",
}

#: What fails a run, by the name that `--fail-on` takes: findings, a pass that nothing tested, a single inconclusive program.
CONDITIONS = ("refuted", "vacuity", "inconclusive")

Word = TypeVar("Word", bound=str)


def is_one_of(text: object, words: Collection[Word]) -> TypeGuard[Word]:
    """Whether a text from outside is one of a vocabulary's words. Type checkers then know it as such."""
    return isinstance(text, str) and text in words


__all__ = [
    "CONDITIONS",
    "DOMAINS",
    "HOSTILE",
    "REPORTS",
    "SIZES",
    "DomainName",
    "HostileName",
    "SizesName",
    "Word",
    "is_one_of",
]
