"""Runs programs whose communication buffers lie in an arena: one piece of memory per rank, the same in every iteration.

A node with `meta["comm_buffer"]` puts its value at the offset that this names, as a runtime would that trusts the plan of
its compiler. Buffers whose contents are no longer needed are immediately filled with NaN, or with wrong integers. So
results change if two values need the same memory at the same time, if it is used before it is written, or if
an output of an earlier iteration still lives there.

Offsets and sizes are in bytes of the program's own dtypes, while values are carried in float64: the arena is larger than the plan
by the largest ratio of the two. Values are packed, so with different dtypes a part of an overlap may not show in the numbers;
overwrites are therefore tracked as well.

A run outside of the arena shows when contents are needed: a node needs the operands that it computes with, which views and
selections do not; a collective in flight needs its contribution, and what it writes into, until the wait that ends it; and
outputs are needed forever.
"""

from __future__ import annotations

import ctypes
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tcverify.execution.asynchrony import TIMINGS
from tcverify.execution.executor import Comparison, Run
from tcverify.execution.lockstep.lockstep import Lockstep, run_watched
from tcverify.execution.plan import PlanStep
from tcverify.execution.streams.memory import poison
from tcverify.ops import TensorSpec, resolve, schema_of
from tcverify.ops.leaves import leaves
from tcverify.program import Program

#: How often a program runs in one arena, each time with other inputs and another timing of what is asynchronous.
ITERATIONS = 3

#: The metadata that says where a value lies.
KEY = "comm_buffer"

#: To how many bytes pieces of an arena are aligned.
_GRAIN = 64


@dataclass(frozen=True, slots=True)
class ArenaPlace:
    """Where a rank's value of a node lies: bytes `offset` to `end`, for elements that are `ratio` times as large when carried."""

    node: str
    offset: int
    end: int
    ratio: int


@dataclass(frozen=True, slots=True)
class Clobber:
    """A buffer is written while another one in the same bytes is still needed.

    Attributes:
        node: makes the value that is written.
        lost: made the value that is overwritten.
        reader: needs that value; "" for the end of the program.
        places: first and last byte, exclusive, of what is written and of what is lost.
    """

    iteration: int
    rank: int
    node: str
    lost: str
    reader: str
    places: tuple[tuple[int, int], tuple[int, int]] = field(default=((0, 0), (0, 0)), compare=False)

    def __str__(self) -> str:
        needed = f"which '{self.reader}' needs" if self.reader else "which is an output"
        where = f"on rank {self.rank}, in iteration {self.iteration + 1}"
        return f"{where}, '{self.node}' overwrites the buffer of '{self.lost}', {needed}"


@dataclass(slots=True)
class ArenaRun:
    """The results of the iterations in an arena.

    Attributes:
        comparisons: per iteration, the program outside of the arena, and inside of it, with outputs as they are after the last
            iteration.
        clobbers: what was overwritten, in order.
        buffers: how many values lie in the arena, over all ranks.
    """

    comparisons: list[Comparison] = field(default_factory=list)
    clobbers: list[Clobber] = field(default_factory=list)
    buffers: int = 0


def has_buffers(program: Program) -> bool:
    """Whether any node of a program says where its value lies."""
    return any(KEY in node.meta for graph in program.graphs for node in graph.nodes)


def run_in_arena(program: Program, iterations: int = ITERATIONS) -> ArenaRun | None:
    """Run a program in an arena per rank, several times, and compare with runs outside of it.

    Returns:
        None for programs without buffers, and for those that do not run to their end outside of an arena.

    Raises:
        UnsupportedOp: an op has no meaning.
    """
    if not has_buffers(program):
        return None
    places = [list(_places(program, rank)) for rank in range(program.world_size)]
    found = ArenaRun(buffers=sum(map(len, places)))
    traces = [_Trace({place.node for place in mine}) for mine in places]
    traced = run_watched(program, lambda rank, inputs: traces[rank].watch)
    if not traced.finished:
        return None
    for trace, result in zip(traces, traced.ranks, strict=True):
        trace.end(result.outputs)
    arenas = [_Arena(rank, mine, traces[rank], found.clobbers) for rank, mine in enumerate(places)]
    plain: list[Run] = [traced]
    inside: list[Run] = []
    for iteration in range(iterations):
        again = replace(program, seed=program.seed + iteration)
        timing = TIMINGS[iteration % len(TIMINGS)]
        if iteration:
            plain.append(Lockstep().run(again, timing=timing))
        for arena in arenas:
            arena.begin(iteration)
        inside.append(run_watched(again, lambda rank, inputs: arenas[rank].watch, timing=timing))
    for outside, within in zip(plain, inside, strict=True):
        if outside.finished:
            found.comparisons.append(Lockstep().compare_runs(outside, within))
    return found


