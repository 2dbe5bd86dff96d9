"""Chooses small numbers for the sizes of a program: one for each, such that what holds between the sizes goes on holding.

Every number n becomes r(n) · n. Numbers that are tied share r; where a view merges or splits dims, the products of r agree, so
that log r solves linear equations. Of the solutions one is taken that makes all numbers small, whole and distinct.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

#: Numbers up to this one stay: numbers of heads, experts and ranks mean more than that they are equal.
SMALL = 8

#: The least that a larger number becomes: of one element a norm is the sign.
LEAST = 2

#: How many values are tried for what numbers of one kind have in common.
TRIED = 24


class Sizes:
    """What is known of the numbers of a program."""

    def __init__(self) -> None:
        self._above: dict[int, int] = {}
        self._products: dict[tuple[tuple[int, ...], tuple[int, ...]], None] = {}
        self._sums: dict[tuple[int, tuple[int, ...]], None] = {}
        self._pinned: set[int] = set()

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
        self._pinned.update(number for number in numbers if number >= 1)

    def tie(self, *numbers: int) -> None:
        """Let numbers be scaled alike."""
        self.add(*numbers)
        tops = [self._top(number) for number in numbers if number >= 1]
        for other in tops[1:]:
            self._above[self._top(other)] = self._top(tops[0])

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
            self._products[tuple(a), tuple(b)] = None

    def sum_up(self, whole: int, parts: Iterable[int]) -> None:
        """Let a number stay the sum of others."""
        terms = tuple(sorted(part for part in parts if part))
        if whole > SMALL and terms and terms != (whole,):
            self.add(whole, *terms)
            self._sums[whole, terms] = None

    def _top(self, number: int) -> int:
        while self._above[number] != number:
            self._above[number] = self._above[self._above[number]]
            number = self._above[number]
        return number

    # ------------------------------------------------------------------------------------------------------ solution

    def solve(self) -> dict[int, int]:
        """The number that each becomes."""
        self._tie_sums()
        members: dict[int, list[int]] = {}
        for number in self.numbers:
            members.setdefault(self._top(number), []).append(number)
        fixed = {top for top, own in members.items() if self._pinned.intersection(own)}
        later: dict[int, tuple[int, tuple[int, ...]]] = {}
        for whole, parts in self._sums:
            if self._top(whole) not in fixed:
                later.setdefault(self._top(whole), (whole, parts))
        solved = _solved(self._equations(fixed), {top: max(own) for top, own in members.items()}, later.keys())
        fixed |= {free for row in solved.values() for free, power in row.items() if power.denominator > 1}
        free = [top for top in members if top not in solved and top not in fixed and top not in later]
        choice = _Choice(members, solved, later)
        ratios: dict[int, Fraction] = dict.fromkeys(free, Fraction(1))
        for top in sorted(free, key=lambda one: min(members[one])):
            common = math.gcd(*members[top])
            best: tuple[int, int] | None = None
            for small in range(1, min(common, TRIED)):
                found = choice.values({**ratios, top: Fraction(small, common)})
                if found is not None and (best is None or _collisions(found) < best[0]):
                    best = _collisions(found), small
                    if not best[0]:
                        break
            if best is not None:
                ratios[top] = Fraction(best[1], common)
        return choice.values(ratios) or {number: number for number in self.numbers}

    def _tie_sums(self) -> None:
        """Tie numbers to their parts where these are scaled alike."""
        again = True
        while again:
            again = False
            for whole, parts in list(self._sums):
                tops = {self._top(part) for part in parts}
                if len(tops) == 1:
                    self.tie(whole, parts[0])
                    del self._sums[whole, parts]
                    again = True
                elif all(part in self._pinned for part in parts):
                    self.pin(whole)
                    del self._sums[whole, parts]
                    again = True

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


def _collisions(made: Mapping[int, int]) -> int:
    """How many numbers are no longer different from all others."""
    return len(made) - len(set(made.values()))


@dataclass(frozen=True, slots=True)
class _Choice:
    """What all numbers become once the ratios of the free kinds are chosen.

    Attributes:
        members: the numbers of each kind.
        solved: kinds whose ratio is a product of powers of those of others.
        later: kinds of which one number is the sum of others.
    """

    members: Mapping[int, Sequence[int]]
    solved: Mapping[int, Mapping[int, Fraction]]
    later: Mapping[int, tuple[int, tuple[int, ...]]]

    def values(self, ratios: Mapping[int, Fraction]) -> dict[int, int] | None:
        """What the numbers become under these ratios; None where they are not whole, or too small."""
        known = dict(ratios)
        made: dict[int, int] = {}
        left = set(self.members)
        while left:
            ready = {top: ratio for top in left if (ratio := self._ratio(top, known)) is not None}
            for top, ratio in ready.items():
                for number in self.members[top]:
                    value = ratio * number
                    if value.denominator != 1 or value < min(number, LEAST):
                        return None
                    made[number] = int(value)
            left -= ready.keys()
            summed = False
            for top in left & self.later.keys():
                whole, parts = self.later[top]
                if all(part in made for part in parts):
                    known[top] = Fraction(sum(made[part] for part in parts), whole)
                    summed = True
            if not ready and not summed:
                known.update((top, Fraction(1)) for top in left if top in self.later)  # sums of each other
                if not left & self.later.keys():
                    return None
        return made

    def _ratio(self, top: int, known: Mapping[int, Fraction]) -> Fraction | None:
        """The ratio of a kind; None where it depends on what is not known yet."""
        if top in self.later:
            return known.get(top)
        made = Fraction(1)
        for free, power in self.solved.get(top, {top: Fraction(1)}).items():
            if free in self.later and free not in known:
                return None
            if power.denominator == 1:
                made *= known.get(free, Fraction(1)) ** int(power)
        return made


def _solved(
    rows: Sequence[dict[int, Fraction]], size: Mapping[int, int], kept: Collection[int]
) -> dict[int, dict[int, Fraction]]:
    """Solve linear equations for the largest numbers: what each is, in terms of those that are left free.

    Args:
        kept: what they are not solved for.
    """
    solved: dict[int, dict[int, Fraction]] = {}
    for row in rows:
        reduced = _substituted(row, solved)
        candidates = [top for top in reduced if top not in kept]
        if not candidates:
            continue
        pivot = max(candidates, key=lambda top: size[top])
        power = reduced.pop(pivot)
        found = {top: -other / power for top, other in reduced.items()}
        solved = {top: _substituted(own, {pivot: found}) for top, own in solved.items()}
        solved[pivot] = found
    return solved


def _substituted(row: Mapping[int, Fraction], solved: Mapping[int, Mapping[int, Fraction]]) -> dict[int, Fraction]:
    made: dict[int, Fraction] = {}
    for top, power in row.items():
        for free, other in solved.get(top, {top: Fraction(1)}).items():
            made[free] = made.get(free, Fraction(0)) + power * other
    return {top: power for top, power in made.items() if power}


__all__ = ["SMALL", "Sizes"]
