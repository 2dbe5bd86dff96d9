"""The `host_ir` dialect: what the host of one rank does after communication has been chosen. Streams, communications, waits.

Source: nvFuser's host IR (Communication, P2PCommunication, Wait, SetCurrentStream, GetCurrentStream, Stream, Synchronize,
Deallocate). A communication begins behind what is queued on the current stream, reads `x` and writes `out` at any time until its
`wait`, and is waited for through what it returns: `out`, or on a rank that gets nothing a tensor without elements. `out` is
allocated before, by `aten::empty`. A team is an ordered list of ranks; position in it, not rank number, picks a shard.

FX has no loop: the loops of the source appear unrolled, trip by trip.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from tcverify.domains import poison_
from tcverify.ops.collective import Collective, source_positions
from tcverify.ops.definitions import define
from tcverify.ops.op import Await, Op, Start
from tcverify.ops.reductions import REDUCTIONS, ReduceOp
from tcverify.ops.table import register_dialect
from tcverify.registry.choices import is_one_of

Tensor = torch.Tensor
Steps = Generator[Start | Await, Any, Any]

#: Names of the ops that are about streams and memory.
CURRENT_STREAM = "host_ir::current_stream"
STREAM = "host_ir::stream"
SET_STREAM = "host_ir::set_current_stream"
SYNCHRONIZE = "host_ir::synchronize"
DEALLOCATE = "host_ir::deallocate"
COMMUNICATION_WAIT = "host_ir::wait"

_OUT = "*, Tensor(a!)? out) -> Tensor(a!)"

#: Signatures of communications.
SCHEMAS: dict[str, str] = {
    "all_gather": f"(Tensor x, int dim, int[] team, {_OUT}",
    "all_reduce": f"(Tensor x, str reduce_op, int[] team, {_OUT}",
    "reduce_scatter": f"(Tensor x, int dim, str reduce_op, int[] team, {_OUT}",
    "all_to_all": f"(Tensor x, int[] team, {_OUT}",
    "permute": f"(Tensor x, int[] targets, int[] team, {_OUT}",
    "broadcast": f"(Tensor? x, int root, int[] team, {_OUT}",
    "gather": f"(Tensor? x, int dim, int root, int[] team, {_OUT}",
    "scatter": f"(Tensor? x, int dim, int root, int[] team, {_OUT}",
    "reduce": f"(Tensor x, str reduce_op, int root, int[] team, {_OUT}",
    "send": "(Tensor x, int peer) -> Tensor",
    "recv": "(Tensor(a!) out, int peer) -> Tensor(a!)",
}

#: Signatures of the other ops. A stream is a token: of the stream that is current, or of a worker, by its index.
HOST_SCHEMAS: dict[str, str] = {
    "wait": "(Tensor(a!) communication) -> ()",
    "current_stream": "() -> Tensor",
    "stream": "(int index) -> Tensor",
    "set_current_stream": "(Tensor stream) -> ()",
    "synchronize": "(Tensor stream) -> ()",
    "deallocate": "(Tensor(a!) x) -> ()",
}


def _team(op: str, me: int, team: Sequence[int]) -> tuple[int, ...]:
    if len(set(team)) != len(team):
        raise ValueError(f"{op} of team {list(team)}, which names a rank twice")
    if me not in team:
        raise ValueError(f"{op} on rank {me} of team {list(team)}, which it is not in")
    return tuple(team)


def _root(op: str, team: Sequence[int], root: int) -> int:
    if root not in team:
        raise ValueError(f"{op} with root {root}, which is not in team {list(team)}")
    return root


def _reduction(op: str, reduce_op: str) -> ReduceOp:
    if not is_one_of(reduce_op, REDUCTIONS):
        raise ValueError(f"{op} reduces by '{reduce_op}'; known are {', '.join(REDUCTIONS)}")
    return reduce_op


def _into(op: str, out: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The output, if a communication of this kind can write its result into it."""
    if out is None:
        raise ValueError(f"{op} has a result of shape {list(shape)} here, and no output to write it into")
    if list(out.shape) != list(shape):
        raise ValueError(f"{op} writes shape {list(shape)} into an output of shape {list(out.shape)}")
    if out.dtype != dtype:
        raise ValueError(f"{op} of {dtype} into an output of {out.dtype}")
    if not out.is_contiguous():
        raise ValueError(f"{op} writes into a tensor of stride {list(out.stride())}, which is not contiguous")
    return out


