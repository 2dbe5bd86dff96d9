"""The greedy overlap passes with one defect put back in each class: edges that are forgotten, and what comes of moving nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from tcverify.ops import RESIZE, lookup, resolve
from tcverify.passes.editing import op_name
from tcverify.passes.overlap import (
    CommGraph,
    DecideGlobalOrderingOfComms,
    RaiseComms,
    ReorderComputeForOverlap,
    SinkWaits,
)
from tcverify.passes.overlap.graph import GraphReading, Kind, Why
from tcverify.passes.overlap.list_schedule import Key, first_needed_by, list_schedule
from tcverify.passes.storages import GraphAccesses, Storages


class _Sink(SinkWaits):
    """The sound pass; subclasses put a defect back and carry their own name."""

    def __init_subclass__(cls) -> None:
        cls.name = cls.__name__


class _Raise(RaiseComms):
    """The sound pass; subclasses put a defect back and carry their own name."""

    def __init_subclass__(cls) -> None:
        cls.name = cls.__name__


class _Cover(ReorderComputeForOverlap):
    """The sound pass; subclasses put a defect back and carry their own name."""

    def __init_subclass__(cls) -> None:
        cls.name = cls.__name__


# ------------------------------------------------------------------------------------------------------------- storage


class WriteDuringReadAllowed(_Sink):
    """A wait does not count as the end of what its collective reads: writes into that go before it (async-race)."""

    class reading(GraphReading):
        def wait(self, node: fx.Node, storages: Storages) -> tuple[Storages, Storages]:
            _, writes = super().wait(node, storages)
            return storages, writes


class FreeBeforeCompletion(_Sink):
    """Freeing a storage does not wait for those who read it, collectives that are under way among them (async-race,
    use-after-free)."""

    class reading(GraphReading):
        def follow(self, node: fx.Node, earlier: Iterable[fx.Node], why: Why) -> None:
            if op_name(node) != RESIZE or why != "WAR":
                super().follow(node, earlier, why)


class WriteAfterReadForgotten(_Raise):
    """A write does not follow what reads the old value (wrong-value, broken-order)."""

    class reading(GraphReading):
        def follow(self, node: fx.Node, earlier: Iterable[fx.Node], why: Why) -> None:
            if why != "WAR":
                super().follow(node, earlier, why)


class ReadAfterWriteForgotten(_Raise):
    """What reads a value does not follow the op in place that has written into it since (wrong-value, broken-order)."""

    class reading(GraphReading):
        def follow(self, node: fx.Node, earlier: Iterable[fx.Node], why: Why) -> None:
            if why != "RAW":
                super().follow(node, earlier, why)


class WriteAfterWriteForgotten(_Raise):
    """Ops in place are in no order with what has written into their operand before (wrong-value, broken-order)."""

    class reading(GraphReading):
        def follow(self, node: fx.Node, earlier: Iterable[fx.Node], why: Why) -> None:
            if why not in ("WAW", "RAW") or self.kind(node) != "compute" or not self._found.writes[node]:
                super().follow(node, earlier, why)


def _untied(found: GraphAccesses, chosen: Any) -> GraphAccesses:
    """Accesses in which the values of some nodes have storages of their own, and readers of those read these."""
    own: dict[fx.Node, Storages] = {}
    for number, node in enumerate(found.results):
        if chosen(node):
            own[node] = (-1 - number,)

    def read(node: fx.Node, before: Storages) -> Storages:
        mine = [own[o] if o in own else found.results[o] for o in node.all_input_nodes]
        return (
            tuple(dict.fromkeys(s for of in mine for s in of))
            if any(o in own for o in node.all_input_nodes)
            else before
        )

    def written(node: fx.Node, before: Storages) -> Storages:
        gone = {s for o in node.all_input_nodes if o in own for s in found.results[o]}
        return tuple(s for s in before if s not in gone)

    return GraphAccesses(
        {node: own.get(node, storages) for node, storages in found.results.items()},
        {node: read(node, storages) for node, storages in found.reads.items()},
        {node: written(node, storages) for node, storages in found.writes.items()},
        found.items,
    )


class ViewsHaveTheirOwnStorage(_Raise):
    """A view is taken for a copy: writes into what it shows, and reads of it, are in no order (wrong-value, async-race, …)."""

    class reading(GraphReading):
        def __init__(self, found: GraphAccesses, *args: Any, **kwargs: Any) -> None:
            super().__init__(_untied(found, _is_tensor_view), *args, **kwargs)


def _is_tensor_view(node: fx.Node) -> bool:
    op = lookup(node.target) if node.op == "call_function" else None
    schema = getattr(node.target, "_schema", None)
    return op is not None and op.aliases and op.phase is None and schema is not None and not schema.is_mutable


class ItemsUntiedFromTheirStart(_Sink):
    """An item of what a coalesced collective returns is not tied to it: nobody knows what its wait completes (async-race)."""

    class reading(GraphReading):
        def __init__(self, found: GraphAccesses, *args: Any, **kwargs: Any) -> None:
            super().__init__(_untied(found, _is_item_of_start), *args, **kwargs)


def _is_item_of_start(node: fx.Node) -> bool:
    source = node.args[0] if op_name(node) == "python::getitem" else None
    return isinstance(source, fx.Node) and source.op == "call_function" and lookup(source.target).phase == "start"


class WaitIsNoWrite(_Sink):
    """A wait orders those who read what it returns, not those who read the buffer under another name (async-race)."""

    class reading(GraphReading):
        def wait(self, node: fx.Node, storages: Storages) -> tuple[Storages, Storages]:
            reads, _ = super().wait(node, storages)
            return reads, ()


class GivenBufferIsFree(_Sink):
    """Of what a start writes into, only what it returns counts: a given buffer may be used before it has arrived (async-race)."""

    class reading(GraphReading):
        def wait(self, node: fx.Node, storages: Storages) -> tuple[Storages, Storages]:
            reads, writes = super().wait(node, storages)
            given = {s for number in self._completes[node] for s in self._started[number]["given"]}
            return reads, tuple(s for s in writes if s not in given)

        def start(self, node: fx.Node, reads: Storages, writes: Storages) -> None:
            super().start(node, reads, writes)
            self._started[-1]["given"] = writes

        def finish(self) -> CommGraph:
            for parts in self._started:
                parts.pop("given", None)
            return super().finish()


# ------------------------------------------------------------------------------------------------------- communication


class EffectsAreCompute(_Raise):
    """Communication is told by a list of names, and what is not on it is compute: starts rise above sends and barriers
    (broken-order, deadlock)."""

    class reading(GraphReading):
        def kind(self, node: fx.Node) -> Kind:
            kind = super().kind(node)
            return "compute" if kind == "effect" and not op_name(node).startswith("tensor_cast::") else kind


class StartsIgnoreEffects(_Cover):
    """Effects keep their order, and so do starts, but nothing holds a start behind an effect (broken-order, deadlock)."""

    class reading(GraphReading):
        def follow(self, node: fx.Node, earlier: Iterable[fx.Node], why: Why) -> None:
            if why == "communication" and self.kind(node) == "start":
                earlier = [each for each in earlier if self.kind(each) != "effect"]
            super().follow(node, earlier, why)


class WaitsOvertakeStarts(_Sink):
    """Waits come first of all that is ready, before starts that they stood behind (broken-order, deadlock)."""

    class reading(GraphReading):
        def follow(self, node: fx.Node, earlier: Iterable[fx.Node], why: Why) -> None:
            if why != "communication" or self.kind(node) != "wait":
                super().follow(node, earlier, why)

    def reordered(self, found: CommGraph) -> Sequence[fx.Node]:
        place = {node: number for number, node in enumerate(found.nodes)}
        return list_schedule(found, lambda node: (int(found.kind(node) != "wait"), place[node]))


class _Unchained(GraphReading):
    """Starts are not in order, whatever their group."""

    def __init__(self, *args: Any, chained: bool) -> None:
        super().__init__(*args, chained=False)


class _ByCost(_Raise):
    """Starts that are ready come in the order of their costs."""

    def reordered(self, found: CommGraph) -> Sequence[fx.Node]:
        needed, place = first_needed_by(found), {node: number for number, node in enumerate(found.nodes)}
        cost = {c.number: int(1e12 * float(c.start.meta.get("cost_s") or 0.0)) for c in found.starts}

        def key(node: fx.Node) -> Key:
            return cost.get(needed[node], 1 << 60), place[node]

        return list_schedule(found, key)


class GroupsOrderedByCost(_ByCost):
    """Each group keeps the order of its collectives; among groups what is cheap on this rank starts first (broken-order,
    deadlock)."""

    class reading(_Unchained):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._last_of: dict[Any, fx.Node] = {}

        def start(self, node: fx.Node, reads: Storages, writes: Storages) -> None:
            super().start(node, reads, writes)
            group = self._started[-1]["group_name"]
            if group in self._last_of:
                self.follow(node, [self._last_of[group]], "communication")
            self._last_of[group] = node


class CostsOrderStarts(_ByCost):
    """Collectives of one group that do not depend on each other start in the order of their costs (broken-order, deadlock)."""

    reading = _Unchained


class DeclaredOrderIgnored(_Raise):
    """`meta["after"]` is not read (broken-order)."""

    class reading(GraphReading):
        def follow(self, node: fx.Node, earlier: Iterable[fx.Node], why: Why) -> None:
            if why != "declared":
                super().follow(node, earlier, why)


class OrderDeclaredBackwards(DecideGlobalOrderingOfComms):
    """Of two collectives the first one declares to follow the second (broken-order)."""

    def __init_subclass__(cls) -> None:
        cls.name = cls.__name__

    name = "OrderDeclaredBackwards"

    def rewrite(self, graph: fx.Graph) -> Iterable[fx.Node]:
        before = {node: list(node.meta.get("after", ())) for node in graph.nodes}
        displaced = super().rewrite(graph)
        by_name = {node.name: node for node in graph.nodes}
        for node, known in before.items():
            for name in [n for n in node.meta.get("after", ()) if n not in known]:
                node.meta["after"] = [n for n in node.meta["after"] if n != name]
                by_name[name].meta["after"] = [*by_name[name].meta.get("after", ()), node.name]
        return displaced


# ------------------------------------------------------------------------------------------------------ graphs that move


class DeadCollectivesErased(_Sink):
    """What nobody reads is erased, collectives that other ranks enter among it (changed-nodes, deadlock, …)."""

    def rewrite(self, graph: fx.Graph) -> Iterable[fx.Node]:
        displaced = super().rewrite(graph)
        for node in reversed(graph.nodes):
            if node.op == "call_function" and not node.users and lookup(node.target).phase is not None:
                graph.erase_node(node)
                self.rewrites["moved"] += 1
        return displaced


class ViewsOfErasedWaits(_Sink):
    """Waits are made anew at their new place; views read the nodes that have been erased (malformed-graph, pass-raised)."""

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        gm = super().__call__(gm)
        if self.rewrites["moved"]:
            for node in list(gm.graph.nodes):
                if node.op == "call_function" and lookup(node.target).phase == "wait":
                    _made_anew(gm.graph, node)
        return gm


def _made_anew(graph: fx.Graph, wait: fx.Node) -> None:
    with graph.inserting_before(wait):
        made = graph.call_function(resolve(op_name(wait)), wait.args, wait.kwargs)
    made.meta.update(wait.meta)
    wait.replace_all_uses_with(made, delete_user_cb=lambda user: not _is_tensor_view(user))
    views, wait.users = dict(wait.users), {}
    graph.erase_node(wait)
    wait.users = views


class StartsSinkWithWaits(_Sink):
    """Whatever communicates comes as late as it can, starts too, in an order of its own (broken-order, deadlock)."""

    reading = _Unchained

    def reordered(self, found: CommGraph) -> Sequence[fx.Node]:
        place = {node: number for number, node in enumerate(found.nodes)}
        return list_schedule(found, lambda node: (int(found.kind(node) in ("start", "wait")), -place[node]))


def _kinds(*names: str) -> frozenset[str]:
    return frozenset(names)


_ORDER = _kinds("broken-order", "deadlock", "collective-mismatch")
_DATA = _kinds("broken-order", "wrong-value", "async-race")

#: Every mutant, with the kinds of finding of which one at least must be there.
EXPECTED: dict[str, frozenset[str]] = {
    "WriteDuringReadAllowed": _kinds("async-race"),
    "FreeBeforeCompletion": _kinds("async-race", "use-after-free", "broken-order"),
    "WriteAfterReadForgotten": _DATA,
    "ReadAfterWriteForgotten": _DATA,
    "WriteAfterWriteForgotten": _DATA,
    "ViewsHaveTheirOwnStorage": _DATA,
    "ItemsUntiedFromTheirStart": _kinds("async-race"),
    "WaitIsNoWrite": _kinds("async-race", "missing-wait"),
    "GivenBufferIsFree": _kinds("async-race", "missing-wait"),
    "EffectsAreCompute": _ORDER,
    "StartsIgnoreEffects": _ORDER,
    "WaitsOvertakeStarts": _ORDER,
    "GroupsOrderedByCost": _ORDER,
    "CostsOrderStarts": _ORDER,
    "StartsSinkWithWaits": _ORDER,
    "DeclaredOrderIgnored": _kinds("broken-order"),
    "OrderDeclaredBackwards": _kinds("broken-order"),
    "DeadCollectivesErased": _kinds("changed-nodes", "deadlock", "collective-mismatch"),
    "ViewsOfErasedWaits": _kinds("malformed-graph", "pass-raised"),
}

MUTANTS: dict[str, type[Any]] = {name: globals()[name] for name in EXPECTED}
