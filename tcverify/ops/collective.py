"""Collectives, independent of their dialect, and what they compute.

Every dialect maps its communication ops to one `Collective`; nothing above `ops/` knows dialects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from tcverify.errors import InternalError, UnsupportedOp
from tcverify.ops.reductions import REDUCTIONS, ReduceOp
from tcverify.ops.resharding import Resharding

#: Kinds of collectives.
CollectiveKind: TypeAlias = Literal[
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "permute",
    "broadcast",
    "gather",
    "scatter",
    "reduce",
    "send_recv",
    "reshard",
    "barrier",
]

#: Kinds of which all members get the same.
ALIKE: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "broadcast")

#: Kinds of which one member, the root, has or gets the whole.
ROOTED: tuple[CollectiveKind, ...] = ("broadcast", "gather", "scatter", "reduce")


@dataclass(frozen=True, slots=True)
class Group:
    """A group that a program names, as one rank sees it: the name, and the member ranks in group order."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Collective:
    """One rank's call of a collective: its request to the communicator.

    Attributes:
        communicator: the member ranks in group order; position in it, not rank number, picks a shard.
        shape: shape of this rank's contribution; of scatter and broadcast, of what each member gets.
        dtype: element type of the contribution.
        dim: the dim that is scattered, concatenated or reduced away, else None.
        reduce_op: for reductions, one of `REDUCTIONS`, else None.
        splits: (input sizes, output sizes) along dim 0 of all_to_all, else None.
        root: for rooted kinds the rank that has or gets the whole; for send_recv the sending rank; else None.
        joined: of gather and scatter, as declared by the root: the root is in the communicator only to receive or send, and has
            no shard itself.
        targets: of permute, per position the position that gets its contribution, else None.
        resharding: of reshard, the request, else None.
        group: the name of the communicator, if it has one. Groups of other names are other communicators, though of the same
            ranks.
    """

    kind: CollectiveKind
    communicator: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int | None = None
    reduce_op: ReduceOp | None = None
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    root: int | None = None
    group: str | None = None
    joined: bool = False
    targets: tuple[int, ...] | None = None
    resharding: Resharding | None = None

    @property
    def channel(self) -> tuple[str | None, tuple[int, ...]]:
        """What tells the communicator from others: on each, calls are matched in the order in which ranks issue them."""
        return self.group, self.communicator

    @property
    def signature(self) -> tuple[object, ...]:
        """What every member must agree on. Sizes of all_to_all compare pairwise, see `mismatch`."""
        sizes = None if self.splits or self.resharding else (self.dim, self.shape)
        return self.kind, self.reduce_op, self.root, self.dtype, self.targets, self.resharding, sizes

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        if self.resharding is not None:
            return f"reshard({dtype}{self.resharding})"
        parts = [f"{dtype}{list(self.shape)}"]
        if self.dim is not None:
            parts.append(f"dim {self.dim}")
        if self.reduce_op is not None:
            parts.append(self.reduce_op)
        if self.root is not None and self.kind in ROOTED:
            parts.append(f"root {self.root}")
        if self.targets is not None:
            parts.append(f"to positions {list(self.targets)}")
        if self.splits is not None:
            parts.append(f"in {list(self.splits[0])} out {list(self.splits[1])}")
        name = f" '{self.group}'" if self.group is not None else ""
        return f"{self.kind}({', '.join(parts)}) of group{name} {list(self.communicator)}"


def mismatch(calls: Sequence[Collective]) -> str | None:
    """Say in one sentence how the calls of one communicator's members (in group order) disagree, or None.

    Sizes compare by kind: equal for reductions and gathers, pairwise `in[i][j] == out[j][i]` for all_to_all.
    """
    first = calls[0]
    group = first.communicator
    for rank, call in zip(group[1:], calls[1:], strict=True):
        if call.kind != first.kind:
            return f"rank {group[0]} calls {first.kind} while rank {rank} calls {call.kind}"
        for field, name in (
            ("reduce_op", "reduces by"),
            ("root", "has root"),
            ("dtype", "sends"),
            ("dim", "works on dim"),
            ("targets", "sends to positions"),
            ("resharding", "reshards"),
        ):
            mine, theirs = getattr(first, field), getattr(call, field)
            if mine != theirs:
                return f"in {first.kind}, rank {group[0]} {name} {mine} while rank {rank} {name} {theirs}"
        if first.splits is None and first.resharding is None and call.shape != first.shape:
            return (
                f"in {first.kind}, rank {group[0]} contributes shape {list(first.shape)} "
                f"while rank {rank} contributes {list(call.shape)}"
            )
        if first.splits is not None and call.shape[1:] != first.shape[1:]:
            return f"in {first.kind}, rank {group[0]} and rank {rank} disagree on the sizes behind dim 0"
    if first.kind == "all_to_all":
        for i, sender in enumerate(calls):
            for j, receiver in enumerate(calls):
                if sender.splits is None or receiver.splits is None:
                    raise InternalError(f"all_to_all without splits: {first}")
                sent, expected = sender.splits[0][j], receiver.splits[1][i]
                if sent != expected:
                    return (
                        f"in all_to_all, rank {group[i]} sends {sent} rows to rank {group[j]}, which expects {expected}"
                    )
    return None


