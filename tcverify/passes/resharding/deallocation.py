"""Deallocation: every intermediate's storage is freed once, as soon as it is no longer needed.

A storage is needed until the last node that touches it, through any alias; a communication touches what it reads and what it
writes until its wait. A storage that lives on one stream alone is freed there, behind its last use. Any other is freed on the
caller's stream, once that has waited for all streams that use it. Inputs, outputs and values that share storage with them are
never freed; unused values are. Tokens of streams and communications have no storage, and are skipped.
Source: nvFuser's InsertDeallocations pass.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from torch import fx

from tcverify.errors import Unsupported
from tcverify.ops import TensorSpec, lookup
from tcverify.ops.dialects.host_ir import CURRENT_STREAM, DEALLOCATE, SET_STREAM, STREAM, SYNCHRONIZE
from tcverify.passes.base import Pass
from tcverify.passes.comm_buffers.storages import Analysis, Storage, analyse
from tcverify.passes.editing import op_name
from tcverify.passes.resharding.writing import HostWriter
from tcverify.program import Contract
from tcverify.program.stream_options import MAIN_STREAM

_TOKENS = (CURRENT_STREAM, STREAM, SET_STREAM, SYNCHRONIZE)


class InsertDeallocations(Pass):
    """Frees every intermediate of a graph once, behind its last use. See the module."""

    name = "insert_deallocations"
    contract: ClassVar[Contract] = Contract(metadata=True, idempotent=True, deallocation=True, inputs="stream0")
    PATTERNS = ("deallocations",)

    def rewrite(self, graph: fx.Graph) -> Iterable[fx.Node]:
        """Find where storages die, then free them there. See `Pass.rewrite`.

        Raises:
            Unsupported: the graph frees something already, or it cannot be said when something is not needed any more.
        """
        for node in graph.nodes:
            if op_name(node) == DEALLOCATE:
                raise Unsupported(
                    f"'{node.name}' frees memory already", "run the pass once, on graphs that free nothing"
                )
        found = analyse(graph)
        last = self.last_touched(graph, found)
        handles = _handles(graph, found, last)
        walk = self.walk(found, last)
        for node in graph.nodes:
            walk.visit(node)
        for storage in walk.stranded():
            raise Unsupported(
                f"the caller's stream does not wait for the worker stream that uses '{_maker(found, storage, graph)}'",
                "synchronize the caller's stream with every worker",
            )
        writer = HostWriter(graph)
        for node, storages in walk.freed.items():
            with writer.before(node.next):
                for storage in storages:
                    writer.deallocate(_handle(writer, handles[storage]))
        self.rewrites["deallocations"] = sum(map(len, walk.freed.values()))
        return []

    def last_touched(self, graph: fx.Graph, found: Analysis) -> dict[Storage, fx.Node]:
        """The last node that touches each storage that is to be freed, in the order in which they are made."""
        return _last_touched(graph, found)

    def walk(self, found: Analysis, last: dict[Storage, fx.Node]) -> Walk:
        """What says where they can be freed, once it has visited all nodes."""
        return Walk(found, last)


# -------------------------------------------------------------------------------------------------- what is to be freed


def _last_touched(graph: fx.Graph, found: Analysis) -> dict[Storage, fx.Node]:
    """The last node that touches each storage that is to be freed, in the order in which they are made."""
    last: dict[Storage, fx.Node] = {}
    kept: set[Storage] = set()
    flying: dict[fx.Node, list[Storage]] = {}  # communications without a wait so far
    for node in graph.nodes:
        touched = _touched(found, node)
        if node.op in ("placeholder", "get_attr", "output"):
            kept.update(touched)
            continue
        op = lookup(node.target) if node.op == "call_function" else None
        if op is None or op.run is None:
            raise Unsupported(f"it is not known what '{node.name}' does with memory", "lower it to ops that are known")
        if op.name.startswith("host_ir::"):
            kept.update(storage for storage in found.held(node) if storage not in last)
        for storage in touched:
            last[storage] = node
        if op.phase == "start":
            flying[node] = touched
        elif op.phase == "wait":
            for operand in node.all_input_nodes:
                for storage in flying.pop(operand, ()):
                    last[storage] = node
    for node in flying:
        raise Unsupported(f"no node waits for '{node.name}'", "wait for every communication through what it returned")
    dying = {storage: node for storage, node in last.items() if storage not in kept}
    for storage, node in dying.items():
        if storage.odd:
            raise Unsupported(
                f"'{node.name}' touches memory in a way that cannot be followed", "use ops that are known"
            )
    return dying


def _touched(found: Analysis, node: fx.Node) -> list[Storage]:
    held = (storage for value in (*node.all_input_nodes, node) for storage in found.held(value))
    return list(dict.fromkeys(held))


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a storage can be had: the value of a node, or one of several results of it."""

    node: fx.Node
    item: int | None = None


