"""What the host of a program in host IR issues: ops to the current stream, communications to separate streams.

Step by step: an op goes into the queue of the current stream. A communication begins after what is queued
there, in the order of its team; its wait makes the then current stream wait for it. A synchronisation waits for everything
queued so far. This code is independent of how the static checks read the same graph.

Streams have the numbers of `program.streams`: the caller's is 0 and worker i is i + 1; those of teams are negative.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch

from tcverify.execution.executor import Run
from tcverify.execution.interpreter import RankResult
from tcverify.execution.lockstep.lockstep import run_watched
from tcverify.execution.plan import ExecutionPlan, PlanStep, check_supported, known_constant, plans_of, rank_constants
from tcverify.execution.streams.issue import IssuedRank, whole_storage
from tcverify.execution.streams.memory_cells import Cells, View, view_of
from tcverify.execution.streams.queues import BEFORE, INPUTS, StreamOp, operand
from tcverify.ops import mutated, resolve
from tcverify.ops.dialects.host_ir import CURRENT_STREAM, DEALLOCATE, SET_STREAM, STREAM, SYNCHRONIZE
from tcverify.ops.leaves import leaves
from tcverify.program import Program
from tcverify.program.contract import Boundary, InputsReady
from tcverify.program.graph import RankConstant, Slot
from tcverify.program.stream_options import MAIN_STREAM

_STREAM_OPS = (CURRENT_STREAM, SET_STREAM, STREAM, SYNCHRONIZE)


def is_host_ir(plan: ExecutionPlan) -> bool:
    """Whether a graph posts communications of host IR, or sets streams. One that only frees has one order."""
    return any(step.op.name.startswith("host_ir::") and step.op.name != DEALLOCATE for step in plan.steps)


def issue_host(program: Program, boundary: Boundary, inputs: InputsReady) -> tuple[list[IssuedRank], Run]:
    """Issue a program in host IR on every rank. As `issue`, which see; nothing where buffers lie in too many pieces."""
    plans = plans_of(program)
    check_supported(plans)
    watches: list[_Watch] = []

    def watcher(rank: int, values: list[torch.Tensor]) -> _Watch:
        watches.append(_Watch(plans[program.ranks[rank].graph], values))
        return watches[-1]

    run = run_watched(program, watcher)
    if not run.finished:
        return [], run
    issued = []
    for rank, watch in enumerate(watches):
        constants = rank_constants(program.mesh, rank, program.ranks[rank].constants)
        queued = _queued(watch, rank, constants, run.ranks[rank], boundary, inputs)
        if queued is None:
            return [], run
        issued.append(queued)
    for result in run.ranks:  # their storage is rewritten in every order
        result.outputs = [value.clone() if isinstance(value, torch.Tensor) else value for value in result.outputs]
        result.inputs = [value.clone() for value in result.inputs]
    return issued, run


# ------------------------------------------------------------------------------------------------------------ watching


#: Kinds of steps, with respect to streams; "none" is not work.
_StepKind: TypeAlias = Literal["stream", "post", "wait", "input", "none", "work"]


@dataclass(slots=True)
class _Seen:
    """What one step did.

    Attributes:
        kind: what it is to its stream.
        reads, writes: views.
    """

    kind: _StepKind
    reads: tuple[View, ...] = ()
    writes: tuple[View, ...] = ()


@dataclass(slots=True)
class _Watch:
    """Watches one rank, step by step."""

    plan: ExecutionPlan
    values: list[Any]
    seen: list[_Seen] = field(default_factory=list)
    storages: list[tuple[int, ...]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    tensors: list[torch.Tensor] = field(default_factory=list)  # by storage, one over the whole of it
    _numbers: dict[int, int] = field(default_factory=dict)
    _versions: list[int] = field(default_factory=list)
    _flying: set[int] = field(default_factory=set)  # storages that a communication may write at any time

    def __post_init__(self) -> None:
        for name, value in zip(self.plan.placeholders, self.values, strict=True):
            self._save(name, value)

    def _save(self, name: str, value: Any) -> None:
        for tensor in leaves(value, torch.Tensor):
            number = self._number(tensor, name)
            if number not in self.saved:
                self.saved[number] = self.tensors[number], self.tensors[number].clone()
        self.storages.append(tuple(self._number(t, name) for t in leaves(value, torch.Tensor)))

    def _number(self, tensor: torch.Tensor, name: str) -> int:
        key = tensor.untyped_storage()._cdata
        if key not in self._numbers:
            self._numbers[key] = len(self.names)
            self.names.append(name)
            self.tensors.append(whole_storage(tensor))
            self._versions.append(tensor._version)
        return self._numbers[key]

    def _view(self, tensor: torch.Tensor, name: str) -> View:
        return view_of(self._number(tensor, name), tensor)

    def __call__(self, step: PlanStep, args: list[Any], kwargs: dict[str, Any], value: Any) -> Any:
        operands = leaves((args, kwargs), torch.Tensor)
        reads = tuple(dict.fromkeys(self._view(tensor, step.name) for tensor in operands))
        known = len(self.names)
        name = step.op.name
        if name in _STREAM_OPS:
            seen = _Seen("stream")
        elif name == DEALLOCATE:
            whole = [self.tensors[self._number(tensor, step.name)] for tensor in operands]
            seen = _Seen("work", (), tuple(self._view(tensor, step.name) for tensor in whole))
        elif step.op.phase == "wait":
            seen = _Seen("wait")
            self._flying.difference_update(view.storage for view in reads)
            self._settle(operands)
        elif step.op.phase == "start":
            out = leaves(value, torch.Tensor)
            written = tuple(self._view(tensor, step.name) for tensor in out)
            given = leaves((args[:1], {}), torch.Tensor) if name != "host_ir::recv" else []
            seen = _Seen("post", tuple(self._view(tensor, step.name) for tensor in given), written)
            self._flying.update(view.storage for view in written)
            self._settle(out)
        elif name.startswith("attribute::"):
            seen = _Seen("input")
        else:
            seen = self._local(step, args, kwargs, value, operands, reads)
        if seen.kind == "input":
            self._save(step.name, value)
        else:
            made = leaves(value, torch.Tensor)
            self.storages.append(tuple(self._number(tensor, step.name) for tensor in made))
            if seen.kind == "work":
                fresh = (t for t in made if self._number(t, step.name) >= known)
                seen.writes = tuple(dict.fromkeys((*seen.writes, *(self._view(t, step.name) for t in fresh))))
        self.values.append(value)
        self.seen.append(seen)
        return value

    def _settle(self, tensors: list[torch.Tensor]) -> None:
        """What has been written until now, no later step has."""
        for tensor in tensors:
            self._versions[self._number(tensor, "")] = tensor._version

    def _local(
        self,
        step: PlanStep,
        args: list[Any],
        kwargs: dict[str, Any],
        value: Any,
        operands: list[torch.Tensor],
        reads: tuple[View, ...],
    ) -> _Seen:
        written = []
        declared = [id(tensor) for tensor in _declared_writes(step, args, kwargs)]
        for tensor in operands:
            number = self._number(tensor, step.name)
            changed = tensor._version != self._versions[number]
            if id(tensor) in declared or (changed and number not in self._flying):
                written.append(self._view(tensor, step.name))
        self._settle(operands)
        results = leaves(value, torch.Tensor)
        if not written:
            held = {view.storage for view in reads}
            if not results or all(self._number(tensor, step.name) in held for tensor in results):
                return _Seen("none")
        return _Seen("work", reads, tuple(written))


def _declared_writes(step: PlanStep, args: list[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors into which the schema of an op says that it writes."""
    try:
        return mutated(resolve(step.op.name), args, kwargs, torch.Tensor)
    except Exception:  # noqa: BLE001 - no op of torch: versions tell
        return []


