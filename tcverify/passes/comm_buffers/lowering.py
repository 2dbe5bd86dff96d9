"""Chooses the form of every all_reduce, and makes operands of collectives fit for buffers.

| all_reduce of x | becomes |
|---|---|
| a small sum over a group with symmetric memory that may block | `one_shot_all_reduce(x)`, of a copy where x fits no buffer |
| the same, written into x by the program | `copy_(x, one_shot_all_reduce(x))`, where x fits a buffer |
| x fits a buffer, it is not needed afterwards, and the result is no output | `all_reduce_(x)` |
| all others whose result is no output | `all_reduce_(clone(x))` |
| all others | stays; x lives in a buffer if it fits |

Whether a collective may block where it starts is said at `Lowering.blocks_safely`; waits for one that does are dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import fx

from tcverify.ops import TensorSpec, resolve
from tcverify.passes.comm_buffers.storages import Analysis, Storage, group_of, operation
from tcverify.passes.editing import declared_after, infer_metadata, named_arguments

ALL_REDUCE = "_c10d_functional::all_reduce"
IN_PLACE = "_c10d_functional::all_reduce_"
ONE_SHOT = "symm_mem::one_shot_all_reduce"

#: Element types and the size in bytes of which a multiple must be summed, that the kernel takes
#: (torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryOps.cu).
ONE_SHOT_DTYPES = (torch.float32, torch.bfloat16)
ONE_SHOT_GRAIN = 4

#: Collectives whose operands are made contiguous and may live in buffers, beside all_reduce: those that return something new.
OUT_OF_PLACE = frozenset(
    f"_c10d_functional::{name}"
    for name in (
        "all_reduce_coalesced", "all_gather_into_tensor", "all_gather_into_tensor_coalesced",
        "all_gather_into_tensor_out", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced",
        "reduce_scatter_tensor_out", "all_to_all_single", "broadcast",
    )
)  # fmt: skip
#: All collectives whose operands may live in buffers.
BUFFERED = OUT_OF_PLACE | {
    ALL_REDUCE, IN_PLACE, ONE_SHOT, "_c10d_functional::all_reduce_coalesced_", "_c10d_functional::broadcast_",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Choices:
    """What the options of the pass say.

    Attributes:
        one_shot: whether symmetric memory is enabled for a group, by its name.
        one_shot_threshold: most bytes that are summed in one shot.
        out_of_place: "clone" or "functional": what an all_reduce becomes that cannot be done in place.
        blocking_anywhere: sum in one shot also where that may deadlock.
    """

    one_shot: Callable[[str], bool]
    one_shot_threshold: int
    out_of_place: str = "clone"
    blocking_anywhere: bool = False


@dataclass(slots=True)
class Lowering:
    """The rewriting of one graph.

    Attributes:
        agrees: whether the members of a group come to the same decisions.
        counts: rewrites by pattern.
        changed: nodes whose value lives elsewhere now, and new ones.
        useless: waits that wait for nothing any more.
    """

    graph: fx.Graph
    analysis: Analysis
    choices: Choices
    agrees: Callable[[str], bool]
    counts: dict[str, int]
    changed: set[fx.Node] = field(default_factory=set)
    blocking: set[fx.Node] = field(default_factory=set)
    _next_other: list[int] = field(default_factory=list)
    _talker_at: dict[int, int] = field(default_factory=dict)

    def run(self) -> None:
        """Rewrite the graph."""
        self._index_talkers()
        for start in list(self.analysis.flights):
            op = operation(start)
            name = op.name if op is not None else ""
            group = group_of(start)
            awaited = self.analysis.flights[start].awaited
            if group is None or not awaited or not self.agrees(group) or self.is_doubtful(start):
                continue
            if name == ALL_REDUCE:
                self._all_reduce(start, group)
            elif name == IN_PLACE:
                self._all_reduce_in_place(start, group)
            elif name in OUT_OF_PLACE:
                self._make_contiguous(start, group)
        self.drop_waits()
        self.describe()

    def is_doubtful(self, start: fx.Node) -> bool:
        """Whether a start conflicts with a collective in flight, or its metadata does not follow from its operands."""
        analysis = self.analysis
        return analysis.flights[start].risky or any(n in analysis.misdescribed for n in (start, *start.all_input_nodes))

    # ---------------------------------------------------------------------------------------------------------- forms

    def _all_reduce(self, start: fx.Node, group: str) -> None:
        given = named_arguments(start)
        x, spec = given["input"], self.analysis.spec(given["input"])
        result = self.analysis.storage(start)
        if spec is None or result is None:
            return
        ready = self.fits(x, group)
        if self.in_one_shot(start, spec, given["reduce_op"], group):
            self.retarget(start, ONE_SHOT, x if ready is not None else self.copy(x, start, group)[0])
            self._now_blocks(start)
        elif result.returned or result.odd:
            pass  # an output cannot live where the next iteration writes
        elif ready is not None and self.may_overwrite(ready, start):
            self.retarget(start, IN_PLACE, x)
            ready.take_in(result)
            self.counts["in-place"] += 1
        elif self.choices.out_of_place == "clone":
            copy, ready = self.copy(x, start, group)
            self.retarget(start, IN_PLACE, copy)
            ready.take_in(result)
            self.counts["out-of-place"] += 1
        if ready is not None:
            ready.group = group

    def _all_reduce_in_place(self, start: fx.Node, group: str) -> None:
        given = named_arguments(start)
        x, spec = given["input"], self.analysis.spec(given["input"])
        ready = self.fits(x, group)
        if spec is None or ready is None:
            return
        ready.group = group
        if not self.in_one_shot(start, spec, given["reduce_op"], group):
            return
        with self.graph.inserting_before(start):
            summed = self.graph.call_function(resolve(ONE_SHOT), (x, given["reduce_op"], group))
        summed.meta.update({key: start.meta[key] for key in ("cost_s", "after") if key in start.meta})
        start.meta.pop("cost_s", None)
        self.retarget(start, "aten::copy_", x, summed)
        self.changed.add(summed)
        self._now_blocks(start)

    def in_one_shot(self, start: fx.Node, spec: TensorSpec, reduce_op: str, group: str) -> bool:
        """Whether an all_reduce is done in one shot."""
        size = spec.nbytes
        return (
            size > 0
            and reduce_op.lower() == "sum"
            and spec.dtype in ONE_SHOT_DTYPES
            and size % ONE_SHOT_GRAIN == 0
            and size <= self.choices.one_shot_threshold
            and self.choices.one_shot(group)
            and (self.choices.blocking_anywhere or self.blocks_safely(start))
        )

    def blocks_safely(self, start: fx.Node) -> bool:
        """Whether a collective may block where it starts and not where it is waited for.

        Between the two nothing may communicate but on the same group: a rank that blocks earlier holds back what it would have
        started for others, who may be what it waits for. What follows on the same group waits for this collective anyway.
        """
        flight = self.analysis.flights[start]
        number = self._talker_at[flight.position]
        other = self._next_other[number]
        talkers = self.analysis.talkers
        return flight.awaited and (other >= len(talkers) or talkers[other][0] > flight.end)

    def _index_talkers(self) -> None:
        """For every communicating node, find the next one after it that communicates on another group."""
        talkers = self.analysis.talkers
        self._next_other = [len(talkers)] * len(talkers)
        for number in range(len(talkers) - 2, -1, -1):
            same = talkers[number][1] is not None and talkers[number][1] == talkers[number + 1][1]
            self._next_other[number] = self._next_other[number + 1] if same else number + 1
        self._talker_at = {position: number for number, (position, _) in enumerate(talkers)}

    # ------------------------------------------------------------------------------------------------------- operands

    def fits(self, x: fx.Node, group: str) -> Storage | None:
        """The storage of a collective's operand, if that can live in a buffer of the group.

        It was created by a call of this graph whose output memory can be chosen, is not an output, has not been promised to
        another group, and the operand is all of it, row by row.
        """
        spec, storage = self.analysis.spec(x), self.analysis.storage(x)
        if spec is None or storage is None or not may_be_placed(storage) or storage.group not in (None, group):
            return None
        return storage if is_whole(spec, storage) else None

    def may_overwrite(self, storage: Storage, start: fx.Node) -> bool:
        """Whether no later node and no collective in flight needs the operands of a start."""
        return storage.dead_behind(start, self.analysis.flights[start].position)

    def _make_contiguous(self, start: fx.Node, group: str) -> None:
        for x in operands(start):
            spec = self.analysis.spec(x)
            if spec is None or not spec.numel:
                continue
            ready = self.fits(x, group)
            if ready is not None:
                ready.group = group
            elif not is_contiguous(spec):
                start.replace_input_with(x, self.copy(x, start, group)[0])
                self.counts["contiguous"] += 1

    def copy(self, x: fx.Node, start: fx.Node, group: str) -> tuple[fx.Node, Storage]:
        """Insert a copy of x before a start, row by row, that is to live in a buffer of the group."""
        with self.graph.inserting_before(start):
            copy = self.graph.call_function(resolve("aten::clone"), (x,), {"memory_format": torch.contiguous_format})
        spec, position = self.analysis.specs.of[x], self.analysis.position[start]
        plain = TensorSpec.contiguous(spec.shape, spec.dtype)
        storage = Storage(copy, plain, position, position, group=group)
        self.analysis.keep(copy, plain, storage)
        self.analysis.position[copy] = position
        self.changed.add(copy)
        return copy, storage

    # -------------------------------------------------------------------------------------------------------- rewrites

    def retarget(self, start: fx.Node, name: str, x: fx.Node, second: fx.Node | None = None) -> None:
        """Make a start call another op, on x; it keeps its position, its name and its other arguments."""
        given = named_arguments(start)
        start.target = resolve(name)
        start.args = (x, given["reduce_op"], given["group_name"]) if second is None else (x, second)
        start.kwargs = {}
        self.changed.add(start)

    def _now_blocks(self, start: fx.Node) -> None:
        self.counts["one-shot"] += 1
        self.blocking.add(start)

    def drop_waits(self) -> None:
        """Put in place of waits what they wait for, where all that has arrived when it starts."""
        renamed: dict[str, list[str]] = {}
        for wait, flights in self.analysis.completed.items():
            if not flights or not all(self.is_over(flight.start) for flight in flights):
                continue
            operand = wait.all_input_nodes[0]
            wait.replace_all_uses_with(operand)
            renamed[wait.name] = [operand.name, *declared_after(wait)]
            self.graph.erase_node(wait)
            self.changed.discard(wait)
            self.counts["dropped-wait"] += 1
        if renamed:
            _rename_after(self.graph, renamed)

    def is_over(self, start: fx.Node) -> bool:
        """Whether a collective has ended where its start stands now."""
        return start in self.blocking

    def describe(self) -> None:
        """Write what new nodes produce, and what now lives in another storage, into the metadata."""
        if not self.changed:
            return
        moved: set[fx.Node] = set()
        for node in self.graph.nodes:
            op = operation(node)
            touched = op is not None and op.aliases and any(operand in moved for operand in node.all_input_nodes)
            if not (touched or node in self.changed):
                continue
            moved.add(node)
            if all("val" in operand.meta for operand in node.all_input_nodes):
                infer_metadata(node)


def operands(start: fx.Node) -> list[fx.Node]:
    """What a collective reads: its first argument, or each tensor of the list that it is."""
    given = named_arguments(start)
    value = given.get("input", given.get("inputs", ()))
    return [value] if isinstance(value, fx.Node) else [one for one in value if isinstance(one, fx.Node)]


def may_be_placed(storage: Storage) -> bool:
    """Whether a compiler can choose where a storage lies: what a call of this graph makes, unless a library allocates it."""
    op = operation(storage.owner) if storage.owner is not None else None
    if op is None or op.effect or op.collective or storage.spec is None:
        return False
    if storage.odd or storage.returned or storage.overwritten:
        return False
    return is_contiguous(storage.spec) and storage.spec.offset == 0 and storage.spec.numel > 0


def is_whole(spec: TensorSpec, storage: Storage) -> bool:
    """Whether a tensor is all that its storage holds, row by row."""
    return is_contiguous(spec) and spec.offset == 0 and spec.nbytes == storage.nbytes


def is_contiguous(spec: TensorSpec) -> bool:
    """Whether the elements lie row by row."""
    return spec.layout == TensorSpec.contiguous(spec.shape, spec.dtype).layout


def _rename_after(graph: fx.Graph, renamed: dict[str, list[str]]) -> None:
    """Let declared orders name the replacements of erased waits, and the nodes that these had to follow."""
    for node in graph.nodes:
        names = declared_after(node)
        if not any(name in renamed for name in names):
            continue
        kept: dict[str, None] = {}
        left = names[::-1]
        while left:
            name = left.pop()
            if name not in kept:
                kept[name] = None
                left += renamed.get(name, [])[::-1]
        node.meta["after"] = [name for name in kept if name not in renamed and name != node.name]
