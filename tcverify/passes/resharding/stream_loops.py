"""Stream-parallel loops: ops whose results have a stream axis are computed part by part, on streams in turn.

A loop is written out trip by trip. Before it stand the allocations of its results, and the worker streams wait for the caller's
stream, each once and before any of them works, so that no worker waits for another. In trip i, on worker i modulo their
number, each op computes what lies at index i of its result's axis, from the parts of its operands that lie there. Then the
caller's stream is current again, and waits for the worker.

An op joins the loop of the op that it directly follows if it reads from the loop, and all that it reads of it at the same
index. Ranks see no graphs but their own, and other ops may stand between on other ranks: that all of them post the same
communications in the same order, a loop has at most one op in which other ranks take part.
Source: nvFuser's StreamParallelType pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import fx
from torch.fx.node import map_arg

from tcverify.errors import Unsupported
from tcverify.ops import TensorSpec, fake_tensor
from tcverify.passes.base import Pass
from tcverify.passes.resharding.layouts import stream_axis_of
from tcverify.passes.resharding.stream_axes import OperandSlice, SlicedOp, slice_op
from tcverify.passes.resharding.writing import HostWriter
from tcverify.program import Contract

#: Nodes that do nothing when the program runs.
_PASSIVE = ("placeholder", "get_attr")


class StreamParallelType(Pass):
    """Computes ops whose results have a stream axis part by part, on worker streams.

    Args:
        number_of_streams: how many workers there are; trips take them in turn.
        options: those of `Pass`.

    Raises:
        UsageError: the number is less than one.
    """

    name = "stream_parallel_type"
    contract: ClassVar[Contract] = Contract(metadata=True, idempotent=True, inputs="stream0")
    PATTERNS = ("loops", "ops")
    writer: ClassVar[type[HostWriter]] = HostWriter

    def __init__(self, *, number_of_streams: int | str = 3, **options: Any) -> None:
        super().__init__(**options)
        self.number_of_streams = self._whole_number("number_of_streams", number_of_streams, 1)
        self.contract = Contract(metadata=True, idempotent=True, streams=self.number_of_streams, inputs="stream0")  # type: ignore[misc] # of this instance

    def rewrite(self, graph: fx.Graph) -> Iterable[fx.Node]:
        """Find the loops, then write them. See `Pass.rewrite`.

        Raises:
            Unsupported: an op cannot be computed part by part along its stream axis.
        """
        loops = list(_loops(graph, self.cut))
        writer, results = self.writer(graph), dict[fx.Node, fx.Node]()
        for loop in loops:
            _write(writer, loop, self.number_of_streams, results)
        for node, result in results.items():
            node.replace_all_uses_with(result)
        for loop in reversed(loops):
            for op in reversed(loop.ops):
                graph.erase_node(op.node)
        self.rewrites["loops"] = len(loops)
        self.rewrites["ops"] = sum(len(loop.ops) for loop in loops)
        return []

    def cut(self, node: fx.Node, axis: int) -> SlicedOp:
        """Cut an op along a dim of its result. See `stream_axes.slice_op`."""
        return slice_op(node, axis)


@dataclass(slots=True, eq=False)
class _Loop:
    """Ops that are computed in the trips of one loop, in order, and nodes between them that do nothing."""

    ops: list[SlicedOp] = field(default_factory=list)
    between: list[fx.Node] = field(default_factory=list)
    axes: dict[fx.Node, int] = field(default_factory=dict)  # of their results

    @property
    def trips(self) -> int:
        return self.ops[0].trips

    def takes(self, op: SlicedOp) -> bool:
        """Whether an op that directly follows may join."""
        if op.trips != self.trips or (op.communicates and any(one.communicates for one in self.ops)):
            return False
        whole: list[fx.Node] = []
        map_arg((op.args, op.kwargs), whole.append)
        parts = [part for part in op.parts if part.node in self.axes]
        alike = all(not part.repeated and self.axes[part.node] == part.dim for part in parts)
        return bool(parts) and alike and self.axes.keys().isdisjoint(whole)

    def add(self, op: SlicedOp) -> None:
        """Let an op join."""
        self.ops.append(op)
        self.axes[op.node] = op.axis


def _loops(graph: fx.Graph, cut: Callable[[fx.Node, int], SlicedOp]) -> Iterator[_Loop]:
    """The loops of a graph, in order. Raises `Unsupported` where an op cannot be in one."""
    loop: _Loop | None = None
    for node in graph.nodes:
        axis = _stream_axis(node)
        if axis is None:
            if loop is not None and node.op in _PASSIVE:
                loop.between.append(node)
            elif loop is not None:
                yield loop
                loop = None
            continue
        op = cut(node, axis)
        if op.local is None and node.users:
            raise Unsupported(
                f"'{node.name}' gives this rank nothing, and '{next(iter(node.users)).name}' reads it",
                "read results on the ranks of their meshes alone",
            )
        if op.local is not None and not _is_dense(op.local):
            raise Unsupported(f"'{node.name}' has strides {list(op.local.stride)}, with gaps", "make it dense before")
        if loop is None or not loop.takes(op):
            if loop is not None:
                yield loop
            loop = _Loop()
        loop.add(op)
    if loop is not None:
        yield loop


def _stream_axis(node: fx.Node) -> int | None:
    if node.meta.get("stream_axis") is None:
        node.meta.pop("stream_axis", None)
        return None
    axis = stream_axis_of(node)
    if axis is None:
        raise Unsupported(
            f"the stream axis of '{node.name}' is {str(node.meta['stream_axis'])[:40]!r}", "give the number of a dim"
        )
    if node.op != "call_function":
        raise Unsupported(
            f"'{node.name}' has a stream axis, but is not an op: it is {node.op}", "mark results of ops alone"
        )
    return axis


# ------------------------------------------------------------------------------------------------------------ writing


def _write(w: HostWriter, loop: _Loop, number: int, results: dict[fx.Node, fx.Node]) -> None:
    """Write a loop before its first op, and record in `results` the replacements of its ops' values."""
    first = loop.ops[0].node
    for node in loop.between:  # ops behind them may read them
        first.prepend(node)
    with w.before(first):
        for op in loop.ops:
            if op.local is not None:
                results[op.node] = _output(w, op.node, op.local)
        if not loop.trips:
            return
        caller = w.current_stream()
        workers = [w.stream(index) for index in range(min(number, loop.trips))]
        for worker in workers:
            w.set_stream(worker)
            w.synchronize(caller)
        for index in range(loop.trips):
            worker = workers[index % len(workers)]
            w.set_stream(worker)
            _write_trip(w, loop, index, results)
            w.set_stream(caller)
            w.synchronize(worker)