def _scaled(x: Sequence[int], dim: int, factor: int, parts: int, op: str) -> list[int]:
    """A shape with one dim multiplied or divided."""
    if not 0 <= dim < len(x):
        raise ValueError(f"{op} along dim {dim} of shape {list(x)}")
    if x[dim] * factor % parts:
        raise ValueError(f"{op} cannot divide dim {dim} of shape {list(x)} by {parts} ranks")
    return [*x[:dim], x[dim] * factor // parts, *x[dim + 1 :]]


def _given(op: str, x: Tensor | None, out: Tensor | None) -> Tensor:
    """The operand, or without one the output: it determines dtype and device."""
    known = out if x is None else x
    if known is None:
        raise ValueError(f"{op} has neither operand nor output")
    return known


# ------------------------------------------------------------------------- what each gives and gets: (contribution, output)


def _all_gather(x: Tensor, dim: int, team: Sequence[int], *, out: Tensor | None) -> tuple[Tensor, Tensor]:
    return x, _into("all_gather", out, _scaled(x.shape, dim, len(team), 1, "all_gather"), x.dtype)


def _all_reduce(x: Tensor, reduce_op: str, team: Sequence[int], *, out: Tensor | None) -> tuple[Tensor, Tensor]:
    return x, _into("all_reduce", out, x.shape, x.dtype)


def _reduce_scatter(
    x: Tensor, dim: int, reduce_op: str, team: Sequence[int], *, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    return x, _into("reduce_scatter", out, _scaled(x.shape, dim, 1, len(team), "reduce_scatter"), x.dtype)


def _all_to_all(x: Tensor, team: Sequence[int], *, out: Tensor | None) -> tuple[Tensor, Tensor]:
    _scaled(x.shape, 0, 1, len(team), "all_to_all")
    return x, _into("all_to_all", out, x.shape, x.dtype)


def _permute(x: Tensor, targets: Sequence[int], team: Sequence[int], *, out: Tensor | None) -> tuple[Tensor, Tensor]:
    return x, _into("permute", out, x.shape, x.dtype)


def _broadcast(x: Tensor | None, root: int, team: Sequence[int], *, out: Tensor | None) -> tuple[Tensor, Tensor]:
    known = _given("broadcast", x, out)
    return known, known.new_empty(0) if out is None else _into("broadcast", out, known.shape, known.dtype)


def _gather(x: Tensor | None, dim: int, root: int, team: Sequence[int], *, out: Tensor | None) -> tuple[Tensor, Tensor]:
    known = _given("gather", x, out)
    if out is None:
        return known, known.new_empty(0)
    sharing = len(team) - (x is None)  # a root without its own shard contributes a dummy
    share = out.new_zeros(_scaled(out.shape, dim, 1, max(sharing, 1), "gather")) if x is None else x
    return share, _into("gather", out, _scaled(share.shape, dim, sharing, 1, "gather"), share.dtype)


def _scatter(
    x: Tensor | None, dim: int, root: int, team: Sequence[int], *, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    known = _given("scatter", x, out)
    if out is None:
        _scaled(known.shape, dim, 1, max(len(team) - 1, 1), "scatter")
        return known, known.new_empty(0)
    if x is None:
        return out.new_zeros(out.shape), _into("scatter", out, out.shape, out.dtype)
    return x, _into("scatter", out, _scaled(x.shape, dim, 1, len(team), "scatter"), x.dtype)


def _reduce(x: Tensor, reduce_op: str, root: int, team: Sequence[int], *, out: Tensor | None) -> tuple[Tensor, Tensor]:
    return x, x.new_empty(0) if out is None else _into("reduce", out, x.shape, x.dtype)


# --------------------------------------------------------------------------------------------------- what they compute


def all_gather(me: int, x: Tensor, dim: int, team: Sequence[int], *, out: Tensor | None) -> Steps:
    """Concatenation along `dim` in the order of the team, into `out`."""
    ranks = _team("all_gather", me, team)
    given, result = _all_gather(x, dim, team, out=out)
    yield Start(Collective("all_gather", ranks, tuple(given.shape), given.dtype, dim=dim), given, result)
    return result


def all_reduce(me: int, x: Tensor, reduce_op: str, team: Sequence[int], *, out: Tensor | None) -> Steps:
    """Reduction over the team, into `out`."""
    ranks, op = _team("all_reduce", me, team), _reduction("all_reduce", reduce_op)
    given, result = _all_reduce(x, reduce_op, team, out=out)
    yield Start(Collective("all_reduce", ranks, tuple(given.shape), given.dtype, reduce_op=op), given, result)
    return result


def reduce_scatter(me: int, x: Tensor, dim: int, reduce_op: str, team: Sequence[int], *, out: Tensor | None) -> Steps:
    """Reduction over the team, then the chunk along `dim` at this rank's position, into `out`."""
    ranks, op = _team("reduce_scatter", me, team), _reduction("reduce_scatter", reduce_op)
    given, result = _reduce_scatter(x, dim, reduce_op, team, out=out)
    call = Collective("reduce_scatter", ranks, tuple(given.shape), given.dtype, dim=dim, reduce_op=op)
    yield Start(call, given, result)
    return result


def all_to_all(me: int, x: Tensor, team: Sequence[int], *, out: Tensor | None) -> Steps:
    """Dim 0 in equal chunks, chunk j to position j; what arrives, in the order of the team, into `out`."""
    ranks = _team("all_to_all", me, team)
    given, result = _all_to_all(x, team, out=out)
    sizes = (given.shape[0] // len(ranks),) * len(ranks)
    call = Collective("all_to_all", ranks, tuple(given.shape), given.dtype, splits=(sizes, sizes))
    yield Start(call, given, result)
    return result


def permute(me: int, x: Tensor, targets: Sequence[int], team: Sequence[int], *, out: Tensor | None) -> Steps:
    """The rank at position i sends x to position targets[i], and what it gets goes into `out`: both are posted together."""
    ranks = _team("permute", me, team)
    given, result = _permute(x, targets, team, out=out)
    call = Collective("permute", ranks, tuple(given.shape), given.dtype, targets=tuple(targets))
    source_positions(call)
    yield Start(call, given, result)
    return result


def broadcast(me: int, x: Tensor | None, root: int, team: Sequence[int], *, out: Tensor | None) -> Steps:
    """The root's x, into `out` of all members that have one."""
    ranks, root = _team("broadcast", me, team), _root("broadcast", team, root)
    given, result = _broadcast(x, root, team, out=out)
    if x is None and me == root:
        raise ValueError(f"broadcast from rank {me}, which has no operand")
    yield Start(Collective("broadcast", ranks, tuple(given.shape), given.dtype, root=root), given, result)
    return result


def gather(me: int, x: Tensor | None, dim: int, root: int, team: Sequence[int], *, out: Tensor | None) -> Steps:
    """The root's `out` gets the concatenation of all x along `dim`; a root without x has no part in it."""
    ranks, root = _team("gather", me, team), _root("gather", team, root)
    if me == root and out is None:
        raise ValueError(f"gather to rank {me}, which has no output")
    if me != root and (x is None or out is not None):
        raise ValueError(f"gather to rank {root}: rank {me} must have an operand, and no output")
    if x is None and ranks == (me,):
        raise ValueError(f"gather to rank {me} of team {list(team)}, in which no rank gives a part")
    given, result = _gather(x, dim, root, team, out=out)
    call = Collective("gather", ranks, tuple(given.shape), given.dtype, dim=dim, root=root, joined=x is None)
    yield Start(call, given, result)
    return result


def scatter(me: int, x: Tensor | None, dim: int, root: int, team: Sequence[int], *, out: Tensor | None) -> Steps:
    """The root's x in chunks along `dim`, in the order of the team, one into each `out`; a root without `out` keeps none."""
    ranks, root = _team("scatter", me, team), _root("scatter", team, root)
    if me == root and x is None:
        raise ValueError(f"scatter from rank {me}, which has no operand")
    if me != root and (out is None or x is not None):
        raise ValueError(f"scatter from rank {root}: rank {me} must have an output, and no operand")
    if out is None and ranks == (me,):
        raise ValueError(f"scatter from rank {me} of team {list(team)}, in which no rank gets a part")
    given, result = _scatter(x, dim, root, team, out=out)
    joined = out is None
    share = _scaled(given.shape, dim, 1, len(team) - joined, "scatter") if me == root else given.shape
    yield Start(
        Collective("scatter", ranks, tuple(share), given.dtype, dim=dim, root=root, joined=joined), given, result
    )
    return result


def reduce(me: int, x: Tensor, reduce_op: str, root: int, team: Sequence[int], *, out: Tensor | None) -> Steps:
    """The root's `out` gets the reduction of all x over the team."""
    ranks, root = _team("reduce", me, team), _root("reduce", team, root)
    if (out is None) == (me == root):
        raise ValueError(f"reduce to rank {root}: rank {me} has {'no' if out is None else 'an'} output")
    op = _reduction("reduce", reduce_op)
    given, result = _reduce(x, reduce_op, root, team, out=out)
    yield Start(Collective("reduce", ranks, tuple(given.shape), given.dtype, reduce_op=op, root=root), given, result)
    return result


def _peers(source: int, target: int) -> tuple[int, int]:
    if source == target:
        raise ValueError(f"rank {source} sends to itself")
    return source, target


def send(me: int, x: Tensor, peer: int) -> Steps:
    """Send x to a rank."""
    result = x.new_empty(0)
    yield Start(Collective("send_recv", _peers(me, peer), tuple(x.shape), x.dtype, root=me), x, result)
    return result


def recv(me: int, out: Tensor, peer: int) -> Steps:
    """Write what a rank sends into `out`."""
    _into("recv", out, out.shape, out.dtype)
    yield Start(Collective("send_recv", _peers(peer, me), tuple(out.shape), out.dtype, root=peer), out, out)
    return out


def wait(me: int, communication: Tensor) -> Steps:
    """Make the current stream wait until what a communication returned has arrived, and what it read may be overwritten."""
    yield Await(communication)


def token(*_: Any) -> Tensor:
    """The value of a stream. Which one it is, readers of the graph derive from the op."""
    return torch.empty(0)


def no_work(*_: Any) -> None:
    """Nothing, where one op runs after the other."""


def deallocate(x: Tensor) -> None:
    """Free the storage of x. It must not be accessed afterwards, through any alias."""
    poison_(x)


# --------------------------------------------------------------------------------------------------------- the dialect


def _fake(both: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    """Shape function of a communication, given its arguments in the order of the signature."""

    def fake(*args: Any, **kwargs: Any) -> Tensor:
        *given, out = args if "out" not in kwargs else (*args, kwargs["out"])
        return both(*given, out=out)[1]

    return fake


def _communication(name: str, run: Callable[..., Steps], fake: Callable[..., Tensor], *, writes: bool = True) -> Op:
    return Op(
        f"host_ir::{name}", run, collective=True, aliases=writes, signature=SCHEMAS[name], fake=fake, resources=("comm",),
        phase="start", effect=True,
    )  # fmt: skip


def _host(name: str, run: Callable[..., Any], fake: Callable[..., Any], **more: Any) -> Op:
    return Op(f"host_ir::{name}", run, signature=HOST_SCHEMAS[name], fake=fake, resources=(), effect=True, **more)


OPS = (
    _communication("all_gather", all_gather, _fake(_all_gather)),
    _communication("all_reduce", all_reduce, _fake(_all_reduce)),
    _communication("reduce_scatter", reduce_scatter, _fake(_reduce_scatter)),
    _communication("all_to_all", all_to_all, _fake(_all_to_all)),
    _communication("permute", permute, _fake(_permute)),
    _communication("broadcast", broadcast, _fake(_broadcast)),
    _communication("gather", gather, _fake(_gather)),
    _communication("scatter", scatter, _fake(_scatter)),
    _communication("reduce", reduce, _fake(_reduce)),
    _communication("send", send, lambda x, peer: x.new_empty(0), writes=False),
    _communication("recv", recv, lambda out, peer: out),
    _host("wait", wait, no_work, collective=True, aliases=True, phase="wait"),
    _host("current_stream", token, token),
    _host("stream", token, token),
    _host("set_current_stream", no_work, no_work),
    _host("synchronize", no_work, no_work),
    _host("deallocate", deallocate, no_work, aliases=True),
)


def _define() -> None:
    """Define the ops in torch; those that take no tensor run as well, under fake tensors too."""
    library = define("host_ir", OPS)
    for name in ("current_stream", "stream"):
        library.impl(name, token, "CompositeExplicitAutograd")


register_dialect("host_ir", OPS, load=_define, complete=True)

__all__ = [
    "COMMUNICATION_WAIT",
    "CURRENT_STREAM",
    "DEALLOCATE",
    "HOST_SCHEMAS",
    "OPS",
    "SCHEMAS",
    "SET_STREAM",
    "STREAM",
    "SYNCHRONIZE",
]
