"""Multistream scheduling with one defect put back in each class."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from tcverify.ops import RECORD, WAIT, lookup, mutated_operands
from tcverify.passes import Multistream
from tcverify.passes.editing import op_name
from tcverify.passes.multistream.graph import (
    OrderEdge,
    StreamGraph,
    WorkOp,
    last_writers,
)
from tcverify.passes.multistream.lowering import StreamLowering
from tcverify.passes.multistream.schedule import PlacedOp, StreamSchedule
from tcverify.program.stream_options import MAIN_STREAM


class Mutant(Multistream):
    """The sound pass; subclasses put a defect back and carry their own name."""

    def __init_subclass__(cls) -> None:
        cls.name = cls.__name__


def is_view(node: fx.Node) -> bool:
    """Whether a node may be a view of its first operand."""
    if not op_name(node).startswith("aten::") or not lookup(node.target).aliases:
        return False
    return not mutated_operands(node)


# -------------------------------------------------------------------------------------------------------- dependencies


class TupleDependencyUntracked(Mutant):
    """Nothing waits for a value that is an item of a tuple (race)."""

    def synchronises(self, edge: OrderEdge) -> bool:
        return edge.operand is None or edge.operand.target is not operator.getitem


class ViewDependencyUntracked(Mutant):
    """Nothing waits for a value that is seen through a view (race)."""

    def synchronises(self, edge: OrderEdge) -> bool:
        return edge.operand is None or not is_view(edge.operand)


class ListDependencyUntracked(Mutant):
    """Nothing waits for an operand that stands in a list (race)."""

    def synchronises(self, edge: OrderEdge) -> bool:
        return edge.operand is None or any(
            edge.operand in user.args for user in edge.operand.users if not op_name(user).endswith("::cat")
        )


class WriteAfterReadUntracked(Mutant):
    """A write does not wait for what reads the old value (race)."""

    def synchronises(self, edge: OrderEdge) -> bool:
        return edge.kind != "WAR"


class WriteMovedBeforeRead(Mutant):
    """A write is scheduled without regard to what reads the old value (wrong-value, race)."""

    def edges(self, parts: StreamGraph) -> list[OrderEdge]:
        return [edge for edge in super().edges(parts) if edge.kind != "WAR"]


class WritesUnknown(Mutant):
    """Values are waited for where they are made, not where an op has written into them since (race)."""

    def synchronises(self, edge: OrderEdge) -> bool:
        return edge.kind in ("host", "collective")


# --------------------------------------------------------------------------------------------------------- collectives


class CollectivesUnordered(Mutant):
    """Collectives on several streams wait for their operands alone (unordered-collectives)."""

    def synchronises(self, edge: OrderEdge) -> bool:
        return edge.kind != "collective"


class CostsOrderCollectives(Mutant):
    """Collectives are ordered by upward rank, which comes out otherwise where costs are others (deadlock, …)."""

    def edges(self, parts: StreamGraph) -> list[OrderEdge]:
        return [edge for edge in super().edges(parts) if edge.kind != "collective"]


class FusedOpUnordered(Mutant):
    """An op that multiplies and reduces is not ordered among the collectives (unordered-collectives, …)."""

    def edges(self, parts: StreamGraph) -> list[OrderEdge]:
        last: int | None = None
        kept = [edge for edge in super().edges(parts) if edge.kind != "collective"]
        for op in parts.work:
            if op.resources == ("comm",):
                if last is not None:
                    kept.append(OrderEdge(last, op.index, "collective"))
                last = op.index
        return kept


class TokenSharedByCollectives(Mutant):
    """All collectives of a stream share the token of its first one (race)."""

    def record(self, state: StreamLowering, placed: PlacedOp) -> fx.Node:
        token = super().record(state, placed)
        if placed.op.resources != ("comm",):
            return token
        earlier = [
            state.records[p.op.index]
            for p in state.schedule.placed
            if p.op.index in state.records and p.op.resources == ("comm",) and p.stream == placed.stream
        ]
        return earlier[0] if earlier else token


# ------------------------------------------------------------------------------------------------------- waits, records


class WaitNamesMainStream(Mutant):
    """Waits of collectives name stream 0, their records the stream of the schedule (stream-conflict)."""

    def wait_stream(self, placed: PlacedOp) -> int:
        return MAIN_STREAM if placed.op.resources == ("comm",) else placed.stream


class RecordNamesMainStream(Mutant):
    """Records name stream 0 whatever the op runs on (stream-conflict)."""

    def record_stream(self, placed: PlacedOp) -> int:
        return MAIN_STREAM


class WaitForAnotherProducer(Mutant):
    """A wait takes the token of the op issued before the one that it should wait for (race)."""

    def tokens(self, state: StreamLowering, placed: PlacedOp) -> list[fx.Node]:
        issued = [p.op.index for p in state.schedule.placed]
        return [state.records[issued[max(0, issued.index(token) - 1)]] for token in placed.tokens]


class OneTokenPerWait(Mutant):
    """Of several tokens, a wait takes the last one alone (race)."""

    def tokens(self, state: StreamLowering, placed: PlacedOp) -> list[fx.Node]:
        return super().tokens(state, placed)[-1:]

    def lower(self, state: StreamLowering, joins: Mapping[fx.Node, tuple[int, ...]]) -> None:
        super().lower(state, {node: tokens[-1:] for node, tokens in joins.items()})


class FirstWaitLost(Mutant):
    """The first op of a stream does not wait for anything (race)."""

    def gate(self, state: StreamLowering, placed: PlacedOp) -> None:
        first = next(p for p in state.schedule.placed if p.stream == placed.stream)
        if first is not placed:
            super().gate(state, placed)


class WaitSharedByReaders(Mutant):
    """A second reader takes the wait of the first, whatever stream it runs on (stream-conflict, anchor-mismatch, race)."""

    def lower(self, state: StreamLowering, joins: Mapping[fx.Node, tuple[int, ...]]) -> None:
        self.gated: dict[fx.Node, fx.Node] = {}
        super().lower(state, joins)

    def gate(self, state: StreamLowering, placed: PlacedOp) -> None:
        carrier = self.carrier(state, placed)
        if carrier is not None and carrier in self.gated:
            placed.op.node.replace_input_with(carrier, self.gated[carrier])
            return
        super().gate(state, placed)
        for operand in placed.op.node.all_input_nodes:
            if carrier is not None and op_name(operand) == WAIT and operand.args[0] is carrier:
                self.gated[carrier] = operand


class GateBehindAView(Mutant):
    """What a view shows is gated, and not the view, which is no op that could wait (anchor-mismatch)."""

    def gate(self, state: StreamLowering, placed: PlacedOp) -> None:
        tokens, carrier = self.tokens(state, placed), self.carrier(state, placed)
        if carrier is None or not tokens or not is_view(carrier):
            super().gate(state, placed)
            return
        base = carrier.all_input_nodes[0]
        wait = self.wait(state, base, placed.stream, tokens, placed.op.node)
        view = state.graph.node_copy(carrier, lambda operand: wait if operand is base else operand)
        self.describe(view)
        placed.op.node.replace_input_with(carrier, view)


class WrittenOperandGated(Mutant):
    """An op that writes into an operand is given a copy of it (wrong-value)."""

    def carrier(self, state: StreamLowering, placed: PlacedOp) -> fx.Node | None:
        written = mutated_operands(placed.op.node)
        return next(iter(written)) if written else super().carrier(state, placed)

    def gate(self, state: StreamLowering, placed: PlacedOp) -> None:
        carrier = self.carrier(state, placed)
        if carrier is not None:
            wait = self.wait(state, carrier, placed.stream, self.tokens(state, placed), placed.op.node)
            placed.op.node.replace_input_with(carrier, wait)


class PreviousOpRecorded(Mutant):
    """A record names the op issued before the one that it stands behind (anchor-mismatch)."""

    def recorded(self, state: StreamLowering, placed: PlacedOp) -> fx.Node:
        mine = super().recorded(state, placed)
        issued = [p for p in state.schedule.placed if p.op.index in state.records and p.stream == placed.stream]
        return state.records[issued[-1].op.index].args[0] if issued else mine  # type: ignore[return-value]


class RecordedWhereNeeded(Mutant):
    """Records stand before the waits that need them, behind other ops of their stream (anchor-mismatch)."""

    def record(self, state: StreamLowering, placed: PlacedOp) -> fx.Node:
        self.recorded(state, placed)
        return placed.op.node

    def tokens(self, state: StreamLowering, placed: PlacedOp) -> list[fx.Node]:
        by_number = {p.op.index: p for p in state.schedule.placed}
        return [self._late(state, by_number[token]) for token in placed.tokens]

    def lower(self, state: StreamLowering, joins: Mapping[fx.Node, tuple[int, ...]]) -> None:
        self.parts = state.parts
        super().lower(state, joins)

    def wait(
        self, state: StreamLowering, value: fx.Node, stream: int, tokens: list[fx.Node], reader: fx.Node
    ) -> fx.Node:
        by_node = {p.op.node: p for p in state.schedule.placed}
        late = [self._late(state, by_node[token]) if token in by_node else token for token in tokens]
        return super().wait(state, value, stream, late, reader)

    def _late(self, state: StreamLowering, placed: PlacedOp) -> fx.Node:
        value, item = placed.op.node, placed.op.item
        if item is not None:
            value = next(user for user in value.users if user.target is operator.getitem)
        return self.token(state, value, placed.stream, placed.op.node)


# ------------------------------------------------------------------------------------------------------------- outputs


class OutputsNotJoined(Mutant):
    """The output waits for nothing (race)."""

    def lower(self, state: StreamLowering, joins: Mapping[fx.Node, tuple[int, ...]]) -> None:
        super().lower(state, {})


class WritesIntoInputsNotJoined(Mutant):
    """The output waits for what it returns, not for what is written into inputs (race)."""

    def joined(self, parts: StreamGraph) -> list[int]:
        returned = [storage for node in parts.output.all_input_nodes for storage in parts.storages(node)]
        return last_writers(parts, returned)


class JoinErasedAsDead(Mutant):
    """Tokens for the output go to waits that nobody reads, and dead code is erased (race)."""

    def lower(self, state: StreamLowering, joins: Mapping[fx.Node, tuple[int, ...]]) -> None:
        super().lower(state, {})
        output = state.parts.output
        with state.graph.inserting_before(output):
            for node, tokens in joins.items():
                self.wait(state, node, MAIN_STREAM, [state.records[token] for token in tokens], output)
        state.graph.eliminate_dead_code()


class DeadCollectiveErased(Mutant):
    """Collectives that nobody reads are erased as dead code, on the rank where nobody does (deadlock, …)."""

    def lower(self, state: StreamLowering, joins: Mapping[fx.Node, tuple[int, ...]]) -> None:
        super().lower(state, joins)
        state.graph.eliminate_dead_code()


# ------------------------------------------------------------------------------------------------------------ schedules


class ProgramOrder(Mutant):
    """Ops stay in the order of the program, with the waits that the order of the plan needs (wrong-schedule, race)."""

    def issued(self, schedule: StreamSchedule) -> Sequence[PlacedOp]:
        return sorted(schedule.placed, key=lambda placed: placed.op.index)


class OverheadForgotten(Mutant):
    """The schedule takes no time for synchronisation (wrong-schedule)."""

    def overhead_s(self) -> float:
        return 0.0


class ResourcesShared(Mutant):
    """Ops of several streams run side by side on one resource (wrong-schedule)."""

    def busy(self, op: WorkOp) -> Sequence[str]:
        return ()


class FusedOpTakesOneResource(Mutant):
    """An op that multiplies and reduces keeps only communication busy (wrong-schedule)."""

    def busy(self, op: WorkOp) -> Sequence[str]:
        return op.resources[-1:]


class GuardInverted(Mutant):
    """A graph is lowered when that does not make it faster (no-gain)."""

    def beats_serial(self, schedule: StreamSchedule) -> bool:
        return not super().beats_serial(schedule)


class NoGuard(Mutant):
    """A graph is lowered whether or not that makes it faster (no-gain)."""

    def beats_serial(self, schedule: StreamSchedule) -> bool:
        return True


class CommunicationIsFree(Mutant):
    """Collectives cost next to nothing, whatever their cost is said to be (wrong-schedule)."""

    def cost_s(self, node: fx.Node) -> float:
        cost = super().cost_s(node)
        return 1e-6 if lookup(node.target).resources == ("comm",) else cost


class CheapOpsAreFree(Mutant):
    """Costs below a microsecond are taken as they are (wrong-schedule)."""

    def cost_s(self, node: fx.Node) -> float:
        given = node.meta.get("cost_s")
        return super().cost_s(node) if given is None else max(0.0, float(given))


class OldMakespanDeclared(Mutant):
    """The lowered graph declares the makespan of the order in which the ops stood before (wrong-schedule)."""

    def plan(self, parts: StreamGraph) -> StreamSchedule:
        best = super().plan(parts)
        self.only_original = True
        try:
            before = super().plan(parts)
        finally:
            self.only_original = False
        return replace(best, makespan_s=before.makespan_s)

    def orders(self, parts: StreamGraph, before: Sequence[Sequence[int]]) -> list[Sequence[WorkOp]]:
        found = super().orders(parts, before)
        return found[-1:] if getattr(self, "only_original", False) else found


# ------------------------------------------------------------------------------------------------------------- metadata


class WaitsShareStorage(Mutant):
    """The metadata of a wait is that of what it waits for, as if it were no copy (stale-metadata)."""

    def describe(self, node: fx.Node) -> None:
        super().describe(node)
        if op_name(node) != RECORD:
            node.meta["val"] = node.args[0].meta["val"]  # type: ignore[union-attr]


class TokensLookLikeValues(Mutant):
    """The metadata of a token is that of what it records (stale-metadata)."""

    def describe(self, node: fx.Node) -> None:
        super().describe(node)
        if op_name(node) == RECORD:
            node.meta["val"] = node.args[0].meta["val"].clone()  # type: ignore[union-attr]


_ORDER = frozenset({"deadlock", "collective-mismatch"})


def _kinds(*names: str) -> frozenset[str]:
    return frozenset(names)


#: Every mutant, with the kinds of finding of which one at least must be there.
EXPECTED: dict[str, frozenset[str]] = {
    "TupleDependencyUntracked": _kinds("race"),
    "ViewDependencyUntracked": _kinds("race"),
    "ListDependencyUntracked": _kinds("race"),
    "WriteAfterReadUntracked": _kinds("race"),
    "WriteMovedBeforeRead": _kinds("wrong-value", "race"),
    "WritesUnknown": _kinds("race"),
    "CollectivesUnordered": _kinds("unordered-collectives"),
    "CostsOrderCollectives": _ORDER | {"wrong-value", "unordered-collectives"},
    "FusedOpUnordered": _ORDER | {"unordered-collectives"},
    "TokenSharedByCollectives": _kinds("race"),
    "WaitNamesMainStream": _kinds("stream-conflict"),
    "RecordNamesMainStream": _kinds("stream-conflict"),
    "WaitForAnotherProducer": _kinds("race"),
    "OneTokenPerWait": _kinds("race"),
    "FirstWaitLost": _kinds("race"),
    "WaitSharedByReaders": _kinds("stream-conflict", "anchor-mismatch", "race"),
    "GateBehindAView": _kinds("anchor-mismatch"),
    "WrittenOperandGated": _kinds("wrong-value"),
    "PreviousOpRecorded": _kinds("anchor-mismatch"),
    "RecordedWhereNeeded": _kinds("anchor-mismatch"),
    "OutputsNotJoined": _kinds("race"),
    "WritesIntoInputsNotJoined": _kinds("race"),
    "JoinErasedAsDead": _kinds("race"),
    "DeadCollectiveErased": _ORDER | {"wrong-schedule"},
    "ProgramOrder": _kinds("wrong-schedule", "race"),
    "OverheadForgotten": _kinds("wrong-schedule"),
    "ResourcesShared": _kinds("wrong-schedule"),
    "FusedOpTakesOneResource": _kinds("wrong-schedule"),
    "GuardInverted": _kinds("no-gain"),
    "NoGuard": _kinds("no-gain"),
    "CommunicationIsFree": _kinds("wrong-schedule"),
    "CheapOpsAreFree": _kinds("wrong-schedule"),
    "OldMakespanDeclared": _kinds("wrong-schedule"),
    "WaitsShareStorage": _kinds("stale-metadata"),
    "TokensLookLikeValues": _kinds("stale-metadata"),
}

MUTANTS: dict[str, type[Mutant]] = {name: globals()[name] for name in EXPECTED}
