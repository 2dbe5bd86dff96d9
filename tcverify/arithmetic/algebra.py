"""What the ops of the exact domain are composed of, in the field and, for comparison, in the reals.

Both algebras offer the same primitives, so that one table of ops (`exact_ops`) serves both: run in the reals, a program calls
the same functions in the same order as in the field, and it can be seen at which real numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tcverify.arithmetic import field
from tcverify.errors import UnsupportedOp

Tensor = torch.Tensor

#: Most different values of a tensor that is read as literals, one by one.
MAX_CONSTANTS = 1 << 14


class Trace:
    """At which points a program calls functions that its algebra cannot look into.

    Attributes:
        calls: (function, its arguments, flat), in order.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, Tensor]] = []


class Field:
    """Residues of `field.P`. Every result is canonical.

    Args:
        draw: number of the draw, which keys the hashes.
        literals: residues of literals that are not to be read as they stand.
    """

    def __init__(self, draw: int, trace: Trace | None = None, literals: dict[float, float] | None = None) -> None:
        self.draw = draw
        self.trace = trace
        self.infinite = False  # whether an infinity has entered
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
        try:
            found = self._literals[value] if value in self._literals else field.residue(value)
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
        """1 / n for a count, as a residue. That of a multiple of P is no number."""
        if number % field.P == 0:
            raise UnsupportedOp("mean", f"the exact domain cannot divide by {number}")
        return field.residue(pow(number, -1, field.P))

    def power(self, x: Tensor, exponent: int) -> Tensor:
        """x to an integer power."""
        self.finite("power", x)
        return field.power(x, exponent)

    def matmul(self, a: Tensor, b: Tensor, multiply: torch._ops.OpOverload) -> Tensor:
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
        self.note(name, x)
        found = field.hashed(name, self.draw, x)
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
        found = torch.tensor([self.literal(value) for value in values.tolist()], dtype=torch.float64)
        return found[places]

    def note(self, name: str, *arguments: Any) -> None:
        """Say that a function, or the order of values, is asked for."""
        if self.trace is not None:
            for x in arguments:
                if isinstance(x, torch.Tensor) and x.is_floating_point():
                    self.trace.calls.append((name, x.detach().clone().reshape(-1)))


class Reals(Field):
    """float64 arithmetic by the same steps."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(0, trace)

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

    def matmul(self, a: Tensor, b: Tensor, multiply: torch._ops.OpOverload) -> Tensor:
        result: Tensor = multiply(a, b)
        return result

    def product_along(self, x: Tensor, dim: int, keepdim: bool) -> Tensor:
        return x.prod(dim, keepdim=keepdim)

    def function(self, name: str, x: Tensor, real: Callable[[], Tensor] | None = None) -> Tensor:
        self.note(name, x)
        return real() if real is not None else getattr(torch, name)(x)
