"""Random lowered programs, with the pairs of their ops that nothing orders: by transitive closure, one pair at a time."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from tcverify.program import Mesh, Program
from tests.support.lowered import Lowering, program

MESH = Mesh.grid({"dp": 2, "tp": 2})


@dataclass
class Made:
    """One op as it was drawn: its queue, the ops it waits for, and what it touches."""

    node: str
    stream: int
    after: set[int]
    reads: set[int]
    writes: set[int]
    group: str | None = None


@dataclass
class Drawn:
    """A program, and the names of the ops that conflict and are not ordered, in issue order."""

    program: Program
    ops: list[Made] = field(default_factory=list)
    races: set[tuple[str, str]] = field(default_factory=set)
    unordered: set[tuple[str, str]] = field(default_factory=set)

    def issued(self, first: str, second: str) -> bool:
        """Whether the host issues one op before the other."""
        names = [op.node for op in self.ops]
        return names.index(first) < names.index(second)


def draw(seed: int, mesh: Mesh = MESH) -> Drawn:
    """Draw a program of up to 12 ops on up to 3 streams, in which some tokens are missing."""
    choose = random.Random(seed)
    ops: list[Made] = []
    program_ = program(lambda b: _Writer(b, choose, ops).write(), mesh=mesh)
    found = Drawn(program_, ops)
    before: list[set[int]] = []
    for i, op in enumerate(ops):
        direct = op.after | {j for j in range(i) if ops[j].stream == op.stream}
        before.append(direct.union(*(before[j] for j in direct)))
        for j in range(i):
            if j in before[i]:
                continue
            other = ops[j]
            if other.writes & (op.reads | op.writes) or op.writes & other.reads:
                found.races.add((other.node, op.node))
            if op.group is not None and op.group == other.group:
                found.unordered.add((other.node, op.node))
    return found


class _Writer:
    """Writes one graph. Values are nodes with the op that made them and their storage."""

    def __init__(self, b: Lowering, choose: random.Random, ops: list[Made]) -> None:
        self.b, self.choose, self.ops = b, choose, ops
        self.tokens: dict[int, fx.Node] = {}
        self.values: list[tuple[fx.Node, int]] = [(b.x, 0), (b.y, 1)]
        self.storages = 2
        self.careful = choose.random()

    def write(self) -> Any:
        streams = self.choose.randint(2, 3)
        for _ in range(self.choose.randint(3, 12)):
            self.op(self.choose.randrange(streams))
        results = self.choose.sample(self.values, self.choose.randint(1, 2))
        joined = Made("output", 0, set(), set(), set())
        outputs = [self.gate(node, storage, 0, joined) for node, storage in results]
        joined.reads |= {s for s in (0, 1) if any(s in op.writes for op in self.ops)}
        self.ops.append(joined)
        return tuple(outputs)

    def gate(self, node: fx.Node, storage: int, stream: int, made: Made, *, write: bool = False) -> fx.Node:
        """Wait for some of those that have touched a storage, most of the time for all that one has to."""
        made.reads.add(storage)
        earlier = [i for i, op in enumerate(self.ops) if storage in op.writes or (write and storage in op.reads)]
        chosen = [i for i in earlier if i in self.tokens and self.choose.random() < self.careful]
        made.after |= set(chosen)
        return self.b.wait(node, stream, *(self.tokens[i] for i in chosen))

    def op(self, stream: int) -> None:
        b, choose = self.b, self.choose
        made = Made("", stream, set(), set(), set())
        node, storage = choose.choice(self.values)
        kind = choose.choice(["relu", "mm", "add", "reduce", "reduce", "in-place", "view", "tuple"])
        if kind == "view":
            self.values.append((b.call("aten::t", node), storage))
            return
        if kind == "in-place":  # the operand that is written stands ungated: a wait on it would be a copy
            other, read = choose.choice([v for v in self.values if v[1] != storage])
            gate = self.gate(other, read, stream, made)
            extra = self.gate(gate, storage, stream, made, write=True)
            made.reads.add(read)
            result = b.call("aten::add_.Tensor", node, extra)
            made.writes.add(storage)
        elif kind == "tuple":
            first = self.gate(node, storage, stream, made)
            both = b.call("tensor_cast::add_rms_norm2", first, b.y, b.y, 1e-6)
            made.reads.add(1)
            made.node = both.name
            result = b.getitem(both, choose.randrange(2))
        elif kind == "reduce":
            made.group = choose.choice(["dp", "tp"])
            result = b.reduce(self.gate(node, storage, stream, made), dim=made.group)
        elif kind == "relu":
            result = b.relu(self.gate(node, storage, stream, made))
        else:
            other, read = choose.choice(self.values)
            first = self.gate(node, storage, stream, made)
            ungated = choose.random() < 0.3
            second = other if ungated else self.gate(other, read, stream, made)
            made.reads.add(read)
            result = b.mm(first, second) if kind == "mm" else b.add(first, second)
        made.node = made.node or result.name
        if kind != "in-place":
            storage, self.storages = self.storages, self.storages + 1
            made.writes.add(storage)
        self.ops.append(made)
        if choose.random() < 0.9:
            self.tokens[len(self.ops) - 1] = b.record(result, stream)
        self.values.append((result, storage))
