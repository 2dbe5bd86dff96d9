"""The scheduler's view of a graph: ops that take time, the storage they read and write, and the edges between them.

Nodes are classified by what they do when the graph runs:

- *work* produces tensors of its own, or writes into some: it runs on a stream and takes time;
- *host* nodes are items of tuples, views, and arithmetic on Python numbers: no stream, no time;
- inputs (placeholders and attributes), and the output.

Everything follows from specs that are inferred from the inputs, so that storage is shared here exactly where it
is shared when the graph runs. If this is uncertain for a graph, it raises `NotLowered` and stays unchanged.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from tcverify.errors import UnsupportedOp
from tcverify.ops import RECORD, WAIT, ShapeError, TensorSpec, infer, lookup, mutated_operands, resolve
from tcverify.ops.leaves import leaves
from tcverify.ops.spec import contiguous_stride
from tcverify.passes.editing import op_name
from tcverify.program.specs import InferredSpecs, same_layout, storages_of

ANCHORS = frozenset({WAIT, RECORD})

Specs = Mapping[fx.Node, Any]


class NotLowered(Exception):
    """A graph is not lowered; the message says why."""


@dataclass(frozen=True, slots=True)
class WorkOp:
    """An op that takes time.

    Attributes:
        index: its number among the work of the graph, in the original order.
        resources: what it occupies, of "compute" and "comm".
        reads: storages of its tensor operands, by the operand.
        writes: storages that it produces or writes into.
        mutates: those of them that are not its own.
        item: which item of its result is recorded, None when the result is one tensor.
        carriers: operands that may be replaced by a copy, so that the copy can wait; see `carriers_of`.
    """

    index: int
    node: fx.Node
    cost_s: float
    resources: tuple[str, ...]
    reads: tuple[tuple[int, fx.Node], ...]
    writes: tuple[int, ...]
    mutates: tuple[int, ...]
    item: int | None
    carriers: tuple[fx.Node, ...]

    @property
    def communicates(self) -> bool:
        return "comm" in self.resources


@dataclass(frozen=True, slots=True)
class OrderEdge:
    """An order between two ops that every schedule keeps.

    Attributes:
        first, second: numbers of work ops; `first` is the smaller one.
        kind: "RAW", "WAR" or "WAW" for accesses to one storage, "collective" for the order of collectives, "host" where a
            value is only needed when the second op is issued.
        operand: the operand through which the second op reads, for "RAW" and "host".
    """

    first: int
    second: int
    kind: str
    operand: fx.Node | None = None


@dataclass(frozen=True, slots=True)
class StreamGraph:
    """The parts of a graph.

    Attributes:
        work: in the original order.
        hosts: nodes that take no time, in the original order.
        inputs: placeholders and attributes, in the original order.
        specs: what every node produces.
        producers: numbers of the work ops that must be issued before each node can be.
    """

    work: tuple[WorkOp, ...]
    hosts: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    output: fx.Node
    specs: Specs
    producers: Mapping[fx.Node, tuple[int, ...]]

    def storages(self, node: fx.Node) -> tuple[int, ...]:
        """Storages of the tensors that a node produces."""
        return storages_of(self.specs[node])


# --------------------------------------------------------------------------------------------------------- inference


def infer_specs(graph: fx.Graph, *, trust: bool = False) -> dict[fx.Node, Any]:
    """Infer what every node produces from the metadata of the inputs alone.

    Args:
        trust: whether recorded metadata is taken as it is where it differs from what is inferred.

    Raises:
        NotLowered: what the graph is cannot be said: an anchor, a call without a meaning, shapes that are symbolic, do not
            fit, or differ from the recorded ones.
    """
    specs = InferredSpecs()
    for node in graph.nodes:
        if node.op == "output":
            break
        if node.op in ("placeholder", "get_attr"):
            value = node.meta.get("val") if node.op == "placeholder" else _attribute(graph, str(node.target))
            if value is None:
                raise NotLowered(f"nothing is known of '{node.name}'")
            specs.keep_recorded(node, value)
            if specs.of[node] is None:
                raise NotLowered(f"'{node.name}' is symbolic or not strided")
            continue
        if node.op != "call_function":
            raise NotLowered(f"'{node.name}' is a {node.op}")
        op = lookup(node.target)
        if op.name in ANCHORS:
            raise NotLowered("it is lowered already")
        if op.run is None:
            raise NotLowered(f"'{node.name}' calls {op.name}, which has no meaning")
        try:
            implied = specs.infer(node)
        except (ShapeError, UnsupportedOp) as error:
            raise NotLowered(f"'{node.name}' does not fit its operands: {error}") from None
        if not trust and not same_layout(implied, node.meta.get("val")):
            raise NotLowered(f"meta['val'] of '{node.name}' is not what its operands imply")
        specs.keep(node, implied)
    return specs.of


def _attribute(graph: fx.Graph, target: str) -> torch.Tensor | None:
    owner: Any = graph.owning_module
    for part in target.split("."):
        owner = getattr(owner, part, None)
    return owner if isinstance(owner, torch.Tensor) else None


# -------------------------------------------------------------------------------------------------------------- kinds


def is_host(node: fx.Node, specs: Specs) -> bool:
    """Whether a call takes no time: an item of a tuple, a view, or arithmetic on numbers.

    An op that only may return a view, such as reshape, is one exactly when its result has the storage of an operand.

    Raises:
        NotLowered: it is neither a view nor an op with results of its own.
    """
    source = node.args[0] if node.target is operator.getitem else None
    if isinstance(source, fx.Node) and isinstance(specs[source], (tuple, list)):
        return True
    if mutated_operands(node):
        return False
    mine = set(storages_of(specs[node]))
    theirs = {storage for operand in node.all_input_nodes for storage in storages_of(specs[operand])}
    if not mine:
        if theirs and not op_name(node).startswith("aten::sym_"):
            raise NotLowered(f"'{node.name}' makes a number of a tensor's values, or has another effect")
        return True
    if mine & theirs and mine - theirs:
        raise NotLowered(f"only a part of what '{node.name}' returns is a view")
    return bool(mine & theirs)


def carriers_of(node: fx.Node, specs: Specs) -> tuple[fx.Node, ...]:
    """Operands that a copy may replace: tensors that the op does not write into, not even through an alias.

    A copy has the strides of what it copies only where that is dense. Where it is not, the op must make the same of either:
    a copy of an expanded tensor, for one, can be reshaped by a view, and strides decide whether something that follows is one.
    Ops that address the storage of their operand, beyond the operand itself, find another storage behind a copy.
    """
    if op_name(node).startswith("aten::as_strided"):
        return ()
    written = {storage for operand in mutated_operands(node) for storage in storages_of(specs[operand])}
    found = []
    for operand in node.all_input_nodes:
        spec = specs[operand]
        if isinstance(spec, TensorSpec) and spec.alias not in written and _may_be_copied(node, operand, specs):
            found.append(operand)
    return tuple(found)


def spec_of_copy(spec: TensorSpec) -> TensorSpec:
    """The spec of a copy that a wait makes."""
    if spec.stride == contiguous_stride(spec.shape):
        return TensorSpec(spec.shape, spec.stride, spec.dtype, 0, -1)
    count = itertools.count(-1, -1)
    made = infer(resolve(WAIT), (spec, 0, []), {}, count.__next__)
    assert isinstance(made, TensorSpec)
    return made


def _may_be_copied(node: fx.Node, operand: fx.Node, specs: Specs) -> bool:
    copy = spec_of_copy(specs[operand])
    if copy.layout == specs[operand].layout:
        return True

    def known(leaf: Any) -> Any:
        if not isinstance(leaf, fx.Node):
            return leaf
        return copy if leaf is operand else specs[leaf]

    kwargs = dict(map_aggregate(node.kwargs, known)) if node.kwargs else {}
    count = itertools.count(-2, -1)
    try:
        made = infer(node.target, [map_aggregate(a, known) for a in node.args], kwargs, count.__next__)
    except (ShapeError, UnsupportedOp):
        return False
    if not same_layout(made, specs[node]):
        return False
    given = {storage for other in node.all_input_nodes for storage in storages_of(specs[other])} | {copy.alias}
    return all(
        (mine.alias in given) == (theirs.alias in given)
        for mine, theirs in zip(leaves(made, TensorSpec), leaves(specs[node], TensorSpec), strict=True)
    )


def _recorded_item(node: fx.Node, specs: Specs) -> int | None:
    """Which item of the result is recorded, None when it is one tensor."""
    value = specs[node]
    if isinstance(value, TensorSpec):
        return None
    if isinstance(value, (tuple, list)):
        for number, item in enumerate(value):
            if isinstance(item, TensorSpec):
                return number
    raise NotLowered(f"'{node.name}' returns no tensor that could be recorded")


def _is_reshaped(node: fx.Node, operand: fx.Node, specs: Specs) -> bool:
    """Whether an op may give an operand that it writes into another shape: what is known of the operand then does not hold."""
    if any(tag.name == "inplace_view" for tag in node.target.tags):  # type: ignore[union-attr]
        return True
    results = {spec.alias: spec.layout for spec in leaves(specs[node], TensorSpec)}
    return any(results.get(spec.alias, spec.layout) != spec.layout for spec in leaves(specs[operand], TensorSpec))


def _work_op(index: int, node: fx.Node, cost_s: float, resources: tuple[str, ...], specs: Specs) -> WorkOp:
    reads = {storage: operand for operand in node.all_input_nodes for storage in storages_of(specs[operand])}
    written = mutated_operands(node)
    if any(_is_reshaped(node, operand, specs) for operand in written):
        raise NotLowered(f"'{node.name}' changes the shape of its operand in place")
    mutates = tuple(dict.fromkeys(storage for operand in written for storage in storages_of(specs[operand])))
    return WorkOp(
        index,
        node,
        cost_s,
        resources,
        tuple(reads.items()),
        (*mutates, *(storage for storage in storages_of(specs[node]) if storage not in reads)),
        mutates,
        _recorded_item(node, specs),
        carriers_of(node, specs),
    )


def take_apart(graph: fx.Graph, specs: Specs, costs: Mapping[fx.Node, tuple[float, tuple[str, ...]]]) -> StreamGraph:
    """Return `graph` as its work, host nodes, inputs and output.

    Args:
        costs: of every node that `is_host` says no of: its time in seconds and what it keeps busy.

    Raises:
        NotLowered: an op does what this cannot keep track of.
    """
    work: list[WorkOp] = []
    hosts: list[fx.Node] = []
    inputs: list[fx.Node] = []
    output: fx.Node | None = None
    producers: dict[fx.Node, tuple[int, ...]] = {}
    for node in graph.nodes:
        if node.op == "output":
            output = node
        elif node not in costs:
            (hosts if node.op == "call_function" else inputs).append(node)
            before = [producers[operand] for operand in node.all_input_nodes]
            merged = before[0] if len(before) == 1 else tuple(sorted(set(itertools.chain(*before))))
            producers[node] = merged
        else:
            producers[node] = (len(work),)
            work.append(_work_op(len(work), node, *costs[node], specs))
    if output is None:
        raise NotLowered("it has no output")
    return StreamGraph(tuple(work), tuple(hosts), tuple(inputs), output, specs, producers)


# -------------------------------------------------------------------------------------------------------------- edges


def edges_of(graph: StreamGraph) -> Iterator[OrderEdge]:
    """Yield the orders that every schedule keeps. Their number is linear in the operands of the graph.

    All collectives of the rank are chained in their original order, whatever their groups: with groups that overlap, chains
    per group still let ranks choose orders that wait for each other in a cycle.
    """
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    last_collective: int | None = None
    for op in graph.work:
        for storage, operand in op.reads:
            if storage in writer:
                yield OrderEdge(writer[storage], op.index, "RAW", operand)
        for operand in op.node.all_input_nodes:
            for first in graph.producers[operand]:
                yield OrderEdge(first, op.index, "host", operand)
        for storage in op.writes:
            yield from (OrderEdge(reader, op.index, "WAR") for reader in readers.get(storage, ()))
            if storage in writer:
                yield OrderEdge(writer[storage], op.index, "WAW")
        if op.communicates:
            if last_collective is not None:
                yield OrderEdge(last_collective, op.index, "collective")
            last_collective = op.index
        for storage, _ in op.reads:
            readers.setdefault(storage, []).append(op.index)
        for storage in op.writes:
            writer[storage], readers[storage] = op.index, []


def predecessors(count: int, edges: Iterable[OrderEdge]) -> list[tuple[int, ...]]:
    """For each of `count` ops, the ops that it must follow, in the original order."""
    found: list[set[int]] = [set() for _ in range(count)]
    for edge in edges:
        found[edge.second].add(edge.first)
    return [tuple(sorted(before)) for before in found]


def last_writers(graph: StreamGraph, storages: Iterable[int]) -> list[int]:
    """The ops that write last into the given storages, in the original order; storages that nothing writes into have none."""
    wanted = set(storages)
    writer = {storage: op.index for op in graph.work for storage in op.writes if storage in wanted}
    return sorted(set(writer.values()))


def mutated_after(graph: StreamGraph) -> list[tuple[int, ...]]:
    """For each op, the ops that wrote before it into what it writes into: it stays on their stream."""
    writer: dict[int, int] = {}
    found: list[tuple[int, ...]] = []
    for op in graph.work:
        found.append(tuple(sorted({writer[storage] for storage in op.mutates if storage in writer})))
        writer.update(dict.fromkeys(op.writes, op.index))
    return found


__all__ = [
    "ANCHORS",
    "RECORD",
    "WAIT",
    "NotLowered",
    "OrderEdge",
    "StreamGraph",
    "WorkOp",
    "carriers_of",
    "edges_of",
    "infer_specs",
    "is_host",
    "last_writers",
    "mutated_after",
    "predecessors",
    "spec_of_copy",
    "take_apart",
]  # fmt: skip
