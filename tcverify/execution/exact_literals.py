"""Literals of a rewritten program that replace what the original's literals compute: rounded, whereas the field is exact.

A compiler folds constants: x / c becomes x · (1/c), 0.1 · 0.2 becomes 0.020000000000000004. The exact domain sees the rounding.
This module finds the expression behind such a literal, of up to two arithmetic operations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tcverify.domains import residue
from tcverify.domains.exact.field import P
from tcverify.ops import TensorSpec
from tcverify.ops.leaves import leaves
from tcverify.program import Program

#: A literal within this many units in the last place of an expression is its rounded value.
MAX_ULPS = 4

#: Most numbers that are combined with each other.
MAX_NUMBERS = 48

#: Sums are explanations only if no operand is larger by this factor.
CANCELLING = 4.0

#: Larger numbers are not literals used in arithmetic.
LARGEST = 1e100


@dataclass(frozen=True, slots=True)
class RoundedLiteral:
    """A literal explained by an expression of other numbers.

    Attributes:
        value: the literal.
        expression: its explanation, as text.
        residue: of the expression.
    """

    value: float
    expression: str
    residue: float


def rounded_literals(
    original: Program, rewritten: Program, old: set[float], new: set[float]
) -> Iterator[list[RoundedLiteral]]:
    """Propose explanations of the literals that only one of two programs has: lists of expressions.

    Those of the rewritten program may be computed from the original's; those of the original may have been each other's
    inverses, or values that the rewritten one computes from its own. An eps is never explained: it is the user's own number.

    Args:
        old, new: the floating-point literals of the programs.
    """
    epsilons = _epsilons(original) | _epsilons(rewritten)
    fresh = sorted((v for v in new - old - epsilons if _usual(v)), key=abs)
    gone = sorted((v for v in old - new - epsilons if _usual(v)), key=abs)
    shared = [_itself(n) for n in [1, *_sizes(original), *sorted((v for v in old & new if _usual(v)), key=abs)]]
    products = _products(gone)
    yield _stand_for(fresh, products, shared)
    yield _stand_for(fresh, [], [*shared, *products])
    inverses: list[RoundedLiteral] = []
    free: list[float] = []
    for value in gone:
        found = _stand_for([value], [_itself(v) for v in free], shared)
        inverses += found
        free += [] if found else [value]
    yield inverses + _stand_for(fresh, [], shared)
    yield _stand_for(gone, _products(fresh), shared)


def _stand_for(
    values: list[float], preferred: list[RoundedLiteral], others: list[RoundedLiteral]
) -> list[RoundedLiteral]:
    """Explanations of these literals in terms of others, as far as found; preferred ones if there is a choice."""
    found = []
    for value in values:
        known = (preferred + others)[:MAX_NUMBERS]
        by_preferred = _explained(value, preferred[:MAX_NUMBERS], known)
        match = by_preferred or _explained(value, known, known)
        if match is not None:
            found.append(match)
    return found


def _products(values: list[float]) -> list[RoundedLiteral]:
    """Numbers, and all products of them and of their inverses; of the first five, if there are more."""
    found: dict[str, RoundedLiteral] = {}
    for value in values[:5]:
        one = _itself(value)
        inverse = RoundedLiteral(1 / one.value, f"1 / {one.expression}", _combined("/", 1, one.residue))
        for known in list(found.values()):
            for factor in (one, inverse):
                residue_ = _combined("·", known.residue, factor.residue)
                made = RoundedLiteral(known.value * factor.value, f"{known.expression} · {factor.expression}", residue_)
                found[made.expression] = made
        found[one.expression], found[inverse.expression] = one, inverse
    return sorted(found.values(), key=lambda e: len(e.expression)) + [_itself(v) for v in values[5:]]


def _usual(value: float) -> bool:
    return value != 0 and 1 / LARGEST < abs(value) < LARGEST


def new_constant(original: Program, rewritten: Program) -> str | None:
    """Name an attribute of the rewritten program that holds numbers which no attribute of the original holds."""
    known = [values for _, values in _attributes(original)]
    everything = torch.cat(known).unique() if known else torch.empty(0, dtype=torch.float64)
    for name, values in _attributes(rewritten):
        if not bool(torch.isin(values, everything).all()):
            return name
    return None


def _attributes(program: Program) -> Iterator[tuple[str, torch.Tensor]]:
    """Attributes that the graphs read, with their values; floating-point ones alone."""
    for graph, module in zip(program.graphs, program.modules, strict=False):
        for node in graph.nodes:
            if node.op != "get_attr" or module is None:
                continue
            owner: Any = module
            for part in str(node.target).split("."):
                owner = getattr(owner, part)
            if isinstance(owner, torch.Tensor) and owner.is_floating_point():
                yield str(node.target), owner.detach().to(torch.float64).reshape(-1)


# -------------------------------------------------------------------------------------------------------- expressions


def _itself(number: float | int) -> RoundedLiteral:
    return RoundedLiteral(float(number), repr(number), residue(number))


def _explained(value: float, first: list[RoundedLiteral], second: list[RoundedLiteral]) -> RoundedLiteral | None:
    """Explanation of a literal: an expression of one or two operations with an operand among `first`."""
    plain = {e.residue for e in (*first, *second)}  # (0.1 + 8) − 8 is 0.1 in the field, however it is rounded
    one_step = [e for e in _one_step(first, second) if e.residue not in plain or e in first or e in second]
    within = MAX_ULPS * math.ulp(value)
    for e in one_step:
        if abs(e.value - value) <= within:
            return RoundedLiteral(value, e.expression, e.residue)
    if not one_step:
        return None
    left = torch.tensor([e.value for e in one_step], dtype=torch.float64).unsqueeze(1)
    right = torch.tensor([e.value for e in second], dtype=torch.float64)
    for sign, combined in (
        ("·", left * right), ("/", left / right), ("\\", right / left), ("+", left + right), ("-", left - right),
    ):  # fmt: skip
        near = (combined - value).abs() <= within
        if sign in "+-":  # as in `_sums`
            near &= torch.maximum(left.abs(), right.abs()) <= CANCELLING * abs(value)
        for i, j in near.nonzero()[:16].tolist():
            a, b = one_step[i], second[j]
            if sign == "\\":
                found = RoundedLiteral(
                    value, f"{b.expression} / ({a.expression})", _combined("/", b.residue, a.residue)
                )
            else:
                found = RoundedLiteral(
                    value, f"({a.expression}) {sign} {b.expression}", _combined(sign, a.residue, b.residue)
                )
            if found.residue not in plain:
                return found
    return None


def _one_step(first: list[RoundedLiteral], second: list[RoundedLiteral]) -> Iterator[RoundedLiteral]:
    """Numbers themselves, and what one step makes of them and of others."""
    for a in first:
        yield a
        yield RoundedLiteral(-a.value, f"-{a.expression}", -a.residue)
    pairs = [(a, b) for a in first for b in second]
    for a, b in pairs:  # products and quotients first: √2 is 1 / √½ and √½ + √½, and mostly came from the first
        yield RoundedLiteral(
            a.value * b.value, f"{a.expression} · {b.expression}", _combined("·", a.residue, b.residue)
        )
        yield RoundedLiteral(
            a.value / b.value, f"{a.expression} / {b.expression}", _combined("/", a.residue, b.residue)
        )
        yield RoundedLiteral(
            b.value / a.value, f"{b.expression} / {a.expression}", _combined("/", b.residue, a.residue)
        )
    for a, b in pairs:
        for sign, value in _sums(a.value, b.value):
            yield RoundedLiteral(value, f"{a.expression} {sign} {b.expression}", _combined(sign, a.residue, b.residue))


def _sums(a: float, b: float) -> Iterator[tuple[str, float]]:
    """Sum and difference, unless they cancel so much that rounding the operands says more than the result."""
    for sign, value in (("+", a + b), ("-", a - b)):
        if max(abs(a), abs(b)) <= CANCELLING * abs(value):
            yield sign, value


def _combined(sign: str, a: float, b: float) -> float:
    left, right = int(a), int(b)
    if sign == "/":
        right = pow(right, P - 2, P)
    result = left + right if sign == "+" else left - right if sign == "-" else left * right
    return residue(result)


# -------------------------------------------------------------------------------------------------------- numbers


def _sizes(program: Program) -> list[int]:
    """The sizes of a program's values."""
    return sorted(
        {
            size
            for graph in program.graphs
            for node in graph.nodes
            for spec in leaves(node.meta.get("val"), TensorSpec)
            for size in spec.shape
            if size > 1
        }
    )


def _epsilons(program: Program) -> set[float]:
    """The literals of a program that are an eps by the name of their argument."""
    found = set()
    for graph in program.graphs:
        for node in graph.nodes:
            schema = getattr(node.target, "_schema", None)
            names = [argument.name for argument in schema.arguments] if schema is not None else []
            named = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
            if isinstance(named.get("eps"), float):
                found.add(named["eps"])
    return found


__all__ = ["RoundedLiteral", "new_constant", "rounded_literals"]
