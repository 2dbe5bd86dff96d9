"""Shows what runs while communication is in flight: an asynchronous graph as text, and as a trace for Perfetto."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from torch import fx

from tcverify.cost import DeviceProfile
from tcverify.cost import load_device_profile as device_profile
from tcverify.errors import UsageError
from tcverify.passes.base import Pass
from tcverify.passes.overlap.graph import CommGraph, comm_graph
from tcverify.passes.overlap.runtimes import runtimes
from tcverify.passes.overlap.timeline import OrderTimeline, Tasks, replay_order, tasks, to_seconds
from tcverify.program import Contract

log = logging.getLogger(__name__)

#: Columns of the text.
WIDTH = 100
#: Largest number of collectives in flight that are drawn, one per column.
LANES = 8
_NAME = 34


class VisualizeOverlap(Pass):
    """Shows what runs while communication is in flight, and changes nothing. Times come from `runtimes`.

    Args:
        output: file to write: a trace for Perfetto or chrome://tracing where it ends in ".json", else text. Every call overwrites
            it. Unless given, the text goes to the log.
        device: name of a device profile, or the path of one in TOML, for nodes without a cost of their own; the one that the
            program names unless given.
        options: those of `Pass`.

    Raises:
        UsageError: the file cannot be written.
    """

    name = "visualize_overlap"
    contract: ClassVar[Contract] = Contract(
        metadata=True,
        idempotent=True,
        identity=True,
        order=True,
        collective_order=True,
        memory_budget=0.0,
        overlap=True,
    )

    def __init__(
        self, *, output: str | os.PathLike[str] | None = None, device: str | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self.output = None if output is None else Path(output)
        self.profile: DeviceProfile | None = None if device is None else device_profile(device)

    def rewrite(self, graph: fx.Graph) -> Iterable[fx.Node]:
        """Show `graph`. See `Pass.rewrite`."""
        found = comm_graph(graph)
        if self.output is None:
            log.info("%s", visualize_overlap(found, self.profile))
            return []
        as_trace = self.output.suffix == ".json"
        text = (
            json.dumps(overlap_trace(found, self.profile), indent=1)
            if as_trace
            else visualize_overlap(found, self.profile)
        )
        try:
            self.output.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"pass '{self.name}' cannot write to {self.output}: {error.strerror or error}",
                "give option output a writable file",
            ) from error
        return []


def visualize_overlap(found: CommGraph, device: DeviceProfile | None = None) -> str:
    """Return a graph as text, one line for each node that does something, in order of issue.

    Columns: when it is issued, in µs; the collectives in flight, one column each, from "╷" where one starts to "╵" where it is
    waited for; the node and how long it takes; how long it blocks compute. Unknown times are omitted.

    Args:
        device: see `runtimes`.
    """
    times = runtimes(found, device)
    work = tasks(found, times)
    replayed = replay_order(work, range(len(found.nodes)))
    lines = [_heading(work, replayed)]
    lanes: list[int | None] = []
    for span in replayed.spans:
        node = found.nodes[span.node]
        queue = work.queues[span.node]
        if queue == "compute" and found.kind(node) == "free":
            continue
        marks = _marks(work, lanes, span.node)
        takes = f"{to_seconds(work.costs[span.node]) * 1e6:9.4g}" if work.timed and queue != "wait" else " " * 9
        issued = f"{to_seconds(span.issued) * 1e6:11.6g}" if work.timed else " " * 11
        held = span.end - span.issued if queue == "wait" else span.begin - span.issued if queue == "both" else 0
        stall = f"  exposed {to_seconds(held + (work.costs[span.node] if queue == 'both' else 0)) * 1e6:.4g}"
        text = f"{issued}  {marks:{LANES}}  {_short(node.name):{_NAME}}  {queue:7}{takes}"
        lines.append((text + stall if held or (queue == "both" and work.timed) else text).rstrip()[:WIDTH])
    if work.timed:
        joined = f"  exposed {to_seconds(replayed.joined) * 1e6:.4g}" if replayed.joined else ""
        lines.append(f"{to_seconds(replayed.makespan) * 1e6:11.6g}  {'':{LANES}}  {'end':{_NAME}}{joined}".rstrip())
    return "\n".join(lines)


def _heading(work: Tasks, replayed: OrderTimeline) -> str:
    starts = f"{len(work.waits)} asynchronous collective{'s' * (len(work.waits) != 1)}"
    if not work.timed:
        return f"{starts}; times are not known"
    makespan, exposed = (f"{to_seconds(time) * 1e6:.6g} µs" for time in (replayed.makespan, replayed.exposed))
    return f"{starts}; {makespan} in all, of which {exposed} without compute"


def _marks(work: Tasks, lanes: list[int | None], number: int) -> str:
    """The column of collectives next to a node; `lanes` gives the collective of each column."""
    ending = set()
    if work.queues[number] == "start":
        free = lanes.index(None) if None in lanes else len(lanes)
        lanes[free : free + 1] = [number]
    elif work.queues[number] == "wait":
        ending = {start for start in work.awaited[number] if start in lanes}
    drawn = [" " if each is None else "╷" if each == number else "╵" if each in ending else "│" for each in lanes]
    lanes[:] = [None if each in ending else each for each in lanes]
    while lanes and lanes[-1] is None:
        lanes.pop()
    return "".join(drawn) if len(drawn) <= LANES else f"{''.join(drawn[: LANES - 1])}…"


def _short(name: str) -> str:
    return name if len(name) <= _NAME else f"{name[: _NAME - 1]}…"


def overlap_trace(found: CommGraph, device: DeviceProfile | None = None) -> dict[str, Any]:
    """Return a graph as a trace in Chrome's format: a lane for compute, where waits stand as long as they hold it up, and one for
    communication, with an arrow from each start to the first wait for it. Empty where times are not known.

    Args:
        device: see `runtimes`.
    """
    work = tasks(found, runtimes(found, device))
    if not work.timed:
        return {"displayTimeUnit": "ns", "traceEvents": []}
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": lane, "args": {"name": name}}
        for lane, name in enumerate(("compute", "communication"))
    ]
    waited: set[int] = set()
    for span in replay_order(work, range(len(found.nodes))).spans:
        node = found.nodes[span.node]
        queue = work.queues[span.node]
        begin, issued = to_seconds(span.begin) * 1e6, to_seconds(span.issued) * 1e6
        lasts = to_seconds(span.end - span.begin) * 1e6
        for lane in {"compute": (0,), "wait": (0,), "start": (1,), "both": (0, 1)}[queue]:
            if lasts or queue == "start":
                events.append(
                    {"name": node.name, "cat": queue, "ph": "X", "pid": 0, "tid": lane, "ts": begin, "dur": lasts,
                     "args": {"op": str(node.target), "issued_us": issued}}
                )  # fmt: skip
        if queue == "start":
            events.append({"name": "under way", "ph": "s", "id": span.node, "pid": 0, "tid": 1, "ts": begin})
        for start in work.awaited.get(span.node, ()):
            if start not in waited:
                waited.add(start)
                end = {"name": "under way", "ph": "f", "bp": "e", "id": start, "pid": 0, "tid": 0}
                events.append({**end, "ts": to_seconds(span.end) * 1e6})
    return {"displayTimeUnit": "ns", "traceEvents": events}


__all__ = ["WIDTH", "VisualizeOverlap", "overlap_trace", "visualize_overlap"]