def _handles(graph: fx.Graph, found: Analysis, dying: dict[Storage, fx.Node]) -> dict[Storage, _Place]:
    """A value in each of the storages."""
    handles: dict[Storage, _Place] = {}
    for node in graph.nodes:
        single = found.storage(node)
        if single is not None:
            if single in dying and handles.get(single, _Place(node, 0)).item is not None:
                handles[single] = _Place(node)
            continue
        results = found.specs.of.get(node)
        for item, spec in enumerate(results if isinstance(results, (tuple, list)) else ()):
            if isinstance(spec, TensorSpec) and found.numbered(spec) in dying:
                handles.setdefault(found.numbered(spec), _Place(node, item))
    return handles


def _handle(w: HostWriter, place: _Place) -> fx.Node:
    return place.node if place.item is None else w.call("python::getitem", place.node, place.item)


def _maker(found: Analysis, storage: Storage, graph: fx.Graph) -> str:
    return str(next(node.name for node in graph.nodes if storage in found.held(node)))


# ------------------------------------------------------------------------------------------------ where it can be freed


@dataclass(slots=True, eq=False)
class Walk:
    """Follows the order that streams give to what a graph does.

    Attributes:
        last: the last node that touches each storage that is to be freed.
        freed: behind which node storages can be freed.
    """

    found: Analysis
    last: dict[Storage, fx.Node]
    freed: dict[fx.Node, list[Storage]] = field(default_factory=dict)
    _current: int = MAIN_STREAM
    _tokens: dict[fx.Node, int] = field(default_factory=dict)  # streams by what stands for them
    _queued: dict[int, int] = field(default_factory=dict)  # how much each stream was given to do
    _known: dict[int, dict[int, int]] = field(
        default_factory=dict
    )  # how much of that each stream comes after, by stream
    _uses: dict[Storage, dict[int, int]] = field(default_factory=dict)  # the last use of each storage on each stream
    _flying: dict[fx.Node, list[Storage]] = field(default_factory=dict)
    _waiting: dict[int, list[tuple[int, int, Storage]]] = field(
        default_factory=dict
    )  # for the caller to wait for a stream
    _count: itertools.count[int] = field(default_factory=itertools.count)

    def visit(self, node: fx.Node) -> None:
        """Take the next node of the graph."""
        if node.op != "call_function":
            return
        name = op_name(node)
        if name in _TOKENS:
            self._switch(node, name)
            return
        touched = _touched(self.found, node)
        op = lookup(node.target)
        if op.phase == "start":
            self._flying[node] = touched
        elif op.phase == "wait":  # the current stream comes after what the communication does
            ended = [storage for operand in node.all_input_nodes for storage in self._flying.pop(operand, ())]
            touched = list(dict.fromkeys((*touched, *ended)))
        position = self._queued[self._current] = self._queued.get(self._current, 0) + 1
        for storage in touched:
            self._uses.setdefault(storage, {})[self._current] = position
        for storage in touched:
            if self.last.get(storage) is node:
                if self._uses[storage].keys() == {self._current}:
                    self._free(storage, node)
                else:
                    self._await_caller(storage, node)

    def stranded(self) -> list[Storage]:
        """What can never be freed, since the caller's stream does not wait for a stream that uses it."""
        return [storage for heap in self._waiting.values() for _, _, storage in heap]

    def _switch(self, node: fx.Node, name: str) -> None:
        if name == CURRENT_STREAM:
            self._tokens[node] = self._current
        elif name == STREAM:
            self._tokens[node] = MAIN_STREAM + 1 + _index(node)
        elif name == SET_STREAM:
            self._current = self._stream(node)
        else:
            other = self._stream(node)
            known = self._known.setdefault(self._current, {})
            for stream, position in (*self._known.get(other, {}).items(), (other, self._queued.get(other, 0))):
                known[stream] = max(position, known.get(stream, 0))
            if self._current == MAIN_STREAM:
                self._joined(node)

    def _stream(self, node: fx.Node) -> int:
        token = node.args[0] if node.args else node.kwargs.get("stream")
        if not isinstance(token, fx.Node) or token not in self._tokens:
            raise Unsupported(
                f"'{node.name}' names a stream by '{token}'", "give what stream or current_stream returned"
            )
        return self._tokens[token]

    def _joined(self, node: fx.Node) -> None:
        """The caller's stream has waited for others: free what waited for that."""
        known = self._known[MAIN_STREAM]
        for stream, heap in list(self._waiting.items()):
            while heap and heap[0][0] <= known.get(stream, 0):
                self._await_caller(heapq.heappop(heap)[2], node)

    def _await_caller(self, storage: Storage, node: fx.Node) -> None:
        known = self._known.get(MAIN_STREAM, {})
        for stream, position in self._uses[storage].items():
            if stream != MAIN_STREAM and known.get(stream, 0) < position:
                heapq.heappush(self._waiting.setdefault(stream, []), (position, next(self._count), storage))
                return
        self._free(storage, node)

    def _free(self, storage: Storage, node: fx.Node) -> None:
        self.freed.setdefault(node, []).append(storage)


def _index(node: fx.Node) -> int:
    index = node.args[0] if node.args else node.kwargs.get("index")
    if type(index) is not int or index < 0:
        raise Unsupported(f"'{node.name}' names stream {index!r}", "number worker streams from 0")
    return index


__all__ = ["InsertDeallocations"]
