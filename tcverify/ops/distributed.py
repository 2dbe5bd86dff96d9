"""Carries out a `Collective` on torch.distributed: what lockstep computes by `complete`, done by a real process group.

`dist.new_group` sorts its ranks, so every position-dependent collective is permuted here between the sorted order that
torch.distributed uses and the order of the communicator.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from tcverify.errors import ExecutorError, InternalError
from tcverify.ops.collective import Collective, assemble_resharded, reduce_contributions, source_positions

#: By name, None for groups without one, and sorted ranks.
_GROUPS: dict[tuple[str | None, tuple[int, ...]], dist.ProcessGroup] = {}

#: Integers that gloo and NCCL do not know in every collective. They travel as int64; sums wrap around to the same values.
_WIDENED = frozenset({torch.int16, torch.uint16, torch.uint32, torch.uint64})


def process_group(communicator: tuple[int, ...], name: str | None = None) -> dist.ProcessGroup:
    """Return the process group of these ranks, made at its first use by its members alone.

    Args:
        name: tells groups of the same ranks apart.
    """
    members = tuple(sorted(communicator))
    group = _GROUPS.get((name, members))
    if group is None:
        whole = name is None and members == tuple(range(dist.get_world_size()))
        made = dist.group.WORLD if whole else _new_group(members, name)
        if not isinstance(made, dist.ProcessGroup):
            raise InternalError(f"torch.distributed made no group of ranks {list(members)} on rank {dist.get_rank()}")
        group = _GROUPS[name, members] = made
    return group


def join_group(communicator: tuple[int, ...], name: str, device: torch.device) -> None:
    """Make the process group of these ranks ahead of its use, and connect its members, who all call this and wait for each other.

    Where NCCL makes the group, members meet only in its first collective: that is carried out here.

    Args:
        communicator: the members, in group order; alone, a rank needs no process group.
        device: on which the group computes.
    """
    if len(communicator) > 1 and (name, tuple(sorted(communicator))) not in _GROUPS:
        dist.all_reduce(torch.zeros(1, device=device), group=process_group(communicator, name))


def _new_group(members: tuple[int, ...], label: str | None) -> Any:
    """Create a group in which only its members take part, whatever groups each of them has created before.

    `dist.new_group` cannot: without `use_local_synchronization` all ranks must call it, and with it the group's name, under
    which members find each other, contains the number of groups that the rank has made so far. So this does what it does,
    but names the group after its ranks.
    """
    c10d = dist.distributed_c10d
    backend, store = c10d._world.pg_map[c10d._get_default_group()]
    name: Any = "tcverify:" + "_".join(map(str, members)) + (f":{label}" if label is not None else "")
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


#: What gloo knows of tensors on CUDA devices; it copies them to the host itself. All else is copied here.
_GLOO_ON_CUDA = frozenset(
    {"all_reduce", "all_gather", "all_to_all", "broadcast", "barrier", "gather", "scatter", "reduce"}
)

#: Waits for a collective in flight, and returns its result.
Finish: TypeAlias = Callable[[], torch.Tensor]


def perform(
    call: Collective, tensor: torch.Tensor, running: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> torch.Tensor:
    """Run one rank's side of a collective and return its result, a fresh contiguous tensor.

    Blocks until every member has joined. Arguments and errors as of `start_collective`.
    """
    return start_collective(call, tensor, running)()


def start_collective(
    call: Collective, tensor: torch.Tensor, running: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Finish:
    """Start one rank's side of a collective, which reads `tensor` at once; call the result to wait for its end.

    Args:
        running: a context in which what the process group cannot reduce is reduced here.

    Raises:
        ExecutorError: torch.distributed is not initialised in this process.
    """
    if call.kind == "reshard":
        return _resharded(call, tensor, running)
    if len(call.communicator) == 1:
        own = tensor.clone(memory_format=torch.contiguous_format)  # each reduction of one value is that value
        return lambda: own
    if not dist.is_available() or not dist.is_initialized():
        raise ExecutorError(
            f"{call} needs a process group, and torch.distributed is not initialised",
            "call torch.distributed.init_process_group first, or run the program with tcverify",
        )
    if call.reduce_op not in (None, "sum"):
        return _reduced_here(call, tensor, running)
    if tensor.dtype in _WIDENED:
        wide = start_collective(replace(call, dtype=torch.int64), tensor.to(torch.int64), running)
        return lambda: wide().to(tensor.dtype)
    # Ranks that make the group of each named pair where they first need it would wait for each other around a ring.
    named_pair = call.kind == "send_recv" and call.group is not None
    everybody = tuple(range(dist.get_world_size()))
    group = process_group(everybody) if named_pair else process_group(call.communicator, call.group)
    if tensor.is_cuda and call.kind not in _GLOO_ON_CUDA and dist.get_backend(group) == "gloo":
        return _through_host(call, tensor)
    # The copy is the communication's own: what the program writes into its operand later does not reach it.
    return _start(call, tensor.clone(memory_format=torch.contiguous_format), group)


def _through_host(call: Collective, tensor: torch.Tensor) -> Finish:
    staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    finish = start_collective(call, staged.copy_(tensor))
    return lambda: finish().to(tensor.device)


def _start(call: Collective, contribution: torch.Tensor, group: dist.ProcessGroup) -> Finish:
    """Start what a process group has a call for, or a few."""
    if call.kind == "all_reduce":
        return _then(dist.all_reduce(contribution, group=group, async_op=True), lambda: contribution)
    if call.kind == "broadcast" and call.root is not None:
        return _then(dist.broadcast(contribution, call.root, group=group, async_op=True), lambda: contribution)
    if call.kind == "barrier":
        return _then(dist.barrier(group=group, async_op=True), lambda: contribution)
    if call.kind == "send_recv":
        return _send_or_receive(call, contribution, group)
    if call.kind == "permute":
        return _permute(call, contribution, group)
    members = sorted(call.communicator)
    # positions[i]: position of the i-th member of the sorted group in the communicator
    positions = [call.communicator.index(rank) for rank in members]
    if call.kind == "reduce_scatter" and call.dim is not None:
        return _reduce_scatter(contribution, call.dim, positions, group)
    if call.kind == "all_gather" and call.dim is not None:
        return _all_gather(contribution, call.dim, positions, group)
    if call.kind == "all_to_all" and call.splits is not None:
        return _all_to_all(call, contribution, positions, group)
    if call.root is not None:
        return _rooted(call, contribution, members, group)
    raise InternalError(f"no way to perform {call}")


def _then(work: Any, result: Callable[[], torch.Tensor], *kept: torch.Tensor) -> Finish:
    """Wait for `work` and return its result.

    Args:
        kept: tensors that must live until then.
    """

    def finish(kept: tuple[torch.Tensor, ...] = kept) -> torch.Tensor:
        work.wait()
        return result()

    return finish


def _reduce_scatter(contribution: torch.Tensor, dim: int, positions: Sequence[int], group: dist.ProcessGroup) -> Finish:
    chunks = contribution.chunk(len(positions), dim)
    mine = torch.empty_like(chunks[0], memory_format=torch.contiguous_format)
    # The form with one tensor: gloo makes the form with a list out of one reduce per member, three times as slow.
    # Newer torch has renamed it and warns of the old name.
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    sent = torch.cat([chunks[p] for p in positions])
    return _then(reduce_scatter(mine, sent, group=group, async_op=True), lambda: mine, sent)


def _all_gather(contribution: torch.Tensor, dim: int, positions: Sequence[int], group: dist.ProcessGroup) -> Finish:
    parts = [torch.empty_like(contribution) for _ in positions]
    work = dist.all_gather(parts, contribution, group=group, async_op=True)

    def by_position() -> torch.Tensor:
        return torch.cat([parts[positions.index(p)] for p in range(len(positions))], dim)

    return _then(work, by_position, contribution)


def _send_or_receive(call: Collective, contribution: torch.Tensor, group: dist.ProcessGroup) -> Finish:
    source, target = call.communicator
    tag = zlib.crc32(call.group.encode()) >> 1 if call.group is not None else 0
    if dist.get_rank() == source:
        return _then(dist.isend(contribution, target, group=group, tag=tag), contribution.clone)
    received = torch.empty_like(contribution)
    return _then(dist.irecv(received, source, group=group, tag=tag), lambda: received)


def _permute(call: Collective, contribution: torch.Tensor, group: dist.ProcessGroup) -> Finish:
    """A send and a receive that are posted together: no backend has a collective for it."""
    me = call.communicator.index(dist.get_rank())
    source, target = source_positions(call)[me], (call.targets or ())[me]
    if source == me:
        return contribution.clone
    received = torch.empty_like(contribution)
    sending = dist.P2POp(dist.isend, contribution, call.communicator[target], group=group)
    receiving = dist.P2POp(dist.irecv, received, call.communicator[source], group=group)
    works = dist.batch_isend_irecv([sending, receiving])

    def finish(kept: torch.Tensor = contribution) -> torch.Tensor:
        for work in works:
            work.wait()
        return received

    return finish


def _rooted(call: Collective, contribution: torch.Tensor, members: list[int], group: dist.ProcessGroup) -> Finish:
    """Gather, scatter or reduce. In gloo and NCCL every member has a share of gathers and scatters: a root without
    one takes part with an unused one."""
    here, root = dist.get_rank() == call.root, call.root
    if root is None or root not in call.communicator:
        raise ValueError(f"{call.kind} with root {root}, which is not in group {list(call.communicator)}")
    nothing = contribution.new_empty(0)
    if call.kind == "reduce":
        work = dist.reduce(contribution, root, group=group, async_op=True)
        return _then(work, lambda: contribution if here else nothing, contribution)
    sharing = [rank for rank in call.communicator if not (call.joined and rank == root)]
    dim = call.dim or 0
    if call.kind == "gather":
        parts = [torch.zeros_like(contribution) for _ in members] if here else None
        work = dist.gather(contribution, parts, root, group=group, async_op=True)

        def gathered() -> torch.Tensor:
            return nothing if parts is None else torch.cat([parts[members.index(rank)] for rank in sharing], dim)

        return _then(work, gathered, contribution)
    if call.kind != "scatter":
        raise InternalError(f"no way to perform {call}")
    mine = contribution.new_zeros(call.shape)
    shares = None
    if here:
        chunks = {
            rank: chunk.contiguous() for rank, chunk in zip(sharing, contribution.chunk(len(sharing), dim), strict=True)
        }
        shares = [chunks.get(rank, mine) for rank in members]
    work = dist.scatter(mine, shares, root, group=group, async_op=True)
    return _then(work, lambda: nothing if here and call.joined else mine, *(shares or ()))


def _resharded(call: Collective, tensor: torch.Tensor, running: Callable[[], AbstractContextManager[Any]]) -> Finish:
    """Everybody gets all parts, one broadcast each, and makes its own of them: what lockstep does, on a real group."""
    made = call.resharding
    if made is None:
        raise InternalError(f"reshard without what is asked for: {call}")
    me = dist.get_rank()
    local = made.source.local_shape(made.shape)
    parts: dict[int, torch.Tensor] = {}
    finishes: dict[int, Finish] = {}
    for rank in made.source.holders():
        part = tensor if rank == me else tensor.new_zeros(local)
        sent = Collective("broadcast", call.communicator, local, call.dtype, root=rank)
        finishes[rank] = start_collective(sent, part)

    def finish() -> torch.Tensor:
        for rank, arrived in finishes.items():
            parts[rank] = arrived()
        with running():
            given = [parts.get(rank, tensor) for rank in call.communicator]
            return made.part(assemble_resharded(call, given), me)

    return finish


def _reduced_here(call: Collective, tensor: torch.Tensor, running: Callable[[], AbstractContextManager[Any]]) -> Finish:
    """Gather and reduce: gloo has no averages, nor all reductions of all dtypes, and none in other number domains."""
    gather = replace(call, kind="all_gather", dim=0, reduce_op=None, shape=(1, *call.shape))
    gathered = start_collective(gather, tensor.unsqueeze(0))

    def finish() -> torch.Tensor:
        parts = list(gathered())
        with running():
            total = reduce_contributions(call, parts)
            if call.kind == "reduce_scatter" and call.dim is not None:
                total = total.chunk(len(parts), call.dim)[call.communicator.index(dist.get_rank())]
            elif call.kind == "reduce" and dist.get_rank() != call.root:
                return total.new_empty(0)
            return total.clone(memory_format=torch.contiguous_format)

    return finish


def _all_to_all(call: Collective, contribution: torch.Tensor, positions: list[int], group: dist.ProcessGroup) -> Finish:
    if call.splits is None:
        raise InternalError(f"all_to_all without splits: {call}")
    sent, received = call.splits
    pieces = contribution.split(list(sent))
    outbox = torch.cat([pieces[p] for p in positions])
    sizes = [received[p] for p in positions]
    inbox = contribution.new_empty((sum(received), *contribution.shape[1:]))
    work = dist.all_to_all_single(inbox, outbox, sizes, [sent[p] for p in positions], group=group, async_op=True)

    def by_position() -> torch.Tensor:
        by_member = inbox.split(sizes)
        return torch.cat([by_member[positions.index(p)] for p in range(len(positions))])

    return _then(work, by_position, outbox)
