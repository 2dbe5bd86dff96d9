"""Multistream scheduling: collectives overlap with compute, on separate streams.

Ops are put on streams in the order of their upward ranks, as HEFT does, or in one of two other orders where that is faster
(`schedule`). The graph is rewritten into the order chosen, with a wait before each op that must follow ops of other
streams and a record behind every op (`lowering`). `graph` defines the order that must hold, and which graphs
are left unchanged because it is unknown.

The lowered graph declares its costs (`meta["cost_s"]` of its work) and its schedule (`meta["schedule"]` of the output node),
and replays to exactly the predicted makespan. A graph stays unchanged, bit for bit, if the schedule does not beat
sequential execution.

Left unchanged are graphs that are lowered already; that hold asynchronous collectives or ops with effects; that hold methods,
submodules or ops without a meaning; whose metadata is missing, symbolic or not what the operands imply; in which an op has no
cost and there is no device; that change the shape of a value in place, or write into it on a stream that the op may not use;
in which something would have to wait and has no operand that could (a copy stands in its place, so it must not be written
into, nor decide whether something is a view; and an output that shares storage with another or with an input cannot be a
copy). One line of log says which it was.

Preconditions: inputs are ready on all streams when the graph begins; outputs are read on stream 0, and so are inputs that the
graph writes into. Ranks whose collectives stand in the same order before the pass have them in the same order after it,
whatever their costs, since all collectives of a rank keep their order.
"""

from __future__ import annotations

import logging
import math
import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import fx

from tcverify.cost import DeviceProfile, node_cost
from tcverify.cost import load_device_profile as device_profile
from tcverify.errors import ProgramError, Unsupported, UsageError
from tcverify.ops import RECORD, WAIT, lookup, resolve
from tcverify.passes.base import Pass
from tcverify.passes.editing import infer_metadata
from tcverify.passes.multistream.graph import (
    ANCHORS,
    NotLowered,
    OrderEdge,
    StreamGraph,
    WorkOp,
    edges_of,
    infer_specs,
    is_host,
    last_writers,
    mutated_after,
    predecessors,
    take_apart,
)
from tcverify.passes.multistream.lowering import StreamLowering, joined_storages, plan_joins
from tcverify.passes.multistream.schedule import (
    PlacedOp,
    StreamSchedule,
    list_schedule,
    rank_order,
    start_order,
    upward_ranks,
)
from tcverify.program import Contract
from tcverify.program.stream_options import MAIN_STREAM, StreamSettings

log = logging.getLogger(__name__)


