"""Chooses small numbers for the sizes of a program, such that the relations between sizes are preserved.

Each size is a variable; variable v with the value n becomes r(v) · n. Tied variables share r; if a view merges or splits
dims, the products of r agree, so that log r solves linear equations; sums stay sums. Among the solutions, one is chosen
that makes all sizes small integers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

#: Sizes up to this one are kept, if there is memory: numbers of heads, experts and ranks mean more than equality.
SMALL = 8

#: Smallest new value of a larger size: the norm of one element is its sign.
LEAST = 2

#: Candidates for the common factor of sizes of one kind, if that is larger.
TRIED = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024)

#: A variable.
Size = int


class Sizes:
    """The relations between the sizes of programs.

    Args:
        small: sizes up to this one are kept.
    """

    def __init__(self, small: int = SMALL) -> None:
        self.small = small
        self.number: list[int] = []  # by variable
        self._above: list[Size] = []
        self._pinned: set[Size] = set()
        self._avoided: dict[Size, set[int]] = {}
        self._products: list[tuple[tuple[Size, ...], tuple[Size, ...]]] = []
        self._sums: list[tuple[Size, tuple[Size, ...]]] = []

    def new(self, number: int) -> Size:
        """A variable with this value."""
        made = len(self.number)
        self.number.append(number)
        self._above.append(made)
        if number <= self.small:
            self._pinned.add(made)
        return made

    def pin(self, sizes: Iterable[Size]) -> None:
        """Keep sizes unchanged."""
        self._pinned.update(sizes)

    def avoid(self, size: Size, number: int) -> None:
        """Let a size differ from this number, if there is a choice."""
        self._avoided.setdefault(size, set()).add(number)

    def tie(self, first: Size, *others: Size) -> None:
        """Scale sizes by the same factor."""
        for other in others:
            a, b = self._top(first), self._top(other)
            if a != b:
                self._above[b] = a

    def kind(self, size: Size) -> Size:
        """The common factor of sizes that are scaled alike."""
        return self._top(size)

    def multiply(self, left: Sequence[Size], right: Sequence[Size]) -> None:
        """Keep two products equal."""
        if len(left) == len(right) == 1:
            self.tie(left[0], right[0])
        else:
            self._products.append((tuple(left), tuple(right)))

    def sum_up(self, whole: Size, parts: Sequence[Size]) -> None:
        """Keep a size the sum of others."""
        terms = tuple(part for part in parts if self.number[part])
        if len(terms) == 1:
            self.tie(whole, terms[0])
        elif terms:
            self._sums.append((whole, terms))

    def _top(self, size: Size) -> Size:
        above = self._above
        while above[size] != size:
            above[size] = above[above[size]]
            size = above[size]
        return size

    # ------------------------------------------------------------------------------------------------------ solution

    def solve(self) -> list[int]:
        """The new value of each variable."""
        true = [(whole, parts) for whole, parts in self._sums if _adds_up(whole, parts, self.number)]
        while True:
            found = self._solved_once()
            broken = [(whole, parts) for whole, parts in true if not _adds_up(whole, parts, found)]
            if not broken:
                return found
            # Sums that overlap are not solved together: these keep their sizes.
            self.pin(size for whole, parts in broken for size in (whole, *parts))

    def _solved_once(self) -> list[int]:
        sums = self._tied()
        fixed = self._fixed()
        members: dict[Size, set[int]] = {}
        for size, number in enumerate(self.number):
            members.setdefault(self._top(size), set()).add(number)
        rows = self._equations(fixed)
        later = self._later(sums, fixed, {top for row in rows for top in row})
        solved = _solved(rows, {top: max(own) for top, own in members.items()}, later.keys())
        fixed |= {free for row in solved.values() for free, power in row.items() if power.denominator > 1}
        choice = _Choice({top: sorted(own) for top, own in members.items()}, solved, later)
        ratios: dict[Size, Fraction] = {}
        for top in sorted(members, key=lambda one: max(members[one]), reverse=True):
            if top in solved or top in fixed or top in later:
                continue
            common = math.gcd(*members[top])
            avoided = [(self.number[s], some) for s, some in self._avoided.items() if self._top(s) == top]
            for small in (one for one in TRIED if one < common):
                ratios[top] = Fraction(small, common)
                if any(ratios[top] * number in some for number, some in avoided):
                    continue
                if choice.ratios(ratios) is not None:
                    break
            else:
                ratios.pop(top, None)
        found = choice.ratios(ratios) or {}
        return [int(found.get(self._top(size), 1) * number) for size, number in enumerate(self.number)]

    def _later(
        self, sums: Sequence[tuple[Size, tuple[Size, ...]]], fixed: Collection[Size], linked: Collection[Size]
    ) -> dict[Size, tuple[int, tuple[tuple[Size, int], ...]]]:
        """The kinds of which one size is a sum of others: a whole, or a part that is otherwise unconstrained, as
        the remainder."""
        later: dict[Size, tuple[int, tuple[tuple[Size, int], ...]]] = {}
        times = Counter(self._top(part) for _, parts in sums for part in parts)
        for whole, parts in sums:
            top = self._top(whole)
            if top not in fixed and top not in later and all(self._top(part) != top for part in parts):
                later[top] = self.number[whole], tuple((self._top(part), self.number[part]) for part in parts)
                continue
            loose = [
                p for p in parts if times[self._top(p)] == 1 and not {self._top(p)} & {*fixed, *linked, *later, top}
            ]
            if loose:
                rest = ((self._top(part), -self.number[part]) for part in parts if part != loose[0])
                later[self._top(loose[0])] = self.number[loose[0]], ((top, self.number[whole]), *rest)
        return later

    def _fixed(self) -> set[Size]:
        return {self._top(size) for size in self._pinned}

    def _tied(self) -> list[tuple[Size, tuple[Size, ...]]]:
        """Tie sizes that products and sums require to scale alike; returns the remaining sums."""
        left = list(self._sums)
        before = -1
        while before != (before := len({self._top(size) for size in range(len(self.number))}) + len(left)):
            fixed = self._fixed()
            for row in self._equations(fixed):
                if sorted(row.values()) == [-1, 1]:
                    self.tie(*row)
            rest = []
            for whole, parts in left:
                tops = {self._top(part) for part in parts}
                if len(tops) == 1:
                    self.tie(parts[0], whole)
                elif tops <= fixed:
                    self._pinned.add(whole)
                else:
                    rest.append((whole, parts))
            left = rest
            self._tie_like_sums(left)
        return left

    def _tie_like_sums(self, sums: Sequence[tuple[Size, tuple[Size, ...]]]) -> None:
        """If one size is the sum of the same numbers twice, these are the same sizes: buckets are filled and emptied that way."""
        known: dict[Any, tuple[Size, ...]] = {}
        for whole, parts in sums:
            numbers = tuple(self.number[part] for part in parts)
            first = known.setdefault((self._top(whole), self.number[whole], numbers), parts)
            for one, other in zip(first, parts, strict=True):
                self.tie(one, other)

    def _equations(self, fixed: set[Size]) -> list[dict[Size, Fraction]]:
        rows: dict[tuple[tuple[Size, int], ...], None] = {}
        for left, right in self._products:
            row: dict[Size, int] = {}
            for sizes, sign in ((left, 1), (right, -1)):
                for size in sizes:
                    top = self._top(size)
                    if top not in fixed:
                        row[top] = row.get(top, 0) + sign
            rows[tuple(sorted((top, power) for top, power in row.items() if power))] = None
        return [{top: Fraction(power) for top, power in row} for row in rows if row]


@dataclass(frozen=True, slots=True)
class _Choice:
    """The new sizes once the ratios of the free kinds are chosen.

    Attributes:
        members: the numbers of each kind.
        solved: kinds whose ratio is a product of powers of those of others.
        later: kinds of which one number is the sum of others: that number, and the kind and number of each of these,
            negative if it is subtracted.
    """

    members: Mapping[Size, Sequence[int]]
    solved: Mapping[Size, Mapping[Size, Fraction]]
    later: Mapping[Size, tuple[int, tuple[tuple[Size, int], ...]]]

    def ratios(self, chosen: Mapping[Size, Fraction]) -> dict[Size, Fraction] | None:
        """The ratios of all kinds except unchanged ones; None if sizes are not integers, or too small."""
        known = dict(chosen)
        made: dict[Size, Fraction] = {}

        def settle(top: Size, ratio: Fraction) -> bool:
            made[top] = ratio
            return ratio <= 1 and all(
                (ratio * number).denominator == 1 and ratio * number >= min(number, LEAST)
                for number in self.members[top]
            )

        for top, ratio in chosen.items():
            if not settle(top, ratio):
                return None
        left = [*self.later, *self.solved]
        while left:
            rest = []
            for top in left:
                found = self._later(top, known) if top in self.later else self._product(top, known)
                if found is None:
                    rest.append(top)
                    continue
                if not settle(top, found):
                    return None
                known[top] = found
            if len(rest) == len(left):  # sums of each other
                known[rest[0]] = Fraction(1)
                rest = rest[1:]
            left = rest
        return made

    def _later(self, top: Size, known: Mapping[Size, Fraction]) -> Fraction | None:
        whole, parts = self.later[top]
        if any(part in self.later or part in self.solved for part, _ in parts if part not in known):
            return None
        return sum((known.get(part, Fraction(1)) * number for part, number in parts), Fraction(0)) / whole

    def _product(self, top: Size, known: Mapping[Size, Fraction]) -> Fraction | None:
        made = Fraction(1)
        for free, power in self.solved[top].items():
            if free not in known and free in self.later:
                return None
            if power.denominator == 1:
                made *= known.get(free, Fraction(1)) ** int(power)
        return made


def _adds_up(whole: Size, parts: Sequence[Size], values: Sequence[int]) -> bool:
    return values[whole] == sum(values[part] for part in parts)


def _solved(
    rows: Sequence[dict[Size, Fraction]], number: Mapping[Size, int], kept: Collection[Size]
) -> dict[Size, dict[Size, Fraction]]:
    """Solve linear equations for the largest sizes: each in terms of the free ones.

    Args:
        kept: variables that stay free.
    """
    solved: dict[Size, dict[Size, Fraction]] = {}
    readers: dict[Size, set[Size]] = {}  # by free variable: the variables expressed through it
    for row in rows:
        reduced = _substituted(row, solved)
        candidates = [top for top in reduced if top not in kept]
        if not candidates:
            continue
        pivot = max(candidates, key=lambda top: number[top])
        power = reduced.pop(pivot)
        found = {top: -other / power for top, other in reduced.items()}
        for reader in readers.pop(pivot, ()):
            solved[reader] = _substituted(solved[reader], {pivot: found})
            for top in solved[reader]:
                readers.setdefault(top, set()).add(reader)
        solved[pivot] = found
        for top in found:
            readers.setdefault(top, set()).add(pivot)
    return solved


def _substituted(row: Mapping[Size, Fraction], solved: Mapping[Size, Mapping[Size, Fraction]]) -> dict[Size, Fraction]:
    made: dict[Size, Fraction] = {}
    for top, power in row.items():
        for free, other in solved.get(top, {top: Fraction(1)}).items():
            made[free] = made.get(free, Fraction(0)) + power * other
    return {top: power for top, power in made.items() if power}


__all__ = ["SMALL", "Size", "Sizes"]
