"""Compares what two programs computed, rank by rank; the thresholds are the verifier's business, not this module's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from tcverify.execution.interpreter import RankResult


@dataclass(slots=True)
class Delta:
    """How one output differs on one rank.

    Attributes:
        label: "output 0", or "input 'x' after the run".
        difference: largest absolute difference over the finite elements.
        scale: largest finite magnitude of the original's value.
        worst: index of the largest difference.
        expected, actual: the original's and the rewritten value there.
        problem: set when the two cannot be compared by size: other shape, other NaN pattern, other overlaps in memory.
        discrete: whether the problem is one of values that do not differ by size: integers, booleans, NaN or inf.
        overflow: the rewritten value is infinite where the original is finite; in the native domain, infinite or NaN.
        rms: root mean square of the differences over the finite elements.
        elements: how many there are.
        undefined: in the native domain, how the rewritten value is NaN where the original is finite; empty if it is nowhere.
        own: in the native domain, the original's own largest error; `difference` is the rewritten value's then, both
            against the original in float64. `own_rms` is the root mean square of the original's, `dtype` its dtype there.
        equal: in the native domain, whether both versions computed the same numbers.
        unstable: in the native domain, of discrete values: whether the original computes others in float64.
    """

    rank: int
    label: str
    difference: float = 0.0
    scale: float = 0.0
    worst: tuple[int, ...] = ()
    expected: float = 0.0
    actual: float = 0.0
    problem: str | None = None
    alias: bool = False
    overflow: bool = False
    undefined: str = ""
    discrete: bool = False
    rms: float = 0.0
    elements: int = 0
    own: float = 0.0
    own_rms: float = 0.0
    dtype: torch.dtype | None = None
    equal: bool = False
    unstable: bool = False


def compare_ranks(original: RankResult, rewritten: RankResult) -> list[Delta]:
    """Compare one rank's outputs, mutated inputs and which outputs overlap in memory. Both ran to their end."""
    rank = original.rank
    if original.structure != rewritten.structure or len(original.outputs) != len(rewritten.outputs):
        problem = f"the original returns {original.structure}, the rewritten program {rewritten.structure}"
        return [Delta(rank, "the outputs", problem=problem)]
    scales = original.scales or (None,) * len(original.outputs)
    deltas = [
        _compare(rank, f"output {i}", expected, actual, scale)
        for i, (expected, actual, scale) in enumerate(zip(original.outputs, rewritten.outputs, scales, strict=True))
    ]
    if original.mutates or rewritten.mutates:
        for name, expected, actual in zip(original.input_names, original.inputs, rewritten.inputs, strict=True):
            deltas.append(_compare(rank, f"input '{name}' after the run", expected, actual))
    before, after = overlapping_outputs(original), overlapping_outputs(rewritten)
    if before != after:
        i = next(i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b)
        problem = f"it shares memory with {_named(before[i])} in the original, with {_named(after[i])} after the pass"
        deltas.append(Delta(rank, f"output {i}", problem=problem, alias=True))
    return deltas


def compare_native(reference: RankResult, original: RankResult, rewritten: RankResult) -> list[Delta]:
    """Compare what one rank computed in the native domain with the original in float64. All ran to their end.

    Where the original is not finite in float64 or in its own dtypes nothing is compared.
    """
    found = []
    accurate = _leaves(reference)
    before, after = _leaves(original), _leaves(rewritten)
    for delta in compare_ranks(original, rewritten):
        exact, expected, actual = accurate.get(delta.label), before.get(delta.label), after.get(delta.label)
        if isinstance(expected, torch.Tensor) and expected.is_floating_point() and not delta.alias:
            if delta.problem is None or delta.discrete:  # not of another shape or dtype
                delta = _errors(delta, exact, expected, actual)
        elif delta.discrete and isinstance(exact, torch.Tensor) and isinstance(expected, torch.Tensor):
            delta.unstable = not torch.equal(exact.cpu(), expected.cpu())
        found.append(delta)
    return found


