"""FX graphs as stored in a Program: shared by ranks, with rank constants for values that differ between ranks.

In a Program's own graphs `meta["val"]` holds `TensorSpec`s (tuples of them for tuple results); graphs bound for one rank,
which passes and users see, hold fake tensors there.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from tcverify.errors import ProgramError
from tcverify.ops import TensorSpec, current_overload, fake_tensor, lookup, new_fake_mode
from tcverify.ops.leaves import leaves

#: Metadata that programs keep besides "val": `cost_s` is the predicted or measured time of a node, in seconds; `schedule`, on the
#: output node of a lowered graph, the times that its schedule promises; `after`, names of nodes that must run before a node;
#: `comm_buffer`,
#: where a value lives in the arena of its rank: {"group", "offset", "nbytes"}, in bytes; `layout`, how an input or the result of
#: a local op lies, as text (see `ops.Layout`); `stream_axis`, the dim of a result whose parts may be computed on other streams.
KEPT_META = ("after", "sp_local", "cost_s", "schedule", "comm_buffer", "layout", "stream_axis")


@dataclass(frozen=True, slots=True)
class RankConstant:
    """Placeholder in a shared graph for a constant whose value depends on the rank: its number, a group, a size, an offset."""

    name: str

    def __repr__(self) -> str:
        return f"<{self.name}>"


@dataclass(slots=True)
class Slot:
    """Placeholder in a plan (see `execution.plan`) for the value of an earlier node, by number."""

    index: int


@dataclass(frozen=True, slots=True)
class RankBinding:
    """What one rank runs: which of the program's graphs, with which rank constants."""

    graph: int
    constants: Mapping[str, Any]


def copy_graph(
    graph: fx.Graph,
    leaf: Callable[[Any], Any] = lambda x: x,
    meta: Callable[[fx.Node], dict[str, Any]] = lambda node: dict(node.meta),
    names: Mapping[Any, str] = MappingProxyType({}),
    target: Callable[[Any], Any] = lambda x: x,
) -> fx.Graph:
    """Copy `graph`, node by node and with the same names.

    Args:
        leaf: maps every constant argument.
        meta: creates the metadata of a copied node from the original node.
        names: new names of placeholders, by target.
        target: maps the target of every node.
    """
    new = fx.Graph()
    nodes: dict[Any, fx.Node] = {}

    def convert(value: Any) -> Any:
        return nodes[value] if isinstance(value, fx.Node) else leaf(value)

    for node in graph.nodes:
        args = map_aggregate(node.args, convert)
        kwargs = node.kwargs and map_aggregate(node.kwargs, convert)
        name = names.get(node.target, node.name) if node.op == "placeholder" else node.name
        made = add_node(new, node.op, target(node.target), args, kwargs, name)
        if node.type is not None:
            made.type = node.type
        made.meta.update(meta(node))
        nodes[node] = made
    return new


#: Sets attributes of nodes. Their own `__setattr__` registers the node again under its target, whatever attribute is set.
_set = object.__setattr__


def lazy_module(root: Any, graph: fx.Graph, class_name: str = "GraphModule") -> fx.GraphModule:
    """Create a GraphModule that generates its code on the first call: 0.03 ms instead of 0.75 ms.

    Uses a private function of torch; falls back to the ordinary constructor if that is missing.
    """
    try:
        from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
    except ImportError:
        return fx.GraphModule(root, graph, class_name=class_name)
    with _use_lazy_graph_module(True):
        module = _make_graph_module(root, graph, class_name=class_name)
    return module


def add_node(
    graph: fx.Graph, op: str, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str
) -> fx.Node:
    """Append a node. Arguments are set afterwards: `create_node` would walk them once more, at four times the cost."""
    node = graph.create_node(op, target, name=name)
    _set(node, "args", args)
    if kwargs:
        _set(node, "kwargs", kwargs)
    return node


def fake_values(graph: fx.Graph) -> list[Any]:
    """Return what every node of a program's graph holds in `meta["val"]`, with fake tensors in place of specs.

    Values that share storage share it in their fake tensors too; all fake tensors belong to one new fake mode.
    """
    mode = new_fake_mode()
    storages: dict[int, torch.UntypedStorage] = {}

    def fake(spec: Any) -> Any:
        if not isinstance(spec, TensorSpec):
            return spec
        tensor = fake_tensor(spec, mode, None if spec.alias is None else storages.get(spec.alias))
        if spec.alias is not None:
            storages.setdefault(spec.alias, tensor.untyped_storage())
        return tensor

    return [map_structure(fake, node.meta.get("val")) for node in graph.nodes]


def bind(graph: fx.Graph, constants: Mapping[str, Any], fakes: Sequence[Any] | None = None) -> fx.Graph:
    """Return `graph` as one rank sees it: constants filled in, fake tensors in `meta["val"]`.

    Ops are resolved by name now, so that a pass that compares them by identity finds them.

    Args:
        fakes: see `fake_values`; created if not given.

    Raises:
        UnsupportedOp: another library has meanwhile defined the op with an incompatible signature.
    """
    values = iter(fake_values(graph) if fakes is None else fakes)

    def constant(value: Any) -> Any:
        return constant_value(value, constants) if isinstance(value, RankConstant) else value

    def meta(node: fx.Node) -> dict[str, Any]:
        value = next(values)
        return {**node.meta, "val": value} if "val" in node.meta else node.meta

    return copy_graph(graph, constant, meta, target=current_overload)


def constant_value(constant: RankConstant, constants: Mapping[str, Any]) -> Any:
    """The value of a rank constant; groups are returned as new lists."""
    try:
        value = constants[constant.name]
    except KeyError:
        raise ProgramError(f"rank constant '{constant.name}' has no value on this rank") from None
    return list(value) if isinstance(value, (list, tuple)) else value


