"""More defects of comm-buffer lowering, which drawn programs show: of the forms of all_reduce, and of places."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx

from tcverify.ops import TensorSpec, resolve
from tcverify.passes.comm_buffers.comm_buffers import KEY
from tcverify.passes.comm_buffers.lowering import ONE_SHOT, Lowering
from tcverify.passes.comm_buffers.plan import BufferRequest
from tcverify.passes.comm_buffers.storages import Analysis, Storage
from tests.mutants.comm_buffers import Mutant, OverwritesWhatIsReadLater


class InPlace(Mutant):
    """The sound pass where no group has symmetric memory, so that all_reduces are done in place; subclasses put a defect back."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"symm_mem": "none", **options})


class InPlaceOnLiveValue(InPlace):
    """An all_reduce is done in place though its operand is read later."""

    lowering = OverwritesWhatIsReadLater.lowering


class InputsPlaced(Mutant):
    """The operand of a collective lives in a buffer, whoever owns it: inputs too."""

    def wanted(self, graph: fx.Graph, found: Analysis) -> list[BufferRequest]:
        wanted = super().wanted(graph, found)
        for start in found.flights:
            operand, group = start.all_input_nodes[0], start.args[-1]
            known = any(one.node == operand.name for one in wanted)
            if operand.op == "placeholder" and not known and isinstance(group, str) and self.agrees(group):
                size = int(operand.meta["val"].untyped_storage().nbytes())
                wanted.append(BufferRequest(operand.name, group, size, 0, found.position[start], (start.name,)))
        return wanted


class SizesInElements(Mutant):
    """A place has as many bytes as its value has elements."""

    def rewrite(self, graph: fx.Graph) -> Iterable[fx.Node]:
        displaced = super().rewrite(graph)
        for node in graph.nodes:
            place = node.meta.get(KEY)
            if place is not None:
                node.meta[KEY] = {**place, "nbytes": int(node.meta["val"].numel())}
        return displaced


class CloneDropped(InPlace):
    """The copy that an all_reduce in place works on is saved: it works on the operand itself."""

    class lowering(Lowering):
        def copy(self, x: fx.Node, start: fx.Node, group: str) -> tuple[fx.Node, Storage]:
            storage = self.analysis.storage(x)
            return x, storage if storage is not None else Storage(odd=True)


class EveryReductionIsASum(Mutant):
    """What is small is summed in one shot, also where the largest or the mean was asked for."""

    class lowering(Lowering):
        def in_one_shot(self, start: fx.Node, spec: TensorSpec, reduce_op: str, group: str) -> bool:
            return super().in_one_shot(start, spec, "sum", group)

        def retarget(self, start: fx.Node, name: str, x: fx.Node, second: fx.Node | None = None) -> None:
            super().retarget(start, name, x, second)
            if name == ONE_SHOT:
                start.update_arg(1, "sum")


class OneShotOverAnotherGroup(Mutant):
    """A sum in one shot goes over the group whose symmetric memory was enabled first."""

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        self.first = next(iter(gm.meta.get("groups") or {}), None)
        return super().__call__(gm)

    def rewrite(self, graph: fx.Graph) -> Iterable[fx.Node]:
        displaced = super().rewrite(graph)
        for node in graph.nodes:
            if node.target is resolve(ONE_SHOT) and self.first is not None:
                node.update_arg(2, self.first)
        return displaced


_VALUES = frozenset({"wrong-value", "async-race"})

#: The kinds of findings, one of which each defect shows.
EXPECTED: dict[str, frozenset[str]] = {
    "InPlaceOnLiveValue": _VALUES,
    "InputsPlaced": frozenset({"arena-mismatch", "buffer-mismatch"}),
    "SizesInElements": frozenset({"overlapping-buffers", "buffer-mismatch"}),
    "CloneDropped": _VALUES,
    "EveryReductionIsASum": frozenset({"wrong-value"}),
    "OneShotOverAnotherGroup": frozenset({"wrong-value", "collective-mismatch", "deadlock"}),
}

MUTANTS: dict[str, type[Any]] = {name: globals()[name] for name in EXPECTED}
