"""Host programs: promises about the streams of host IR, and ops that a lowering must not leave behind."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from tcverify.checks.evidence import Evidence
from tcverify.checks.host_ir.races import host_races_of, stream_around, stream_words
from tcverify.checks.streams.anchors import lowered_ranks
from tcverify.checks.streams.races import clocks_of
from tcverify.checks.streams.reading import BEGINNING, StreamReading
from tcverify.ops import lookup
from tcverify.ops.dialects.multidevice import REDUCE, SET
from tcverify.program import Contract, Program
from tcverify.program.finding import Doubt, Finding
from tcverify.program.stream_options import MAIN_STREAM

CHECK = "host-program"


def check_host_program(evidence: Evidence) -> list[Finding | Doubt]:
    """Report invalid worker streams, a caller's stream that is not restored, workers that do not wait for it, and ops
    that a lowering left behind.

    One finding per kind: the first on the lowest rank. Without the promises `streams` and `lowered`, only indices that no
    stream can have are reported.
    """
    rewritten = evidence.pair.rewritten
    if rewritten is None or not evidence.pair.changed:
        return []
    found: dict[str, Finding] = {}
    for reading, ranks in lowered_ranks(rewritten):
        if reading.host:
            for finding in _of_streams(reading, evidence.contract, ranks[0]):
                found.setdefault(finding.kind, finding)
    if evidence.contract.lowered:
        for finding in _left(rewritten):
            found.setdefault(finding.kind, finding)
    return list(found.values())


# ------------------------------------------------------------------------------------------------------------- streams


def _of_streams(reading: StreamReading, contract: Contract, rank: int) -> Iterator[Finding]:
    promised = contract.streams
    if reading.conflicts:  # it is not known which streams are meant
        return
    for number, index in reading.workers.items():
        if index < 0 or (promised is not None and index >= promised):
            yield _bad_index(reading.names[number], index, promised, rank)
            break
    if promised is None:
        return
    if reading.left_on != MAIN_STREAM and reading.output is not None:
        title = f"{stream_words(reading, reading.left_on)} is current at the end, not the caller's stream"
        missing = "missing: set_current_stream of what current_stream returned before the first worker"
        yield Finding(
            "stream-not-restored", CHECK, title, missing, _last_switch(reading), rank, {"stream": reading.left_on}
        )
    unbound = _unsynchronised(reading, contract, rank)
    if unbound is not None:
        yield unbound


def _bad_index(name: str, index: int, promised: float | None, rank: int) -> Finding:
    if index < 0:
        title, detail = f"'{name}' names worker stream {index}: indices begin at 0", ""
    else:
        title = f"'{name}' names worker stream {index}, and there are {promised:g}"
        detail = f"the pass promises indices below {promised:g}: a loop takes its trip modulo that"
    return Finding("stream-index", CHECK, title, detail, name, rank, {"index": index, "streams": promised})


def _last_switch(reading: StreamReading) -> str | None:
    return reading.names[reading.switches[-1]] if reading.switches else None


def _unsynchronised(reading: StreamReading, contract: Contract, rank: int) -> Finding | None:
    """The first op of the first worker that does not wait for the caller's stream, unless a race reports it already."""
    clocks = clocks_of(reading)
    seen = {MAIN_STREAM}
    raced: set[int] | None = None
    for index, op in enumerate(reading.ops):
        if op.queued_on in seen:
            continue
        seen.add(op.queued_on)
        if clocks.ordered(BEGINNING, index):
            continue
        if raced is None:
            races = host_races_of(reading, clocks, contract)
            on_caller = (r for r in races if r.first == BEGINNING or reading.ops[r.first].queued_on == MAIN_STREAM)
            raced = {reading.ops[race.second].queued_on for race in on_caller if race.second is not None}
        if op.queued_on in raced:
            continue
        title = (
            f"'{op.name}' is the first op on {stream_words(reading, op.queued_on)}, which has not been synchronised with the "
            "caller's stream"
        )
        missing = f"missing: synchronize with the caller's stream before '{op.name}', while its own stream is current"
        data = {"first": op.name, "stream": op.queued_on}
        lines = f"{missing}\n{stream_around(reading, op)}"
        return Finding("worker-not-synchronised", CHECK, title, lines, op.name, rank, data)
    return None


# ------------------------------------------------------------------------------------------------------ what is left


def _left(program: Program) -> Iterator[Finding]:
    """What the promise of a lowering excludes, on the lowest rank that has it."""
    ranks: dict[int, int] = {}
    for rank, binding in enumerate(program.ranks):
        ranks.setdefault(binding.graph, rank)
    for number, rank in ranks.items():
        nodes = list(program.graphs[number].nodes)
        left = next((node for node in nodes if _reshards(node)), None)
        if left is not None:
            name = lookup(left.target).name
            title = f"'{left.name}' ({name}) is not lowered"
            asked = [arg for arg in left.args if isinstance(arg, str)]
            detail = f"it takes {' to '.join(map(repr, asked[-2:]))}" if len(asked) > 1 else ""
            yield Finding("resharding-left", CHECK, title, detail, left.name, rank, {"op": name})
        axis = next((node for node in nodes if type(node.meta.get("stream_axis")) is int), None)
        if axis is not None:
            dim = axis.meta["stream_axis"]
            title = f"dim {dim} of '{axis.name}' is a stream axis, but no loop runs over it"
            yield Finding("stream-axis-left", CHECK, title, "", axis.name, rank, {"dim": dim})


def _reshards(node: fx.Node) -> bool:
    return node.op == "call_function" and lookup(node.target).name in (SET, REDUCE)


__all__ = ["check_host_program"]
