"""DistributedDataParallel as a pass: see `data_parallel`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.utils._python_dispatch import _disable_current_modes

from tcverify.errors import Unsupported
from tcverify.pytorch.data_parallel import DataParallelPass
from tcverify.strategies.training.model import Model, TrainingStep

#: Bytes of a mebibyte, in which DistributedDataParallel counts.
_MEBI = 1 << 20


class DistributedDataParallelPass(DataParallelPass):
    """Trains under `DistributedDataParallel`, with a communication hook that does what its own code does.

    Options:
        bucket: most bytes of a bucket.
        unused: `find_unused_parameters`.
        static: `static_graph`.
        views: `gradient_as_bucket_view`.
        sync: when gradients are reduced: in each backward, or in the last one.
        shards: whether each rank updates its share of the parameters and broadcasts these (`ZeroRedundancyOptimizer`): "no",
            "parameters" one by one, or "buckets" of them.
    """

    name = "torch:ddp"

    def wrapped(self, model: Model, step: TrainingStep, gm: fx.GraphModule, options: Mapping[str, Any]) -> nn.Module:
        from torch.nn.parallel import DistributedDataParallel

        group = _group_of(gm)
        (returned,) = (node.args[0] for node in gm.graph.nodes if node.op == "output")
        unread = [
            name for number in range(len(step.stages)) for name in step.parameters(number) if number not in step.frozen
        ]
        unread = sorted({*unread} - {*returned["grads"]})
        if unread and not (options["unused"] or options["static"]):
            raise Unsupported(f"parameter '{unread[0]}' gets no gradient, which find_unused_parameters is for")
        if step.alternating and (options["static"] or not options["unused"]):
            raise Unsupported("microbatches use different parameters, which find_unused_parameters is for")
        if step.alternating and options["order"] == "together":
            raise Unsupported("unused parameters are looked for in one forward per backward")
        with _disable_current_modes():  # ranks ask each other whether they have the same parameters
            made = DistributedDataParallel(
                model, process_group=group, bucket_cap_mb=options["bucket"] / _MEBI, find_unused_parameters=options["unused"],
                static_graph=options["static"], gradient_as_bucket_view=options["views"], init_sync=False,
            )  # fmt: skip
        made.register_comm_hook(None, _averaging(group))
        return made

    def optimizer(self, kind: Any, params: list[Any], gm: fx.GraphModule, options: Mapping[str, Any]) -> Any:
        if options["shards"] == "no":
            return super().optimizer(kind, params, gm, options)
        if options["restored"] != "no":
            raise Unsupported("ZeroRedundancyOptimizer gives its state to one rank only, and by objects")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other optimizers of this package are scripts for TorchScript
            from torch.distributed.optim import ZeroRedundancyOptimizer
        return ZeroRedundancyOptimizer(
            params, kind, process_group=_group_of(gm), parameters_as_bucket_view=options["shards"] == "buckets"
        )

    def backward(self, model: Any, options: Mapping[str, Any], last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last or options["sync"] == "each" else model.no_sync()


def _group_of(gm: fx.GraphModule) -> Any:
    """The process group of the ranks that have rows of their own.

    Raises:
        Unsupported: there are several, or none.
    """
    groups = [name for name, members in gm.meta["groups"].items() if len(members) > 1]
    if len(groups) != 1:
        raise Unsupported(f"the mesh has {len(groups)} dims of several ranks, and DistributedDataParallel takes one")
    resolve: Any = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    return resolve(groups[0])


def _averaging(group: Any) -> Callable[[Any, Any], torch.futures.Future[torch.Tensor]]:
    """A communication hook. The one of DistributedDataParallel itself wants results that fake process groups do not have."""

    def hook(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        whole = bucket.buffer()
        dist.all_reduce(whole.div_(group.size()), group=group)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(whole)
        return done

    hook.__annotations__ = {}  # strings in this module; DistributedDataParallel compares them with classes
    return hook


__all__ = ["DistributedDataParallelPass"]
