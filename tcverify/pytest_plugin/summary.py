"""What the plugin says about items at the end of a session. Needs no torch: the controller of pytest-xdist has none loaded."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tcverify.report.sanitize import plural, sanitize

if TYPE_CHECKING:
    from _pytest.terminal import TerminalReporter

#: Attribute of a test report that carries `SummaryItem.to_data()` from workers to the controller.
ATTRIBUTE = "tcverify"


@dataclass(frozen=True, slots=True)
class SummaryCase:
    """A counterexample, as the summary lists it.

    Attributes:
        annotation: the command that makes GitHub Actions show it at a line of the pass; "" elsewhere.
    """

    id: str
    kind: str
    name: str
    replay: str
    annotation: str = ""


@dataclass(frozen=True, slots=True)
class SummaryItem:
    """What the campaign of one item came to.

    Attributes:
        verdict: "passed", "refuted", "inconclusive" or "nothing tested".
        changed: programs that the pass changed.
        fired: programs in which the pass reports each of its patterns.
        doubts: inconclusive programs by reason.
        notes: further lines for people.
        said: what verdicts say beside, e.g. that a number domain had to step aside, in a line per reason.
    """

    nodeid: str
    verdict: str
    programs: int
    passed: int
    refuted: int
    inconclusive: int
    changed: int
    fired: dict[str, int]
    doubts: dict[str, int]
    seed: int
    cases: tuple[SummaryCase, ...] = ()
    notes: tuple[str, ...] = ()
    said: tuple[str, ...] = ()

    def to_data(self) -> dict[str, Any]:
        """Return plain data, which travels between processes."""
        data = {name: getattr(self, name) for name in self.__slots__}
        data["cases"] = [[getattr(case, name) for name in SummaryCase.__slots__] for case in self.cases]
        data["notes"], data["said"] = list(self.notes), list(self.said)
        return data

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> SummaryItem:
        """Read what `to_data` wrote."""
        cases = tuple(SummaryCase(*case) for case in data["cases"])
        return cls(**{**data, "cases": cases, "notes": tuple(data["notes"]), "said": tuple(data["said"])})

    def properties(self) -> Iterator[tuple[str, object]]:
        """Yield the properties of the item, for JUnit."""
        yield "tcverify_verdict", self.verdict
        for name in ("programs", "passed", "refuted", "inconclusive", "changed", "seed"):
            yield f"tcverify_{name}", getattr(self, name)
        for pattern, number in sorted(self.fired.items()):
            yield f"tcverify_fired_{pattern}", number
        if self.cases:
            yield "tcverify_cases", " ".join(case.id for case in self.cases)

    def line(self) -> str:
        """Return one line about the campaign."""
        parts = [plural(self.programs, "program"), f"changed {_share(self.changed, self.programs)}"]
        parts += [f"{sanitize(name)} {_share(number, self.programs)}" for name, number in sorted(self.fired.items())]
        if self.refuted:
            parts.append(f"{self.refuted} refuted")
        if self.inconclusive:
            reasons = ", ".join(f"{number} {reason}" for reason, number in sorted(self.doubts.items()))
            parts.append(f"{self.inconclusive} inconclusive ({reasons})")
        return f"{', '.join(parts)}; seed {self.seed}"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / max(1, whole):.0f} %"


def write_summary(
    reporter: TerminalReporter,
    items: Iterable[SummaryItem],
    failed: Container[str],
    notes: Iterable[str],
    *,
    brief: bool,
) -> None:
    """Write the section about all items: what each came to, then the counterexamples.

    Args:
        failed: node ids of the items whose test failed, for whatever reason.
        brief: leave out the items that passed without a word.
    """
    items = sorted(items, key=lambda item: [int(p) if p.isdecimal() else p for p in re.split(r"(\d+)", item.nodeid)])
    lines: list[tuple[str, dict[str, bool]]] = []
    for item in items:
        if item.verdict == "passed" and not (item.inconclusive or item.said) and brief:
            continue
        color = {"passed": "green", "refuted": "red"}.get(item.verdict, "yellow")
        but = ", but the test failed" if item.verdict == "passed" and item.nodeid in failed else ""
        lines.append((f"{item.verdict}{but}: {item.nodeid}", {color: True}))
        lines.append((f"  {item.line()}", {}))
        lines += [(f"  {sanitize(note)}", {"yellow": True}) for note in (*item.said, *item.notes)]
    cases = {case.id: case for item in items for case in item.cases}
    lines += [
        (f"{c.id} {sanitize(c.name)}: {c.kind}{f'   {c.replay}' if c.replay else ''}", {}) for c in cases.values()
    ]
    lines += [(case.annotation, {}) for case in cases.values() if case.annotation]
    lines += [(sanitize(note), {"yellow": True}) for note in notes]
    if lines:
        reporter.write_sep("=", "tcverify")
        for line, markup in lines:
            reporter.write_line(line, **markup)
