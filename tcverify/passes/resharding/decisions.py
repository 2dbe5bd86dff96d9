"""Decides which communications a resharding needs: a table over what is sharded before and after, and on which meshes.

| op | operand | result | meshes | communications |
|---|---|---|---|---|
| set | replicated | sharded | differ | scatter from the first sender |
| set | sharded | replicated | same | all_gather |
| set | sharded | replicated | differ | one gather per receiver |
| set | sharded | sharded | differ | send and recv in pairs, by position |
| set | sharded | sharded over another dim | same | all_to_all |
| set | replicated | replicated | differ | broadcast from the first sender; send and recv where it has one receiver |
| reduce | sharded | sharded | same | reduce_scatter |
| reduce | sharded | replicated | same | all_reduce |
| reduce | sharded | replicated | differ | one reduce per receiver |

Sharded means over more than one rank. A root on the other side only joins the team, at its end. Changes that need no other
rank, replicated → sharded on one mesh for example, are local. On meshes of several dims one of them changes, and each
slice along it communicates for itself.
Source: the table of nvFuser's conversion of resharding ops to communications.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch

from tcverify.errors import Unsupported
from tcverify.ops import DeviceMesh, Layout, Resharding
from tcverify.ops.reductions import ReduceOp

#: Reductions of bits.
BITWISE = ("band", "bor", "bxor")


class InnerResharding(Unsupported):
    """A resharding whose shards are not contiguous in the whole.

    Attributes:
        axis: the dim, of the operand, that gains or loses its shard.
    """

    def __init__(self, message: str, hint: str | None, axis: int) -> None:
        super().__init__(message, hint)
        self.axis = axis


#: Names of communications in the `host_ir` dialect.
CommunicationKind: TypeAlias = Literal[
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
]


@dataclass(frozen=True, slots=True)
class PostedCommunication:
    """One communication, as one of its team posts it.

    Attributes:
        team: ranks in the order in which shards are counted; of send and recv the sender, then the receiver.
        axis: the dim, of the operand, that is gathered, scattered, or by all_to_all brought together; else None.
        split: the dim that all_to_all divides; else None.
        reduce_op: of reductions.
        root: of rooted kinds the rank that has or gets the whole.
        gives: this rank has an operand; where a reduction's root has none, it gives the identity instead.
        gets: this rank has an output.
    """

    kind: CommunicationKind
    team: tuple[int, ...]
    axis: int | None = None
    split: int | None = None
    reduce_op: ReduceOp | None = None
    root: int | None = None
    gives: bool = True
    gets: bool = True


@dataclass(frozen=True, slots=True)
class ReshardingPlan:
    """What one rank does for a resharding. A reduced dim is reduced locally first, then the communications follow in order.

    Attributes:
        part: where the rank itself has what it gets: which part it is of its (locally reduced) operand, per dim where it begins
            and ends; else None.
        communications: that it takes part in.
        divisor: by what the result is divided at the end, 1 for not at all.
    """

    part: tuple[tuple[int, int], ...] | None = None
    communications: tuple[PostedCommunication, ...] = ()
    divisor: int = 1


def plan_resharding(made: Resharding, rank: int, dtype: torch.dtype) -> ReshardingPlan:
    """Decide what a rank does. All ranks decide for the same communications.

    Args:
        rank: one of `made.ranks`.

    Raises:
        InnerResharding: a row of the table would fit, were it not for the order of dims in memory.
        Unsupported: no row of the table fits; the message says which condition is violated.
    """
    dense = replace(made, source=_dense(made.source), target=_dense(made.target))
    try:
        return _decide(dense, rank, dtype)
    except InnerResharding as error:
        raise InnerResharding(f"'{made}' {error.message}", error.hint, error.axis) from None
    except Unsupported as error:
        raise Unsupported(f"'{made}' {error.message}", error.hint) from None


def _decide(made: Resharding, rank: int, dtype: torch.dtype) -> ReshardingPlan:
    if made.dim is not None:
        _check_reduction(made, dtype)
    if _is_local(made):
        return _local(made, rank)
    if made.source.mesh == made.target.mesh:
        return _within(made, rank)
    for mesh in (made.source.mesh, made.target.mesh):
        if mesh.ndim > 1:
            raise Unsupported(
                f"goes from one mesh to another, and mesh {mesh} has {mesh.ndim} dims",
                "go from mesh to mesh in layouts on meshes of one dim",
            )
    return _set_across(made, rank) if made.dim is None else _reduce_across(made, rank)


def _dense(layout: Layout) -> Layout:
    """The layout without mesh dims of one rank: they divide nothing."""
    kept = [dim for dim, size in enumerate(layout.mesh.shape) if size > 1]
    if not kept:
        return Layout.replicated(DeviceMesh.of(*layout.mesh.ranks))
    mesh = DeviceMesh(tuple(layout.mesh.shape[dim] for dim in kept), layout.mesh.ranks)
    return Layout(mesh, tuple(layout.sharding[dim] for dim in kept))


def _check_reduction(made: Resharding, dtype: torch.dtype) -> None:
    op = made.reduce_op
    whole = not (dtype.is_floating_point or dtype.is_complex)
    if (op in BITWISE and not whole) or (op == "avg" and whole) or (op in ("min", "max") and dtype.is_complex):
        raise Unsupported(
            f"reduces {str(dtype).removeprefix('torch.')} by {op}, which is not supported",
            "convert the operand to a dtype that has this reduction",
        )


def _before(made: Resharding) -> tuple[int | None, ...]:
    """Placements of the operand, in dims of the result; those of the reduced dim do not count."""
    dim = made.dim
    if dim is None:
        return made.source.sharding
    return tuple(None if s is None or s == dim else s - (s > dim) for s in made.source.sharding)


def _is_local(made: Resharding) -> bool:
    if made.source.mesh != made.target.mesh:
        return made.target.mesh.ranks == made.source.mesh.ranks[:1] and not _is_divided(made.source)
    return (made.dim is None or made.source.parts(made.dim) == 1) and all(
        before is None or before == after for before, after in zip(_before(made), made.target.sharding, strict=True)
    )


def _is_divided(layout: Layout) -> bool:
    return any(dim is not None for dim in layout.sharding)


def _local(made: Resharding, rank: int) -> ReshardingPlan:
    if rank not in made.target.mesh:
        return ReshardingPlan()
    had = [s for dim, s in enumerate(made.source.place(rank, made.shape)) if dim != made.dim]
    gets = made.target.place(rank, made.result_shape)
    return ReshardingPlan(tuple((g.start - h.start, g.stop - h.start) for h, g in zip(had, gets, strict=True)))


# ----------------------------------------------------------------------------------------------------------- on one mesh


def _within(made: Resharding, rank: int) -> ReshardingPlan:
    """On one mesh, one dim of it changes."""
    before, after = _before(made), made.target.sharding
    reduced = None if made.dim is None else made.source.mesh_dim(made.dim)
    if made.dim is not None and reduced is None:
        raise _unsharded(made)
    changed = {dim for dim, (b, a) in enumerate(zip(before, after, strict=True)) if b != a}
    changed |= set() if reduced is None else {reduced}
    if len(changed) > 1:
        raise Unsupported(
            f"changes {len(changed)} dims of mesh {made.source.mesh}", "change one mesh dim after the other"
        )
    (along,) = changed
    team = made.source.mesh.slice(rank, along)
    had, gets = made.source.sharding[along], after[along]
    if made.dim is not None:
        if gets is None:
            return ReshardingPlan(communications=(PostedCommunication("all_reduce", team, reduce_op=made.reduce_op),))
        axis = _counted(gets, made.dim)
        _check_outermost(made, axis)
        return ReshardingPlan(
            communications=(PostedCommunication("reduce_scatter", team, axis, reduce_op=made.reduce_op),)
        )
    if gets is not None:
        return ReshardingPlan(communications=(PostedCommunication("all_to_all", team, had, gets),))
    assert had is not None  # else it is local
    _check_outermost(made, had)
    return ReshardingPlan(communications=(PostedCommunication("all_gather", team, had),))


def _counted(dim: int, reduced: int) -> int:
    """A dim of the result, counted in the operand: one more where the reduced dim lies before it."""
    return dim if dim < reduced else dim + 1


def _unsharded(made: Resharding) -> Unsupported:
    return Unsupported(
        f"reduces dim {made.dim}, which is not sharded, and takes communication",
        "reduce it in the layout that it has, then set the result to the other layout",
    )


def _check_outermost(made: Resharding, axis: int) -> None:
    """Refuse a resharding whose shards are not contiguous in the whole.

    Args:
        axis: the dim, of the operand, that gains or loses its shard.
    """
    local = made.source.local_shape(made.shape)
    outer = [dim for dim in range(axis) if dim != made.dim and local[dim] != 1]
    if outer:
        raise InnerResharding(
            f"is an inner resharding: dim {axis} gains or loses its shard, and dim {outer[0]} of local extent "
            f"{local[outer[0]]} lies outside it in memory",
            "permute the dim to the front before, and back behind: pass make_resharding_contiguous does that",
            axis,
        )


# ----------------------------------------------------------------------------------------------- from one mesh to another


def _set_across(made: Resharding, rank: int) -> ReshardingPlan:
    senders, receivers = made.source.mesh.ranks, made.target.mesh.ranks
    (had,), (gets,) = made.source.sharding, made.target.sharding
    if had is not None and gets is not None:
        if had != gets:
            raise Unsupported(
                f"changes more than one axis: dim {had} loses its shard and dim {gets} gains one",
                "bring it to the other mesh in the layout that it has, and change the dim there",
            )
        if len(senders) != len(receivers):
            raise Unsupported(
                f"has {len(senders)} senders and {len(receivers)} receivers, which do not pair up",
                "go from a sharded layout to a sharded one between meshes of one size",
            )
        return _pairs(made, rank)
    if had is not None:
        _check_outermost(made, had)
        teams = [(root, _joined(senders, root)) for root in receivers]
        return ReshardingPlan(
            communications=tuple(
                PostedCommunication("gather", team, had, root=root, gives=rank in senders, gets=rank == root)
                for root, team in teams
                if rank in team
            )
        )
    if gets is None and len(senders) == len(receivers) == 1:
        return _pairs(made, rank)
    kind: CommunicationKind = "broadcast" if gets is None else "scatter"
    if gets is not None:
        _check_outermost(made, gets)
    team = _joined(receivers, senders[0])
    if rank not in team:
        return ReshardingPlan()
    gives = rank == senders[0]
    found = PostedCommunication(kind, team, gets, root=senders[0], gives=gives, gets=rank in receivers)
    return ReshardingPlan(communications=(found,))


def _joined(team: tuple[int, ...], root: int) -> tuple[int, ...]:
    return team if root in team else (*team, root)


def _pairs(made: Resharding, rank: int) -> ReshardingPlan:
    """The sender at each position sends to the receiver there. One that is both has what it gets."""
    found = []
    for sender, receiver in zip(made.source.mesh.ranks, made.target.mesh.ranks, strict=True):
        if rank == sender == receiver:
            local = made.source.local_shape(made.shape)
            return ReshardingPlan(tuple((0, size) for size in local))
        if rank == sender:
            found.append(PostedCommunication("send", (sender, receiver), gets=False))
        elif rank == receiver:
            found.append(PostedCommunication("recv", (sender, receiver), gives=False))
    return ReshardingPlan(communications=tuple(found))


def _reduce_across(made: Resharding, rank: int) -> ReshardingPlan:
    senders, receivers = made.source.mesh.ranks, made.target.mesh.ranks
    (had,), (gets,) = made.source.sharding, made.target.sharding
    if len(senders) > 1 and had != made.dim:
        raise _unsharded(made)
    if gets is not None:
        raise Unsupported(
            f"would be a reduce_scatter from mesh {made.source.mesh} to mesh {made.target.mesh}",
            "scatter on the mesh of the operand, or reduce to the other mesh and divide there",
        )
    found: list[PostedCommunication] = []
    part: tuple[tuple[int, int], ...] | None = None
    divisor = 1
    for root in receivers:
        team = _joined(senders, root)
        if rank not in team:
            continue
        if len(team) == 1:  # the only sender to itself
            part = tuple((0, size) for size in made.result_shape)
            continue
        # A root that joins counts as a member, and is no addend: an average is a sum, divided by what gave something.
        joins = root not in senders
        op = "sum" if joins and made.reduce_op == "avg" else made.reduce_op
        found.append(
            PostedCommunication("reduce", team, reduce_op=op, root=root, gives=rank in senders, gets=rank == root)
        )
        if rank == root and op != made.reduce_op:
            divisor = len(senders)
    return ReshardingPlan(part, tuple(found), divisor)


__all__ = ["BITWISE", "InnerResharding", "PostedCommunication", "ReshardingPlan", "plan_resharding"]
