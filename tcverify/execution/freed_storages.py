"""Which storages of a rank are freed while it runs, and who touches them all the same."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tcverify.execution.plan import ExecutionPlan, PlanStep
from tcverify.ops import DEALLOCATE, RESIZE, Op, resolve, schema_of


class FreedStorages:
    """The storages of one rank that were freed and not allocated again."""

    def __init__(self) -> None:
        self._by: dict[int, tuple[torch.UntypedStorage, str]] = {}  # the storage itself, lest another gets its address

    @classmethod
    def of(cls, plan: ExecutionPlan) -> FreedStorages | None:
        """What follows the run of a plan; None where it never frees anything."""
        return cls() if any(step.op.name in (RESIZE, DEALLOCATE) for step in plan.steps) else None

    def step(self, step: PlanStep, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
        """Record a step that is about to run. Returns the problem if it accesses freed memory."""
        if step.op.name in (RESIZE, DEALLOCATE):
            variable, size = (*pytree.tree_leaves((args, kwargs)), 0)[:2]
            storage = variable.untyped_storage()
            if size:
                self._by.pop(storage._cdata, None)
            else:
                self._by[storage._cdata] = storage, step.name
            return None
        if not self._by or moves_nothing(step.op):
            return None
        for tensor in pytree.tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                found = self._by.get(tensor.untyped_storage()._cdata)
                if found is not None:
                    return f"use after free: it touches a storage of shape {list(tensor.shape)} that '{found[1]}' has freed"
        return None


@lru_cache(maxsize=1024)
def moves_nothing(op: Op) -> bool:
    """Whether an op only makes views of its operands, or picks some."""
    if not op.aliases or op.collective:
        return False
    if op.name == "python::getitem":
        return True
    try:
        schema = schema_of(resolve(op.name))
    except Exception:  # noqa: BLE001 - not an op of torch: nothing is known of it
        return False
    return schema is not None and not schema.is_mutable and all(r.alias_info is not None for r in schema.returns)


__all__ = ["FreedStorages", "moves_nothing"]
