"""FSDP2 as a pass: see `data_parallel`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor, Shard

from tcverify.errors import Unsupported
from tcverify.pytorch.data_parallel import DataParallelPass
from tcverify.pytorch.dtensor import device_mesh
from tcverify.strategies.training.model import Model, TrainingStep


class FullyShard(DataParallelPass):
    """Trains under `fully_shard`.

    Options:
        units: which modules are sharded together: each stage, neighbours in pairs, or all of them.
        reshard: `reshard_after_forward`.
        sync: when gradients are reduced: in each backward, or in the last one; "all_reduce" reduces and scatters in each, and
            reduces over the replicas in the last.
        keep: whether parameters stay gathered behind a backward that does not reduce.
        prefetch: whether each stage gathers the parameters of its neighbour ahead.
        dim: on which parameters of two dims are sharded, where that is even.
    """

    name = "torch:fully_shard"

    def wrapped(self, model: Model, step: TrainingStep, gm: fx.GraphModule, options: Mapping[str, Any]) -> nn.Module:
        groups = gm.meta["groups"]
        if len(groups) not in (1, 2):
            raise Unsupported(f"the mesh has {len(groups)} dims, and FSDP2 takes one or two")
        mesh = device_mesh(groups, gm.meta["world_size"], gm.meta["rank"])
        shard(model, options, mesh.size(mesh.ndim - 1), mesh=mesh)
        return model

    def backward(self, model: Any, options: Mapping[str, Any], last: bool) -> AbstractContextManager[None]:
        if options["sync"] == "last":
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last or not options["keep"])
        elif options["sync"] == "all_reduce":
            model.set_requires_all_reduce(last)
        if options["sync"] != "each":
            model.set_is_last_backward(last)
        return nullcontext()


def shard(model: Model, options: Mapping[str, Any], ranks: int, **told: Any) -> None:
    """Call `fully_shard` as the options of `FullyShard` say.

    Args:
        ranks: among which it shards each parameter.
        told: arguments of it, in addition.
    """
    from torch.distributed.fsdp import fully_shard

    told["reshard_after_forward"] = options["reshard"]
    if options["dim"]:
        told["shard_placement_fn"] = lambda one: Shard(int(one.dim() > 1 and _local(one).shape[1] % ranks == 0))
    stages: list[Any] = list(model.stages)
    together = {"each": 1, "pairs": 2, "all": 0}[options["units"]]
    for at in range(0, len(stages), together) if together else ():
        unit = stages[at : at + together]
        fully_shard(unit if len(unit) > 1 else unit[0], **told)
    fully_shard(model, **told)
    if options["prefetch"] and options["units"] == "each":
        for one, following in itertools.pairwise(stages):
            one.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([one])


def _local(value: torch.Tensor) -> torch.Tensor:
    """What a rank has of a parameter before `fully_shard` shards it."""
    return value.to_local() if isinstance(value, DTensor) else value


__all__ = ["FullyShard", "shard"]
