"""Sends and receives of the `_c10d_functional` dialect: `isend`, `irecv` and `batch_p2p_ops`.

Sources: torch/csrc/distributed/c10d/Functional.cpp and torch/distributed/_functional_collectives.py. A peer is a position in
the group: the kernels pass it to the process group unchanged. A receive writes into its operand and returns it, whatever its
schema says; a send returns an empty tensor to wait for. Sends and receives of one pair of ranks match in order, separately
for each tag: gloo matches by tag. NCCL ignores tags; programs that rely on them there are not detected.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tcverify.ops.collective import Collective, Group
from tcverify.ops.dialects.c10d_functional import Steps, require_writable, root_of
from tcverify.ops.op import Op, Start
from tcverify.ops.table import register_dialect

Tensor = torch.Tensor


def _transfer(x: Tensor, output: Tensor, source: int, target: int, tag: int, group: Group) -> Start:
    if source == target:
        raise ValueError(f"rank {source} sends to itself")
    name = group.name if tag == 0 else f"{group.name}, tag {tag}"
    call = Collective("send_recv", (source, target), tuple(x.shape), x.dtype, root=source, group=name)
    return Start(call, x, output)


def isend(me: int, tensor: Tensor, dst: int, tag: int, group_name: Group) -> Steps:
    """Send to the rank at position `dst`. What it returns holds nothing, and is there to be waited for."""
    target = root_of("isend", me, dst, group_name, "to")
    sent = tensor.new_empty(0)
    yield _transfer(tensor, sent, me, target, tag, group_name)
    return sent


def irecv(me: int, tensor: Tensor, src: int, tag: int, group_name: Group) -> Steps:
    """Receive from the rank at position `src` into the operand."""
    source = root_of("irecv", me, src, group_name)
    yield _transfer(require_writable("irecv", tensor), tensor, source, me, tag, group_name)
    return tensor


def batch_p2p_ops(
    me: int,
    op_list: Sequence[str],
    peer_list: Sequence[int],
    tag_list: Sequence[int],
    tensors: Sequence[Tensor],
    group_name: Group,
) -> Steps:
    """Several sends and receives, which are on their way side by side."""
    _batch(op_list, peer_list, tag_list, tensors)
    results = []
    for op, peer, tag, tensor in zip(op_list, peer_list, tag_list, tensors, strict=True):
        one = isend if op == "isend" else irecv
        results.append((yield from one(me, tensor, peer, tag, group_name)))
    return results


def _batch(
    op_list: Sequence[str], peer_list: Sequence[int], tag_list: Sequence[int], tensors: Sequence[Tensor]
) -> None:
    counts = [len(given) for given in (op_list, peer_list, tag_list, tensors)]
    if len(set(counts)) > 1:
        raise ValueError(f"batch_p2p_ops has {counts} ops, peers, tags and tensors; give as many of each")
    unknown = [op for op in op_list if op not in ("isend", "irecv")]
    if unknown:
        raise ValueError(f"batch_p2p_ops knows isend and irecv, and is given {unknown[0]}")


def _fake_isend(tensor: Tensor, dst: int, tag: int, group_name: str) -> Tensor:
    return tensor.new_empty(0)


def _fake_irecv(tensor: Tensor, src: int, tag: int, group_name: str) -> Tensor:
    return require_writable("irecv", tensor)


def _fake_batch(
    op_list: Sequence[str],
    peer_list: Sequence[int],
    tag_list: Sequence[int],
    tensors: Sequence[Tensor],
    group_name: str,
) -> list[Tensor]:
    _batch(op_list, peer_list, tag_list, tensors)
    return [
        x.new_empty(0) if op == "isend" else require_writable("irecv", x)
        for op, x in zip(op_list, tensors, strict=True)
    ]


OPS = (
    Op(
        "_c10d_functional::isend", isend, collective=True, fake=_fake_isend, resources=("comm",), group="group_name",
        phase="start", effect=True, schema="(Tensor tensor, int dst, int tag, str group_name) -> Tensor",
    ),
    Op(
        "_c10d_functional::irecv", irecv, collective=True, aliases=True, fake=_fake_irecv, resources=("comm",),
        group="group_name", phase="start", effect=True,
        schema="(Tensor(a!) tensor, int src, int tag, str group_name) -> Tensor(a!)",
    ),
    Op(
        "_c10d_functional::batch_p2p_ops", batch_p2p_ops, collective=True, aliases=True, fake=_fake_batch,
        resources=("comm",), group="group_name", phase="start", effect=True,
        schema=(
            "(str[] op_list, int[] peer_list, int[] tag_list, Tensor(a!)[] tensors, str group_name) -> Tensor(a!)[]"
        ),
    ),
)  # fmt: skip

register_dialect("_c10d_functional", OPS)

__all__ = ["OPS"]