def _errors(delta: Delta, exact: Any, expected: torch.Tensor, actual: Any) -> Delta:
    """The errors of two values of one shape and dtype. `delta` says how they differ from each other."""
    found = Delta(delta.rank, delta.label, dtype=expected.dtype)
    found.equal = delta.problem is None and not delta.overflow and not delta.difference
    exact, own, new = (value.to(device="cpu", dtype=torch.float64) for value in (exact, expected, actual))
    comparable = exact.isfinite() & own.isfinite()
    finite = comparable & new.isfinite()
    found.overflow = bool((comparable & ~finite).any())
    undefined = (comparable & new.isnan()).nonzero()
    if len(undefined):
        where = tuple(int(i) for i in undefined[0])
        found.undefined = f"at {list(where)} it is nan where float64 gives {float(exact[where]):.9g}"
    found.elements = int(finite.sum())
    if not found.elements:
        return found
    zero = torch.zeros_like(exact)
    found.scale = float(torch.where(finite, exact.abs(), zero).max())
    mine = torch.where(finite, (exact - own).abs(), zero)
    theirs = torch.where(finite, (exact - new).abs(), zero)
    found.own, found.difference = float(mine.max()), float(theirs.max())
    if found.own:
        found.own_rms = _root_mean_square(mine, found.own, found.elements)
    if found.difference:
        found.rms = _root_mean_square(theirs, found.difference, found.elements)
        _worst(found, theirs, exact, new)
    return found


def _leaves(result: RankResult) -> dict[str, Any]:
    """Outputs and inputs by label."""
    found = {f"output {i}": value for i, value in enumerate(result.outputs)}
    named = zip(result.input_names, result.inputs, strict=True)
    return found | {f"input '{name}' after the run": value for name, value in named}


def overlapping_outputs(result: RankResult) -> list[list[int]]:
    """For each output, the earlier ones that have an element in common with it: a write into one shows in the other.

    Parts of one buffer that lie side by side have none.
    """
    if result.overlaps is not None:
        return result.overlaps
    found: list[list[int]] = [[] for _ in result.outputs]
    for late, early in _meeting([_span(value) for value in result.outputs]).items():
        found[late] = [number for number in sorted(early) if _overlap(result.outputs[number], result.outputs[late])]
    return found


def _span(value: Any) -> range:
    """The addresses from the first to the last element of a tensor; none of what has no memory."""
    if not isinstance(value, torch.Tensor) or not value.numel() or not value.data_ptr():
        return range(0)
    last = sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
    return range(value.data_ptr(), value.data_ptr() + (last + 1) * value.itemsize)


def _meeting(spans: Sequence[range]) -> dict[int, list[int]]:
    """For spans that meet earlier ones, which these are. Linear in the pairs that meet, apart from sorting."""
    found: dict[int, list[int]] = {}
    begun: list[int] = []
    for new in sorted((n for n, span in enumerate(spans) if span), key=lambda n: spans[n].start):
        begun = [old for old in begun if spans[old].stop > spans[new].start]
        for old in begun:
            found.setdefault(max(old, new), []).append(min(old, new))
        begun.append(new)
    return found


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors whose spans meet have memory in common: columns of a matrix lie between each other.

    Memory is divided into units that no element lies across.
    """
    first, second = (one, other) if one.data_ptr() <= other.data_ptr() else (other, one)
    start = first.data_ptr()
    if second.data_ptr() == start or first.is_contiguous():
        return True
    unit = math.gcd(first.itemsize, second.itemsize, second.data_ptr() - start)
    written = torch.zeros((max(_span(first).stop, _span(second).stop) - start) // unit, dtype=torch.bool)

    def units(tensor: torch.Tensor) -> torch.Tensor:
        each = tensor.itemsize // unit
        strides = (*(n * each for n in tensor.stride()), 1)
        return written.as_strided((*tensor.shape, each), strides, (tensor.data_ptr() - start) // unit)

    units(first).fill_(True)
    return bool(units(second).any())


def _named(outputs: list[int]) -> str:
    if not outputs:
        return "no earlier output"
    return f"output{'s' if len(outputs) > 1 else ''} {', '.join(map(str, outputs))}"


def _compare(rank: int, label: str, expected: Any, actual: Any, scale: float | None = None) -> Delta:
    delta = Delta(rank, label)
    if not isinstance(expected, torch.Tensor) or not isinstance(actual, torch.Tensor):
        if type(expected) is not type(actual) or not _equal_scalars(expected, actual):
            delta.problem = f"it is {_brief(actual)} instead of {_brief(expected)}"
        return delta
    if expected.shape != actual.shape:
        delta.problem = f"it has shape {list(actual.shape)} instead of {list(expected.shape)}"
        return delta
    if expected.dtype != actual.dtype:
        delta.problem = f"it has dtype {actual.dtype} instead of {expected.dtype}"
        return delta
    if expected.numel() == 0:
        return delta
    if not expected.is_floating_point():
        different = expected != actual
        if bool(different.any()):
            where = tuple(int(i) for i in different.nonzero()[0])
            delta.problem = f"at {list(where)} it is {actual[where].item()} instead of {expected[where].item()}"
            delta.discrete = True
        return delta
    if expected.itemsize == 1:  # torch does not subtract numbers of 8 bits
        expected, actual = expected.to(torch.float32), actual.to(torch.float32)
    delta.scale = float(expected.abs().max()) if scale is None else scale
    if math.isfinite(delta.scale) and _one(expected, actual):
        delta.elements = expected.numel()
        return delta
    difference = (expected - actual).abs_()
    largest = float(difference.max())
    if not (math.isfinite(largest) and math.isfinite(delta.scale)):
        return _compare_nonfinite(delta, expected, actual)
    delta.difference, delta.elements = largest, expected.numel()
    if largest > 0:
        _worst(delta, difference, expected, actual)
        delta.rms = _root_mean_square(difference, largest, delta.elements)
    return delta


def _one(expected: torch.Tensor, actual: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype are the same elements in memory, read alike."""
    same = expected.data_ptr() == actual.data_ptr() and expected.stride() == actual.stride()
    return same and expected.is_neg() == actual.is_neg() and expected.is_conj() == actual.is_conj()


