"""Measured makespans of multistream schedules against predicted ones, for `gpu_clocks.py`."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from clock_device import Clock, CpuLanes, Lanes
from clock_ops import close, drawn
from clock_profile import random_values
from clock_tables import markdown, median, micro, number, problems, quartiles, reason, spearman
from torch.utils import _pytree as pytree

from tcverify.application import InProcess, load_pass
from tcverify.cost import DeviceProfile, LaunchCosts, collective_time, node_cost
from tcverify.domains import NATIVE
from tcverify.execution.interpreter import fill_arguments
from tcverify.execution.plan import ExecutionPlan, PlanStep, known_constant, plan_of, rank_constants
from tcverify.execution.streams.issue import issue
from tcverify.execution.streams.launches import Launch, in_one_stream, launches
from tcverify.execution.streams.queues import StreamOp
from tcverify.ops import TensorSpec, lookup, qualified_name
from tcverify.ops.leaves import leaves
from tcverify.program import InputSpec, Program, StreamSettings
from tcverify.program.graph import RankConstant, Slot
from tcverify.program.stream_options import MAIN_STREAM
from tcverify.scaled_down import scale_down

#: What stands in for a collective, which one rank alone does not need.
STAND_INS = {
    "copy": "a copy of its bytes within the device's memory",
    "link": "a kernel of one block that waits as long as 8 ranks on NVLink would need by the model, and a copy",
}
STRATEGIES = ("overlap", "structured", "overlap", "wild", "overlap", "moe")
#: Ranks that a link stands for.
LINKED = 8
#: Shorter programs are run several times per replay, so that starting a graph does not count.
LEAST_S, MOST_TIMES = 300e-6, 8
#: How often a schedule and its ops in one stream are timed.
ROUNDS = 11
#: Most bytes of the values of a program.
MOST_BYTES = 8 << 30
#: Most seconds that a schedule may be predicted to take.
MOST_S = 0.01


@dataclass
class TimedSchedule:
    """One schedule.

    Attributes:
        stand_in: see `STAND_INS`.
        times: factor of the sizes that are drawn.
        ops: on how many ops it works.
        predicted, predicted_serial: makespan and sum of all costs in seconds.
        several, one: seconds of each round, on its streams and in one stream.
        same: whether the outputs on streams are those of the original program.
    """

    stand_in: str
    times: int
    ops: int
    predicted: float
    predicted_serial: float
    several: list[float]
    one: list[float]
    same: bool

    @property
    def predicted_gain(self) -> float:
        return self.predicted_serial / self.predicted

    @property
    def gain(self) -> float:
        return median(self.one) / median(self.several)

    @property
    def outcome(self) -> str:
        """Whether it is faster or slower than one stream by more than the middle halves of the times overlap."""
        low, high = quartiles(self.several)
        one_low, one_high = quartiles(self.one)
        return "faster" if high < one_low else "slower" if low > one_high else "undecided"


@dataclass
class ScheduleTimes:
    """The outcome.

    Attributes:
        timed: those that were measured.
        drawn: how many programs were drawn; those that the pass leaves in one stream are not measured.
        refused: programs that do not run here, by what was raised.
        wrong: schedules that compute something else than the original.
    """

    timed: list[TimedSchedule] = field(default_factory=list)
    drawn: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


# ------------------------------------------------------------------------------------------------------------- costs


def with_costs(program: Program, profile: DeviceProfile, stand_in: str, hop: float) -> tuple[Program, dict[str, float]]:
    """The program with the costs of its ops on one device, and the seconds that each collective waits for the link.

    A collective is what stands in for it: a copy, which starts as any kernel does.
    """
    vector = profile.launch.vector
    alone = replace(profile, launch=LaunchCosts(profile.launch.matmul, vector, vector))
    link = profile.interconnects[-1]
    waits: dict[str, float] = {}
    for graph in program.graphs:
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            node.meta.pop("cost_s", None)
            cost = node_cost(node, alone, program.ranks[0].constants) or 0.0
            if stand_in == "link" and "comm" in lookup(node.target).resources:
                short = qualified_name(node.target).rpartition("::")[2].split(".")[0]
                kind = short if short in ("all_gather", "reduce_scatter", "all_to_all") else "all_reduce"
                sent = next(iter(leaves(node.meta.get("val"), TensorSpec)), None)
                size = 0 if sent is None else math.prod(sent.shape) * sent.dtype.itemsize
                waits[node.name] = collective_time(kind, size, LINKED, link)
                cost += waits[node.name]
            node.meta["cost_s"] = cost
    return replace(program, streams=StreamSettings((0,), (1,), hop, None)), waits


# ------------------------------------------------------------------------------------------------------------ running


class DeviceProgram:
    """A program of one rank on a device, in its own dtypes.

    Args:
        program: at its real sizes.
        ops: how its ops are issued, of the same program at any sizes; None where it has no streams.
        aliases: slots of waits, and the slots whose values they return.
        waits: seconds that collectives wait for the link, by node.
    """

    def __init__(
        self,
        program: Program,
        ops: Sequence[StreamOp] | None,
        aliases: Mapping[int, int],
        waits: Mapping[str, float],
        clock: Clock,
    ) -> None:
        self.plan: ExecutionPlan = plan_of(program.graphs[program.ranks[0].graph], None, NATIVE)
        self._constants = rank_constants(program.mesh, 0, program.ranks[0].constants)
        self._first = len(self.plan.placeholders)
        self._aliases, self._waits, self._clock = aliases, waits, clock
        self._ops = {op.step: (number, op) for number, op in enumerate(ops or ()) if op.step is not None}
        self._output = next((number for number, op in enumerate(ops or ()) if op.step is None), None)

    def run(self, lanes: Lanes, plan: Sequence[Launch] | None, inputs: Sequence[torch.Tensor], times: int = 1) -> Any:
        """Issue everything so many times, and return the outputs of the last time.

        Args:
            plan: the launches of the ops; None issues all to the main stream, in order.
        """
        outputs: list[Any] = []
        for _ in range(times):
            outputs = self._issue(lanes, None if plan is None else _by_op(plan), inputs)
            lanes.join()
        return outputs

    def _issue(self, lanes: Lanes, by_op: Mapping[int, list[Launch]] | None, inputs: Sequence[torch.Tensor]) -> Any:
        values: list[Any] = list(inputs)

        def fill(leaf: Any) -> Any:
            if isinstance(leaf, Slot):
                return values[leaf.index]
            return known_constant(leaf, self._constants) if isinstance(leaf, RankConstant) else leaf

        for position, step in enumerate(self.plan.steps):
            slot = self._first + position
            if slot in self._aliases:
                values.append(values[self._aliases[slot]])
                continue
            issued, op = self._ops.get(position, (None, None))
            parts = [] if issued is None or by_op is None else by_op[issued]
            stream = parts[0].stream if parts else MAIN_STREAM
            for part in parts:
                for before in part.waits:
                    lanes.wait(stream, before[1])
            with lanes.on(stream):
                for copy, source in op.copies if op is not None else ():
                    values[copy] = values[source].clone()
                args, kwargs = fill_arguments(step, values, fill)
                values.append(self._call(step, args, kwargs))
            if any(part.event for part in parts) and issued is not None:
                lanes.mark(stream, issued)
        if by_op is not None and self._output is not None:
            for part in by_op[self._output]:
                for before in part.waits:
                    lanes.wait(MAIN_STREAM, before[1])
        # What is in use by another stream must not be freed before all are joined.
        return [
            values,
            [leaf for leaf in leaves(self.plan.result, Slot) if isinstance(values[leaf.index], torch.Tensor)],
        ]

    def _call(self, step: PlanStep, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if not step.op.collective:
            made = step.run(*args, **kwargs)
            return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(self._clock.place), made)
        steps = step.run(0, *args, **kwargs)
        answer: torch.Tensor | None = None
        while True:
            try:
                request = next(steps) if answer is None else steps.send(answer)
            except StopIteration as stop:
                return stop.value
            answer = self.communicate(step, request.tensor)

    def communicate(self, step: PlanStep, tensor: torch.Tensor) -> torch.Tensor:
        """What a rank alone gets from a collective is what it gives: see `STAND_INS`."""
        if step.name in self._waits:
            self._clock.spin(self._waits[step.name])
        return tensor.clone(memory_format=torch.contiguous_format)


def _by_op(plan: Sequence[Launch]) -> dict[int, list[Launch]]:
    found: dict[int, list[Launch]] = {}
    for launch in plan:
        found.setdefault(launch.op, []).append(launch)
    return found


def outputs_of(returned: Any) -> list[torch.Tensor]:
    """The tensors among the outputs of `DeviceProgram.run`."""
    values, slots = returned
    return [values[slot.index] for slot in slots]


def input_of(spec: InputSpec, place: torch.device) -> torch.Tensor:
    """Values as the recipe of an input says, roughly, made on the device."""
    recipe = spec.recipe
    high = int(recipe.scale) if recipe.kind == "integers" else 4
    made = random_values(spec.shape, spec.dtype, place, high)
    if not spec.dtype.is_floating_point or spec.dtype.itemsize == 1:
        return made
    if recipe.kind == "norm_weight":
        return ((made.float() / 2 + 1) * recipe.scale).to(spec.dtype)
    return made * recipe.scale


# ---------------------------------------------------------------------------------------------------------- measuring


class _LeftOut(Exception):
    """A program is not measured; the message says why."""


def measure_schedules(
    clock: Clock, profile: DeviceProfile, hop: float, tiny: bool, most: int, deadline: float
) -> ScheduleTimes:
    """Measure schedules of drawn programs, one size and stand-in after the other."""
    found = ScheduleTimes()
    subject = InProcess(load_pass("tcverify.passes:Multistream"))
    sizes = (1, 2) if tiny else (1, 16, 64, 128, 256, 512)
    while len(found.timed) < most and time.monotonic() < deadline:
        seed = found.drawn
        found.drawn += 1
        strategy, times = STRATEGIES[seed % len(STRATEGIES)], sizes[seed // len(STRATEGIES) % len(sizes)]
        stand_in = tuple(STAND_INS)[(seed + seed // (len(STRATEGIES) * len(sizes))) % len(STAND_INS)]
        what = f"{strategy}, program {seed}, {times} times as large, {stand_in}"
        try:
            timed = _measured(clock, subject, drawn(strategy, seed, times), profile, hop, (stand_in, times, tiny))
        except Exception as error:  # noqa: BLE001 - ops may refuse dtypes, sizes or capture with any error
            found.refused[reason(error)] += 1
            continue
        if timed is not None:
            found.timed.append(timed)
            if not timed.same:
                found.wrong.append(what)
    return found


def _measured(
    clock: Clock, subject: InProcess, program: Program, profile: DeviceProfile, hop: float, how: tuple[str, int, bool]
) -> TimedSchedule | None:
    """Measure one program; None where the pass leaves it in one stream."""
    stand_in, times, tiny = how
    program, waits = with_costs(program, profile, stand_in, hop)
    pair = subject.apply(program)
    if pair.rewritten is None or not pair.rewrites.get("lowered"):
        return None
    output = next(n for n in pair.rewritten.graph(0).nodes if n.op == "output")
    declared = output.meta["schedule"]
    values = [spec for n in pair.rewritten.graph(0).nodes for spec in leaves(n.meta.get("val"), TensorSpec)]
    if (
        sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in values) > MOST_BYTES
        or declared["serial_s"] > MOST_S
    ):
        raise _LeftOut("too large for this benchmark")
    small = scale_down([pair.rewritten]).programs[0]
    (issued,), _ = issue(small)
    place = clock.place
    with torch.no_grad(), torch.device(place):
        inputs = [input_of(spec, place) for spec in program.inputs]
        placed = {spec.name: tensor for spec, tensor in zip(program.inputs, inputs, strict=True)}
        original = DeviceProgram(program, None, {}, waits, clock)
        lowered = DeviceProgram(pair.rewritten, issued.ops, issued.aliases, waits, clock)
        own = [placed[name].clone() for name in lowered.plan.placeholders]
        repeated = 1 if tiny else max(1, min(MOST_TIMES, math.ceil(LEAST_S / declared["makespan_s"])))
        plain = [t.clone() for t in _plain(original, [placed[n].clone() for n in original.plan.placeholders], repeated)]
        with clock.without_waits():
            _plain(original, [placed[n].clone() for n in original.plan.placeholders], 1)
        kept: dict[str, Any] = {}
        replays = {
            name: clock.capture(partial(_kept, kept, name, lowered, plan, own, repeated))
            for name, plan in (("several", launches([issued])), ("one", in_one_stream([issued])))
        }
        same = True
        for name, replay in replays.items():
            for tensor in outputs_of(kept[name]):
                tensor.zero_()  # what the replay does not compute stays so
            for tensor, start in zip(own, (placed[n] for n in lowered.plan.placeholders), strict=True):
                tensor.copy_(start)
            clock.finish()
            replay.run()
            clock.finish()
            same = same and all(close(a, b) for a, b in zip(outputs_of(kept[name]), plain, strict=True))
        both = list(replays.values())
        clock.seconds(both, 2)
        several, one = ([t / repeated for t in found] for found in clock.seconds(both, ROUNDS))
    return TimedSchedule(
        stand_in, times, len(issued.ops) - 1, declared["makespan_s"], declared["serial_s"], several, one, same
    )


def _kept(
    kept: dict[str, Any],
    name: str,
    program: DeviceProgram,
    plan: Sequence[Launch],
    inputs: list[Any],
    times: int,
    lanes: Lanes,
) -> Any:
    kept[name] = program.run(lanes, plan, inputs, times)
    return outputs_of(kept[name])


def _plain(program: DeviceProgram, inputs: list[Any], times: int) -> list[torch.Tensor]:
    return outputs_of(program.run(CpuLanes(), None, inputs, times))


# ------------------------------------------------------------------------------------------------------------- tables


def schedules_section(found: ScheduleTimes) -> str:
    """The Markdown of the section."""
    lines = [
        f"{found.drawn} programs of one rank were drawn; {len(found.timed)} were scheduled on two streams and measured. Costs "
        "are those of the measured profile. In place of each collective stands, on the second stream:",
        "",
        *(f"- {name}: {what}" for name, what in STAND_INS.items()),
    ]
    header = (
        "programs", "schedules", "median gain predicted", "measured", "faster", "slower", "undecided",
        "makespan: measured / predicted, median", "rank correlation of makespans", "of one stream's times", "of gains",
    )  # fmt: skip
    groups: list[tuple[str, list[TimedSchedule]]] = [("all", found.timed)]
    groups += [(f"collectives: {one}", [t for t in found.timed if t.stand_in == one]) for one in STAND_INS]
    sizes = sorted({t.times for t in found.timed})
    groups += [(f"{size} times as large", [t for t in found.timed if t.times == size]) for size in sizes]
    lines.append(markdown(header, [_row(name, own) for name, own in groups if own]))
    spread = median([(quartiles(t.one)[1] - quartiles(t.one)[0]) / median(t.one) for t in found.timed])
    lines.append(
        "A gain is the time in one stream over that of the schedule. A schedule is faster or slower where the middle halves of "
        f"{ROUNDS} times each, taken in turns, do not overlap; the middle half is {number(spread, '.1%')} of the time wide, at "
        "the median. All were predicted to be faster than one stream: programs that are not stay as they are."
    )
    worst = sorted(found.timed, key=lambda t: t.gain / t.predicted_gain)[:5]
    rows = [
        (
            t.stand_in, t.times, t.ops, micro(t.predicted_serial), micro(t.predicted), micro(median(t.one)),
            micro(median(t.several)), number(t.predicted_gain), number(t.gain),
        )
        for t in worst
    ]  # fmt: skip
    lines.append("\nThe five that gained least of what was predicted (µs):")
    columns = (
        "collectives", "size", "ops", "one stream, predicted", "schedule, predicted", "one stream", "schedule",
        "gain predicted", "gain",
    )  # fmt: skip
    lines.append(markdown(columns, rows))
    lines += problems(found.refused, "programs", found.wrong, "Outputs differ from those of the original program:")
    return "\n".join(lines)


def _row(name: str, own: Sequence[TimedSchedule]) -> list[object]:
    outcomes = Counter(t.outcome for t in own)
    several, one = [median(t.several) for t in own], [median(t.one) for t in own]
    predicted, serial = [t.predicted for t in own], [t.predicted_serial for t in own]
    return [
        name,
        len(own),
        number(median([t.predicted_gain for t in own])),
        number(median([t.gain for t in own])),
        *(number(outcomes[outcome] / len(own), ".0%") for outcome in ("faster", "slower", "undecided")),
        number(median([a / b for a, b in zip(several, predicted, strict=True)])),
        number(spearman(predicted, several)),
        number(spearman(serial, one)),
        number(spearman([t.predicted_gain for t in own], [t.gain for t in own])),
    ]
