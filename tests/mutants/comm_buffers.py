"""Comm-buffer lowering with one defect put back in each class."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from tcverify.ops import TensorSpec, resolve
from tcverify.passes import CommBuffers
from tcverify.passes.comm_buffers.comm_buffers import KEY
from tcverify.passes.comm_buffers.lowering import ONE_SHOT, Lowering, may_be_placed
from tcverify.passes.comm_buffers.storages import Analysis, Storage, analyse
from tcverify.passes.editing import annotate, arguments


class _Mutant(CommBuffers):
    """The sound pass; subclasses put a defect back and carry their own name."""

    def __init_subclass__(cls) -> None:
        cls.name = cls.__name__


# -------------------------------------------------------------------------------------------------------------- places


class RecycledAtTheStart(_Mutant):
    """A buffer is free for others once its collective has started, not when that has completed (overlapping-buffers)."""

    def needed_until(self, storage: Storage) -> int:
        starts = [self.position[start] for _, start in storage.reads]
        return max([*starts, *(place for place in [storage.touched] if place not in self.waits)], default=storage.birth)

    def analysed(self, graph: fx.Graph) -> Analysis:
        found = analyse(graph)
        self.position = found.position
        self.waits = {found.position[wait] for wait in found.completed}
        return found


class DeadAtTheWait(_Mutant):
    """A buffer is free once its collective has been waited for: who reads the waited value names another node
    (overlapping-buffers)."""

    def needed_until(self, storage: Storage) -> int:
        return max((end for end, _ in storage.reads), default=storage.death)


class SizesInElements(_Mutant):
    """A place has as many bytes as its value has elements (buffer-mismatch)."""

    def rewrite(self, graph: fx.Graph) -> Iterable[fx.Node]:
        displaced = super().rewrite(graph)
        for node in graph.nodes:
            place = node.meta.get(KEY)
            if place is not None:
                node.meta[KEY] = {**place, "nbytes": int(node.meta["val"].numel())}
        return displaced


class RanksTakenToBeAlike(_Mutant):
    """Places are shared by what this rank's graph shows, also where ranks run different graphs (buffer-mismatch)."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"unsafe_alike": True, **options})


