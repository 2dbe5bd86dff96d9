"""What the host of a lowered program issues: ops in the queues of streams, with what each waits for, reads and writes.

Read by position, as the real runtime reads: a wait stays pending until the next op takes it, a record marks the op that was
issued last. Nothing here knows how the static checks read the same graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from tcverify.execution.executor import Run
from tcverify.execution.interpreter import RankResult
from tcverify.execution.lockstep import run_watched
from tcverify.execution.plan import Plan, Step, check_supported, plans_of
from tcverify.ops import TensorSpec
from tcverify.program import Program
from tcverify.program.graph import Slot
from tcverify.program.streams import MAIN_STREAM

WAIT = "tensor_cast::_internal_wait_and_bind"
RECORD = "tensor_cast::_internal_record"

#: Names of what is no node of the graph: the caller that writes the inputs.
INPUTS = "the inputs"
#: Stands for the caller that has written the inputs before everything, where an op of the rank is expected.
BEFORE = -1


def is_lowered(plan: Plan) -> bool:
    """Whether a graph contains anchors."""
    return any(step.op.name in (WAIT, RECORD) for step in plan.steps)


@dataclass(frozen=True, slots=True)
class StreamOp:
    """One op in the queue of a stream.

    Attributes:
        node: its name; the name of the output node for what reads the outputs, `INPUTS` for what writes the inputs.
        stream: whose queue it stands in.
        step: its number in the plan; None for the two that are no step.
        after: numbers of the ops that must be complete before it can begin: the one before it in its queue, and those whose
            tokens it waits for.
        reads: numbers of the storages that it reads.
        writes: numbers of the storages that it writes.
        sees: (storage, op whose write it must find there), for all that it reads or writes; `BEFORE` where nobody wrote yet.
        communicators: of the collectives that it enters, in order.
        copies: (slot of a wait, slot of what it waits for): waits that are written into, which are copies made by this op.
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


@dataclass(slots=True)
class Issued:
    """What one rank issues.

    Attributes:
        ops: in issue order; the last one reads the outputs.
        values: of every slot, as the host holds them once all has been issued: tensors with the storage sharing of the run.
        storages: per slot, the storages of its tensors.
        aliases: slots of waits, and the slots whose values they stand for.
        names: per storage, the node that first produced it.
        saved: per storage that exists before the first op, a tensor over the whole of it, and a copy of its first contents.
    """

    rank: int
    plan: Plan
    constants: Mapping[str, Any]
    ops: list[StreamOp]
    values: list[Any]
    storages: list[tuple[int, ...]]
    aliases: dict[int, int]
    names: list[str]
    saved: dict[int, tuple[torch.Tensor, torch.Tensor]]


def issue(program: Program, boundary: str = "strict", inputs: str = "ready") -> tuple[list[Issued], Run]:
    """Issue a program on every rank. Returns what the ranks issue and the run in issue order, which may not have finished.

    Args:
        boundary, inputs: as a contract says, see `Contract`.

    Raises:
        UnsupportedOp: an op has no meaning.
    """
    plans = plans_of(program)
    check_supported(plans)
    specs = [[n.meta.get("val") for n in graph.nodes if n.op != "output"] for graph in program.graphs]
    written: list[frozenset[int]] = [frozenset() for _ in program.ranks]
    if any(plan.mutates for plan in plans):  # which waits are written into? Those are copies, the others alias.
        hosts, run = _run(program, plans, specs, None)
        if not run.finished:
            return [], run
        written = [host.written_waits() for host in hosts]
    hosts, run = _run(program, plans, specs, written)
    if not run.finished:
        return [], run
    ranks = range(program.world_size)
    issued = [hosts[r].issued(r, program.ranks[r].constants, run.ranks[r], boundary, inputs) for r in ranks]
    for result in run.ranks:  # their storage is written anew in every order
        result.outputs = [value.clone() if isinstance(value, torch.Tensor) else value for value in result.outputs]
        result.inputs = [value.clone() for value in result.inputs]
    return issued, run


def _run(
    program: Program, plans: list[Plan], specs: list[list[Any]], copied: list[frozenset[int]] | None
) -> tuple[list[_Host], Run]:
    hosts: list[_Host] = []

    def watcher(rank: int, values: list[torch.Tensor]) -> _Host:
        graph = program.ranks[rank].graph
        hosts.append(_Host(plans[graph], specs[graph], values, None if copied is None else copied[rank]))
        return hosts[-1]

    return hosts, run_watched(program, watcher)


