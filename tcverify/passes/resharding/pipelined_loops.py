"""Writes matmuls and the communication of their operands or results chunk by chunk, each chunk on a stream of its own.

A loop of its own lets every worker wait for the caller's stream, so that no worker waits for another; then each step sets its
stream, communicates and computes, and the caller's stream waits for it. Position in the team, never rank number, picks a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import fx

from tcverify.passes.editing import arguments, op_name
from tcverify.passes.resharding.pipelined_patterns import OPERANDS, GatherMatmul, MatmulScatter
from tcverify.passes.resharding.writing import HostWriter

#: Forms of the communication of each chunk.
GATHER_FORMS = ("collective", "broadcast", "p2p", "ring")
SCATTER_FORMS = ("collective", "reduce", "p2p", "ring")


@dataclass(frozen=True, slots=True)
class Streams:
    """On which streams steps run.

    Attributes:
        number: of worker streams.
        sync: whether each step waits for what is queued on the stream of the one before it.
    """

    number: int
    sync: bool = False


class _Loop:
    """The steps of one pipeline: step i on worker stream i mod n. To be made where the caller's stream is current."""

    def __init__(self, writer: HostWriter, streams: Streams, steps: int) -> None:
        self._writer, self._streams = writer, streams
        self._steps = iter(range(steps))
        self._caller = writer.current_stream()
        self._workers = [writer.stream(index) for index in range(min(streams.number, steps))]

    def begin(self) -> None:
        """Let every worker wait for what the caller's stream has queued."""
        for worker in self._workers:
            self._writer.set_stream(worker)
            self._writer.synchronize(self._caller)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run what the block writes on the next worker, and let the caller's stream, which is current again, wait for it."""
        number, count = next(self._steps), len(self._workers)
        worker = self._workers[number % count]
        self._writer.set_stream(worker)
        if self._streams.sync and number and count > 1:
            self._writer.synchronize(self._workers[(number - 1) % count])
        yield
        self._writer.set_stream(self._caller)
        self._writer.synchronize(worker)


def _select(writer: HostWriter, x: fx.Node, *indices: int) -> fx.Node:
    """x[i][j]…"""
    for index in indices:
        x = writer.call("aten::select.int", x, 0, index)
    return x


def _copy(writer: HostWriter, into: fx.Node, value: fx.Node) -> None:
    writer.call("aten::copy_", into, value)


# ---------------------------------------------------------------------------------------------------- allgather + matmul


def gather_then_multiply(
    writer: HostWriter, found: GatherMatmul, form: str, streams: Streams
) -> tuple[fx.Node, fx.Node]:
    """Write the gathering of A and its product, chunk by chunk, where the writer stands.

    "collective" takes one all_gather per chunk of dim 0; the other forms have a step for every shard of every such chunk.

    Args:
        form: one of `GATHER_FORMS`.

    Returns:
        The gathered A and the product, complete for who reads them on the caller's stream behind this.
    """
    chunks, parts = found.made.shape[:2]
    loop = _Loop(writer, streams, chunks if form == "collective" else chunks * parts)
    a = arguments(found.gather)["x"]
    whole = writer.allocate(found.made.shape, found.product.dtype)
    product = writer.allocate(found.product.shape, found.product.dtype)
    for buffer in (whole, product):
        buffer.meta["layout"] = str(found.made.target)
    loop.begin()
    gathering = _Gathering(writer, found, loop, a, whole, product)
    for chunk in range(chunks):
        if form == "collective":
            gathering.collective(chunk)
        elif form == "broadcast":
            gathering.broadcasts(chunk)
        elif form == "p2p":
            gathering.point_to_point(chunk)
        else:
            gathering.ring(chunk)
    return whole, product


