"""Resharding lowering with one defect put back in each class: which communications it decides on, and how they are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import fx

from tcverify.ops import DeviceMesh, Layout, Resharding
from tcverify.passes import Pass
from tcverify.passes.resharding.decisions import PostedCommunication, ReshardingPlan
from tcverify.passes.resharding.host_program import HostProgram
from tcverify.passes.resharding.lowering import ConvertOpToCommunication, PlanWriter
from tests.support.naive_layouts import is_resharding


class Mutant(HostProgram):
    """The sound passes; subclasses put a defect back, in a `stage` that replaces the one it derives from, and carry their own
    name."""

    stage: ClassVar[type[Pass] | None] = None

    def __init_subclass__(cls) -> None:
        cls.name = cls.__name__
        mine = cls.stage
        if mine is not None:
            cls.PASSES = tuple(mine if issubclass(mine, one) else one for one in HostProgram.PASSES)


class Lowering(ConvertOpToCommunication):
    """The sound lowering, of which subclasses override how each communication is decided or written.

    Attributes:
        writes: writes what a plan says.
    """

    writes: ClassVar[type[PlanWriter]] = PlanWriter

    def writing(self, *given: Any) -> PlanWriter:
        return self.writes(*given)

    def decide(self, made: Resharding, rank: int, dtype: torch.dtype) -> ReshardingPlan:
        decided = super().decide(made, rank, dtype)
        return replace(decided, communications=tuple(self.change(one, made, rank) for one in decided.communications))

    def change(self, found: PostedCommunication, made: Resharding, rank: int) -> PostedCommunication:
        return found


# ------------------------------------------------------------------------------------------------- axes, chunks and teams


class ScatteredAxisOfTheResult(Mutant):
    """A reduce_scatter's axis is counted in the result: the reduced dim before it does not count."""

    class stage(Lowering):
        def change(self, found: PostedCommunication, made: Resharding, rank: int) -> PostedCommunication:
            dim = made.target.sharding[0]
            return replace(found, axis=dim) if found.kind == "reduce_scatter" else found


class RankNumberPicksChunk(Mutant):
    """Of what all have, a rank keeps the chunk that its number says, and not its position in the mesh."""

    class stage(Lowering):
        def decide(self, made: Resharding, rank: int, dtype: torch.dtype) -> ReshardingPlan:
            if made.dim is None and not made.source.is_sharded and made.source.mesh == made.target.mesh:
                mesh = DeviceMesh(made.target.mesh.shape, tuple(sorted(made.target.mesh.ranks)))
                made = replace(
                    made, source=Layout(mesh, made.source.sharding), target=Layout(mesh, made.target.sharding)
                )
            return super().decide(made, rank, dtype)


class TeamSorted(Mutant):
    """Teams are in the order of rank numbers, as process groups are: chunks of a mesh in another order change places."""

    class stage(Lowering):
        def change(self, found: PostedCommunication, made: Resharding, rank: int) -> PostedCommunication:
            return replace(found, team=tuple(sorted(found.team))) if found.kind[:4] in ("all_", "redu") else found


class TeamAlongTheOtherMeshDim(Mutant):
    """On a mesh of two dims a rank communicates inside its slice along the other dim."""

    class stage(Lowering):
        def change(self, found: PostedCommunication, made: Resharding, rank: int) -> PostedCommunication:
            mesh = made.source.mesh
            if mesh != made.target.mesh or mesh.ndim != 2:
                return found
            along = next((dim for dim in range(2) if mesh.slice(rank, dim) == found.team), None)
            return found if along is None else replace(found, team=mesh.slice(rank, 1 - along))


class PairsByRankNumber(Mutant):
    """Senders and receivers pair up in the order of their rank numbers, and not by position."""

    class stage(Lowering):
        def decide(self, made: Resharding, rank: int, dtype: torch.dtype) -> ReshardingPlan:
            meshes = made.source.mesh, made.target.mesh
            paired = made.dim is None and made.source.is_sharded and made.target.is_sharded and meshes[0] != meshes[1]
            if paired and meshes[0].size == meshes[1].size:
                source, target = (DeviceMesh.of(*sorted(mesh.ranks)) for mesh in meshes)
                if source != target:
                    made = Resharding(
                        Layout(source, made.source.sharding), Layout(target, made.target.sharding), made.shape
                    )
            return super().decide(made, rank, dtype)


