"""What the ops of the exact domain are composed of, in the field and, for comparison, in reals of another kind.

Both algebras offer the same primitives, so that one table of ops (`ops`) serves both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tcverify.domains.exact import field
from tcverify.domains.uninitialized import RESIDUE
from tcverify.errors import UnsupportedOp

Tensor = torch.Tensor

#: Most different values of a tensor that is read as literals, one by one.
MAX_CONSTANTS = 1 << 14


class Field:
    """Residues of `field.P`. Every result is canonical.

    Args:
        draw: number of the draw, which keys the hashes.
        literals: residues of literals that are not read literally.

    Attributes:
        read: the floating-point literals that occurred, including those within composed
        ops. unwritten: contents of uninitialised memory.
    """

    unwritten = RESIDUE

    def __init__(self, draw: int, literals: dict[float, float] | None = None) -> None:
        self.draw = draw
        self.infinite = False  # whether an infinity has entered
        self.read: set[float] = set()
        self._literals = literals or {}

    def embed(self, x: Tensor) -> Tensor:
        """Integers and booleans as residues; floating values are residues already."""
        return x if x.is_floating_point() else field.canonical(x.to(torch.float64))

    def literal(self, value: Any) -> Any:
        """A literal, or a tensor in the place of one."""
        if isinstance(value, torch.Tensor):
            return self.embed(value)
        if not isinstance(value, (bool, int, float)):
            raise UnsupportedOp(str(type(value).__name__), "the exact domain has no such number")
        if type(value) is float:
            self.read.add(value)
            if value in self._literals:
                return self._literals[value]
        return self._residue(value)

    def _residue(self, value: float | int) -> float:
        try:
            found = field.residue(value)
        except ValueError:
            raise UnsupportedOp("nan", "the exact domain has no NaN") from None
        self.infinite = self.infinite or math.isinf(found)
        return found

    def settle(self, x: Tensor) -> Tensor:
        """Make a sum of residues canonical. Infinities stay."""
        found = field.canonical(x)
        if self.infinite:
            found = torch.where(x.isinf(), x, found)
            if bool(found.isnan().any()):
                raise UnsupportedOp("inf − inf", "the exact domain has no NaN")
        return found

    def finite(self, op: str, *values: Any) -> None:
        """Refuse infinities, where what an op makes of them is not modelled."""
        if self.infinite and any(isinstance(v, torch.Tensor) and bool(v.isinf().any()) for v in values):
            raise UnsupportedOp(op, "the exact domain does not carry infinities through it")

    def multiply(self, a: Any, b: Any) -> Tensor:
        """a · b."""
        self.finite("product", a, b)
        return field.canonical(torch.mul(a, b))

    def inverse(self, x: Tensor) -> Tensor:
        """1 / x; the field says 0 for x = 0."""
        self.finite("quotient", x)
        return field.inverse(x)

    def reciprocal(self, number: int) -> float:
        """1 / n for a count, as a residue. For a multiple of P it does not exist."""
        if number % field.P == 0:
            raise UnsupportedOp("mean", f"the exact domain cannot divide by {number}")
        return field.residue(pow(number, -1, field.P))

    def power(self, x: Tensor, exponent: int) -> Tensor:
        """x to an integer power."""
        self.finite("power", x)
        return field.power(x, exponent)

    def matmul(self, a: Tensor, b: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Matrix product by aten::mm, bmm, mv or dot."""
        self.finite("matrix product", a, b)
        return field.matmul(a, b, multiply)

    def product_along(self, x: Tensor, dim: int, keepdim: bool) -> Tensor:
        """Product over a dim."""
        self.finite("product", x)
        return field.product_along(x, dim, keepdim)

    def function(self, name: str, x: Tensor, real: Callable[[], Tensor] | None = None) -> Tensor:
        """An elementwise function.

        Args:
            real: computes it in the reals, where torch has no function of one argument by this name.
        """
        found = field.keyed_hash(name, self.draw, x)
        if self.infinite and bool(found.isnan().any()):
            raise UnsupportedOp(name, "the exact domain does not carry infinities through it")
        return found

    def constants(self, x: Tensor) -> Tensor:
        """A tensor of literals: each element as `literal` reads it.

        Raises:
            UnsupportedOp: it has too many different values.
        """
        if not x.is_floating_point():
            return x
        values, places = x.to(torch.float64).unique(return_inverse=True)
        if values.numel() > MAX_CONSTANTS:
            raise UnsupportedOp(
                "constant", f"the exact domain reads at most {MAX_CONSTANTS} different values as literals"
            )
        found = torch.tensor([self._residue(value) for value in values.tolist()], dtype=torch.float64)
        return found[places]

    def choose(self, run: Callable[..., Any], *values: Tensor) -> Any:
        """Run what picks among values by their order, by that of symmetric residues here; |x| is max(x, −x)."""
        return run(*values)

    def compare(self, run: Callable[..., Any], *values: Tensor) -> Any:
        """Run what says how values are ordered: comparisons, signs, positions."""
        return run(*values)


