"""Executors by the name that `--confirm` takes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch

from tcverify.errors import UsageError
from tcverify.execution.executor import Executor
from tcverify.execution.process_group.pool import ProcessGroupPool
from tcverify.execution.process_group.torchrun import StoreGroup
from tcverify.execution.process_group.worker import backend_of
from tcverify.registry import executors as named
from tcverify.registry.extensions import require_new
from tcverify.registry.registry import Registry

#: What makes an executor for a number of ranks.
Maker = Callable[[int], Executor]

#: Makers of executors by name.
EXECUTORS: Registry[Maker] = named.EXECUTORS

over_gloo = ProcessGroupPool
over_cuda = partial(ProcessGroupPool, device="cuda")
over_torchrun = partial(ProcessGroupPool, start_group=StoreGroup)


def over_nccl(world_size: int) -> ProcessGroupPool:
    """Ranks with a CUDA device each.

    Raises:
        UsageError: there are not as many.
    """
    if backend_of("cuda", world_size) != "nccl":
        what = (
            f"NCCL wants a CUDA device for each of {world_size} ranks, and this machine has {torch.cuda.device_count()}"
        )
        raise UsageError(what, "use --confirm cuda, by which ranks may share a device")
    return over_cuda(world_size)


_PROTOCOL = "an executor has a name and the methods run, compare and start_comparison: see tcverify.Executor"


def register_executor(name: str, make: Maker) -> None:
    """Register an executor: `--confirm` can name it, and it runs the programs that lockstep does not refute.

    Args:
        name: what `--confirm` calls it. An earlier registration of this name is replaced.
        make: called with a number of ranks; returns an executor for programs of that size. If the executor has `start` and
            `close`, they are called before the first program and at the end.

    Raises:
        UsageError: the name is taken or cannot be one, or `make` cannot be called.

    Example:
        >>> register_executor("patient", lambda world_size: ProcessGroupPool(world_size, timeout=600))
    """
    require_new("executor", name, [*EXECUTORS.references, "none"])
    if not callable(make):
        raise UsageError(
            f"executor '{name}' is a {type(make).__name__}, which cannot be called", "give a function that creates one"
        )
    EXECUTORS[name] = make


def make_executor(name: str, world_size: int) -> Executor:
    """Create the executor of this name for this many ranks.

    Raises:
        UsageError: the factory registered under the name does not return an executor.
    """
    executor = EXECUTORS[name](world_size)
    lacking = [part for part in ("name", "run", "compare", "start_comparison") if not hasattr(executor, part)]
    if lacking:
        what = f"executor '{name}' is a {type(executor).__name__} without {', '.join(lacking)}"
        raise UsageError(what, _PROTOCOL)
    return executor


def start_executor(executor: Executor) -> None:
    """Start an executor now, where it can be started. Raises what that raises; ours raise `ExecutorError`."""
    getattr(executor, "start", lambda: None)()


def device_of(executor: Executor) -> str:
    """What an executor computes on: "cuda" or "cpu", which is taken for granted of those that do not say."""
    return str(getattr(executor, "device", "cpu"))


@contextlib.contextmanager
def executors(name: str) -> Iterator[Callable[[int], Executor | None]]:
    """Yield a function that gives the executor of a number of ranks; "none" gives None. Executors end with the block."""
    made: dict[int, Executor] = {}

    def executor(world_size: int) -> Executor | None:
        if name == "none":
            return None
        if world_size not in made:
            made[world_size] = make_executor(name, world_size)
        return made[world_size]

    try:
        yield executor
    finally:
        for one in made.values():
            close_executor(one)


def close_executor(executor: Executor) -> None:
    """End an executor, where it can be ended."""
    getattr(executor, "close", lambda: None)()


__all__ = [
    "EXECUTORS",
    "Maker",
    "close_executor",
    "device_of",
    "executors",
    "make_executor",
    "register_executor",
    "start_executor",
]
