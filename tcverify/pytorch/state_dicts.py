"""State dicts of models and optimizers that wrappers have distributed (`torch.distributed.checkpoint.state_dict`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh


def restore(
    saved: tuple[nn.Module, Any], made: tuple[nn.Module, Any], how: str, mesh: DeviceMesh, strict: bool
) -> None:
    """Save the state of a model and its optimizer, and load it into others of their kind.

    Args:
        how: in "shards"; "flat", with a name for each part of the state of the optimizer; as "full" tensors, or "flat and
            full"; "broadcast", as full tensors of the first rank.
        strict: whether none of it may be missing.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    full = how in ("full", "flat and full", "broadcast")
    options = StateDictOptions(full_state_dict=full, flatten_optimizer_state_dict="flat" in how, strict=strict)
    model, optimizer = get_state_dict(*saved, options=options)
    options.broadcast_from_rank0 = how == "broadcast"
    with _as_first_rank(mesh) if options.broadcast_from_rank0 else nullcontext():
        set_state_dict(*made, model_state_dict=model, optim_state_dict=optimizer, options=options)


@contextmanager
def _as_first_rank(mesh: DeviceMesh) -> Iterator[None]:
    """Do on each rank what the first one does, since nobody is there to tell the others which tensors it broadcasts.

    There is no group of all ranks: they broadcast over one dim of the mesh after the other.
    """
    broadcast = dist.broadcast

    def over_dims(tensor: torch.Tensor, src: int, group: Any) -> None:
        for members in mesh.get_all_groups():
            broadcast(tensor, group=members, group_src=src)

    with (
        mock.patch.object(dist, "get_rank", return_value=0),
        mock.patch.object(dist, "broadcast_object_list"),
        mock.patch.object(dist, "broadcast", over_dims),
    ):
        yield


__all__ = ["restore"]
