"""Carries out a `Collective` on torch.distributed: what lockstep computes by `complete`, done by a real process group.

`dist.new_group` sorts its ranks, so every position-dependent collective is permuted here between the sorted order that
torch.distributed uses and the order of the communicator.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from tcverify.errors import ExecutorError, InternalError
from tcverify.ops.collective import Collective

_GROUPS: dict[tuple[int, ...], dist.ProcessGroup] = {}

#: Integers that gloo and NCCL do not know in every collective. They travel as int64; sums wrap around to the same values.
_WIDENED = frozenset({torch.int16, torch.uint16, torch.uint32, torch.uint64})


def process_group(communicator: tuple[int, ...]) -> dist.ProcessGroup:
    """Return the process group of these ranks, made at its first use by its members alone."""
    members = tuple(sorted(communicator))
    group = _GROUPS.get(members)
    if group is None:
        whole = members == tuple(range(dist.get_world_size()))
        made = dist.group.WORLD if whole else _new_group(members)
        if not isinstance(made, dist.ProcessGroup):
            raise InternalError(f"torch.distributed made no group of ranks {list(members)} on rank {dist.get_rank()}")
        group = _GROUPS[members] = made
    return group


def _new_group(members: tuple[int, ...]) -> Any:
    """Make a group that its members alone take part in, whatever groups each of them has made before.

    `dist.new_group` cannot: without `use_local_synchronization` all ranks must call it, and with it the group's name, under
    which members find each other, contains the number of groups that the rank has made so far. So this does what it does,
    but names the group after its ranks.
    """
    c10d = dist.distributed_c10d
    backend, store = c10d._world.pg_map[c10d._get_default_group()]
    name: Any = "tcverify:" + "_".join(map(str, members))
    made, _ = c10d._new_process_group_helper(
        len(members),
        members.index(dist.get_rank()),
        list(members),
        dist.Backend(backend),
        store,
        name,
        timeout=c10d._get_default_timeout(dist.Backend(backend)),
    )
    c10d._world.pg_group_ranks[made] = {rank: position for position, rank in enumerate(members)}
    return made


def perform(call: Collective, tensor: torch.Tensor) -> torch.Tensor:
    """Run one rank's side of a collective and return its result, a fresh contiguous tensor.

    Blocks until every member has joined.

    Raises:
        ExecutorError: torch.distributed is not initialised in this process.
    """
    if not dist.is_available() or not dist.is_initialized():
        if len(call.communicator) == 1:
            return tensor.clone(memory_format=torch.contiguous_format)
        raise ExecutorError(
            f"{call} needs a process group, and torch.distributed is not initialised",
            "call torch.distributed.init_process_group first, or run the program with tcverify",
        )
    if len(call.communicator) == 1:
        return tensor.clone(memory_format=torch.contiguous_format)
    if tensor.dtype in _WIDENED:
        return perform(replace(call, dtype=torch.int64), tensor.to(torch.int64)).to(tensor.dtype)
    group = process_group(call.communicator)
    contribution = tensor.contiguous()
    if call.kind == "all_reduce":
        total = contribution.clone()
        dist.all_reduce(total, group=group)
        return total
    members = sorted(call.communicator)
    # positions[i]: where the i-th member of the sorted group stands in the communicator
    positions = [call.communicator.index(rank) for rank in members]
    if call.kind == "reduce_scatter" and call.dim is not None:
        chunks = contribution.chunk(len(members), call.dim)
        mine = torch.empty_like(chunks[0], memory_format=torch.contiguous_format)
        # The form with one tensor: gloo makes the form with a list out of one reduce per member, three times as slow.
        # Newer torch has renamed it and warns of the old name.
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        reduce_scatter(mine, torch.cat([chunks[p] for p in positions]), group=group)
        return mine
    if call.kind == "all_gather" and call.dim is not None:
        parts = [torch.empty_like(contribution) for _ in members]
        dist.all_gather(parts, contribution, group=group)
        by_position = [parts[positions.index(p)] for p in range(len(members))]
        return torch.cat(by_position, call.dim)
    if call.kind == "all_to_all" and call.splits is not None:
        return _all_to_all(call, contribution, positions, group)
    if call.kind == "send_recv":
        source, target = call.communicator
        if dist.get_rank() == source:
            dist.send(contribution, target, group=group)
            return contribution.clone()
        received = torch.empty_like(contribution)
        dist.recv(received, source, group=group)
        return received
    raise InternalError(f"no way to perform {call}")


def _all_to_all(
    call: Collective, contribution: torch.Tensor, positions: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    if call.splits is None:
        raise InternalError(f"all_to_all without splits: {call}")
    sent, received = call.splits
    pieces = contribution.split(list(sent))
    outbox = torch.cat([pieces[p] for p in positions])
    sizes = [received[p] for p in positions]
    inbox = contribution.new_empty((sum(received), *contribution.shape[1:]))
    dist.all_to_all_single(inbox, outbox, sizes, [sent[p] for p in positions], group=group)
    by_member = inbox.split(sizes)
    return torch.cat([by_member[positions.index(p)] for p in range(len(positions))])
