"""Chooses small numbers for the sizes of a program: one for each, such that what holds between the sizes goes on holding.

Every number n becomes r(n) · n. Numbers that are tied share r; where a view merges or splits dims, the products of r agree, so
that log r solves linear equations. Of the solutions one is taken that makes all numbers small, whole and distinct.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

#: Numbers up to this one stay: numbers of heads, experts and ranks mean more than that they are equal.
SMALL = 8

#: The least that a larger number becomes: of one element a norm is the sign.
LEAST = 2

#: How many values are tried for what numbers of one kind have in common.
TRIED = 64


class Sizes:
    """What is known of the numbers of a program."""

    def __init__(self) -> None:
        self._above: dict[int, int] = {}
        self._products: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self._pinned: set[int] = set()
        self._less: dict[int, tuple[int, int]] = {}  # a number that is another one less a few

    @property
    def numbers(self) -> list[int]:
        """All numbers, in order."""
        return sorted(self._above)

    def add(self, *numbers: int) -> None:
        for number in numbers:
            if number >= 1 and number not in self._above:
                self._above[number] = number
                if number <= SMALL:
                    self._pinned.add(number)

    def pin(self, *numbers: int) -> None:
        """Let numbers stay what they are."""
        self.add(*numbers)
        self._pinned.update(numbers)

    def tie(self, *numbers: int) -> None:
        """Let numbers be scaled alike."""
        self.add(*numbers)
        tops = [self._top(number) for number in numbers if number >= 1]
        for other in tops[1:]:
            self._above[self._top(other)] = self._top(tops[0])

    def shorten(self, number: int, other: int) -> None:
        """Let a number stay a few less than another one."""
        self.add(number, other)
        self._less.setdefault(number, (other, other - number))

    def multiply(self, left: Iterable[int], right: Iterable[int]) -> None:
        """Let two products stay equal."""
        a, b = sorted(left), sorted(right)
        self.add(*a, *b)
        for number in list(a):
            if number in b:
                a.remove(number)
                b.remove(number)
        if len(a) == len(b) == 1:
            self.tie(a[0], b[0])
        elif a or b:
            self._products.append((tuple(a), tuple(b)))

    def _top(self, number: int) -> int:
        while self._above[number] != number:
            self._above[number] = self._above[self._above[number]]
            number = self._above[number]
        return number

    # ------------------------------------------------------------------------------------------------------ solution

    def solve(self) -> dict[int, int]:
        """The number that each becomes."""
        members: dict[int, list[int]] = {}
        for number in self.numbers:
            members.setdefault(self._top(number), []).append(number)
        later = {self._top(n) for n in self._less if len(members[self._top(n)]) == 1 and n not in self._pinned}
        fixed = {top for top, own in members.items() if self._pinned.intersection(own)}
        solved = _solved(self._equations(fixed), {top: max(own) for top, own in members.items()})
        fixed |= {free for row in solved.values() for free, power in row.items() if power.denominator > 1}
        free = [top for top in members if top not in solved and top not in fixed and top not in later]
        ratios: dict[int, Fraction] = dict.fromkeys(free, Fraction(1))

        def value() -> dict[int, int] | None:
            return self._values(members, solved, ratios, later)

        best = value() or {number: number for number in self.numbers}
        for top in sorted(free, key=lambda one: min(members[one])):
            common = math.gcd(*members[top])
            for small in range(1, min(common, TRIED)):
                ratios[top] = Fraction(small, common)
                found = value()
                if found is not None:
                    best = found
                    break
            else:
                ratios[top] = Fraction(1)
        return best

    def _equations(self, fixed: set[int]) -> list[dict[int, Fraction]]:
        rows = []
        for left, right in self._products:
            row: dict[int, Fraction] = {}
            for numbers, sign in ((left, 1), (right, -1)):
                for number in numbers:
                    top = self._top(number)
                    if top not in fixed:
                        row[top] = row.get(top, Fraction(0)) + sign
            rows.append({top: power for top, power in row.items() if power})
        return [row for row in rows if row]

    def _values(
        self,
        members: dict[int, list[int]],
        solved: dict[int, dict[int, Fraction]],
        ratios: dict[int, Fraction],
        later: set[int],
    ) -> dict[int, int] | None:
        """What the numbers become under these ratios; None where that is no solution."""
        known = dict(ratios)
        made: dict[int, int] = {}
        for _ in range(len(later) + 1):
            for top, own in members.items():
                ratio = _ratio(top, solved, known, later)
                for number in own:
                    if ratio is not None and (ratio * number).denominator == 1:
                        made[number] = int(ratio * number)
            for top in later - known.keys():
                (number,) = members[top]
                other, less = self._less[number]
                if other in made and made[other] > less:
                    known[top] = Fraction(made[other] - less, number)
                    made[number] = made[other] - less
        if len(made) < len(self._above) or len(set(made.values())) < len(made):
            return None
        return made if all(small >= min(number, LEAST) for number, small in made.items()) else None


def _ratio(
    top: int, solved: dict[int, dict[int, Fraction]], known: dict[int, Fraction], later: set[int]
) -> Fraction | None:
    """The ratio of a kind of numbers; None where it depends on what is not known yet."""
    if top not in solved:
        return known.get(top) if top in later else known.get(top, Fraction(1))
    made = Fraction(1)
    for free, power in solved[top].items():
        if free in later and free not in known:
            return None
        if power.denominator == 1:
            made *= known.get(free, Fraction(1)) ** int(power)
    return made


def _solved(rows: Sequence[dict[int, Fraction]], size: dict[int, int]) -> dict[int, dict[int, Fraction]]:
    """Solve linear equations for the largest numbers: what each is, in terms of those that are left free."""
    solved: dict[int, dict[int, Fraction]] = {}
    for row in rows:
        reduced = _substituted(row, solved)
        if not reduced:
            continue
        pivot = max(reduced, key=lambda top: size[top])
        power = reduced.pop(pivot)
        found = {top: -other / power for top, other in reduced.items()}
        solved = {top: _substituted(own, {pivot: found}) for top, own in solved.items()}
        solved[pivot] = found
    return solved


def _substituted(row: dict[int, Fraction], solved: dict[int, dict[int, Fraction]]) -> dict[int, Fraction]:
    made: dict[int, Fraction] = {}
    for top, power in row.items():
        for free, other in solved.get(top, {top: Fraction(1)}).items():
            made[free] = made.get(free, Fraction(0)) + power * other
    return {top: power for top, power in made.items() if power}


__all__ = ["SMALL", "Sizes"]
