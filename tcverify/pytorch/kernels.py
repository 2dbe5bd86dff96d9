"""Runs the kernels that Inductor writes for a CPU, from the loops that they are written from, and without a C++ compiler.

Inductor lowers operations to loops over elements, fuses them, decides which buffers they share, and writes C++. What is run here
is what the C++ is written from, one call for all elements: which buffers a kernel reads and writes is what Inductor decided;
what it computes is an op of aten each, so that a mode sees it. Loads of a buffer that the kernel writes are copied first.
"""

from __future__ import annotations

import itertools
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
class Kernel:
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

    kernel: Kernel
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


def _handler(memory: _Memory, nest: Loops) -> Any:
    from torch._inductor.ops_handler import DefaultHandler

    full = nest.sizes + nest.reduced
    rank, kept = len(full), len(nest.sizes)
    dims = list(range(kept, rank))
    places: dict[sympy.Symbol, int] = dict(zip(itertools.chain(*_symbols(nest)), range(rank), strict=True))
    indirect: dict[sympy.Symbol, Tensor] = {}
    masks: list[Tensor] = []
    # What this nest has stored, by buffer and index: in another nest the same symbols count other loops.
    stored: dict[tuple[str, Any], Tensor] = {}

    def counted(expr: sympy.Expr) -> Tensor:
        """An expression of indices, for every element."""
        expr = sympy.sympify(expr)
        if expr.is_Integer:
            return torch.full((), int(expr), dtype=torch.int64)
        if expr in indirect:
            return indirect[expr]
        if expr in places:
            place = places[expr]
            shape = [1] * rank
            shape[place] = full[place]
            return torch.arange(full[place], dtype=torch.int64).view(shape)
        name, arguments = type(expr).__name__, [counted(one) for one in expr.args]
        if name in ("Add", "Mul"):
            apply = torch.add if name == "Add" else torch.mul
            result = arguments[0]
            for one in arguments[1:]:
                result = apply(result, one)
            return result
        if name in ("FloorDiv", "CleanDiv"):
            return torch.div(arguments[0], arguments[1], rounding_mode="floor")
        if name == "ModularIndexing":
            return torch.remainder(torch.div(arguments[0], arguments[1], rounding_mode="floor"), arguments[2])
        if name in ("Mod", "PythonMod"):
            return torch.remainder(arguments[0], arguments[1])
        if name in ("Identity", "Max", "Min") and len(arguments) <= 2:
            return arguments[0] if name == "Identity" else getattr(torch, f"{name.lower()}imum")(*arguments)
        raise Unsupported(f"a kernel of Inductor computes the index {expr}, whose {name} is not known here")

    def affine(index: sympy.Expr) -> tuple[list[int], int] | None:
        """The strides of the loops and the offset, where that is all there is to an index."""
        index = sympy.expand(index)
        if masks or not index.free_symbols <= set(places):
            return None
        strides = [
            index.coeff(symbol) if size > 1 else sympy.Integer(0) for symbol, size in zip(places, full, strict=True)
        ]
        offset = index.subs(dict.fromkeys(places, 0))
        rest = index - offset - sum(s * symbol for s, symbol in zip(strides, places, strict=True))
        alone = {symbol: 0 for symbol, size in zip(places, full, strict=True) if size <= 1}
        plain = all(s.is_Integer and s >= 0 for s in strides) and offset.is_Integer and offset >= 0
        if not plain or sympy.expand(rest.subs(alone)) != 0:
            return None
        return [int(s) for s in strides], int(offset)

    def flat(buffer: Tensor) -> Tensor:
        count = (
            1 + sum((n - 1) * s for n, s in zip(buffer.shape, buffer.stride(), strict=True)) if buffer.numel() else 0
        )
        return buffer.as_strided((count,), (1,), buffer.storage_offset())

    class Handler(DefaultHandler):
        def _default(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            run = _RENAMED.get(name) or (getattr(torch, name) if name in _ELEMENTWISE else None)
            if run is None:
                raise Unsupported(f"a kernel of Inductor uses {name}, which is not known here")
            return run(*args, **kwargs)

        def constant(self, value: Any, dtype: torch.dtype) -> Any:
            return torch.full((), value, dtype=dtype)

        def load(self, name: str, index: sympy.Expr) -> Any:
            key = (memory.kernel.renamed.get(name, name), index)
            if key in stored:
                return stored[key]
            buffer, written = memory.buffer(name)
            if not buffer.numel():
                return torch.zeros((), dtype=buffer.dtype)
            where = affine(index)
            if where is None:
                places_ = counted(index)
                for _ in masks[:1]:
                    places_ = torch.clamp(places_, 0, flat(buffer).numel() - 1)
                return flat(buffer)[places_]
            strides, offset = where
            seen = buffer.as_strided(full, strides, buffer.storage_offset() + offset)
            return seen.clone() if written else seen

        def store(self, name: str, index: sympy.Expr, value: Any, mode: str | None = None) -> None:
            self._store(name, index, value, full, mode)

        def store_reduction(self, name: str, index: sympy.Expr, value: Any) -> None:
            self._store(name, index, value, (*nest.sizes, *(1 for _ in nest.reduced)), None)

        def _store(self, name: str, index: sympy.Expr, value: Any, shape: Sequence[int], mode: str | None) -> None:
            buffer, _ = memory.buffer(name)
            if 0 in shape:
                return
            where = affine(index)
            if mode is None and where is not None:
                strides, offset = where
                buffer.as_strided(shape, strides, buffer.storage_offset() + offset).copy_(value)
                stored[memory.kernel.renamed.get(name, name), index] = value
                return
            if mode not in (None, "atomic_add"):
                raise Unsupported(f"a kernel of Inductor stores by {mode}, which is not known here")
            accumulated = value.expand(shape).to(buffer.dtype)
            flat(buffer).index_put_([counted(index).expand(shape)], accumulated, accumulate=mode is not None)

        def reduction(self, dtype: torch.dtype, src_dtype: torch.dtype, kind: str, value: Any) -> Any:
            if kind.startswith("welford"):
                if kind != "welford_reduce":
                    raise Unsupported(f"a kernel of Inductor reduces by {kind}, which is not known here")
                value = value.expand(full)
                mean = torch.mean(value, dims, keepdim=True)
                squares = torch.sum(torch.square(value - mean), dims, keepdim=True)
                count = 1
                for size in nest.reduced:
                    count *= size
                return mean, squares, torch.full((), float(count), dtype=dtype)
            value = value.expand(full)
            if kind in ("argmax", "argmin"):
                return getattr(torch, kind)(value.reshape(*nest.sizes, -1), -1).view(*nest.sizes, *(1 for _ in dims))
            if kind not in _REDUCTIONS:
                raise Unsupported(f"a kernel of Inductor reduces by {kind}, which is not known here")
            return _REDUCTIONS[kind](value, dims, dtype)

        def to_dtype(self, x: Any, dtype: torch.dtype, src_dtype: Any = None, use_compute_types: bool = True) -> Any:
            return x.to(dtype)

        def index_expr(self, expr: sympy.Expr, dtype: torch.dtype) -> Any:
            return counted(expr).to(dtype)

        def value_expr(self, expr: sympy.Expr, dtype: torch.dtype) -> Any:
            return counted(expr).to(dtype)

        def indirect_indexing(self, x: Any, size: Any, check: bool = True, wrap_neg: bool = True) -> sympy.Symbol:
            symbol = sympy.Symbol(f"indirect{len(indirect)}", integer=True)
            limit = counted(size)
            indirect[symbol] = torch.where(x < 0, x + limit, x) if wrap_neg else x
            return symbol

        def masked(self, mask: Any, body: Callable[[], Any], other: Any) -> Any:
            masks.append(mask)
            try:
                inside = body()
            finally:
                masks.pop()
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

    return Handler()


# --------------------------------------------------------------------------------------------- kernels of generated code

#: Held while loops run: Inductor keeps the place it is at in them. Ranks that are threads share them.
_RUNNING = threading.Lock()

#: Kernels that generated modules call, by number.
_KERNELS: dict[int, Kernel] = {}
_numbers = itertools.count()


def kernel(number: int) -> Kernel:
    """The kernel of a number: what generated code calls in place of compiled C++."""
    return _KERNELS[number]


def forget_kernels() -> None:
    """Let go of all kernels: modules that call them have been called for the last time."""
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
    _KERNELS[number] = Kernel(
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
        raise Unsupported("a kernel of Inductor has loops of sizes that are no numbers") from None


def _local(nodes: Sequence[Any], positions: dict[str, int]) -> dict[str, tuple[int, torch.dtype]]:
    """Buffers that nodes write and that the call is not given."""
    found = {}
    for node in nodes:
        for buffer in node.get_outputs():
            if buffer.get_name() not in positions and buffer.node.has_tensor_output():
                layout = buffer.node.get_layout()
                found[buffer.get_name()] = (int(layout.storage_size()), layout.dtype)
    return found


__all__ = ["Kernel", "Loops", "define_kernel", "forget_kernels", "kernel"]
