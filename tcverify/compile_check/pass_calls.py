"""How compilers call a pass, and how its graph is kept apart from what verification does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from tcverify.application.apply import returned_module
from tcverify.application.pair import Defect
from tcverify.errors import UsageError
from tcverify.program.graph import copy_graph


@dataclass(frozen=True, slots=True)
class PassCall:
    """What a pass was called with.

    Attributes:
        graph: what it is to rewrite.
        owner: the module of the graph, where there is one.
        bare: whether it was given the graph alone, as by Inductor; else the module.
        example_inputs: that it was given beside the module.
        saved: the graph as it was.
        attributes: of the owner, by name, as they were.
    """

    graph: fx.Graph
    owner: fx.GraphModule | None
    bare: bool
    example_inputs: list[Any] | None
    saved: fx.Graph
    attributes: dict[str, Any]


def record_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> PassCall:
    """Take down what a pass is called with.

    Raises:
        UsageError: there is no graph among it.
    """
    everything = [*args, *kwargs.values()]
    for value in everything:
        if isinstance(value, fx.GraphModule):
            examples = next((list(v) for v in everything if v is not value and isinstance(v, (list, tuple))), None)
            return PassCall(value.graph, value, False, examples, _copied(value.graph), _attributes(value.graph, value))
        if isinstance(value, fx.Graph):
            owner = value.owning_module
            return PassCall(value, owner, True, None, _copied(value), _attributes(value, owner))
    kinds = ", ".join(type(value).__name__ for value in everything) or "nothing"
    raise UsageError(f"a checked pass is called with {kinds}", "call it with a GraphModule, or with a Graph")


def _copied(graph: fx.Graph) -> fx.Graph:
    copied = copy_graph(graph)
    copied._codegen = graph._codegen
    return copied


def _attributes(graph: fx.Graph, owner: fx.GraphModule | None) -> dict[str, Any]:
    """The attributes that a graph reads, by name."""
    names = dict.fromkeys(str(node.target) for node in graph.nodes if node.op == "get_attr")
    return {name: get_module_attribute(owner, name) for name in names}


def get_module_attribute(owner: torch.nn.Module | None, name: str) -> Any:
    """The attribute of a module that a `get_attr` node names, or None."""
    found: Any = owner
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def find_result_graph(given: PassCall, returned: Any, rank: int) -> tuple[fx.Graph, fx.GraphModule | None] | Defect:
    """The graph that a pass has left, and its module."""
    if isinstance(returned, fx.Graph):
        return returned, returned.owning_module if returned is not given.graph else given.owner
    if given.bare and returned is None:
        return given.graph, given.owner
    if given.owner is None and not isinstance(returned, fx.GraphModule):
        return Defect("return", rank, f"it returned a {type(returned).__name__}; a pass returns a graph, or None")
    result = returned_module(returned, given.owner or fx.GraphModule({}, fx.Graph()), rank)
    return result if isinstance(result, Defect) else (result.graph, result)


def restore_graph(given: PassCall, returned: Any) -> Any:
    """Give the graph its original nodes back, in place. Returns what to return in place of `returned`."""
    if given.owner is not None:
        for name, value in given.attributes.items():
            holder, _, last = name.rpartition(".")
            parent = get_module_attribute(given.owner, holder) if holder else given.owner
            if parent is not None and getattr(parent, last, None) is not value:
                setattr(parent, last, value)
    if given.owner is not None and not given.bare:
        given.owner.graph = given.saved
        return None if returned is None else given.owner
    for node in reversed(list(given.graph.nodes)):
        given.graph.erase_node(node)
    made: dict[fx.Node, fx.Node] = {}
    for node in given.saved.nodes:
        made[node] = given.graph.node_copy(node, made.__getitem__)
    if given.owner is not None:
        given.owner.recompile()
    return None if returned is None else given.graph if isinstance(returned, fx.Graph) else given.owner


@contextlib.contextmanager
def isolate_from_compile() -> Iterator[None]:
    """What runs inside neither sees nor changes the compile around it: modes, tracing, random numbers, default dtype."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch._guards.tracing(None))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)


__all__ = [
    "PassCall",
    "find_result_graph",
    "get_module_attribute",
    "isolate_from_compile",
    "record_call",
    "restore_graph",
]
