"""What lives as long as a test session: process groups by world size, passes in their processes."""

from __future__ import annotations

import json
from collections import OrderedDict
from functools import partial
from pathlib import Path

from tcverify.application import Guarded, InProcess, Subject
from tcverify.application.loading import prepare_pass
from tcverify.cli.strategy_choice import StrategyChoice, choose_strategies
from tcverify.errors import PassLoadError
from tcverify.execution import AnySize, Executor, close_executor, device_of, make_executor, start_executor
from tcverify.pytest_plugin.cases import PytestCase

#: Passes whose processes are kept for the items to come; each has one or two.
KEPT_PASSES = 8

#: The smallest number of ranks that strategies draw, and so one that is needed where they choose.
SMALLEST = 2


class Session:
    """Holds what the items of one process share. Nothing starts before it is needed."""

    def __init__(self) -> None:
        self._pools: dict[tuple[str, int], Executor] = {}
        self._subjects: OrderedDict[str, Subject] = OrderedDict()
        self._suited: dict[str, StrategyChoice] = {}

    def executor(self, case: PytestCase) -> Executor | None:
        """Return what confirms a case, or None.

        Raises:
            ExecutorError: the process group does not start.
        """
        if case.confirm == "none":
            return None
        if case.world.size is None:
            device = device_of(self._pool(case.confirm, SMALLEST))
            return AnySize(case.confirm, partial(self.pool, case.confirm), device=device)
        return self.pool(case.confirm, case.world.size)

    def pool(self, confirm: str, world_size: int) -> Executor:
        """Return the executor for a world size, started. Raises as `executor` does."""
        executor = self._pool(confirm, world_size)
        start_executor(executor)
        return executor

    def _pool(self, confirm: str, world_size: int) -> Executor:
        """Return the executor for a world size, which may not be started yet."""
        key = confirm, world_size
        if key not in self._pools:
            self._pools[key] = make_executor(confirm, world_size)
        return self._pools[key]

    def subject(self, case: PytestCase) -> Subject:
        """Return the pass of a case.

        Raises:
            PassLoadError: it cannot be loaded.
        """
        key = _key(case)
        if key not in self._subjects:
            self._subjects[key] = _open(case)
            if len(self._subjects) > KEPT_PASSES:
                _, oldest = self._subjects.popitem(last=False)
                oldest.close()
        self._subjects.move_to_end(key)
        return self._subjects[key]

    def suited(self, case: PytestCase, state_dir: Path) -> StrategyChoice | None:
        """Say what suits the pass of a case on its world; None where that is not asked for.

        Raises:
            PassLoadError: the pass cannot be loaded.
            UsageError: nothing can be written into `state_dir`.
        """
        world = case.world
        if not world.suited or world.size is None:
            return None
        key = json.dumps([_key(case), world.label, case.max_examples])
        if key not in self._suited:
            self._suited[key] = choose_strategies(
                self.subject(case), state_dir, world.name, world.size, world.mesh, max_examples=case.max_examples
            )
        return self._suited[key]

    def close(self) -> None:
        """End all processes."""
        for subject in self._subjects.values():
            subject.close()
        for pool in self._pools.values():
            close_executor(pool)
        self._subjects.clear()
        self._pools.clear()


def _key(case: PytestCase) -> str:
    """Says which pass a case has, with which options."""
    name = ", ".join(case.reference.targets) or str(id(case.reference.subject))
    return json.dumps([name, case.pass_options, case.pass_timeout])


def _open(case: PytestCase) -> Subject:
    if not case.reference.targets:
        return InProcess(prepare_pass(case.reference.subject, "", case.pass_options))
    *first, last = case.reference.targets
    for target in first:
        try:
            return Guarded(target, case.pass_options, timeout=case.pass_timeout, covered=())
        except PassLoadError:
            continue  # e.g. a file that imports what stands beside it, and is a part of a package
    return Guarded(last, case.pass_options, timeout=case.pass_timeout, covered=())
