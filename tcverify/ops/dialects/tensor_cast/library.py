"""The tensor_cast dialect as torch sees it: signatures, shapes, and definitions for ops that no other library has defined.

The real TensorCast registers shape-only kernels under the same names, by `torch.library.custom_op`. What it has defined is
left alone: graphs of its ops are executed by what the table says. What is missing is defined here when a graph first needs
it, by `custom_op` too, whose definitions a later `custom_op` of the same name replaces: so TensorCast can still be imported
afterwards.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tcverify.ops.definitions import lasting_library
from tcverify.ops.dialects.tensor_cast import experts, fused, quantised
from tcverify.ops.dialects.tensor_cast import ops as meaning
from tcverify.ops.distributed import perform
from tcverify.ops.op import Op
from tcverify.ops.spec import contiguous_stride
from tcverify.ops.table import register_dialect

Tensor = torch.Tensor

_NORM = "Tensor x, Tensor weight, float eps"
_ADD_NORM = "Tensor x, Tensor residual, Tensor weight, float eps"
_RANKS = "int rank, int[] rank_group"

#: The anchors of graphs on several streams: a wait for tokens, and the record of one.
WAIT = "tensor_cast::_internal_wait_and_bind"
RECORD = "tensor_cast::_internal_record"

#: Signatures, as TensorCast has them.
SCHEMAS: dict[str, str] = {
    "rms_norm": f"({_NORM}) -> Tensor",
    "add_rms_norm": f"({_ADD_NORM}) -> Tensor",
    "add_rms_norm2": f"({_ADD_NORM}) -> (Tensor, Tensor)",
    "layer_norm": "(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor",
    "modulated_layer_norm": "(Tensor x, Tensor? weight, Tensor? bias, Tensor scale, Tensor shift, float eps) -> Tensor",
    "silu": "(Tensor x) -> Tensor",
    "gelu": '(Tensor x, str approximate="none") -> Tensor',
    "swiglu": "(Tensor gate, Tensor up) -> Tensor",
    "gated_residual_add": "(Tensor residual, Tensor update, Tensor gate) -> Tensor",
    "cat": "(Tensor[] tensors, int dim=0) -> Tensor",
    "attention": (
        "(Tensor query, Tensor key, Tensor value, Tensor? attention_mask, Tensor? block_table, "
        "Tensor? query_start_loc, Tensor? seq_lens, Tensor? query_lens) -> Tensor"
    ),
    "all_reduce": f"(Tensor x, {_RANKS}) -> Tensor",
    "reduce_scatter": f"(Tensor x, int dim, {_RANKS}) -> Tensor",
    "all_gather": f"(Tensor x, int dim, {_RANKS}) -> Tensor",
    "all_to_all": f"(Tensor x, int[] output_split_sizes, int[] input_split_sizes, {_RANKS}) -> Tensor",
    "pipeline_send_recv": (
        "(Tensor x, int source_rank, int target_rank, int source_stage_id, int target_stage_id) -> Tensor"
    ),
    "matmul_all_reduce": f"(Tensor mat1, Tensor mat2, Tensor? bias, {_RANKS}) -> Tensor",
    "_internal_mark_region_begin": "(Tensor x, int id) -> Tensor",
    "_internal_mark_region_end": "(Tensor x, int id) -> Tensor",
    "_internal_copy_region": "(Tensor x, int id) -> Tensor",
    "_internal_order_barrier": "(Tensor x, Tensor dep) -> Tensor",
    "_internal_wait_and_bind": "(Tensor x, int stream_id, Tensor[] deps) -> Tensor",
    "_internal_record": "(Tensor x, int stream_id) -> Tensor",
    **experts.SCHEMAS,
    **quantised.SCHEMAS,
}


# ------------------------------------------------------------------------------------------------------ fake kernels


def _same_layout(x: Tensor, *_: Any) -> Tensor:
    shape = tuple(x.shape)
    if all(type(size) is int for size in shape) and x.stride() == contiguous_stride(shape):
        return x.new_empty(shape)  # what empty_like gives too, but without Python in between: 0.01 ms in place of 1 ms
    return torch.empty_like(x)


def _fake_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *packing: Tensor | None) -> Tensor:
    if any(operand is not None for operand in packing):  # has no meaning here yet, but a shape
        return query.new_empty(query.shape)
    return meaning.attention(query, key, value, mask, None, None, None, None).to(query.dtype)


def _fake_reduce_scatter(x: Tensor, dim: int, rank: int, rank_group: Sequence[int]) -> Tensor:
    shape = list(x.shape)
    if shape[dim] % len(rank_group):
        raise ValueError(f"reduce_scatter cannot divide size {shape[dim]} of dim {dim} by {len(rank_group)} ranks")
    shape[dim] //= len(rank_group)
    return x.new_empty(shape)


def _fake_all_gather(x: Tensor, dim: int, rank: int, rank_group: Sequence[int]) -> Tensor:
    shape = list(x.shape)
    shape[dim] *= len(rank_group)
    return x.new_empty(shape)


def _fake_all_to_all(x: Tensor, output_split_sizes: Sequence[int], *_: Any) -> Tensor:
    return x.new_empty((sum(output_split_sizes), *x.shape[1:]))


def _fake_matmul_all_reduce(mat1: Tensor, mat2: Tensor, bias: Tensor | None, *_: Any) -> Tensor:
    product = mat1 @ mat2
    return torch.empty_like(product if bias is None else product + bias, dtype=mat1.dtype)


def _fake_record(x: Tensor, stream_id: int) -> Tensor:
    return x.new_empty((), dtype=torch.int64)


_FAKES: dict[str, Callable[..., Any]] = {
    "attention": _fake_attention,
    "all_reduce": _same_layout,
    "reduce_scatter": _fake_reduce_scatter,
    "all_gather": _fake_all_gather,
    "all_to_all": _fake_all_to_all,
    "pipeline_send_recv": _same_layout,
    "matmul_all_reduce": _fake_matmul_all_reduce,
    "_internal_mark_region_begin": _same_layout,
    "_internal_mark_region_end": _same_layout,
    "_internal_copy_region": _same_layout,
    "_internal_order_barrier": _same_layout,
    "_internal_wait_and_bind": _same_layout,
    "_internal_record": _fake_record,
    **experts.FAKES,
    **{name: quantised.shape_of(name) for name in quantised.SCHEMAS},
}  # the other ops are local: what they mean, on fake tensors, says shape, stride and dtype exactly


# ------------------------------------------------------------------------------------------------------ real kernels


#: Ops whose results do not have the dtype of their first argument: promoted, or as an argument says.
_OTHER_DTYPE = frozenset({"gated_residual_add", *quantised.LOCAL, *quantised.FUSED})


def _local_kernel(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    if name in _OTHER_DTYPE:
        return run
    return lambda *args: _like_first(run(*args), args)


def _native_kernel(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Compute in float32 at least, as fused kernels do, and round the result to the dtype that the op promises."""

    def call(*args: Any, **kwargs: Any) -> Any:
        wide = run(*map(_widen, args), **{key: _widen(value) for key, value in kwargs.items()})
        given = [v for v in pytree.tree_leaves((args, list(kwargs.values()))) if isinstance(v, Tensor)]
        dtype = given[0].dtype
        if name == "tensor_cast::gated_residual_add":
            dtype = functools.reduce(torch.promote_types, [v.dtype for v in given])
        return pytree.tree_map_only(Tensor, lambda value: value.to(dtype) if value.is_floating_point() else value, wide)

    return call


