"""The `fsdp` dialect, and resizing of storages: what traced FSDP2 puts around its all_gathers and reduce_scatters.

Sources: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py and _fsdp_param.py; aten/src/ATen/native (split_with_sizes_copy,
_chunk_cat); torch/csrc/inductor/resize_storage_bytes.cpp. A layer gathers the shards of its parameters into one buffer and copies
them out; its gradients are chunked by rank, concatenated, and reduced and scattered together:

| op | does |
|---|---|
| `all_gather_copy_in` | writes the shards into this rank's slice of the buffer; returns (the slice, the buffer), by alias |
| `split_with_sizes_copy` | copies the pieces of a tensor along a dim into given tensors |
| `chunk_cat` | pads tensors and cuts them into chunks; row i of the output holds the i-th chunk of each, flattened |
| `chunk_cat_mixed_dtype` | the same, of tensors of several dtypes (torch 2.15) |
| `copy_` | writes data into a tensor, an unsharded parameter |
| `inductor::resize_storage_bytes_` | frees the storage of a tensor (0 bytes), or allocates it again |

Where torch's own schemas hide writes or aliases, the tables declare them. If an output has another shape than what
is written into it, torch would resize the output; here that is an error.

Freed memory contains values that show up if they are read (`domains.uninitialized`); the interpreter also refuses to access it. A
storage is either freed or whole: number domains carry values by other widths than the program's, so that only the metadata can
tell whether a number of bytes is enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tcverify.domains import poison_
from tcverify.ops.op import Op
from tcverify.ops.table import register_dialect

Tensor = torch.Tensor

#: Frees and allocates storages.
RESIZE = "inductor::resize_storage_bytes_"


def all_gather_copy_in(
    all_gather_inputs: Sequence[Tensor],
    all_gather_output: Tensor,
    inp_split_sizes: Sequence[int],
    all_gather_input_numel: int,
    rank: int,
) -> tuple[Tensor, Tensor]:
    """Write the inputs into the slice of `all_gather_input_numel` elements that belongs to position `rank`.

    Args:
        all_gather_inputs: of one dim each (as torch copies: one element broadcasts).
        all_gather_output: the buffer, of one dim.
        inp_split_sizes: elements that each input takes.

    Returns:
        The slice and the buffer, which share storage with `all_gather_output`.
    """
    if len(inp_split_sizes) != len(all_gather_inputs):
        raise ValueError(
            f"all_gather_copy_in has {len(all_gather_inputs)} inputs and sizes of {len(inp_split_sizes)}; give one size for each"
        )
    mine = all_gather_output.narrow(0, all_gather_input_numel * rank, all_gather_input_numel)
    for place, source in zip(mine.split(list(inp_split_sizes)), all_gather_inputs, strict=True):
        place.copy_(source)
    return mine, all_gather_output


def split_with_sizes_copy(
    all_gather_output: Tensor,
    all_gather_input_split_sizes: Sequence[int],
    dim: int = 0,
    *,
    out: Sequence[Tensor],
) -> None:
    """Copy the pieces of a tensor along `dim` into `out`, which have their dtype and shapes."""
    pieces = all_gather_output.split(list(all_gather_input_split_sizes), dim)
    if len(pieces) != len(out):
        raise ValueError(
            f"split_with_sizes_copy splits into {len(pieces)} and is given {len(out)} tensors to write into"
        )
    for piece, place in zip(pieces, out, strict=True):
        if place.dtype != piece.dtype:
            raise ValueError(f"split_with_sizes_copy writes {piece.dtype} into a tensor of {place.dtype}")
        _fits("split_with_sizes_copy", place, piece.shape)
        place.copy_(piece)


def chunk_cat(tensors: Sequence[Tensor], dim: int, num_chunks: int, *, out: Tensor) -> None:
    """Pad every tensor with zeros along `dim` to a multiple of `num_chunks`, and write their chunks side by side into `out`.

    Args:
        tensors: of one dtype, and of equal sizes before `dim`.
        out: shape [sizes before `dim`, num_chunks, elements of one chunk of every tensor]; of any dtype.
    """
    if not tensors or num_chunks < 1:
        raise ValueError(f"chunk_cat of {len(tensors)} tensors into {num_chunks} chunks")
    dim = _dim("chunk_cat", tensors[0], dim)
    rows = []
    for tensor in tensors:
        if tensor.dtype != tensors[0].dtype or tensor.shape[:dim] != tensors[0].shape[:dim]:
            raise ValueError(
                f"chunk_cat of {tensor.dtype} {list(tensor.shape)} and {tensors[0].dtype} {list(tensors[0].shape)}: "
                f"dtypes, and sizes before dim {dim}, are not equal"
            )
        if tensor.dim() <= dim or not tensor.numel():
            raise ValueError(f"chunk_cat cannot divide shape {list(tensor.shape)} along dim {dim}")
        missing = -tensor.shape[dim] % num_chunks
        if missing:
            shape = [*tensor.shape[:dim], missing, *tensor.shape[dim + 1 :]]
            tensor = torch.cat([tensor, torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)], dim)
        rows.append(tensor.reshape([*tensor.shape[:dim], num_chunks, -1]))
    made = torch.cat(rows, dim + 1)
    _fits("chunk_cat", out, made.shape)
    out.copy_(made)


def chunk_cat_mixed_dtype(tensors: Sequence[Tensor], dim: int, num_chunks: int, *, out: Tensor) -> None:
    """As `chunk_cat`, of tensors of any dtypes: each is cast to that of `out`."""
    chunk_cat([tensor.to(out.dtype) for tensor in tensors], dim, num_chunks, out=out)


def copy_(tensor: Tensor, data: Tensor) -> None:
    """Write `data` into `tensor`, in the dtype of that; it may broadcast."""
    tensor.copy_(data)


def resize_storage_bytes_(variable: Tensor, new_size: int) -> None:
    """Free the storage of a tensor if `new_size` is 0; otherwise allocate it, keeping its contents unless it was freed."""
    _not_negative(new_size)
    if new_size == 0:
        poison_(variable)


def _checked_size(variable: Tensor, new_size: int) -> None:
    """Raise unless the storage has room for the tensor after resizing, or no room at all."""
    _not_negative(new_size)
    last = sum((size - 1) * step for size, step in zip(variable.shape, variable.stride(), strict=True))
    needed = (variable.storage_offset() + last + 1) * variable.itemsize if math.prod(variable.shape) else 0
    if 0 < new_size < needed:
        raise ValueError(
            f"resize_storage_bytes_ to {new_size} bytes leaves no room for {variable.dtype} {list(variable.shape)}, "
            f"which takes {needed}; free it (0 bytes) or allocate all of it"
        )


def _not_negative(new_size: int) -> None:
    if new_size < 0:
        raise ValueError(f"resize_storage_bytes_ to {new_size} bytes")


def _dim(op: str, x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{op} along dim {dim} of a tensor of shape {list(x.shape)}")
    return dim % x.dim()


def _fits(op: str, out: Tensor, shape: Sequence[int]) -> None:
    if list(out.shape) != list(shape):
        raise ValueError(f"{op} writes shape {list(shape)} into an output of shape {list(out.shape)}")


OPS = (
    Op(
        "fsdp::all_gather_copy_in", all_gather_copy_in, aliases=True, fake=all_gather_copy_in,
        schema="(Tensor[] all_gather_inputs, Tensor(a!) all_gather_output, SymInt[] inp_split_sizes, "
        "SymInt all_gather_input_numel, SymInt rank) -> (Tensor(a!), Tensor(a!))",
    ),
    Op("fsdp::split_with_sizes_copy", split_with_sizes_copy, aliases=True, fake=split_with_sizes_copy),
    Op("fsdp::chunk_cat", chunk_cat, aliases=True, fake=chunk_cat),
    Op("fsdp::chunk_cat_mixed_dtype", chunk_cat_mixed_dtype, aliases=True, fake=chunk_cat_mixed_dtype),
    Op("fsdp::copy_", copy_, aliases=True, fake=copy_),
)  # fmt: skip

STORAGE = (
    Op(
        RESIZE, resize_storage_bytes_, aliases=True, fake=_checked_size, resources=(),
        schema="(Tensor(a!) variable, SymInt new_size) -> ()",
    ),
)  # fmt: skip


def _load() -> None:
    import torch.distributed.fsdp._fully_shard._fsdp_collectives
    import torch.distributed.fsdp._fully_shard._fsdp_param  # noqa: F401 - defines copy_, the other module the rest


register_dialect("fsdp", OPS, load=_load, imported=True, complete=True)
register_dialect("inductor", STORAGE, complete=True)

__all__ = ["OPS", "RESIZE", "STORAGE"]