#: Stands among the names of functions for the order of numbers.
ORDER = "the order of numbers"


class ScrambledField(Field):
    """float64 with other smooth functions in place of exp, sqrt, …, and another order in place of that of numbers.

    Programs that are equal by the laws of fields agree here as in float64: up to rounding. Where they do not, one of them relies
    on a law of a function or of the order, which does not hold here. A defect too small for float64 stays small, since what is
    exchanged is smooth, whatever functions it goes through.

    Args:
        only: the only function that is replaced; None replaces all.
        order: which other order replaces that of numbers.

    Attributes:
        called: the functions that a program has called.
    """

    unwritten = math.nan

    def __init__(self, only: str | None = None, order: int = 0) -> None:
        super().__init__(0)
        self.only = only
        self.order = order
        self.called: set[str] = set()

    def embed(self, x: Tensor) -> Tensor:
        return x if x.is_floating_point() else x.to(torch.float64)

    def literal(self, value: Any) -> Any:
        return self.embed(value) if isinstance(value, torch.Tensor) else float(value)

    def settle(self, x: Tensor) -> Tensor:
        return x.clone()

    def finite(self, op: str, *values: Any) -> None:
        return

    def constants(self, x: Tensor) -> Tensor:
        return x.to(torch.float64) if x.is_floating_point() else x

    def multiply(self, a: Any, b: Any) -> Tensor:
        return torch.mul(a, b)

    def inverse(self, x: Tensor) -> Tensor:
        return x.reciprocal()

    def reciprocal(self, number: int) -> float:
        return 1.0 / number

    def power(self, x: Tensor, exponent: int) -> Tensor:
        return x**exponent

    def matmul(self, a: Tensor, b: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return multiply(a, b)

    def product_along(self, x: Tensor, dim: int, keepdim: bool) -> Tensor:
        return x.prod(dim, keepdim=keepdim)

    def function(self, name: str, x: Tensor, real: Callable[[], Tensor] | None = None) -> Tensor:
        self.called.add(name)
        if self.only in (None, name):
            return field.keyed_smooth_function(name, x)
        return real() if real is not None else getattr(torch, name)(x)

    def choose(self, run: Callable[..., Any], *values: Tensor) -> Any:
        if self.only not in (None, ORDER):
            return self.compare(run, *values)
        flat = torch.cat([v.reshape(-1) for v in values])
        of_flat = field.scrambled_order(flat, self.order)
        shaped = [
            part.view(v.shape) for part, v in zip(of_flat.split([v.numel() for v in values]), values, strict=True)
        ]
        found = run(*shaped)
        self.called.add(ORDER)
        zero = torch.zeros(1, dtype=torch.float64)
        keys, places = torch.cat([of_flat, -of_flat, zero]).sort()
        by_key = torch.cat([flat, -flat, zero])[places]

        def back(key: Tensor) -> Tensor:
            """The value of a key. NaN, which no table finds, stays."""
            at = torch.searchsorted(keys, key.contiguous()).clamp(max=keys.numel() - 1)
            return torch.where(key.isnan(), key, by_key[at])

        return pytree.tree_map_only(torch.Tensor, lambda t: back(t) if t.is_floating_point() else t, found)

    def compare(self, run: Callable[..., Any], *values: Tensor) -> Any:
        self.called.add(ORDER)
        return run(
            *(values if self.only not in (None, ORDER) else [field.scrambled_order(v, self.order) for v in values])
        )