class PairsReversed(Mutant):
    """A receiver takes what the sender at its position, counted from the end, has: send and recv do not meet."""

    class stage(Lowering):
        def change(self, found: PostedCommunication, made: Resharding, rank: int) -> PostedCommunication:
            if found.kind != "recv":
                return found
            position = made.target.mesh.ranks.index(rank)
            sender = made.source.mesh.ranks[-1 - position]
            return found if sender == rank else replace(found, team=(sender, rank))


# ---------------------------------------------------------------------------------------------------------------- roots


class RootOutsideItsTeam(Mutant):
    """A root that stands on the other side does not join the team, on the ranks of the other side."""

    class stage(Lowering):
        def change(self, found: PostedCommunication, made: Resharding, rank: int) -> PostedCommunication:
            if found.root is None or rank == found.root:
                return found
            mesh = made.source.mesh if found.kind in ("gather", "reduce") else made.target.mesh
            return replace(found, team=mesh.ranks)


class RootIsRankZero(Mutant):
    """The root of a broadcast or scatter is the first rank of the world, and not the first sender."""

    class stage(Lowering):
        def change(self, found: PostedCommunication, made: Resharding, rank: int) -> PostedCommunication:
            if found.kind not in ("broadcast", "scatter"):
                return found
            team = tuple(0 if member == found.root else member for member in found.team)
            return replace(found, root=0, team=team if len(set(team)) == len(team) else found.team)


class JoinedRootIsAShard(Mutant):
    """The root that joins a gather stands before the senders: what it has no part of counts as the first part."""

    class stage(Lowering):
        def change(self, found: PostedCommunication, made: Resharding, rank: int) -> PostedCommunication:
            if found.kind != "gather" or found.root in made.source.mesh or found.root is None:
                return found
            senders = made.source.mesh.ranks
            return replace(found, team=(found.root, *senders[1:], senders[0]))


class BroadcastFromAReceiver(Mutant):
    """What is broadcast comes from a receiver that does not have it yet."""

    class stage(Lowering):
        def change(self, found: PostedCommunication, made: Resharding, rank: int) -> PostedCommunication:
            if found.kind != "broadcast":
                return found
            receivers = made.target.mesh.ranks
            root = next((one for one in receivers if one not in made.source.mesh), receivers[0])
            return replace(found, root=root, gives=rank == root or not found.gets)

        class writes(PlanWriter):
            def _post(self, x: fx.Node | None, found: PostedCommunication) -> fx.Node | None:
                if found.kind == "broadcast" and found.gives and x is None:
                    x = self.writer.allocate(self.made.shape, self.given["dtype"])
                return super()._post(x, found)


# ------------------------------------------------------------------------------------------------- one for each receiver


class _Unwritten(PlanWriter):
    """Allocates the output of a communication that is left out."""

    def _left_out(self, found: PostedCommunication) -> bool:
        raise NotImplementedError

    def _post(self, x: fx.Node | None, found: PostedCommunication) -> fx.Node | None:
        if not self._left_out(found):
            return super()._post(x, found)
        shape = self.made.target.local_shape(self.made.result_shape)
        return self.writer.allocate(shape, self.given["dtype"]) if found.gets else None


class NoGatherForTheLastReceiver(Mutant):
    """Of several receivers the last one has an output, and nobody gathers into it."""

    class stage(Lowering):
        class writes(_Unwritten):
            def _left_out(self, found: PostedCommunication) -> bool:
                receivers = self.made.target.mesh.ranks
                return found.kind == "gather" and len(receivers) > 1 and found.root == receivers[-1]


class ReducesToTheFirstReceiver(Mutant):
    """A reduction to several ranks is carried out for the first of them alone."""

    class stage(Lowering):
        class writes(_Unwritten):
            def _left_out(self, found: PostedCommunication) -> bool:
                return found.kind == "reduce" and found.root != self.made.target.mesh.ranks[0]


class EveryGatherAllocates(Mutant):
    """Each of several gathers has an output of its own on all that get one, and the last is what is read."""

    class stage(Lowering):
        class writes(PlanWriter):
            def _post(self, x: fx.Node | None, found: PostedCommunication) -> fx.Node | None:
                out = super()._post(x, found)
                if found.kind != "gather" or found.gets or self.given["rank"] not in self.made.target.mesh:
                    return out
                return self.writer.allocate(self.made.target.local_shape(self.made.result_shape), self.given["dtype"])


# ------------------------------------------------------------------------------------------------------- pairs and values


class SelfPairSent(Mutant):
    """A rank that keeps its position sends to itself, and receives from itself."""

    class stage(Lowering):
        def decide(self, made: Resharding, rank: int, dtype: torch.dtype) -> ReshardingPlan:
            decided = super().decide(made, rank, dtype)
            moved = made.dim is None and made.source.mesh != made.target.mesh and made.source.is_sharded
            if not moved or decided.part is None:
                return decided
            pair = rank, rank
            return ReshardingPlan(
                communications=(PostedCommunication("send", pair, gets=False), PostedCommunication("recv", pair))
            )


