"""What AOTAutograd hands to passes behind it: functional graphs, with metadata as torch makes it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils import _pytree as pytree

from tcverify.errors import Unsupported


def require_functional(graph: fx.Graph, *, allowed: Callable[[fx.Node], bool] = lambda _: False) -> None:
    """Decline graphs that write into anything but their inputs, once into each, by `aten::copy_` of another value at their end.

    Args:
        allowed: whether a node may mutate nevertheless.

    Raises:
        Unsupported: the graph is not functional, and AOTAutograd would never pass it on.
    """
    ended = False
    kept: set[Any] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        schema = getattr(node.target, "_schema", None)
        waits = node.target is torch.ops._c10d_functional.wait_tensor.default
        if schema is None or not schema.is_mutable or waits or allowed(node):
            if ended and _reads(node):
                raise Unsupported(f"node '{node.name}' reads behind the copies into inputs")
            continue
        written = node.args[0] if node.args else None
        into_input = getattr(written, "op", "") == "placeholder" and not node.users
        if node.target is not torch.ops.aten.copy_.default or not into_input:
            raise Unsupported(f"node '{node.name}' writes in place: the pass is for functional graphs")
        if written in kept or written is node.args[1]:
            raise Unsupported(
                f"node '{node.name}' writes '{written}' again or into itself: AOTAutograd makes no such copy"
            )
        kept.add(written)
        ended = True


def _reads(node: fx.Node) -> bool:
    return bool(node.all_input_nodes)


@contextlib.contextmanager
def torch_metadata(gm: fx.GraphModule) -> Iterator[None]:
    """Give a graph the metadata that torch's own fake kernels make, be in their fake mode, and leave plain sizes behind.

    What shares storage there is what torch believes to share it: passes decide by that.

    Raises:
        Unsupported: torch cannot run the graph on fake tensors.
    """
    from torch._inductor.virtualized import V

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    inputs = [_anew(node.meta["val"], mode) for node in gm.graph.nodes if node.op == "placeholder"]
    try:
        FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*inputs)
    except Exception as error:
        raise Unsupported(f"torch cannot run it on fake tensors: {type(error).__name__}: {error}"[:200]) from error
    for node in gm.graph.nodes:
        if "val" in node.meta:
            node.meta["tensor_meta"] = pytree.tree_map(_described, node.meta["val"])
    with V.set_fake_mode(mode):
        yield


def _anew(value: Any, mode: FakeTensorMode) -> Any:
    if not isinstance(value, FakeTensor):
        return value
    with mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _described(value: Any) -> Any:
    from torch.fx.passes.shape_prop import _extract_tensor_metadata

    return _extract_tensor_metadata(value) if isinstance(value, torch.Tensor) else value


def name_overloads(gm: fx.GraphModule) -> None:
    """Put overloads in the place of overload packets, which some passes insert and Inductor resolves when it lowers them."""
    for node in gm.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverloadPacket):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
            found = torch._C._jit_resolve_packet(node.target._qualified_op_name, *args, **kwargs)
            node.target = getattr(node.target, found)


@contextlib.contextmanager
def inductor_config(options: Mapping[str, Any]) -> Iterator[None]:
    """Set options of Inductor by their names there; those that this torch has not are left out."""
    from torch._inductor import config

    with config.patch(known_options(options)):
        yield


def known_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options of Inductor that this torch has."""
    from torch._inductor import config

    return {name: value for name, value in options.items() if _known(config, name)}


def _known(config: Any, name: str) -> bool:
    for part in name.split("."):
        if not hasattr(config, part):
            return False
        config = getattr(config, part)
    return True


__all__ = ["inductor_config", "known_options", "name_overloads", "require_functional", "torch_metadata"]
