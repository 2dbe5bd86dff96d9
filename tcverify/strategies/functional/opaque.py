"""Opaque communication, and what ranks do in different orders without waiting for each other in a circle."""

from __future__ import annotations

from tcverify.strategies.functional.choices import FunctionalRecord
from tcverify.strategies.functional.collectives import schedule_wait, start_collective
from tcverify.strategies.functional.flow import FunctionalFlow, add, pick_operand, unary
from tcverify.strategies.functional.script import ScriptValue
from tcverify.strategies.transformer.draft import PerRank
from tcverify.strategies.transformer.sites import NoSite


def barrier(flow: FunctionalFlow, r: FunctionalRecord) -> None:
    """Wait for the other members of a group."""
    flow.script.call("p2p::barrier", flow.dim(r.group))
    flow.labels.append("barrier")


def exchange(flow: FunctionalFlow, r: FunctionalRecord) -> None:
    """A ring: each rank sends to the next; some send before they receive, others behind, so that nobody waits for himself.

    A ring of blocking sends stands still only where all do the same first.
    """
    world = flow.script.mesh.world_size
    value = pick_operand(flow, r.a)
    flow.script.shape(value)
    if world < 2:
        raise NoSite
    if r.how // 4 % 2:
        barrier(flow, r)
    turned = bool(r.how // 8 % 2)
    target, source = (_peer(flow, "previous", -1), _peer(flow, "next", 1)) if turned else (
        _peer(flow, "next", 1), _peer(flow, "previous", -1)
    )  # fmt: skip
    sent = flow.script.call("p2p::send", value, target)
    if r.how // 16 % 3 == 2:  # between the two, something that depends on neither
        other = pick_operand(flow, r.b, lambda v: bool(flow.script.spec(v).shape))
        schedule_wait(
            flow, _direct(r), start_collective(flow, "all_reduce", [other], flow.dim(r.group), reduce_op="avg"), [other]
        )
    received = flow.script.call("p2p::recv", value, source)
    flow.script.swaps.append((sent.number, received.number, some_ranks(world, r.how)))
    flow.labels += ["exchange", "rank-dependent"]
    if r.b % 2 and flow.script.same_type(received, flow.main):
        flow.main = add(flow, flow.main, received)
    else:
        flow.pool.append(received)
    if r.how // 16 % 3 == 1:  # a collective right behind, which a pass may want to start earlier
        schedule_wait(
            flow, r, start_collective(flow, "all_reduce", [value], flow.dim(r.group), reduce_op="sum"), [value]
        )


def _direct(r: FunctionalRecord) -> FunctionalRecord:
    return FunctionalRecord(r.kind, r.a, r.b, 4, "new", r.group, r.delay or 1, "pool")


def _peer(flow: FunctionalFlow, name: str, step: int) -> PerRank:
    world = flow.script.mesh.world_size
    return PerRank(name, lambda rank: (rank + step) % world)


def some_ranks(world: int, choice: int) -> frozenset[int]:
    """Ranks that do it the other way round: not none, and not all."""
    kinds = (
        {rank for rank in range(world) if rank % 2},
        {rank for rank in range(world) if rank},
        {world - 1},
        {0},
    )
    return frozenset(kinds[choice % 4])


def pipeline(flow: FunctionalFlow, r: FunctionalRecord) -> None:
    """Stages: all ranks but the first receive into a buffer, all but the last send on what they make of it."""
    script, world = flow.script, flow.script.mesh.world_size
    if world < 2:
        raise NoSite
    value = pick_operand(flow, r.a)
    script.shape(value)
    backward = bool(r.how % 2)
    before, behind = ("next", 1), ("previous", -1)
    if not backward:
        before, behind = behind, before
    first, last = (world - 1, 0) if backward else (0, world - 1)
    for _ in range(1 + r.how // 2 % 2):
        own = script.call("aten::clone", value)
        script.call("p2p::recv_", own, _peer(flow, *before), only=frozenset(range(world)) - {first})
        made = unary(flow, own, r.how // 4)
        script.call("p2p::send", made, _peer(flow, *behind), only=frozenset(range(world)) - {last})
        flow.pool.append(made)
        value = made
    flow.labels += ["pipeline", "rank-dependent"]


def shared_operands(flow: FunctionalFlow, r: FunctionalRecord) -> None:
    """Two collectives of one communicator, to which some ranks bring one value twice, and the others two values.

    As where ranks that have run out of work bring zeros: what is the same computation there is another one elsewhere.
    """
    world = flow.script.mesh.world_size
    if world < 2:
        raise NoSite
    value = pick_operand(flow, r.a, lambda v: bool(flow.script.spec(v).shape))
    flow.script.shape(value)
    busy = some_ranks(world, r.how)
    share = PerRank(f"share{r.how % 4}", lambda rank: 2 if rank in busy else 1)
    parts = [flow.script.call("aten::mul.Tensor", value, part) for part in (1, share)]
    kind = ("all_reduce", "all_gather")[r.how // 4 % 2]
    for part in parts:
        dim = flow.dim(r.group)
        made = (
            start_collective(flow, kind, [part], dim, reduce_op="avg")
            if kind == "all_reduce"
            else start_collective(flow, kind, [part], dim)
        )
        schedule_wait(flow, _direct(r), made, [part])
    flow.labels += ["shares", "rank-dependent"]


def swapped_starts(flow: FunctionalFlow, r: FunctionalRecord) -> None:
    """Two collectives on different communicators, started in another order on some ranks, and waited for behind both."""
    dims = flow.dims
    if len(dims) < 2:
        raise NoSite
    first = pick_operand(flow, r.a, lambda v: bool(flow.script.spec(v).shape))
    second = pick_operand(flow, r.b, lambda v: bool(flow.script.spec(v).shape))
    kinds = ("all_reduce", "broadcast", "all_gather")
    (a,) = start_collective(flow, kinds[r.how // 4 % 3], [first], dims[0], how=r.how // 16)
    (b,) = start_collective(flow, kinds[r.how // 12 % 3], [second], dims[1], how=r.how // 16)
    if b.number != a.number + 1:
        raise NoSite
    flow.script.swaps.append((a.number, b.number, some_ranks(flow.script.mesh.world_size, r.how)))
    flow.labels += ["swapped", "rank-dependent"]
    schedule_wait(flow, r, (a, b), [first, second])


__all__ = ["ScriptValue", "barrier", "exchange", "pipeline", "shared_operands", "some_ranks", "swapped_starts"]