@dataclass(frozen=True, slots=True)
class _Gathering:
    """What the steps of allgather + matmul have in common: A here [S, 1, …], the gathered A [S, D, …] and the product."""

    writer: HostWriter
    found: GatherMatmul
    loop: _Loop
    a: fx.Node
    whole: fx.Node
    product: fx.Node

    @property
    def position(self) -> int:
        return self.found.team.index(self.found.rank)

    def multiply(self, part: fx.Node, *at: int) -> None:
        """Write the product of a part of the gathered A into its place."""
        matmul = self.found.matmul
        name, given = op_name(matmul), arguments(matmul)
        others = [given.get(operand) for operand in OPERANDS[name][1:]]
        value = self.writer.call(name, part, *others)
        _copy(self.writer, _select(self.writer, self.product, *at), value)

    def collective(self, chunk: int) -> None:
        """One step: all ranks' parts of a chunk at once."""
        with self.loop.step():
            mine = _select(self.writer, self.a, chunk)
            part = _select(self.writer, self.whole, chunk)
            self.writer.communicate("all_gather", mine, 0, list(self.found.team), out=part)
            self.multiply(part, chunk)

    def broadcasts(self, chunk: int) -> None:
        """One step per rank, which is the root."""
        for root, rank in enumerate(self.found.team):
            with self.loop.step():
                mine = _select(self.writer, self.a, chunk, 0) if root == self.position else None
                part = _select(self.writer, self.whole, chunk, root)
                self.writer.communicate("broadcast", mine, rank, list(self.found.team), out=part)
                self.multiply(part, chunk, root)

    def point_to_point(self, chunk: int) -> None:
        """In step i take what the rank i further on has, and send one's own to the rank i further back."""
        team = self.found.team
        for step in range(len(team)):
            with self.loop.step():
                owner = (self.position + step) % len(team)
                mine, part = _select(self.writer, self.a, chunk, 0), _select(self.writer, self.whole, chunk, owner)
                if step == 0:
                    _copy(self.writer, part, mine)
                else:
                    targets = _shifted(len(team), -step)
                    self.writer.communicate("permute", mine, targets, list(team), out=part)
                self.multiply(part, chunk, owner)

    def ring(self, chunk: int) -> None:
        """In each step pass on what came in the one before it, from the rank before to the rank behind.

        A part is passed on as soon as it has come, while it is multiplied: the next step waits for what this one posts.
        """
        team, size = list(self.found.team), len(self.found.team)
        mine, posted = _select(self.writer, self.a, chunk, 0), None
        part = _select(self.writer, self.whole, chunk, self.position)
        for step in range(size):
            with self.loop.step():
                if posted is None:
                    _copy(self.writer, part, mine)
                else:
                    self.writer.wait(posted)
                current, passed, owner = part, mine if step == 0 else part, (self.position - step) % size
                if step + 1 < size:
                    part = _select(self.writer, self.whole, chunk, (owner - 1) % size)
                    posted = self.writer.call("host_ir::permute", passed, _shifted(size, 1), team, out=part)
                self.multiply(current, chunk, owner)


# ----------------------------------------------------------------------------------------------- matmul + reduce_scatter


def multiply_then_scatter(writer: HostWriter, found: MatmulScatter, form: str, streams: Streams) -> fx.Node:
    """Write partial products and their sums, chunk by chunk, where the writer stands.

    Chunks are of dim 0 of the result, unless that is what is divided over the ranks. "collective" takes one reduce_scatter per
    chunk; the other forms have a step for every rank's part of every chunk.

    Args:
        form: one of `SCATTER_FORMS`.

    Returns:
        This rank's part of the sum, complete for who reads it on the caller's stream behind this.
    """
    chunks, size = (found.total.shape[0] if found.scattered else 1), len(found.team)
    loop = _Loop(writer, streams, chunks if form == "collective" else chunks * size)
    piece = found.total.shape[1:] if found.scattered else found.total.shape
    # Point-to-point, all addends of a rank's part come together: they are summed at the end.
    shape = (chunks, size, *piece) if form == "p2p" else found.total.shape
    buffer = writer.allocate(shape, found.total.dtype)
    loop.begin()
    scattering = _Scattering(writer, found, loop, buffer)
    for chunk in range(chunks):
        if form == "collective":
            scattering.collective(chunk)
        elif form == "reduce":
            scattering.reductions(chunk)
        elif form == "p2p":
            scattering.point_to_point(chunk)
        else:
            scattering.ring(chunk)
    if form == "p2p":
        addends = buffer if found.scattered else _select(writer, buffer, 0)
        summed = 1 if found.scattered else 0
        buffer = writer.call("aten::sum.dim_IntList", addends, [summed], dtype=found.total.dtype)
    buffer.meta["layout"] = str(found.made.target)
    return buffer


