"""How Hypothesis is used: every setting that matters is named here, so that no profile of the user's changes a campaign."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, Verbosity, settings

SETTINGS = settings(
    phases=(Phase.generate,),  # `reduce` shrinks: choices that are minimal do not make minimal programs
    database=None,  # a given seed switches Hypothesis' own off; `Failures` stands in
    deadline=None,
    verbosity=Verbosity.quiet,
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
    print_blob=False,
    derandomize=False,
    backend="hypothesis",
)
