"""Lowered programs with and without a race, and what a device shows of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tcverify.execution import StreamOrder
from tcverify.execution.streams.cuda_streams import Device, explore_on_cuda
from tcverify.execution.streams.issue import IssuedRank
from tcverify.execution.streams.simulated import QueuedDevice
from tcverify.program import Mesh, Program
from tests.support.lowered import Lowering

ONE = Mesh.grid({"dp": 1, "tp": 1})
TWO = Mesh.grid({"dp": 1, "tp": 2})
STREAMS = [
    StreamOrder("starve", stream=0),
    StreamOrder("starve", stream=1),
    StreamOrder("random", seed=1),
    StreamOrder("random", seed=2),
]


def cross(b: Lowering, *, waits: bool = True, joins: bool = True) -> Any:
    """mm on stream 0, relu of it on stream 1, joined by the output."""
    product = b.mm(b.x)
    out = b.relu(b.wait(product, 1, *([b.record(product)] if waits else [])))
    done = b.record(out, 1)
    return b.wait(out, 0, *([done] if joins else []))


def reduced(b: Lowering, *, waits: bool = True) -> Any:
    """mm on stream 0, all_reduce of it on stream 1, relu of that on stream 0, which may not wait for it."""
    product = b.mm(b.x)
    total = b.reduce(b.wait(product, 1, b.record(product)))
    done = b.record(total, 1)
    out = b.relu(b.wait(total, 0, *([done] if waits else [])))
    return b.wait(out, 0, b.record(out, 0))


def seen_of(
    one: Program, orders: Sequence[StreamOrder], device: Device | None = None, **options: str
) -> set[tuple[int, str]]:
    """What goes wrong on which rank."""
    found = explore_on_cuda(one, orders=orders, device=device or QueuedDevice(), **options)
    return {(o.rank, f"{o.text.split(' on CUDA')[0]} in {o.order}") for o in found}


def every_op(issued: Sequence[IssuedRank]) -> list[StreamOrder]:
    return [StreamOrder("early", rank=one.rank, op=number) for one in issued for number in range(len(one.ops))]