@dataclass(frozen=True, slots=True)
class _Scattering:
    """What the steps of matmul + reduce_scatter have in common. `buffer` holds this rank's part of the sum, or its addends."""

    writer: HostWriter
    found: MatmulScatter
    loop: _Loop
    buffer: fx.Node

    @property
    def position(self) -> int:
        return self.found.team.index(self.found.rank)

    def part(self, chunk: int) -> fx.Node:
        """This rank's part of a chunk of the sum."""
        return _select(self.writer, self.buffer, chunk) if self.found.scattered else self.buffer

    def multiply(self, chunk: int, owner: int | None = None) -> fx.Node:
        """Make the partial products of a chunk, or of one rank's part of it."""
        found, dims = self.found, {}
        if found.scattered:
            dims[self._of_partial(0)] = (chunk, chunk + 1)
        if owner is not None:
            size = found.total.shape[found.scattered]
            dims[self._of_partial(found.scattered)] = (owner * size, (owner + 1) * size)
        value = _product_of_part(self.writer, found.matmul, dims)
        value = self.writer.call("aten::select.int", value, found.summed, 0)
        return _select(self.writer, value, 0) if found.scattered else value

    def _of_partial(self, dim: int) -> int:
        """A dim of the result, counted in the partial products."""
        return dim + (dim >= self.found.summed)

    def collective(self, chunk: int) -> None:
        """One step: all ranks' parts of a chunk at once."""
        with self.loop.step():
            value, dim = self.multiply(chunk), max(self.found.scattered - 1, 0)
            into = self.part(chunk)
            self.writer.communicate("reduce_scatter", value, dim, "sum", list(self.found.team), out=into)

    def reductions(self, chunk: int) -> None:
        """One step per rank, which is the root."""
        for root, rank in enumerate(self.found.team):
            with self.loop.step():
                value = self.multiply(chunk, root)
                into = self.part(chunk) if root == self.position else None
                self.writer.communicate("reduce", value, "sum", rank, list(self.found.team), out=into)

    def point_to_point(self, chunk: int) -> None:
        """In step i make what the rank i further on sums, and take an addend from the rank i further back."""
        team = list(self.found.team)
        for step in range(len(team)):
            with self.loop.step():
                value = self.multiply(chunk, (self.position + step) % len(team))
                into = _select(self.writer, self.buffer, chunk, (self.position - step) % len(team))
                if step == 0:
                    _copy(self.writer, into, value)
                else:
                    self.writer.communicate("permute", value, _shifted(len(team), step), team, out=into)

    def ring(self, chunk: int) -> None:
        """Sums go round, from the rank behind the one that keeps them, and every rank adds its own addend.

        A step makes its addend while the sum so far is still coming, and waits for it only then.
        """
        team, size = list(self.found.team), len(self.found.team)
        posted: fx.Node | None = None
        for step in range(size):
            with self.loop.step():
                value = self.multiply(chunk, (self.position - 1 - step) % size)
                if posted is not None:
                    self.writer.wait(posted)
                    value = self.writer.call("aten::add.Tensor", posted.kwargs["out"], value)
                if step + 1 < size:
                    made = value.meta["val"]
                    into = self.writer.allocate(made.shape, made.dtype)
                    posted = self.writer.call("host_ir::permute", value, _shifted(size, 1), team, out=into)
                else:
                    _copy(self.writer, self.part(chunk), value)


def _product_of_part(writer: HostWriter, matmul: fx.Node, dims: dict[int, tuple[int, int]]) -> fx.Node:
    """Multiply what gives a part of a product.

    Args:
        dims: per dim of the product, from where to where.
    """
    name, given = op_name(matmul), arguments(matmul)
    operands = [given.get(operand) for operand in OPERANDS[name]]
    rank = len(matmul.meta["val"].shape)
    for dim, (begin, end) in dims.items():
        for index, axis in enumerate(_axes_of_operands(name, operands, rank, dim)):
            x: Any = operands[index]
            if axis is not None and x.meta["val"].shape[axis] > 1:
                operands[index] = writer.call("aten::slice.Tensor", x, axis, begin, end)
    return writer.call(name, *operands)


def _axes_of_operands(name: str, operands: Sequence[Any], rank: int, dim: int) -> list[int | None]:
    """Which dim of each operand is a dim of their product; None where an operand has none such."""
    columns = dim == rank - 1
    if name == "aten::linear":  # the weight's rows are the result's columns, and the bias has those alone
        return [None, 0, 0 if operands[2] is not None else None] if columns else [dim, None, None]
    if columns:
        return [None, operands[1].meta["val"].ndim - 1]
    axes: list[int | None] = []
    for index, operand in enumerate(operands):
        axis = operand.meta["val"].ndim - rank + dim
        axes.append(axis if axis >= 0 and not (index == 1 and dim == rank - 2) else None)
    return axes


def _shifted(size: int, by: int) -> list[int]:
    """Where each position of a team sends to."""
    return [(position + by) % size for position in range(size)]


__all__ = ["GATHER_FORMS", "SCATTER_FORMS", "Streams", "gather_then_multiply", "multiply_then_scatter"]