def _widen(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_widen(v) for v in value]
    small = isinstance(value, Tensor) and value.is_floating_point() and value.itemsize < 4
    return value.float() if small else value


def _kernel(op: Op) -> Callable[..., Any]:
    run, name = op.require(), op.name.removeprefix("tensor_cast::")
    if not op.collective:
        return _local_kernel(name, run)

    def call(*args: Any) -> Any:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        steps = run(rank, *args)
        result: Tensor | None = None
        try:
            while True:
                request = next(steps) if result is None else steps.send(result)
                result = perform(request.collective, request.tensor)
        except StopIteration as stop:
            return stop.value if name in _OTHER_DTYPE else _like_first(stop.value, args)

    return call


def _like_first(result: Any, args: Sequence[Any]) -> Any:
    """Results have the dtype of the first tensor; a fresh one, since a custom op may not return its argument."""
    if isinstance(result, tuple):
        return tuple(_like_first(r, args) for r in result)
    first = args[0]
    if isinstance(first, Tensor) and first.is_floating_point() and result.is_floating_point():
        result = result.to(first.dtype)
    return result


# --------------------------------------------------------------------------------------------------------- the dialect

_LOCAL = (
    "rms_norm", "add_rms_norm", "add_rms_norm2", "layer_norm", "modulated_layer_norm", "silu", "gelu", "swiglu",
    "gated_residual_add", "cat", "attention",
)  # fmt: skip
_COLLECTIVE = (
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "pipeline_send_recv", "matmul_all_reduce",
)  # fmt: skip
#: Those of experts that compute.
_EXPERTS = tuple(name for name in experts.MEANINGS if name not in experts.MOVES)
#: Collectives that compute as well.
_FUSED = frozenset({"matmul_all_reduce", *quantised.FUSED})
_IDENTITY = (
    "_internal_mark_region_begin",
    "_internal_mark_region_end",
    "_internal_copy_region",
    "_internal_order_barrier",
)


