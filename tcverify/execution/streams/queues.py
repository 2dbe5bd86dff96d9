"""Queues of streams: which op of a rank stands where, and what it waits for, read by position.

So the real runtime reads: a wait stays pending until the next op takes it, a record marks the op that was issued last. Nothing
here knows how the static checks read the same graph.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from tcverify.execution.plan import ExecutionPlan, PlanStep
from tcverify.ops.leaves import leaves
from tcverify.program.graph import Slot
from tcverify.program.stream_options import MAIN_STREAM

#: Names for what is not a node of the graph: the caller that writes the inputs.
INPUTS = "the inputs"
#: Represents, in place of an op, the caller that wrote the inputs before everything else.
BEFORE = -1


@dataclass(frozen=True, slots=True)
class StreamOp:
    """One op in the queue of a stream.

    Attributes:
        node: its name; the name of the output node for what reads the outputs, `INPUTS` for what writes the inputs.
        stream: whose queue it is in.
        step: its number in the plan; None for the two that are not steps.
        after: numbers of the ops that must be complete before it can begin: the one before it in its queue, and those whose
            tokens it waits for.
        reads: numbers of the storages that it reads.
        writes: numbers of the storages that it writes.
        sees: (storage, op whose write it must find there), for all that it reads or writes; `BEFORE` if it is unwritten.
        communicators: of the collectives that it enters, in order.
        copies: (slot of a wait, slot of what it waits for): waits that are written into, which are copies made by this op.
        on: the name of its stream, if it has one.
    """

    node: str
    stream: int
    step: int | None
    after: tuple[int, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    sees: tuple[tuple[int, int], ...]
    communicators: tuple[tuple[int, ...], ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    on: str = ""

    @property
    def place(self) -> str:
        """Its stream, in words."""
        return self.on or f"stream {self.stream}"


#: What a step is to its stream.
StepKind: TypeAlias = Literal["input", "wait", "record", "alias", "scalar", "work"]


class WatchedRank(Protocol):
    """Observations of a rank's steps.

    Attributes:
        kinds: per step.
        reads, writes: per step, the storages of its operands, and those that it wrote.
        storages: per slot, the storages of its tensors.
        aliases: slots of waits, and the slots whose values they return.
    """

    @property
    def plan(self) -> ExecutionPlan: ...
    @property
    def kinds(self) -> Sequence[StepKind]: ...
    @property
    def reads(self) -> Sequence[tuple[int, ...]]: ...
    @property
    def writes(self) -> Sequence[tuple[int, ...]]: ...
    @property
    def storages(self) -> Sequence[tuple[int, ...]]: ...
    @property
    def aliases(self) -> Mapping[int, int]: ...
    @property
    def inputs(self) -> Collection[int]:
        """Storages that exist before the first op."""


class Queues:
    """Puts the steps of a rank into queues, by position."""

    def __init__(
        self, host: WatchedRank, calls: Mapping[str, tuple[tuple[int, ...], ...]], inputs_on_main: bool
    ) -> None:
        self._host = host
        self._calls = calls
        self._ops: list[StreamOp] = []
        self._last: dict[int, int] = {}  # of each stream
        self._writer: dict[int, int] = {}  # of each storage
        if inputs_on_main:
            self._add(INPUTS, MAIN_STREAM, None, (), (), tuple(host.inputs))

    def ops(self, *, lenient: bool) -> list[StreamOp]:
        """Return the ops in issue order.

        Args:
            lenient: the caller waits for all streams before it reads the outputs.
        """
        host, plan = self._host, self._host.plan
        first = len(plan.placeholders)
        tokens: dict[int, int] = {}  # slot of a record -> op that it marks
        pending: list[tuple[int, tuple[int, ...]]] = []  # stream and ops whose tokens are waited for
        copies: dict[int, tuple[int, int]] = {}  # storage of a wait that is a copy -> (its slot, slot of its source)
        issued = len(self._ops) - 1 if self._ops else None  # what writes the inputs can be marked too
        for i, (step, kind) in enumerate(zip(plan.steps, host.kinds, strict=True)):
            if kind == "record":
                if issued is not None:
                    tokens[first + i] = issued
            elif kind == "wait":
                marks = [tokens.get(host.aliases.get(slot, slot)) for slot in slots_in(operand(step, 2, "deps"))]
                pending.append((int(operand(step, 1, "stream_id")), tuple(m for m in marks if m is not None)))
                source = operand(step, 0, "x")
                if first + i not in host.aliases and isinstance(source, Slot):
                    copies[host.storages[first + i][0]] = (first + i, source.index)
            elif kind == "work":
                stream = pending[-1][0] if pending else self._recorded_stream(i)
                waits = tuple(mark for _, marks in pending for mark in marks)
                pending = []
                made = [copies.pop(s) for s in (*host.reads[i], *host.writes[i]) if s in copies]
                sources = [s for _, slot in made for s in host.storages[slot]]
                own = [host.storages[slot][0] for slot, _ in made]
                reads = tuple(s for s in dict.fromkeys((*sources, *host.reads[i])) if s not in own)
                writes = tuple(dict.fromkeys((*own, *host.writes[i])))
                issued = self._add(
                    step.name, stream, i, waits, reads, writes, self._calls.get(step.name, ()), tuple(made)
                )
        results = [s for slot in slots_in(plan.result) for s in host.storages[slot]]
        mutated = [s for s in host.inputs if self._writer.get(s, BEFORE) != BEFORE]
        waits = tuple(range(len(self._ops))) if lenient else tuple(mark for _, marks in pending for mark in marks)
        reads = tuple(dict.fromkeys((*results, *mutated)))
        made = [copies.pop(s) for s in reads if s in copies]
        own = [host.storages[slot][0] for slot, _ in made]
        reads = tuple(dict.fromkeys((*(s for _, slot in made for s in host.storages[slot]), *reads)))
        reads = tuple(s for s in reads if s not in own)
        self._add("output", MAIN_STREAM, None, waits, reads, tuple(own), (), tuple(made))
        return self._ops

    def _recorded_stream(self, i: int) -> int:
        """The stream of the record that follows a step at once, but for what takes no time."""
        steps, kinds = self._host.plan.steps, self._host.kinds
        following = next((j for j in range(i + 1, len(steps)) if kinds[j] not in ("alias", "scalar", "input")), None)
        if following is None or kinds[following] != "record":
            return MAIN_STREAM
        return int(operand(steps[following], 1, "stream_id"))

    def _add(
        self,
        node: str,
        stream: int,
        step: int | None,
        waits: tuple[int, ...],
        reads: tuple[int, ...],
        writes: tuple[int, ...],
        communicators: tuple[tuple[int, ...], ...] = (),
        copies: tuple[tuple[int, int], ...] = (),
    ) -> int:
        number = len(self._ops)
        before = (self._last[stream],) if stream in self._last else ()
        touched = dict.fromkeys((*reads, *writes))
        sees = tuple((storage, self._writer.get(storage, BEFORE)) for storage in touched)
        after = tuple(dict.fromkeys((*before, *waits)))
        self._ops.append(StreamOp(node, stream, step, after, reads, writes, sees, communicators, copies))
        self._last[stream] = number
        for storage in writes:
            self._writer[storage] = number
        return number


def slots_in(template: Any) -> list[int]:
    """Numbers of the slots that an argument holds, in order."""
    return [slot.index for slot in leaves(template, Slot)]


def operand(step: PlanStep, position: int, name: str) -> Any:
    return step.args[position] if len(step.args) > position else step.kwargs[name]


__all__ = ["BEFORE", "INPUTS", "Queues", "StreamOp", "WatchedRank", "operand", "slots_in"]
