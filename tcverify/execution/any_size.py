"""Runs programs of any number of ranks, each on the executor for that number."""

from __future__ import annotations

from collections.abc import Callable

from tcverify.domains import FLOAT64, Domain
from tcverify.errors import ExecutorError, InternalError
from tcverify.execution.executor import Comparison, Executor, Run
from tcverify.execution.named_executors import device_of, start_executor
from tcverify.program import Program
from tcverify.registry.executors import MAX_RANKS


class AnySize:
    """An executor for programs of any size: each runs on the executor of its size. Shrinking takes ranks from programs.

    Args:
        executor_of: gives the executor for a number of ranks, started.
        timeout: seconds that a program may take on one of them, as far as they tell.
        device: what they compute on: "cpu" or "cuda".
    """

    def __init__(
        self, name: str, executor_of: Callable[[int], Executor], timeout: float = 0.0, device: str = "cpu"
    ) -> None:
        self.name = name
        self.timeout = timeout
        self.device = device
        self._executor_of = executor_of

    def run(self, program: Program, *, observe: bool = False, domain: Domain = FLOAT64) -> Run:
        """See `Executor.run`."""
        return self._pool(program).run(program, observe=observe, domain=domain)

    def compare(self, original: Program, rewritten: Program, domain: Domain = FLOAT64) -> Comparison:
        """See `Executor.compare`."""
        return self._pool(original).compare(original, rewritten, domain)

    def start_comparison(
        self, original: Program, rewritten: Program, domain: Domain = FLOAT64
    ) -> Callable[[], Comparison]:
        """See `Executor.start_comparison`."""
        return self._pool(original).start_comparison(original, rewritten, domain)

    def _pool(self, program: Program) -> Executor:
        if program.world_size > MAX_RANKS:
            raise ExecutorError(f"a process group of {program.world_size} ranks is more than one machine is asked for")
        return self._executor_of(program.world_size)


def of_any_size(name: str, executor_of: Callable[[int], Executor | None], first: int) -> AnySize | None:
    """Return what confirms programs of any size, those from which shrinking has taken ranks among them; None where nothing does.

    Args:
        executor_of: as `executors` yields it.
        first: the number of ranks for which it is started now.
    """

    def started(world_size: int) -> Executor:
        executor = executor_of(world_size)
        if executor is None:
            raise InternalError(f"nothing confirms, but it is asked to, by '{name}'")
        start_executor(executor)
        return executor

    any_one = executor_of(min(first, MAX_RANKS))
    if any_one is None:
        return None
    device = device_of(any_one)
    if first > MAX_RANKS:  # those of fewer, which shrinking makes, start their own
        return AnySize(name, started, device=device)
    return AnySize(name, started, getattr(started(first), "timeout", 0.0), device)


__all__ = ["AnySize", "of_any_size"]
