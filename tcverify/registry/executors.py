"""The executors by name, and what they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tcverify.registry.registry import Registry

#: Makers of executors by the name that `--confirm` takes.
EXECUTORS: Registry[Callable[[int], Any]] = Registry(
    {
        "gloo": "tcverify.execution.named_executors:over_gloo",
        "nccl": "tcverify.execution.named_executors:over_nccl",
        "torchrun": "tcverify.execution.named_executors:over_torchrun",
    }
)

#: Most ranks that process groups of one machine have, and that programs are drawn for.
MAX_RANKS = 64

#: Most ranks of a program that is given.
MOST_RANKS = 1024

__all__ = ["EXECUTORS", "MAX_RANKS", "MOST_RANKS"]