def _output(w: HostWriter, node: fx.Node, spec: TensorSpec) -> fx.Node:
    """Allocate what `node` gives, with the strides that it has, under the metadata that it has."""
    order = _order(spec)
    made = w.allocate([spec.shape[dim] for dim in order], spec.dtype)
    val = node.meta["val"]
    if order != sorted(order):
        inner = TensorSpec.contiguous(tuple(spec.shape[dim] for dim in order), spec.dtype)
        made.meta["val"] = fake_tensor(inner, val.fake_mode, val.untyped_storage(), val.device)
        made = w.call("aten::permute", made, [order.index(dim) for dim in range(len(order))])
    made.meta["val"] = val
    if "layout" in node.meta:
        made.meta["layout"] = node.meta["layout"]
    return made


def _order(spec: TensorSpec) -> list[int]:
    """The dims as they lie in memory, outermost first."""
    dims = list(range(len(spec.shape)))
    if spec.layout == TensorSpec.contiguous(spec.shape, spec.dtype).layout:
        return dims
    return sorted(dims, key=lambda dim: -spec.stride[dim])


def _is_dense(spec: TensorSpec) -> bool:
    order = _order(spec)
    shape, stride = (tuple(of[dim] for dim in order) for of in (spec.shape, spec.stride))
    return TensorSpec(shape, stride, spec.dtype).layout == TensorSpec.contiguous(shape, spec.dtype).layout


def _write_trip(w: HostWriter, loop: _Loop, index: int, results: dict[fx.Node, fx.Node]) -> None:
    """Write what one trip computes. Every part of a tensor is selected once."""
    selected: dict[tuple[fx.Node, int, int], fx.Node] = {}

    def at(node: fx.Node, dim: int, position: int) -> fx.Node:
        key = node, dim, position
        if key not in selected:
            selected[key] = w.call("aten::select.int", node, dim, position)
        return selected[key]

    def read(value: Any) -> Any:
        if not isinstance(value, OperandSlice):
            return results.get(value, value) if isinstance(value, fx.Node) else value
        found = at(results.get(value.node, value.node), value.dim, 0 if value.repeated else index)
        return found if value.widened is None else w.call("aten::unsqueeze", found, value.widened)

    for op in loop.ops:
        made = w.call(op.op, *map(read, op.args), **{name: read(value) for name, value in op.kwargs.items()})
        if op.narrowed is not None:
            made = w.call("aten::squeeze.dim", made, op.narrowed)
        if op.addend is not None:
            made = w.call("aten::add.Tensor", made, read(op.addend))
        if op.node in results:
            w.call("aten::copy_", at(results[op.node], op.axis, index), made)


__all__ = ["StreamParallelType"]