class AllToAllPlaced(_Mutant):
    """Operands of all_to_all have places of their local sizes, which differ between ranks (buffer-mismatch)."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"all_to_all": True, **options})


class OutputsPlaced(_Mutant):
    """What the graph returns lives in a buffer, which the next call overwrites (buffer-mismatch)."""

    class lowering(Lowering):
        @staticmethod
        def placeable(storage: Storage) -> bool:
            before, storage.returned = storage.returned, False
            try:
                return may_be_placed(storage)
            finally:
                storage.returned = before


class InputsPlaced(_Mutant):
    """The operand of a collective lives in a buffer, whoever owns it: inputs too (buffer-mismatch)."""

    def analysed(self, graph: fx.Graph) -> Analysis:
        found = analyse(graph)
        for node in graph.nodes:
            storage = found.storage(node) if node.op == "placeholder" else None
            if storage is not None and storage.owner is None:
                storage.owner, storage.spec = node, found.spec(node)
        return found

    class lowering(Lowering):
        @staticmethod
        def placeable(storage: Storage) -> bool:
            owner = storage.owner
            if owner is not None and owner.op == "placeholder":
                return not storage.odd and not storage.returned
            return may_be_placed(storage)


class ResultsPlaced(_Mutant):
    """What a library has allocated, the result of another collective, is taken for a buffer (buffer-mismatch, …)."""

    class lowering(Lowering):
        @staticmethod
        def placeable(storage: Storage) -> bool:
            return may_be_placed(storage) or (storage.owner is not None and not storage.odd and not storage.returned)


# --------------------------------------------------------------------------------------------------------------- forms


class InPlaceOnLiveValue(_Mutant):
    """An all_reduce is done in place though its operand is read later (wrong-value, async-race)."""

    class lowering(Lowering):
        def may_overwrite(self, storage: Storage, start: fx.Node) -> bool:
            return not storage.returned


class InPlaceBehindAView(_Mutant):
    """Whether the operand is read later is asked of its name, not of its storage: views of it are forgotten (wrong-value,
    async-race)."""

    class lowering(Lowering):
        def may_overwrite(self, storage: Storage, start: fx.Node) -> bool:
            operand = arguments(start)["input"]
            position = self.analysis.position
            last = max(position[user] for user in operand.users if user in position)
            return not storage.returned and last <= position[start]


class InPlaceResultForgotten(_Mutant):
    """What has been reduced in place is not known to live in its operand: a later all_reduce of that overwrites it (wrong-value,
    async-race)."""

    class lowering(Lowering):
        def retarget(self, start: fx.Node, name: str, x: fx.Node, second: fx.Node | None = None) -> None:
            super().retarget(start, name, x, second)
            storage = self.analysis.storage(start)
            if storage is not None:
                storage.touched, storage.reads = 0, ()


class CloneDropped(_Mutant):
    """The copy that an all_reduce in place works on is saved: it works on the operand itself (wrong-value, async-race)."""

    class lowering(Lowering):
        def copy(self, x: fx.Node, start: fx.Node, group: str) -> tuple[fx.Node, Storage]:
            storage = self.analysis.storage(x)
            return x, storage if storage is not None else Storage(odd=True)


class CopyKeepsStrides(_Mutant):
    """The copy for the buffer keeps the strides of the operand, though the collective needs it row by row (wrong-value,
    buffer-mismatch, …)."""

    class lowering(Lowering):
        def copy(self, x: fx.Node, start: fx.Node, group: str) -> tuple[fx.Node, Storage]:
            copy, storage = super().copy(x, start, group)
            copy.kwargs = {"memory_format": torch.preserve_format}
            return copy, storage


class RowByRowWithoutCopy(_Mutant):
    """What is not row by row is read as if it were: the strides are dropped, no copy is made (wrong-value)."""

    class lowering(Lowering):
        def copy(self, x: fx.Node, start: fx.Node, group: str) -> tuple[fx.Node, Storage]:
            copy, storage = super().copy(x, start, group)
            spec = self.analysis.specs[x]
            plain = TensorSpec.contiguous(spec.shape, spec.dtype)
            if spec.layout != plain.layout:
                with self.graph.inserting_before(copy):
                    flat = self.graph.call_function(
                        resolve("aten::as_strided"), (x, list(plain.shape), list(plain.stride), spec.offset)
                    )
                annotate(flat)
                copy.replace_input_with(x, flat)
            return copy, storage


class EveryReductionIsASum(_Mutant):
    """What is small is summed in one shot, also where the largest or the mean was asked for (wrong-value)."""

    class lowering(Lowering):
        def in_one_shot(self, start: fx.Node, spec: TensorSpec, reduce_op: str, group: str) -> bool:
            return super().in_one_shot(start, spec, "sum", group)

        def retarget(self, start: fx.Node, name: str, x: fx.Node, second: fx.Node | None = None) -> None:
            super().retarget(start, name, x, second)
            if name == ONE_SHOT:
                start.update_arg(1, "sum")


class OneShotOverAnotherGroup(_Mutant):
    """A sum in one shot goes over the group whose symmetric memory was enabled first (wrong-value, collective-mismatch,
    deadlock)."""

    class lowering(Lowering):
        def retarget(self, start: fx.Node, name: str, x: fx.Node, second: fx.Node | None = None) -> None:
            super().retarget(start, name, x, second)
            first = next(iter(self.sizes), None)
            if name == ONE_SHOT and first is not None:
                start.update_arg(2, first)


class BlocksAnywhere(_Mutant):
    """A sum in one shot blocks where it starts, though other groups communicate before it is waited for (deadlock)."""

    class lowering(Lowering):
        def blocks_safely(self, start: fx.Node) -> bool:
            return True


class WhatIsUnderWayIgnored(_Mutant):
    """A collective is lowered though its operand is still under way (async-race, wrong-value, …)."""

    class lowering(Lowering):
        def is_doubtful(self, start: fx.Node) -> bool:
            return False


# --------------------------------------------------------------------------------------------------------------- waits


class NeededWaitDropped(_Mutant):
    """All waits go that look useless since another one stands behind them, or since the result is in the buffer already
    (missing-wait, async-race)."""

    class lowering(Lowering):
        def drop_waits(self) -> None:
            for start, flight in self.analysis.flights.items():
                if flight.awaited and start.target is resolve("_c10d_functional::all_reduce_"):
                    self.blocking.add(start)
            super().drop_waits()


class FirstWaitDropped(_Mutant):
    """Of several waits for a collective the first one goes, since another one waits for it (async-race)."""

    class lowering(Lowering):
        def drop_waits(self) -> None:
            super().drop_waits()
            waits: dict[Any, list[fx.Node]] = {}
            for wait, flights in self.analysis.completed.items():
                if len(flights) == 1 and flights[0].start not in self.blocking:
                    waits.setdefault(flights[0].start, []).append(wait)
            for start, found in waits.items():
                if len(found) > 1 and found[0].all_input_nodes == [start]:
                    found[0].replace_all_uses_with(start)
                    self.graph.erase_node(found[0])
                    self.counts["dropped-wait"] += 1


class LaterWaitReadsNothing(_Mutant):
    """Where a wait is dropped, waits for its result go too, whatever else they complete (async-race, missing-wait)."""

    class lowering(Lowering):
        def drop_waits(self) -> None:
            for flights in self.analysis.completed.values():
                if any(flight.start in self.blocking for flight in flights):
                    self.blocking.update(flight.start for flight in flights)
            super().drop_waits()


# ------------------------------------------------------------------------------------------------------------ metadata


class StorageOfBefore(_Mutant):
    """What is reduced in place is described as a tensor of its own (stale-metadata)."""

    def rewrite(self, graph: fx.Graph) -> Iterable[fx.Node]:
        before = {node: node.meta.get("val") for node in graph.nodes}
        displaced = super().rewrite(graph)
        for node in graph.nodes:
            if node in before and before[node] is not None:
                node.meta["val"] = before[node]
        return displaced


def _kinds(*names: str) -> frozenset[str]:
    return frozenset(names)


_PLACES = _kinds("buffer-mismatch", "overlapping-buffers")
_VALUES = _kinds("wrong-value", "async-race")

#: Every mutant, with the kinds of finding of which one at least must be there.
EXPECTED: dict[str, frozenset[str]] = {
    "RecycledAtTheStart": _kinds("overlapping-buffers"),
    "DeadAtTheWait": _kinds("overlapping-buffers"),
    "SizesInElements": _PLACES,
    "RanksTakenToBeAlike": _kinds("buffer-mismatch"),
    "AllToAllPlaced": _kinds("buffer-mismatch"),
    "OutputsPlaced": _kinds("buffer-mismatch"),
    "InputsPlaced": _kinds("buffer-mismatch"),
    "ResultsPlaced": _PLACES | _VALUES,
    "InPlaceOnLiveValue": _VALUES,
    "InPlaceBehindAView": _VALUES,
    "InPlaceResultForgotten": _VALUES,
    "CloneDropped": _VALUES,
    "CopyKeepsStrides": _PLACES | _VALUES | _kinds("stale-metadata", "wrong-layout"),
    "RowByRowWithoutCopy": _kinds("wrong-value"),
    "EveryReductionIsASum": _kinds("wrong-value"),
    "OneShotOverAnotherGroup": _kinds("wrong-value", "collective-mismatch", "deadlock"),
    "BlocksAnywhere": _kinds("deadlock"),
    "WhatIsUnderWayIgnored": _VALUES | _kinds("stale-metadata"),
    "NeededWaitDropped": _kinds("missing-wait", "async-race"),
    "FirstWaitDropped": _kinds("async-race"),
    "LaterWaitReadsNothing": _kinds("async-race", "missing-wait"),
    "StorageOfBefore": _kinds("stale-metadata"),
}

MUTANTS: dict[str, type[Any]] = {name: globals()[name] for name in EXPECTED}
