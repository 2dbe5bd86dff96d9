"""The executors by name, and the limits that they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tcverify.registry.registry import Registry

#: Factories of executors by the name that `--confirm` takes.
EXECUTORS: Registry[Callable[[int], Any]] = Registry(
    {
        "gloo": "tcverify.execution.named_executors:over_gloo",
        "cuda": "tcverify.execution.named_executors:over_cuda",
        "nccl": "tcverify.execution.named_executors:over_nccl",
        "torchrun": "tcverify.execution.named_executors:over_torchrun",
    }
)

#: Largest number of ranks of process groups on one machine, and of drawn programs.
MAX_RANKS = 64

#: Largest number of ranks of a given program.
MOST_RANKS = 1024

__all__ = ["EXECUTORS", "MAX_RANKS", "MOST_RANKS"]