class Multistream(Pass):
    """Schedules compute and communication on streams and lowers the graph with anchors, if that makes it faster.

    Options override the program's settings in `gm.meta["streams"]`, which override the defaults: one compute stream 0, one
    communication stream 1, no overhead and no device. The program states the synchronisation overhead of the machine.

    Args:
        device: name of a device profile, or the path of one in TOML, for ops without a cost of their own.
        streams: ids of streams by role, as in "compute=0,comm=1+2".
        sync_overhead_s: seconds until the end of an op is known to another stream, for programs without stream settings.
        options: those of `Pass`.

    Attributes:
        settings: the streams that the last call used.
        profile: the device that costs are estimated for, if any.
        schedule: of the last call, if it lowered its graph.
    """

    name = "multistream"
    contract: ClassVar[Contract] = Contract(metadata=True, idempotent=True, schedule=True, overlap=True)
    PATTERNS = ("lowered", "moved", "waits")

    def __init__(
        self,
        *,
        device: str | None = None,
        streams: str | None = None,
        sync_overhead_s: float | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._chosen: dict[str, Any] = {}
        if device is not None:
            self._chosen["device"] = device
        if streams is not None:
            self._chosen.update(self._roles(streams))
        if sync_overhead_s is not None:
            self._chosen["sync_overhead_s"] = self._seconds(sync_overhead_s)
        self.schedule: StreamSchedule | None = None
        self.use(None)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        """Lower `gm` in place, or leave it unchanged. See `Pass.__call__`.

        Raises:
            Unsupported: the program names a device that is not known.
            UsageError: as `Pass.__call__`, or the streams of options and program do not fit together.
        """
        given = gm.meta.get("streams")
        self.use(given if isinstance(given, StreamSettings) else None)
        self.schedule = None
        return super().__call__(gm)

    def rewrite(self, graph: fx.Graph) -> Iterable[fx.Node]:
        """Plan first, then lower. See `Pass.rewrite`."""
        try:
            parts = self.read(graph)
            schedule = self.plan(parts)
            joins = plan_joins(parts, schedule.join)
        except NotLowered as why:
            log.info("a graph keeps its one stream: %s", why)
            return []
        if not self.beats_serial(schedule):
            log.info("a graph keeps its one stream: it takes %.3g s that way", schedule.serial_s)
            return []
        self.lower(StreamLowering(graph, parts, schedule), joins)
        self.schedule = schedule
        return []

    # ------------------------------------------------------------------------------------------------------- planning

    def read(self, graph: fx.Graph) -> StreamGraph:
        """Analyse the graph. Raises `NotLowered`."""
        if any(node.op == "call_function" and lookup(node.target).name in ANCHORS for node in graph.nodes):
            raise NotLowered("it is lowered already")
        for node in graph.nodes:
            op = lookup(node.target) if node.op == "call_function" else None
            if op is not None and (op.phase is not None or op.effect):
                raise NotLowered(
                    f"'{node.name}' calls {op.name}, which {'has effects' if op.effect else 'is asynchronous'}"
                )
        specs = infer_specs(graph)
        costs = {}
        for node in specs:
            if node.op == "call_function" and not is_host(node, specs):
                costs[node] = self.cost_s(node), self.resources(node)
        return take_apart(graph, specs, costs)

    def cost_s(self, node: fx.Node) -> float:
        """Seconds that a work node takes. Raises `NotLowered` if unknown."""
        given = node.meta.get("cost_s")
        if given is not None and (type(given) not in (int, float) or not abs(given) <= sys.float_info.max):
            raise NotLowered(f"the cost of '{node.name}' is {str(given)[:40]}, which is not a time")
        cost = node_cost(node, self.profile)
        if cost is None:
            raise NotLowered(f"'{node.name}' has no cost, and no device is given to estimate it for")
        return cost

    def resources(self, node: fx.Node) -> tuple[str, ...]:
        """The resources that a work node occupies."""
        return lookup(node.target).resources

    def busy(self, op: WorkOp) -> Sequence[str]:
        """The resources that the schedule gives to an op alone."""
        return op.resources

    def edges(self, parts: StreamGraph) -> list[OrderEdge]:
        """The orders that the schedule keeps."""
        return list(edges_of(parts))

    def synchronises(self, edge: OrderEdge) -> bool:
        """Whether a token enforces an order if it crosses streams."""
        return True

    def overhead_s(self) -> float:
        """The synchronisation overhead that the schedule counts."""
        return self.settings.sync_overhead_s

    def plan(self, parts: StreamGraph) -> StreamSchedule:
        """Return the fastest schedule of those tried. Raises `NotLowered` when none can be written into the graph."""
        edges = self.edges(parts)
        before = predecessors(len(parts.work), edges)
        synchronised = predecessors(len(parts.work), [edge for edge in edges if self.synchronises(edge)])
        kept = mutated_after(parts)
        join = self.joined(parts)

        def allowed(op: WorkOp, placed: Mapping[int, PlacedOp]) -> Sequence[int]:
            return self.allowed_streams(op, {placed[first].stream for first in kept[op.index]})

        best: StreamSchedule | None = None
        refusal = NotLowered("it does nothing")
        for order in self.orders(parts, before):
            try:
                found = list_schedule(order, before, allowed, self.busy, self.overhead_s(), synchronised, join)
            except NotLowered as why:
                refusal = why
                continue
            if best is None or found.makespan_s < best.makespan_s:
                best = found
        if best is None:
            raise refusal
        return best

    def orders(self, parts: StreamGraph, before: Sequence[Sequence[int]]) -> list[Sequence[WorkOp]]:
        """The orders of issue to try: by decreasing rank, by when ops can start, and as they stand."""
        if not parts.work:
            return []
        overhead = self.overhead_s()
        ranks = upward_ranks(parts.work, before, overhead)
        return [rank_order(parts.work, ranks), start_order(parts.work, before, ranks, overhead), parts.work]

    def allowed_streams(self, op: WorkOp, kept: set[int]) -> Sequence[int]:
        """The streams on which an op may run.

        Args:
            kept: the streams of the ops that wrote before it into what it writes into.

        Raises:
            NotLowered: it would leave the stream of what it writes into.
        """
        streams = self.settings.comm if op.resources == ("comm",) else self.settings.compute
        if not op.mutates or not kept:
            return streams
        if len(kept) > 1 or not kept <= set(streams):
            raise NotLowered(f"'{op.node.name}' writes into a value of a stream on which it may not run")
        return tuple(kept)

    def joined(self, parts: StreamGraph) -> list[int]:
        """The ops that the output follows: the last writers of outputs and of inputs."""
        return last_writers(parts, joined_storages(parts))

    def beats_serial(self, schedule: StreamSchedule) -> bool:
        """Whether the schedule is worthwhile."""
        return schedule.makespan_s < schedule.serial_s

    # ------------------------------------------------------------------------------------------------------- lowering

    def lower(self, state: StreamLowering, joins: Mapping[fx.Node, tuple[int, ...]]) -> None:
        """Write the schedule into the graph."""
        output = state.parts.output
        with state.graph.inserting_before(output):
            state.issue_inputs()
            for placed in self.issued(state.schedule):
                self.issue(state, placed)
            for node, tokens in joins.items():
                wait = self.wait(state, node, MAIN_STREAM, [state.records[token] for token in tokens], node)
                output.replace_input_with(node, wait)
        output.meta["schedule"] = state.schedule.declared()
        moved = sum(1 for number, placed in enumerate(state.schedule.placed) if placed.op.index != number)
        self.rewrites.update(lowered=1, moved=moved, waits=state.waits)

    def issued(self, schedule: StreamSchedule) -> Sequence[PlacedOp]:
        """The order in which ops stand in the lowered graph."""
        return schedule.placed

    def issue(self, state: StreamLowering, placed: PlacedOp) -> None:
        """Move one op behind everything issued so far, with its wait and its record."""
        node = placed.op.node
        self.gate(state, placed)
        state.parts.output.prepend(node)
        node.meta["cost_s"] = placed.op.cost_s
        state.records[placed.op.index] = self.record(state, placed)
        state.issue_hosts_of(node)

    def gate(self, state: StreamLowering, placed: PlacedOp) -> None:
        """Insert the wait of an op: where it needs tokens, and to bind it to a stream other than the main one."""
        node, tokens = placed.op.node, self.tokens(state, placed)
        carrier = self.carrier(state, placed)
        if carrier is not None and (tokens or placed.stream != MAIN_STREAM):
            wait = self.wait(state, carrier, self.wait_stream(placed), tokens, node)
            node.replace_input_with(carrier, wait)

    def tokens(self, state: StreamLowering, placed: PlacedOp) -> list[fx.Node]:
        """The tokens that an op waits for."""
        return [state.records[token] for token in placed.tokens]

    def carrier(self, state: StreamLowering, placed: PlacedOp) -> fx.Node | None:
        """The operand that is gated: one that comes from an op that is waited for, if there is one."""
        carriers = placed.op.carriers
        for carrier in carriers:
            if not set(placed.tokens).isdisjoint(state.parts.producers[carrier]):
                return carrier
        return carriers[0] if carriers else None

    def wait_stream(self, placed: PlacedOp) -> int:
        """The stream that the wait of an op names."""
        return placed.stream

    def record_stream(self, placed: PlacedOp) -> int:
        """The stream that the record of an op names."""
        return placed.stream

    def record(self, state: StreamLowering, placed: PlacedOp) -> fx.Node:
        """Insert the record of an op and return its token."""
        return self.token(state, self.recorded(state, placed), self.record_stream(placed), placed.op.node)

    def recorded(self, state: StreamLowering, placed: PlacedOp) -> fx.Node:
        """What is recorded: the result of the op, or an item of it."""
        node = placed.op.node
        if placed.op.item is None:
            return node
        item = state.item_of(node)
        if item is not None:
            state.issue_item(item)
            return item
        item = state.graph.create_node(
            "call_function", operator.getitem, (node, placed.op.item), name=f"{node.name}_item"
        )
        item.meta["val"] = node.meta["val"][placed.op.item]
        return item

    def wait(
        self, state: StreamLowering, value: fx.Node, stream: int, tokens: list[fx.Node], reader: fx.Node
    ) -> fx.Node:
        """Insert a wait for `reader`, which takes it in the place of `value`."""
        state.waits += 1
        wait = self.insert(state, WAIT, (value, stream, tokens), f"{reader.name}_wait")
        self.describe(wait)
        return wait

    def token(self, state: StreamLowering, value: fx.Node, stream: int, op: fx.Node) -> fx.Node:
        """Insert the record of what produced `value`."""
        token = self.insert(state, RECORD, (value, stream), f"{op.name}_record")
        self.describe(token)
        return token

    def insert(self, state: StreamLowering, op: str, args: tuple[Any, ...], name: str) -> fx.Node:
        """Insert a call behind everything issued so far."""
        return state.graph.create_node("call_function", resolve(op), args, name=name)

    def describe(self, node: fx.Node) -> None:
        """Say what an inserted node produces."""
        infer_metadata(node)

    # -------------------------------------------------------------------------------------------------------- options

    def use(self, given: StreamSettings | None) -> None:
        """Take the options, and the rest from the program. Raises `UsageError` for streams or a device that cannot be."""
        chosen = dict(self._chosen)
        if given is not None:
            chosen.pop("sync_overhead_s", None)
        try:
            self.settings = replace(given or StreamSettings(), **chosen)
        except ProgramError as error:
            raise UsageError(f"pass '{self.name}': {error.message}", "streams are as in compute=0,comm=1+2") from None
        name = self.settings.device
        try:
            self.profile: DeviceProfile | None = None if name is None else device_profile(name)
        except UsageError as error:
            if "device" in self._chosen:
                raise
            raise Unsupported(f"pass '{self.name}': {error.message}", error.hint) from None

    def _roles(self, value: object) -> dict[str, tuple[int, ...]]:
        roles: dict[str, tuple[int, ...]] = {}
        for part in str(value).split(","):
            role, equals, ids = part.strip().partition("=")
            numbers = ids.split("+")
            if (
                role not in ("compute", "comm")
                or role in roles
                or not equals
                or not all(i.strip().isdecimal() for i in numbers)
            ):
                raise UsageError(
                    f"option streams of pass '{self.name}' cannot be {value!r}",
                    "give the ids of the streams of each role, as in compute=0,comm=1+2",
                )
            roles[role] = tuple(int(i) for i in numbers)
        return roles

    def _seconds(self, value: object) -> float:
        try:
            seconds = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            seconds = math.nan
        if not 0 <= seconds < 1e6:
            raise UsageError(
                f"option sync_overhead_s of pass '{self.name}' cannot be {value!r}", "give it in seconds, such as 5e-6"
            )
        return seconds


__all__ = ["Multistream"]
