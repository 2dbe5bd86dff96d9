"""Finds which sizes at a call are equal by trying: which others have to grow with an operand's dim, and which do.

Two sizes with the same number need not be the same size: a weight may have as many rows as columns by chance. Shape inference
shows what an op does with either, so no table of ops is needed. It runs on small stand-ins where possible, since kernels
with data reject misfits, and fake ones accept some.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tcverify.ops import TensorSpec
from tcverify.program.graph import map_structure
from tcverify.scaled_down.sizes import Size, Sizes

#: Factor by which a size is enlarged.
TIMES = 3

Shapes = Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Probe:
    """A call, to be tried on larger operands.

    Attributes:
        operands: by name: the value, and the sizes of each of its tensors.
        results: the shapes that the call returns.
        literals: numbers among its arguments, which may be sizes.
        infer: returns the shapes of the results for other operands, by name, with the same replacement of larger numbers in the
            other arguments; None if they do not fit.
        stand_ins: of numbers, in all trials.
    """

    operands: Mapping[str, tuple[Any, Sequence[Sequence[Size]]]]
    results: Shapes
    literals: Sequence[int]
    infer: Callable[[Mapping[str, Any], Callable[[int], int]], Shapes | None]
    sizes: Sizes
    stand_ins: Mapping[int, int] = field(default_factory=dict)

    def sizes_of_results(self) -> tuple[list[list[Size]], dict[int, Size]] | None:
        """Return the sizes of the results, and of the literals, after tying sizes that the call relates.

        Returns:
            None if probing is inconclusive.
        """
        small = self._small()
        return (small or self)._tried()

    def _small(self) -> Probe | None:
        """The same with stand-ins, in the order of the numbers; None if the call rejects them."""
        found = {self.sizes.number[size] for _, dims in self.operands.values() for size in itertools.chain(*dims)}
        found.update(self.literals, *self.results)
        least = max((n for n in found if n <= self.sizes.small), default=1) + 1
        large = sorted(n for n in found if n > self.sizes.small)
        made = replace(self, stand_ins={n: least + place for place, n in enumerate(large)})
        return made if made._grown((), ()) is not None else None

    def _tried(self) -> tuple[list[list[Size]], dict[int, Size]] | None:
        sizes = self.sizes
        numbers: dict[Size, int] = {}  # by kind: what it is here
        for size in (size for _, dims in self.operands.values() for size in itertools.chain(*dims)):
            if sizes.number[size] > sizes.small:
                numbers.setdefault(sizes.kind(size), sizes.number[size])
        grown: dict[tuple[Size, ...], Shapes] = {}
        literal: dict[int, Size] = {}
        for some in _together(numbers):
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
        """The shapes of the results with these sizes enlarged; None unless some grow as they do, and the others are unchanged."""

        def number(n: int) -> int:
            return self._as_tried(n) * (TIMES if n in literals else 1)

        found = self.infer({name: self._larger(*of, kinds) for name, of in self.operands.items()}, number)
        if found is None or [len(shape) for shape in found] != [len(shape) for shape in self.results]:
            return None
        pairs = zip(itertools.chain(*found), map(self._as_tried, itertools.chain(*self.results)), strict=True)
        return found if all(now in (n, n * TIMES) for now, n in pairs) else None

    def _as_tried(self, number: int) -> int:
        return self.stand_ins.get(number, number)

    def _larger(self, value: Any, dims: Sequence[Sequence[Size]], kinds: Collection[Size]) -> Any:
        remaining = iter(dims)

        def larger(spec: Any) -> Any:
            if not isinstance(spec, TensorSpec):
                return spec
            own = zip(spec.shape, next(remaining), strict=True)
            shape = tuple(self._as_tried(n) * (TIMES if self.sizes.kind(size) in kinds else 1) for n, size in own)
            return replace(TensorSpec.contiguous(shape, spec.dtype), alias=spec.alias)

        return map_structure(larger, value)

    def _causes(self, grown: Mapping[tuple[Size, ...], Shapes]) -> list[list[Size | None]] | None:
        """What each dim of the results grows with; None if one grows with several, or is unrelated."""
        found: list[list[Size | None]] = []
        for number, shape in enumerate(self.results):
            found.append([])
            for place, size in enumerate(shape):
                own = [some[0] for some, shapes in grown.items() if shapes[number][place] != self._as_tried(size)]
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


def _together(numbers: Mapping[Size, int]) -> list[tuple[Size, ...]]:
    """Candidates for sizes that grow together: one kind, two of the same number, or all of it."""
    by_number: dict[int, list[Size]] = {}
    for kind, number in numbers.items():
        by_number.setdefault(number, []).append(kind)
    several = [kinds for kinds in by_number.values() if len(kinds) > 1]
    pairs = [pair for kinds in several for pair in itertools.combinations(kinds, 2)]
    return [*((kind,) for kind in numbers), *pairs, *(tuple(kinds) for kinds in several if len(kinds) > 2)]


__all__ = ["TIMES", "Probe"]
