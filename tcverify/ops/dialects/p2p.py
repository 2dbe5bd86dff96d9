"""The `p2p` dialect: communication as custom ops, which compilers treat as opaque calls with side effects.

Represents ops that users register: point-to-point transfers of pipelines, barriers. All of them block the host. No
compiler pass looks inside: such ops keep their place among all that communicates.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch

from tcverify.ops.collective import Collective, Group
from tcverify.ops.definitions import define
from tcverify.ops.op import Op, Request
from tcverify.ops.table import register_dialect

Tensor = torch.Tensor
Steps = Generator[Request, Tensor, Any]

#: Signatures. `peer` is a rank; a send and the receive that it meets have tensors of one shape and dtype.
SCHEMAS: dict[str, str] = {
    "send": "(Tensor x, int peer) -> ()",
    "recv": "(Tensor like, int peer) -> Tensor",
    "recv_": "(Tensor(a!) x, int peer) -> ()",
    "barrier": "(str group_name) -> ()",
}


def _transfer(x: Tensor, source: int, target: int) -> Request:
    if source == target:
        raise ValueError(f"rank {source} sends to itself")
    return Request(Collective("send_recv", (source, target), tuple(x.shape), x.dtype, root=source), x)


def send(me: int, x: Tensor, peer: int) -> Steps:
    """Send x to rank `peer`; returns when it has been received."""
    yield _transfer(x, me, peer)


def recv(me: int, like: Tensor, peer: int) -> Steps:
    """What rank `peer` sends: a new tensor of the shape and dtype of `like`."""
    return (yield _transfer(like, peer, me))


def recv_(me: int, x: Tensor, peer: int) -> Steps:
    """Write what rank `peer` sends into x."""
    x.copy_((yield _transfer(x, peer, me)))


def barrier(me: int, group_name: Group) -> Steps:
    """Return when every rank of the group has come here."""
    if not isinstance(group_name, Group):
        raise ValueError(f"barrier on group {group_name!r}, which the mesh does not have")
    nothing = torch.zeros(())
    yield Request(Collective("barrier", group_name.ranks, (), nothing.dtype, group=group_name.name), nothing)


def _op(name: str, run: Any, fake: Any) -> Op:
    group = "group_name" if name == "barrier" else None
    return Op(
        f"p2p::{name}", run, collective=True, aliases=name == "recv_", signature=SCHEMAS[name], fake=fake,
        resources=("comm",), group=group, effect=True,
    )  # fmt: skip


OPS = (
    _op("send", send, lambda x, peer: None),
    _op("recv", recv, lambda like, peer: torch.empty_like(like, memory_format=torch.contiguous_format)),
    _op("recv_", recv_, lambda x, peer: None),
    _op("barrier", barrier, lambda group_name: None),
)

register_dialect("p2p", OPS, load=lambda: define("p2p", OPS), complete=True)

__all__ = ["OPS", "SCHEMAS"]
