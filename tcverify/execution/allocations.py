"""Contents of allocations when they are read: uninitialised memory must not influence what a program computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from tcverify.execution.asynchrony import storage_of
from tcverify.execution.freed_storages import moves_nothing
from tcverify.execution.plan import ExecutionPlan, PlanStep
from tcverify.ops import DEALLOCATE, aliased_arguments, is_allocation, resolve
from tcverify.ops.leaves import leaves
from tcverify.program.graph import Slot


class Contents:
    """Keeps, in place of what allocations and views of them hold when they are made, what they hold at their first read.

    What is never read keeps what it holds when its memory is freed, or in the end.

    Args:
        values: by node; is written into.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values
        self._open: dict[int, tuple[str, torch.Tensor]] = {}  # by slot
        self._buffers: dict[int, list[int]] = {}  # slots, by address of the storage, which `_open` keeps

    @classmethod
    def of(cls, plan: ExecutionPlan, values: dict[str, Any]) -> Contents | None:
        """What follows the run of a plan; None where it allocates nothing."""
        return cls(values) if any(is_allocation(step.op.name) for step in plan.steps) else None

    def before(self, step: PlanStep, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Record a step that is about to run, with these arguments."""
        if step.op.name == DEALLOCATE:
            for tensor in leaves((args, kwargs), torch.Tensor):
                for slot in self._buffers.pop(storage_of(tensor), []):
                    self._close(slot)
        elif not moves_nothing(step.op):
            for slot in _read(step):
                self._close(slot)

    def made(self, slot: int, step: PlanStep, value: Any) -> None:
        """Record the result of a step."""
        if isinstance(value, torch.Tensor) and (is_allocation(step.op.name) or moves_nothing(step.op)):
            key = storage_of(value)
            if is_allocation(step.op.name):
                self._buffers[key] = []
            if key in self._buffers:
                self._buffers[key].append(slot)
                self._open[slot] = step.name, value

    def end(self) -> None:
        """The rank has come to its end."""
        for slot in list(self._open):
            self._close(slot)

    def _close(self, slot: int) -> None:
        name, tensor = self._open.pop(slot, ("", None))
        if tensor is not None:
            self._values[name] = tensor.clone()


def _read(step: PlanStep) -> list[int]:
    """The slots of the operands that a step reads: all but those that its schema says it writes into."""
    written = _written(step.op.name)
    positional = (a for i, a in enumerate(step.args) if i not in written)
    named = (a for name, a in step.kwargs.items() if name not in written)
    return [slot.index for slot in leaves([*positional, *named], Slot)]


@lru_cache(maxsize=1024)
def _written(name: str) -> frozenset[int | str]:
    """Positions and names of the arguments that an op writes into and does not read."""
    if not name.startswith(("host_ir::", "aten::copy_")):
        return frozenset()  # what adds to what it writes into, reads it
    try:
        arguments = aliased_arguments(resolve(name))
    except Exception:  # noqa: BLE001 - no op of torch: nothing is known of it
        return frozenset()
    return frozenset(key for one in arguments if one.writes for key in (one.position, one.name))


__all__ = ["Contents"]
