"""Values of many ranks in one tensor: a row for each rank, or for each of those that hold the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx.node import map_aggregate

from tcverify.execution.asynchrony import storage_of
from tcverify.execution.plan import ExecutionPlan, PlanStep
from tcverify.program.graph import Slot

#: Most elements of one value of all ranks: 512 MiB of float64.
MOST_ELEMENTS = 1 << 26

#: The row of each rank.
Rows: TypeAlias = tuple[int, ...]


class NotStackable(Exception):
    """The ranks do not go the same way, or not by the same shapes: they have to run one by one."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class StackedRows:
    """What ranks hold.

    Attributes:
        tensor: [rows, *shape of each].
        rows: of the ranks.
    """

    tensor: torch.Tensor
    rows: Rows

    def slices(self) -> Sequence[torch.Tensor]:
        """What each rank holds: a view."""
        parts = self.tensor.unbind(0)
        return [parts[row] for row in self.rows]


@dataclass(frozen=True, slots=True, eq=False)
class ScatteredRows:
    """Values of ranks that are different parts of the values of others: views that no stack has.

    Attributes:
        tensors: of the ranks.
    """

    tensors: tuple[torch.Tensor, ...]

    def slices(self) -> Sequence[torch.Tensor]:
        """What each rank holds."""
        return self.tensors


#: Values of which each rank has its own.
ByRank: TypeAlias = StackedRows | ScatteredRows


class Alignment:
    """Brings values that have other rows into the same ones.

    Attributes:
        apart: the rows where each rank has its own.
    """

    def __init__(self, ranks: int) -> None:
        self.apart = tuple(range(ranks))
        self._common: dict[tuple[Rows, ...], Rows] = {}
        self._picked: dict[tuple[Rows, Rows], torch.Tensor] = {}

    def rows_of(self, keys: Sequence[Any]) -> Rows:
        """The rows where ranks share one that have equal keys."""
        numbers: dict[Any, int] = {}
        rows = tuple([numbers.setdefault(key, len(numbers)) for key in keys])
        return self.apart if len(numbers) == len(keys) else rows

    def common(self, values: Sequence[StackedRows]) -> Rows:
        """The fewest rows in which all of them can be written."""
        several = tuple(dict.fromkeys(value.rows for value in values))
        if len(several) == 1:
            return several[0]
        if several not in self._common:
            self._common[several] = self.rows_of(list(zip(*several, strict=True)))
        return self._common[several]

    def elements(self, value: StackedRows, rows: Rows) -> int:
        """How many elements `within` gives."""
        return value.tensor.numel() // value.tensor.shape[0] * (max(rows) + 1)

    def within(self, value: StackedRows, rows: Rows) -> torch.Tensor:
        """The tensor of a value in rows that tell apart at least the ranks that its own do: a copy, unless they are its own."""
        if value.rows == rows:
            return value.tensor
        key = value.rows, rows
        if key not in self._picked:
            self._picked[key] = torch.tensor([value.rows[rank] for rank in first_ranks(rows)])
        return value.tensor.index_select(0, self._picked[key])


def stack_rows(tensor: torch.Tensor, rows: Rows) -> StackedRows:
    """A value of ranks. Raises `NotStackable` if it is too large."""
    if tensor.numel() > MOST_ELEMENTS:
        raise NotStackable
    return StackedRows(tensor, rows)


def memory_layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where the elements of a tensor are, and how they are read."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_neg(), tensor.is_conj()


def storages_of(slices: Sequence[Sequence[Any]]) -> set[int]:
    """The storages of the tensors among what ranks hold."""
    return {storage_of(one) for some in slices for one in some if isinstance(one, torch.Tensor)}


def first_ranks(rows: Rows) -> list[int]:
    """The first rank of each row."""
    first = {row: rank for rank, row in reversed(list(enumerate(rows)))}
    return [first[row] for row in range(len(first))]


def last_writes(plan: ExecutionPlan) -> list[int]:
    """Per value of a plan, the last step that writes into storage which may be its own; −1 where none does."""
    first = len(plan.placeholders)
    above = list(range(first + len(plan.steps)))

    def top(slot: int) -> int:
        while above[slot] != slot:
            above[slot] = above[above[slot]]
            slot = above[slot]
        return slot

    attributes: dict[str, int] = {}
    for number, step in enumerate(plan.steps):
        slots = slots_of(step) if step.op.aliases or step.writes else []
        if step.constant:
            slots.append(attributes.setdefault(step.op.name, first + number))
        for slot in slots:
            above[top(slot)] = top(first + number)
    last = {top(first + number): number for number, step in enumerate(plan.steps) if step.writes}
    return [last.get(top(slot), -1) for slot in range(len(above))]


def slots_of(step: PlanStep) -> list[int]:
    """The values that a step reads."""
    found = {leaf.index for leaf in arguments_of(step) if isinstance(leaf, Slot)}
    return sorted(found | {slot for _, slot in step.slots})


def arguments_of(step: PlanStep) -> list[Any]:
    """What a step is given, however nested."""
    found: list[Any] = []
    map_aggregate((step.args, step.kwargs), found.append)
    return found


__all__ = [
    "MOST_ELEMENTS",
    "Alignment",
    "ByRank",
    "NotStackable",
    "Rows",
    "ScatteredRows",
    "StackedRows",
    "arguments_of",
    "first_ranks",
    "last_writes",
    "memory_layout_of",
    "slots_of",
    "stack_rows",
    "storages_of",
]
