"""Decides which values of a graph move to the shard.

First, in graph order, everything that could move: what is computed from shards, if its other operands allow it. Then what
must not, or would be of no use, is taken back, and with it what rests on it, until nothing changes: a marker opens or closes
a region once, so it moves with all its readers or not at all, and a sum moves for the sake of a norm that moves.
Linear in the graph: every value is taken back once at most, and once at most turns out to be needed in full.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import fx

from tcverify.passes.editing import known_spec, named_arguments, op_name
from tcverify.passes.placements import Placements
from tcverify.passes.sequence_parallel.attention import PROJECTED, move_projection
from tcverify.passes.sequence_parallel.experts import ROUTED, SERVING, STAGES, expert_move
from tcverify.passes.sequence_parallel.layout import (
    ADD,
    ADD_RMS_NORM,
    ADD_RMS_NORM2,
    ADDENDS,
    ALL_REDUCE,
    GETITEM,
    MARKERS,
    RMS_NORM,
    START,
    WAIT,
    Move,
    Norm,
    Rows,
    Stage,
    is_contiguous,
    only_casts,
    shape_of,
)
from tcverify.passes.sequence_parallel.moves import Guards, MovePlan

_NONE: Mapping[fx.Node, Norm] = MappingProxyType({})


def plan_moves(graph: fx.Graph, facts: Placements, guards: Guards, norms: Mapping[fx.Node, Norm] = _NONE) -> MovePlan:
    """Find all that moves.

    Args:
        norms: those of aten's ops, by what they make; see `NormFinder`.
    """
    plan = MovePlan(norm_of={part: norm.node for norm in norms.values() for part in norm.nodes})
    reliable: dict[fx.Node, bool] = {}

    def relied_on(node: fx.Node) -> bool:
        if node not in reliable:
            reliable[node] = node.op != "call_function" or guards.metadata_allows(node)
        return reliable[node]

    for node in graph.nodes:
        if node.op == "call_function" and not facts.mutated(node):
            norm = norms.get(node)
            move = _move(node, plan, facts, guards) if norm is None else _normed(norm, plan, facts, guards)
            # Of operands too: what is inserted between them and the node is recorded by theirs. And of the items of a tuple:
            # one that does not move with it would take the shard for the whole.
            items = [user for user in node.users if op_name(user) == GETITEM]
            parts = (node,) if norm is None else norm.nodes
            operands = [operand for part in parts for operand in part.all_input_nodes]
            if move is not None and all(map(relied_on, (*parts, *operands, *items))):
                plan.moves[node] = move
    if plan.moves:
        _Withdrawal(plan, guards).run()
    return plan


# ----------------------------------------------------------------------------------------------------- what could move


def _move(node: fx.Node, plan: MovePlan, facts: Placements, guards: Guards) -> Move | None:
    op = op_name(node)
    if op in (ALL_REDUCE, START):
        shard = guards.reduction(node)
        return None if shard is None else Move(node, op, shard, "reduced")
    if op in ADDENDS:
        move = expert_move(node, op, plan, facts, guards)
        return move if move is not None else _computed(node, op, plan, facts, guards)
    move = _handed_on(node, op, plan, guards)
    return move if move is not None else expert_move(node, op, plan, facts, guards)


def _handed_on(node: fx.Node, op: str, plan: MovePlan, guards: Guards) -> Move | None:
    """The move of a marker, a wait, a view, or an item of a tuple."""
    operand = node.args[0] if node.args else None
    before = plan.moves.get(operand) if isinstance(operand, fx.Node) else None
    spec = known_spec(node)
    if before is None or spec is None or before.stage == ROUTED:
        return None
    if op == GETITEM:
        if not before.items:
            return None  # it indexes a tensor
        return Move(node, op, before.shard, before.items[node.args[1]], before.node)  # type: ignore[index]
    if op in MARKERS:
        return Move(node, op, before.shard, before.stage, before.node, "x")
    if op == WAIT:
        return Move(node, op, before.shard, before.stage, before.node) if before.op == START else None
    if not before.shard.handed_on_by(op) or not only_casts(node):
        return None
    dim = guards.viewed_dim(shape_of(before.node), before.shard, spec.shape)
    return None if dim is None else Move(node, op, before.shard.along(dim), before.stage, before.node)


def _normed(norm: Norm, plan: MovePlan, facts: Placements, guards: Guards) -> Move | None:
    """The move of a norm of aten's ops: behind c10d's all_reduces alone, whose rows they take."""
    source = plan.moves.get(norm.source)
    if source is None or source.stage not in _NORMABLE or not isinstance(source.shard, Rows):
        return None
    if norm.items and not guards.tuple_allows(norm.node):
        return None
    results = [user for user in norm.node.users if op_name(user) == GETITEM] if norm.items else [norm.node]
    if not results or any(map(facts.mutated, (*norm.nodes, *results))) or not all(map(is_contiguous, results)):
        return None
    if not all(guards.weight_allows(weight, source.shard, facts) for weight in norm.weights):
        return None
    pattern = "P1" if source.stage == "reduced" else ""
    if pattern and pattern not in guards.patterns:
        return None
    op = op_name(norm.node)
    return Move(norm.node, op, source.shard, "normed", norm.source, pattern=pattern, items=norm.items, norm=norm)


#: What a norm may take the shard of.
_NORMABLE: tuple[Stage, ...] = ("reduced", "added", "experts")


def _computed(node: fx.Node, op: str, plan: MovePlan, facts: Placements, guards: Guards) -> Move | None:
    """The move of a sum or a norm."""
    given = named_arguments(node)
    source = _source(given, op, plan) or move_projection(node, op, plan, facts, guards)
    results = [user for user in node.users if op_name(user) == GETITEM] if op == ADD_RMS_NORM2 else [node]
    if source is None or (op == ADD_RMS_NORM2 and not guards.tuple_allows(node)):
        return None
    if not all(map(is_contiguous, results)):  # as gathered values are
        return None
    if op == ADD:
        if "alpha" in given and not isinstance(given["alpha"], float):
            return None  # an integer may be another one on other ranks
    elif not isinstance(given["eps"], float) or not guards.weight_allows(given["weight"], source.shard, facts):
        return None
    rank = len(shape_of(source.node))
    if op != ADD and source.shard.dim == rank - 1:
        return None  # what a norm reduces over is not divided
    name = next(name for name in ADDENDS[op] if given[name] is source.node)
    move = Move(node, op, source.shard, "added" if op == ADD else "normed", source.node, name)
    if len(ADDENDS[op]) == 2:
        move.slot = next(other for other in ADDENDS[op] if other != name)
        move.other = given[move.slot]
        if not _takes_other(move, plan, facts, guards):
            return None
    shape = shape_of(node if op != ADD_RMS_NORM2 else given["x"])
    move.shard = source.shard.along(source.shard.dim + len(shape) - rank)
    move.items = ("normed", "residual") if op == ADD_RMS_NORM2 else ()
    move.pattern = _pattern(move, plan, guards)
    return move if not move.pattern or move.pattern in guards.patterns else None


def _source(given: dict[str, Any], op: str, plan: MovePlan) -> Move | None:
    """The first addend that is an all_reduce, or, before an rms_norm, a sum that moves."""
    stages = _NORMABLE if op == RMS_NORM else ("reduced", "experts")
    for name in ADDENDS[op]:
        move = plan.moves.get(given[name]) if isinstance(given[name], fx.Node) else None
        if move is not None and move.stage in stages:
            return move
    return None


def _takes_other(move: Move, plan: MovePlan, facts: Placements, guards: Guards) -> bool:
    """Whether the other addend can be had as a shard; notes how."""
    source, other = move.source, move.other
    assert source is not None
    if other is source:
        move.local = True
        return True
    spec = known_spec(other)
    if not isinstance(other, fx.Node) or spec is None or not guards.shapes_allow(shape_of(source), spec.shape):
        return False
    if not guards.addend_allows(other, move.shard, facts):
        return False
    theirs = plan.moves.get(other)
    if theirs is not None and theirs.stage != ROUTED:
        mine = move.shard.along(move.shard.dim - len(shape_of(source)))  # counted from the right
        move.local = guards.same_division(mine, theirs.shard.along(theirs.shard.dim - len(spec.shape)))
    return move.local or move.shard.can_slice(other)


def _pattern(move: Move, plan: MovePlan, guards: Guards) -> str:
    if move.op == ADD:
        return "P3"
    if move.op == ADD_RMS_NORM2:
        return "P2"
    if move.op == ADD_RMS_NORM:
        return "P3" if _adds_local_residual(move, plan) and "P3" in guards.patterns else "P1"
    assert move.source is not None
    return "P1" if plan.moves[move.source].stage == "reduced" else ""  # a norm behind a sum counts with it


def _adds_local_residual(move: Move, plan: MovePlan) -> bool:
    """Whether the other addend is a residual that stayed local."""
    theirs = plan.moves.get(move.other) if move.local and move.other is not None else None
    return theirs is not None and theirs.stage in ("residual", "added")


# -------------------------------------------------------------------------------------------------- what must not move

#: Stages of values that move for the sake of others.
_SERVING_STAGES = SERVING | {PROJECTED}


def _serves(move: Move) -> bool:
    """Whether a value moves for the sake of others that do, and for nothing else."""
    residual_sum = move.op == ADD and move.stage != "experts"
    return not move.in_place or move.op in MARKERS or residual_sum or move.stage in _SERVING_STAGES


class _Withdrawal:
    """Takes back what must not move, or would be of no use: works off what follows from reads in full and from lost readers.

    Events: ("full", value): someone reads it on all tokens. ("lost", value): one reader fewer takes its shard. ("stay",
    value): it does not move.
    """

    def __init__(self, plan: MovePlan, guards: Guards) -> None:
        self._plan = plan
        self._guards = guards
        self._readers: Counter[fx.Node] = Counter()
        self._events: list[tuple[str, fx.Node]] = []

    def run(self) -> None:
        plan, events = self._plan, self._events
        for node in plan.moves:
            self._readers[node] = len(plan.takers(node))
            if not all(plan.reads_shard(user, node) for user in node.users):
                events.append(("full", node))
            if not self._readers[node]:
                events.append(("lost", node))
        handlers = {"full": self._full, "lost": self._lost, "stay": self._stay}
        while events:
            event, node = events.pop()
            handlers[event](node, plan.moves.get(node))

    def _full(self, node: fx.Node, move: Move | None) -> None:
        plan, events = self._plan, self._events
        if node in plan.full:
            return
        plan.full.add(node)
        if move is not None and (move.stage == ROUTED or (move.stage == PROJECTED and move.in_place)):
            events.append(("stay", node))
        if move is None or move.source is None:
            return
        if move.op in MARKERS:
            if self._guards.marker_stays(node):
                events.append(("stay", node))
        elif not move.in_place:
            events.append(("full", move.source))

    def _lost(self, node: fx.Node, move: Move | None) -> None:
        self._readers[node] -= 1
        if move is not None and self._readers[node] <= 0 and _serves(move):
            self._events.append(("stay", node))

    def _stay(self, node: fx.Node, move: Move | None) -> None:
        if move is None:
            return
        plan, events = self._plan, self._events
        takers = plan.takers(node)
        del plan.moves[node]
        events += [(what, operand) for operand in move.reads for what in ("lost", "full")]
        for theirs in takers:
            # The other addend: its chunk can be sliced off instead.
            if theirs.source is not node and theirs.stage not in STAGES:
                theirs.local = False
                theirs.pattern = _pattern(theirs, plan, self._guards)
                events.append(("full", node))
                if theirs.pattern in self._guards.patterns:
                    continue
            events.append(("stay", theirs.node))


__all__ = ["plan_moves"]
