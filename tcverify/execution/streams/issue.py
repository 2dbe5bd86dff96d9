"""What the host of a lowered program issues: a run in issue order tells work from what takes no time, and what it touches."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tcverify.execution.executor import Run
from tcverify.execution.interpreter import RankResult
from tcverify.execution.lockstep.lockstep import run_watched
from tcverify.execution.plan import ExecutionPlan, PlanStep, check_supported, plans_of, rank_constants
from tcverify.execution.streams.queues import Queues, StepKind, StreamOp, operand, slots_in
from tcverify.ops import RECORD, WAIT, TensorSpec
from tcverify.ops.leaves import leaves
from tcverify.program import Program
from tcverify.program.contract import Boundary, InputsReady
from tcverify.program.graph import Slot


def is_lowered(plan: ExecutionPlan) -> bool:
    """Whether a graph contains anchors."""
    return any(step.op.name in (WAIT, RECORD) for step in plan.steps)


@dataclass(slots=True)
class IssuedRank:
    """What one rank issues.

    Attributes:
        ops: in issue order; the last one reads the outputs.
        values: of every slot, as the host holds them once all has been issued: tensors with the storage sharing of the run.
        storages: per slot, the storages of its tensors.
        aliases: slots of waits, and the slots whose values they return.
        names: per storage, the node that first produced it.
        saved: per storage that exists before the first op, a tensor over all of it, and a copy of its initial contents.
        cells: where ops name parts of storages, the storage of each part; empty where they name storages. `names` is of what ops
            name.
    """

    rank: int
    plan: ExecutionPlan
    constants: Mapping[str, Any]
    ops: list[StreamOp]
    values: list[Any]
    storages: list[tuple[int, ...]]
    aliases: dict[int, int]
    names: list[str]
    saved: dict[int, tuple[torch.Tensor, torch.Tensor]]
    cells: tuple[int, ...] = ()

    def storage(self, named: int) -> int:
        """The storage that an op names, itself or by a part of it."""
        return self.cells[named] if self.cells else named


def issue(
    program: Program, boundary: Boundary = "strict", inputs: InputsReady = "ready"
) -> tuple[list[IssuedRank], Run]:
    """Issue a program on every rank. Returns what the ranks issue and the run in issue order, which may not have finished.

    Args:
        boundary, inputs: as in `Contract`.

    Raises:
        UnsupportedOp: an op has no meaning.
    """
    plans = plans_of(program)
    check_supported(plans)
    specs = [[n.meta.get("val") for n in graph.nodes if n.op != "output"] for graph in program.graphs]
    hosts, run = _run(program, plans, specs, [frozenset() for _ in program.ranks])
    if any(
        host.suspect for host in hosts
    ):  # a write reached the value that a wait returns: waits that are written into are copies
        hosts, run = _run(program, plans, specs, None)
        hosts, run = _run(program, plans, specs, [host.written_waits() for host in hosts])
    if not run.finished:
        return [], run
    ranks = range(program.world_size)
    constants = [rank_constants(program.mesh, r, program.ranks[r].constants) for r in ranks]
    issued = [hosts[r].issued(r, constants[r], run.ranks[r], boundary, inputs) for r in ranks]
    for result in run.ranks:  # their storage is rewritten in every order
        result.outputs = [value.clone() if isinstance(value, torch.Tensor) else value for value in result.outputs]
        result.inputs = [value.clone() for value in result.inputs]
    return issued, run


def _run(
    program: Program, plans: list[ExecutionPlan], specs: list[list[Any]], copied: list[frozenset[int]] | None
) -> tuple[list[_Host], Run]:
    hosts: list[_Host] = []

    def watcher(rank: int, values: list[torch.Tensor]) -> _Host:
        graph = program.ranks[rank].graph
        hosts.append(_Host(plans[graph], specs[graph], values, None if copied is None else copied[rank]))
        return hosts[-1]

    return hosts, run_watched(program, watcher)


@dataclass(slots=True)
class _Host:
    """Observes one rank, step by step, and distinguishes work from steps that take no time.

    Attributes:
        copied: slots of the waits whose results are copies; None makes all of them copies.
        kinds: per step.
        reads, writes: per step, the storages of its operands, and those that it wrote.
        suspect: whether an op wrote into the value that a wait returns.
    """

    plan: ExecutionPlan
    specs: list[Any]
    values: list[Any]
    copied: frozenset[int] | None
    kinds: list[StepKind] = field(default_factory=list)
    reads: list[tuple[int, ...]] = field(default_factory=list)
    writes: list[tuple[int, ...]] = field(default_factory=list)
    storages: list[tuple[int, ...]] = field(default_factory=list)
    aliases: dict[int, int] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    suspect: bool = False
    _gated: set[int] = field(default_factory=set)  # slots of waits, and of views of them
    _numbers: dict[int, int] = field(default_factory=dict)
    _versions: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in zip(self.plan.placeholders, self.values, strict=True):
            self._save(name, value)

    def _save(self, name: str, value: Any) -> None:
        for tensor in leaves(value, torch.Tensor):
            number = self._number(tensor, name)
            if number not in self.saved:
                whole = whole_storage(tensor)
                self.saved[number] = whole, whole.clone()
        self.storages.append(tuple(self._number(t, name) for t in leaves(value, torch.Tensor)))

    def _number(self, tensor: torch.Tensor, name: str) -> int:
        """Number of a tensor's storage. Tensors are kept, so that no storage takes the place of another."""
        key = tensor.untyped_storage()._cdata
        if key not in self._numbers:
            self._numbers[key] = len(self.names)
            self.names.append(name)
            self._versions[len(self.names) - 1] = tensor._version
        return self._numbers[key]

    def __call__(self, step: PlanStep, args: list[Any], kwargs: dict[str, Any], value: Any) -> Any:
        name, slot = step.op.name, len(self.values)
        if name in (WAIT, RECORD):
            return self._anchor(step, slot, args, kwargs, value)
        reads: dict[int, None] = {}
        written: list[int] = []
        for tensor in leaves((args, kwargs), torch.Tensor):
            number = self._number(tensor, step.name)
            reads[number] = None
            if tensor._version != self._versions[number]:
                self._versions[number] = tensor._version
                written.append(number)
        if name.startswith("attribute::"):
            kind: StepKind = "input"
            self._save(step.name, value)
        else:
            kind, value = self._kind(step, slot, reads, written, value)
            if self._gated and (written or kind == "alias"):
                gated = [s for s in slots_in((step.args, step.kwargs)) if s in self._gated]
                if kind == "alias" and gated:
                    self._gated.add(slot)
                self.suspect = self.suspect or any(not set(written).isdisjoint(self.storages[s]) for s in gated)
            known = len(self.names)
            self.storages.append(tuple([self._number(t, step.name) for t in leaves(value, torch.Tensor)]))
            if kind == "work":
                written += [number for number in self.storages[-1] if number >= known]
        self._note(kind, value, tuple(reads), tuple(dict.fromkeys(written)))
        return value

    def _anchor(self, step: PlanStep, slot: int, args: list[Any], kwargs: dict[str, Any], value: Any) -> Any:
        """Let a wait return what it waits for, unless it is to be a copy."""
        waits = step.op.name == WAIT
        if waits:
            self._gated.add(slot)
            source = operand(step, 0, "x")
            if self.copied is not None and slot not in self.copied and isinstance(source, Slot):
                self.aliases[slot] = self.aliases.get(source.index, source.index)
                value = args[0] if args else kwargs["x"]
        self.storages.append((self._number(value, step.name),))
        self._note("wait" if waits else "record", value, (), ())
        return value

    def _note(self, kind: StepKind, value: Any, reads: tuple[int, ...], writes: tuple[int, ...]) -> None:
        self.values.append(value)
        self.kinds.append(kind)
        self.reads.append(reads)
        self.writes.append(writes)

    def _kind(
        self, step: PlanStep, slot: int, reads: Container[int], written: list[int], value: Any
    ) -> tuple[StepKind, Any]:
        """Whether a step is work. One that the domain makes an alias, but not the dtypes of the graph, gets a copy."""
        results = leaves(value, torch.Tensor)
        if not results and not written:
            return "scalar", value
        shared = bool(results) and all(self._numbers.get(t.untyped_storage()._cdata, -1) in reads for t in results)
        if written or not shared:
            return "work", value
        if self._casts(step, slot):
            return "work", pytree.tree_map_only(torch.Tensor, torch.clone, value)
        return "alias", value

    def _casts(self, step: PlanStep, slot: int) -> bool:
        """Whether the graph says that the result has another dtype than the operand: then it cannot be a view."""
        mine = self.specs[slot]
        first = next((a for a in step.args if isinstance(a, Slot)), None)
        theirs = self.specs[first.index] if first is not None else None
        return isinstance(mine, TensorSpec) and isinstance(theirs, TensorSpec) and mine.dtype != theirs.dtype

    @property
    def inputs(self) -> Collection[int]:
        """Storages that exist before the first op."""
        return self.saved.keys()

    def written_waits(self) -> frozenset[int]:
        """Slots of the waits whose results were written into."""
        first = len(self.plan.placeholders)
        written = {number for i, kind in enumerate(self.kinds) if kind == "work" for number in self.writes[i]}
        return frozenset(
            first + i for i, kind in enumerate(self.kinds) if kind == "wait" and set(self.storages[first + i]) & written
        )

    def issued(
        self, rank: int, constants: Mapping[str, Any], result: RankResult, boundary: Boundary, inputs: InputsReady
    ) -> IssuedRank:
        """Return what the rank has issued, once the run is over."""
        calls: dict[str, tuple[tuple[int, ...], ...]] = {}
        for call in result.calls:
            calls[call.node] = (*calls.get(call.node, ()), call.collective.communicator)
        ops = Queues(self, calls, inputs == "stream0").ops(lenient=boundary == "lenient")
        return IssuedRank(
            rank, self.plan, constants, ops, self.values, self.storages, self.aliases, self.names, self.saved
        )


def whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """A flat tensor over the whole storage of `tensor`."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return flat.set_(storage, 0, (storage.nbytes() // tensor.element_size(),), (1,))


__all__ = ["IssuedRank", "is_lowered", "issue", "whole_storage"]
