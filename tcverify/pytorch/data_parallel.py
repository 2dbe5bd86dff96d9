"""Data parallelism as a pass: a training step becomes what a rank does when FSDP2 shards the parameters of its model.

The model of a rank is built from the options of the program, wrapped, and trained for one step, alone, on tensors that are zero.
Every op is recorded, with the collectives that are asked of
process groups. At the end each rank puts the whole gradients together.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from tcverify.capturing.c10d_calls import to_functional_collectives
from tcverify.errors import Unsupported
from tcverify.program import Mesh
from tcverify.program.builder import has_effect
from tcverify.program.graph import same_structure
from tcverify.pytorch.base import TorchPass
from tcverify.pytorch.dtensor import device_mesh
from tcverify.pytorch.recording import OpRecorder
from tcverify.strategies.training.data_parallel import data_parallel_program
from tcverify.strategies.training.model import BATCH, SHIFT, Model, TrainingStep

Tensor = torch.Tensor


class FullyShard(TorchPass):
    """Trains the model of a training step under `fully_shard`, with its rows on each rank.

    Options:
        units: which modules are sharded together: each stage, neighbours in pairs, or all of them.
        reshard: `reshard_after_forward`.
        sync: when gradients are reduced: in each backward, or in the last one of the step; "all_reduce" reduces and scatters in
            each, and reduces over the replicas in the last.
        keep: whether parameters stay gathered behind a backward that does not reduce.
        recompute: whether the backward computes the forward of each stage again.
        order: each backward behind its forward, or one backward behind all forwards; "evaluated" runs the model without gradients
            in front of each forward.
        prefetch: whether each stage gathers the parameters of its neighbour ahead.
        dim: on which parameters of two dims are sharded.

    Raises:
        Unsupported: the program is no such training step, or FSDP2 refuses its sizes.
    """

    name = "torch:fully_shard"

    def rewrite(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> fx.GraphModule:
        step = TrainingStep.of(gm.meta.get("options", {}))
        groups = gm.meta["groups"]
        if len(groups) not in (1, 2):
            raise Unsupported(f"the mesh has {len(groups)} dims, and FSDP2 takes one or two")
        mesh = device_mesh(groups, gm.meta["world_size"], gm.meta["rank"])
        alike = Mesh.grid({name: len(members) for name, members in groups.items()})
        if not same_structure(data_parallel_program(alike, step).graphs[0], gm.graph):
            raise Unsupported("the graph is not the training step that its options describe")
        inputs = {node.name: node.meta["val"].shape for node in gm.graph.nodes if node.op == "placeholder"}
        if inputs != step.inputs():
            raise Unsupported("the inputs have other shapes than those of the training step that the options describe")
        values = {name: torch.zeros(shape) for name, shape in inputs.items()}
        recorder = _Collectives()
        for name, value in values.items():
            recorder.input(name, value)
        with recorder:
            model = Model(step, values)
            _shard(model, mesh, options)
            losses, outputs = _train(model, step, values, options)
            (returned,) = (node.args[0] for node in gm.graph.nodes if node.op == "output")
            grads = {name: one.grad for name, one in _parameters(model).items()}
            found = {name: _whole(grads[name], like.meta["val"]) for name, like in returned["grads"].items()}
        result = {"losses": losses, "outputs": outputs, "grads": found}
        made = recorder.finish(pytree.tree_map_only(Tensor, recorder.node, result))
        metadata = {node.target: node.meta for node in gm.graph.nodes if node.op == "placeholder"}
        for node in made.graph.nodes:
            if node.op == "placeholder":
                node.meta.update(metadata[node.target])
        return made


def _shard(model: Model, mesh: Any, options: Mapping[str, Any]) -> None:
    """Wrap the model, from the inside out."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    stages = list(model.stages)
    if options["recompute"]:
        for stage in stages:
            stage.forward = functools.partial(checkpoint, stage.forward, use_reentrant=False)
    told: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": options["reshard"]}
    if options["dim"]:
        size = mesh.size(mesh.ndim - 1)
        told["shard_placement_fn"] = lambda one: Shard(1) if one.dim() > 1 and one.shape[1] % size == 0 else Shard(0)
    together = {"each": 1, "pairs": 2, "all": len(stages)}[options["units"]]
    units = [stages[at : at + together] for at in range(0, len(stages), together)] if options["units"] != "all" else []
    try:
        for unit in units:
            fully_shard(unit if len(unit) > 1 else unit[0], **told)
        fully_shard(model, **told)
    except (NotImplementedError, ValueError) as error:
        raise Unsupported(f"fully_shard: {' '.join(str(error).split())[:200]}") from error
    if options["prefetch"] and options["units"] == "each":
        for one, following in itertools.pairwise(stages):
            one.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([one])


def _train(
    model: Any, step: TrainingStep, values: Mapping[str, Tensor], options: Mapping[str, Any]
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """One step: the losses of the microbatches, and the outputs of the batch."""
    rows = step.rows // step.microbatches
    losses: list[Tensor] = []
    outputs = []
    for number in range(step.microbatches):
        batch = {name: values[name][number * rows : (number + 1) * rows] for name in BATCH if name in values}
        given = batch["x"], batch.get(SHIFT)
        if options["order"] == "evaluated":
            with torch.no_grad():
                model(*given)
        _announce(model, options, last=number == step.microbatches - 1)
        output = model(*given)
        losses.append(step.loss_of(output, batch["target"]))
        if options["order"] != "together":
            losses[-1].backward()
        outputs.append([one.detach() for one in output])
    if options["order"] == "together":
        functools.reduce(torch.add, losses).backward()
    losses = [loss.detach() for loss in losses]
    return losses, tuple(torch.cat(list(each)) for each in zip(*outputs, strict=True))


def _announce(model: Any, options: Mapping[str, Any], last: bool) -> None:
    """Say whether more backwards follow before gradients are read."""
    last = last or options["order"] == "together"
    if options["sync"] == "last":
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last or not options["keep"])
    elif options["sync"] == "all_reduce":
        model.set_requires_all_reduce(last)
    if options["sync"] != "each":
        model.set_is_last_backward(last)


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by the name that they have in their stage."""
    return {name.rpartition(".")[2]: one for name, one in model.named_parameters()}


def _whole(grad: Any, like: Tensor) -> Tensor:
    """The gradient of a whole parameter; zero where there is none."""
    return torch.zeros(like.shape, dtype=like.dtype) if grad is None else grad.full_tensor()


class _Collectives(OpRecorder):
    """Records ops, and the collectives that process groups are asked for."""

    records_views: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._root = nn.Module()
        self._objects = 0

    def _write(self, func: Any, name: str, args: list[Any], kwargs: dict[str, Any], result: Any) -> None:
        args, kwargs = pytree.tree_map_only(torch.ScriptObject, self._held, (args, kwargs))
        super()._write(func, name, args, kwargs, result)

    def _held(self, value: torch.ScriptObject) -> fx.Node:
        """A process group or a reduction as an attribute of the module, which code can name."""
        self._objects += 1
        setattr(self._root, f"object_{self._objects}", value)
        return self.graph.get_attr(f"object_{self._objects}")

    def finish(self, returned: Any) -> fx.GraphModule:
        """The recorded graph, with functional collectives."""
        self.graph.output(returned)
        made = to_functional_collectives(fx.GraphModule(self._root, self.graph))
        made.graph.eliminate_dead_code(has_effect)
        return made


__all__ = ["FullyShard"]