class SelfPairDropped(Mutant):
    """A rank that keeps its position does nothing: its output stays as it was allocated."""

    class stage(Lowering):
        class writes(PlanWriter):
            def _part(self, x: fx.Node, part: Sequence[tuple[int, int]]) -> fx.Node:
                if self.made.source.mesh == self.made.target.mesh or self.made.dim is not None:
                    return super()._part(x, part)
                return self.writer.allocate([stop - start for start, stop in part], self.given["dtype"])


class AllToAllNotUnpacked(Mutant):
    """What all_to_all brings is taken as it lies: the shards follow each other in the outermost dim."""

    class stage(Lowering):
        class writes(PlanWriter):
            def _all_to_all(self, x: fx.Node, found: PostedCommunication) -> fx.Node:
                result = super()._all_to_all(x, found)
                out = next(
                    node for node in reversed(result.graph.nodes) if node.name.startswith("empty") and node < result
                )
                return self.writer.call("aten::view", out, list(result.meta["val"].shape))


class SmallestPositiveIsTheIdentity(Mutant):
    """The root that joins a maximum gives the smallest positive number, and not −inf."""

    class stage(Lowering):
        class writes(PlanWriter):
            def _identity(self) -> fx.Node:
                dtype = self.given["dtype"]
                if self.made.reduce_op != "max" or not dtype.is_floating_point:
                    return super()._identity()
                shape = list(self.made.shape)
                shape[self.made.dim or 0] = 1
                return self.writer.call("aten::full", shape, torch.finfo(dtype).tiny, dtype=dtype)


class ZeroIsTheIdentity(Mutant):
    """The root that joins a reduction gives zeros, also to a minimum or product."""

    class stage(Lowering):
        class writes(PlanWriter):
            def _identity(self) -> fx.Node:
                if self.made.reduce_op not in ("min", "product"):
                    return super()._identity()
                shape = list(self.made.shape)
                shape[self.made.dim or 0] = 1
                return self.writer.call("aten::full", shape, 0, dtype=self.given["dtype"])


class AverageCountsTheRoot(Mutant):
    """The root that joins an average is counted, though it is no addend."""

    class stage(Lowering):
        def decide(self, made: Resharding, rank: int, dtype: torch.dtype) -> ReshardingPlan:
            decided = super().decide(made, rank, dtype)
            return decided if decided.divisor == 1 else replace(decided, divisor=decided.divisor + 1)


class LocalOnesLeft(Mutant):
    """A set or reduce for which a rank needs nobody else is left as it is."""

    class stage(Lowering):
        def asked(self, graph: fx.Graph) -> list[tuple[fx.Node, Resharding]]:
            return [(node, made) for node, made in super().asked(graph) if is_resharding(made)]


_VALUES = frozenset({"wrong-value", "wrong-shape"})
_STUCK = frozenset({"deadlock", "collective-mismatch", "rewritten-raises", "collective-order"})
_REFUSED = frozenset({"pass-raised"})

#: The kinds of findings, one of which each defect shows.
EXPECTED: dict[str, frozenset[str]] = {
    "ScatteredAxisOfTheResult": _VALUES | _REFUSED,
    "RankNumberPicksChunk": _VALUES,
    "TeamSorted": _VALUES,
    "TeamAlongTheOtherMeshDim": _VALUES | _STUCK,
    "PairsByRankNumber": _VALUES,
    "PairsReversed": _STUCK,
    "RootOutsideItsTeam": _STUCK | _REFUSED,
    "RootIsRankZero": _STUCK | _REFUSED,
    "JoinedRootIsAShard": _VALUES,
    "BroadcastFromAReceiver": _VALUES,
    "NoGatherForTheLastReceiver": _VALUES,
    "ReducesToTheFirstReceiver": _VALUES,
    "EveryGatherAllocates": _VALUES,
    "SelfPairSent": _STUCK,
    "SelfPairDropped": _VALUES,
    "AllToAllNotUnpacked": _VALUES,
    "SmallestPositiveIsTheIdentity": _VALUES,
    "ZeroIsTheIdentity": _VALUES,
    "AverageCountsTheRoot": _VALUES,
    "LocalOnesLeft": frozenset({"resharding-left"}),
}

MUTANTS: dict[str, type[Mutant]] = {name: globals()[name] for name in EXPECTED}
