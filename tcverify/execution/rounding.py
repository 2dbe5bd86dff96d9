"""How much rounding a program's outputs carry when it runs in its own dtypes: measured, not bounded.

The original runs in float64 several times over. Each time every result of an op that rounds is moved, element by element and up
or down at random, by what rounding to its own dtype may move it at most. How far the outputs then lie from
those of the run that is not disturbed is the noise that rounding is expected to make (the approach of TTrace, arXiv 2506.09280,
carried from the inputs of a layer to every value).

What a value is moved by, with u = 2⁻ᵖ the unit roundoff of its dtype (half the distance from 1 to the next number):

- u·|v|, from the rounding of the result, and half of the smallest subnormal, below which roundoff is absolute.
- of an op that sums n terms: besides, u′·√n·max(|v|, rms), where u′ is the roundoff of what it accumulates in: float32 for
  narrower dtypes, as kernels do, else its own dtype. Signs of n roundings are independent, so that their sum grows as √n; where
  terms cancel, their size is that of the tensor's other elements, hence its root mean square.
- of a collective that sums over n ranks: u·√(n − 1)·max(|v|, rms), since each of its n − 1 additions rounds to the dtype that
  travels; of a reduction of a tensor that carries a layout, whose n addends lie anywhere, the same.
- of an op that takes several steps inside, as a norm or an attention, the operands are moved by u·|v| as well: an equal program
  may round in between what a fused kernel does not. A product that is summed over ranks at once counts two roundings more.

Real rounding is uniform within these bounds: its root mean square is 1/√3 of them at most and 0.41 of them over all mantissas.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tcverify.domains import NATIVE
from tcverify.execution.compare import compare_ranks, pooled_rms
from tcverify.execution.executor import Run
from tcverify.execution.interpreter import Watch
from tcverify.execution.lockstep.lockstep import run_watched
from tcverify.execution.plan import PlanStep
from tcverify.ops.dialects.multidevice import REDUCE
from tcverify.program import Program

#: Dtypes of the results of every step, by rank and name of the node.
Dtypes = dict[tuple[int, str], list[torch.dtype]]

#: Reruns. Noise differs little from one to the next: it is the sum of many roundings, and limits leave room for the rest.
RERUNS = 4


@dataclass(frozen=True, slots=True)
class Noise:
    """What rounding is expected to make of an output.

    Attributes:
        largest: the largest change of an element over ranks and reruns; infinite where the finite elements, or a discrete
            value, changed.
        rms: the largest root mean square of the changes over the elements of all ranks, over reruns.
        scatter: the standard deviation of that root over reruns, relative to its mean. Of n independent errors of one size it
            is 1 / √(2n); where few elements are far more sensitive than the others, it is as that of few.
    """

    largest: float
    rms: float
    scatter: float = 0.0


def rounding_noise(program: Program, reference: Run) -> dict[str, Noise]:
    """Measure the noise of every output of a program, by label (see `Delta.label`).

    Args:
        reference: the program in float64, in lockstep.

    Raises:
        UnsupportedOp: an op has no meaning.
    """
    dtypes = _dtypes(program)
    found: dict[str, Noise] = {}
    roots: dict[str, list[float]] = {}
    for seed in range(1, RERUNS + 1):
        disturbance = _Disturbance(seed, dtypes)
        run = run_watched(program, disturbance.watcher, order=disturbance.order)
        parts: dict[str, list[tuple[float, int]]] = {}
        largest: dict[str, float] = {}
        for expected, actual in zip(reference.ranks, run.ranks, strict=True):
            for delta in compare_ranks(expected, actual):
                if delta.alias:
                    continue
                change = math.inf if delta.problem or delta.overflow else delta.difference
                largest[delta.label] = max(largest.get(delta.label, 0.0), change)
                parts.setdefault(delta.label, []).append((delta.rms, delta.elements))
        for label, change in largest.items():
            before = found.get(label, Noise(0.0, 0.0))
            roots.setdefault(label, []).append(pooled_rms(parts[label]))
            found[label] = Noise(max(before.largest, change), max(roots[label]), _scatter(roots[label]))
    return found


def range_used(program: Program) -> float:
    """The largest share of the range of its dtype that a value of the program uses; infinite if a value is infinite.

    Raises:
        UnsupportedOp: an op has no meaning.
    """
    largest = 0.0

    def see(value: Any) -> None:
        nonlocal largest
        for tensor in _tensors(value):
            if tensor.is_floating_point() and tensor.numel():
                magnitude = tensor.double().abs().nan_to_num_(0.0, math.inf)
                largest = max(largest, float(magnitude.max()) / torch.finfo(tensor.dtype).max)

    def watcher(rank: int, inputs: list[torch.Tensor]) -> Watch:
        see(inputs)

        def watch(step: PlanStep, args: list[Any], kwargs: dict[str, Any], value: Any) -> Any:
            see(value)
            return value

        return watch

    run_watched(program, watcher, domain=NATIVE)
    return largest


def _scatter(roots: list[float]) -> float:
    mean = fmean(roots)
    return pstdev(roots) / mean if mean and math.isfinite(mean) else 0.0


def _dtypes(program: Program) -> Dtypes:
    """The dtypes that values have when the program runs in its own."""
    found: Dtypes = {}

    def watcher(rank: int, inputs: list[torch.Tensor]) -> Watch:
        def watch(step: PlanStep, args: list[Any], kwargs: dict[str, Any], value: Any) -> Any:
            found[rank, step.name] = [v.dtype for v in _tensors(value)]
            return value

        return watch

    run_watched(program, watcher, domain=NATIVE)
    return found


class _Disturbance:
    """One rerun: moves what it sees; a function of its seed and of the order of calls."""

    def __init__(self, seed: int, dtypes: Dtypes) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._dtypes = dtypes

    def order(self, members: int) -> list[int]:
        return torch.randperm(members, generator=self._generator).tolist()

    def watcher(self, rank: int, inputs: list[torch.Tensor]) -> Watch:
        def watch(step: PlanStep, args: list[Any], kwargs: dict[str, Any], value: Any) -> Any:
            dtypes = self._dtypes.get((rank, step.name))
            if not dtypes or not _rounds(step):  # an effect alone, as of a barrier, returns nothing
                return value
            if _has_steps(step) and dtypes and dtypes[0].is_floating_point:
                value = step.run(*self._operands(args, dtypes[0]), **self._operands(kwargs, dtypes[0]))
            growth = _growth(step, args, value)
            in_place = step.op.aliases
            if isinstance(value, torch.Tensor):
                return self._moved(value, dtypes[0], growth, in_place)
            moved = iter([self._moved(v, d, growth, in_place) for v, d in zip(_tensors(value), dtypes, strict=True)])
            return type(value)([next(moved) if isinstance(v, torch.Tensor) else v for v in value])

        return watch

    def _operands(self, operands: Any, dtype: torch.dtype) -> Any:
        def moved(leaf: Any) -> Any:
            floating = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
            return leaf + self._move(leaf, dtype, 0.0) if floating else leaf

        return pytree.tree_map(moved, operands)

    def _moved(
        self, value: torch.Tensor, dtype: torch.dtype, growth: Callable[[torch.dtype], float], in_place: bool
    ) -> torch.Tensor:
        if not value.is_floating_point() or not dtype.is_floating_point or not value.numel():
            return value
        step = self._move(value, dtype, growth(dtype))
        return value.add_(step) if in_place else value + step

    def _move(self, value: torch.Tensor, dtype: torch.dtype, growth: float) -> torch.Tensor:
        """What to move `value` by.

        Args:
            growth: what the roundoff of a sum inside is, relative to its size.
        """
        kind = torch.finfo(dtype)
        magnitude = value.abs()
        size = magnitude * (kind.eps / 2) + kind.tiny * kind.eps / 2
        if growth:
            rms = float(magnitude.square().mean().sqrt())
            size += magnitude.clamp(min=rms) * growth
        signs = torch.randint(0, 2, value.shape, generator=self._generator, dtype=torch.int8)
        return torch.where(signs.bool(), size, -size).nan_to_num_(0.0, 0.0, 0.0)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [v for v in value if isinstance(v, torch.Tensor)] if isinstance(value, (tuple, list)) else []


# ------------------------------------------------------------------------------------------------------ what ops round

_EXACT = frozenset(
    {
        "clone", "copy", "cat", "stack", "repeat", "repeat_interleave", "index", "index_select", "gather", "embedding",
        "full", "full_like", "zeros", "ones", "zeros_like", "ones_like", "neg", "abs", "relu", "maximum", "minimum",
        "where", "masked_fill", "amax", "amin", "contiguous", "constant_pad_nd", "flip", "roll", "tril", "triu", "fill_",
        "zero_", "copy_", "relu_", "init_routing_v2", "unpermute_tokens",
    }
)  # fmt: skip
#: Of aten, those that take several steps inside; of other dialects, `Op.native` tells.
_STEPS = frozenset(
    {
        "softmax", "_softmax", "log_softmax", "_log_softmax", "layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm",
        "gelu", "silu", "logsumexp", "var", "std", "scaled_dot_product_attention", "addcmul", "addcdiv", "lerp",
    }
)  # fmt: skip
_MATMULS = frozenset({"mm", "bmm", "matmul", "mv", "dot", "linear"})
_WITH_ADDEND = frozenset({"addmm", "baddbmm", "addmv"})


def _base(step: PlanStep) -> str:
    return step.op.name.partition("::")[2].split(".")[0]


def _rounds(step: PlanStep) -> bool:
    """Whether an op computes: those that move, choose or view values do not round. One that writes does, as its form that
    does not write."""
    op = step.op
    if op.identity or _base(step) in _EXACT:
        return False
    if op.collective:
        return _sums(step) or "compute" in op.resources
    return not op.aliases or _base(step).endswith("_")


def _has_steps(step: PlanStep) -> bool:
    op = step.op
    return not op.aliases and not op.collective and (op.native is not None or _base(step) in _STEPS)


def _sums(step: PlanStep) -> bool:
    return step.op.name == REDUCE or _base(step).endswith(("all_reduce", "reduce_scatter"))


def _growth(step: PlanStep, args: list[Any], value: Any) -> Callable[[torch.dtype], float]:
    """The roundoff of the sums inside an op, relative to the size of the result, by its dtype."""
    terms = _terms(step, args, value)
    members = len(args[-1]) if _sums(step) and args and isinstance(args[-1], (list, tuple)) else 1
    if step.op.name == REDUCE:
        members = _addends(args)
    roundings = members - 1 + (2 if step.op.collective and "compute" in step.op.resources else 0)

    def growth(dtype: torch.dtype) -> float:
        own = torch.finfo(dtype).eps / 2
        wide = min(own, torch.finfo(torch.float32).eps / 2)
        inside = wide * math.sqrt(terms) if terms > 1 else 0.0
        return inside + own * math.sqrt(roundings)

    return growth


def _addends(args: list[Any]) -> int:
    """How many values a `multidevice::reduce` adds up, wherever they lie; 1 where it chooses among them."""
    _, dim, reduce_op, _, _, shape = args[:6]
    return max(1, shape[dim]) if reduce_op in ("sum", "avg", "product") else 1


def _terms(step: PlanStep, args: list[Any], value: Any) -> int:
    """How many terms each element of the result sums; 1 of ops that sum nothing."""
    name = _base(step)
    operands = [tensor for a in args for tensor in _tensors(a)]
    if not operands:
        return 1
    first = operands[1 if name in _WITH_ADDEND and len(operands) > 1 else 0]
    last = first.shape[-1] if first.dim() else 1
    if name in _MATMULS or name in _WITH_ADDEND or "matmul" in name or "linear" in name:
        return 2 * last if name.startswith("mxfp4") else last
    if "norm" in name or "softmax" in name:
        return last
    if name == "attention":
        return max(last, operands[1].shape[-3]) if len(operands) > 1 and operands[1].dim() > 2 else last
    results = _tensors(value)
    if not results or step.op.collective:
        return 1
    return max(1, max(o.numel() for o in operands) // max(1, results[0].numel()))


__all__ = ["RERUNS", "Noise", "range_used", "rounding_noise"]
