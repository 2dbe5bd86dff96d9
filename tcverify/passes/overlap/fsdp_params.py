"""Removal of FSDP's unsharded parameters: such a graph input is replaced by what is copied into it."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from tcverify.ops import lookup
from tcverify.passes.base import Pass
from tcverify.passes.editing import declared_after, known_spec, named_arguments, op_name
from tcverify.passes.overlap.fsdp import COPY, annotate_aliases, read_resize
from tcverify.passes.overlap.reordering import is_lowered
from tcverify.passes.storages import GraphAccesses, accesses
from tcverify.program import Contract


@dataclass(slots=True)
class Interval:
    """What follows one copy into a parameter, up to the next one or to where the parameter is freed.

    Attributes:
        copy: the node that copies.
        source: what it copies.
        readers: nodes that have the parameter itself among their operands.
        last: the place of the last node that reads the parameter, itself or by a view.
    """

    copy: fx.Node
    source: fx.Node
    readers: list[fx.Node] = field(default_factory=list)
    last: int = -1


@dataclass(slots=True)
class Parameter:
    """An input into which the graph copies.

    Attributes:
        freed: whether it is freed, as far as the graph has been read; None if nothing has been done to it.
        current: the interval that the graph is in.
        interval_of: the interval in which each view of it was made.
        left_alone: why it stays, or "".
    """

    node: fx.Node
    freed: bool | None = None
    current: Interval | None = None
    intervals: list[Interval] = field(default_factory=list)
    resizes: list[fx.Node] = field(default_factory=list)
    interval_of: dict[fx.Node, Interval] = field(default_factory=dict)
    left_alone: str = ""


class RemoveFsdp2UnshardedParamGraphInputUsage(Pass):
    """Uses of an unsharded parameter become uses of what was copied into it; the copies go, and so do the resizes around them.

    In layers that run twice a parameter is copied into twice: each use gets what the last copy before it has copied. A parameter
    stays unchanged if that is unknown, or if the difference would be visible:

    - something else writes into it or into a view of it, or it shares storage with another input;
    - the result of one of its copies or resizes is read;
    - it, or a view of it, is used outside of such an interval, or in another than the view was made in, or is returned;
    - what is copied has another shape, dtype or strides, or is overwritten before the last use;
    - it is not freed at the end, so that the caller finds there what was copied last.

    Where the parameter holds memory at the beginning, the first freeing stays: its size at the end is what it was.
    """

    name: ClassVar[str] = "remove_fsdp2_unsharded_param_graph_input_usage"
    contract: ClassVar[Contract] = Contract(metadata=True, idempotent=True, collective_order=True)
    PATTERNS: ClassVar[tuple[str, ...]] = ("parameter",)

    def rewrite(self, graph: fx.Graph) -> Iterable[fx.Node]:
        """See `Pass.rewrite`. Linear in the graph, once more for each parameter in a row that is copied into the next one."""
        sources: list[fx.Node] = []
        self.rewrites["parameter"] = 0
        while not is_lowered(graph) and (found := self.removed(graph)):
            sources += found
        return sources

    def removed(self, graph: fx.Graph) -> list[fx.Node]:
        """Remove the parameters into which no other one is copied that could be removed; return what was copied into them."""
        found = accesses(graph)
        parameters = [one for one in self.parameters(graph, found) if not one.left_alone]
        changed: list[fx.Node] = []
        erased: list[fx.Node] = []
        for parameter in parameters:
            for interval in parameter.intervals:
                for reader in interval.readers:
                    reader.replace_input_with(parameter.node, interval.source)
                changed += interval.readers
                erased.append(interval.copy)
            erased += self.unneeded(parameter)
        _erase(graph, erased)
        self.rewrites["parameter"] += len(parameters)
        views = {node for parameter in parameters for node in parameter.interval_of}
        if changed:
            annotate_aliases(graph, [node for node in changed if node in views])
        return [interval.source for parameter in parameters for interval in parameter.intervals]

    def parameters(self, graph: fx.Graph, found: GraphAccesses) -> list[Parameter]:
        """The inputs into which `fsdp::copy_` copies, each with what the graph does with it."""
        return _parameters(graph, found, self.objection)

    def objection(self, parameter: Parameter, reason: str) -> str:
        """Why a parameter has to stay, because of a node or of the whole graph; "" if it need not."""
        return reason

    def unneeded(self, parameter: Parameter) -> list[fx.Node]:
        """The resizes that can go."""
        return _unneeded(parameter)


def _parameters(graph: fx.Graph, found: GraphAccesses, objection: Callable[[Parameter, str], str]) -> list[Parameter]:
    by_storage: dict[int, Parameter] = {}
    for node in graph.nodes:
        if op_name(node) == COPY:
            target = named_arguments(node).get("tensor")
            if isinstance(target, fx.Node) and target.op == "placeholder" and len(found.results[target]) == 1:
                by_storage.setdefault(found.results[target][0], Parameter(target))
    if not by_storage:
        return []
    writes: dict[int, list[int]] = {}
    for place, node in enumerate(graph.nodes):
        if node.op == "output":
            touched = {s for operand in node.all_input_nodes for s in found.results[operand]}
        else:
            touched = {*found.reads[node], *found.writes[node], *found.results[node]}
        for storage in touched:
            parameter = by_storage.get(storage)
            if parameter is not None and not parameter.left_alone:
                reason = _follow(parameter, storage, node, place, found, by_storage)
                parameter.left_alone = objection(parameter, reason) if reason else ""
        if node.op != "output":
            for storage in found.writes[node]:
                writes.setdefault(storage, []).append(place)
    places = {node: place for place, node in enumerate(graph.nodes)}
    for parameter in by_storage.values():
        if not parameter.left_alone:
            reason = _at_the_end(parameter, found, writes, places)
            parameter.left_alone = objection(parameter, reason) if reason else ""
    return list(by_storage.values())


def _follow(
    parameter: Parameter,
    storage: int,
    node: fx.Node,
    place: int,
    found: GraphAccesses,
    by_storage: dict[int, Parameter],
) -> str:
    """Process a node that touches the storage of a parameter. Returns why the parameter has to stay, or ""."""
    if node.op in ("placeholder", "get_attr"):
        return "" if node is parameter.node else f"it shares storage with '{node.name}'"
    if node.op == "output":
        return "it is returned"
    resize = read_resize(node)
    if (resize is not None or op_name(node) == COPY) and node.users:
        return f"the result of '{node.name}' is read"
    if resize is not None:
        return _resize(parameter, node, *resize)
    if op_name(node) == COPY and named_arguments(node).get("tensor") is parameter.node:
        source = named_arguments(node).get("data")
        if not isinstance(source, fx.Node) or node.kwargs:
            return "nothing is known of what is copied"
        if any(s in by_storage for s in found.results[source]):
            return "a parameter is copied"
        if parameter.freed:
            return "it is written into while it is freed"
        if not _same_layout(source, parameter.node):
            return "what is copied is laid out in another way"
        parameter.current = Interval(node, source)
        parameter.intervals.append(parameter.current)
        return ""
    if storage in found.writes[node]:
        return f"'{node.name}' writes into it"
    return _read(parameter, storage, node, place, found)


def _resize(parameter: Parameter, node: fx.Node, variable: object, size: object) -> str:
    if variable is not parameter.node or type(size) is not int:
        return f"'{node.name}' resizes it in an unknown way"
    parameter.resizes.append(node)
    if size == 0:
        parameter.freed, parameter.current = True, None
    else:
        parameter.freed = False
    return ""


def _read(parameter: Parameter, storage: int, node: fx.Node, place: int, found: GraphAccesses) -> str:
    interval = parameter.current
    if interval is None:
        return f"'{node.name}' uses it where nothing has been copied into it"
    for operand in node.all_input_nodes:
        view = operand is not parameter.node and storage in found.results[operand]
        if view and parameter.interval_of.get(operand) is not interval:
            return f"'{operand.name}' views what another copy has written"
    if parameter.node in node.all_input_nodes:
        interval.readers.append(node)
    if storage in found.results[node]:
        parameter.interval_of[node] = interval
    under_way = node.op == "call_function" and lookup(node.target).phase == "start"  # reads on, until it is waited for
    interval.last = max(interval.last, sys.maxsize if under_way else place)
    return ""


def _same_layout(source: fx.Node, target: fx.Node) -> bool:
    one, other = known_spec(source), known_spec(target)
    return one is not None and other is not None and one.layout == other.layout


def _at_the_end(
    parameter: Parameter, found: GraphAccesses, writes: dict[int, list[int]], places: dict[fx.Node, int]
) -> str:
    """Return why a parameter has to stay, once its whole graph has been read; or ""."""
    if not parameter.freed:
        return "it is not freed at the end"
    for interval in parameter.intervals:
        begin = places[interval.copy]
        for storage in found.results[interval.source]:
            written = writes.get(storage, [])
            following = bisect_right(written, begin)
            if following < len(written) and written[following] <= interval.last:
                return f"what '{interval.copy.name}' copies is overwritten before its last use"
    return ""


def _unneeded(parameter: Parameter) -> list[fx.Node]:
    """The resizes that can go: all, but for the first freeing where the parameter holds memory at the beginning."""
    val = parameter.node.meta.get("val")
    if isinstance(val, FakeTensor) and val.untyped_storage().nbytes() == 0:
        return parameter.resizes
    kept = next(node for node in parameter.resizes if read_resize(node) == (parameter.node, 0))
    return [node for node in parameter.resizes if node is not kept]


def _erase(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    """Erase unused nodes. Nodes that had to follow one of them now follow its predecessors."""
    if not nodes:
        return
    gone: dict[str, list[str]] = {}
    doomed = set(nodes)
    for node in list(graph.nodes):
        after = declared_after(node)
        if gone.keys() & set(after):
            node.meta["after"] = after = [name for old in after for name in gone.get(old, [old])]
        if node in doomed:
            gone[node.name] = after
    for node in nodes:
        graph.erase_node(node)


__all__ = ["RemoveFsdp2UnshardedParamGraphInputUsage"]
