"""Runs the kernels that Inductor writes for a CPU, from the loops that they are written from, and without a C++ compiler.

Inductor lowers operations to loops over elements, fuses them, decides which buffers they share, and writes C++. What is run here
is what the C++ is written from, one call for all elements: which buffers a kernel reads and writes is what Inductor decided;
what it computes is an op of aten each, so that a mode sees it. Loads of a buffer that the kernel writes are copied first.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from tcverify.errors import Unsupported

Tensor = torch.Tensor


@dataclass(frozen=True)
class Loops:
    """One loop nest.

    Attributes:
        body: called with the symbols of its loops; performs operations through Inductor's handler of them.
        sizes: of the outer loops.
        reduced: of the loops that it reduces over, inside of the others.
    """

    body: Callable[..., Any]
    sizes: tuple[int, ...]
    reduced: tuple[int, ...]


@dataclass(frozen=True)
class LoopKernel:
    """Loop nests that are one call of the generated code.

    Attributes:
        nests: in the order in which they run.
        positions: which argument holds a buffer, by the name of the buffer.
        shared: the positions of arguments that the kernel both reads and writes.
        local: how many elements of which dtype the buffers have that live inside of the kernel only, by name.
        renamed: the buffer that is meant by the name of what has been written into it.
    """

    nests: tuple[Loops, ...]
    positions: dict[str, int]
    shared: frozenset[int]
    local: dict[str, tuple[int, torch.dtype]]
    renamed: dict[str, str]

    def __call__(self, *arguments: Any) -> None:
        from torch._inductor.virtualized import V

        memory = _Memory(self, arguments)
        for nest in self.nests:
            with _RUNNING, V.set_ops_handler(_handler(memory, nest)):
                nest.body(*_symbols(nest))


def _symbols(nest: Loops) -> list[list[sympy.Symbol]]:
    outer = [sympy.Symbol(f"i{k}", integer=True, nonnegative=True) for k in range(len(nest.sizes))]
    inner = [sympy.Symbol(f"r{k}", integer=True, nonnegative=True) for k in range(len(nest.reduced))]
    return [outer, inner]


@dataclass
class _Memory:
    """What a call of a kernel reads and writes."""

    kernel: LoopKernel
    arguments: Sequence[Any]
    made: dict[str, Tensor] = field(default_factory=dict)

    def buffer(self, name: str) -> tuple[Tensor, bool]:
        """The memory of a buffer, and whether the kernel may have written it meanwhile."""
        name = self.kernel.renamed.get(name, name)
        place = self.kernel.positions.get(name)
        if place is not None:
            return self.arguments[place], place in self.kernel.shared
        if name not in self.made:
            if name not in self.kernel.local:
                raise Unsupported(f"a kernel of Inductor reads buffer '{name}', which it is not given")
            size, dtype = self.kernel.local[name]
            self.made[name] = torch.empty(size, dtype=dtype)
        return self.made[name], False


#: Inductor's name of an operation on elements, where torch has another one.
_RENAMED: dict[str, Callable[..., Any]] = {
    "and_": torch.bitwise_and,
    "or_": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "lshift": torch.bitwise_left_shift,
    "rshift": torch.bitwise_right_shift,
    "mod": torch.fmod,
    "truediv": torch.true_divide,
    "div_rn": torch.true_divide,
    "int_truediv": torch.true_divide,
    "truncdiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "floordiv": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "mul_rn": torch.mul,
    "fma": lambda a, b, c: torch.add(torch.mul(a, b), c),
    "identity": lambda x: x,
    "libdevice_abs": torch.abs,
    "libdevice_exp": torch.exp,
    "libdevice_sqrt": torch.sqrt,
}

#: Operations on elements that torch knows by the same name.
_ELEMENTWISE = frozenset(
    """abs exp exp2 expm1 sqrt relu minimum maximum cos sin lgamma erf cosh sinh acos acosh asin asinh atan2 atan
    atanh copysign erfc erfinv hypot log10 log2 nextafter logical_and logical_not logical_or logical_xor
    bitwise_and bitwise_not bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift rsqrt log1p tan tanh
    sigmoid signbit fmod log isinf isnan round floor sign trunc ceil neg reciprocal eq ne lt gt le ge add sub
    mul pow square remainder where""".split()  # noqa: SIM905
)

_REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": lambda x, dims, dtype: torch.sum(x, dims, keepdim=True, dtype=dtype),
    "max": lambda x, dims, dtype: torch.amax(x, dims, keepdim=True),
    "min": lambda x, dims, dtype: torch.amin(x, dims, keepdim=True),
    "any": lambda x, dims, dtype: torch.amax(x.to(torch.bool), dims, keepdim=True),
}


class _Indices:
    """What the indices of a loop nest come to.

    Attributes:
        full: the sizes of all loops.
    """

    def __init__(self, nest: Loops) -> None:
        self.full = nest.sizes + nest.reduced
        self._places: dict[sympy.Symbol, int] = {s: k for k, s in enumerate(itertools.chain(*_symbols(nest)))}
        self._loaded: dict[sympy.Symbol, Tensor] = {}

    def loaded(self, values: Tensor) -> sympy.Symbol:
        """A new symbol for indices that have been loaded or computed."""
        # Inductor replaces no symbol by one that is called alike, and it calls its own indirect0, indirect1, …
        symbol = sympy.Symbol(f"loaded{len(self._loaded)}", integer=True)
        self._loaded[symbol] = values
        return symbol

    def counted(self, expr: sympy.Expr) -> Tensor:
        """An index expression, for every element."""
        expr = sympy.sympify(expr)
        if expr.is_Integer:
            return torch.full((), int(expr), dtype=torch.int64)
        if expr in self._loaded:
            return self._loaded[expr]
        if expr in self._places:
            place = self._places[expr]
            shape = [1] * len(self.full)
            shape[place] = self.full[place]
            return torch.arange(self.full[place], dtype=torch.int64).view(shape)
        name, arguments = type(expr).__name__, [self.counted(one) for one in expr.args]
        if name in ("Add", "Mul"):
            return functools.reduce(torch.add if name == "Add" else torch.mul, arguments)
        if name in ("FloorDiv", "CleanDiv"):
            return torch.div(arguments[0], arguments[1], rounding_mode="floor")
        if name == "ModularIndexing":
            return torch.remainder(torch.div(arguments[0], arguments[1], rounding_mode="floor"), arguments[2])
        if name in ("Mod", "PythonMod"):
            return torch.remainder(arguments[0], arguments[1])
        if name in ("Identity", "Max", "Min") and len(arguments) <= 2:
            return arguments[0] if name == "Identity" else getattr(torch, f"{name.lower()}imum")(*arguments)
        raise Unsupported(f"a kernel of Inductor computes the index {expr}, whose {name} is not known here")

    def affine(self, index: sympy.Expr) -> tuple[list[int], int] | None:
        """The strides of the loops and the offset, if an index has only these."""
        index, places = sympy.expand(index), self._places
        if not index.free_symbols <= set(places):
            return None
        strides = [
            index.coeff(symbol) if size > 1 else sympy.Integer(0)
            for symbol, size in zip(places, self.full, strict=True)
        ]
        offset = index.subs(dict.fromkeys(places, 0))
        rest = index - offset - sum(s * symbol for s, symbol in zip(strides, places, strict=True))
        alone = {symbol: 0 for symbol, size in zip(places, self.full, strict=True) if size <= 1}
        plain = all(s.is_Integer and s >= 0 for s in strides) and offset.is_Integer and offset >= 0
        if not plain or sympy.expand(rest.subs(alone)) != 0:
            return None
        return [int(s) for s in strides], int(offset)


def _flat(buffer: Tensor) -> Tensor:
    count = 1 + sum((n - 1) * s for n, s in zip(buffer.shape, buffer.stride(), strict=True)) if buffer.numel() else 0
    return buffer.as_strided((count,), (1,), buffer.storage_offset())


def _handler(memory: _Memory, nest: Loops) -> Any:
    """What performs the operations of a loop nest."""
    from torch._inductor.ops_handler import DefaultHandler

    class Handler(_Elements, DefaultHandler):
        pass

    return Handler(memory, nest)


class _Elements:
    """Performs operations for all elements at once. Inductor's handler hands on to `_default` what has no method here."""

    def __init__(self, memory: _Memory, nest: Loops) -> None:
        self._memory = memory
        self._nest = nest
        self._indices = _Indices(nest)
        self._masks: list[Tensor] = []
        # What this nest has stored, by buffer and index: in another nest the same symbols count other loops.
        self._stored: dict[tuple[str, Any], Tensor] = {}

    def _default(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = _RENAMED.get(name) or (getattr(torch, name) if name in _ELEMENTWISE else None)
        if run is None:
            raise Unsupported(f"a kernel of Inductor uses {name}, which is not known here")
        return run(*args, **kwargs)

    def constant(self, value: Any, dtype: torch.dtype) -> Any:
        return torch.full((), value, dtype=dtype)

    def load(self, name: str, index: sympy.Expr) -> Any:
        key = (self._memory.kernel.renamed.get(name, name), index)
        if key in self._stored:
            return self._stored[key]
        buffer, written = self._memory.buffer(name)
        if not buffer.numel():
            return torch.zeros((), dtype=buffer.dtype)
        where = self._affine(index)
        if where is None:
            places_ = self._indices.counted(index)
            for _ in self._masks[:1]:
                places_ = torch.clamp(places_, 0, _flat(buffer).numel() - 1)
            return _flat(buffer)[places_]
        strides, offset = where
        seen = buffer.as_strided(self._indices.full, strides, buffer.storage_offset() + offset)
        return seen.clone() if written else seen

    def _affine(self, index: sympy.Expr) -> tuple[list[int], int] | None:
        """See `_Indices.affine`. Under a mask an index may lie outside of the buffer."""
        return None if self._masks else self._indices.affine(index)

    def store(self, name: str, index: sympy.Expr, value: Any, mode: str | None = None) -> None:
        self._store(name, index, value, self._indices.full, mode)

    def store_reduction(self, name: str, index: sympy.Expr, value: Any) -> None:
        self._store(name, index, value, (*self._nest.sizes, *(1 for _ in self._nest.reduced)), None)

    def _store(self, name: str, index: sympy.Expr, value: Any, shape: Sequence[int], mode: str | None) -> None:
        buffer, _ = self._memory.buffer(name)
        if 0 in shape:
            return
        where = self._affine(index)
        if mode is None and where is not None:
            strides, offset = where
            buffer.as_strided(shape, strides, buffer.storage_offset() + offset).copy_(value)
            self._stored[self._memory.kernel.renamed.get(name, name), index] = value
            return
        if mode not in (None, "atomic_add"):
            raise Unsupported(f"a kernel of Inductor stores by {mode}, which is not known here")
        accumulated = value.expand(shape).to(buffer.dtype)
        _flat(buffer).index_put_([self._indices.counted(index).expand(shape)], accumulated, accumulate=mode is not None)

    def reduction(self, dtype: torch.dtype, src_dtype: torch.dtype, kind: str, value: Any) -> Any:
        dims = list(range(len(self._nest.sizes), len(self._indices.full)))
        if kind.startswith("welford"):
            if kind != "welford_reduce":
                raise Unsupported(f"a kernel of Inductor reduces by {kind}, which is not known here")
            value = value.expand(self._indices.full)
            mean = torch.mean(value, dims, keepdim=True)
            squares = torch.sum(torch.square(value - mean), dims, keepdim=True)
            return mean, squares, torch.full((), float(math.prod(self._nest.reduced)), dtype=dtype)
        value = value.expand(self._indices.full)
        if kind in ("argmax", "argmin"):
            found = getattr(torch, kind)(value.reshape(*self._nest.sizes, -1), -1)
            return found.view(*self._nest.sizes, *(1 for _ in dims))
        if kind not in _REDUCTIONS:
            raise Unsupported(f"a kernel of Inductor reduces by {kind}, which is not known here")
        return _REDUCTIONS[kind](value, dims, dtype)

    def to_dtype(self, x: Any, dtype: torch.dtype, src_dtype: Any = None, use_compute_types: bool = True) -> Any:
        return x.to(dtype)

    def index_expr(self, expr: sympy.Expr, dtype: torch.dtype) -> Any:
        return self._indices.counted(expr).to(dtype)

    def value_expr(self, expr: sympy.Expr, dtype: torch.dtype) -> Any:
        return self._indices.counted(expr).to(dtype)

    def indirect_indexing(self, x: Any, size: Any, check: bool = True, wrap_neg: bool = True) -> sympy.Symbol:
        limit = self._indices.counted(size)
        return self._indices.loaded(torch.where(x < 0, x + limit, x) if wrap_neg else x)

    def masked(self, mask: Any, body: Callable[[], Any], other: Any) -> Any:
        self._masks.append(mask)
        try:
            inside = body()
        finally:
            self._masks.pop()
        return torch.where(mask, inside, torch.full((), other, dtype=inside.dtype))

    def check_bounds(self, *_: Any, **__: Any) -> None:
        return None

    def device_assert_async(self, *_: Any, **__: Any) -> None:
        return None

    def trunc_to_int(self, x: Any, dtype: torch.dtype) -> Any:
        return torch.trunc(x).to(dtype)

    def floor_to_int(self, x: Any, dtype: torch.dtype) -> Any:
        return torch.floor(x).to(dtype)

    def ceil_to_int(self, x: Any, dtype: torch.dtype) -> Any:
        return torch.ceil(x).to(dtype)

    def round_to_int(self, x: Any, dtype: torch.dtype) -> Any:
        return torch.round(x).to(dtype)

    def output(self, *args: Any) -> None:
        return None


# --------------------------------------------------------------------------------------------- kernels of generated code

#: Held while loops run: Inductor's loops store their current position. Ranks that are threads share them.
_RUNNING = threading.Lock()

#: Kernels that generated modules call, by number.
_KERNELS: dict[int, LoopKernel] = {}
_numbers = itertools.count()


def kernel(number: int) -> LoopKernel:
    """The kernel of a number: what generated code calls in place of compiled C++."""
    return _KERNELS[number]


def forget_kernels() -> None:
    """Release all kernels: modules that call them are no longer used."""
    _KERNELS.clear()


def define_kernel(scheduling: Any, src_code: str, nodes: Sequence[Any], kernel_args: Any = None) -> str:
    """Takes the place of `CppScheduling.define_kernel`: keeps the loops, and has the generated module call them."""
    from torch._inductor.codegen.common import RemovedArg
    from torch._inductor.virtualized import V

    arguments = scheduling.kernel_group.args if kernel_args is None else kernel_args
    wrapper: Any = V.graph.wrapper_code
    positions: dict[str, int] = {}
    place = itertools.count()
    shared = set()
    for one in {id(b): b for b in arguments.inplace_buffers.values()}.values():
        if not isinstance(one, RemovedArg):
            position = next(place)
            positions.update(dict.fromkeys(one.other_names, position))
            shared.add(position)
    for outer in arguments.input_buffers:
        if outer not in arguments.inplace_buffers:
            positions[outer] = next(place)
    for outer, inner in arguments.output_buffers.items():
        if outer not in arguments.inplace_buffers and not isinstance(inner, RemovedArg):
            positions[outer] = next(place)
    if arguments.sizevars:
        raise Unsupported("a kernel of Inductor is told sizes, which are numbers in programs")
    renamed = dict(V.graph.scheduler.mutation_real_name)
    number = next(_numbers)
    _KERNELS[number] = LoopKernel(
        tuple(map(_loops, nodes)), positions, frozenset(shared), _local(nodes, positions), renamed
    )
    name = f"cpp_kernel_{wrapper.next_kernel_suffix()}"
    wrapper.define_kernel(name, f"__import__({__name__!r}, fromlist=['kernel']).kernel({number})", gpu=False)
    return name


def _loops(node: Any) -> Loops:
    sizes, reduced = node._sizes[0], node._sizes[1] if len(node._sizes) > 1 else ()
    try:
        return Loops(node._body, tuple(int(n) for n in sizes), tuple(int(n) for n in reduced))
    except TypeError:
        raise Unsupported("a kernel of Inductor has loops of symbolic sizes") from None


def _local(nodes: Sequence[Any], positions: dict[str, int]) -> dict[str, tuple[int, torch.dtype]]:
    """Buffers that nodes write and that the call is not given."""
    found = {}
    for node in nodes:
        for buffer in node.get_outputs():
            if buffer.get_name() not in positions and buffer.node.has_tensor_output():
                layout = buffer.node.get_layout()
                found[buffer.get_name()] = (int(layout.storage_size()), layout.dtype)
    return found


__all__ = ["LoopKernel", "Loops", "define_kernel", "forget_kernels", "kernel"]