def complete(
    calls: Sequence[Collective],
    tensors: Sequence[torch.Tensor],
    order: Sequence[int] | None = None,
    *,
    apart: bool = True,
) -> list[torch.Tensor]:
    """Compute every member's result of one matched collective, in group order.

    Args:
        calls: the members' calls, in group order; they match (see `mismatch`).
        tensors: the members' contributions.
        order: permutation of the members in which sums are accumulated; None means group order. Results differ by rounding.
        apart: whether results share no storage; otherwise results that are equal by definition of the collective may be one
            tensor.

    Results are fresh contiguous tensors that share storage with no contribution. Members that receive nothing get a tensor
    without elements.
    """
    call = calls[0]
    if call.kind == "reshard":
        return _resharded(call, tensors, order)
    if call.kind in ("gather", "scatter", "reduce"):
        return _rooted(calls, tensors, order)
    if call.kind == "all_reduce":
        return _repeated(reduce_contributions(call, tensors, order), len(tensors), apart)
    if call.kind == "reduce_scatter":
        total = reduce_contributions(call, tensors, order)
        return [_fresh(chunk) for chunk in total.chunk(len(tensors), _dim(call))]
    if call.kind == "all_gather":
        return _repeated(torch.cat(list(tensors), _dim(call)), len(tensors), apart)
    if call.kind == "all_to_all":
        pieces = [t.split(list(_splits(c)[0])) for c, t in zip(calls, tensors, strict=True)]
        return [torch.cat([pieces[i][j] for i in range(len(tensors))]).contiguous() for j in range(len(tensors))]
    if call.kind == "send_recv":
        return [_fresh(tensors[0]) for _ in tensors]  # the source stands first in the communicator
    if call.kind == "broadcast":
        return _repeated(tensors[call.communicator.index(_root(call))], len(tensors), apart)
    if call.kind == "permute":
        sources = source_positions(call)
        return [_fresh(tensors[sources[position]]) for position in range(len(tensors))]
    if call.kind == "barrier":
        return list(tensors)
    raise InternalError(f"no semantics for collective {call.kind}")


def _repeated(tensor: torch.Tensor, members: int, apart: bool) -> list[torch.Tensor]:
    return [_fresh(tensor) for _ in range(members)] if apart else [_fresh(tensor)] * members


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _dim(call: Collective) -> int:
    if call.dim is None:
        raise InternalError(f"{call.kind} without a dim")
    return call.dim


def _splits(call: Collective) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if call.splits is None:
        raise InternalError(f"{call.kind} without splits")
    return call.splits


def _root(call: Collective) -> int:
    if call.root is None or call.root not in call.communicator:
        raise ValueError(f"{call.kind} with root {call.root}, which is not in group {list(call.communicator)}")
    return call.root


def source_positions(call: Collective) -> list[int]:
    """Per position, the position from which a permute brings it something.

    Raises:
        ValueError: two members send to the same one.
    """
    targets = list(call.targets or ())
    if sorted(targets) != list(range(len(call.communicator))):
        raise ValueError(f"permute to positions {targets} of a group of {len(call.communicator)} ranks")
    return [targets.index(position) for position in range(len(targets))]


def _rooted(
    calls: Sequence[Collective], tensors: Sequence[torch.Tensor], order: Sequence[int] | None
) -> list[torch.Tensor]:
    at = calls[0].communicator.index(_root(calls[0]))
    call = calls[at]
    others = [position for position in range(len(tensors)) if position != at]
    sharing = others if call.joined else list(range(len(tensors)))
    results = [tensor.new_empty(0) for tensor in tensors]
    if call.kind == "gather":
        results[at] = torch.cat([tensors[position] for position in sharing], _dim(call)).contiguous()
    elif call.kind == "reduce":
        results[at] = reduce_contributions(call, tensors, order)
    else:
        chunks = tensors[at].chunk(len(sharing), _dim(call))
        for position, chunk in zip(sharing, chunks, strict=True):
            results[position] = _fresh(chunk)
    return results


def _resharded(call: Collective, tensors: Sequence[torch.Tensor], order: Sequence[int] | None) -> list[torch.Tensor]:
    made = call.resharding
    if made is None:
        raise InternalError(f"reshard without what is asked for: {call}")
    if order is None:  # else values are perturbed, those of each rank in another way
        differing = made.disagreement(dict(zip(call.communicator, tensors, strict=True)))
        if differing is not None:
            raise ValueError(
                f"ranks {differing[0]} and {differing[1]} hold different values of what '{made.source}' repeats"
            )
    whole = assemble_resharded(call, tensors, order)
    return [made.part(whole, rank) for rank in call.communicator]


def assemble_resharded(
    call: Collective, tensors: Sequence[torch.Tensor], order: Sequence[int] | None = None
) -> torch.Tensor:
    """The whole result of a reshard, from the contributions of all members, in group order."""
    made = call.resharding
    if made is None:
        raise InternalError(f"reshard without what is asked for: {call}")
    whole = made.whole(dict(zip(call.communicator, tensors, strict=True)))
    if made.dim is None:
        return whole
    addends = made.addends(whole)
    if order is None:
        return reduce_contributions(call, addends)
    members = list(order)  # whose number may differ from that of the addends
    return reduce_contributions(
        call, addends, sorted(range(len(addends)), key=lambda i: (members[i % len(members)], -i))
    )


def reduce_contributions(
    call: Collective, tensors: Sequence[torch.Tensor], order: Sequence[int] | None = None
) -> torch.Tensor:
    """Reduce the members' contributions, given in group order, by the op of a call.

    Args:
        order: as of `complete`.

    Raises:
        UnsupportedOp: there is no such op.
    """
    step = REDUCTIONS.get(call.reduce_op or "sum")
    if step is None:
        raise UnsupportedOp(call.kind, f"it reduces by '{call.reduce_op}', which has no meaning here")
    ordered = [tensors[i] for i in order] if order is not None else list(tensors)
    total = ordered[0].clone(memory_format=torch.contiguous_format)
    for tensor in ordered[1:]:
        total = step(total, tensor)
    return total / len(tensors) if call.reduce_op == "avg" else total
