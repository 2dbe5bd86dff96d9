"""Writes the gathering of A and its product chunk by chunk. Position in the team, never rank number, picks a chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from torch import fx

from tcverify.passes.editing import named_arguments, op_name
from tcverify.passes.resharding.pipelined.patterns import OPERANDS, GatherMatmul
from tcverify.passes.resharding.pipelined.steps import Loop, StepStreams, copy, select, shifted_targets
from tcverify.passes.resharding.writing import HostWriter

#: Forms of the communication of each chunk.
GatherForm: TypeAlias = Literal["collective", "broadcast", "p2p", "ring"]
GATHER_FORMS: tuple[GatherForm, ...] = get_args(GatherForm)


def gather_then_multiply(
    writer: HostWriter,
    found: GatherMatmul,
    form: GatherForm,
    streams: StepStreams,
    gathering: type[Gathering] | None = None,
) -> tuple[fx.Node, fx.Node]:
    """Write the gathering of A and its product, chunk by chunk, at the writer's position.

    "collective" takes one all_gather per chunk of dim 0; the other forms have a step for every shard of every such chunk.

    Args:
        form: of the communication.
        gathering: writes the steps.

    Returns:
        The gathered A and the product, complete for later readers on the caller's stream.
    """
    chunks, parts = found.made.shape[:2]
    loop = Loop(writer, streams, chunks if form == "collective" else chunks * parts)
    a = named_arguments(found.gather)["x"]
    whole = writer.allocate(found.made.shape, named_arguments(found.gather)["dtype"])
    product = writer.allocate(found.product.shape, found.product.dtype)
    for buffer in (whole, product):
        buffer.meta["layout"] = str(found.made.target)
    loop.begin()
    steps = (gathering or Gathering)(writer, found, loop, a, whole, product)
    for chunk in range(chunks):
        if form == "collective":
            steps.collective(chunk)
        elif form == "broadcast":
            steps.broadcasts(chunk)
        elif form == "p2p":
            steps.point_to_point(chunk)
        else:
            steps.ring(chunk)
    return whole, product


@dataclass(frozen=True, slots=True)
class Gathering:
    """What the steps of allgather + matmul have in common: A here [S, 1, …], the gathered A [S, D, …] and the product."""

    writer: HostWriter
    found: GatherMatmul
    loop: Loop
    a: fx.Node
    whole: fx.Node
    product: fx.Node

    @property
    def position(self) -> int:
        return self.found.team.index(self.found.rank)

    def multiply(self, part: fx.Node, *at: int) -> None:
        """Write the product of a part of the gathered A into its place."""
        matmul = self.found.matmul
        name, given = op_name(matmul), named_arguments(matmul)
        others = [given.get(operand) for operand in OPERANDS[name][1:]]
        value = self.writer.call(name, part, *others)
        copy(self.writer, select(self.writer, self.product, *at), value)

    def collective(self, chunk: int) -> None:
        """One step: all ranks' parts of a chunk at once."""
        with self.loop.step():
            mine = select(self.writer, self.a, chunk)
            part = select(self.writer, self.whole, chunk)
            self.writer.communicate("all_gather", mine, 0, list(self.found.team), out=part)
            self.multiply(part, chunk)

    def broadcasts(self, chunk: int) -> None:
        """One step per rank, which is the root."""
        for root, rank in enumerate(self.found.team):
            with self.loop.step():
                mine = select(self.writer, self.a, chunk, 0) if root == self.position else None
                part = select(self.writer, self.whole, chunk, root)
                self.writer.communicate("broadcast", mine, rank, list(self.found.team), out=part)
                self.multiply(part, chunk, root)

    def point_to_point(self, chunk: int) -> None:
        """In step i take what the rank i further on has, and send one's own to the rank i further back."""
        team = self.found.team
        for step in range(len(team)):
            with self.loop.step():
                owner = (self.position + step) % len(team)
                mine, part = select(self.writer, self.a, chunk, 0), select(self.writer, self.whole, chunk, owner)
                if step == 0:
                    copy(self.writer, part, mine)
                else:
                    targets = shifted_targets(len(team), -step)
                    self.writer.communicate("permute", mine, targets, list(team), out=part)
                self.multiply(part, chunk, owner)

    def ring(self, chunk: int) -> None:
        """In each step pass on what came in the one before it, from the rank before to the rank behind.

        A part is passed on as soon as it has come, while it is multiplied: the next step waits for what this one posts.
        """
        team, size = list(self.found.team), len(self.found.team)
        mine, posted = select(self.writer, self.a, chunk, 0), None
        part = select(self.writer, self.whole, chunk, self.position)
        for step in range(size):
            with self.loop.step():
                if posted is None:
                    copy(self.writer, part, mine)
                else:
                    self.writer.wait(posted)
                current, passed, owner = part, mine if step == 0 else part, (self.position - step) % size
                if step + 1 < size:
                    part = select(self.writer, self.whole, chunk, (owner - 1) % size)
                    posted = self.writer.call("host_ir::permute", passed, shifted_targets(size, 1), team, out=part)
                self.multiply(current, chunk, owner)


__all__ = ["GATHER_FORMS", "Gathering", "gather_then_multiply"]
