"""How Hypothesis is used: every setting that matters is named here, so that no profile of the user's changes a campaign."""

from __future__ import annotations

import sys

from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis.internal.conjecture import providers

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


def keep_constants_out() -> None:
    """Keep Hypothesis from parsing the modules of tcverify, for constants to draw: 1.5 s of every run, for none that fits.

    Only where tcverify lies outside site-packages. Modules of strategies of the user's own are looked through as ever.
    """
    seen = getattr(providers, "_seen_modules", None)  # none of the public API: without it the time is spent
    if isinstance(seen, set):
        seen.update(id(module) for name, module in list(sys.modules.items()) if name.partition(".")[0] == "tcverify")
