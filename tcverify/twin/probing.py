"""Which sizes at a call are one, found by trying: what has to grow with an operand's dim, and what does.

Two sizes of one number need not be one: a weight may have as many rows as columns by chance. What an op does with either is asked
of its shape inference, so that no table of ops is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tcverify.ops import TensorSpec
from tcverify.program.graph import map_structure
from tcverify.twin.sizes import Size, Sizes

#: How many times as large a size is made.
TIMES = 3

Shapes = Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Probe:
    """A call, to be tried on larger operands.

    Attributes:
        operands: by name: the value, and the sizes of each of its tensors.
        results: the shapes that the call gives.
        literals: numbers that it is given, which may be sizes.
        infer: gives the shapes of the results for other operands, by name, and with these literals made larger; None where they
            do not fit.
    """

    operands: Mapping[str, tuple[Any, Sequence[Sequence[Size]]]]
    results: Shapes
    literals: Sequence[int]
    infer: Callable[[Mapping[str, Any], Collection[int]], Shapes | None]
    sizes: Sizes

    def sizes_of_results(self) -> tuple[list[list[Size]], dict[int, Size]] | None:
        """Return the sizes of the results, and of the literals, having tied what the call holds together.

        Returns:
            None where trying does not tell.
        """
        sizes = self.sizes
        numbers: dict[Size, int] = {}  # by kind: what it is here
        for size in (size for _, dims in self.operands.values() for size in itertools.chain(*dims)):
            if sizes.number[size] > sizes.small:
                numbers.setdefault(sizes.kind(size), sizes.number[size])
        grown: dict[tuple[Size, ...], Shapes] = {}
        literal: dict[int, Size] = {}
        for some in _tried(numbers):
            if any(kind in known for known in grown for kind in some):
                continue
            for own in [(), *((n,) for n in self.literals if n not in literal)]:
                found = self._grown(some, own)
                if found is not None:
                    grown[some] = found
                    literal.update(dict.fromkeys(own, some[0]))
                    break
        if {kind for known in grown for kind in known} != numbers.keys() or literal.keys() != set(self.literals):
            return None
        causes = self._causes(grown)
        if causes is None:
            return None
        for some in grown:
            sizes.tie(*some)
        made = [
            [self._as(n, cause) for n, cause in zip(*one, strict=True)]
            for one in zip(self.results, causes, strict=True)
        ]
        return made, {number: self._as(number, kind) for number, kind in literal.items()}

    def _grown(self, kinds: Sequence[Size], literals: Collection[int]) -> Shapes | None:
        """The shapes of the results where these are larger; None unless some grow as they do, and the others stay."""
        found = self.infer(
            {name: self._larger(value, dims, kinds) for name, (value, dims) in self.operands.items()}, literals
        )
        if found is None or [len(shape) for shape in found] != [len(shape) for shape in self.results]:
            return None
        pairs = zip(itertools.chain(*found), itertools.chain(*self.results), strict=True)
        return found if all(now in (n, n * TIMES) for now, n in pairs) else None

    def _larger(self, value: Any, dims: Sequence[Sequence[Size]], kinds: Collection[Size]) -> Any:
        remaining = iter(dims)

        def larger(spec: Any) -> Any:
            if not isinstance(spec, TensorSpec):
                return spec
            own = zip(spec.shape, next(remaining), strict=True)
            shape = tuple(n * TIMES if self.sizes.kind(size) in kinds else n for n, size in own)
            return replace(TensorSpec.contiguous(shape, spec.dtype), alias=spec.alias)

        return map_structure(larger, value)

    def _causes(self, grown: Mapping[tuple[Size, ...], Shapes]) -> list[list[Size | None]] | None:
        """What each dim of the results grows with; None where one grows with several, or comes from nowhere."""
        found: list[list[Size | None]] = []
        for number, shape in enumerate(self.results):
            found.append([])
            for place, size in enumerate(shape):
                own = [some[0] for some, shapes in grown.items() if shapes[number][place] != size]
                if len(own) > 1 or (not own and size > self.sizes.small):
                    return None
                found[-1].append(own[0] if own else None)
        return found

    def _as(self, number: int, cause: Size | None) -> Size:
        """A size that is scaled as another one is."""
        if cause is not None and self.sizes.number[cause] == number:
            return cause
        made = self.sizes.new(number)
        if cause is not None:
            self.sizes.tie(cause, made)
        return made


def _tried(numbers: Mapping[Size, int]) -> list[tuple[Size, ...]]:
    """What may grow together: one kind, two of one number, or all of it."""
    by_number: dict[int, list[Size]] = {}
    for kind, number in numbers.items():
        by_number.setdefault(number, []).append(kind)
    several = [kinds for kinds in by_number.values() if len(kinds) > 1]
    pairs = [pair for kinds in several for pair in itertools.combinations(kinds, 2)]
    return [*((kind,) for kind in numbers), *pairs, *(tuple(kinds) for kinds in several if len(kinds) > 2)]


__all__ = ["TIMES", "Probe"]
