"""Gradients of programs of whole tensors: what autograd runs behind their ops, written as ops of the program."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_aggregate

from tcverify.errors import TcverifyError
from tcverify.ops import TensorSpec, qualified_name
from tcverify.program import GraphBuilder, InputSpec, Program, spmd_program
from tcverify.strategies.tracing import write_traced

Tensor = torch.Tensor

_REDUCTIONS = ("_c10d_functional::all_reduce", "_c10d_functional::wait_tensor")


def with_gradients(program: Program) -> Program:
    """The program that also returns the gradients of its floating inputs, given those of its floating results.

    The gradients of results are inputs, which may be placed otherwise than the results. The program itself, where no result
    depends on a floating input, or autograd runs what no program can hold.
    """
    graph = program.graphs[0]
    reductions = [node for node in graph.nodes if qualified_name(node.target) in _REDUCTIONS]
    reduced = {one for node in reductions for one in node.all_input_nodes}
    own = [node for node in (*graph.find_nodes(op="placeholder"), *reductions) if node not in reduced]
    calls = [node for node in graph.nodes if node.op == "call_function" and node not in reductions]
    results: list[fx.Node] = list(graph.output_node().args[0])  # type: ignore[arg-type]
    grads = [
        InputSpec(f"grad{number}", _spec(node).shape, _spec(node).dtype)
        for number, node in enumerate(node for node in results if _spec(node).dtype.is_floating_point)
    ]

    def run(*values: Tensor) -> list[Tensor]:
        return _differentiated(own, calls, results, values)

    def build(b: GraphBuilder) -> Any:
        for dim in program.mesh.dims:
            b.group(dim.name)
        made: dict[Any, Any] = {spec.name: b.input(spec.name) for spec in (*program.inputs, *grads)}
        for node in reductions:
            args = map_aggregate(node.args, lambda one: made[one.name] if isinstance(one, fx.Node) else one)
            made[node.name] = b.call(qualified_name(node.target), *args)
        return tuple(write_traced(b, traced, [made[one.name] for one in (*own, *grads)]))

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = make_fx(run)(*(_zeros(_spec(one)) for one in own), *(_zeros(one) for one in grads)).graph
        returned: Sequence[Any] = traced.output_node().args[0]  # type: ignore[assignment]
        if len(returned) == len(results):
            return program
        inputs = [*program.inputs, *grads]
        return spmd_program(program.mesh, inputs, build, seed=program.seed, labels=(*program.labels, "gradients"))
    except (TcverifyError, RuntimeError, KeyError):
        return program


def _differentiated(
    own: Sequence[fx.Node], calls: Sequence[fx.Node], results: Sequence[fx.Node], values: Sequence[Tensor]
) -> list[Tensor]:
    """Results of calls, and the gradients of what they read.

    Args:
        values: what they read, then the gradients of floating results.
    """
    known: dict[Any, Any] = {}
    for node, value in zip(own, values, strict=False):
        known[node] = value.detach().requires_grad_(value.is_floating_point())
    for node in calls:
        args, kwargs = map_aggregate((node.args, dict(node.kwargs)), lambda one: known.get(one, one))
        known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    outputs = [known[node] for node in results]
    floating = zip((one for one in outputs if one.is_floating_point()), values[len(own) :], strict=True)
    behind = [(output, grad) for output, grad in floating if output.requires_grad]
    trained = [known[node] for node in own if known[node].requires_grad]
    found = torch.autograd.grad(
        [output for output, _ in behind], trained, [grad for _, grad in behind], allow_unused=True
    )
    return [*(one.detach() for one in outputs), *(one.clone() for one in found if one is not None)]


def _spec(node: fx.Node) -> TensorSpec:
    spec: TensorSpec = node.meta["val"]
    return spec


def _zeros(spec: TensorSpec | InputSpec) -> Tensor:
    return torch.zeros(tuple(spec.shape), dtype=spec.dtype)


__all__ = ["with_gradients"]