def _places(program: Program, rank: int) -> Iterator[ArenaPlace]:
    for node in program.graphs[program.ranks[rank].graph].nodes:
        given, spec = node.meta.get(KEY), node.meta.get("val")
        if given is None or node.op in ("placeholder", "output"):
            continue
        size, ratio = int(given["nbytes"]), 1
        if isinstance(spec, TensorSpec):
            size = max(size, spec.nbytes)
            ratio = 8 // spec.dtype.itemsize if spec.dtype.is_floating_point else 1
        yield ArenaPlace(node.name, int(given["offset"]), int(given["offset"]) + size, ratio)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Trace:
    """When the contents of a rank's buffers are needed, as a run outside of the arena shows.

    Attributes:
        last: by buffer, the number of the last step that needs it; infinite for outputs.
        steps: names of the steps.
    """

    def __init__(self, nodes: set[str]) -> None:
        self.last: dict[str, float] = {}
        self.steps: list[str] = []
        self._nodes = nodes
        self._made: dict[int, str] = {}  # storage -> the buffer that it represents
        self._kept: list[torch.Tensor] = []  # so that no address is used twice
        self._under_way: dict[
            int, list[str]
        ] = {}  # storage that is to be written -> buffers that are needed until then

    def watch(self, step: PlanStep, args: list[Any], kwargs: dict[str, Any], value: Any) -> Any:
        """See `interpreter.Watch`."""
        number = len(self.steps)
        self.steps.append(step.name)
        operands = leaves((args, kwargs), torch.Tensor)
        needed = [] if _only_views(step, operands, value) else self.buffers(operands)
        if step.op.phase == "wait":
            needed = [b for tensor in operands for b in self._under_way.pop(_storage(tensor), ())]
        elif step.op.phase == "start":
            outputs = leaves(value, torch.Tensor)
            for tensor in outputs:
                self._kept.append(tensor)
                self._under_way.setdefault(_storage(tensor), []).extend(self.buffers([*operands, *outputs]))
        for buffer in needed:
            self.last[buffer] = number
        if step.name in self._nodes and isinstance(value, torch.Tensor):
            self._kept.append(value)
            self._made.setdefault(_storage(value), step.name)
            self.last[step.name] = number
        return value

    def buffers(self, tensors: Sequence[torch.Tensor]) -> list[str]:
        """The buffers in which tensors live."""
        found = (self._made.get(_storage(tensor)) for tensor in tensors)
        return list(dict.fromkeys(buffer for buffer in found if buffer is not None))

    def end(self, outputs: Sequence[Any]) -> None:
        """The run has ended: its outputs, and collectives without a wait, are needed forever."""
        under_way = [buffer for buffers in self._under_way.values() for buffer in buffers]
        self.last.update(dict.fromkeys([*under_way, *self.buffers(leaves(list(outputs), torch.Tensor))], math.inf))


