"""What the two iterative passes share: their options and promises, and an order in which nodes change places.

Both go through the graph once, collective by collective, and swap the collective (or its wait) with its neighbour, again and
again, as long as nothing prevents it: a dependency, the order of collectives, memory, time. Nodes that block it because
of a dependency may be taken along: the group then moves as one. After the rounds the whole order is judged again, and
abandoned if it is worse than the previous one.
"""

from __future__ import annotations

import logging
import sys
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import fx

from tcverify.cost import DeviceProfile
from tcverify.cost import load_device_profile as device_profile
from tcverify.errors import InternalError, UsageError
from tcverify.ops import lookup
from tcverify.passes.overlap.graph import CommGraph, is_gemm_like, is_valid_order
from tcverify.passes.overlap.memory import Footprint, OrderMemory, footprint
from tcverify.passes.overlap.reordering import OverlapPass
from tcverify.passes.overlap.runtimes import Gather, Runtimes, agree_on_runtimes, runtimes
from tcverify.passes.overlap.timeline import (
    OrderTimeline,
    Tasks,
    covering_times,
    exposures,
    replay_order,
    tasks,
    to_seconds,
)
from tcverify.program import CollectiveStatistics, Contract

log = logging.getLogger(__name__)

#: Largest number of nodes that are taken along with one collective.
MAX_GROUP = 64
#: Swaps per node of the graph, in one round: keeps time linear even if every collective could cross the whole graph.
MAX_MOVES_PER_NODE = 50
#: Consecutive swaps of one collective that gain it no time, before it is left where it is.
MAX_IDLE_MOVES = 48
#: Largest number of rounds. Another one is made only if the previous one has made the graph faster.
MAX_ROUNDS = 3

#: Nothing has stopped a collective.
NO_LIMIT = "nothing"


@dataclass(frozen=True, slots=True)
class Freedom:
    """What nodes may do; see the options of `IterativePass`."""

    extra_overlap: float
    group_with_collectives: bool
    swap_with_collectives: bool
    limit: int | None
    check_memory: bool
    unsafe: bool


@dataclass(slots=True)
class CollectiveProgress:
    """What was done for one collective.

    Attributes:
        moves, grouped: as in `CollectiveStatistics`.
        limit: what stopped it in the last round.
    """

    moves: int = 0
    grouped: int = 0
    limit: str = NO_LIMIT


@dataclass(frozen=True, slots=True)
class MoveSetting:
    """The passes' working view of a graph. Nodes are numbers, in graph order.

    Attributes:
        before, after: per node, those that it directly follows, and those that directly follow it.
        budget: bytes that memory may reach.
        base: bytes that it reached before.
    """

    found: CommGraph
    numbers: dict[fx.Node, int]
    before: tuple[tuple[int, ...], ...]
    after: tuple[tuple[int, ...], ...]
    work: Tasks
    footprint: Footprint
    base: int
    budget: int
    freedom: Freedom

    def name(self, number: int) -> str:
        """The name of a node."""
        return self.found.nodes[number].name

    def kind(self, number: int) -> str:
        """See `CommGraph.kind`."""
        return self.found.kind(self.found.nodes[number])

    def fixed(self, number: int) -> bool:
        """Whether a node stays where it is."""
        return self.found.nodes[number].op in ("placeholder", "output")

    def is_gemm_like(self, number: int) -> bool:
        """Whether it multiplies matrices."""
        return is_gemm_like(self.found.nodes[number])


class GroupLine:
    """An order in which groups and their neighbours are swapped in constant time.

    Attributes:
        previous, following: per node, the nodes beside it; -1 at the ends.
    """

    def __init__(self, order: Sequence[int]) -> None:
        self.previous = [-1] * len(order)
        self.following = [-1] * len(order)
        self.first = order[0]
        for node, after in zip(order, order[1:]):  # noqa: B905, RUF007 - pairs
            self._join(node, after)

    def move_behind(self, candidate: int, head: int, tail: int) -> None:
        """`candidate`, head … tail becomes head … tail, `candidate`."""
        before, after = self.previous[candidate], self.following[tail]
        self._join(before, head)
        self._join(tail, candidate)
        self._join(candidate, after)

    def move_before(self, candidate: int, head: int, tail: int) -> None:
        """head … tail, `candidate` becomes `candidate`, head … tail."""
        before, after = self.previous[head], self.following[candidate]
        self._join(before, candidate)
        self._join(candidate, head)
        self._join(tail, after)

    def order(self) -> list[int]:
        """All nodes in order."""
        return self.until(self.first, -1)

    def until(self, node: int, end: int) -> list[int]:
        """The nodes from `node` on, up to but without `end`."""
        found = []
        while node != end:
            found.append(node)
            node = self.following[node]
        return found

    def _join(self, node: int, after: int) -> None:
        if node >= 0:
            self.following[node] = after
        else:
            self.first = after
        if after >= 0:
            self.previous[after] = node


