"""Builds the program that a script has become."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx
from torch.fx.node import map_aggregate

from tcverify.ops import TensorSpec
from tcverify.ops.leaves import leaves
from tcverify.program import GraphBuilder, InputSpec, Program, RankBinding
from tcverify.program.graph import add_node
from tcverify.strategies.functional.script import Script, ScriptCall, ScriptValue
from tcverify.strategies.transformer.draft import PerRank


def program_of(script: Script, result: Sequence[ScriptValue], seed: int, labels: Sequence[str]) -> Program:
    """Build the program that returns a tuple of these values. Ranks with equal calls and shapes share a graph."""
    inputs = tuple(maker for maker in script.makers if isinstance(maker, InputSpec))
    constants = _constants(script)
    names = _names(script)
    classes: dict[Any, int] = {}
    graphs: list[fx.Graph] = []
    bindings = []
    for rank in range(script.mesh.world_size):
        order = _order(script, rank)
        key = order, tuple(_layouts(types[rank]) for types in script.types)
        if key not in classes:
            classes[key] = len(graphs)
            graphs.append(_graph(script, rank, order, result, names))
        bindings.append(RankBinding(classes[key], {name: of(rank) for name, of in constants.items()}))
    return Program(script.mesh, tuple(graphs), tuple(bindings), inputs, seed, tuple(dict.fromkeys(labels)))


def _order(script: Script, rank: int) -> tuple[int, ...]:
    order = list(range(len(script)))
    for first, second, ranks in script.swaps:
        if rank in ranks:
            order[first], order[second] = order[second], order[first]
    return tuple(n for n in order if _runs(script.makers[n], rank))


def _runs(maker: InputSpec | ScriptCall, rank: int) -> bool:
    return isinstance(maker, InputSpec) or maker.only is None or rank in maker.only


def _layouts(types: Any) -> Any:
    if isinstance(types, (tuple, list)):
        return tuple(_layouts(one) for one in types)
    return types.layout if isinstance(types, TensorSpec) else types


def _constants(script: Script) -> dict[str, Callable[[int], Any]]:
    calls = [maker for maker in script.makers if isinstance(maker, ScriptCall)]
    return {arg.name: arg.of for call in calls for arg in leaves((call.args, call.kwargs), PerRank)}


def _names(script: Script) -> dict[int, str]:
    """Names of calls, the same in all graphs, whatever the order and number of calls there."""
    space = fx.Graph()
    for maker in script.makers:
        if isinstance(maker, InputSpec):
            space.placeholder(maker.name)
    calls = [(n, maker) for n, maker in enumerate(script.makers) if isinstance(maker, ScriptCall)]
    bases = {n: maker.op.split("::")[-1].split(".")[0] for n, maker in calls}
    return {n: space.placeholder(base).name for n, base in bases.items()}


def _graph(
    script: Script, rank: int, order: Sequence[int], result: Sequence[ScriptValue], names: Mapping[int, str]
) -> fx.Graph:
    specs = {maker.name: maker for maker in script.makers if isinstance(maker, InputSpec)}
    builder = GraphBuilder(script.mesh, specs, rank)
    nodes = {n: builder.input(maker.name) for n, maker in enumerate(script.makers) if isinstance(maker, InputSpec)}

    def fill(arg: Any) -> Any:
        if isinstance(arg, ScriptValue):
            return nodes[arg.number]
        return builder.constant(arg.name, arg.of) if isinstance(arg, PerRank) else arg

    for number in order:
        maker = script.makers[number]
        if isinstance(maker, InputSpec):
            continue
        if maker.op == "getitem":
            nodes[number] = builder.getitem(nodes[maker.args[0].number], maker.args[1])
        else:
            kwargs = dict(map_aggregate(maker.kwargs, fill))
            nodes[number] = builder.call(maker.op, *map_aggregate(maker.args, fill), **kwargs)
    graph = builder.finish(tuple(nodes[value.number] for value in result), {nodes[number] for number in script.dead})
    if script.swaps or any(isinstance(maker, ScriptCall) and maker.only is not None for maker in script.makers):
        made = {nodes[n]: names[n] for n in order if n in names}
        graph, copies = _renamed(graph, made)
        nodes = {n: copies[node] for n, node in nodes.items() if node in copies}
    kept = {node.name for node in graph.nodes}
    for later, earlier in script.after:
        if later in nodes and earlier in nodes and {nodes[later].name, nodes[earlier].name} <= kept:
            nodes[later].meta.setdefault("after", []).append(nodes[earlier].name)
    return graph


def _renamed(graph: fx.Graph, names: Mapping[fx.Node, str]) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """The graph with other names of calls, and its nodes by those they are copies of."""
    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:

        def copied(arg: Any) -> Any:
            return copies[arg] if isinstance(arg, fx.Node) else arg

        args, kwargs = map_aggregate(node.args, copied), dict(map_aggregate(node.kwargs, copied))
        copies[node] = add_node(new, node.op, node.target, args, kwargs, names.get(node, node.name))
        copies[node].meta.update(node.meta)
    return new, copies


__all__ = ["program_of"]
