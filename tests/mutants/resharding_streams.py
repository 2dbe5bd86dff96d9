"""Pipelines and stream-parallel loops with one defect put back in each class: waits, streams, steps and parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import fx

from tcverify.ops.dialects.host_ir import COMMUNICATION_WAIT, CURRENT_STREAM, SET_STREAM, STREAM, SYNCHRONIZE
from tcverify.passes.editing import op_name
from tcverify.passes.resharding.layouts import resharding_of
from tcverify.passes.resharding.pipelined import PipelinedMatmul
from tcverify.passes.resharding.pipelined.gather import Gathering
from tcverify.passes.resharding.pipelined.scatter import Scattering
from tcverify.passes.resharding.pipelined.steps import StepStreams, copy, select, shifted_targets
from tcverify.passes.resharding.stream_axes import SlicedOp
from tcverify.passes.resharding.stream_loops import StreamParallelType
from tcverify.passes.resharding.writing import HostWriter
from tests.mutants.resharding import Mutant


class Edited(Mutant):
    """The sound passes, whose program is edited afterwards."""

    def rewrite(self, graph: fx.Graph) -> Iterable[fx.Node]:
        displaced = super().rewrite(graph)
        self.edit(graph)
        return displaced

    def edit(self, graph: fx.Graph) -> None:
        raise NotImplementedError


def _of(graph: fx.Graph, *names: str) -> list[fx.Node]:
    return [node for node in graph.nodes if op_name(node) in names]


def _token(node: fx.Node) -> fx.Node:
    (token,) = node.all_input_nodes
    return token


# ---------------------------------------------------------------------------------------------------------------- waits


class LastWaitForgotten(Edited):
    """The last communication of a rank is not waited for."""

    def edit(self, graph: fx.Graph) -> None:
        for wait in _of(graph, COMMUNICATION_WAIT)[-1:]:
            graph.erase_node(wait)


class WaitsForTheOneBefore(Edited):
    """The last wait names the communication before the one whose result is read next."""

    def edit(self, graph: fx.Graph) -> None:
        waits = _of(graph, COMMUNICATION_WAIT)
        if len(waits) > 1:
            waits[-1].update_arg(0, waits[-2].args[0])


class WaitsOnTheCallersStream(Edited):
    """A worker posts a communication and uses its result, and the stream that waits is the caller's."""

    def edit(self, graph: fx.Graph) -> None:
        writer, current, caller = HostWriter(graph), None, None
        for node in list(graph.nodes):
            if op_name(node) == CURRENT_STREAM:
                caller = caller or node
            elif op_name(node) == SET_STREAM:
                current = _token(node)
            elif op_name(node) == COMMUNICATION_WAIT and caller is not None and current not in (None, caller):
                with writer.before(node):
                    writer.set_stream(caller)
                with writer.before(node.next):
                    writer.set_stream(current)


# -------------------------------------------------------------------------------------------------------------- streams


class NoInitialSync(Edited):
    """Workers begin without waiting for the caller's stream."""

    def edit(self, graph: fx.Graph) -> None:
        for sync in _of(graph, SYNCHRONIZE):
            if op_name(_token(sync)) == CURRENT_STREAM:
                graph.erase_node(sync)


class LastWorkerNotJoined(Edited):
    """Where the trips are no multiple of the workers, the caller's stream does not wait for the worker of the last one."""

    def edit(self, graph: fx.Graph) -> None:
        joins = [sync for sync in _of(graph, SYNCHRONIZE) if op_name(_token(sync)) == STREAM]
        workers = {_token(join) for join in joins}
        if joins and (len(workers) == 1 or len(joins) % len(workers)):
            graph.erase_node(joins[-1])


class CallersStreamNotRestored(Edited):
    """Behind the last trip the caller's stream is not current again."""

    def edit(self, graph: fx.Graph) -> None:
        switches = [switch for switch in _of(graph, SET_STREAM) if op_name(_token(switch)) == CURRENT_STREAM]
        for switch in switches[-1:]:
            graph.erase_node(switch)


class OneStreamTooMany(Mutant):
    """Trips take the index modulo one more than there are streams."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for stage in self.stages:
            if isinstance(stage, StreamParallelType):
                stage.number_of_streams += 1
            elif isinstance(stage, PipelinedMatmul):
                stage.streams = StepStreams(stage.streams.number + 1)


# ------------------------------------------------------------------------------------------------------------ pipelines


class PointToPoint(Mutant):
    """The sound passes with pipelines in the point-to-point form."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"form": "p2p", "reduce_form": "p2p", **options})


