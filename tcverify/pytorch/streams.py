"""Graphs whose nodes run on several CUDA streams, as AOTAutograd annotates and orders them.

A node says in `meta["custom"]["stream"]` on which stream it runs; without, it runs on that of the caller. Calls of
`torch.ops.streams` record events and wait for them.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import fx

from tcverify.errors import Unsupported
from tcverify.ops import RECORD, WAIT, lookup, mutated_operands, resolve, schema_of
from tcverify.program.stream_options import MAIN_STREAM

#: Streams by index; what communicates runs on this one.
COMMUNICATION = 1


@contextlib.contextmanager
def device() -> Iterator[None]:
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


def is_annotated(graph: fx.Graph) -> bool:
    """Whether a graph says already by anchors where its ops run."""
    return any(node.op == "call_function" and lookup(node.target).name in (RECORD, WAIT) for node in graph.nodes)


def require_traced(node: fx.Node) -> None:
    """Decline a node that no graph of AOTAutograd contains.

    Raises:
        Unsupported: it writes in place, or views or copies as strides have it.
    """
    schema = schema_of(node.target)
    if schema is not None and schema.is_mutable:
        raise Unsupported(f"node '{node.name}' writes in place: graphs of AOTAutograd are functional")
    if lookup(node.target).name in _VIEWS_OR_COPIES:
        raise Unsupported(f"node '{node.name}' views or copies: graphs of AOTAutograd say which")


#: Ops whose result may share memory with their operand, or not.
_VIEWS_OR_COPIES = ("aten::contiguous", "aten::reshape")


def reorder(gm: fx.GraphModule, order: str) -> None:
    """Tie events to nodes as AOTAutograd does, and move them as far as the ties allow.

    Args:
        gm: the graph; every node that can run comes next in one of the orders of `ORDERS`.
        order: its name.

    Raises:
        Unsupported: this torch ties events to nothing.
    """
    from torch._functorch._aot_autograd import streams

    tie = getattr(streams, "wrap_all_sync_nodes_with_control_deps", None)
    if tie is None:
        raise Unsupported("this torch ties events to nothing: their order is that in which they are traced")
    tie(gm)
    _move_syncs(gm, ORDERS[order])
    _unwrap(gm)


#: By the name of an order: what comes first, of the nodes that could come next.
ORDERS: Mapping[str, Sequence[str]] = {
    "late": ("work", "record", "wait"),
    "early": ("wait", "record", "work"),
    "apart": ("record", "work", "wait"),
}


def _move_syncs(gm: fx.GraphModule, order: Sequence[str]) -> None:
    """Order the calls of a graph anew, by what they read alone."""
    output = gm.graph.output_node()
    todo = [node for node in gm.graph.nodes if node.op == "call_function"]
    missing = {node: sum(one.op == "call_function" for one in node.all_input_nodes) for node in todo}
    rank = {node: order.index(_kind(gm, node)) for node in todo}
    while todo:
        node = min((node for node in todo if missing[node] == 0), key=rank.__getitem__)
        todo.remove(node)
        output.prepend(node)
        for user in node.users:
            if user in missing:
                missing[user] -= 1


def _kind(gm: fx.GraphModule, node: fx.Node) -> str:
    """Whether a call records an event, waits, or does work."""
    if not _is_sync(node):
        return "work"
    return "record" if _called(gm, node).target == torch.ops.streams.record_event.default else "wait"


def _called(gm: fx.GraphModule, node: fx.Node) -> Any:
    """The call of an event, also where `control_deps` calls it."""
    if getattr(node.target, "namespace", None) == "streams":
        return node
    called: Any = node.args[1]
    sync: Any
    (sync,) = [one for one in getattr(gm, called.target).graph.nodes if one.op == "call_function"]
    return sync


def _is_sync(node: fx.Node) -> bool:
    from torch._inductor.fx_passes.control_dependencies import control_deps

    return node.target is control_deps or getattr(node.target, "namespace", None) == "streams"


def _unwrap(gm: fx.GraphModule) -> None:
    """Call events again where they are called by `control_deps`."""
    graph = gm.graph
    for node in [node for node in graph.nodes if node.op == "call_function" and _is_sync(node)]:
        if getattr(node.target, "namespace", None) == "streams":
            continue
        sync = _called(gm, node)
        _, called, *passed = node.args
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


class Anchored:
    """Says by anchors what the streams and events of a graph say.

    An event covers what its stream has been given before it; a wait holds back all that its stream is given behind it. Where the
    host waits, it gives no stream anything before that is done.

    Args:
        overwritten: by node, the values whose memory is used again in front of it, by the stream that allocated them.
    """

    def __init__(self, graph: fx.Graph, overwritten: Mapping[fx.Node, Iterable[fx.Node]]) -> None:
        self._graph = graph
        self._nodes = list(graph.nodes)
        self._overwritten = overwritten
        self._last: dict[int, fx.Node] = {}  # stream -> the op that it runs last so far
        self._host: dict[fx.Node, None] = {}  # tokens that the host has waited for
        # stream -> tokens that its next op waits for
        self._pending: dict[int, dict[fx.Node, None]] = defaultdict(lambda: dict(self._host))
        self._events: dict[int, dict[fx.Node, None]] = {}
        self._tokens: dict[fx.Node, fx.Node] = {}

    def write(self) -> None:
        """Replace the calls of events by anchors."""
        for node in self._nodes:
            for value in self._overwritten.get(node, ()):
                self._overwrite(value, node)
            if node.op == "output":
                self._join(node)
            if node.op != "call_function":
                continue
            if getattr(node.target, "namespace", None) == "streams":
                self._synchronize(node)
                self._graph.erase_node(node)
            elif not is_alias(node):
                self._bind(node, stream_of(node))

    def _synchronize(self, node: fx.Node) -> None:
        name, numbers = str(node.target).split(".")[1], [int(one) for one in node.args if isinstance(one, int)]
        match name:
            case "record_event":
                event, stream = numbers
                self._events[event] = self._given(stream)
            case "wait_event" | "sync_dealloc":
                event, stream = numbers
                self._pending[stream].update(self._events.get(event, {}))
            case "wait_stream":
                waiting, stream = numbers
                self._pending[waiting].update(self._given(stream))
            case "synchronize_event":
                self._hold(self._events.get(numbers[0], {}))
            case "synchronize_stream":
                self._hold(self._given(numbers[0]))
            case "synchronize_device":
                for stream in [*self._last, *self._pending]:
                    self._hold(self._given(stream))
            case _:
                raise Unsupported(f"what {name} says of streams is not known here")

    def _given(self, stream: int) -> dict[fx.Node, None]:
        """Tokens of all that a stream has been given so far, and of what it waits for."""
        return {**self._pending[stream], **self._marked(stream)}

    def _hold(self, tokens: Iterable[fx.Node]) -> None:
        """Let the host wait."""
        self._host.update(dict.fromkeys(tokens))
        for pending in self._pending.values():
            pending.update(self._host)

    def _join(self, output: fx.Node) -> None:
        """Outputs are read on the stream of the caller, behind all that it waits for."""
        inputs = [one for one in self._nodes if one.op == "placeholder" and is_tensor(one)]
        if inputs and self._pending[MAIN_STREAM]:
            self._gate(inputs[0], MAIN_STREAM, output)

    def _gate(self, value: fx.Node, stream: int, place: fx.Node) -> None:
        """Let a stream read a value once it has waited for what it is to wait for, in front of a node."""
        with self._graph.inserting_before(place):
            gate = self._graph.call_function(torch.ops.aten.clone.default, (value,))
        gate.meta["val"] = value.meta["val"]
        self._bind(gate, stream)

    def _marked(self, stream: int) -> dict[fx.Node, None]:
        """The token of what a stream runs last."""
        last = self._last.get(stream)
        if last is None:
            return {}
        if last not in self._tokens:
            made = last
            if not is_tensor(last):  # a tuple is recorded through one of its items
                item = next(number for number, one in enumerate(last.meta["val"]) if isinstance(one, torch.Tensor))
                with self._graph.inserting_after(last):
                    made = self._graph.call_function(operator.getitem, (last, item))
            with self._graph.inserting_after(made):
                self._tokens[last] = self._graph.call_function(resolve(RECORD), (made, stream))
        return {self._tokens[last]: None}

    def _bind(self, node: fx.Node, stream: int) -> None:
        operands = [one for one in node.all_input_nodes if is_tensor(one)]
        written = mutated_operands(node)
        read = [one for one in operands if one not in written]
        if operands and not read and self._pending[stream]:  # what is written into cannot wait
            self._gate(operands[0], stream, node)
        tokens = self._take(stream) if read else {}
        self._last[stream] = node
        for operand in read:
            node.replace_input_with(operand, self._bound(operand, stream, tokens, node))
        if not read:
            self._marked(stream)

    def _take(self, stream: int) -> dict[fx.Node, None]:
        """What the next op of a stream waits for; those behind it wait for that op."""
        tokens = self._pending[stream]
        self._pending[stream] = {}
        return tokens

    def _bound(self, value: fx.Node, stream: int, tokens: Iterable[fx.Node], reader: fx.Node) -> fx.Node:
        with self._graph.inserting_before(reader):
            bound = self._graph.call_function(resolve(WAIT), (value, stream, list(tokens)))
        bound.meta["val"] = value.meta["val"]
        return bound

    def _overwrite(self, value: fx.Node, behind: fx.Node) -> None:
        """Let the stream that allocated a value overwrite it, in front of a node."""
        stream = stream_of(value)
        if self._pending[stream]:  # what is written into cannot wait
            self._gate(value, stream, behind)
        with self._graph.inserting_before(behind):
            fill, name = torch.ops.aten.fill_.Scalar, f"{value.name}_overwritten"
            self._last[stream] = self._graph.create_node("call_function", fill, (value, 0), name=name)
        self._last[stream].meta["val"] = value.meta["val"]
        self._marked(stream)


def behind_last_reads(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Values that only the graph holds, by the node behind the last one that reads them or a view of them."""
    place = {node: number for number, node in enumerate(graph.nodes)}
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and is_tensor(node) and not is_alias(node):
            readers = readers_of(node)
            if readers and all(one.op != "output" for one in readers):
                found.setdefault(max(readers, key=place.__getitem__).next, []).append(node)
    return found


def stream_of(node: fx.Node) -> int:
    """The stream that a node runs on."""
    stream: int = node.meta.get("custom", {}).get("stream", MAIN_STREAM)
    return stream


def is_tensor(node: fx.Node) -> bool:
    """Whether the value of a node is one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def is_alias(node: fx.Node) -> bool:
    """Whether a node does no work: it selects from a tuple, or views its operand."""
    schema = schema_of(node.target)
    if schema is None or schema.is_mutable:
        return node.target is operator.getitem
    return any(result.alias_info for result in schema.returns)


def readers_of(node: fx.Node) -> list[fx.Node]:
    """The nodes that read a value or its views, the views among them."""
    return [*node.users, *(one for user in node.users if _is_view(user) for one in readers_of(user))]


def _is_view(node: fx.Node) -> bool:
    return node.op == "call_function" and is_alias(node)


__all__ = [
    "COMMUNICATION",
    "ORDERS",
    "Anchored",
    "behind_last_reads",
    "device",
    "is_alias",
    "is_annotated",
    "is_tensor",
    "readers_of",
    "reorder",
    "require_traced",
    "stream_of",
]
