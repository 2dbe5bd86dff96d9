"""Communication that differs between ranks, without cyclic waits: opaque, in other orders, with results that some do not read."""

from __future__ import annotations

from tcverify.strategies.draft import DraftValue, NoSite, PerRank
from tcverify.strategies.functional.choices import FunctionalRecord
from tcverify.strategies.functional.collectives import WAIT, schedule_wait, start_collective
from tcverify.strategies.functional.writing import (
    RANK,
    FunctionalWriter,
    add,
    bound_value,
    group_of,
    new_input,
    pick_operand,
    unary,
)


def barrier(w: FunctionalWriter, r: FunctionalRecord) -> None:
    """Wait for the other members of a group."""
    w.draft.call("p2p::barrier", w.dim(r.group))
    w.labels.append("barrier")


def exchange(w: FunctionalWriter, r: FunctionalRecord) -> None:
    """A ring: each rank sends to the next; some send before they receive, others after, so that no cyclic wait occurs.

    A ring of blocking sends deadlocks only if all ranks do the same first.
    """
    world = w.draft.mesh.world_size
    value = pick_operand(w, r.a)
    w.draft.shape(value)
    if world < 2:
        raise NoSite
    if r.how // 4 % 2:
        barrier(w, r)
    turned = bool(r.how // 8 % 2)
    target, source = (_peer(w, "previous", -1), _peer(w, "next", 1)) if turned else (
        _peer(w, "next", 1), _peer(w, "previous", -1)
    )  # fmt: skip
    sent = w.draft.call("p2p::send", value, target)
    if r.how // 16 % 3 == 2:  # between the two, something that depends on neither
        other = pick_operand(w, r.b, lambda v: bool(w.draft.spec(v).shape))
        schedule_wait(
            w, _direct(r), start_collective(w, "all_reduce", [other], w.dim(r.group), reduce_op="avg"), [other]
        )
    received = w.draft.call("p2p::recv", value, source)
    w.draft.swaps.append((sent.number, received.number, some_ranks(world, r.how)))
    w.labels += ["exchange", "rank-dependent"]
    if r.b % 2 and w.draft.same_type(received, w.main):
        w.main = add(w, w.main, received)
    else:
        w.pool.append(received)
    if r.how // 16 % 3 == 1:  # a collective right behind, which a pass may want to start earlier
        schedule_wait(w, r, start_collective(w, "all_reduce", [value], w.dim(r.group), reduce_op="sum"), [value])


def _direct(r: FunctionalRecord) -> FunctionalRecord:
    return FunctionalRecord(r.kind, r.a, r.b, 4, "new", r.group, r.delay or 1, "pool")


def _peer(w: FunctionalWriter, name: str, step: int) -> PerRank:
    world = w.draft.mesh.world_size
    return PerRank(name, lambda rank: (rank + step) % world)


def some_ranks(world: int, choice: int) -> frozenset[int]:
    """Ranks with the other order: neither none nor all."""
    kinds = (
        {rank for rank in range(world) if rank % 2},
        {rank for rank in range(world) if rank},
        {world - 1},
        {0},
    )
    return frozenset(kinds[choice % 4])


def pipeline(w: FunctionalWriter, r: FunctionalRecord) -> None:
    """Stages: all ranks except the first receive into a buffer, all except the last send on a value computed from it."""
    draft, world = w.draft, w.draft.mesh.world_size
    if world < 2:
        raise NoSite
    value = pick_operand(w, r.a)
    draft.shape(value)
    backward = bool(r.how % 2)
    before, behind = ("next", 1), ("previous", -1)
    if not backward:
        before, behind = behind, before
    first, last = (world - 1, 0) if backward else (0, world - 1)
    for _ in range(1 + r.how // 2 % 2):
        own = draft.call("aten::clone", value)
        draft.call("p2p::recv_", own, _peer(w, *before), only=frozenset(range(world)) - {first})
        made = unary(w, own, r.how // 4)
        draft.call("p2p::send", made, _peer(w, *behind), only=frozenset(range(world)) - {last})
        w.pool.append(made)
        value = made
    w.labels += ["pipeline", "rank-dependent"]


def shared_operands(w: FunctionalWriter, r: FunctionalRecord) -> None:
    """Two collectives of one communicator; some ranks contribute one value twice, and others two values.

    As when ranks without work contribute zeros: a common subexpression on one rank is not common on another.
    """
    world = w.draft.mesh.world_size
    if world < 2:
        raise NoSite
    value = pick_operand(w, r.a, lambda v: bool(w.draft.spec(v).shape))
    w.draft.shape(value)
    busy = some_ranks(world, r.how)
    share = PerRank(f"share{r.how % 4}", lambda rank: 2 if rank in busy else 1)
    parts = [w.draft.call("aten::mul.Tensor", value, part) for part in (1, share)]
    kind = ("all_reduce", "all_gather")[r.how // 4 % 2]
    for part in parts:
        dim = w.dim(r.group)
        made = (
            start_collective(w, kind, [part], dim, reduce_op="avg")
            if kind == "all_reduce"
            else start_collective(w, kind, [part], dim)
        )
        schedule_wait(w, _direct(r), made, [part])
    w.labels += ["shares", "rank-dependent"]


def partly_read(w: FunctionalWriter, r: FunctionalRecord) -> None:
    """A collective whose result some ranks do not read, but another value in its place: as where one rank logs a loss."""
    world = w.draft.mesh.world_size
    if world < 2:
        raise NoSite
    if r.how // 4 % 3 == 2:
        arrived = started = _resharded(w, r.a, w.dim(r.group), bool(r.b % 2))
        value = new_input(w, "x", w.draft.shape(arrived), dtype=w.draft.spec(arrived).dtype)
    else:
        value = pick_operand(w, r.a, lambda v: bool(w.draft.spec(v).shape))
        w.draft.shape(value)
        kind = ("all_reduce", "broadcast")[r.how // 4 % 3]
        (started,) = start_collective(w, kind, [value], w.dim(r.group), how=r.b)
        arrived = w.draft.call(WAIT, started)
    made = w.draft.call("aten::neg", arrived, rms=arrived.rms)
    w.draft.instead.append((made.number, arrived.number, value.number, some_ranks(world, r.how)))
    w.draft.dead |= {started.number, arrived.number}
    w.labels += ["partly-read", "rank-dependent"]
    w.pool.append(made)
    if r.how // 8 % 2:
        w.outputs.append(made)


def blocking(w: FunctionalWriter, r: FunctionalRecord) -> None:
    """A collective that blocks where it stands; or two, whose results some ranks read in another order."""
    how, dim = r.how, w.dim(r.group)
    made = [_block(w, r.a, dim, how)]
    if how // 4 % 3 == 2:
        made.append(_block(w, r.b, dim, how // 12))
        first, second = (unary(w, value, how // 24) for value in made)
        if second.number == first.number + 1:
            w.draft.swaps.append((first.number, second.number, some_ranks(w.draft.mesh.world_size, how)))
            w.labels.append("rank-dependent")
        w.outputs += [first, second]
    # Blocking collectives are on all ranks, whether or not they are used there.
    w.outputs += made
    w.pool += made
    w.labels.append("blocking")


def _block(w: FunctionalWriter, choice: int, dim: str, how: int) -> DraftValue:
    """The result of a collective that blocks."""
    if how % 2:
        return _resharded(w, choice, dim, bool(how // 2 % 2))
    value = pick_operand(w, choice, lambda v: len(w.draft.spec(v).shape) == 2)
    rms = value.rms * max(w.roles.sizes(dim))
    return bound_value(w, w.draft.call("tensor_cast::all_reduce", value, RANK, group_of(w, dim), rms=rms))


def _resharded(w: FunctionalWriter, choice: int, dim: str, rows: bool) -> DraftValue:
    """A matrix of which each rank has all rows and some columns in place of some rows and all columns, or the other way."""
    gathered, cut = (0, 1) if rows else (1, 0)
    multiple = w.roles.multiple(dim)

    def divides(value: DraftValue) -> bool:
        shape = w.draft.spec(value).shape
        return len(shape) == 2 and shape[cut] > 0 and shape[cut] % multiple == 0

    value = pick_operand(w, choice, divides)
    w.draft.shape(value)
    return w.draft.call("_dtensor::shard_dim_alltoall", value, gathered, cut, dim, rms=value.rms)


def swapped_starts(w: FunctionalWriter, r: FunctionalRecord) -> None:
    """Two collectives on different communicators, started in different orders on some ranks, and waited for after both."""
    dims = w.dims
    if len(dims) < 2:
        raise NoSite
    first = pick_operand(w, r.a, lambda v: bool(w.draft.spec(v).shape))
    second = pick_operand(w, r.b, lambda v: bool(w.draft.spec(v).shape))
    kinds = ("all_reduce", "broadcast", "all_gather")
    (a,) = start_collective(w, kinds[r.how // 4 % 3], [first], dims[0], how=r.how // 16)
    (b,) = start_collective(w, kinds[r.how // 12 % 3], [second], dims[1], how=r.how // 16)
    if b.number != a.number + 1:
        raise NoSite
    w.draft.swaps.append((a.number, b.number, some_ranks(w.draft.mesh.world_size, r.how)))
    w.labels += ["swapped", "rank-dependent"]
    schedule_wait(w, r, (a, b), [first, second])


__all__ = [
    "barrier",
    "blocking",
    "exchange",
    "partly_read",
    "pipeline",
    "shared_operands",
    "some_ranks",
    "swapped_starts",
]
