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
        problem: set when the two cannot be compared by size: other shape, other NaN pattern, other storage sharing.
        discrete: whether the problem is one of values that do not differ by size: integers, booleans, NaN or inf.
        overflow: the rewritten value is infinite where the original is finite.
        own: in the native domain, the original's own largest error; `difference` is the rewritten value's then, both
            against the original in float64. `dtype` is the original's there.
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
    discrete: bool = False
    own: float = 0.0
    dtype: torch.dtype | None = None


def compare_ranks(original: RankResult, rewritten: RankResult) -> list[Delta]:
    """Compare one rank's outputs, mutated inputs and storage sharing. Both ran to their end."""
    rank = original.rank
    if original.structure != rewritten.structure or len(original.outputs) != len(rewritten.outputs):
        problem = f"the original returns {original.structure}, the rewritten program {rewritten.structure}"
        return [Delta(rank, "the outputs", problem=problem)]
    deltas = [
        _compare(rank, f"output {i}", expected, actual)
        for i, (expected, actual) in enumerate(zip(original.outputs, rewritten.outputs, strict=True))
    ]
    if original.mutates or rewritten.mutates:
        for name, expected, actual in zip(original.input_names, original.inputs, rewritten.inputs, strict=True):
            deltas.append(_compare(rank, f"input '{name}' after the run", expected, actual))
    before, after = _partition(original), _partition(rewritten)
    if before != after:
        i = next(i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b)
        problem = (
            f"it shares storage with {_partner(before, i)} in the original, with {_partner(after, i)} after the pass"
        )
        deltas.append(Delta(rank, f"output {i}", problem=problem, alias=True))
    return deltas


def compare_native(reference: RankResult, original: RankResult, rewritten: RankResult) -> list[Delta]:
    """Compare what one rank computed in the native domain with the original in float64. All ran to their end."""
    deltas = compare_ranks(original, rewritten)
    dtypes = _dtypes(original)
    if len(deltas) == 1 and deltas[0].label == "the outputs":
        return deltas
    own = {delta.label: delta for delta in compare_ranks(_wide(reference), _wide(original))}
    new = {delta.label: delta for delta in compare_ranks(_wide(reference), _wide(rewritten))}
    found = []
    for delta in deltas:
        if delta.problem is None and not delta.alias and delta.label in new:
            error = new[delta.label]
            error.own = own[delta.label].difference if delta.label in own else 0.0
            error.problem = None  # a NaN or inf that the original has too
            error.overflow = delta.overflow
            error.dtype = dtypes.get(error.label)
            found.append(error)
        else:
            found.append(delta)
    return found


def _dtypes(result: RankResult) -> dict[str, torch.dtype]:
    """Dtypes by label."""
    found = {f"output {i}": value.dtype for i, value in enumerate(result.outputs) if isinstance(value, torch.Tensor)}
    named = zip(result.input_names, result.inputs, strict=True)
    return found | {f"input '{name}' after the run": value.dtype for name, value in named}


def _wide(result: RankResult) -> RankResult:
    """The same with floating values in float64."""

    def widen(value: Any) -> Any:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(device="cpu", dtype=torch.float64) if floating else value

    wide = RankResult(result.rank, [widen(v) for v in result.outputs], result.structure)
    wide.inputs, wide.input_names = [widen(v) for v in result.inputs], result.input_names
    wide.mutates = result.mutates
    return wide


def _partition(result: RankResult) -> list[int]:
    """For each output, the first output with the same storage."""
    first: dict[Any, int] = {}
    return [
        first.setdefault(value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else ("scalar", i), i)
        for i, value in enumerate(result.outputs)
    ]


def _partner(partition: list[int], index: int) -> str:
    return "no earlier output" if partition[index] == index else f"output {partition[index]}"


def _compare(rank: int, label: str, expected: Any, actual: Any) -> Delta:
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
    difference = (expected - actual).abs_()
    largest = float(difference.max())
    delta.scale = float(expected.abs().max())
    if not (math.isfinite(largest) and math.isfinite(delta.scale)):
        return _compare_nonfinite(delta, expected, actual)
    delta.difference = largest
    if largest > 0:
        _worst(delta, difference, expected, actual)
    return delta


def _equal_scalars(expected: Any, actual: Any) -> bool:
    return bool(expected == actual or (expected != expected and actual != actual))


def _worst(delta: Delta, difference: torch.Tensor, expected: torch.Tensor, actual: torch.Tensor) -> None:
    where = tuple(int(i) for i in torch.unravel_index(difference.argmax(), difference.shape))
    delta.worst, delta.expected, delta.actual = where, float(expected[where]), float(actual[where])


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
    delta.difference = float(difference.max())
    delta.scale = float(torch.where(finite, expected.abs(), zero).max())
    if delta.difference > 0:
        _worst(delta, difference, expected, actual)
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
