"""How AOTAutograd orders the streams of a backward graph.

Where a user runs parts of a model on CUDA streams of their own, every node of the backward runs on the stream of the forward node
that it differentiates. AOTAutograd then puts an event between a node and its reader where their streams differ. The nodes of a
program are read as such a backward; options say which stream each was annotated with.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import fx

from tcverify.errors import Unsupported
from tcverify.ops import RECORD, WAIT, lookup, resolve, schema_of
from tcverify.program.contract import Contract
from tcverify.program.stream_options import MAIN_STREAM
from tcverify.pytorch.base import TorchPass
from tcverify.pytorch.end_to_end.pipeline import Pipeline

#: Streams by index; what communicates runs on this one.
COMMUNICATION = 1


class BackwardStreams(TorchPass):
    """`assign_backward_streams`, `insert_backward_syncs` and `sync_deallocations`.

    Options:
        streams: how many there are.
        run: how many nodes in a row have the same stream.
        sums: whether sums count as accumulations of gradients, which take the stream of a reader or of an addend.
        order: in which the host issues the nodes. "traced": as they are traced. "late", "early": when events are tied to nodes by
            `wrap_all_sync_nodes_with_control_deps`, they are moved as far as the ties allow, as a compiler may do.
        reuse: whether memory is used again: once the host has issued the last node that reads a value, the stream that
            allocated it may overwrite it.
    """

    name = "torch:backward_streams"
    contract = Contract(metadata=False, boundary="lenient")

    def rewrite(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> None:
        from torch._functorch._aot_autograd import streams

        work = [node for node in gm.graph.nodes if node.op == "call_function"]
        if any(lookup(node.target).name in (RECORD, WAIT) for node in work):
            return  # it says already where its ops run
        for number, node in enumerate(work):
            _require_functional(node)
            op = lookup(node.target)
            accumulates = options["sums"] and op.name == "aten::add.Tensor"
            stream = COMMUNICATION if op.collective else number // options["run"] % options["streams"]
            node.meta |= {"partitioner_tag": "is_backward", "is_gradient_acc": accumulates}
            node.meta["custom"] = {} if accumulates else {"stream": stream}
        with _device():
            streams.assign_backward_streams(gm)
            streams.insert_backward_syncs(gm)
            if options["reuse"]:
                streams.sync_deallocations(gm)
            if options["order"] != "traced":
                tie = getattr(streams, "wrap_all_sync_nodes_with_control_deps", None)
                if tie is None:
                    raise Unsupported("this torch ties events to nothing: their order is that in which they are traced")
                tie(gm)
                _move_syncs(gm.graph, late=options["order"] == "late")
                _unwrap(gm)
        _Anchored(gm.graph, reuse=options["reuse"]).write()
        gm.recompile()

    @classmethod
    def pipeline(cls, options: Mapping[str, Any]) -> Pipeline:
        return Pipeline(unreachable="compiled code runs on several streams on a GPU alone")


@contextlib.contextmanager
def _device() -> Iterator[None]:
    """Answer for a device: events are numbers, work on stream 0 is that of the caller, and every node takes as long."""
    from torch._functorch._aot_autograd import streams

    with (
        mock.patch.object(streams, "get_device", return_value=torch.device("cuda")),
        mock.patch.object(streams, "new_event", side_effect=itertools.count()),
        mock.patch.object(streams, "get_current_stream", return_value=MAIN_STREAM),
        mock.patch.object(streams, "get_roofline_estimate", return_value=1.0),
        mock.patch.object(torch.accelerator, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "is_available", return_value=True),  # up to torch 2.12
    ):
        yield


def _require_functional(node: fx.Node) -> None:
    schema = schema_of(node.target)
    if schema is not None and schema.is_mutable:
        raise Unsupported(f"node '{node.name}' writes in place: graphs of AOTAutograd are functional")


def _move_syncs(graph: fx.Graph, *, late: bool) -> None:
    """Order the calls of a graph anew: by what they read alone, events as late as that allows, or as early."""
    output = next(iter(reversed(graph.nodes)))
    todo = [node for node in graph.nodes if node.op == "call_function"]
    missing = {node: sum(one.op == "call_function" for one in node.all_input_nodes) for node in todo}
    while todo:
        ready = [node for node in todo if missing[node] == 0]
        node = next((one for one in ready if _is_sync(one) != late), ready[0])
        todo.remove(node)
        output.prepend(node)
        for user in node.users:
            if user in missing:
                missing[user] -= 1


def _is_sync(node: fx.Node) -> bool:
    from torch._inductor.fx_passes.control_dependencies import control_deps

    return node.target is control_deps or getattr(node.target, "namespace", None) == "streams"


def _unwrap(gm: fx.GraphModule) -> None:
    """Call events again where they are called by `control_deps`."""
    graph = gm.graph
    for node in [node for node in graph.nodes if node.op == "call_function" and _is_sync(node)]:
        if getattr(node.target, "namespace", None) == "streams":
            continue
        _, called, *passed = node.args
        (sync,) = [one for one in getattr(gm, called.target).graph.nodes if one.op == "call_function"]
        with graph.inserting_before(node):
            graph.call_function(sync.target, sync.args)
        for item in list(node.users):
            if item.target is operator.getitem:
                item.replace_all_uses_with(passed[item.args[1] - 1])
                graph.erase_node(item)
            else:  # another one that follows it
                item.args = (tuple(one for one in item.args[0] if one is not node), *item.args[1:])
        graph.erase_node(node)
        if not called.users:
            graph.erase_node(called)
            delattr(gm, called.target)


class _Anchored:
    """Says by anchors what the streams and events of a graph say.

    An event covers what its stream has been given before it; a wait holds back all that its stream is given behind it.
    """

    def __init__(self, graph: fx.Graph, *, reuse: bool) -> None:
        self._graph = graph
        self._nodes = list(graph.nodes)
        self._freed = self._last_reads() if reuse else {}
        self._last: dict[int, fx.Node] = {}  # stream -> the op that it runs last so far
        self._pending: dict[int, dict[fx.Node, None]] = {}  # stream -> tokens that its next op waits for
        self._events: dict[int, dict[fx.Node, None]] = {}
        self._tokens: dict[fx.Node, fx.Node] = {}

    def write(self) -> None:
        ops = torch.ops.streams
        for node in self._nodes:
            if node.op != "call_function":
                continue
            freed = self._freed.get(node, ())
            behind = node.next
            if node.target == ops.record_event.default:
                event, stream = node.args
                self._events[event] = {**self._pending.get(stream, {}), **self._marked(stream)}
                self._graph.erase_node(node)
            elif node.target in (ops.wait_event.default, ops.sync_dealloc.default):
                event, stream = node.args[:2]
                self._pending.setdefault(stream, {}).update(self._events.get(event, {}))
                self._graph.erase_node(node)
            elif not _is_alias(node):
                self._bind(node, _stream(node))
            for value in freed:
                self._overwrite(value, behind)

    def _last_reads(self) -> dict[fx.Node, list[fx.Node]]:
        """Values that only the graph holds, by the last node that reads them or a view of them."""
        place = {node: number for number, node in enumerate(self._nodes)}
        found: dict[fx.Node, list[fx.Node]] = {}
        for node in self._nodes:
            if node.op == "call_function" and _is_tensor(node) and not _is_alias(node):
                readers = _readers(node)
                if readers and all(one.op != "output" for one in readers):
                    found.setdefault(max(readers, key=place.__getitem__), []).append(node)
        return found

    def _marked(self, stream: int) -> dict[fx.Node, None]:
        """The token of what a stream runs last."""
        last = self._last.get(stream)
        if last is None:
            return {}
        if last not in self._tokens:
            made = last
            if not _is_tensor(last):  # a tuple is recorded through one of its items
                item = next(number for number, one in enumerate(last.meta["val"]) if isinstance(one, torch.Tensor))
                with self._graph.inserting_after(last):
                    made = self._graph.call_function(operator.getitem, (last, item))
            with self._graph.inserting_after(made):
                self._tokens[last] = self._graph.call_function(resolve(RECORD), (made, stream))
        return {self._tokens[last]: None}

    def _bind(self, node: fx.Node, stream: int) -> None:
        operands = [one for one in node.all_input_nodes if _is_tensor(one)]
        tokens = self._pending.pop(stream, {}) if operands else {}
        self._last[stream] = node
        for operand in operands:
            node.replace_input_with(operand, self._bound(operand, stream, tokens, node))
        if not operands:
            self._marked(stream)

    def _bound(self, value: fx.Node, stream: int, tokens: Iterable[fx.Node], reader: fx.Node) -> fx.Node:
        with self._graph.inserting_before(reader):
            bound = self._graph.call_function(resolve(WAIT), (value, stream, list(tokens)))
        bound.meta["val"] = value.meta["val"]
        return bound

    def _overwrite(self, value: fx.Node, behind: fx.Node) -> None:
        """Let the stream that a value was allocated on use its memory again, in front of a node."""
        stream = _stream(value)
        tokens = self._pending.pop(stream, {})
        if tokens:  # what is written into cannot wait
            with self._graph.inserting_before(behind):
                gate = self._graph.call_function(torch.ops.aten.neg.default, (value,))
            gate.replace_input_with(value, self._bound(value, stream, tokens, gate))
        with self._graph.inserting_before(behind):
            self._last[stream] = self._graph.call_function(torch.ops.aten.fill_.Scalar, (value, 0))
        self._last[stream].meta["val"] = value.meta["val"]
        self._marked(stream)


def _stream(node: fx.Node) -> int:
    stream: int = node.meta["custom"].get("stream", MAIN_STREAM)
    return stream


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_alias(node: fx.Node) -> bool:
    """Whether a node does no work: it selects from a tuple, or views its operand."""
    schema = schema_of(node.target)
    return node.target is operator.getitem or (schema is not None and any(r.alias_info for r in schema.returns))


def _readers(node: fx.Node) -> list[fx.Node]:
    """The nodes that read a value or its views, the views among them."""
    return [*node.users, *(one for user in node.users if _is_view(user) for one in _readers(user))]


def _is_view(node: fx.Node) -> bool:
    return node.op == "call_function" and _is_alias(node)


__all__ = ["BackwardStreams"]
