"""Tensor parallelism as a pass, alone or under FSDP2: see `data_parallel`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.utils import _pytree as pytree

from tcverify.errors import Unsupported
from tcverify.pytorch.data_parallel import mesh_of
from tcverify.pytorch.dtensor import declining
from tcverify.pytorch.fully_shard import FullyShard, shard
from tcverify.strategies.training.data_parallel import TENSOR_PARALLEL
from tcverify.strategies.training.model import Model, TrainingStep

_PLACEMENTS: Mapping[str, Placement] = {"S0": Shard(0), "S1": Shard(1), "R": Replicate()}


class TensorParallel(FullyShard):
    """Trains on parameters that are DTensors over a dim of the mesh, and shards them over the others by `fully_shard`.

    Options, beside those of `FullyShard` other than `hook`:
        weights: how parameters are placed: "S0" and "S1" shard dim 0 and, if there is one, dim 1; "R" replicates; "mixed" does
            each in turn.
        activations: to what the inputs of each part are redistributed.
        parts: what takes and gives plain tensors: each stage, or the model; "loss": the loss is computed on DTensors, too.
        whole: whether parameters are DTensors over the whole mesh, of which `fully_shard` is told the other dims: to "shard"
            over the last of them, or to "replicate" over the only one.
    """

    name = "torch:tensor_parallel"

    def rewrite(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> fx.GraphModule:
        with declining("DTensor"):
            return super().rewrite(gm, options)

    def wrapped(self, model: Model, step: TrainingStep, gm: fx.GraphModule, options: Mapping[str, Any]) -> nn.Module:
        groups = gm.meta["groups"]
        data = tuple(name for name in groups if name != TENSOR_PARALLEL)
        if TENSOR_PARALLEL not in groups or len(data) > 2:
            raise Unsupported(f"the mesh has no dim '{TENSOR_PARALLEL}', or more than two others")
        mesh = mesh_of(gm)
        whole = bool(data) and options["whole"] != "no"
        layout = _Layout(mesh if whole else mesh[TENSOR_PARALLEL], len(data) if whole else 0)
        for number, one in enumerate(list(model.parameters())):
            placement = _weight(options["weights"], number, one.dim())
            sharded = distribute_tensor(
                one.detach(), layout.mesh, layout.over(Replicate(), placement), src_data_rank=None
            )
            _replace(model, one, nn.Parameter(sharded, requires_grad=one.requires_grad))
        for part in model.stages if options["parts"] == "stage" else [model]:
            part.register_forward_pre_hook(layout.distribute(options["activations"]), with_kwargs=True)
            if options["parts"] != "loss" or whole:
                part.register_forward_hook(layout.gather)
        sizes = [len(groups[name]) for name in data]
        if whole:
            shard(model, options, sizes, mesh=mesh, dp_mesh_dims=_data_dims(data, options["whole"]))
        elif data:
            shard(model, options, sizes, mesh=mesh[data])
        return model

    def backward(self, model: Any, options: Mapping[str, Any], last: bool) -> AbstractContextManager[None]:
        return super().backward(model, options, last) if _sharded(model) else nullcontext()

    def before_step(self, model: Any, run: Callable[[], torch.Tensor], stage: int, options: Mapping[str, Any]) -> None:
        if _sharded(model):
            super().before_step(model, run, stage, options)

    def after_backward(self, model: Any, options: Mapping[str, Any], last: bool) -> None:
        if _sharded(model):
            super().after_backward(model, options, last)


def _sharded(model: Any) -> bool:
    """Whether there is data parallelism, too."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)


def _replace(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Put another parameter where one stands, under all of its names."""
    for name, one in list(model.named_parameters(remove_duplicate=False)):
        if one is old:
            owner, _, own = name.rpartition(".")
            model.get_submodule(owner).register_parameter(own, new)


def _weight(how: str, number: int, dims: int) -> Placement:
    """How a parameter is placed."""
    chosen = _PLACEMENTS[list(_PLACEMENTS)[number % 3] if how == "mixed" else how]
    return Replicate() if chosen == Shard(1) and dims < 2 else chosen


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where DTensors of the model live.

    Attributes:
        mesh: over which they are distributed, tensor parallel last.
        data: how many dims in front of it have rows of their own.
    """

    mesh: DeviceMesh
    data: int

    def over(self, data: Placement, last: Placement) -> list[Placement]:
        """Placements over all dims of the mesh."""
        return [data] * self.data + [last]

    def distribute(self, placed: str) -> Callable[..., Any]:
        """A hook that makes DTensors of the inputs of a module, which ranks of tensor parallel have alike."""

        def one(given: Any) -> Any:
            if not isinstance(given, torch.Tensor):
                return given
            made = DTensor.from_local(given, self.mesh, self.over(Shard(0), Replicate()), run_check=False)
            return made.redistribute(self.mesh, self.over(Shard(0), _PLACEMENTS[placed]))

        return lambda module, args, kwargs: pytree.tree_map(one, (args, kwargs))

    def gather(self, module: nn.Module, args: Any, outputs: Any) -> Any:
        """A hook that gives the outputs of a module as a rank of data parallelism has them."""
        replicated = self.over(Shard(0), Replicate())
        return pytree.tree_map_only(DTensor, lambda one: one.redistribute(self.mesh, replicated).to_local(), outputs)


def _data_dims(names: tuple[str, ...], how: str) -> Any:
    """How `fully_shard` is told the dims of data parallelism.

    Raises:
        Unsupported: this torch cannot be told.
    """
    import torch.distributed.fsdp as fsdp

    made = getattr(fsdp, "DataParallelMeshDims", None)
    if made is None:
        raise Unsupported("fully_shard of this torch takes no dims of a mesh")
    if how == "replicate":
        if len(names) > 1:
            raise Unsupported("fully_shard would make a group of its own of two dims")
        return made(replicate=names[0])
    return made(shard=names[-1], replicate=names[0] if len(names) > 1 else None)


__all__ = ["TensorParallel"]
