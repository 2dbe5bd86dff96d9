"""Rewrites that round otherwise than the original: sound ones, which the native domain must let pass, and planted defects.

All are functions of a graph, in place. A rewrite that finds nothing to do leaves the graph alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from tcverify.ops import TensorSpec, resolve
from tcverify.passes import Multistream, SequenceParallel
from tcverify.passes.editing import erase_unused, has_exact_metadata, infer_metadata, known_spec, op_name
from tcverify.passes.storages import mutated_nodes
from tcverify.program import PARTIAL, GraphBuilder, InputSpec, Mesh, Program, Recipe, shard, spmd_program

Rewrite = Callable[[fx.GraphModule], None]
#: Writes what stands for a node: given a caller of ops and the node, the new value, or None to leave it.
Replacement = Callable[[Callable[..., fx.Node], fx.Node], fx.Node | None]

BF16, F32 = torch.bfloat16, torch.float32


def rewriting(*ops: str, by: Replacement) -> Rewrite:
    """A pass that puts something else in the place of every call of these ops."""

    def rewrite(gm: fx.GraphModule) -> None:
        for node in list(gm.graph.nodes):
            if op_name(node) not in ops or not all(
                has_exact_metadata(n) for n in (node, *node.all_input_nodes) if n.args
            ):
                continue
            if any(known_spec(n) is None for n in (node, *node.all_input_nodes)):
                continue
            with gm.graph.inserting_before(node):

                def call(op: str, *args: Any, **kwargs: Any) -> fx.Node:
                    made = gm.graph.call_function(resolve(op), args, kwargs)
                    infer_metadata(made)
                    return made

                new = by(call, node)
            if new is not None:
                node.replace_all_uses_with(new)
                erase_unused(gm.graph, [node])
        gm.recompile()

    return rewrite


def spec(node: Any) -> TensorSpec:
    found = known_spec(node)
    assert found is not None
    return found


def _same_shape(*nodes: Any) -> bool:
    return all(known_spec(n) is not None for n in nodes) and len({(spec(n).shape, spec(n).dtype) for n in nodes}) == 1


# ------------------------------------------------------------------------------------------------------------ sound ones


def _unfused_norm(call: Callable[..., fx.Node], node: fx.Node) -> fx.Node | None:
    x, residual, gain, eps = node.args
    if not _same_shape(x, residual):
        return None
    return call("tensor_cast::rms_norm", call("aten::add.Tensor", x, residual), gain, eps)


def _unfused_sum(call: Callable[..., fx.Node], node: fx.Node) -> fx.Node | None:
    *given, rank, group = node.args
    name = op_name(node)
    if name != "tensor_cast::matmul_all_reduce":
        return call("tensor_cast::all_reduce", call(name.removesuffix("_all_reduce"), *given), rank, group)
    left, right, bias = given
    product = call("aten::matmul", left, right)
    if bias is not None:
        product = call("aten::add.Tensor", product, bias)
    return call("tensor_cast::all_reduce", product, rank, group) if spec(product).dtype is spec(left).dtype else None


def _norm_in(dtype: torch.dtype | None) -> Replacement:
    """rms_norm of primitives: in a dtype of its own, or in that of the rows."""

    def by(call: Callable[..., fx.Node], node: fx.Node) -> fx.Node | None:
        x, gain, eps = node.args
        own = spec(x).dtype
        if spec(gain).dtype is not own:
            return None
        rows = x if dtype is None or dtype is own else call("aten::_to_copy", x, dtype=dtype)
        mean = call("aten::mean.dim", call("aten::mul.Tensor", rows, rows), [-1], True)
        scaled = call("aten::mul.Tensor", rows, call("aten::rsqrt", call("aten::add.Tensor", mean, eps)))
        if scaled.meta["val"].dtype is not own:
            scaled = call("aten::_to_copy", scaled, dtype=own)
        product = call("aten::mul.Tensor", scaled, gain)  # in the layout of x, where the norm's result is contiguous
        return call("aten::clone", product, memory_format=torch.contiguous_format)

    return by


def _regrouped(call: Callable[..., fx.Node], node: fx.Node) -> fx.Node | None:
    """The same sum in another order."""
    x, rank, group = node.args
    return call("tensor_cast::all_reduce", x, rank, list(group)[::-1]) if len(group) > 2 else None  # type: ignore[arg-type]


def _split_product(pieces: Callable[[int], int]) -> Replacement:
    """A product as the sum of so many products along K, in the dtype of the program."""

    def by(call: Callable[..., fx.Node], node: fx.Node) -> fx.Node | None:
        left, right = node.args[:2]
        inner = spec(left).shape[-1]
        count = pieces(inner)
        if count < 2 or inner < count or inner % count or len(spec(right).shape) != 2:
            return None
        size, total = inner // count, None
        for start in range(0, inner, size):
            a = call("aten::slice.Tensor", left, len(spec(left).shape) - 1, start, start + size)
            part = call("aten::matmul", a, call("aten::slice.Tensor", right, 0, start, start + size))
            total = part if total is None else call("aten::add.Tensor", total, part)
        return total

    return by


def _swapped(call: Callable[..., fx.Node], node: fx.Node) -> fx.Node | None:
    """a + (b + c) for (a + b) + c."""
    inner, third = node.args
    if mutated_nodes(node.graph):  # b would be read later than before
        return None
    if not isinstance(inner, fx.Node) or op_name(inner) != "aten::add.Tensor" or len(node.args) != 2 or node.kwargs:
        return None
    if len(inner.args) != 2 or inner.kwargs or not _same_shape(*inner.args, third, node):
        return None
    return call("aten::add.Tensor", inner.args[0], call("aten::add.Tensor", inner.args[1], third))


FUSED = tuple(
    f"tensor_cast::{name}_all_reduce"
    for name in ("matmul", "static_quant_linear", "static_quant_linear_int4", "fp8_linear", "mxfp4_linear")
)
PRODUCTS = ("aten::mm", "aten::matmul")

SOUND: dict[str, Any] = {
    "unfused norms": rewriting("tensor_cast::add_rms_norm", by=_unfused_norm),
    "unfused sums": rewriting(*FUSED, by=_unfused_sum),
    "norms of primitives in float32": rewriting("tensor_cast::rms_norm", by=_norm_in(F32)),
    "norms of primitives": rewriting("tensor_cast::rms_norm", by=_norm_in(None)),
    "sums in another order": rewriting("tensor_cast::all_reduce", by=_regrouped),
    "products in halves": rewriting(*PRODUCTS, by=_split_product(lambda inner: 2)),
    "sums associated otherwise": rewriting("aten::add.Tensor", by=_swapped),
    "sequence_parallel": SequenceParallel(),
    "multistream": Multistream(),
}


# -------------------------------------------------------------------------------------------------------- planted defects


def _narrowed(dtype: torch.dtype, of: torch.dtype) -> Replacement:
    """The same op on operands of a narrower dtype, its result cast back."""

    def by(call: Callable[..., fx.Node], node: fx.Node) -> fx.Node | None:
        if spec(node).dtype is not of:
            return None

        def narrow(value: Any) -> Any:
            return call("aten::_to_copy", value, dtype=dtype) if isinstance(value, fx.Node) else value

        return call("aten::_to_copy", call(op_name(node), *map(narrow, node.args)), dtype=of)

    return by


def _through(dtype: torch.dtype, of: torch.dtype) -> Replacement:
    """The result cast to a narrower dtype and back."""

    def by(call: Callable[..., fx.Node], node: fx.Node) -> fx.Node | None:
        if spec(node).dtype is not of:
            return None
        again = call(op_name(node), *node.args)
        return call("aten::_to_copy", call("aten::_to_copy", again, dtype=dtype), dtype=of)

    return by


def _row_by_row_norm(call: Callable[..., fx.Node], node: fx.Node) -> fx.Node | None:
    """rms_norm whose sum of squares is kept in the dtype of the rows, element after element."""
    x, gain, eps = node.args
    width = spec(x).shape[-1]
    if spec(x).dtype is not BF16 or width < 2 or spec(gain).dtype is not BF16:
        return None
    squares = call("aten::mul.Tensor", x, x)
    total = None
    for i in range(width):
        one = call("aten::slice.Tensor", squares, len(spec(x).shape) - 1, i, i + 1)
        total = one if total is None else call("aten::add.Tensor", total, one)
    mean = call("aten::mul.Tensor", total, 1.0 / width)
    scaled = call("aten::mul.Tensor", x, call("aten::rsqrt", call("aten::add.Tensor", mean, eps)))
    return call("aten::mul.Tensor", scaled, gain)


PLANTED: dict[str, Rewrite] = {
    "a product of bf16 is accumulated in bf16": rewriting(*PRODUCTS, by=_split_product(lambda inner: inner // 4)),
    "a product of float32 is computed in bf16": rewriting(*PRODUCTS, by=_narrowed(BF16, F32)),
    "a sum over ranks of float32 is sent in bf16": rewriting("tensor_cast::all_reduce", by=_narrowed(BF16, F32)),
    "the sum of a norm is kept in bf16": rewriting("tensor_cast::rms_norm", by=_row_by_row_norm),
    "a norm of float32 is computed in bf16": rewriting("tensor_cast::rms_norm", by=_narrowed(BF16, F32)),
    "a residual of float32 is kept in bf16": rewriting("aten::add.Tensor", by=_through(BF16, F32)),
    "a residual of bf16 is kept in fp8": rewriting("aten::add.Tensor", by=_through(torch.float8_e4m3fn, BF16)),
}


def long_program(dtype: torch.dtype, inner: int, hidden: int, seed: int, mesh: Mesh | None = None) -> Program:
    """A row-parallel product of K = `inner` per rank, its sum, a residual and a norm over `hidden`."""
    mesh = Mesh.grid({"tp": 2}) if mesh is None else mesh
    ranks = max(len(group) for dim in mesh.dims for group in dim.groups)
    over = mesh.dims[0].name
    inputs: Sequence[InputSpec] = [
        InputSpec("x", (16, ranks * inner), dtype, ((over, shard(1)),)),
        InputSpec("w", (ranks * inner, hidden), dtype, ((over, shard(0)),), Recipe(scale=1.5 * inner**-0.5)),
        InputSpec("r", (16, hidden), dtype),
        InputSpec("gain", (hidden,), dtype, recipe=Recipe("norm_weight")),
    ]

    def build(b: GraphBuilder) -> Any:
        x, w, r, gain = [b.input(one.name) for one in inputs]
        product = b.call("aten::mm", x, w)
        total = b.call("tensor_cast::all_reduce", product, b.rank, b.group(over))
        both = b.call("aten::add.Tensor", total, r)
        return b.call("tensor_cast::rms_norm", both, gain, 1e-6), both

    return spmd_program(mesh, inputs, build, seed=seed)


#: Programs that show each planted defect: dtype, K per rank and hidden size.
SHOWING: dict[str, tuple[torch.dtype, int, int]] = {
    "a product of bf16 is accumulated in bf16": (BF16, 512, 32),
    "a product of float32 is computed in bf16": (F32, 64, 32),
    "a sum over ranks of float32 is sent in bf16": (F32, 64, 32),
    "the sum of a norm is kept in bf16": (BF16, 16, 256),
    "a norm of float32 is computed in bf16": (F32, 64, 32),
    "a residual of float32 is kept in bf16": (F32, 64, 32),
    "a residual of bf16 is kept in fp8": (BF16, 64, 32),
}

__all__ = ["PARTIAL", "PLANTED", "SHOWING", "SOUND", "long_program"]
