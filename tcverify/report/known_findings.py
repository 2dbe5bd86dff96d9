"""What a summary says about known findings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tcverify.campaign import CampaignFinished
from tcverify.campaign.events import Stop
from tcverify.cases.baseline import Baseline, KnownFinding, pass_reference
from tcverify.report.sanitize import plural, sanitize

#: Ends of a campaign after which unseen findings mean nothing.
_CUT: tuple[Stop, ...] = ("interrupted", "first finding")


def known_line(entry: KnownFinding, programs: int) -> str:
    """Return one line about a known finding that was seen."""
    why = entry.reason or "no reason given"
    return sanitize(f"known, {entry.kind}: {plural(programs, 'program')} ({' '.join(why.split())})")


def baseline_lines(baseline: Baseline, path: Path, finished: Sequence[CampaignFinished]) -> Iterator[str]:
    """Yield what a run says about its baseline: how many of its findings were seen, and which were not.

    Findings of passes that did not run, or not to the end, are not reported as unseen.
    """
    whole = {pass_reference(one.facts) for one in finished} - {
        pass_reference(one.facts) for one in finished if one.stop in _CUT
    }
    ran = {pass_reference(one.facts) for one in finished}
    seen = {entry.key for one in finished for entry, _ in one.known}
    asked = [entry for entry in baseline.known if entry.target in ran]
    others = len(baseline.known) - len(asked)
    elsewhere = f"; {others} for passes that did not run" if others else ""
    hits = sum(entry.key in seen for entry in asked)
    yield sanitize(f"baseline {path}: {hits} of {plural(len(asked), 'known finding')} found again{elsewhere}")
    for entry in asked:
        if entry.target in whole and entry.key not in seen:
            yield sanitize(
                f"  not found again, {entry.kind} of {entry.target}: {entry.fingerprint}; remove it from the baseline?"
            )


__all__ = ["baseline_lines", "known_line"]