# ------------------------------------------------------------------------------------------------------------- queuing


@dataclass(slots=True)
class _Queues:
    """Puts steps into queues as the host comes to them.

    Attributes:
        fronts: per stream, the ops that the next one there comes after.
        teams: the stream of each team.
    """

    ops: list[StreamOp] = field(default_factory=list)
    fronts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    teams: dict[Any, int] = field(default_factory=dict)
    writer: dict[int, int] = field(default_factory=dict)  # of each cell

    def front(self, stream: int) -> tuple[int, ...]:
        return self.fronts.get(stream, ())

    def wait(self, stream: int, ops: tuple[int, ...]) -> None:
        """Let what comes next on a stream come after some ops as well."""
        self.fronts[stream] = tuple(dict.fromkeys((*self.front(stream), *ops)))

    def add(
        self,
        node: str,
        on: str,
        stream: int,
        step: int | None,
        after: tuple[int, ...],
        reads: tuple[int, ...],
        writes: tuple[int, ...],
        communicators: tuple[tuple[int, ...], ...] = (),
    ) -> int:
        number = len(self.ops)
        touched = dict.fromkeys((*reads, *writes))
        sees = tuple((cell, self.writer.get(cell, BEFORE)) for cell in touched)
        after = tuple(dict.fromkeys((*self.front(stream), *after)))
        self.ops.append(StreamOp(node, stream, step, after, reads, writes, sees, communicators, on=on))
        self.fronts[stream] = (number,)
        for cell in writes:
            self.writer[cell] = number
        return number


