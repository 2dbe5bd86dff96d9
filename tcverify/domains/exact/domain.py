"""The exact domain: programs run in a prime field, where equal programs agree bit for bit. See `field` and `ops`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tcverify.domains.base import Domain, carry_nested
from tcverify.domains.exact import (
    field,
    functions,  # noqa: F401 - adds to EXACT
    gradients,  # noqa: F401 - adds to EXACT
)
from tcverify.domains.exact.algebra import Field, ScrambledField
from tcverify.domains.exact.indexing import CHOOSING, COMPARING, is_structural, run_by_order
from tcverify.domains.exact.ops import EXACT
from tcverify.domains.float64 import FLOAT64
from tcverify.errors import UnsupportedOp

Tensor = torch.Tensor

#: Independent draws of inputs and hashes per program.
DRAWS = 2
#: As many where those do not say the same.
MORE_DRAWS = 6


class Exact(Domain):
    """The field of p = 1048573, on float64 carriers.

    Args:
        draw: number of the draw of inputs and hashes.
        literals: residues of literals that are not to be read as they stand.
    """

    def __init__(self, draw: int, literals: dict[float, float] | None = None) -> None:
        self.draw = draw
        self.name = f"exact:{draw}"
        self.algebra = Field(draw, literals)
        self.unwritten = self.algebra.unwritten

    def carry(self, value: Any) -> Any:
        """See `Domain.carry`. Every op has made residues already."""
        if isinstance(value, complex) or (isinstance(value, Tensor) and value.is_complex()):
            raise UnsupportedOp("complex", "the exact domain has no complex numbers")
        if isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not torch.float64:
            raise UnsupportedOp(str(value.dtype), "the exact domain carries float64 alone")
        if isinstance(value, float):
            raise UnsupportedOp("float", "the exact domain has no Python numbers that depend on values")
        return carry_nested(value, self) if isinstance(value, (tuple, list)) else value

    def constant(self, value: Any) -> Any:
        """See `Domain.constant`."""
        if not isinstance(value, Tensor):
            return value
        with _disable_current_modes():
            return self.algebra.constants(value)

    def running(self) -> AbstractContextManager[Any]:
        """See `Domain.running`."""
        return _Mode(self.algebra)

    def settle(self, total: Tensor) -> Tensor:
        """See `Domain.settle`. What comes from other ranks may be the first infinity that this one sees."""
        if not total.is_floating_point():
            return total
        self.algebra.infinite = self.algebra.infinite or bool(total.isinf().any())
        return self.algebra.settle(total)


class ScrambledReals(Domain):
    """float64 with some functions replaced by others; see `ScrambledField`.

    Args:
        only: the only function that is replaced; None replaces all.
        order: which other order replaces that of numbers.
    """

    name = "float64"

    def __init__(self, only: str | None = None, order: int = 0) -> None:
        self.algebra = ScrambledField(only, order)

    def carry(self, value: Any) -> Any:
        """See `Domain.carry`."""
        return FLOAT64.carry(value)

    def running(self) -> AbstractContextManager[Any]:
        """See `Domain.running`."""
        return _Mode(self.algebra)


def residues(unit: Tensor) -> Tensor:
    """Residues, equally distributed, from numbers equally distributed in (−1, 1)."""
    return ((unit + 1) * (field.P / 2)).floor_().sub_(field.H)


class _Mode(TorchDispatchMode):
    """Intercepts every op of torch while the mode is on."""

    def __init__(self, algebra: Field) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._algebra = algebra
        self.unwritten = algebra.unwritten  # see `uninitialized`

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Of torch: whether to wrap the mode for torch.compile, whose import takes seconds. Programs here are not compiled."""
        return False

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        k = self._algebra
        in_aten = getattr(func, "impl_aten", None) if func.namespace == "prims" else None
        if in_aten is not None:
            with self:
                return in_aten(*args, **kwargs)
        if not _floats(args) and not (kwargs and _floats(kwargs.values())):
            result = func(*args, **kwargs)
            if not _floats((result,)) or func.namespace != "aten":
                return result
            meaning = EXACT.get(_base(func))
            if meaning is not None or _is_pointwise(func):
                return self._compute(func, args, kwargs)
            if _base(func) == "_to_copy":
                return k.embed(args[0])
            return pytree.tree_map_only(Tensor, k.constants, result)  # zeros, ones, full, arange, …
        if func.namespace not in ("aten", "prims"):
            raise UnsupportedOp(str(func), "the exact domain has no meaning for it")
        out = kwargs.pop("out", None) if "out" in kwargs else None
        if out is not None:
            return out.copy_(self._compute(func, args, kwargs))
        if func._schema.name.endswith("_") and func._schema.is_mutable:
            return self._write(func, args, kwargs)
        return self._compute(func, args, kwargs)

    def _write(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An op in place: compute what its functional form gives, and write that."""
        target = args[0]
        if _base(func) == "copy":
            source = self._algebra.embed(args[1]) if target.is_floating_point() else args[1]
            if not target.is_floating_point() and source.is_floating_point():
                raise UnsupportedOp("aten::copy_", "the exact domain has no casts from floating to integer values")
            return target.copy_(source)
        if is_structural(_base(func)):
            return func(*args, **kwargs)
        return target.copy_(self._compute(func, args, kwargs))

    def _compute(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name, k = _base(func), self._algebra
        meaning = EXACT.get(name)
        if meaning is not None:
            return meaning(k, *args, **kwargs)
        if name in ("complex", "polar", "view_as_complex"):
            raise UnsupportedOp(func._schema.name, "the exact domain has no complex numbers")
        if func._overloadname == "dtype" and is_structural(name):
            raise UnsupportedOp(func._schema.name, "the exact domain has no bit patterns")
        if name == "_to_copy":
            return _cast(k, func, args, kwargs)
        if is_structural(name):
            return func(*args, **kwargs)
        if name in CHOOSING or name in COMPARING:
            return run_by_order(k, func, name, args, kwargs)
        if func._can_decompose():  # made of other ops by torch itself
            with self:
                return func.decompose(*args, **kwargs)
        if _is_pointwise(func):
            return _hash(k, func, args, kwargs)
        decomposed = _decomposition(func)
        if decomposed is not None:
            with self:
                return decomposed(*args, **kwargs)
        raise UnsupportedOp(func._schema.name, "the exact domain has no meaning for it")


def _floats(values: Any) -> bool:
    """Whether a floating-point tensor stands among values."""
    for value in values:
        if isinstance(value, Tensor):
            if value.is_floating_point():
                return True
        elif isinstance(value, (list, tuple)) and _floats(value):
            return True
    return False


@lru_cache(maxsize=4096)
def _base(func: torch._ops.OpOverload) -> str:
    """The name without namespace, overload and the underscore of in-place forms."""
    name = func._schema.name.partition("::")[2]
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


@lru_cache(maxsize=4096)
def _is_pointwise(func: torch._ops.OpOverload) -> bool:
    return any(tag.name == "pointwise" for tag in func.tags) and len(func._schema.returns) == 1


@lru_cache(maxsize=4096)
def _decomposition(func: torch._ops.OpOverload) -> Callable[..., Any] | None:
    from torch._decomp import decomposition_table  # late: it takes its time to import

    found: Callable[..., Any] | None = decomposition_table.get(func)
    return found


def _cast(k: Field, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    dtype = kwargs.get("dtype")
    if dtype is torch.bool:
        result: Tensor = args[0] != 0
        return result
    if dtype is not None and not dtype.is_floating_point:
        raise UnsupportedOp("aten::_to_copy", "the exact domain has no casts from floating to integer values")
    result = func(*args, **{**kwargs, "dtype": torch.float64})
    return result


def _hash(k: Field, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """An elementwise op without a definition: a hash of its tensors, keyed by its name and its other arguments."""
    name = _base(func)
    tensors = [k.embed(a) for a in args if isinstance(a, Tensor)]
    rest = [a for a in args if not isinstance(a, Tensor)]
    if any(isinstance(a, (list, tuple)) and _floats(a) for a in (*args, *kwargs.values())) or _floats(kwargs.values()):
        raise UnsupportedOp(func._schema.name, "the exact domain has no meaning for it")
    key = name if not rest and not kwargs else f"{name} {rest!r} {sorted(kwargs.items())!r}"
    mixed = tensors[0]
    for i, tensor in enumerate(tensors[1:]):
        # different functions of each operand, so that swapping two of them shows
        mixed = k.settle(
            k.function(f"{key} {i}", mixed, mixed.clone) + k.function(f"{key} {i} with", tensor, tensor.clone)
        )
    return k.function(key, mixed, lambda: func(*args, **kwargs))
