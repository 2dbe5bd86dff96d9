"""Oracles of the iterative passes: memory and time of an order, told plainly from a drawn program, and random legal orders."""

from __future__ import annotations

import random
from collections.abc import Sequence

from torch import fx

from tcverify.ops import TensorSpec, lookup, schema_of
from tcverify.passes.overlap import CommGraph


def specs(value: object) -> list[TensorSpec]:
    """The tensors of a node's metadata in a program's own graph."""
    if isinstance(value, TensorSpec):
        return [value]
    if isinstance(value, (list, tuple)):
        return [spec for item in value for spec in specs(item)]
    return []


def plain_levels(original: fx.Graph, order: Sequence[str]) -> list[int]:
    """Bytes that live while each node of `order` runs. Quadratic, node by node, by the storages of the program's metadata.

    Args:
        original: the program's own graph, whose specs say which storage each value has.
        order: names of all its nodes.
    """
    nodes = {node.name: node for node in original.nodes}
    of = {name: [spec.alias for spec in specs(node.meta.get("val"))] for name, node in nodes.items()}
    sizes: dict[object, int] = {}
    for node in nodes.values():
        for spec in specs(node.meta.get("val")):
            reach = 0 if 0 in spec.shape else 1 + spec.offset + sum(
                (n - 1) * step for n, step in zip(spec.shape, spec.stride, strict=True)
            )  # fmt: skip
            sizes[spec.alias] = max(sizes.get(spec.alias, 0), reach * spec.dtype.itemsize)
    touched = {
        name: {*of[name], *(storage for operand in node.all_input_nodes for storage in of[operand.name])}
        for name, node in nodes.items()
    }
    under_way: dict[object, set[object]] = {}
    for name, node in nodes.items():
        op = lookup(node.target) if node.op == "call_function" else None
        if op is not None and op.phase == "start":
            given = node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
            for source, target in zip(given, of[name], strict=True):
                assert isinstance(source, fx.Node)
                under_way.setdefault(target, set()).update(of[source.name])
        elif op is not None and op.phase == "wait":
            for storage in list(touched[name]):
                touched[name] |= under_way.pop(storage, set())
    always = {storage for name, node in nodes.items() if node.op == "placeholder" for storage in of[name]}
    kept = {storage for node in nodes.values() if node.op == "output" for storage in touched[node.name]}
    levels = []
    for now in range(len(order)):
        alive = set(always)
        for storage in sizes:
            places = [place for place, name in enumerate(order) if storage in touched[name]]
            if places[0] <= now <= (len(order) if storage in kept else places[-1]):
                alive.add(storage)
        levels.append(sum(sizes[storage] for storage in alive))
    return levels


def plain_makespan(nodes: Sequence[fx.Node]) -> tuple[float, float]:
    """(When all has ended, how much of that nothing computes), told with the queue of communication as a list of ends."""
    now, ends, queue, computed = 0.0, dict[int, float](), [0.0], 0.0
    spans: dict[fx.Node, float] = {}
    for node in nodes:
        if not node.op.startswith("call"):
            continue
        op = lookup(node.target)
        cost = float(node.meta.get("cost_s", 0.0))
        if op.phase == "wait":
            source = node.args[0]
            assert isinstance(source, fx.Node)
            now = max(now, ends.get(_storage(source), 0.0))
        elif op.phase == "start":
            queue.append(max(now, queue[-1]) + cost)
            spans[node] = queue[-1]
            for spec in specs_of(node):
                ends[spec] = queue[-1]
        elif op.collective or op.effect:
            now = max(now, queue[-1]) + cost
            queue.append(now)
        else:
            schema = schema_of(node.target)
            view = op.aliases and (schema is None or not schema.is_mutable)
            now += 0.0 if view else cost
            computed += 0.0 if view else cost
    end = max(now, queue[-1])
    return end, end - computed


def specs_of(node: fx.Node) -> list[int]:
    """The storages of the fake tensors of a node."""
    value = node.meta["val"]
    return [item.untyped_storage()._cdata for item in (value if isinstance(value, (list, tuple)) else [value])]


def _storage(node: fx.Node) -> int:
    return specs_of(node)[0]


def movable(found: CommGraph) -> list[fx.Node]:
    """All nodes but placeholders and the output, in order."""
    return [node for node in found.nodes if node.op not in ("placeholder", "output")]


def legal_order(found: CommGraph, rng: random.Random) -> list[fx.Node]:
    """A random order that keeps every dependency."""
    missing = {node: len(found.predecessors[node]) for node in found.nodes}
    ready = [node for node in movable(found) if not missing[node]]
    fixed = [node for node in found.nodes if node.op == "placeholder"]
    order: list[fx.Node] = []

    def done(node: fx.Node) -> None:
        order.append(node)
        for after in found.successors[node]:
            missing[after] -= 1
            if not missing[after] and after.op != "output":
                ready.append(after)

    for node in fixed:
        done(node)
    ready[:] = [node for node in dict.fromkeys(ready) if node not in set(order)]
    while ready:
        done(ready.pop(rng.randrange(len(ready))))
    return [*order, found.nodes[-1]]