class Round:
    """One way through the graph. Subclasses write `run`.

    Attributes:
        line: the order as it is.
        progress: per start or wait that was treated, what was done for it.
    """

    memory_of: ClassVar[type[OrderMemory]] = OrderMemory

    def __init__(self, setting: MoveSetting, order: Sequence[int]) -> None:
        self.setting = setting
        self.work = setting.work
        self.line = GroupLine(order)
        self.order = tuple(order)
        self.memory = self.memory_of(setting.footprint, order)
        self.progress: dict[int, CollectiveProgress] = {}
        self.moves_left = MAX_MOVES_PER_NODE * len(order)

    @abstractmethod
    def run(self) -> None:
        """Go through the graph."""

    def treats(self, number: int) -> bool:
        """Whether there may be one more collective to treat; notes that it is treated."""
        limit = self.setting.freedom.limit
        if limit is not None and len(self.progress) >= limit:
            return False
        self.progress[number] = CollectiveProgress()
        return True

    def checked(self) -> None:
        """Compare memory with a full recomputation, if requested."""
        if self.setting.freedom.check_memory:
            self.memory.verify(self.line.order())

    def too_much(self, peak: int) -> str | None:
        """Why a peak of memory is not allowed."""
        if peak <= self.setting.budget:
            return None
        return f"peak memory, {peak} B instead of {self.setting.base} B"