def _queued(
    watch: _Watch, rank: int, constants: Mapping[str, Any], result: RankResult, boundary: Boundary, inputs: InputsReady
) -> IssuedRank | None:
    """The queues of one rank; None if the accesses of its ops cannot be distinguished."""
    plan = watch.plan
    first = len(plan.placeholders)
    end = len(plan.placeholders) + len(plan.steps)
    returned = [view_of(watch._number(t, "output"), t) for t in leaves(result.outputs, torch.Tensor)]
    cells = Cells(watch.tensors)
    for view in (*returned, *(v for seen in watch.seen for v in (*seen.reads, *seen.writes))):
        cells.add(view)
    for number in watch.saved:
        cells.add_whole(number)
    cells.divide()
    if cells.coarse:  # accesses that do not touch would seem to
        return None
    queues = _Queues()
    if inputs == "stream0":
        whole = tuple(cell for number in watch.saved for cell in cells.of_whole(number))
        queues.add(INPUTS, "the caller's stream", MAIN_STREAM, None, (), (), whole)
    calls: dict[str, list[tuple[int, ...]]] = {}
    for call in result.calls:
        calls.setdefault(call.node, []).append(call.collective.communicator)
    streams: dict[int, int] = {}  # slot of a token -> stream
    posted: dict[int, int] = {}  # slot of a communication -> its op
    current = MAIN_STREAM
    for i, (step, seen) in enumerate(zip(plan.steps, watch.seen, strict=True)):
        slot = first + i
        reads, writes = cells.of(seen.reads), cells.of(seen.writes)
        if seen.kind == "stream":
            current = _stream_step(step, slot, current, streams, queues, constants)
        elif seen.kind == "wait":
            waited = [posted[s.index] for s in step.args if isinstance(s, Slot) and s.index in posted]
            if not waited:  # through a view: whatever it may refer to
                held = {s for at in step.args if isinstance(at, Slot) for s in watch.storages[at.index]}
                waited = [op for at, op in posted.items() if held & set(watch.storages[at])]
            queues.wait(current, tuple(waited))
        elif seen.kind == "post":
            teams = tuple(calls.get(step.name, ()))
            own = queues.teams.setdefault(teams, -1 - len(queues.teams))
            team = " and ".join(str(list(team)) for team in teams)
            words = f"the stream of team {team}"
            posted[slot] = queues.add(step.name, words, own, i, queues.front(current), reads, writes, teams)
        elif seen.kind == "work":
            team_calls = tuple(calls.get(step.name, ()))
            reshards = bool(team_calls) and step.op.name.startswith("multidevice::")
            own = queues.teams.setdefault(team_calls, -1 - len(queues.teams)) if reshards else current
            number = queues.add(step.name, _words(current), current, i, queues.front(own), reads, writes, team_calls)
            queues.fronts[own] = (number,)  # what is not lowered yet is carried out in the order of its team, too
    mutated = [
        c
        for n in watch.saved
        for c in cells.of_whole(n)
        if queues.writer.get(c, BEFORE) > BEFORE + (inputs == "stream0")
    ]
    everything = tuple(range(len(queues.ops))) if boundary == "lenient" else ()
    reads = tuple(dict.fromkeys((*cells.of(returned), *mutated)))
    queues.add("output", "the caller's stream", MAIN_STREAM, None, everything, reads, ())
    if len(watch.storages) != end:
        raise AssertionError("a step was not watched")
    names = [watch.names[number] for number in cells.storages]
    return IssuedRank(
        rank, plan, constants, queues.ops, watch.values, watch.storages, {}, names, watch.saved, tuple(cells.storages)
    )


def _stream_step(
    step: PlanStep, slot: int, current: int, streams: dict[int, int], queues: _Queues, constants: Mapping[str, Any]
) -> int:
    """Record a step about streams. Returns the stream that is current after it."""
    if step.op.name == CURRENT_STREAM:
        streams[slot] = current
        return current
    if step.op.name == STREAM:
        index = operand(step, 0, "index")
        index = known_constant(index, constants) if isinstance(index, RankConstant) else index
        streams[slot] = int(index) + 1
        return current
    token = operand(step, 0, "stream")
    stream = streams.get(token.index, MAIN_STREAM) if isinstance(token, Slot) else MAIN_STREAM
    if step.op.name == SET_STREAM:
        return stream
    queues.wait(current, queues.front(stream))
    return current


def _words(stream: int) -> str:
    return "the caller's stream" if stream == MAIN_STREAM else f"worker stream {stream - 1}"


__all__ = ["is_host_ir", "issue_host"]
