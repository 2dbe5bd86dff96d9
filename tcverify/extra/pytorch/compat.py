"""What PyTorch names differently from version to version, and keeps to itself."""

from __future__ import annotations

import torch


def forget_shardings() -> None:
    """Let DTensor forget what it has found out about ops: for another rank it may be something else."""
    from torch.distributed.tensor import DTensor

    propagate = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
    propagate.cache.cache_clear()
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)  # since 2.10
    if clear is not None:
        clear()


__all__ = ["forget_shardings"]
