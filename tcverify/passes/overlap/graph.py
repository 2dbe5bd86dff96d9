"""The dependency graph that passes share which move communication and compute: what must stay before what, and what communicates.

A start of an asynchronous collective reads its operands, and writes its result or the operand that it writes into, at any time
until the first wait for that storage. The edges preserve this and everything else that a program can observe:

- data: a node follows its operands;
- storage: what reads follows the last write, what writes or makes one follows all reads and the write before them; a wait is a
  write of what it waits for and a read of the operands of the start, which therefore stay as they are until then;
- buffers: storages that overlap in the arena of their rank (`meta["comm_buffer"]`) are one, as far as their order goes;
- communication: all starts, blocking collectives and effects keep their order, whatever their groups, since it is in this order
  that ranks meet each other; a wait stays behind every one of them that it stood behind, since ranks that wait for A before they
  start B never meet ranks that do it the other way round;
- `meta["after"]`: names of nodes that a node follows. Names that stand for no earlier node say nothing.

Edges are chains, not cliques: their number is linear in the operands of the graph, and so is the time to find them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from tcverify.cost.flops import WORK
from tcverify.ops import lookup, schema_of
from tcverify.passes.editing import declared_after
from tcverify.passes.overlap.hazards import AccessOrder
from tcverify.passes.storages import GraphAccesses, Storages, accesses, is_view, shared_places

Kind = Literal["start", "wait", "effect", "compute", "free"]

#: Why a node follows another one: it reads its result, they touch one storage, both communicate, or the node says so.
Why = Literal["data", "RAW", "WAR", "WAW", "communication", "declared"]


@dataclass(frozen=True, slots=True, eq=False)
class AsyncCommunication:
    """An asynchronous collective.

    Attributes:
        number: its place among the starts of the graph.
        start: the node that starts it.
        waits: the nodes that wait for it, in graph order; the first one completes it (of a coalesced collective: the first one
            for each of its results), the others are aliases. Empty without a wait.
        group_name: the name of its group, or None if the op names none.
        ranks: the members of the group in order, if the graph says so (`gm.meta["groups"]`).
        reads: storages that it reads while in flight.
        writes: storages that it writes while in flight, including its results.
    """

    number: int
    start: fx.Node
    waits: tuple[fx.Node, ...]
    group_name: str | None
    ranks: tuple[int, ...] | None
    reads: Storages
    writes: Storages


@dataclass(frozen=True, slots=True, eq=False)
class CommGraph:
    """The view of a graph for passes that move nodes. It describes the order of the graph at the time of its creation.

    Attributes:
        nodes: all of them, in order. In every order of them the placeholders come first, as they are, and the output last.
        predecessors: per node, the nodes that it directly follows, in graph order.
        successors: per node, the nodes that directly follow it, in graph order.
        starts: the asynchronous collectives, in order.
        communication_of: the collective of each start, and of each wait the last of those that it waits for.
        completes: per wait, all the collectives that it waits for; more than one where several write into one storage.
        kinds: see `kind`.
        accesses: the storages of every node.
    """

    nodes: tuple[fx.Node, ...]
    predecessors: Mapping[fx.Node, tuple[fx.Node, ...]]
    successors: Mapping[fx.Node, tuple[fx.Node, ...]]
    starts: tuple[AsyncCommunication, ...]
    communication_of: Mapping[fx.Node, AsyncCommunication]
    completes: Mapping[fx.Node, tuple[AsyncCommunication, ...]]
    kinds: Mapping[fx.Node, Kind] = field(repr=False)
    accesses: GraphAccesses = field(repr=False)

    def kind(self, node: fx.Node) -> Kind:
        """The kind of a node.

        "start" and "wait" of an asynchronous collective; "effect" for what blocks or cannot be looked into: blocking
        collectives, ops with an effect, calls without a meaning; "free" for what takes no time: inputs, the output, attributes,
        items of tuples, views, arithmetic on numbers; "compute" for all else.
        """
        return self.kinds[node]


def comm_graph(
    graph: fx.Graph,
    groups: Mapping[str, Sequence[int]] | None = None,
    *,
    unsafe_collectives_reorder: bool = False,
    reading: type[GraphReading] | None = None,
) -> CommGraph:
    """Return the dependencies of `graph`. Linear in the graph.

    Args:
        groups: name → ranks in order; those in the metadata of the module that owns the graph unless given.
        unsafe_collectives_reorder: leave out the edges of communication between asynchronous collectives: starts and waits may
            then change places wherever data allows it. UNSAFE: ranks may start collectives in different orders, which hangs
            them or mixes up their data. Effects keep their position in any case.
        reading: what collects the edges; `GraphReading` unless given.
    """
    if groups is None:
        groups = getattr(graph.owning_module, "meta", {}).get("groups", {})
    found = accesses(graph)
    places = shared_places(graph, found)
    walk = (reading or GraphReading)(found, places, groups or {}, chained=not unsafe_collectives_reorder)
    for node in graph.nodes:
        walk.add(node)
    return walk.finish()


class GraphReading:
    """Walks a graph in order and collects its edges."""

    def __init__(
        self, found: GraphAccesses, places: Mapping[int, int], groups: Mapping[str, Sequence[int]], *, chained: bool
    ) -> None:
        self._storages = AccessOrder(places)
        self._chained = chained
        self._since: list[fx.Node] = []  # starts since the last effect, where starts are not chained
        self._found = found
        self._groups = groups
        self._before: dict[fx.Node, dict[fx.Node, None]] = {}
        self._kinds: dict[fx.Node, Kind] = {}
        self._by_name: dict[str, fx.Node] = {}
        self._last_communication: fx.Node | None = None
        self._started: list[dict[str, Any]] = []
        self._under_way: dict[int, list[int]] = {}  # storage → starts that write it and are not waited for
        self._arrived: dict[int, list[int]] = {}  # storage → starts that the last wait for it completed
        self._completes: dict[fx.Node, tuple[int, ...]] = {}
        self._bundles: set[int] = set()  # storages shared by several results that cannot be distinguished

    def add(self, node: fx.Node) -> None:
        self._before[node] = {}
        self.follow(node, node.all_input_nodes, "data")
        self._kinds[node] = kind = self.kind(node)
        if node.op not in ("placeholder", "output"):
            self._order(node, kind)
            self._declared(node)
        self._by_name[node.name] = node

    def follow(self, node: fx.Node, earlier: Iterable[fx.Node], why: Why) -> None:
        """Record that a node follows earlier ones."""
        self._before[node].update(dict.fromkeys(earlier))

    def kind(self, node: fx.Node) -> Kind:
        """See `CommGraph.kind`."""
        if not node.op.startswith("call"):
            return "free"
        op = lookup(node.target) if node.op == "call_function" else None
        if op is None or op.run is None:
            return "effect"
        if op.phase == "start":
            return "start"
        if op.phase == "wait":
            return "wait"
        if op.effect or op.collective:
            return "effect"
        return "free" if is_view(node, self._found) else "compute"

    def _order(self, node: fx.Node, kind: Kind) -> None:
        reads, writes = self._found.reads[node], self._found.writes[node]
        if kind == "wait":
            reads, writes = self.wait(node, reads)
        if kind in ("start", "wait", "effect"):
            self.communicate(node, kind)
        own = tuple(storage for storage in self._found.results[node] if storage not in reads)
        for earlier, why in self._storages.add(node, reads, (*writes, *own)):
            self.follow(node, [earlier], why)
        if kind == "start":
            self.start(node, reads, writes)

    def communicate(self, node: fx.Node, kind: Kind) -> None:
        """Put a start, a wait or an effect behind what communicates before it."""
        if self._last_communication is not None:
            self.follow(node, [self._last_communication], "communication")
        if kind == "effect":
            self.follow(node, self._since, "communication")
            self._since = []
        if kind == "effect" or (kind == "start" and self._chained):
            self._last_communication = node
        elif kind == "start":
            self._since.append(node)

    def start(self, node: fx.Node, reads: Storages, writes: Storages) -> None:
        """Record what is in flight from here on."""
        name = _group_name(node)
        written = tuple(dict.fromkeys((*writes, *self._found.results[node])))
        for storage in written:
            self._under_way.setdefault(storage, []).append(len(self._started))
        if node not in self._found.items and _returns_list(node):
            self._bundles.update(written)
        ranks = self._groups.get(name) if name is not None else None
        self._started.append({
            "number": len(self._started), "start": node, "waits": [], "group_name": name,
            "ranks": None if ranks is None else tuple(ranks), "reads": reads, "writes": written,
        })  # fmt: skip

    def wait(self, node: fx.Node, storages: Storages) -> tuple[Storages, Storages]:
        """Note what a wait completes, and return what it reads and writes. One for what has arrived already only reads.

        Of results that are not told apart, each wait may be for another one, so that all of them count.
        """
        completed: dict[int, None] = {}
        arriving: list[int] = []
        for storage in storages:
            known = self._under_way
            under_way = known.get(storage) if storage in self._bundles else known.pop(storage, None)
            if under_way is not None:
                self._arrived[storage] = list(under_way)
                arriving.append(storage)
            completed.update(dict.fromkeys(self._arrived.get(storage, ())))
        self._completes[node] = tuple(completed)
        for number in completed:
            self._started[number]["waits"].append(node)
        reads = dict.fromkeys(storages)
        if arriving:
            for number in completed:
                reads.update(dict.fromkeys(self._started[number]["reads"]))
        return tuple(reads), tuple(arriving)

    def _declared(self, node: fx.Node) -> None:
        for name in declared_after(node):
            earlier = self._by_name.get(name)
            if earlier is not None:
                self.follow(node, [earlier], "declared")

    def finish(self) -> CommGraph:
        place = {node: number for number, node in enumerate(self._before)}
        predecessors = {node: tuple(sorted(before, key=place.__getitem__)) for node, before in self._before.items()}
        successors: dict[fx.Node, list[fx.Node]] = {node: [] for node in place}
        for node, before in predecessors.items():
            for earlier in before:
                successors[earlier].append(node)
        starts = tuple(AsyncCommunication(**{**parts, "waits": tuple(parts["waits"])}) for parts in self._started)
        completes = {node: tuple(starts[number] for number in numbers) for node, numbers in self._completes.items()}
        communication_of = {each.start: each for each in starts}
        communication_of.update((wait, found[-1]) for wait, found in completes.items() if found)
        return CommGraph(
            tuple(place),
            predecessors,
            {node: tuple(after) for node, after in successors.items()},
            starts,
            communication_of,
            completes,
            self._kinds,
            self._found,
        )


def _group_name(node: fx.Node) -> str | None:
    argument = lookup(node.target).group
    schema = schema_of(node.target)
    if argument is None or schema is None:
        return None
    value = node.kwargs.get(argument)
    if value is None:
        names = [each.name for each in schema.arguments]
        position = names.index(argument) if argument in names else len(node.args)
        value = node.args[position] if position < len(node.args) else None
    return value if isinstance(value, str) else None


def _returns_list(node: fx.Node) -> bool:
    schema = schema_of(node.target)
    return schema is not None and any(isinstance(each.type, torch.ListType) for each in schema.returns)


def is_gemm_like(node: fx.Node) -> bool:
    """Whether a node multiplies matrices, by itself or within attention or a convolution."""
    if node.op != "call_function":
        return False
    name = lookup(node.target).name.split(".")[0]
    return name in WORK or name.startswith(_GEMM_LIKE)


_GEMM_LIKE = (
    "aten::_scaled_mm", "aten::_scaled_grouped_mm", "aten::_grouped_mm", "aten::_int_mm", "aten::convolution",
    "aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::einsum", "aten::addbmm", "aten::scaled_dot_product_attention",
    "aten::_scaled_dot_product", "tensor_cast::multihead_latent_attention", "tensor_cast::attention_quant",
    "tensor_cast::grouped_matmul",
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- orders


def is_valid_order(found: CommGraph, order: Sequence[fx.Node]) -> bool:
    """Whether `order` holds every node once, keeps every edge, and has the inputs first and the output last, as they were."""
    if len(order) != len(found.nodes) or len(set(order)) != len(order):
        return False
    place = {node: number for number, node in enumerate(order)}
    if any(node not in place for node in found.nodes):
        return False
    inputs = [node for node in found.nodes if node.op == "placeholder"]
    if list(order[: len(inputs)]) != inputs or order[-1].op != "output":
        return False
    return all(place[earlier] < place[node] for node, before in found.predecessors.items() for earlier in before)


def put_in_order(graph: fx.Graph, order: Iterable[fx.Node]) -> int:
    """Put the nodes of `graph` into `order`, in place and in linear time.

    Args:
        order: every node of the graph once, placeholders first and the output last.

    Returns:
        How many nodes stand at another place than before.
    """
    order = list(order)
    moved = sum(1 for before, after in zip(graph.nodes, order, strict=True) if before is not after)
    if moved:
        last = order[-1]
        for node in order[:-1]:
            last.prepend(node)
    return moved


__all__ = [
    "AsyncCommunication",
    "CommGraph",
    "GraphReading",
    "Kind",
    "Why",
    "comm_graph",
    "is_gemm_like",
    "is_valid_order",
    "put_in_order",
]  # fmt: skip
