"""Equivalence in the native domain: the rewritten program is about as accurate as the original.

Both versions run in the program's own dtypes. The original also runs in float64, which counts as exact (its roundoff is 2⁻²⁹
of that of float32). The error of a version is its distance from that result. Errors are judged per output, over all ranks.

An output is refuted if its error exceeds

    limit = RMS · max(noise, own)        for the root mean square over its elements, or
    limit = LARGEST · max(noise, own)    for the largest of them.

- own: the error of the original itself. It covers what the noise does not model: kernels that are less accurate than
  assumed, and discontinuities near an argument.
- noise: the error of the original that rounding is expected to cause: see `execution.rounding`. It moves every result, also
inside of fused
  ops, at random by the largest error that rounding may cause; real rounding errors are uniform within that bound.
- RMS = 1: the root mean square of real rounding is 0.41 of its bound, and that of a sound program's error about a quarter of the
  noise. So a rewrite may round about 16 times as often as the original on the way to an output; decomposing a norm or splitting
  a product in two does so two to four times. Measured over all dtypes and lengths (`benchmarks/native.py`), outputs of sound
  rewrites that round differently use 0.2 of this limit, one in a hundred 0.5, and the worst of 2,566 0.76.
- LARGEST = 2: detects errors in few elements of a large tensor. The largest of many errors varies more between draws than
  their root mean square; a factor of two leaves room for that.
- Root mean squares of few elements vary: those of n independent errors by a share of about 1 / √(2n). Both limits grow by
  1 + SCATTER / √n. If few of many elements dominate the error because they are very sensitive (a row that a norm divides by
  almost zero), it varies like that of these few: the variation of the noise between its reruns, beyond what n elements explain,
  then replaces 1 / √n.

If the rewritten version leaves the range of its dtype and the original does not (fp16: 65504), the verdict is inconclusive. Of a
new NaN, too, if it may come from that. It may not if no value of either version is infinite or exceeds RANGE of the range of its
dtype; then the output is refuted, unless the noise turns the original to NaN as well. A
discrete value that differs is refuted only if the original computes the same value in float64 as in its own dtypes and the noise
does not flip it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tcverify.execution import Comparison, Delta, Noise, pooled_rms
from tcverify.program.finding import Doubt, Finding

#: See the docstring of the module.
RMS = 1.0
LARGEST = 2.0
SCATTER = 3.0
RANGE = 2.0**-10

#: Errors up to this multiple of the original's own are accepted, whatever the noise is; this covers most programs.
NO_WORSE = 1.25


def native_differences(
    comparison: Comparison, noise: Callable[[], Mapping[str, Noise]], range_used: Callable[[], float]
) -> list[Finding | Doubt]:
    """Judge one comparison: at most one finding, about the output that exceeds its limit most.

    Args:
        noise: measures the noise of the original's outputs, by label; costly, so called only when needed.
        range_used: measures the share of the range of its dtype that any value of either version uses; called only when needed.
    """
    by_label: dict[str, list[Delta]] = {}
    for delta in comparison.deltas:
        by_label.setdefault(delta.label, []).append(delta)
    known: Mapping[str, Noise] | None = None
    doubts: list[Finding | Doubt] = []
    worst: tuple[OutputErrors, list[Delta]] | None = None
    for label, deltas in by_label.items():
        problem = next((d for d in deltas if d.problem is not None), None)
        if problem is not None:
            if not problem.discrete:
                return [_wrong(problem, comparison)]
            known = noise() if known is None else known
            if any(d.unstable for d in deltas) or math.isinf(known.get(label, _NONE).largest):
                doubts.append(Doubt("ill-conditioned", f"{label} flips when values are rounded"))
                continue
            return [_wrong(problem, comparison)]
        undefined = next((d for d in deltas if d.undefined), None)
        if undefined is not None and range_used() < RANGE:
            known = noise() if known is None else known
            if math.isinf(known.get(label, _NONE).largest):
                doubts.append(Doubt("ill-conditioned", f"{label} is nan or not, by how values are rounded"))
                continue
            return [_wrong(replace(undefined, problem=undefined.undefined), comparison)]
        if any(d.overflow for d in deltas):
            doubts.append(Doubt("overflow", f"{label} leaves the range of its dtype after the pass"))
            continue
        if all(d.equal for d in deltas) or _no_worse(deltas):
            continue
        known = noise() if known is None else known
        found = known.get(label, _NONE)
        if math.isinf(found.largest):
            doubts.append(Doubt("ill-conditioned", f"{label} may leave the range of its dtype when values are rounded"))
            continue
        errors = errors_of(deltas, found)
        if errors.share > 1 and (worst is None or errors.share > worst[0].share):
            worst = errors, deltas
    if worst is not None:
        return [_inaccurate(*worst, comparison)]
    return doubts


_NONE = Noise(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class OutputErrors:
    """The errors of an output and their limit, by one measure.

    Attributes:
        measure: "root mean square" over the elements of all ranks, or "largest" of them.
        error: of the rewritten version.
        own: of the original.
        noise: the expected error due to rounding.
        factor: by which the larger of the two is multiplied to get the limit.
    """

    measure: str
    error: float
    own: float
    noise: float
    factor: float

    @property
    def limit(self) -> float:
        """The largest accepted error."""
        return self.factor * max(self.own, self.noise)

    @property
    def share(self) -> float:
        """The share of the limit that is used; beyond 1 the output is refuted."""
        if self.limit:
            return self.error / self.limit
        return math.inf if self.error else 0.0


def errors_of(deltas: list[Delta], noise: Noise) -> OutputErrors:
    """The errors of one output on all ranks, by the measure that uses more of its limit."""
    by_count = 1 / math.sqrt(max(1, sum(d.elements for d in deltas)))
    allowance = 1 + SCATTER * max(by_count, math.sqrt(2) * noise.scatter - by_count)
    by_rms = OutputErrors("root mean square", _rms(deltas), _rms(deltas, own=True), noise.rms, RMS * allowance)
    largest, own = max(d.difference for d in deltas), max(d.own for d in deltas)
    by_largest = OutputErrors("largest", largest, own, noise.largest, LARGEST * allowance)
    return by_rms if by_rms.share >= by_largest.share else by_largest


def _rms(deltas: list[Delta], own: bool = False) -> float:
    return pooled_rms([(d.own_rms if own else d.rms, d.elements) for d in deltas])


def _no_worse(deltas: list[Delta]) -> bool:
    return _rms(deltas) <= NO_WORSE * _rms(deltas, own=True) and max(d.difference for d in deltas) <= NO_WORSE * max(
        d.own for d in deltas
    )


# -------------------------------------------------------------------------------------------------------------- findings


def _inaccurate(errors: OutputErrors, deltas: list[Delta], comparison: Comparison) -> Finding:
    delta = max(deltas, key=lambda d: d.difference)
    dtype = str(delta.dtype).removeprefix("torch.")
    ranks = sorted(d.rank for d in deltas if d.difference > d.own)[:8] or [delta.rank]
    where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    limit = errors.limit
    times = f"{errors.share:.2g} times its limit {limit:.2e}" if limit else "where its limit is 0"
    which = "the largest error" if errors.measure == "largest" else "the root mean square of the errors"
    detail = (
        f"in {dtype}, {which} of its {sum(d.elements for d in deltas)} elements is {errors.error:.2e}, {times}\n"
        f"limit: {errors.factor:.3g} × the larger of the noise that rounding explains ({errors.noise:.2e}) and the original's "
        f"own error ({errors.own:.2e}); scale {max(d.scale for d in deltas):.2e}\n"
        f"worst at {list(delta.worst)} on rank {delta.rank}: {delta.actual:.9g} where float64 gives {delta.expected:.9g}"
    )
    data = {
        "label": delta.label, "ranks": ranks, "executor": comparison.executor, "domain": "native",
        "difference": delta.difference, "measure": errors.measure, "error": errors.error, "limit": limit,
        "factor": errors.factor, "noise": errors.noise, "own": errors.own,
    }  # fmt: skip
    title = f"{delta.label} is less accurate than rounding explains on {where}"
    return Finding("wrong-value", "equivalence", title, detail, None, delta.rank, data)


def _wrong(delta: Delta, comparison: Comparison) -> Finding:
    what = "shares storage differently" if delta.alias else "is wrong"
    title = f"{delta.label} {what} on rank {delta.rank} in the program's own dtypes"
    data = {
        "label": delta.label, "ranks": [delta.rank], "executor": comparison.executor, "domain": "native",
        "difference": None,
    }  # fmt: skip
    kind = "wrong-alias" if delta.alias else "wrong-value"
    return Finding(kind, "equivalence", title, delta.problem or "", None, delta.rank, data)


__all__ = ["LARGEST", "RANGE", "RMS", "SCATTER", "OutputErrors", "errors_of", "native_differences"]
