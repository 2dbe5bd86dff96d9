"""Options that take one of a few words."""

from __future__ import annotations

#: Names by which users choose a number domain.
DOMAINS = ("float64", "native", "exact")

#: Sizes that a program may run on: its own where these fit into memory, else small ones; its own; small ones.
SIZES = ("auto", "real", "small")

#: What each report is, by the name that `--report` takes.
REPORTS = {
    "html": "report.html and, for streams, trace.json beside every counterexample",
    "junit": "junit.xml for continuous integration",
    "ndjson": "events.ndjson, what happens as it happens",
}

#: What else can fail a run, by the name that `--fail-on` takes.
CONDITIONS = ("inconclusive", "vacuity")

__all__ = ["CONDITIONS", "DOMAINS", "REPORTS", "SIZES"]
