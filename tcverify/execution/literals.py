"""Literals of a rewritten program that stand for what the original's literals compute: rounded, where the field is exact.

A compiler folds constants: x / c becomes x · (1/c), 0.1 · 0.2 becomes 0.020000000000000004. The exact domain sees the rounding.
What such a literal was rounded from is found here, one step of arithmetic deep.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from tcverify.arithmetic import residue
from tcverify.arithmetic.field import P
from tcverify.ops import TensorSpec
from tcverify.program import Program

#: A literal so many units in the last place from what it may stand for was rounded on the way.
MAX_ULPS = 4

#: Most numbers of the original that are combined with each other.
MAX_NUMBERS = 48


@dataclass(frozen=True, slots=True)
class Rounded:
    """A literal that stands for an expression of the original's numbers.

    Attributes:
        value: the literal.
        expression: what it stands for, as text.
        residue: of the expression.
    """

    value: float
    expression: str
    residue: float


def rounded_literals(original: Program, rewritten: Program) -> list[Rounded]:
    """Return the literals of the rewritten program that the original does not have and that its numbers explain.

    An eps is none: it is the user's own number, which no rewrite computes anew.
    """
    old = {value for graph in original.graphs for value, is_eps in _literals(graph) if not is_eps}
    new = {value for graph in rewritten.graphs for value, is_eps in _literals(graph) if not is_eps}
    as_eps = {value for graph in rewritten.graphs for value, is_eps in _literals(graph) if is_eps}
    unknown = sorted(v for v in new - old - as_eps if isinstance(v, float))
    if not unknown:
        return []
    known = list(_expressions(_numbers(original, old)))
    found = []
    for value in unknown:
        match = next((e for e in known if abs(e.value - value) <= MAX_ULPS * math.ulp(value)), None)
        if match is not None:
            found.append(Rounded(value, match.expression, match.residue))
    return found


def _numbers(program: Program, literals: set[float | int]) -> list[Rounded]:
    """What a rewrite may compute with: the literals of a program, the sizes of its values and their square roots."""
    sizes = {
        size
        for graph in program.graphs
        for node in graph.nodes
        for spec in _specs(node.meta.get("val"))
        for size in spec.shape
        if size > 1
    }
    roots = {math.sqrt(size) for size in sizes}  # attention divides by one
    ordered = [*sorted(literals, key=abs), *sorted(sizes), *sorted(roots)]
    return [Rounded(float(n), repr(n), residue(n)) for n in ordered[:MAX_NUMBERS] if n]


def _specs(value: Any) -> Iterator[TensorSpec]:
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _specs(inner)


def _expressions(numbers: list[Rounded]) -> Iterator[Rounded]:
    """The numbers themselves, and what one step makes of them."""
    for a in numbers:
        yield a
        yield Rounded(-a.value, f"-{a.expression}", -a.residue)
        yield Rounded(1 / a.value, f"1 / {a.expression}", _mod(_inverse(a.residue)))
        yield Rounded(a.value * a.value, f"{a.expression} squared", _mod(a.residue * a.residue))
    for a in numbers:
        for b in numbers:
            yield Rounded(a.value * b.value, f"{a.expression} · {b.expression}", _mod(a.residue * b.residue))
            yield Rounded(a.value / b.value, f"{a.expression} / {b.expression}", _mod(a.residue * _inverse(b.residue)))
            yield Rounded(a.value + b.value, f"{a.expression} + {b.expression}", _mod(a.residue + b.residue))
            yield Rounded(a.value - b.value, f"{a.expression} - {b.expression}", _mod(a.residue - b.residue))


def _inverse(r: float) -> int:
    return pow(int(r), -1, P) if int(r) % P else 0


def _mod(r: float | int) -> float:
    return residue(int(r))


def _literals(graph: fx.Graph) -> Iterator[tuple[float | int, bool]]:
    """Number literals of a graph, each with whether it is an eps by the name of its argument."""
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        schema = getattr(node.target, "_schema", None)
        names = [argument.name for argument in schema.arguments] if schema is not None else []
        for position, argument in enumerate(node.args):
            name = names[position] if position < len(names) else ""
            yield from ((value, name == "eps") for value in _finite(argument))
        for name, argument in node.kwargs.items():
            yield from ((value, name == "eps") for value in _finite(argument))


def _finite(argument: Any) -> Iterator[float | int]:
    if type(argument) is int or (isinstance(argument, float) and math.isfinite(argument)):
        yield argument
    elif isinstance(argument, (list, tuple)):
        for inner in argument:
            yield from _finite(inner)


__all__ = ["Rounded", "rounded_literals"]
