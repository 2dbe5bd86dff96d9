"""The `_dtensor` dialect: how DTensor moves a shard from one dim to another where the device has an all_to_all.

Source: torch/csrc/distributed/c10d/Functional.cpp. On CPU meshes DTensor gathers and cuts instead.
"""

from __future__ import annotations

import torch

from tcverify.ops.collective import Group
from tcverify.ops.dialects.c10d_functional import Steps, make_collective, members
from tcverify.ops.op import Op, Request
from tcverify.ops.table import register_dialect

Tensor = torch.Tensor


def shard_dim_alltoall(me: int, input: Tensor, gather_dim: int, shard_dim: int, group_name: Group) -> Steps:
    """Chunk j along `shard_dim` goes to position j; the chunks received are concatenated along `gather_dim`. Blocks."""
    parts = len(members("shard_dim_alltoall", me, group_name))
    rows = _chunk_shape(input, gather_dim, shard_dim, parts)[shard_dim]
    sent = torch.stack(input.split(rows, shard_dim))
    call = make_collective("all_to_all", sent, group_name, splits=((1,) * parts, (1,) * parts))
    received: Tensor = yield Request(call, sent)
    return torch.cat(received.unbind(), gather_dim)


def _chunk_shape(x: Tensor, gather_dim: int, shard_dim: int, parts: int) -> list[int]:
    if not (0 <= gather_dim < x.dim() and 0 <= shard_dim < x.dim()):
        raise ValueError(
            f"shard_dim_alltoall gathers dim {gather_dim} and shards dim {shard_dim} of shape {list(x.shape)}; its kernel "
            "counts dims from 0 and reads beyond the shape for others"
        )
    if x.shape[shard_dim] % parts or not x.shape[shard_dim]:
        raise ValueError(f"shard_dim_alltoall cannot divide dim {shard_dim} of shape {list(x.shape)} by {parts} ranks")
    shape = list(x.shape)
    shape[shard_dim] //= parts
    return shape


def _fake(input: Tensor, gather_dim: int, shard_dim: int, group: Group) -> Tensor:
    shape = _chunk_shape(input, gather_dim, shard_dim, len(group.ranks))
    shape[gather_dim] *= len(group.ranks)
    return input.new_empty(shape)


OPS = (
    Op(
        "_dtensor::shard_dim_alltoall", shard_dim_alltoall, collective=True, fake=_fake, resources=("comm",),
        group="group_name", sized=True,
    ),
    Op(
        "_dtensor::mesh_get_process_group", None,
        reason="it gives a process group, an object of the process that compiles; capture puts the name of a mesh dim there",
    ),
)  # fmt: skip


def _load() -> None:
    import torch.distributed.tensor  # noqa: F401 - defines the ops


register_dialect("_dtensor", OPS, load=_load, imported=True, complete=True)

__all__ = ["OPS"]