def _op(name: str, run: Callable[..., Any], *, collective: bool = False, identity: bool = False) -> Op:
    full = f"tensor_cast::{name}"
    fake = _FAKES.get(name) or _local_kernel(name, run)
    resources = ("compute", "comm") if name in _FUSED else ("comm",) if collective else ("compute",)
    native = _native_kernel(full, run) if name in _LOCAL or name in _EXPERTS else None
    return Op(
        full, run, collective, identity=identity, signature=SCHEMAS[name], fake=fake, resources=resources, native=native,
        uninterpreted=name == "attention",  # of paged and packed batches
    )  # fmt: skip


OPS = (
    *(_op(name, getattr(meaning, name)) for name in _LOCAL),
    *(_op(name, getattr(meaning, name), collective=True) for name in _COLLECTIVE),
    *(_op(name, run) for name, run in experts.MEANINGS.items()),
    *(_op(name, run) for name, run in quantised.MEANINGS.items()),
    *(_op(f"{name}_all_reduce", quantised.summed(name), collective=True) for name in quantised.LOCAL),
    *(_op(name, meaning.fresh, identity=True) for name in _IDENTITY),
    _op("_internal_wait_and_bind", meaning.gated, identity=True),
    _op("_internal_record", meaning.token),
)


def define_tensor_cast() -> None:
    """Define the ops of namespace `tensor_cast` that are not defined yet, with kernels that compute."""
    keep = lasting_library("tensor_cast")
    for op in OPS:
        name = op.name.removeprefix("tensor_cast::")
        if op.fake is None or hasattr(torch.ops.tensor_cast, name):
            continue
        made = torch.library.custom_op(
            op.name, _kernel(op), mutates_args=(), device_types=("cpu", "cuda"), schema=op.signature
        )
        made.register_fake(op.fake)
        # torch forgets an op with its last registration, and calling what still refers to it then reads freed memory. With
        # one that stays, for a backend that is nobody's, graphs that hold this definition call the one that replaces it.
        keep.impl(name, torch.library.fallthrough_kernel, "FPGA")


def late_definition(error: str) -> str | None:
    """Say what to do about an error of torch, if it is that a library defines an op after tcverify has, not by `custom_op`.

    No later definition of that kind can replace ours: the library has to be imported first.
    """
    found = re.search(r"register an operator \((tensor_cast::\w+).* same name and overload name", error)
    if found is None:
        return None
    return (
        f"{found[1]} is defined by a library that is imported while the pass runs, after tcverify has defined it; import "
        "the library at the top of the module of the pass"
    )


# The fused ones have the signatures of the library, where that is imported.
register_dialect("tensor_cast", (*OPS, *fused.OPS), load=define_tensor_cast)

__all__ = ["OPS", "SCHEMAS", "define_tensor_cast", "late_definition"]
