"""How AOTAutograd keeps the order of streams that a user synchronises.

Code that runs parts of a model on CUDA streams of its own waits for what another stream computes: by events, for a whole
stream, or on the host. None of these reads a tensor, so AOTAutograd ties them to the nodes around them, which a compiler may
order anew. The nodes of a program are read as such code; options say on which stream each runs, and how the user waits.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from tcverify.ops import lookup
from tcverify.program.stream_options import MAIN_STREAM
from tcverify.pytorch.base import TorchPass
from tcverify.pytorch.end_to_end.pipeline import Pipeline
from tcverify.pytorch.streams import (
    COMMUNICATION,
    Anchored,
    device,
    is_alias,
    is_annotated,
    reorder,
    require_traced,
    stream_of,
)


class UserStreams(TorchPass):
    """`wrap_all_sync_nodes_with_control_deps`.

    Options:
        streams: how many there are; that of the caller is one of them.
        run: how many nodes in a row have the same stream.
        annotated: which nodes say where they run. "side": those that do not run on the stream of the caller. "all": all.
        waits: by what a stream waits for another one; "mixed": in turn by all.
        events: how many there are. "each": one for each record. "stream": one for each stream that is recorded. "one": one.
        place: where the user waits. "reader": right in front of the first reader, where the event is recorded as well. "apart":
            there, but events are recorded right behind what is computed. "producer": right behind what is computed.
        order: in which the host issues the nodes. "late", "early": events are moved as far as their ties allow, as a compiler may
            do. "apart": records are moved to the front and waits to the back. "traced": as the user wrote it.
    """

    name = "torch:user_streams"

    def rewrite(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> None:
        if not run_on_streams(gm, options):
            return
        if options["order"] != "traced":
            with device():
                reorder(gm, options["order"])
        Anchored(gm.graph, {}).write()
        gm.recompile()

    @classmethod
    def pipeline(cls, options: Mapping[str, Any]) -> Pipeline:
        return Pipeline(unreachable="compiled code runs on several streams on a GPU alone")


def run_on_streams(gm: fx.GraphModule, options: Mapping[str, Any]) -> bool:
    """Annotate the nodes of a graph with streams, and have these wait for each other.

    Returns:
        Whether it was done: a graph that says where its ops run is left alone.

    Raises:
        Unsupported: a node is none that AOTAutograd traces.
    """
    if is_annotated(gm.graph):
        return False
    number = itertools.count()
    for node in [node for node in gm.graph.nodes if node.op == "call_function"]:
        require_traced(node)
        if node.target is operator.getitem:
            stream = stream_of(node.args[0])
        else:
            turn = next(number) // options["run"] % options["streams"]
            stream = COMMUNICATION if lookup(node.target).collective else turn
        node.meta["custom"] = {"stream": stream} if stream != MAIN_STREAM or options["annotated"] == "all" else {}
    _Waits(gm.graph, options).write()
    return True


class _Waits:
    """Synchronises the streams of a graph as a careful user does: before a node runs, its stream waits for all that it reads."""

    def __init__(self, graph: fx.Graph, options: Mapping[str, Any]) -> None:
        self._graph = graph
        self._events = options["events"]
        self._number = itertools.count()
        # One event for all is recorded where it is waited for, lest another record replaces it.
        self._place = "reader" if self._events == "one" and options["place"] == "apart" else options["place"]
        self._forms: Iterator[str] = itertools.cycle(FORMS if options["waits"] == "mixed" else (options["waits"],))
        self._given: dict[int, list[fx.Node]] = defaultdict(list)  # stream -> what it runs so far
        self._host: set[fx.Node] = set()  # what is done when the host goes on
        # stream -> what is done when it goes on
        self._known: dict[int, set[fx.Node]] = defaultdict(lambda: set(self._host))
        # node -> the event behind it, and what that covers
        self._recorded: dict[fx.Node, tuple[int, set[fx.Node]]] = {}

    def write(self) -> None:
        """Write the calls of events."""
        output = self._graph.output_node()
        for node in [node for node in self._graph.nodes if node.op == "call_function" and not is_alias(node)]:
            stream = stream_of(node)
            for producer in _producers(node):
                self._wait(producer, stream, node)
            self._given[stream].append(node)
            readers = [one for one in _consumers(node) if one is output or stream_of(one) != stream]
            if readers and self._place == "apart":
                self._record(node, node.next)
            elif self._place == "producer":
                for one in readers:
                    self._wait(node, MAIN_STREAM if one is output else stream_of(one), node.next)
        for producer in _producers(output):
            self._wait(producer, MAIN_STREAM, output)

    def _wait(self, producer: fx.Node, stream: int, place: fx.Node) -> None:
        """Let a stream wait for a node, if it has not, by calls in front of a place."""
        source = stream_of(producer)
        if source == stream or producer in self._known[stream]:
            return
        form = next(self._forms)
        done = self._covered(source)
        match form:
            case "event":
                event, done = self._recorded.get(producer) or self._record(producer, place)
                self._call(place, "wait_event", event, stream)
            case "synchronize_event":
                event, done = self._recorded.get(producer) or self._record(producer, place)
                self._call(place, form, event)
            case "wait_stream":
                self._call(place, form, stream, source)
            case "synchronize_stream":
                self._call(place, form, source)
            case "synchronize_device":
                self._call(place, form, "cuda", 0)
                done = set().union(*(self._covered(one) for one in list(self._given)))
        by_host = form.startswith("synchronize")
        if by_host:
            self._host |= done
        for one in [*self._known] if by_host else [stream]:
            self._known[one] |= done

    def _covered(self, stream: int) -> set[fx.Node]:
        return self._known[stream] | set(self._given[stream])

    def _record(self, producer: fx.Node, place: fx.Node) -> tuple[int, set[fx.Node]]:
        stream = stream_of(producer)
        event = {"each": next(self._number), "stream": stream, "one": 0}[self._events]
        self._call(place, "record_event", event, stream)
        made = (event, self._covered(stream))
        if self._place == "apart":
            self._recorded[producer] = made
        return made

    def _call(self, place: fx.Node, name: str, *args: Any) -> None:
        with self._graph.inserting_before(place):
            self._graph.call_function(getattr(torch.ops.streams, name).default, args)


def _producers(node: fx.Node) -> list[fx.Node]:
    """The nodes whose work a node reads, through views."""
    found: dict[fx.Node, None] = {}
    for one in node.all_input_nodes:
        if one.op == "call_function":
            found |= dict.fromkeys(_producers(one) if is_alias(one) else [one])
    return list(found)


def _consumers(node: fx.Node) -> list[fx.Node]:
    """The nodes that read the work of a node, through views, and the output."""
    found: dict[fx.Node, None] = {}
    for user in node.users:
        if user.op == "output" or not is_alias(user):
            found[user] = None
        else:
            found |= dict.fromkeys(_consumers(user))
    return list(found)


#: What a stream, or the host, can call to wait for another stream.
FORMS: Sequence[str] = ("event", "wait_stream", "synchronize_event", "synchronize_stream", "synchronize_device")

__all__ = ["FORMS", "UserStreams", "run_on_streams"]
