"""Memory of a rank whose streams run: what values hold before, while and after ops write them.

What no op has written yet is poison: NaN, or integers that are wrong everywhere. Values that share storage with others live at
fixed places; the others are simply put in place of their poison, which costs nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from tcverify.domains import FLOAT64
from tcverify.execution.interpreter import fill_arguments
from tcverify.execution.plan import PlanStep, known_constant
from tcverify.execution.streams.issue import IssuedRank, whole_storage
from tcverify.execution.streams.queues import INPUTS, StreamOp
from tcverify.ops.leaves import leaves
from tcverify.program.graph import RankConstant, Slot


class RankMemory:
    """The values of one rank, and how its ops read and write them.

    Attributes:
        values: of every slot, now.
    """

    def __init__(self, issued: IssuedRank) -> None:
        self.issued = issued
        self.values: list[Any] = []
        self._first = len(issued.plan.placeholders)
        self._slots: dict[int, list[int]] = {}  # slots that represent the value of a slot, itself first
        for slot in range(len(issued.values)):
            self._slots.setdefault(issued.aliases.get(slot, slot), []).append(slot)
        sharers = Counter(s for slot, found in enumerate(issued.storages) if slot not in issued.aliases for s in found)
        writes = Counter(issued.storage(s) for op in issued.ops for s in op.writes)
        self._template = list(issued.values)
        self._fresh: dict[int, list[int]] = {}  # slot of a value with a fixed place -> its tensors that its op makes
        self._resets: list[tuple[torch.Tensor, torch.Tensor]] = []  # storage, and what it holds before the first op
        made: set[int] = set(issued.saved)
        for op in issued.ops:
            if op.step is None:
                continue
            slot = self._first + op.step
            storages = issued.storages[slot]
            alone = len(storages) == 1 and isinstance(issued.values[slot], torch.Tensor)
            if alone and storages[0] not in made and sharers[storages[0]] == writes[storages[0]] == 1:
                for other in self._slots[slot]:
                    self._template[other] = poison(issued.values[slot])
            else:
                self._fresh[slot] = [i for i, s in enumerate(storages) if s not in made]
                leaves = pytree.tree_leaves(issued.values[slot])
                tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
                for i in self._fresh[slot]:
                    self._reset_to_poison(tensors[i])
            made.update(storages)
        for slot, _ in (pair for op in issued.ops for pair in op.copies):
            self._reset_to_poison(issued.values[slot])
        late = issued.ops[0].node == INPUTS
        for number, (whole, contents) in issued.saved.items():
            if late:
                self._resets.append((whole, poison(contents)))
            elif writes[number]:
                self._resets.append((whole, contents))

    def _reset_to_poison(self, tensor: torch.Tensor) -> None:
        whole = whole_storage(tensor)
        self._resets.append((whole, poison(whole)))

    def reset(self) -> None:
        """Go back to before the first op."""
        for whole, contents in self._resets:
            whole.copy_(contents)
        self.values = self._template.copy()

    def fill(self, leaf: Any) -> Any:
        """The value of a slot or of a rank constant; all else is as it is."""
        if isinstance(leaf, Slot):
            return self.values[leaf.index]
        return known_constant(leaf, self.issued.constants) if isinstance(leaf, RankConstant) else leaf

    def begin(self, op: StreamOp) -> tuple[PlanStep, list[Any], dict[str, Any]] | None:
        """Return the callee of an op, with its current arguments; None if it is not a step."""
        for slot, source in op.copies:
            self.values[slot].copy_(self.values[source])
        if op.step is None:
            if op.node == INPUTS:
                for whole, contents in self.issued.saved.values():
                    whole.copy_(contents)
            return None
        step = self.issued.plan.steps[op.step]
        return step, *fill_arguments(step, self.values, self.fill)

    def store(self, op: StreamOp, value: Any) -> None:
        """Write what an op has computed."""
        if op.step is None:
            return
        slot = self._first + op.step
        if self.issued.plan.steps[op.step].carry:
            value = FLOAT64.carry(value)
        fresh = self._fresh.get(slot)
        if fresh is None:
            for other in self._slots[slot]:
                self.values[other] = value
        elif fresh:
            places = leaves(self.values[slot], torch.Tensor)
            found = leaves(value, torch.Tensor)
            for i in fresh:
                write(places[i], found[i])

    def outputs(self) -> list[Any]:
        """Leaves of the output as they are now, tensors as copies."""
        leaves = pytree.tree_leaves(map_aggregate(self.issued.plan.result, self.fill))
        return [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def inputs(self) -> list[torch.Tensor]:
        """The inputs as they are now."""
        return [value.clone() for value in self.values[: self._first]]


def write(place: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a value to its place, whose elements may overlap as those of an expanded tensor do."""
    for dim, (size, stride) in enumerate(zip(place.shape, place.stride(), strict=True)):
        if stride == 0 and size > 1:
            place, value = place.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    place.copy_(value)


def poison(like: torch.Tensor) -> torch.Tensor:
    """Contents of a tensor that is not written yet: NaN, or values that differ from `like` everywhere."""
    if like.is_floating_point() or like.is_complex():
        return torch.full_like(like, float("nan"))
    return ~like if like.dtype is torch.bool else like + 1


__all__ = ["RankMemory", "poison", "write"]
