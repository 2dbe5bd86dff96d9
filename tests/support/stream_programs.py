"""Builds programs with costs for the multistream pass, and judges what it makes by the model of streams, written out plainly.

The judge is slow and simple on purpose, and shares nothing with the pass: happens-before is a transitive closure over sets, the
replay a loop over the ops.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from tcverify.ops import lookup
from tcverify.passes import Multistream
from tcverify.passes.base import Pass
from tcverify.program import (
    PARTIAL,
    VARYING,
    GraphBuilder,
    InputSpec,
    Mesh,
    Program,
    Recipe,
    StreamSettings,
    spmd_program,
)
from tcverify.verification.verifier import verify

TP2 = Mesh.grid({"tp": 2})
GRID = Mesh.grid({"dp": 2, "tp": 2})
WAIT, RECORD = "tensor_cast::_internal_wait_and_bind", "tensor_cast::_internal_record"
US = 1e-6
"""A microsecond."""


class Builder:
    """Short names for what these programs are made of. Costs are in microseconds."""

    def __init__(self, graph: GraphBuilder, inputs: Sequence[str], cost: Callable[[str], float | None]) -> None:
        self.graph = graph
        self.inputs = {name: graph.input(name) for name in inputs}
        self._cost = cost

    def __getitem__(self, name: str) -> fx.Node:
        return self.inputs[name]

    def call(self, op: str, *args: Any, cost: float | None = None, **kwargs: Any) -> fx.Node:
        name = op if "::" in op else f"tensor_cast::{op}"
        node = self.graph.call(name, *args, **kwargs)
        given = self._cost(name) if cost is None else cost
        if given is not None:
            node.meta["cost_s"] = given * US
        return node

    def all_reduce(self, value: Any, dim: str = "tp", cost: float | None = None) -> fx.Node:
        return self.call("all_reduce", value, self.graph.rank, self.graph.group(dim), cost=cost)

    def mm(self, value: Any, cost: float | None = None) -> fx.Node:
        return self.call("aten::mm", value, self["w"], cost=cost)

    def add(self, value: Any, other: Any, cost: float | None = None) -> fx.Node:
        return self.call("aten::add.Tensor", value, other, cost=cost)

    def pair(self, value: Any, residual: Any, cost: float | None = None) -> fx.Node:
        """A tuple: the norm of the sum, and the sum."""
        return self.call("add_rms_norm2", value, residual, self["g"], 1e-6, cost=cost)

    def item(self, value: fx.Node, index: int) -> fx.Node:
        return self.graph.getitem(value, index)

    def view(self, value: Any, *shape: int) -> fx.Node:
        return self.call("aten::view", value, list(shape))


Build = Callable[[Builder], Any]


def default_cost(op: str) -> float:
    """30 µs for a collective, 10 µs for anything else."""
    return 30.0 if "all_reduce" in op or "all_gather" in op else 10.0


def program(
    build: Build,
    *,
    mesh: Mesh = TP2,
    size: int = 8,
    streams: StreamSettings | None = None,
    cost: Callable[[str], float | None] = default_cost,
) -> Program:
    """Inputs: x partial, v varying, r replicated, w a square weight, g the gain of a norm, all of `size`."""
    specs = [
        InputSpec("x", (size, size), placements=(("tp", PARTIAL),)),
        InputSpec("v", (size, size), placements=(("tp", VARYING),)),
        InputSpec("r", (size, size)),
        InputSpec("w", (size, size)),
        InputSpec("g", (size,), recipe=Recipe("norm_weight")),
    ]
    names = [spec.name for spec in specs]
    made = spmd_program(mesh, specs, lambda graph: build(Builder(graph, names, cost)))
    return replace(made, streams=streams)


def lowered(original: Program, pass_: Pass | None = None, rank: int = 0) -> fx.Graph:
    """The graph of one rank after the pass."""
    chosen = Multistream() if pass_ is None else pass_
    return chosen(original.graph_module(rank)).graph


def is_lowered(graph: fx.Graph) -> bool:
    return any(node.op == "call_function" and lookup(node.target).name in (WAIT, RECORD) for node in graph.nodes)


def node(graph: fx.Graph, name: str) -> fx.Node:
    return next(n for n in graph.nodes if n.name == name)


def findings(original: Program, pass_: Pass | None = None) -> set[str]:
    """The kinds of finding of the whole verifier."""
    verdict = verify(Multistream() if pass_ is None else pass_, original)
    assert verdict.status != "inconclusive", verdict.doubts
    return {finding.kind for finding in verdict.findings}


# ---------------------------------------------------------------------------------------------------- the plain judge


@dataclass
class Op:
    """One op as a runtime issues it."""

    node: fx.Node
    stream: int
    tokens: list[Op]
    resources: tuple[str, ...]
    before: set[int] = field(default_factory=set)  # ids of the ops that happen before it
    start: float = 0.0
    end: float = 0.0


@dataclass
class Judged:
    """What the judge found wrong, and what it replayed."""

    problems: list[str]
    ops: list[Op]
    makespan: float
    serial: float

    def op(self, name: str) -> Op:
        return next(op for op in self.ops if op.node.name == name)


def _name(n: fx.Node) -> str:
    return lookup(n.target).name if n.op == "call_function" else n.op


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in _tensors(v)] if isinstance(value, (tuple, list)) else []


def _kind(n: fx.Node, values: dict[fx.Node, Any]) -> str:
    name = _name(n)
    if n.op in ("placeholder", "get_attr"):
        return "input"
    if n.op == "output" or name in (WAIT, RECORD):
        return "output" if n.op == "output" else "anchor"
    mutable = isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable
    mine = [t.untyped_storage()._cdata for t in _tensors(values[n])]
    theirs = {t.untyped_storage()._cdata for o in n.all_input_nodes for t in _tensors(values[o])}
    if n.target is operator.getitem and isinstance(values[n.args[0]], (tuple, list)):
        return "alias"
    if not mutable and (not mine or set(mine) <= theirs):
        return "alias" if mine else "scalar"
    return "work"


def judge(original: Program, graph: fx.Graph, rank: int = 0, *, inputs: str = "ready") -> Judged:
    """Judge a lowered graph of one rank by the model: both readings, happens-before, races, order of collectives, times.

    Storage is that of real tensors, which the graph is run on: collectives by stand-ins that have the right shapes.
    """
    values = _run(original, graph, rank)
    nodes = list(graph.nodes)
    issue = _Issue(nodes, {n: _kind(n, values) for n in nodes})
    issue.run()
    problems, ops = issue.problems, issue.ops
    problems += _races(original, nodes, ops, _base_storages(graph, values), issue.joined, inputs)
    collectives = [op for op in ops if "comm" in op.resources]
    for first, second in itertools.pairwise(collectives):
        if id(first) not in second.before:
            problems.append(f"collectives {first.node.name} and {second.node.name} are not ordered")
    overhead = nodes[-1].meta["schedule"]["sync_overhead_s"] if "schedule" in nodes[-1].meta else 0.0
    makespan, serial = _replay(ops, overhead)
    return Judged(problems, ops, makespan, serial)


class _Issue:
    """Issues the nodes in order, as a runtime does that reads anchors by position, and compares that with what they say by data.

    Attributes:
        joined: ids of the ops that happen before the output.
    """

    def __init__(self, nodes: list[fx.Node], kinds: dict[fx.Node, str]) -> None:
        self.nodes, self.kinds = nodes, kinds
        self.problems: list[str] = []
        self.ops: list[Op] = []
        self.joined: set[int] = set()
        self._recorded: dict[fx.Node, Op] = {}
        self._pending: list[fx.Node] = []  # waits that no op has taken yet
        self._streams: dict[int, Op] = {}  # the last op of each
        self._produced: dict[fx.Node, Op] = {}

    def run(self) -> None:
        for position, n in enumerate(self.nodes):
            kind = self.kinds[n]
            if kind == "anchor":
                self._wait(n) if _name(n) == WAIT else self._record(n)
            elif kind in ("alias", "scalar"):
                self._alias(n)
            elif kind == "work":
                self._work(n, position)
            elif kind == "output":
                self._output(n)

    def _wait(self, n: fx.Node) -> None:
        self._pending.append(n)
        if any(self.kinds[user] not in ("work", "output") and _name(user) != WAIT for user in n.users):
            self.problems.append(f"{n.name} binds nothing")

    def _record(self, n: fx.Node) -> None:
        op = self._produced.get(n.args[0])  # type: ignore[arg-type]
        if op is None or not self.ops or self.ops[-1] is not op:
            self.problems.append(f"{n.name} records another op by position")
        if op is not None:
            self._recorded[n] = op
            if op.stream != n.args[1]:
                self.problems.append(f"{n.name} names another stream than {op.node.name} runs on")

    def _alias(self, n: fx.Node) -> None:
        if self._pending:
            self.problems.append(f"{n.name} stands between waits and their op")
        if n.all_input_nodes and n.all_input_nodes[0] in self._produced:
            self._produced[n] = self._produced[n.all_input_nodes[0]]

    def _work(self, n: fx.Node, position: int) -> None:
        after = next((m for m in self.nodes[position + 1 :] if self.kinds[m] != "alias"), None)
        own = after is not None and self.kinds[after] == "anchor" and _name(after) == RECORD
        stream, tokens = self._bound(n, int(after.args[1]) if own else 0)  # type: ignore[union-attr, arg-type]
        op = Op(n, stream, tokens, lookup(n.target).resources, self._before(stream, tokens))
        self._streams[stream] = self._produced[n] = op
        self.ops.append(op)

    def _output(self, n: fx.Node) -> None:
        stream, tokens = self._bound(n, 0)
        if stream != 0:
            self.problems.append("the output is read on another stream than 0")
        self.joined = self._before(0, tokens)

    def _bound(self, n: fx.Node, default: int) -> tuple[int, list[Op]]:
        """The stream that a node is bound to by its waits, and the ops that these wait for."""
        waits = [w for arg in _tensor_args(n) for w in _chain(arg)]
        if set(waits) != set(self._pending):
            self.problems.append(f"{n.name}: waits by data {waits} and by position {self._pending} differ")
        self._pending = []
        named = {int(w.args[1]) for w in waits}  # type: ignore[arg-type]
        if len(named) > 1:
            self.problems.append(f"{n.name} is bound to streams {named}")
        tokens = [self._recorded[t] for w in waits for t in w.args[2]]  # type: ignore[union-attr]
        return min(named) if named else default, tokens

    def _before(self, stream: int, tokens: list[Op]) -> set[int]:
        """Ids of the ops that happen before what runs next on a stream, behind these tokens."""
        direct = [*tokens, *([self._streams[stream]] if stream in self._streams else [])]
        return set().union(*(other.before | {id(other)} for other in direct))


def _chain(arg: fx.Node) -> list[fx.Node]:
    """The waits that an argument comes through."""
    found = []
    while _name(arg) == WAIT:
        found.append(arg)
        arg = arg.args[0]  # type: ignore[assignment]
    return found


def _tensor_args(n: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    map_aggregate((n.args, n.kwargs), lambda a: found.append(a) if isinstance(a, fx.Node) else None)
    return found


def _run(original: Program, graph: fx.Graph, rank: int) -> dict[fx.Node, Any]:
    values: dict[fx.Node, Any] = {}
    inputs = iter(original.values(rank))
    for n in graph.nodes:
        if n.op == "placeholder":
            values[n] = next(inputs)
        elif n.op == "call_function":
            args = map_aggregate(n.args, lambda a: values[a] if isinstance(a, fx.Node) else a)
            kwargs = map_aggregate(n.kwargs, lambda a: values[a] if isinstance(a, fx.Node) else a)
            op = lookup(n.target)
            if op.collective:
                steps = op.require()(rank, *args, **kwargs)
                fake = op.fake
                assert fake is not None
                values[n] = torch.zeros_like(fake(*args, **kwargs))
                steps.close()
            else:
                values[n] = op.require()(*args, **kwargs)
    return values


def _base_storages(graph: fx.Graph, values: dict[fx.Node, Any]) -> dict[fx.Node, set[int]]:
    """Storages that reading a node reads: a wait reads what it waits for."""
    found: dict[fx.Node, set[int]] = {}
    for n in graph.nodes:
        if _name(n) == WAIT:
            found[n] = found[n.args[0]]
        elif n in values:
            found[n] = {t.untyped_storage()._cdata for t in _tensors(values[n])}
    return found


def _races(
    original: Program,
    nodes: list[fx.Node],
    ops: list[Op],
    storage: dict[fx.Node, set[int]],
    joined: set[int],
    inputs: str,
) -> list[str]:
    problems: list[str] = []
    accesses: dict[int, list[tuple[Op, bool]]] = {}
    mutated: set[int] = set()
    for op in ops:
        read = {s for o in op.node.all_input_nodes for s in storage[o]}
        written = storage[op.node] - read
        target = op.node.target
        if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
            for argument, value in zip(target._schema.arguments, op.node.args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    assert isinstance(value, fx.Node)
                    assert _name(value) != WAIT, f"{op.node.name} writes into a copy"
                    written |= storage[value]
                    mutated |= storage[value]
        for s in read | written:
            for other, wrote in accesses.get(s, []):
                if (wrote or s in written) and id(other) not in op.before:
                    problems.append(f"race of {other.node.name} and {op.node.name}")
            accesses.setdefault(s, []).append((op, s in written))
    given = {s for n in nodes if n.op == "placeholder" for s in storage[n]}
    returned = {s for n in nodes[-1].all_input_nodes for s in storage[n]}
    for s in returned | (given & mutated):
        for other, wrote in accesses.get(s, []):
            if wrote and id(other) not in joined:
                problems.append(f"race of {other.node.name} and the output")
    return problems


def _replay(ops: list[Op], overhead: float) -> tuple[float, float]:
    free: dict[Any, float] = {}
    makespan = serial = 0.0
    for op in ops:
        keys = [op.stream, *op.resources]
        start = max([0.0, *(free.get(key, 0.0) for key in keys)])
        for token in op.tokens:
            start = max(start, token.end + (overhead if token.stream != op.stream else 0))
        op.start, op.end = start, start + op.node.meta["cost_s"]
        free.update(dict.fromkeys(keys, op.end))
        makespan = max(makespan, op.end)
        serial += op.node.meta["cost_s"]
    return makespan, serial


def check(original: Program, pass_: Multistream | None = None) -> Program:
    """Assert that every rank is lowered soundly: by the plain judge, by the whole verifier, and by its own declaration.

    Returns:
        The lowered program.
    """
    chosen = Multistream() if pass_ is None else pass_
    graphs = []
    for rank in range(original.world_size):
        gm = chosen(original.graph_module(rank))
        assert chosen.rewrites["lowered"] == 1
        assert sound(original, gm.graph, rank) == []
        before = str(gm.graph)
        assert str(chosen(gm).graph) == before
        assert chosen.rewrites["lowered"] == 0
        graphs.append(gm.graph)
    assert findings(original, chosen) == set()
    return original.with_graphs(graphs)


def sound(original: Program, graph: fx.Graph, rank: int = 0) -> list[str]:
    """What is wrong with a lowered graph and what it declares."""
    judged = judge(original, graph, rank)
    problems = list(judged.problems)
    before = {n.name: n for n in original.graph(rank).nodes}
    for op in judged.ops:
        given = before[op.node.name].meta.get("cost_s")
        if given is not None and op.node.meta["cost_s"] != max(1e-6, given):
            problems.append(f"cost of {op.node.name}")
    missing = set(before) - {n.name for n in graph.nodes}
    if missing:
        problems.append(f"lost {sorted(missing)}")
    said = list(graph.nodes)[-1].meta["schedule"]
    if said["makespan_s"] != judged.makespan or said["serial_s"] != judged.serial:
        problems.append(f"declared {said}, replayed {judged.makespan} of {judged.serial}")
    if not said["critical_path_s"] <= said["makespan_s"] < said["serial_s"]:
        problems.append(f"no gain or too much: {said}")
    return problems
