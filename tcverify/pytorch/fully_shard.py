"""FSDP2 as a pass: see `data_parallel`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.tensor import DTensor, Shard

from tcverify.errors import Unsupported
from tcverify.pytorch.data_parallel import DataParallelPass, mesh_of
from tcverify.strategies.training.data_parallel import TENSOR_PARALLEL
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
        divide: by what gradients are divided: "mean" leaves it to FSDP2; `set_gradient_divide_factor` tells the "shards"
            of a parameter, or of all "ranks". What the mean lacks is done behind the step.
        sums: whether collectives only sum.
        zeros: whether parameters without gradients are reduced as zeros.
        unshard: whether each stage is told to gather its parameters before a forward.
        hook: whether replicas average gradients in a hook (`set_all_reduce_hook`), and FSDP2 knows the shards only.
        aborted: what raises in front of each step, a "forward" or a "backward", which is caught (`reset_iter_state`).
        finalized: who finalizes a backward: FSDP2 ("automatic"), or the script ("manual"), perhaps by a "handle".
        buffers: most buffers of gradients that are reduced at a time.
        storage: whether parameters keep the memory in which they were gathered.
        wide: what is computed in float64, by the policy for mixed precision: nothing ("no"), "forward and backward", the
            reduction of gradients ("reductions"), or "all".
    """

    name = "torch:fully_shard"

    def wrapped(self, model: Model, step: TrainingStep, gm: fx.GraphModule, options: Mapping[str, Any]) -> nn.Module:
        groups = gm.meta["groups"]
        if len(groups) not in (1, 2):
            raise Unsupported(f"the mesh has {len(groups)} dims, and FSDP2 takes one or two")
        mesh, sizes = mesh_of(gm), [len(members) for members in groups.values()]
        if options["hook"] and len(sizes) > 1:
            shard(model, options, sizes[1:], mesh=mesh[tuple(groups)[1]])
            _average_in_hook(model, mesh.get_group(0))
        else:
            shard(model, options, sizes, mesh=mesh)
        return model

    def scale(self, groups: Mapping[str, tuple[int, ...]], options: Mapping[str, Any]) -> float:
        sizes = [len(members) for name, members in groups.items() if name != TENSOR_PARALLEL]
        if TENSOR_PARALLEL not in groups and options["hook"]:
            return 1
        return _divisor(options, sizes) / math.prod(sizes) if sizes else 1

    def backward(self, model: Any, options: Mapping[str, Any], last: bool) -> AbstractContextManager[None]:
        from torch.distributed.fsdp import FSDPModule

        if options["unshard"]:
            for stage in model.stages:
                if isinstance(stage, FSDPModule):
                    stage.unshard(async_op=True)
        if options["sync"] == "last":
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last or not options["keep"])
        elif options["sync"] == "all_reduce":
            model.set_requires_all_reduce(last)
        if options["sync"] != "each":
            model.set_is_last_backward(last)
        return nullcontext()

    def before_step(self, model: Any, run: Callable[[], torch.Tensor], stage: int, options: Mapping[str, Any]) -> None:
        if options["aborted"] != "no":
            with self.backward(model, options, last=False):
                _abort(model.stages[stage], run, options["aborted"])
            model.reset_iter_state()
            model.zero_grad()

    def after_backward(self, model: Any, options: Mapping[str, Any], last: bool) -> None:
        if options["finalized"] != "automatic" and (last or options["sync"] == "each"):
            handle = model.finalize_backward(async_op=options["finalized"] == "handle")
            if handle is not None:
                handle.wait()


class _Aborted(Exception):
    """What a step raises that is aborted."""


def _abort(stage: nn.Module, run: Callable[[], torch.Tensor], where: str) -> None:
    """Raise in front of the forward or the backward of a stage, and catch that."""

    def abort(*given: Any) -> None:
        raise _Aborted

    def abort_backward(module: nn.Module, given: Any, outputs: Any) -> None:
        for one in outputs if isinstance(outputs, tuple) else (outputs,):
            if one.requires_grad:
                one.register_hook(abort)

    hook = stage.register_forward_pre_hook(abort) if where == "forward" else stage.register_forward_hook(abort_backward)
    with suppress(_Aborted):
        run().backward()
    hook.remove()


def _average_in_hook(model: Model, group: dist.ProcessGroup) -> None:
    """Average the gradients that FSDP2 has reduced over replicas of which it does not know."""
    from torch.distributed.fsdp import FSDPModule

    for one in model.modules():
        if isinstance(one, FSDPModule):
            one.set_all_reduce_hook(lambda reduced: dist.all_reduce(reduced, dist.ReduceOp.AVG, group))


def shard(model: Model, options: Mapping[str, Any], sizes: Sequence[int], **told: Any) -> None:
    """Call `fully_shard` as the options of `FullyShard` say.

    Args:
        sizes: of the dims of data parallelism; over the last one parameters are sharded.
        told: arguments of `fully_shard`, in addition.

    Raises:
        Unsupported: settings exclude each other.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    if options["finalized"] != "automatic" and options["sync"] == "all_reduce":
        raise Unsupported("gradients that are not reduced over replicas yet cannot be finalized")
    told["reshard_after_forward"] = options["reshard"]
    if options["wide"] != "no":
        told["mp_policy"] = MixedPrecisionPolicy(**_WIDE[options["wide"]], output_dtype=torch.float32)
    if options["dim"]:
        told["shard_placement_fn"] = lambda one: Shard(int(one.dim() > 1 and _local(one).shape[1] % sizes[-1] == 0))
    stages: list[Any] = list(model.stages)
    together = {"each": 1, "pairs": 2, "all": 0}[options["units"]]
    for at in range(0, len(stages), together) if together else ():
        unit = stages[at : at + together]
        fully_shard(unit if len(unit) > 1 else unit[0], **told)
    fully_shard(model, **told)
    for one in (one for one in model.modules() if isinstance(one, FSDPModule)):
        _set(one, options, sizes)
    if options["finalized"] != "automatic":
        root: Any = model
        root.set_manual_backward_finalization(True)
    if options["prefetch"] and options["units"] == "each":
        for one, following in itertools.pairwise(stages):
            one.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([one])


#: In what dtype parameters are used, and gradients are reduced. What is computed in a wider one is what is expected.
_WIDE: Mapping[str, Mapping[str, Any]] = {
    "forward and backward": {"param_dtype": torch.float64, "reduce_dtype": torch.float32},
    "reductions": {"reduce_dtype": torch.float64},
    "all": {"param_dtype": torch.float64},
}


def _set(module: Any, options: Mapping[str, Any], sizes: Sequence[int]) -> None:
    """Set how a module gathers parameters and reduces gradients."""
    if options["divide"] != "mean":
        module.set_gradient_divide_factor(float(_divisor(options, sizes)))
    module.set_force_sum_reduction_for_comms(options["sums"])
    if options["zeros"]:
        module.set_reduce_scatter_unused_params(True, recurse=False)
    if options["buffers"] > 1:
        module.set_reduce_scatter_max_input_buffers(options["buffers"], recurse=False)
    if options["storage"]:
        module.set_keep_unsharded_storage(True, recurse=False)


def _divisor(options: Mapping[str, Any], sizes: Sequence[int]) -> int:
    """By what the sum of the gradients over all ranks of data parallelism is divided."""
    return sizes[-1] if options["divide"] == "shards" else math.prod(sizes)


def _local(value: torch.Tensor) -> torch.Tensor:
    """What a rank has of a parameter before `fully_shard` shards it."""
    return value.to_local() if isinstance(value, DTensor) else value


__all__ = ["FullyShard", "shard"]
