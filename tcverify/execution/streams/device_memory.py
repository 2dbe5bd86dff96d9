"""Memory of a rank on a device: every value has a separate buffer, from before the first op until after the last.

An op computes into memory from the allocator, and copies the result to its buffer, on its own stream. So until an op has run,
its buffer contains poison (NaN, or wrong integers), and an op that reads it too early computes a wrong value. Without these
buffers a missing wait could go unnoticed: torch's caching allocator reuses memory in the order in which the host frees it, and a
premature reader might find the right values there, left by an earlier run, or wrong ones, by an op that is not to blame. The
memory that an op computes into never leaves its stream, so reusing it is sound.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from tcverify.execution.interpreter import RankResult, fill_arguments
from tcverify.execution.plan import known_constant
from tcverify.execution.streams.issue import IssuedRank, whole_storage
from tcverify.execution.streams.memory import poison, write
from tcverify.execution.streams.queues import INPUTS, StreamOp
from tcverify.ops import Request, Start
from tcverify.ops.leaves import leaves
from tcverify.program.graph import RankConstant, Slot


class DeviceMemory:
    """The values of one rank on a device, and how its ops read and write them.

    Attributes:
        values: of every slot: tensors in their places, with the storage sharing of the run in issue order.
    """

    def __init__(self, issued: IssuedRank, device: torch.device) -> None:
        self.issued = issued
        self.values: list[Any] = []
        self._device = device
        self._first = len(issued.plan.placeholders)
        self._wholes: dict[int, torch.Tensor] = {}  # by storage
        self._contents: dict[int, torch.Tensor] = {}  # of the storages that exist before the first op
        self._poison: dict[int, torch.Tensor] = {}
        for value, storages in zip(issued.values, issued.storages, strict=True):
            self.values.append(self._placed(value, storages, device))
        self._fresh: dict[int, list[int]] = {}  # slot -> those of its tensors that its op makes
        self._constant: dict[int, Any] = {}  # slot -> what an op makes without tensors, which would make it on the CPU
        made = set(issued.saved)
        for op in issued.ops:
            if op.step is not None:
                slot, step = self._first + op.step, issued.plan.steps[op.step]
                self._fresh[slot] = [i for i, s in enumerate(issued.storages[slot]) if s not in made]
                made.update(issued.storages[slot])
                args, kwargs = fill_arguments(step, self.values, self._fill)
                if not step.op.collective and not leaves((args, kwargs), torch.Tensor):
                    self._constant[slot] = [
                        tensor.to(device) for tensor in leaves(step.run(*args, **kwargs), torch.Tensor)
                    ]

    def _placed(self, value: Any, storages: Sequence[int], device: torch.device) -> Any:
        numbers = iter(storages)
        return pytree.tree_map_only(torch.Tensor, lambda tensor: self._place(tensor, next(numbers), device), value)

    def _place(self, tensor: torch.Tensor, storage: int, device: torch.device) -> torch.Tensor:
        """The tensor that stands on the device for one of the run in issue order."""
        if storage not in self._wholes:
            saved = self.issued.saved.get(storage)
            whole = whole_storage(tensor) if saved is None else saved[1]
            if saved is not None:
                self._contents[storage] = whole.to(device, copy=True)
            self._poison[storage] = poison(whole).to(device, copy=True)
            self._wholes[storage] = self._poison[storage].clone()
        place = torch.empty(0, dtype=tensor.dtype, device=device)
        whole_place = self._wholes[storage].untyped_storage()
        return place.set_(whole_place, tensor.storage_offset(), tensor.shape, tensor.stride())

    def _fill(self, leaf: Any) -> Any:
        if isinstance(leaf, Slot):
            return self.values[leaf.index]
        return known_constant(leaf, self.issued.constants) if isinstance(leaf, RankConstant) else leaf

    def reset(self) -> None:
        """Go back to before the first op."""
        late = self.issued.ops[0].node == INPUTS
        for storage, whole in self._wholes.items():
            known = storage in self._contents and not late
            whole.copy_(self._contents[storage] if known else self._poison[storage])

    def compute(self, op: StreamOp) -> Generator[Request | Start, torch.Tensor | None, list[torch.Tensor]]:
        """Do what an op does but for writing its fresh results, which are returned, by position in its value.

        Yields what the op asks of collectives, and is sent their results.
        """
        for slot, source in op.copies:
            self.values[slot].copy_(self.values[source])
        if op.step is None:
            if op.node == INPUTS:
                for storage, contents in self._contents.items():
                    self._wholes[storage].copy_(contents)
            return []
        slot, step = self._first + op.step, self.issued.plan.steps[op.step]
        if slot in self._constant:
            found: list[torch.Tensor] = self._constant[slot]
            return found
        args, kwargs = fill_arguments(step, self.values, self._fill)
        if not step.op.collective:
            with self._device:
                return leaves(step.run(*args, **kwargs), torch.Tensor)
        steps = step.run(self.issued.rank, *args, **kwargs)
        answer: torch.Tensor | None = None
        while True:
            try:
                with self._device:
                    asked = steps.send(answer)
            except StopIteration as stop:
                return leaves(stop.value, torch.Tensor)
            answer = yield asked
            if isinstance(asked, Start):
                assert answer is not None
                asked.output.copy_(answer.view(asked.output.shape))
                answer = None

    def store(self, op: StreamOp, results: list[torch.Tensor]) -> None:
        """Write the fresh results of an op to their places."""
        if op.step is not None:
            slot = self._first + op.step
            places = leaves(self.values[slot], torch.Tensor)
            for i in self._fresh[slot]:
                write(places[i], results[i])

    def result(self) -> RankResult:
        """The outputs and inputs as they are now, tensors as copies on the device."""
        plan = self.issued.plan
        leaves, tree = pytree.tree_flatten(map_aggregate(plan.result, self._fill))
        return RankResult(
            self.issued.rank,
            [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves],
            str(tree),
            [value.clone() for value in self.values[: self._first]],
            plan.placeholders,
            plan.mutates,
        )


__all__ = ["DeviceMemory"]
