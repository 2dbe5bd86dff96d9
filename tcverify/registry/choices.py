"""Options that take one of a few words."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, TypeAlias, TypeGuard, TypeVar, get_args

#: Names by which users choose a number domain.
DomainName: TypeAlias = Literal["float64", "native", "exact"]
DOMAINS: tuple[DomainName, ...] = get_args(DomainName)

#: Sizes at which a program may run: its own if they fit into memory, else small ones; its own; small ones.
SizesName: TypeAlias = Literal["auto", "real", "small"]
SIZES: tuple[SizesName, ...] = get_args(SizesName)

#: What drawn programs may have that no well-behaved compiler passes on, by the name that `--hostile` takes.
HostileName: TypeAlias = Literal["metadata"]
HOSTILE: tuple[HostileName, ...] = get_args(HostileName)

#: Description of each report, by the name that `--report` takes.
REPORTS = {
    "html": "report.html and, for streams, trace.json for every counterexample",
    "junit": "junit.xml for continuous integration",
    "ndjson": "events.ndjson, a log of events that is written during the run",
    "sarif": "tcverify.sarif, findings at lines of the pass, for editors and code scanning",
    "github": "annotations and a summary of the job, for GitHub Actions",
}

#: What fails a run, by the name that `--fail-on` takes: findings, a pass for which nothing was tested, a single
#: inconclusive program.
CONDITIONS = ("refuted", "vacuity", "inconclusive")

Word = TypeVar("Word", bound=str)


def is_one_of(text: object, words: Collection[Word]) -> TypeGuard[Word]:
    """Whether an external string is a word of a vocabulary; narrows its type."""
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