class Ring(Mutant):
    """The sound passes with pipelines that go round a ring."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"form": "ring", "reduce_form": "ring", **options})


class OthersPeer(PointToPoint):
    """In step i, what belongs to the rank i further on is taken from the rank i further back."""

    class stage(PipelinedMatmul):
        class gathering(Gathering):
            def point_to_point(self, chunk: int) -> None:
                team = self.found.team
                for step in range(len(team)):
                    with self.loop.step():
                        owner = (self.position + step) % len(team)
                        mine, part = (
                            select(self.writer, self.a, chunk, 0),
                            select(self.writer, self.whole, chunk, owner),
                        )
                        if step == 0:
                            copy(self.writer, part, mine)
                        else:
                            targets = shifted_targets(len(team), step)
                            self.writer.communicate("permute", mine, targets, list(team), out=part)
                        self.multiply(part, chunk, owner)


class OwnChunkNotCopied(PointToPoint):
    """Where a rank is its own peer, nothing happens: its chunk of what is gathered stays as it was allocated."""

    class stage(PipelinedMatmul):
        class gathering(Gathering):
            def point_to_point(self, chunk: int) -> None:
                team = self.found.team
                for step in range(len(team)):
                    with self.loop.step():
                        owner = (self.position + step) % len(team)
                        mine, part = (
                            select(self.writer, self.a, chunk, 0),
                            select(self.writer, self.whole, chunk, owner),
                        )
                        if step:
                            targets = shifted_targets(len(team), -step)
                            self.writer.communicate("permute", mine, targets, list(team), out=part)
                        self.multiply(part, chunk, owner)


class RingOffByOne(Ring):
    """The chunk that a step of the ring multiplies is written where the next one belongs."""

    class stage(PipelinedMatmul):
        class gathering(Gathering):
            def multiply(self, part: fx.Node, *at: int) -> None:
                chunk, owner = at
                super().multiply(part, chunk, (owner + 1) % len(self.found.team))


class ChunksInReverse(Mutant):
    """The sums of a pipelined reduce_scatter lie in the chunks of the result from the last to the first."""

    class stage(PipelinedMatmul):
        class scattering(Scattering):
            def part(self, chunk: int) -> fx.Node:
                return super().part(self.found.total.shape[0] - 1 - chunk if self.found.scattered else chunk)


class PartsOfTheNextRank(PointToPoint):
    """A rank multiplies the part that the rank behind the receiver sums."""

    class stage(PipelinedMatmul):
        class scattering(Scattering):
            def multiply(self, chunk: int, owner: int | None = None) -> fx.Node:
                return super().multiply(chunk, owner if owner is None else (owner + 1) % len(self.found.team))


class AddendsOverwritten(Ring):
    """What comes round the ring is replaced by the rank's own addend, and not added to it."""

    class stage(PipelinedMatmul):
        class scattering(Scattering):
            def ring(self, chunk: int) -> None:
                team, size = list(self.found.team), len(self.found.team)
                posted: fx.Node | None = None
                for step in range(size):
                    with self.loop.step():
                        value = self.multiply(chunk, (self.position - 1 - step) % size)
                        if posted is not None:
                            self.writer.wait(posted)
                        if step + 1 < size:
                            into = self.writer.allocate(value.meta["val"].shape, value.meta["val"].dtype)
                            posted = self.writer.call(
                                "host_ir::permute", value, shifted_targets(size, 1), team, out=into
                            )
                        else:
                            copy(self.writer, self.part(chunk), value)


# ---------------------------------------------------------------------------------------------------------------- loops


class ReadsAtTheNextIndex(Mutant):
    """In trip i operands are read at index i + 1."""

    class stage(StreamParallelType):
        class writer(HostWriter):
            def call(self, op: str, *args: Any, **kwargs: Any) -> fx.Node:
                if op == "aten::select.int" and op_name(args[0]) not in ("aten::empty.memory_format", "aten::permute"):
                    x, dim, index = args
                    args = x, dim, (index + 1) % x.meta["val"].shape[dim]
                return super().call(op, *args, **kwargs)


class LastTripLeftOut(Mutant):
    """A loop makes one trip too few."""

    class stage(StreamParallelType):
        def cut(self, node: fx.Node, axis: int) -> SlicedOp:
            found = super().cut(node, axis)
            return replace(found, trips=max(found.trips - 1, 0))


class WritesAlongTheFirstAxis(Mutant):
    """What a trip computes is written at its index in dim 0 of the output, where that has as many positions."""

    class stage(StreamParallelType):
        def cut(self, node: fx.Node, axis: int) -> SlicedOp:
            found = super().cut(node, axis)
            fits = axis and found.local is not None and found.local.shape[0] == found.local.shape[axis]
            return replace(found, axis=0) if fits else found


class SeveralOperandsPassedOver(Mutant):
    """Ops with several operands keep their stream axis, and are computed at once."""

    class stage(StreamParallelType):
        def rewrite(self, graph: fx.Graph) -> Iterable[fx.Node]:
            kept = dict(_marked(graph))
            displaced = super().rewrite(graph)
            for node, axis in kept.items():
                node.meta["stream_axis"] = axis
            return displaced


def _marked(graph: fx.Graph) -> Iterator[tuple[fx.Node, Any]]:
    for node in graph.nodes:
        several = len(node.all_input_nodes) > 1 and resharding_of(node) is None
        if several and "stream_axis" in node.meta:
            yield node, node.meta.pop("stream_axis")


_RACES = frozenset({"race", "async-race"})
_VALUES = frozenset({"wrong-value", "wrong-shape"})

#: The kinds of findings, one of which each defect shows.
EXPECTED: dict[str, frozenset[str]] = {
    "LastWaitForgotten": _RACES | {"missing-wait", "wrong-value"},
    "WaitsForTheOneBefore": _RACES | {"missing-wait", "wrong-value", "rewritten-raises"},
    "WaitsOnTheCallersStream": _RACES | {"wrong-value"},
    "NoInitialSync": frozenset({"race", "worker-not-synchronised"}),
    "LastWorkerNotJoined": frozenset({"race"}),
    "CallersStreamNotRestored": frozenset({"stream-not-restored"}),
    "OneStreamTooMany": frozenset({"stream-index"}),
    "OthersPeer": _VALUES,
    "OwnChunkNotCopied": _VALUES,
    "RingOffByOne": _VALUES,
    "ChunksInReverse": _VALUES,
    "PartsOfTheNextRank": _VALUES,
    "AddendsOverwritten": _VALUES,
    "ReadsAtTheNextIndex": _VALUES,
    "LastTripLeftOut": _VALUES,
    "WritesAlongTheFirstAxis": _VALUES | {"pass-raised"},
    "SeveralOperandsPassedOver": frozenset({"stream-axis-left"}),
}

MUTANTS: dict[str, type[Mutant]] = {name: globals()[name] for name in EXPECTED}
