"""Fault localisation: which lines of a pass the programs that go wrong have in common, and those that pass do not (Ochiai).

Abreu, Zoeteweij, van Gemund: On the accuracy of spectrum-based fault localization (2007). Kernels are the programs: they are
small and unlike each other, and it is known of each of them all that it reaches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tcverify.campaign.search.kernels import Kernel

#: Ochiai's coefficient from which on a line says something.
LEAST = 0.5

#: By how much the share of what goes wrong is larger than that of what passes; and most of the lines that are named.
APART, MOST = 0.5, 5


@dataclass(frozen=True, slots=True)
class Suspect:
    """Lines of a pass, one after the other, that programs which go wrong have in common.

    Attributes:
        first, last: line numbers.
        wrong, passed: kernels that reach them and are refuted, or pass.
        of_wrong, of_passed: all kernels that are refuted, or pass.
    """

    file: str
    first: int
    last: int
    wrong: int
    passed: int
    of_wrong: int
    of_passed: int

    @property
    def score(self) -> float:
        """Ochiai's coefficient: 1 where all that is refuted reaches them, and nothing that passes."""
        return self.wrong / math.sqrt(self.of_wrong * (self.wrong + self.passed))


def suspects_of(kernels: Iterable[Kernel]) -> tuple[Suspect, ...]:
    """The lines by Ochiai's coefficient, the largest first; none where they do not tell what is refuted from what passes."""
    judged = [kernel for kernel in kernels if kernel.wrong is not None and kernel.changed]
    reached = [({(p.file, p.line) for p in kernel.reached if p.outcome < 0}, kernel.wrong) for kernel in judged]
    of_wrong = sum(kernel.wrong is True for kernel in judged)
    of_passed = len(judged) - of_wrong
    if not of_wrong or not of_passed:
        return ()
    found: list[Suspect] = []
    for file, line in sorted(set().union(*(lines for lines, _ in reached))):
        wrong = sum((file, line) in lines for lines, refuted in reached if refuted)
        passed = sum((file, line) in lines for lines, refuted in reached if not refuted)
        last = found[-1] if found else None
        if last is not None and (last.file, last.last + 1, last.wrong, last.passed) == (file, line, wrong, passed):
            found[-1] = Suspect(file, last.first, line, wrong, passed, of_wrong, of_passed)
        else:
            found.append(Suspect(file, line, line, wrong, passed, of_wrong, of_passed))
    telling = [one for one in found if one.score >= LEAST and one.wrong / of_wrong - one.passed / of_passed >= APART]
    return tuple(sorted(telling, key=lambda one: -one.score)[:MOST])


__all__ = ["Suspect", "suspects_of"]
