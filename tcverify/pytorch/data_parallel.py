"""The common base of data parallelism as a pass: a training step becomes what a rank does under a wrapper of torch.

The model of a rank is built from the options of the program, wrapped, and trained for one step, alone, on tensors that are zero.
Every op is recorded, with the collectives that are asked of process groups. At the end each rank has the whole gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

from tcverify.errors import Unsupported
from tcverify.pytorch.base import TorchPass
from tcverify.pytorch.compat import forget_shardings, shardings_untraced
from tcverify.pytorch.dtensor import declining, device_mesh
from tcverify.pytorch.state_dicts import restore
from tcverify.pytorch.training_steps import read_step, record
from tcverify.strategies.training.data_parallel import data_parallel_program
from tcverify.strategies.training.model import BATCH, SHARED, SHIFT, Model, TrainingStep
from tcverify.strategies.training.optimizers import CLIPS, MAX_NORM, OPTIMIZERS

Tensor = torch.Tensor


class DataParallelPass(TorchPass):
    """Trains the model of a training step under a wrapper, with its own rows on each rank.

    All have the options
        order: each backward behind its forward, or "together", one backward behind all forwards; "evaluated" runs the model
            without gradients in front of each forward.
        recompute: whether the backward computes the forward of each stage again.
        kernels: how the optimizer goes through parameters: one "by one", all "together" (`foreach`), or "fused".
        given: what the optimizer is given: parameters that are "trained", "all", or "groups" of all by their numbers of dims.
        aliases: whether parameters that layers share have two names.
        zeroed: whether gradients are set to zeros in front of the next step, and not to None.
        restored: whether a new model and a new optimizer take the next step, and how the state goes over into them: "no", or as
            `restore` takes it.

    Raises:
        Unsupported: the program is no such training step, or the wrapper refuses its model.
    """

    def rewrite(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> fx.GraphModule:
        step = read_step(gm, TrainingStep, data_parallel_program, own=BATCH)
        forget_shardings()
        with shardings_untraced():
            return record(gm, step.inputs(), lambda values: self._trained(gm, step, values, options))

    def _trained(
        self, gm: fx.GraphModule, step: TrainingStep, values: Mapping[str, Tensor], options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Train the model, and return what the training step returns."""
        (returned,) = (node.args[0] for node in gm.graph.nodes if node.op == "output")
        wrapped, params, update = self._made(gm, step, values, options)
        scale = self.scale(gm.meta["groups"], options)
        losses: list[Tensor] = []
        outputs: list[Tensor] = []
        for number in range(step.steps):
            if number and options["restored"] != "no":
                saved = wrapped, update
                wrapped, params, update = self._made(gm, step, values, options)
                every = {name for name, one in params.items() if one.requires_grad} == {*returned["grads"]}
                restore(saved, (wrapped, update), options["restored"], mesh_of(gm), strict=every)
            elif number and update is not None:
                update.zero_grad(set_to_none=not options["zeroed"])
            lost, given = self._train(wrapped, step, values, options)
            losses += lost
            outputs += given
            grads = {name: one.grad for name, one in params.items() if one.grad is not None}
            if scale != 1:
                for grad in grads.values():
                    grad.mul_(scale)
            if step.clip:
                torch.nn.utils.clip_grad_norm_(params.values(), MAX_NORM, CLIPS[step.clip])
            found = {
                name: _whole(grads[name]).clone() if name in grads else torch.zeros(params[name].shape)
                for name in returned["grads"]
            }
            if update is not None:
                with declining("DTensor"):
                    update.step()  # it may use the memory of gradients
        kept = {} if update is None else {"params": {name: _whole(params[name].detach()) for name in found}}
        return {"losses": losses, "outputs": tuple(outputs), "grads": found, **kept}

    def _made(
        self, gm: fx.GraphModule, step: TrainingStep, values: Mapping[str, Tensor], options: Mapping[str, Any]
    ) -> tuple[nn.Module, dict[str, nn.Parameter], Any]:
        """Make the model as the wrapper trains it, its parameters by name, and what updates them."""
        (returned,) = (node.args[0] for node in gm.graph.nodes if node.op == "output")
        model = Model(step, {name: value.clone() for name, value in values.items()})
        if options["recompute"]:
            for stage in model.stages:
                stage.forward = functools.partial(checkpoint, stage.forward, use_reentrant=False)
        if options["aliases"]:
            _alias(model, step)
        wrapped = self.wrapped(model, step, gm, options)
        params = {name.rpartition(".")[2]: one for name, one in wrapped.named_parameters()}
        if not step.optimizer:
            return wrapped, params, None
        told = _optimizer_arguments(step, params, returned["grads"], options)
        kind = functools.partial(getattr(torch.optim, OPTIMIZERS[step.optimizer].torch), **told)
        return wrapped, params, self.optimizer(kind, _GROUPED[options["given"]](wrapped), gm, options)

    def wrapped(self, model: Model, step: TrainingStep, gm: fx.GraphModule, options: Mapping[str, Any]) -> nn.Module:
        """The model as the wrapper trains it."""
        raise NotImplementedError

    def optimizer(self, kind: Any, params: list[Any], gm: fx.GraphModule, options: Mapping[str, Any]) -> Any:
        """The optimizer that updates the model.

        Args:
            kind: makes one of parameters or groups of them, as its class does.
        """
        return kind(params)

    def scale(self, groups: Mapping[str, tuple[int, ...]], options: Mapping[str, Any]) -> float:
        """By how much the gradients of the wrapper are to be multiplied to be the mean over the ranks."""
        return 1

    def backward(self, model: Any, options: Mapping[str, Any], last: bool) -> AbstractContextManager[None]:
        """What surrounds a forward and its backward.

        Args:
            last: whether no backward follows before gradients are read.
        """
        return nullcontext()

    def before_step(self, model: Any, run: Callable[[], Tensor], stage: int, options: Mapping[str, Any]) -> None:
        """What is done in front of a step.

        Args:
            run: the forward of the first microbatch; gives its loss.
            stage: one that it runs.
        """

    def after_backward(self, model: Any, options: Mapping[str, Any], last: bool) -> None:
        """What is done behind a backward.

        Args:
            last: as in `backward`.
        """

    def _train(
        self, model: nn.Module, step: TrainingStep, values: Mapping[str, Tensor], options: Mapping[str, Any]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """One step: the losses of the microbatches, and the outputs of the batch."""
        order = options["order"]
        losses: list[Tensor] = []
        outputs = []
        stages = step.running(0)
        self.before_step(model, lambda: _forward(model, step, values, 0)[1], stages[len(stages) // 2], options)
        for number in range(step.microbatches):
            last = number == step.microbatches - 1 or order == "together"
            if order == "evaluated":
                with torch.no_grad():
                    _forward(model, step, values, number)
            with self.backward(model, options, last):
                output, loss = _forward(model, step, values, number)
                losses.append(loss)
                if order != "together":
                    loss.backward()
                    self.after_backward(model, options, last)
            outputs.append([_whole(one.detach()) for one in output])
        if order == "together":
            functools.reduce(torch.add, losses).backward()
            self.after_backward(model, options, last=True)
        return [_whole(loss.detach()) for loss in losses], [
            torch.cat(list(each)) for each in zip(*outputs, strict=True)
        ]


def _forward(
    model: nn.Module, step: TrainingStep, values: Mapping[str, Tensor], number: int
) -> tuple[tuple[Any, ...], Tensor]:
    """The outputs of a microbatch, and its loss."""
    rows = step.rows // step.microbatches
    batch = {name: values[name][number * rows : (number + 1) * rows] for name in BATCH if name in values}
    output = model(batch["x"], batch.get(SHIFT), number)
    return output, step.loss_of(output, _like(output[0], batch["target"]))


def _alias(model: Model, step: TrainingStep) -> None:
    """Give each parameter that a layer shares another name in its stage, as code does that ties weights."""
    for number, stage in enumerate(model.stages):
        for layer, read in step.layers(number):
            if layer in SHARED:
                name = next(iter(read))
                stage.register_parameter(f"{name}_again", getattr(stage, name))


def _by_dims(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": [one for one in params if one.dim() == dims]} for dims in sorted({one.dim() for one in params})]


#: What an optimizer is given of the parameters of a model.
_GROUPED: Mapping[str, Callable[[nn.Module], list[Any]]] = {
    "trained": lambda model: [one for one in model.parameters() if one.requires_grad],
    "all": lambda model: list(model.parameters()),
    "groups": _by_dims,
}


def mesh_of(gm: fx.GraphModule) -> DeviceMesh:
    """The mesh of a module: the same object each time, as a training script has one."""
    if "mesh" not in gm.meta:
        gm.meta["mesh"] = device_mesh(gm.meta["groups"], gm.meta["world_size"], gm.meta["rank"])
    found: DeviceMesh = gm.meta["mesh"]
    return found


def _optimizer_arguments(
    step: TrainingStep, params: Mapping[str, Tensor], grads: Collection[str], options: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of an optimizer.

    Args:
        params: all parameters by name.
        grads: names of those that get gradients.

    Raises:
        Unsupported: what it computes depends on whether parameters without gradients have gradients of zeros; or there is no
            such kernel.
    """
    chosen = OPTIMIZERS[step.optimizer]
    unread = [name for name, one in params.items() if one.requires_grad and name not in grads]
    if unread and chosen.decays:
        raise Unsupported(f"parameter '{unread[0]}' gets no gradient, and decays where a wrapper gives it one of zeros")
    if options["kernels"] == "fused" and not chosen.fused:
        raise Unsupported(f"torch.optim.{chosen.torch} has no fused kernel")
    return {**chosen.options, **_KERNELS[options["kernels"]]}


#: How optimizers go through parameters, as they are told.
_KERNELS: Mapping[str, Mapping[str, bool]] = {
    "by one": {"foreach": False},
    "together": {"foreach": True},
    "fused": {"fused": True},
}


def _whole(value: Tensor) -> Tensor:
    """A tensor as all ranks have it."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _like(output: Tensor, target: Tensor) -> Tensor:
    """The target of an output, as a DTensor if it is one."""
    if not isinstance(output, DTensor):
        return target
    return DTensor.from_local(target, output.device_mesh, [Replicate()] * output.device_mesh.ndim, run_check=False)


__all__ = ["DataParallelPass", "mesh_of"]