def _root_mean_square(difference: torch.Tensor, largest: float, elements: int) -> float:
    """Computed on differences relative to the largest, whose squares neither overflow nor vanish."""
    return math.sqrt(float((difference / largest).square_().sum()) / elements) * largest


def pooled_rms(parts: Sequence[tuple[float, int]]) -> float:
    """The root mean square of several tensors' elements, from (that of a tensor, its number of elements)."""
    elements = sum(count for _, count in parts)
    largest = max((rms for rms, _ in parts), default=0.0)
    if not elements or not largest or math.isinf(largest):
        return largest
    return math.sqrt(sum((rms / largest) ** 2 * count for rms, count in parts) / elements) * largest


def _equal_scalars(expected: Any, actual: Any) -> bool:
    return bool(expected == actual or (expected != expected and actual != actual))


def _worst(delta: Delta, difference: torch.Tensor, expected: torch.Tensor, actual: torch.Tensor) -> None:
    where = _unravelled(int(difference.argmax()), difference.shape)
    delta.worst, delta.expected, delta.actual = where, float(expected[where]), float(actual[where])


def _unravelled(number: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The index of an element by its number. torch's own imports sympy, which takes half a second."""
    where: list[int] = []
    for size in reversed(shape):
        number, place = divmod(number, size)
        where.insert(0, place)
    return tuple(where)


def _compare_nonfinite(delta: Delta, expected: torch.Tensor, actual: torch.Tensor) -> Delta:
    finite = expected.isfinite() & actual.isfinite()
    same = finite | (expected == actual) | (expected.isnan() & actual.isnan())
    if not bool(same.all()):
        wrong = ~same
        if bool((expected.isfinite() & actual.isinf())[wrong].all()):
            delta.overflow = True
        else:
            where = tuple(int(i) for i in wrong.nonzero()[0])
            delta.problem = f"at {list(where)} it is {float(actual[where])} instead of {float(expected[where])}"
            delta.discrete = True
    zero = torch.zeros_like(expected)
    difference = torch.where(finite, (expected - actual).abs(), zero)
    delta.difference, delta.elements = float(difference.max()), int(finite.sum())
    delta.scale = float(torch.where(finite, expected.abs(), zero).max())
    if delta.difference > 0:
        _worst(delta, difference, expected, actual)
        delta.rms = _root_mean_square(difference, delta.difference, delta.elements)
    return delta


def _brief(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


@lru_cache(maxsize=256)
def _signs(numel: int) -> torch.Tensor:
    """Signs without pattern, the same in every process."""
    x = torch.arange(1, numel + 1, dtype=torch.int64) * 0x5851F42D4C957F2D
    x ^= (x >> 29) & ((1 << 35) - 1)
    return ((x * 0x2545F4914F6CDD1D >> 62) & 1).to(torch.float64) * 2 - 1


def digest(outputs: Sequence[Any]) -> list[list[float]]:
    """Return per output (projection on fixed signs, sum of magnitudes): enough to see that two executors disagree."""
    found = []
    for value in outputs:
        if isinstance(value, torch.Tensor) and value.numel():
            flat = value.detach().to(device="cpu", dtype=torch.float64).reshape(-1)
            found.append([float(torch.dot(flat, _signs(flat.numel()))), float(flat.abs().sum())])
        else:
            found.append([0.0, 0.0])
    return found
