"""Autograd as a pass: a forward pass with collectives becomes what a rank runs when PyTorch finds the gradients of its inputs.

The forward pass is run once, alone, on tensors that are zero. Every op is recorded, of the forward and of the backward.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.utils.checkpoint import checkpoint

from tcverify.errors import Unsupported
from tcverify.program import GraphBuilder, InputSpec, Mesh, MeshDim
from tcverify.pytorch.base import TorchPass
from tcverify.pytorch.end_to_end.pipeline import Pipeline
from tcverify.pytorch.training_steps import record, require_same
from tcverify.strategies.training.collectives import Collectives, Forward, Subgroup, subgroups_of, write_gradients

Tensor = torch.Tensor
_Run = Callable[..., Sequence[Tensor]]

#: With what PyTorch says that it has no gradient for a collective, or that fake process groups do not receive without sending.
_DECLINED = re.compile(r"backward only supports|inputBuffer is empty but outputSplitSizes")


class Autograd(TorchPass):
    """Runs a forward pass with functional collectives, and its backward.

    Options:
        run: the forward pass as it is written ("eager"), "recomputed" in the backward, compiled by AOTAutograd with either of its
            partitioners ("default", "min-cut"), or eager with the collectives of `torch.distributed.nn.functional` ("nn").
        functions: which functional collectives: the "plain" ones, or those with "autograd" in their names where there are some.

    Raises:
        Unsupported: the program is no forward pass with its gradients, or PyTorch says that it has no gradient for a collective.
    """

    name = "torch:autograd"

    @classmethod
    def pipeline(cls, options: Mapping[str, Any]) -> Pipeline:
        return Pipeline(
            entry="autograd",
            unreachable="the program holds gradients that are written out, which nothing differentiates",
        )

    def rewrite(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> fx.GraphModule:
        forward = _read_forward(gm)
        groups = subgroups_of(gm.meta["groups"], gm.meta["rank"])
        functional = _Functional(autograd=options["functions"] == "autograd")
        collectives = _NnFunctional() if options["run"] == "nn" else functional

        def outputs(*own: Tensor) -> list[Tensor]:
            return forward.outputs(own, groups, collectives)

        run = _RUNS[options["run"]](outputs)
        shapes = dict(zip(forward.names(), forward.shapes, strict=True))
        try:
            if options["run"] in _PARTITIONS:
                _trained(forward, run, [torch.zeros(shape) for shape in forward.shapes])  # compiles it
            return record(gm, shapes, lambda values: _trained(forward, run, list(values.values())))
        except RuntimeError as error:
            if _DECLINED.search(str(error)):
                raise Unsupported(str(error)) from error
            raise


def _read_forward(gm: fx.GraphModule) -> Forward:
    """Read the forward pass that the options of a program describe.

    Raises:
        Unsupported: the graph is not that of its gradients.
    """
    forward = Forward.of(gm.meta.get("options", {}))
    rank, world = gm.meta["rank"], range(gm.meta["world_size"])
    groups = {name: tuple(members) for name, members in gm.meta["groups"].items()}
    dims = [MeshDim(name, (own, *((one,) for one in world if one not in own))) for name, own in groups.items()]
    inputs = {name: InputSpec(name, shape) for name, shape in zip(forward.names(), forward.shapes, strict=True)}
    builder = GraphBuilder(Mesh(len(world), tuple(dims)), inputs, rank)
    try:
        written = builder.finish(write_gradients(builder, forward, groups, rank))
    except RuntimeError as error:
        raise Unsupported(f"the options of the program describe a forward pass that does not run: {error}") from error
    require_same(
        gm, written, dict(zip(forward.names(), forward.shapes, strict=True)), "forward pass with its gradients"
    )
    return forward


def _trained(forward: Forward, run: _Run, values: Sequence[Tensor]) -> dict[str, Any]:
    """What a forward pass and its backward give."""
    own = [value.detach().requires_grad_(number in forward.wanted) for number, value in enumerate(values)]
    outputs = list(run(*own))
    grads = forward.gradients(outputs, own)
    return {
        "outputs": tuple(_plain(one.detach()) for one in outputs),
        "grads": {k: _plain(g) for k, g in grads.items()},
    }


def _plain(value: Tensor) -> Tensor:
    """What a collective gave, which is waited for at the latest now."""
    return value.trigger_wait() if hasattr(value, "trigger_wait") else value


def _recomputed(outputs: _Run) -> _Run:
    return lambda *own: checkpoint(outputs, *own, use_reentrant=False)


def _compiled(partition: str) -> Callable[[_Run], _Run]:
    def compiled(outputs: _Run) -> _Run:
        from torch._functorch import aot_autograd, partitioners

        made: Any = aot_autograd

        def as_it_is(graph: fx.GraphModule, inputs: Any) -> Any:
            return made.make_boxed_func(graph.forward)

        return made.aot_function(outputs, as_it_is, as_it_is, partition_fn=getattr(partitioners, partition))  # type: ignore[no-any-return]

    return compiled


_PARTITIONS = {"default": "default_partition", "min-cut": "min_cut_rematerialization_partition"}
_RUNS: Mapping[str, Callable[[_Run], _Run]] = {
    "eager": lambda outputs: outputs,
    "nn": lambda outputs: outputs,
    "recomputed": _recomputed,
    **{name: _compiled(partition) for name, partition in _PARTITIONS.items()},
}


class _Functional(Collectives):
    """The functional collectives of PyTorch.

    Args:
        autograd: whether those with this word in their names are called.
    """

    def __init__(self, autograd: bool) -> None:
        self._autograd = autograd

    def all_reduce(self, values: Sequence[Tensor], group: Subgroup, op: str) -> list[Tensor]:
        if len(values) > 1:
            return list(self._call("all_reduce_coalesced", group, list(values), op))
        return [self._call("all_reduce", group, values[0], op)]

    def all_gather(self, values: Sequence[Tensor], group: Subgroup, dim: int) -> list[Tensor]:
        if len(values) > 1 and dim == 0:
            return list(self._call("all_gather_into_tensor_coalesced", group, list(values)))
        return [self._call("all_gather_tensor", group, value, dim) for value in values]

    def reduce_scatter(self, values: Sequence[Tensor], group: Subgroup, op: str, dim: int) -> list[Tensor]:
        if len(values) > 1:
            return list(self._call("reduce_scatter_tensor_coalesced", group, list(values), op, [dim] * len(values)))
        return [self._call("reduce_scatter_tensor", group, values[0], op, dim)]

    def all_to_all(self, value: Tensor, group: Subgroup, sent: Sequence[int], received: Sequence[int]) -> Any:
        return self._call("all_to_all_single", group, value, list(received), list(sent))

    def broadcast(self, value: Tensor, group: Subgroup, source: int) -> Any:
        return self._call("broadcast", group, value, source)

    def _call(self, name: str, group: Subgroup, *arguments: Any) -> Any:
        from torch.distributed import _functional_collectives as functions

        plain = getattr(functions, name)
        return (getattr(functions, f"{name}_autograd", plain) if self._autograd else plain)(
            *arguments, _resolved(group)
        )


class _NnFunctional(Collectives):
    """The collectives of `torch.distributed.nn.functional`."""

    def __init__(self) -> None:
        from torch.distributed.nn import functional

        self._functions: Any = functional

    def all_reduce(self, values: Sequence[Tensor], group: Subgroup, op: str) -> list[Tensor]:
        return [self._functions.all_reduce(value, _reduction(op), _resolved(group)) for value in values]

    def all_gather(self, values: Sequence[Tensor], group: Subgroup, dim: int) -> list[Tensor]:
        return [torch.cat(self._functions.all_gather(value, _resolved(group)), dim) for value in values]

    def reduce_scatter(self, values: Sequence[Tensor], group: Subgroup, op: str, dim: int) -> list[Tensor]:
        made = []
        for value in values:
            parts = [part.contiguous() for part in value.chunk(group.size, dim)]
            made.append(
                self._functions.reduce_scatter(torch.empty_like(parts[0]), parts, _reduction(op), _resolved(group))
            )
        return made

    def all_to_all(self, value: Tensor, group: Subgroup, sent: Sequence[int], received: Sequence[int]) -> Any:
        out = value.new_empty(sum(received), *value.shape[1:])
        given = value.contiguous(), list(received), list(sent)
        return self._functions.all_to_all_single(out, *given, _resolved(group))

    def broadcast(self, value: Tensor, group: Subgroup, source: int) -> Any:
        members = _resolved(group)
        return self._functions.broadcast(value, dist.get_global_rank(members, source), members)


def _reduction(op: str) -> Any:
    return getattr(dist.ReduceOp, op.upper())


def _resolved(group: Subgroup) -> Any:
    """The process group of this name."""
    resolve: Any = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    return resolve(group.name)


__all__ = ["Autograd"]