def calls_without_rank_constants(graph: fx.Graph) -> frozenset[str]:
    """The names of the calls whose arguments are the same on every rank that runs this graph."""
    calls = (node for node in graph.nodes if node.op == "call_function")
    return frozenset(node.name for node in calls if not leaves((node.args, node.kwargs), RankConstant))


def describe(graph: fx.Graph) -> list[dict[str, Any]]:
    """Return the metadata of every node that programs keep, with specs instead of (fake) tensors, and storage made explicit."""
    storages: dict[int, int] = {}
    described = []

    def spec(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            return value
        if not isinstance(value, torch.Tensor):
            return value if isinstance(value, (int, float, bool, type(None))) else None
        return TensorSpec.of(value, storages.setdefault(value.untyped_storage()._cdata, len(storages)))

    for node in graph.nodes:
        meta = node.meta
        kept = {key: meta[key] for key in KEPT_META if key in meta}
        if meta.get("val") is not None:
            kept["val"] = map_structure(spec, meta["val"])
        described.append(kept)
    return described


def with_metadata(
    graph: fx.Graph, described: Sequence[dict[str, Any]], names: Mapping[Any, str] = MappingProxyType({})
) -> fx.Graph:
    """Return a copy of `graph` with the metadata that `describe` found. `names`: see `copy_graph`."""
    metadata = iter(described)
    return copy_graph(graph, meta=lambda node: next(metadata), names=names)


def map_structure(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply `function` to the leaves of nested tuples, lists and dicts, keeping plain containers."""
    if isinstance(value, tuple):
        return tuple(map_structure(function, v) for v in value)
    if isinstance(value, list):
        return [map_structure(function, v) for v in value]
    if isinstance(value, dict):
        return {k: map_structure(function, v) for k, v in value.items()}
    return function(value)


def in_host_ir(graph: fx.Graph) -> bool:
    """Whether a graph contains an op of host IR. Cached: graphs of programs do not change."""
    known = _IN_HOST_IR.get(graph)
    if known is None:
        ops = (lookup(node.target).name for node in graph.nodes if node.op == "call_function")
        known = _IN_HOST_IR[graph] = any(name.startswith("host_ir::") for name in ops)
    return known


_IN_HOST_IR: weakref.WeakKeyDictionary[fx.Graph, bool] = weakref.WeakKeyDictionary()


def compute_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that compute: no placeholder, getitem, attribute or output. Their number is the size of a graph."""
    return [n for n in graph.nodes if n.op.startswith("call") and getattr(n.target, "__name__", "") != "getitem"]


def same_structure(
    first: fx.Graph, second: fx.Graph, *, constants: Mapping[str, Any] | None = None, integers: bool = True
) -> bool:
    """Whether two graphs make the same calls on the same operands in the same order; see `first_difference`."""
    if len(first.nodes) != len(second.nodes):
        return False
    return first_difference(first, second, constants=constants, integers=integers) is None


def first_difference(
    first: fx.Graph, second: fx.Graph, *, constants: Mapping[str, Any] | None = None, integers: bool = True
) -> tuple[fx.Node, fx.Node] | None:
    """The first nodes, one of each graph, that are not the same call on the same operands; None if there are none. Names and
    metadata do not count.

    Args:
        constants: values of the rank constants of `first`, where it has any.
        integers: whether integer constants count (graphs of two ranks differ in them).
    """
    numbers: dict[fx.Node, int] = {}
    returned = False  # ops accept lists and tuples alike; the caller of the graph distinguishes them

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, fx.Node) or isinstance(b, fx.Node):
            return isinstance(a, fx.Node) and isinstance(b, fx.Node) and numbers.get(a, -1) == numbers.get(b, -2)
        if isinstance(a, RankConstant) and constants is not None:
            a = constant_value(a, constants)
        if isinstance(a, (list, tuple, dict, slice)):
            return _same_items(a, b, same, tell_apart=returned)
        if type(a) is not type(b):
            return False
        if isinstance(a, float):
            return math.isnan(b) if math.isnan(a) else a == b and math.copysign(1, a) == math.copysign(1, b)
        if not integers and type(a) is int:
            return True
        return bool(a == b)

    for number, (a, b) in enumerate(zip(first.nodes, second.nodes, strict=False)):  # an output ends each of them
        numbers[a] = numbers[b] = number
        returned = a.op == "output"
        if a.op != b.op or (a.op != "output" and not _same_target(a.target, b.target)):
            return a, b
        mine, theirs = a.args, b.args
        if len(mine) != len(theirs) or not all(map(same, mine, theirs)):
            return a, b
        if (a.kwargs or b.kwargs) and not same(a.kwargs, b.kwargs):
            return a, b
    return None


def _same_items(a: Any, b: Any, same: Callable[[Any, Any], bool], *, tell_apart: bool) -> bool:
    """Whether two containers are of the same kind and have the same contents.

    Args:
        tell_apart: whether lists and tuples count as different.
    """
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, slice):
        return isinstance(b, slice) and all(map(same, (a.start, a.stop, a.step), (b.start, b.stop, b.step)))
    if not isinstance(b, (list, tuple)) or len(a) != len(b):
        return False
    if tell_apart and isinstance(a, tuple) is not isinstance(b, tuple):
        return False
    return all(map(same, a, b))


def _same_target(a: Any, b: Any) -> bool:
    """Ops are compared by name: another library may have redefined one between the creation of two graphs."""
    if a == b:
        return True
    return isinstance(a, torch._ops.OpOverload) and isinstance(b, torch._ops.OpOverload) and a.name() == b.name()