@dataclass(slots=True)
class _Host:
    """Watches one rank, step by step, and tells work from what takes no time.

    Attributes:
        copied: slots of the waits whose results are copies; None makes all of them copies.
        kinds: per step: "input", "wait", "record", "alias", "scalar" or "work".
        reads, writes: per step, the storages of its operands, and those that it wrote.
    """

    plan: Plan
    specs: list[Any]
    values: list[Any]
    copied: frozenset[int] | None
    kinds: list[str] = field(default_factory=list)
    reads: list[tuple[int, ...]] = field(default_factory=list)
    writes: list[tuple[int, ...]] = field(default_factory=list)
    storages: list[tuple[int, ...]] = field(default_factory=list)
    aliases: dict[int, int] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    _numbers: dict[int, int] = field(default_factory=dict)
    _versions: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in zip(self.plan.placeholders, self.values, strict=True):
            self._save(name, value)

    def _save(self, name: str, value: Any) -> None:
        for tensor in _tensors(value):
            number = self._number(tensor, name)
            if number not in self.saved:
                whole = whole_storage(tensor)
                self.saved[number] = whole, whole.clone()
        self.storages.append(tuple(self._number(t, name) for t in _tensors(value)))

    def _number(self, tensor: torch.Tensor, name: str) -> int:
        """Number of a tensor's storage. Tensors are kept, so that no storage takes the place of another."""
        key = tensor.untyped_storage()._cdata
        if key not in self._numbers:
            self._numbers[key] = len(self.names)
            self.names.append(name)
            self._versions[len(self.names) - 1] = tensor._version
        return self._numbers[key]

    def __call__(self, step: Step, args: list[Any], kwargs: dict[str, Any], value: Any) -> Any:
        name, slot = step.op.name, len(self.values)
        operands = _tensors((args, kwargs))
        reads = tuple(dict.fromkeys(self._number(t, step.name) for t in operands))
        written: list[int] = []
        for tensor, number in ((t, self._number(t, step.name)) for t in operands):
            if tensor._version != self._versions[number]:
                self._versions[number] = tensor._version
                written.append(number)
        if name == WAIT:
            kind = "wait"
            source = _operand(step, 0, "x")
            if self.copied is not None and slot not in self.copied and isinstance(source, Slot):
                self.aliases[slot] = self.aliases.get(source.index, source.index)
                value = args[0] if args else kwargs["x"]
        elif name == RECORD:
            kind = "record"
        elif name.startswith("attribute::"):
            kind = "input"
        else:
            kind, value = self._kind(step, slot, reads, written, value)
        self.values.append(value)
        self.kinds.append(kind)
        self.reads.append(reads)
        if kind == "input":
            self._save(step.name, value)
            self.writes.append(())
            return value
        known = len(self.names)
        self.storages.append(tuple(self._number(t, step.name) for t in _tensors(value)))
        if kind == "work":
            written += [number for number in self.storages[-1] if number >= known]
        self.writes.append(tuple(dict.fromkeys(written)))
        return value

    def _kind(self, step: Step, slot: int, reads: tuple[int, ...], written: list[int], value: Any) -> tuple[str, Any]:
        """Whether a step is work. One that the domain makes an alias, but not the dtypes of the graph, gets a copy."""
        results = _tensors(value)
        if not results and not written:
            return "scalar", value
        shared = bool(results) and all(self._numbers.get(t.untyped_storage()._cdata, -1) in reads for t in results)
        if written or not shared:
            return "work", value
        if self._casts(step, slot):
            return "work", pytree.tree_map_only(torch.Tensor, torch.clone, value)
        return "alias", value

    def _casts(self, step: Step, slot: int) -> bool:
        """Whether the graph says that the result has another dtype than the operand: then it cannot be a view."""
        mine = self.specs[slot]
        first = next((a for a in step.args if isinstance(a, Slot)), None)
        theirs = self.specs[first.index] if first is not None else None
        return isinstance(mine, TensorSpec) and isinstance(theirs, TensorSpec) and mine.dtype != theirs.dtype

    def written_waits(self) -> frozenset[int]:
        """Slots of the waits whose results were written into."""
        first = len(self.plan.placeholders)
        written = {number for i, kind in enumerate(self.kinds) if kind == "work" for number in self.writes[i]}
        return frozenset(
            first + i for i, kind in enumerate(self.kinds) if kind == "wait" and set(self.storages[first + i]) & written
        )

    def issued(self, rank: int, constants: Mapping[str, Any], result: RankResult, boundary: str, inputs: str) -> Issued:
        """Return what the rank has issued, once the run is over."""
        calls: dict[str, tuple[tuple[int, ...], ...]] = {}
        for call in result.calls:
            calls[call.node] = (*calls.get(call.node, ()), call.collective.communicator)
        ops = _Queues(self, calls, inputs == "stream0").ops(lenient=boundary == "lenient")
        return Issued(rank, self.plan, constants, ops, self.values, self.storages, self.aliases, self.names, self.saved)


class _Queues:
    """Puts the steps of a rank into queues, by position."""

    def __init__(self, host: _Host, calls: Mapping[str, tuple[tuple[int, ...], ...]], inputs_on_main: bool) -> None:
        self._host = host
        self._calls = calls
        self._ops: list[StreamOp] = []
        self._last: dict[int, int] = {}  # of each stream
        self._writer: dict[int, int] = {}  # of each storage
        if inputs_on_main:
            self._add(INPUTS, MAIN_STREAM, None, (), (), tuple(host.saved))

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
                marks = [tokens.get(host.aliases.get(slot, slot)) for slot in _slots(_operand(step, 2, "deps"))]
                pending.append((int(_operand(step, 1, "stream_id")), tuple(m for m in marks if m is not None)))
                source = _operand(step, 0, "x")
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
        results = [s for slot in _slots(plan.result) for s in host.storages[slot]]
        mutated = [s for s in host.saved if self._writer.get(s, BEFORE) != BEFORE]
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
        return int(_operand(steps[following], 1, "stream_id"))

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


def whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """A flat tensor over the whole storage of `tensor`."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return flat.set_(storage, 0, (storage.nbytes() // tensor.element_size(),), (1,))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    stack = [value]
    while stack:
        leaf = stack.pop()
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif isinstance(leaf, (list, tuple)):
            stack.extend(reversed(leaf))
        elif isinstance(leaf, dict):
            stack.extend(reversed(leaf.values()))
    return found


def _slots(template: Any) -> list[int]:
    """Numbers of the slots that an argument holds, in order."""
    found: list[int] = []

    def look(leaf: Any) -> Any:
        if isinstance(leaf, Slot):
            found.append(leaf.index)
        return leaf

    map_aggregate(template, look)
    return found


def _operand(step: Step, position: int, name: str) -> Any:
    return step.args[position] if len(step.args) > position else step.kwargs[name]


__all__ = ["BEFORE", "INPUTS", "Issued", "StreamOp", "is_lowered", "issue", "whole_storage"]
