"""A second opinion on small lowered graphs: order by transitive closure, every pair of accesses compared.

Shares nothing with the checks: it knows the few ops of `random_graph` by name, and takes the closure by search.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from tests.support.lowered import Lowering


def random_graph(b: Lowering, rng: random.Random) -> Any:
    """Add a small random graph: mostly well-formed lowerings with something left out here and there."""
    values: list[fx.Node] = [b.x, b.y]
    streams: dict[fx.Node, int] = {}
    tokens: list[fx.Node] = []
    waits: list[fx.Node] = []
    slip = rng.choice([0.0, 0.05, 0.3])  # how often something is odd

    def gate(value: fx.Node, stream: int) -> fx.Node:
        if rng.random() < slip:
            return rng.choice([value, *waits])
        if rng.random() < slip:
            stream = rng.randrange(3)
        chosen = tokens if rng.random() > slip else rng.sample(tokens, rng.randrange(len(tokens) + 1))
        made = b.wait(value, stream, *(chosen[-4:] if rng.random() < 0.7 else chosen))
        waits.append(made)
        return gate(made, stream) if rng.random() < 0.1 else made

    for _ in range(rng.randrange(2, 9)):
        stream = rng.randrange(3)
        first = gate(rng.choice(values[-6:]), stream)
        kind = rng.randrange(9)
        if kind == 0:
            target = rng.choice(values[-4:]) if rng.random() > slip else first
            made = b.call("aten::add_.Tensor", target, gate(rng.choice(values), stream))
        elif kind in (1, 8):
            made = b.reduce(first)
        elif kind == 2:
            both = b.call("tensor_cast::add_rms_norm2", first, gate(rng.choice(values), stream), b.x, 1e-6)
            values.append(b.getitem(both, 0))
            made = b.getitem(both, 1)
        elif kind == 3:
            made = b.add(first, gate(rng.choice(values), stream))
        elif kind == 4:
            made = b.call("python::mul", first, 2.0)
        else:
            made = b.relu(first)
        if rng.random() < 0.2:
            made = b.call("aten::t", made)
        if rng.random() > slip:
            tokens.append(b.record(made, stream if rng.random() > slip else rng.randrange(3)))
        values.append(made)
        streams[made] = stream
        if rng.random() < slip:
            tokens.append(b.record(rng.choice(values), rng.randrange(3)))
    results = rng.sample(values, min(len(values), rng.randrange(1, 3)))
    return [gate(value, 0) if rng.random() < 0.8 else value for value in results]


@dataclass
class Opinion:
    """What is wrong with a graph.

    Attributes:
        races: (first node, second node) for every pair that is not ordered; "output" is the output, "<inputs>" what comes before.
        conflicts: ops whose anchors name different streams.
        mismatch: whether the readings differ.
        unordered: pairs of collectives.
    """

    races: set[tuple[str, str]] = field(default_factory=set)
    conflicts: set[str] = field(default_factory=set)
    mismatch: bool = False
    unordered: set[tuple[str, str]] = field(default_factory=set)


def name_of(node: fx.Node) -> str:
    return str(node.target).split(".")[1] if node.op == "call_function" and "." in str(node.target) else node.op


def is_wait(value: object) -> bool:
    return isinstance(value, fx.Node) and name_of(value) == "_internal_wait_and_bind"


def is_record(value: object) -> bool:
    return isinstance(value, fx.Node) and name_of(value) == "_internal_record"


def is_item(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def is_alias(node: fx.Node) -> bool:
    return name_of(node) == "t" or is_item(node)


def is_work(node: fx.Node) -> bool:
    return node.op == "call_function" and not (is_wait(node) or is_record(node) or is_alias(node))


def storage(node: fx.Node) -> Hashable:
    if is_item(node):
        return node.args[0], node.args[1]
    if is_alias(node) or name_of(node) == "add_":
        return storage(node.args[0])  # type: ignore[arg-type]
    return node


def maker(node: fx.Node) -> fx.Node | None:
    """The work op that made a value."""
    if is_work(node):
        return node
    return maker(node.args[0]) if is_wait(node) or is_alias(node) else None  # type: ignore[arg-type]


def direct(node: fx.Node) -> list[fx.Node]:
    values = node.args[0] if node.op == "output" else node.args
    return [v for v in values if isinstance(v, fx.Node)]  # type: ignore[union-attr]


def _reads_old_copy(nodes: list[fx.Node], op: fx.Node) -> bool:
    """Whether an op reads a wait's result of a value that was written into between the wait and the op."""
    place = {node: i for i, node in enumerate(nodes)}

    def written(where: Hashable, since: fx.Node) -> bool:
        return any(name_of(m) == "add_" and storage(m) == where and place[since] < place[m] < place[op] for m in nodes)

    pending = [storage(value) for value in direct(op) if not is_record(value)]
    while pending:
        copy = pending.pop()
        if isinstance(copy, fx.Node) and is_wait(copy) and not written(copy, copy):
            source = storage(copy.args[0])  # type: ignore[arg-type]
            if written(source, copy):
                return True
            pending.append(source)
    return False


