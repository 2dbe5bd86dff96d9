"""Code that calls `torch.distributed` on process groups, traced by make_fx: what `capture_all` calls on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

WORLD = 3


def _traced(function: Callable[[torch.Tensor], Any]) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(torch.ones(6, 2))


def everything() -> fx.GraphModule:
    """Every collective that has a functional form."""
    rank = dist.get_rank()

    def function(x: torch.Tensor) -> Any:
        total, largest, sent = x.clone(), x.clone(), x.clone()
        dist.all_reduce(total)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, async_op=True).wait()
        dist.broadcast(sent, 1)
        parts = [torch.empty_like(x) for _ in range(WORLD)]
        dist.all_gather(parts, x)
        whole, stacked = x.new_empty(6 * WORLD, 2), x.new_empty(WORLD, 6, 2)
        dist.all_gather_into_tensor(whole, x)
        dist.all_gather_into_tensor(stacked, x)
        share, mean = x.new_empty(2, 2), x.new_empty(2, 2)
        dist.reduce_scatter_tensor(share, x)
        dist.reduce_scatter(mean, list(x.split(2)), op=dist.ReduceOp.AVG)
        exchanged, pieces = torch.empty_like(x), [x.new_empty(2, 2) for _ in range(WORLD)]
        dist.all_to_all_single(exchanged, x)
        dist.all_to_all(pieces, list(x.split(2)))
        dist.barrier()
        came = torch.zeros_like(x)
        if rank == 0:
            dist.send(x, 1, tag=3)
        elif rank == 1:
            dist.recv(came, 0, tag=3)
        handed = x.new_empty(2, 2)
        dist.scatter(handed, list(x.split(2)) if rank == 2 else None, src=2)
        return total, largest, sent, parts, whole, stacked, share, mean, exchanged, pieces, came, handed

    return _traced(function)


def rooted() -> fx.GraphModule:
    """A collective without a functional form."""

    def function(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        dist.reduce(x, 0)
        return x

    return _traced(function)