class IterativePass(OverlapPass):
    """A pass that moves asynchronous collectives step by step within a budget of memory. Leaves each collective's statistics.

    Peak memory never exceeds (1 + memory_budget) times what it was; graphs with values of unknown size are left alone. Where
    times of all nodes are known and used, the time in which communication is exposed never grows, by the model of `replay_order`;
    the contract promises that where the times are those that the program tells, not a device of choice or a median over ranks.

    Args:
        memory_budget: share by which peak memory may grow: 0.0 for not at all, 0.2 for a fifth.
        use_runtime_estimates: decide by the times of nodes, where all are known: stop where communication is hidden, and where
            more would be exposed elsewhere. Without, structure decides: collectives go as far as they can, and take along
            neither matrix products nor waits.
        extra_comm_comp_overlap: stop moving a collective when compute covers (1 + this) times its communication.
        group_with_collectives: take other collectives along that are in the way, in their order.
        limit: how many collectives are treated; all of them unless given.
        check_memory: compare memory with a full recomputation after every swap; slow.
        device: name of a device profile, or the path of one in TOML, for nodes without a cost of their own; the one that the
            program names unless given.
        align_runtimes: decide by the median over ranks of the time of every node; all ranks must run the pass together.
        options: those of `OverlapPass`.

    Attributes:
        statistics: of the last call, one row per collective that was treated.
        gather: how the times of all ranks are found; None for torch.distributed.
    """

    contract: ClassVar[Contract] = Contract(
        metadata=True, order=True, collective_order=True, memory_budget=0.0, overlap=True
    )

    def __init__(
        self,
        *,
        memory_budget: float | str = 0.0,
        use_runtime_estimates: bool | str = True,
        extra_comm_comp_overlap: float | str = 0.5,
        group_with_collectives: bool | str = True,
        limit: int | str | None = None,
        check_memory: bool | str = False,
        device: str | None = None,
        align_runtimes: bool | str = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.memory_budget = self._number("memory_budget", memory_budget)
        self.timed = self._boolean("use_runtime_estimates", use_runtime_estimates)
        self.freedom = Freedom(
            self._number("extra_comm_comp_overlap", extra_comm_comp_overlap),
            self._boolean("group_with_collectives", group_with_collectives),
            True,
            None if limit in (None, "none") else self._whole("limit", limit),
            self._boolean("check_memory", check_memory),
            self.unsafe,
        )
        self.profile: DeviceProfile | None = None if device is None else device_profile(device)
        self.align = self._boolean("align_runtimes", align_runtimes)
        self.gather: Gather | None = None
        self.statistics: tuple[CollectiveStatistics, ...] = ()
        own = self.timed and not self.align and self.profile is None  # by the times that this rank's program tells
        self.contract = replace(  # type: ignore[misc] # of this instance
            self.contract, memory_budget=self.memory_budget, overlap=own, order=not self.unsafe
        )

    @abstractmethod
    def round(self, setting: MoveSetting, order: Sequence[int]) -> Round:
        """One way through the graph in a given order."""

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        """See `Pass.__call__`."""
        self.statistics = ()
        return super().__call__(gm)

    def reordered(self, found: CommGraph) -> Sequence[fx.Node]:
        """See `OverlapPass.reordered`."""
        setting = self._setting(found)
        if setting.footprint.unknown:
            name = setting.footprint.unknown[0]
            log.info("%s does not change a graph: it is unknown how much memory '%s' allocates", self.name, name)
            return found.nodes
        start = sorted(range(len(found.nodes)), key=lambda number: found.nodes[number].op != "placeholder")
        before = replay_order(setting.work, start)
        order, progress = start, dict[int, CollectiveProgress]()
        for _ in range(MAX_ROUNDS):
            one = self.round(setting, order)
            one.run()
            after = one.line.order()
            _note(progress, one.progress)
            faster = replay_order(setting.work, after).makespan < replay_order(setting.work, order).makespan
            order = after
            if not (setting.work.timed and faster):
                break
        self.judge(setting, order)
        replayed = replay_order(setting.work, order)
        if self.is_worse(replayed, before):  # what was decided step by step promises that it is not
            log.warning("%s gives up an order that would expose more communication", self.name)
            order, replayed, progress = start, before, {}
        self.statistics = _statistics(setting, progress, exposures(setting.work, before), replayed)
        gained = to_seconds(before.exposed - replayed.exposed)
        log.info("%s: %.4g µs less exposed, %s collectives", self.name, gained * 1e6, len(self.statistics))
        return [found.nodes[number] for number in order]

    def _setting(self, found: CommGraph) -> MoveSetting:
        times = runtimes(found, self.profile) if self.timed else None
        if self.timed:
            times = agree_on_runtimes(found, times, align=self.align, gather=self.gather)
        numbers = {node: number for number, node in enumerate(found.nodes)}
        of = self.footprint(found)
        order = range(len(found.nodes))
        base = max(OrderMemory(of, order).levels(order), default=0)
        return MoveSetting(
            found,
            numbers,
            tuple(tuple(map(numbers.__getitem__, found.predecessors[node])) for node in found.nodes),
            tuple(tuple(map(numbers.__getitem__, found.successors[node])) for node in found.nodes),
            self.tasks(found, times),
            of,
            base,
            int(min(base * (1 + self.memory_budget), sys.maxsize)),
            self.freedom,
        )

    def footprint(self, found: CommGraph) -> Footprint:
        """The effect of a graph's nodes on memory."""
        return footprint(found)

    def tasks(self, found: CommGraph, times: Runtimes | None) -> Tasks:
        """The resources that a graph's nodes occupy, and for how long."""
        return tasks(found, times)

    def is_worse(self, replayed: OrderTimeline, before: OrderTimeline) -> bool:
        """Whether an order is abandoned."""
        return replayed.makespan > before.makespan

    def judge(self, setting: MoveSetting, order: Sequence[int]) -> None:
        """Raise `InternalError` for an order that breaks a dependency, or takes more memory than the budget says."""
        if not is_valid_order(setting.found, [setting.found.nodes[number] for number in order]):
            raise InternalError(f"pass '{self.name}' has broken a dependency")
        peak = max(OrderMemory(setting.footprint, order).levels(order), default=0)
        if peak > setting.budget:
            raise InternalError(f"pass '{self.name}' has raised peak memory to {peak} B, above {setting.budget} B")

    def _whole(self, option: str, value: object) -> int:
        number = self._number(option, value)
        if not number.is_integer():
            raise UsageError(f"option {option} of pass '{self.name}' cannot be {value!r}", "use a whole number")
        return int(number)

    def _number(self, option: str, value: object) -> float:
        try:
            number = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            number = -1.0
        if isinstance(value, bool) or not 0 <= number < float("inf"):
            raise UsageError(f"option {option} of pass '{self.name}' cannot be {value!r}", "use a number of at least 0")
        return number


def _note(progress: dict[int, CollectiveProgress], more: dict[int, CollectiveProgress]) -> None:
    for number, each in more.items():
        known = progress.setdefault(number, each)
        if known is not each:
            known.moves += each.moves
            known.grouped += each.grouped
            known.limit = each.limit


def _statistics(
    setting: MoveSetting, progress: dict[int, CollectiveProgress], exposed_before: dict[int, int], replayed: Any
) -> tuple[CollectiveStatistics, ...]:
    work, found = setting.work, setting.found
    exposed, covered = exposures(work, replayed), covering_times(work, replayed)
    rows = []
    for number, each in sorted(progress.items()):
        node = found.nodes[number]
        communication = found.communication_of[node]
        start = setting.numbers[communication.start]
        cost = work.costs[start]

        def time(value: int) -> float | None:
            return to_seconds(value) if work.timed else None

        rows.append(
            CollectiveStatistics(
                communication.start.name,
                lookup(communication.start.target).name,
                communication.group_name or "",
                each.moves,
                each.grouped,
                each.limit,
                time(cost),
                time(min(cost, covered.get(start, 0))),
                time(exposed_before.get(start, 0)),
                time(exposed.get(start, 0)),
                node.name if node is not communication.start else "",
            )
        )
    return tuple(rows)


__all__ = [
    "MAX_GROUP",
    "MAX_IDLE_MOVES",
    "MAX_MOVES_PER_NODE",
    "NO_LIMIT",
    "CollectiveProgress",
    "Freedom",
    "GroupLine",
    "IterativePass",
    "MoveSetting",
    "Round",
]
