"""Expected and actual values, in as few rows as the kind of finding allows; ranks that agree share a row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tcverify.cases.counterexample import Counterexample, RankValue
from tcverify.explain.diagnosis import Diagnosis
from tcverify.report.block import place_of
from tcverify.report.html.collectives import contribution
from tcverify.report.html.values import ranks_text
from tcverify.report.sanitize import sanitize

#: Number of rows that are shown.
MAX_CONTRASTS = 8


@dataclass(frozen=True, slots=True)
class Contrast:
    """Expected and actual values on some ranks.

    Attributes:
        where: the ranks, in words.
        what: which result it is; "" if the other columns say it.
        difference: in words; "" if it is not a number.
    """

    where: str
    what: str
    expected: str
    computed: str
    difference: str = ""


def make_contrasts(case: Counterexample, diagnosis: Diagnosis) -> tuple[tuple[Contrast, ...], int]:
    """Return the rows that are shown, and how many are not."""
    found: dict[Contrast, list[int]] = {}
    rows = _rows(case, diagnosis)
    for rank, contrast in rows:
        found.setdefault(contrast, []).append(rank)
    named = [
        Contrast(ranks_text(ranks) if c.where == "" else c.where, c.what, c.expected, c.computed, c.difference)
        for c, ranks in found.items()
    ]
    return tuple(named[:MAX_CONTRASTS]), max(0, len(named) - MAX_CONTRASTS)


def _rows(case: Counterexample, diagnosis: Diagnosis) -> Sequence[tuple[int, Contrast]]:
    """A row per rank, with `where` left open unless the row is about all ranks."""
    finding, after = case.finding, diagnosis.after
    if case.values:
        return [(v.rank, _value(v, case)) for v in case.values]
    where = f"rank {finding.rank}" if finding.rank is not None else "all ranks"
    if after is not None and after.mismatch is not None:
        sentence = "every member of the group calls the same collective"
        calls = sorted(after.mismatch[1].items())
        found = [(r, f"{call.collective.kind}({contribution(call.collective)})") for r, call in calls]
        return [(r, Contrast("", "", sentence, sanitize(text))) for r, text in found]
    if after is not None and after.hang is not None:
        return [
            (w.rank, Contrast("", "", "every rank finishes", sanitize(f"waits forever in {w.call.node}")))
            for w in after.hang.waits
        ]
    if finding.kind == "rewritten-raises":
        return [(0, Contrast(where, "", "finishes, as the original does", sanitize(finding.detail or finding.title)))]
    if finding.check == "application":
        return [(0, Contrast(where, "", "the pass returns a graph", sanitize(finding.title)))]
    return []


def _value(value: RankValue, case: Counterexample) -> Contrast:
    """One rank's largest difference. The difference of two residues has no meaning: they are equal or not."""
    difference = abs(value.actual - value.expected)
    residues = case.finding.domain == "exact" and value.actual.is_integer() and value.expected.is_integer()
    text = "" if residues else f"{difference:.3g}"
    if not residues and value.expected and math.isfinite(difference):
        text += f" ({100 * difference / abs(value.expected):.3g} %)"
    return Contrast("", place_of(value, case.program), f"{value.expected:.9g}", f"{value.actual:.9g}", text)


__all__ = ["Contrast", "make_contrasts"]