def _only_views(step: PlanStep, operands: Sequence[torch.Tensor], value: Any) -> bool:
    """Whether a step reads no contents: it selects, or creates views."""
    if step.op.name == "python::getitem":
        return True
    name = step.op.name
    if (
        not step.op.aliases
        or step.op.collective
        or name.startswith(("foreign::", "method::", "module::", "attribute::"))
    ):
        return False
    schema = schema_of(resolve(name))
    if schema is None or schema.is_mutable:
        return False
    storages = {_storage(tensor) for tensor in operands}
    results = leaves(value, torch.Tensor)
    return bool(results) and all(_storage(tensor) in storages for tensor in results)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements are contiguous, in any order of dims."""
    stride = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -stride[dim])
    return tensor.permute(order).is_contiguous()


class _Arena:
    """The memory of one rank in which its buffers lie."""

    def __init__(self, rank: int, places: Sequence[ArenaPlace], trace: _Trace, clobbers: list[Clobber]) -> None:
        self.rank = rank
        self.places = {place.node: place for place in places}
        self.trace = trace
        self.clobbers = clobbers
        self._known: set[tuple[str, str]] = set()  # pairs of which one has been seen to overwrite the other
        self._begins: list[int] = []  # pieces that hold buffers: where they begin in the plan, …
        self._moved: list[int] = []  # … and by how much they lie elsewhere here
        size = self._lay_out(places)
        self._scale = max((place.ratio for place in places), default=1)
        if any(self._scale * self._here(place.offset) % 8 for place in places):
            self._scale = 8
        self._memory = bytearray(self._scale * size + _GRAIN)
        self._base = -ctypes.addressof(ctypes.c_char.from_buffer(self._memory)) % _GRAIN
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        whole.fill_(0xFF)  # NaN, or −1
        self._dying: dict[float, list[str]] = {}
        for buffer, last in trace.last.items():
            self._dying.setdefault(last, []).append(buffer)
        self._live: dict[tuple[int, str], torch.Tensor] = {}
        self._iteration = 0
        self._number = 0

    def begin(self, iteration: int) -> None:
        """Begin an iteration. What was returned before is still there."""
        self._iteration, self._number = iteration, 0
        self._live = {key: value for key, value in self._live.items() if self.trace.last[key[1]] == math.inf}

    def watch(self, step: PlanStep, args: list[Any], kwargs: dict[str, Any], value: Any) -> Any:
        """See `interpreter.Watch`."""
        place = self.places.get(step.name)
        if place is not None and isinstance(value, torch.Tensor) and value.numel():
            value = self._put(place, value)
        for buffer in self._dying.get(self._number, ()):
            contents = self._live.pop((self._iteration, buffer), None)
            if contents is not None:
                contents.copy_(poison(contents))
        self._number += 1
        return value

    def _put(self, place: ArenaPlace, value: torch.Tensor) -> torch.Tensor:
        """Copy a value to its place and return it as it lies there."""
        for iteration, other in list(self._live):
            theirs = self.places[other]
            if place.offset < theirs.end and theirs.offset < place.end:
                del self._live[iteration, other]
                self._say(place.node, other)
        begin = self._base + self._scale * self._here(place.offset)
        if begin + value.numel() * value.itemsize > len(self._memory):
            return value  # larger than its metadata says, which another check sees
        flat = torch.frombuffer(self._memory, dtype=value.dtype, count=value.numel(), offset=begin)
        inside = flat.as_strided(value.shape, value.stride()) if _is_dense(value) else flat.view(value.shape)
        inside.copy_(value)
        self._live[self._iteration, place.node] = flat
        return inside

    def _say(self, node: str, lost: str) -> None:
        if (node, lost) in self._known:
            return
        self._known.add((node, lost))
        last = self.trace.last[lost]
        reader = self.trace.steps[int(last)] if last != math.inf else ""
        mine, theirs = self.places[node], self.places[lost]
        places = (mine.offset, mine.end), (theirs.offset, theirs.end)
        self.clobbers.append(Clobber(self._iteration, self.rank, node, lost, reader, places))

    def _lay_out(self, places: Sequence[ArenaPlace]) -> int:
        """Put the pieces of the plan that hold buffers one behind the other; returns the size of all."""
        size = 0
        end = -1
        for place in sorted(places, key=lambda place: place.offset):
            if place.offset > end:
                size = -(-size // _GRAIN) * _GRAIN
                self._begins.append(place.offset)
                self._moved.append(size - place.offset)
            end = max(end, place.end)
            size = max(size, end + self._moved[-1])
        return size

    def _here(self, offset: int) -> int:
        return offset + self._moved[bisect_right(self._begins, offset) - 1]


__all__ = ["ITERATIONS", "ArenaRun", "Clobber", "has_buffers", "run_in_arena"]
