"""Defines the tensor_cast ops in torch, so that graphs also run as they are and fake tensors flow through them.

Where the real TensorCast has defined an op first, its definition stays and only a kernel that computes values is added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tcverify.errors import TcverifyError
from tcverify.ops import tensor_cast as meaning
from tcverify.ops.distributed import perform
from tcverify.ops.table import Op, lookup

Tensor = torch.Tensor

_NORM = "Tensor x, Tensor weight, float eps"
_ADD_NORM = "Tensor x, Tensor residual, Tensor weight, float eps"
_RANKS = "int rank, int[] rank_group"

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
}


# ------------------------------------------------------------------------------------------------------ fake kernels


def _fake_local(run: Callable[..., Any]) -> Callable[..., Any]:
    """The fake kernel of a local op: what it means, on fake tensors, so that shape, stride and dtype are exact."""
    return lambda *args, **kwargs: _like_first(run(*args, **kwargs), args)


def _same_layout(x: Tensor, *_: Any) -> Tensor:
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
}  # the other ops are local: see `_fake_local`


# ------------------------------------------------------------------------------------------------------ real kernels


def _kernel(op: Op) -> Callable[..., Any]:
    run = op.require()
    if not op.collective:
        return lambda *args, **kwargs: _like_first(run(*args, **kwargs), args)

    def call(*args: Any, **kwargs: Any) -> Any:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        steps = run(rank, *args, **kwargs)
        result: Tensor | None = None
        try:
            while True:
                request = next(steps) if result is None else steps.send(result)
                result = perform(request.collective, request.tensor)
        except StopIteration as stop:
            return _like_first(stop.value, args)

    return call


def _like_first(result: Any, args: Sequence[Any]) -> Any:
    """Results have the dtype of the first tensor; a fresh one, since a custom op may not return its argument."""
    if isinstance(result, tuple):
        return tuple(_like_first(r, args) for r in result)
    first = args[0]
    if isinstance(first, Tensor) and first.is_floating_point() and result.is_floating_point():
        result = result.to(first.dtype)
    return result


_LIBRARY: torch.library.Library | None = None


def define_tensor_cast() -> None:
    """Define the ops of namespace `tensor_cast` that nobody has defined yet, and give all of them kernels.

    Raises:
        TcverifyError: another library has defined an op of this name with a schema that cannot take our arguments.
    """
    global _LIBRARY  # noqa: PLW0603 - a torch Library lives as long as the process, or its ops vanish
    if _LIBRARY is not None:
        return
    library = torch.library.Library("tensor_cast", "FRAGMENT")
    for name, schema in SCHEMAS.items():
        theirs = hasattr(torch.ops.tensor_cast, name)
        if not theirs:
            library.define(name + schema, tags=[torch.Tag.pt2_compliant_tag])
            fake = _FAKES.get(name) or _fake_local(getattr(meaning, name))
            torch.library.register_fake(f"tensor_cast::{name}", fake, lib=library)
        target = getattr(torch.ops.tensor_cast, name).default
        if theirs and len(target._schema.arguments) != len(
            torch._C.parse_schema(f"tensor_cast::{name}{schema}").arguments
        ):
            raise TcverifyError(
                f"tensor_cast::{name} is already defined as {target._schema}, which is not the known signature",
                "use a TensorCast of a version that this tcverify knows, or register your own dialect for it",
            )
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"tensor_cast::{name}", "CPU"):
            for key in ("CPU", "CUDA"):
                library.impl(name, _kernel(lookup(target)), key)
    _LIBRARY = library


__all__ = ["SCHEMAS", "define_tensor_cast"]