def opinion(graph: fx.Graph, *, stream0: bool, lenient: bool) -> Opinion:
    nodes = list(graph.nodes)
    found = Opinion()
    ops = [n for n in nodes if is_work(n) or n.op == "output"]
    flow_stream, flow_after = _by_flow(nodes, ops, found)
    place_stream, place_after, place_of_record = _by_position(nodes)
    if lenient:
        found.conflicts.discard("output")
    judged = [n for n in ops if not (lenient and n.op == "output")]
    sound = [n for n in judged if n.name not in found.conflicts]
    found.mismatch = any(flow_stream[n] != place_stream[n] for n in sound)
    found.mismatch |= any(maker(r.args[0]) is not place_of_record[r] for r in nodes if is_record(r))
    found.mismatch |= any(_reads_old_copy(nodes, op) for op in ops)
    before = _closure(ops, flow_stream, flow_after)
    if not found.mismatch and not found.conflicts:
        other = _closure(ops, {**place_stream, ops[-1]: 0}, place_after)
        found.mismatch = any(before[n] - {None} != other[n] - {None} for n in judged)
    _races(nodes, ops, before, found, stream0, lenient)
    reduces = [n for n in ops if name_of(n) == "all_reduce"]
    found.unordered = {(a.name, b.name) for a, b in itertools.combinations(reduces, 2) if a not in before[b]}
    return found


def _by_flow(nodes: list[fx.Node], ops: list[fx.Node], found: Opinion) -> tuple[dict[Any, int], dict[Any, set[Any]]]:
    streams: dict[Any, int] = {}
    after: dict[Any, set[Any]] = {}
    for op in ops:
        gates = [v for v in dict.fromkeys(direct(op)) if is_wait(v)]
        named = [g.args[1] for g in gates]
        if op.op == "output":
            named.insert(0, 0)
        else:
            named += [r.args[1] for r in nodes if is_record(r) and maker(r.args[0]) is op]
        if len(set(named)) > 1:
            found.conflicts.add(op.name)
        streams[op] = named[0] if named else 0
        after[op] = set()
        for gate in gates:
            while is_wait(gate):
                after[op] |= {maker(token.args[0]) for token in gate.args[2] if is_record(token)}
                gate = gate.args[0]
    return streams, after


def _by_position(nodes: list[fx.Node]) -> tuple[dict[Any, int], dict[Any, set[Any]], dict[Any, Any]]:
    streams: dict[Any, int] = {}
    after: dict[Any, set[Any]] = {}
    marks: dict[Any, Any] = {}
    pending: list[fx.Node] = []
    last = None
    for at, node in enumerate(nodes):
        if is_wait(node):
            pending.append(node)
        elif is_record(node):
            marks[node] = last
        elif is_work(node) or node.op == "output":
            after[node] = {marks[token] for wait in pending for token in wait.args[2] if is_record(token)}
            rest = [n for n in nodes[at + 1 :] if not is_alias(n)]
            if pending:
                streams[node] = pending[-1].args[1]  # type: ignore[assignment]
            elif is_work(node) and is_record(rest[0]):
                streams[node] = rest[0].args[1]  # type: ignore[assignment]
            else:
                streams[node] = 0
            pending = []
            last = node if is_work(node) else last
    return streams, after, marks


def _closure(ops: list[fx.Node], streams: dict[Any, int], after: dict[Any, set[Any]]) -> dict[Any, set[Any]]:
    """All predecessors of each op; None represents the beginning, on stream 0."""
    edges: dict[Any, set[Any]] = {None: set()}
    for at, op in enumerate(ops):
        edges[op] = after[op] | {other for other in ops[:at] if streams[other] == streams[op]}
        edges[op] |= {None} if streams[op] == 0 else set()
    found = {}
    for op in ops:
        seen: set[Any] = set()
        todo = list(edges[op])
        while todo:
            other = todo.pop()
            if other not in seen:
                seen.add(other)
                todo += edges[other]
        found[op] = seen
    return found


def _races(
    nodes: list[fx.Node], ops: list[fx.Node], before: dict[Any, set[Any]], found: Opinion, stream0: bool, lenient: bool
) -> None:
    written: set[Hashable] = set()
    accesses: list[tuple[Any, Hashable, bool]] = []  # op, storage, whether it writes
    inputs = [n for n in nodes if n.op == "placeholder"]
    if stream0:
        accesses += [(None, n, True) for n in inputs]
    for op in ops:
        if op.op == "output" and lenient:
            continue
        reads: set[Hashable] = set()
        todo = [storage(v) for v in direct(op)]
        while todo:
            at = todo.pop()
            reads.add(at)
            if is_wait(at) and at not in written:
                todo.append(storage(at.args[0]))  # type: ignore[union-attr, arg-type]
        if op.op == "output":
            reads |= {n for n in inputs if n in written}
            accesses += [(op, s, False) for s in reads]
            continue
        if name_of(op) == "add_":
            writes = {storage(op)}
        elif name_of(op) == "add_rms_norm2":
            writes = {(op, 0), (op, 1)}
        else:
            writes = {op}
        written |= writes
        accesses += [(op, s, False) for s in reads] + [(op, s, True) for s in writes]
    for (a, first, wrote), (c, second, writes_too) in itertools.combinations(accesses, 2):
        if a is not c and first == second and (wrote or writes_too) and a not in before[c]:
            if c.op == "output" and a is None:
                continue
            found.races.add(("<inputs>" if a is None else a.name, c.name))
