"""Captures the graph of a model on this rank: AOTAutograd's, with what DTensor knows of the placements of its inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from tcverify.capturing.groups import label_of
from tcverify.capturing.normalize import InputFacts, plain
from tcverify.capturing.record import Captured, GroupFacts, InputRole
from tcverify.errors import ProgramError
from tcverify.program import PARTIAL, REPLICATED, VARYING, Placement, shard

if TYPE_CHECKING:  # half a second, which every command would pay
    from torch.distributed.tensor import DTensor


def capture(
    model: torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    training: bool = False,
) -> Captured:
    """Capture this rank's graph of a model, as AOTAutograd passes it to compilers.

    Requires a process group, which may be fake: `tcverify check` creates it for the function that calls this.

    Args:
        model: parallelised as usual (`parallelize_module`, DTensor parameters, functional collectives).
        args, kwargs: example inputs; the placements of DTensors are kept.
        training: capture the backward pass as well, as one joint graph.

    Raises:
        ProgramError: AOTAutograd cannot capture the model; the message says why.
    """
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    gradients = contextlib.nullcontext() if training else torch.no_grad()
    own = [(m, dict(m._parameters), dict(m._buffers)) for m in model.modules()]
    try:
        with contextlib.ExitStack() as stack, gradients:
            joint = aot_export_joint_with_descriptors(stack, model, tuple(args), dict(kwargs or {}))
            module: fx.GraphModule = joint.graph_module
    except Exception as error:
        text = str(error).strip().splitlines() or [""]
        raise ProgramError(
            f"AOTAutograd cannot capture the model: {type(error).__name__}: {text[0]}",
            "capture a graph in another way (make_fx, torch.compile with a backend that keeps it) and pass that",
        ) from error
    finally:  # torch puts a module that stands in two places back together with what it traced it on
        for module_, parameters, buffers in own:
            module_._parameters.update(parameters)
            module_._buffers.update(buffers)
    examples = pytree.tree_leaves((tuple(args), dict(kwargs or {})))
    groups: dict[str, GroupFacts] = {}
    facts = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            facts[node.name] = _facts(node, model, examples, groups)
    captured = plain(module, None, facts)
    # a mesh dim's own name says more than that its group is the whole world
    return replace(captured, groups={**captured.groups, **groups})


def _facts(node: fx.Node, model: torch.nn.Module, examples: Sequence[Any], groups: dict[str, GroupFacts]) -> InputFacts:
    """What the descriptor of an input says: which parameter, buffer, argument or gradient it is, and so how it is placed."""
    described: Any = node.meta.get("desc")
    while hasattr(described, "base"):
        described = described.base
    kind = type(described).__name__
    target = getattr(described, "target", None)
    if kind == "ParamAOTInput" and target is not None:
        return facts_of(model.get_parameter(target), "parameter", groups)
    if kind == "BufferAOTInput" and target is not None:
        return facts_of(model.get_buffer(target), "buffer", groups)
    if kind == "PlainAOTInput":
        return facts_of(examples[described.idx], "input", groups)
    return InputFacts("tangent")


def facts_of(value: Any, role: InputRole, groups: dict[str, GroupFacts]) -> InputFacts:
    """What is known of an input by its value: a DTensor knows its placements, everything else is equal on all ranks.

    Args:
        groups: the groups of DTensors' meshes are added.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(value, torch.Tensor):
        return InputFacts(role)
    if not isinstance(value, DTensor):
        return InputFacts(role, value=value)
    return InputFacts(role, placements_by_group(value, groups), tuple(value.shape), value.to_local())


def placements_by_group(value: DTensor, groups: dict[str, GroupFacts]) -> tuple[tuple[str, Placement], ...]:
    """How a DTensor is placed, by name of the group.

    Args:
        groups: the groups of its mesh are added.
    """
    mesh = value.device_mesh
    placed: list[tuple[str, Placement]] = []
    later: list[tuple[str, Placement]] = []
    for number, placement in enumerate(value.placements):
        group = mesh.get_group(number)
        names = mesh.mesh_dim_names
        label = names[number] if names else label_of(group)
        ranks = tuple(torch.distributed.get_process_group_ranks(group))
        groups[group.group_name] = GroupFacts(label, ranks)
        # a strided shard divides what the dims behind it have divided already
        strided = type(placement).__name__ == "_StridedShard"
        (later if strided else placed).append((group.group_name, _placement(placement, value.dim())))
    return (*placed, *later)


def _placement(placement: Any, ndim: int) -> Placement:
    from torch.distributed.tensor import Partial, Replicate, Shard

    if isinstance(placement, Replicate):
        return REPLICATED
    if isinstance(placement, Shard):
        return shard(placement.dim % ndim)
    if isinstance(placement, Partial) and placement.reduce_op == "sum":
        return PARTIAL
    return shard(placement.dim % ndim) if hasattr(placement, "dim") else VARYING


__all__ = ["capture", "facts_of", "placements_by_group"]
