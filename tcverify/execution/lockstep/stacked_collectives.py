"""Collectives of stacked ranks: all ranks come to the same one at once, and members of a group may be answered by one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tcverify.domains import Domain
from tcverify.execution.asynchrony import Moment, Timing, contribution, storage_of, unwrite_
from tcverify.execution.interpreter import CollectiveCall
from tcverify.execution.lockstep.rank_rows import (
    Alignment,
    NotStackable,
    StackedRows,
    first_ranks,
    memory_layout_of,
    stack_rows,
    storages_of,
)
from tcverify.execution.perturbation import Perturbation
from tcverify.execution.plan import PlanStep
from tcverify.ops import Await, Collective, Request, Start, complete, mismatch
from tcverify.ops.collective import ALIKE


class _Arrived:
    """What a rank's start of a collective has written, or would have: an output without other readers need not be written.

    Args:
        outside: whether the output is existing storage.
        apart: whether the returned storage belongs to this rank alone.
    """

    def __init__(self, output: torch.Tensor, answer: torch.Tensor, outside: bool, apart: bool) -> None:
        self.output, self.written = output, not output.numel()
        self.result = answer.view(output.shape) if output.numel() else output
        if outside:
            self.write()
            self.result = output if apart else self.result

    def write(self) -> None:
        """Write the output, once."""
        if not self.written:
            self.output.copy_(self.result)
            self.written = True


def _returned(by: Sequence[_Arrived], value: Any) -> Any:
    """Placeholder for the result of an op that has started collectives, or waited for some."""
    if not isinstance(value, torch.Tensor):
        return pytree.tree_map_only(torch.Tensor, partial(_returned, by), value)
    if len(by) == 1 and by[0].output is value:
        return by[0].result
    same = [one for one in by if storage_of(one.output) == storage_of(value)]
    if len(same) == 1 and memory_layout_of(same[0].output) == memory_layout_of(value):
        return same[0].result
    for one in same:
        one.write()
    return value


@dataclass(slots=True, eq=False)
class _UnderWay:
    """A collective that all ranks have started, and that is carried out when it is waited for.

    Attributes:
        number: in the order in which they have started.
        starts: of the ranks; none once it has been carried out.
        tensors: what each contributes: a copy where it reads at once.
        outside: of the ranks, whether the output is existing storage.
        timing: when it reads.
        result: of the step, if the outputs are not visible elsewhere; otherwise they are written.
    """

    number: int
    starts: Sequence[Start]
    tensors: Sequence[torch.Tensor]
    outside: Sequence[bool]
    timing: Moment
    result: StackedRows | None = None


class Collectives:
    """The collectives of a run.

    Attributes:
        under_way: by the storages that are written at the wait.
        calls: of the ranks.
        contributed: by the first rank, to each collective, in the order in which they are carried out.
        answers: of these.
    """

    def __init__(
        self,
        ranks: int,
        alignment: Alignment,
        domain: Domain,
        timing: Moment | Timing,
        perturbation: Perturbation | None = None,
    ) -> None:
        self._perturbation = perturbation
        self._size, self._alignment, self._domain, self._timing = ranks, alignment, domain, timing
        self._started_so_far = 0
        self.under_way: dict[int, list[_UnderWay]] = {}
        self.calls: list[list[CollectiveCall]] = [[] for _ in range(ranks)]
        self.contributed: list[torch.Tensor] = []
        self.answers: list[torch.Tensor] = []

    def meet(self, step: PlanStep, generators: Sequence[Any], slices: Sequence[Sequence[Any]], apart: bool) -> Any:
        """Drive every rank's side of a collective to its end; return what each of them returns, or the stack of it."""
        answers: list[Any] = [None] * self._size
        timing = self._timing if isinstance(self._timing, str) else self._timing(0, step.name)
        late: list[_UnderWay] = []
        outside = storages_of(slices)
        arrived: list[list[_Arrived]] = [[] for _ in generators]
        while True:
            requests: list[Request] = []
            starts: list[Start] = []
            waits = 0
            ended: list[Any] = []
            for rank, generator in enumerate(generators):
                try:
                    asked = generator.send(answers[rank])
                except StopIteration as stop:
                    ended.append(stop.value)
                    continue
                if isinstance(asked, Await):
                    waits += 1
                    self._arrive(asked.tensor, arrived, apart)
                    continue
                self.calls[rank].append(CollectiveCall(step.name, asked.collective))
                if isinstance(asked, Start):
                    starts.append(asked)
                requests.append(Request(asked.collective, asked.tensor))
            if self._size not in (len(ended), waits, len(requests)) or len(starts) not in (0, self._size):
                raise NotStackable
            if ended and late:
                return self._started(late, ended, apart)
            if ended:
                return [_returned(by, one) if by else one for by, one in zip(arrived, ended, strict=True)]
            answers = [None] * self._size
            written = [storage_of(start.output) in outside for start in starts]
            if starts and timing == "issue":
                self._arrived(starts, self._written(requests), written, arrived, apart)
            elif starts:
                tensors = [contribution(one, timing) for one in starts]
                late.append(_UnderWay(self._started_so_far, starts, tensors, written, timing))
                self._started_so_far += 1
            elif requests:
                answers = self._answers_to(requests)

    def _answers_to(self, requests: Sequence[Request]) -> list[torch.Tensor]:
        self.contributed.append(requests[0].tensor.clone())
        answers = self._complete(requests)
        self.answers.append(answers[0])
        return answers

    def _written(self, requests: Sequence[Request]) -> list[torch.Tensor]:
        """What collectives that were started write: as a start's result comes later, it is perturbed here."""
        answers = self._answers_to(requests)
        if self._perturbation is None:
            return answers
        perturbed = {id(one): self._perturbation(one) for one in {id(one): one for one in answers}.values()}
        return [perturbed[id(one)] for one in answers]

    def _started(self, late: Sequence[_UnderWay], ended: list[Any], apart: bool) -> Any:
        """What a step gives that has started a collective: the stack of it is what is written into when that arrives."""
        if len(late) > 1 or not all(isinstance(one, torch.Tensor) for one in ended):
            raise NotStackable
        (begun,) = late
        inside = begun.outside[0]  # a buffer, which others see as well
        if any(one != inside for one in begun.outside):
            raise NotStackable
        if any(one is not start.output for one, start in zip(ended, begun.starts, strict=True)):
            raise NotStackable  # a view of what has still to be written
        alike = not (inside or apart) and begun.starts[0].collective.kind in ALIKE
        keys = [start.collective.communicator if alike else rank for rank, start in enumerate(begun.starts)]
        rows = self._alignment.rows_of(keys)
        ranks = first_ranks(rows)
        for rank in range(self._size) if inside else ranks:
            unwrite_(begun.starts[rank], begun.timing, self._domain)
        made: Any = ended
        if not inside:
            made = begun.result = stack_rows(torch.stack([ended[rank] for rank in ranks]), rows)
            self.under_way.setdefault(storage_of(made.tensor), []).append(begun)
        self.under_way.setdefault(storage_of(begun.starts[0].output), []).append(begun)
        return made

    def _arrive(self, tensor: torch.Tensor, arrived: Sequence[list[_Arrived]], apart: bool) -> None:
        """Carry out collectives that were to write into the storage of a tensor, or into the outputs that it represents."""
        pending = self.under_way.pop(storage_of(tensor), [])
        for begun in list(pending):
            if begun.starts:
                pending += self.under_way.pop(storage_of(begun.starts[0].output), [])
        for begun in sorted(pending, key=lambda one: one.number):
            if not begun.starts:
                continue  # it has been waited for by another name
            requests = [Request(s.collective, t) for s, t in zip(begun.starts, begun.tensors, strict=True)]
            answers = self._written(requests)
            if begun.result is None:
                self._arrived(begun.starts, answers, [True] * self._size, arrived, apart)
            elif begun.result.tensor.numel():
                for row, answer in dict(zip(begun.result.rows, answers, strict=True)).items():
                    begun.result.tensor[row].copy_(answer.view(begun.result.tensor[row].shape))
            begun.starts, begun.tensors, begun.result = (), (), None

    def _arrived(
        self,
        starts: Sequence[Start],
        answers: Sequence[torch.Tensor],
        outside: Sequence[bool],
        arrived: Sequence[list[_Arrived]],
        apart: bool,
    ) -> None:
        """Record results: members with the same result may share it, unless they write into it later."""
        own = apart or len(set(map(id, answers))) == self._size
        for by, start, answer, inside in zip(arrived, starts, answers, outside, strict=True):
            by.append(_Arrived(start.output, answer, inside, own))

    def _complete(self, requests: Sequence[Request]) -> list[torch.Tensor]:
        """What every rank is answered. All ranks ask at once; those of a communicator meet if all its members name it."""
        answers: list[Any] = [None] * self._size
        known: dict[Any, list[torch.Tensor]] = {}  # where others contribute the same, and are answered by position
        for rank, request in enumerate(requests):
            members = request.collective.communicator
            if answers[rank] is not None:
                continue
            if rank not in members or not all(0 <= m < self._size and answers[m] is None for m in members):
                raise NotStackable
            calls: list[Collective] = [requests[m].collective for m in members]
            if any(call.channel != request.collective.channel for call in calls) or mismatch(calls) is not None:
                raise NotStackable
            tensors = [requests[m].tensor for m in members]
            call = calls[0]
            key = (call.signature, *((c.splits, *memory_layout_of(t)) for c, t in zip(calls, tensors, strict=True)))
            named = call.root is not None or call.resharding is not None
            found = None if named else known.get(key)
            if found is None:
                order = None
                if self._perturbation is not None:
                    order, tensors = self._perturbation.order(len(calls)), self._perturbation.addends(calls, tensors)
                found = known[key] = complete(calls, tensors, order, apart=False)
            for member, answer in zip(members, found, strict=True):
                answers[member] = answer
        return answers


__all__ = ["Collectives"]
