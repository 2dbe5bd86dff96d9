"""Writes partial products and their sums chunk by chunk. Position in the team, never rank number, picks a chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from torch import fx

from tcverify.passes.editing import named_arguments, op_name
from tcverify.passes.resharding.pipelined.patterns import OPERANDS, MatmulScatter
from tcverify.passes.resharding.pipelined.steps import Loop, StepStreams, copy, select, shifted_targets
from tcverify.passes.resharding.writing import HostWriter

#: Forms of the communication of each chunk.
ScatterForm: TypeAlias = Literal["collective", "reduce", "p2p", "ring"]
SCATTER_FORMS: tuple[ScatterForm, ...] = get_args(ScatterForm)


def multiply_then_scatter(
    writer: HostWriter,
    found: MatmulScatter,
    form: ScatterForm,
    streams: StepStreams,
    scattering: type[Scattering] | None = None,
) -> fx.Node:
    """Write partial products and their sums, chunk by chunk, at the writer's position.

    Chunks are of dim 0 of the result, unless that dim is divided over the ranks. "collective" takes one reduce_scatter per
    chunk; the other forms have a step for every rank's part of every chunk.

    Args:
        form: of the communication.
        scattering: writes the steps.

    Returns:
        This rank's part of the sum, complete for later readers on the caller's stream.
    """
    chunks, size = (found.total.shape[0] if found.scattered else 1), len(found.team)
    loop = Loop(writer, streams, chunks if form == "collective" else chunks * size)
    piece = found.total.shape[1:] if found.scattered else found.total.shape
    # Point-to-point, all addends of a rank's part come together: they are summed at the end.
    shape = (chunks, size, *piece) if form == "p2p" else found.total.shape
    buffer = writer.allocate(shape, found.total.dtype)
    loop.begin()
    steps = (scattering or Scattering)(writer, found, loop, buffer)
    for chunk in range(chunks):
        if form == "collective":
            steps.collective(chunk)
        elif form == "reduce":
            steps.reductions(chunk)
        elif form == "p2p":
            steps.point_to_point(chunk)
        else:
            steps.ring(chunk)
    if form == "p2p":
        addends = buffer if found.scattered else select(writer, buffer, 0)
        summed = 1 if found.scattered else 0
        buffer = writer.call("aten::sum.dim_IntList", addends, [summed], dtype=found.total.dtype)
    buffer.meta["layout"] = str(found.made.target)
    return buffer


@dataclass(frozen=True, slots=True)
class Scattering:
    """What the steps of matmul + reduce_scatter have in common. `buffer` holds this rank's part of the sum, or its addends."""

    writer: HostWriter
    found: MatmulScatter
    loop: Loop
    buffer: fx.Node

    @property
    def position(self) -> int:
        return self.found.team.index(self.found.rank)

    def part(self, chunk: int) -> fx.Node:
        """This rank's part of a chunk of the sum."""
        return select(self.writer, self.buffer, chunk) if self.found.scattered else self.buffer

    def multiply(self, chunk: int, owner: int | None = None) -> fx.Node:
        """Make the partial products of a chunk, or of one rank's part of it."""
        found, dims = self.found, {}
        if found.scattered:
            dims[self._of_partial(0)] = (chunk, chunk + 1)
        if owner is not None:
            size = found.total.shape[found.scattered]
            dims[self._of_partial(found.scattered)] = (owner * size, (owner + 1) * size)
        value = _product_of_part(self.writer, found, dims)
        value = self.writer.call("aten::select.int", value, found.summed, 0)
        return select(self.writer, value, 0) if found.scattered else value

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
                into = select(self.writer, self.buffer, chunk, (self.position - step) % len(team))
                if step == 0:
                    copy(self.writer, into, value)
                else:
                    self.writer.communicate("permute", value, shifted_targets(len(team), step), team, out=into)

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
                    posted = self.writer.call("host_ir::permute", value, shifted_targets(size, 1), team, out=into)
                else:
                    copy(self.writer, self.part(chunk), value)


def _product_of_part(writer: HostWriter, found: MatmulScatter, dims: dict[int, tuple[int, int]]) -> fx.Node:
    """Multiply what gives a part of the partial products.

    Args:
        dims: per dim of the product, from where to where.
    """
    name, given = op_name(found.matmul), named_arguments(found.matmul)
    operands = [given.get(operand) for operand in OPERANDS[name]]
    for dim, (begin, end) in dims.items():
        for index, axis in enumerate(_axes_of_operands(name, operands, len(found.partial.shape), dim)):
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


__all__ = ["SCATTER_FORMS", "Scattering", "multiply_then_scatter"]
