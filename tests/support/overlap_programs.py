"""Programs with asynchronous collectives for the overlap passes, and the orders that such programs need, written out plainly.

`drawn` makes a program of bytes and notes, for every node, the storages that it reads and writes; `must_follow` judges pairs of
nodes by these notes alone. Both know nothing of schemas, metadata or union-find.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from tcverify.passes.base import Pass
from tcverify.program import VARYING, GraphBuilder, InputSpec, Mesh, Program, StreamSettings, spmd_program

TP2 = Mesh.grid({"tp": 2})
GRID = Mesh.grid({"dp": 2, "tp": 2})
US = 1e-6
"""A microsecond."""


class Builder:
    """Short names for what these programs are made of. Costs are in microseconds."""

    def __init__(self, graph: GraphBuilder) -> None:
        self.graph = graph
        self.inputs = {name: graph.input(name) for name in ("x", "y", "w")}

    def __getitem__(self, name: str) -> fx.Node:
        return self.inputs[name]

    def call(self, op: str, *args: Any, cost: float | None = None) -> Any:
        node = self.graph.call(op, *args)
        if cost is not None:
            node.meta["cost_s"] = cost * US
        return node

    def start(self, value: Any, dim: str = "tp", cost: float | None = 30) -> Any:
        return self.call("_c10d_functional::all_reduce", value, "sum", dim, cost=cost)

    def exchange(self, value: Any, cost: float | None = 30) -> Any:
        """The start of a collective that reads its operand until the wait."""
        return self.call("_c10d_functional::all_to_all_single", value, [2, 2], [2, 2], "tp", cost=cost)

    def start_in_place(self, value: Any, dim: str = "tp", cost: float | None = 30) -> Any:
        return self.call("_c10d_functional::all_reduce_", value, "sum", dim, cost=cost)

    def wait(self, value: Any) -> Any:
        return self.call("_c10d_functional::wait_tensor", value)

    def mm(self, value: Any, cost: float | None = 10) -> Any:
        return self.call("aten::mm", value, self["w"], cost=cost)

    def relu(self, value: Any, cost: float | None = 5) -> Any:
        return self.call("aten::relu", value, cost=cost)

    def add(self, value: Any, other: Any, cost: float | None = 5) -> Any:
        return self.call("aten::add.Tensor", value, other, cost=cost)

    def add_(self, value: Any, other: Any, cost: float | None = 5) -> Any:
        return self.call("aten::add_.Tensor", value, other, cost=cost)

    def view(self, value: Any) -> Any:
        return self.call("aten::view", value, [4, 4])


def program(build: Callable[[Builder], Any], mesh: Mesh = TP2, device: str | None = None, seed: int = 0) -> Program:
    """Inputs: x and y, which differ between ranks, and w; all [4, 4]."""
    dims = tuple((dim.name, VARYING) for dim in mesh.dims)
    inputs = [InputSpec("x", (4, 4), placements=dims), InputSpec("y", (4, 4), placements=dims), InputSpec("w", (4, 4))]
    made = spmd_program(mesh, inputs, lambda graph: build(Builder(graph)), seed=seed)
    return made if device is None else replace(made, streams=StreamSettings(device=device))


def names(graph: fx.Graph) -> list[str]:
    """The calls of a graph, in order."""
    return [node.name for node in graph.nodes if node.op not in ("placeholder", "output")]


def after(pass_: Pass, build: Callable[[Builder], Any], mesh: Mesh = TP2) -> list[str]:
    """The calls of rank 0 after the pass, in order."""
    return names(pass_(program(build, mesh).graph_module(0)).graph)


# -------------------------------------------------------------------------------------------------------------- drawn


@dataclass
class Note:
    """What a node does: "start", "wait", "effect" or "compute"; storages as numbers; names of the operands."""

    name: str
    kind: str
    operands: tuple[str, ...]
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()


@dataclass
class Drawing:
    """A program that is being drawn, its values with their storages, and what is under way.

    Attributes:
        racy: whether nodes may touch what is under way.
    """

    b: Builder
    racy: bool
    notes: list[Note] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    storage: dict[fx.Node, int] = field(default_factory=dict)
    writing: dict[int, list[frozenset[int]]] = field(default_factory=dict)
    made: int = 0

    def fresh(self) -> int:
        self.made += 1
        return self.made

    def add(self, node: fx.Node, storage: int | None = None) -> None:
        self.storage[node] = self.fresh() if storage is None else storage
        self.values.append(node)

    def note(self, node: fx.Node, kind: str, operands: Iterable[fx.Node], written: Iterable[int] = ()) -> None:
        operands = tuple(operands)
        reads = frozenset(self.storage[operand] for operand in operands if operand in self.storage)
        self.notes.append(Note(node.name, kind, tuple(o.name for o in operands), reads, frozenset(written)))

    def pick(self, byte: int, *, writes: bool = False) -> fx.Node | None:
        """A value that may be read (and written), the newest first."""
        allowed = [v for v in reversed(self.values) if self.racy or self._quiet(self.storage[v], writes)]
        return allowed[byte % len(allowed)] if allowed else None

    def _quiet(self, storage: int, writes: bool) -> bool:
        read = any(storage in reads for starts in self.writing.values() for reads in starts)
        return storage not in self.writing and not (writes and read)

    def begin(self, node: fx.Node, operands: Sequence[fx.Node], written: Iterable[int]) -> None:
        reads = frozenset(self.storage[operand] for operand in operands)
        for storage in written:
            self.writing.setdefault(storage, []).append(reads)

    def wait(self, value: fx.Node) -> None:
        storage = self.storage[value]
        done = self.writing.pop(storage, [])
        node = self.b.wait(value)
        self.note(node, "wait", [value], [storage] if done else [])
        self.notes[-1].reads |= frozenset().union(*done)
        self.add(node, storage)


def _step(d: Drawing, op: int, first: int, second: int) -> None:
    dim = ("tp", "dp")[first % 2] if len(d.b.graph.mesh.dims) > 1 else "tp"
    kind = op % 12
    if kind == 11:
        d.note(d.b.call("p2p::barrier", dim), "effect", [])
        return
    if kind in (5, 6):
        waiting = [v for v in d.values if d.storage[v] in d.writing] if second % 5 else d.values
        if waiting:
            d.wait(waiting[first % len(waiting)])
        return
    a, c = d.pick(first, writes=kind in (2, 8)), d.pick(second)
    if a is None or c is None:
        return
    if kind in (0, 1):
        node = d.b.add(a, c, cost=1 + first % 7)
        d.note(node, "compute", [a, c])
        d.add(node)
    elif kind == 2:
        node = d.b.add_(a, c)
        d.note(node, "compute", [a, c], [d.storage[a]])
        d.add(node, d.storage[a])
    elif kind == 3:
        node = d.b.view(a)
        d.note(node, "compute", [a])
        d.add(node, d.storage[a])
    elif kind == 8:
        node = d.b.start_in_place(a, dim, cost=second % 40)
        d.note(node, "start", [a], [d.storage[a]])
        d.begin(node, [a], [d.storage[a]])
        d.add(node, d.storage[a])
    elif kind == 9:
        node = d.b.call("_c10d_functional::all_reduce_coalesced", [a, c], "sum", dim, cost=20)
        parts = [d.b.graph.getitem(node, 0), d.b.graph.getitem(node, 1)]
        storages = [d.fresh(), d.fresh()]
        d.note(node, "start", [a, c], storages)
        d.begin(node, [a, c], storages)
        for part, storage in zip(parts, storages, strict=True):
            d.notes.append(Note(part.name, "compute", (node.name,), frozenset([storage])))
            d.add(part, storage)
    elif kind == 10:
        node = d.b.graph.call("tensor_cast::all_reduce", a, d.b.graph.rank, d.b.graph.group(dim))
        d.note(node, "effect", [a])
        d.add(node)
    else:
        node = d.b.start(a, dim, cost=second % 40)
        made = d.fresh()
        d.note(node, "start", [a], [made])
        d.begin(node, [a], [made])
        d.add(node, made)


def drawn(data: bytes, *, racy: bool = False, mesh: Mesh = TP2) -> tuple[Program, list[Note]]:
    """A program of one step for every three bytes, which returns all its values, and the notes on its calls in order."""
    drawings: list[Drawing] = []

    def build(b: Builder) -> Any:
        d = Drawing(b, racy)
        for node in b.inputs.values():
            d.add(node)
        for number in range(0, len(data) - 2, 3):
            _step(d, *data[number : number + 3])
        for value in list(d.values):
            if d.storage[value] in d.writing:
                d.wait(value)
        drawings.append(d)
        return tuple(d.values)

    return program(build, mesh), drawings[0].notes


def must_follow(earlier: Note, later: Note) -> bool:
    """Whether, of two nodes of a program, the later one has to stay behind the earlier one on its own account."""
    if earlier.name in later.operands:
        return True
    if earlier.writes & (later.reads | later.writes) or earlier.reads & later.writes:
        return True
    return earlier.kind in ("start", "effect") and later.kind in ("start", "effect", "wait")


def closure(count: int, edges: Iterable[tuple[int, int]]) -> list[int]:
    """For each of `count` nodes in topological order, the nodes that it follows, over any number of edges, as bits."""
    found = [0] * count
    before: list[list[int]] = [[] for _ in range(count)]
    for first, second in edges:
        before[second].append(first)
    for node in range(count):
        for first in before[node]:
            found[node] |= found[first] | 1 << first
    return found
