"""Comm-buffer lowering with one defect put back in each class."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import fx

from tcverify.ops import TensorSpec, resolve
from tcverify.passes import CommBuffers
from tcverify.passes.comm_buffers.comm_buffers import KEY
from tcverify.passes.comm_buffers.lowering import ONE_SHOT, Lowering
from tcverify.passes.comm_buffers.plan import Wanted
from tcverify.passes.comm_buffers.storages import Analysis, Storage


class Mutant(CommBuffers):
    """The sound pass; subclasses put a defect back and carry their own name."""

    def __init_subclass__(cls) -> None:
        cls.name = cls.__name__


class InPlace(Mutant):
    """The sound pass where no group has symmetric memory, so that all_reduces are done in place; subclasses put a defect back."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"symm_mem": "none", **options})


class OverwritesWhatIsReadLater(InPlace):
    """The operand counts as dead where the collective starts, whoever reads it later (PT-108811)."""

    class lowering(Lowering):
        def may_overwrite(self, storage: Storage, start: fx.Node) -> bool:
            return not storage.returned


class OverwritesInputs(InPlace):
    """Inputs are summed in place."""

    class lowering(Lowering):
        def fits(self, x: fx.Node, group: str) -> Storage | None:
            found = super().fits(x, group)
            return self.analysis.storage(x) if found is None and x.op == "placeholder" else found


class DropsAllWaits(Mutant):
    """Waits go although what they wait for does not block."""

    class lowering(Lowering):
        def is_over(self, start: fx.Node) -> bool:
            return True


class KeepsTheMetadata(InPlace):
    """What is inserted carries none, and what lives elsewhere says that it does not."""

    class lowering(Lowering):
        def describe(self) -> None:
            pass


class FreesAtTheStart(Mutant):
    """A place is free again where the collective starts."""

    def wanted(self, graph: fx.Graph, found: Analysis) -> list[Wanted]:
        position = {node.name: number for node, number in found.position.items()}
        return [replace(w, death=max(position[name] for name in w.collectives)) for w in super().wanted(graph, found)]


class FreesAtTheWait(Mutant):
    """A place is free again where the collective ends, though its result lives there."""

    def wanted(self, graph: fx.Graph, found: Analysis) -> list[Wanted]:
        ends = {start.name: flight.end for start, flight in found.flights.items()}
        return [
            replace(w, death=min(w.death, max(ends.get(name, w.death) for name in w.collectives)))
            for w in super().wanted(graph, found)
        ]


class PlacesOutputs(Mutant):
    """What is returned lives in a buffer."""

    def wanted(self, graph: fx.Graph, found: Analysis) -> list[Wanted]:
        for storage in {id(s): s for node in found.position for s in found.held(node)}.values():
            storage.returned = False
        return super().wanted(graph, found)


class TakesRanksToBeAlike(Mutant):
    """Places follow from what a rank sees of its own graph, whatever the others run."""

    def agrees(self, group: str) -> bool:
        return True


class InputsPlaced(Mutant):
    """The operand of a collective lives in a buffer, whoever owns it: inputs too."""

    def wanted(self, graph: fx.Graph, found: Analysis) -> list[Wanted]:
        wanted = super().wanted(graph, found)
        for start in found.flights:
            operand, group = start.all_input_nodes[0], start.args[-1]
            known = any(one.node == operand.name for one in wanted)
            if operand.op == "placeholder" and not known and isinstance(group, str) and self.agrees(group):
                size = int(operand.meta["val"].untyped_storage().nbytes())
                wanted.append(Wanted(operand.name, group, size, 0, found.position[start], (start.name,)))
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
    "OverwritesWhatIsReadLater": frozenset({"wrong-value", "async-race"}),
    "OverwritesInputs": frozenset({"wrong-value"}),
    "DropsAllWaits": frozenset({"wrong-value", "async-race", "missing-wait"}),
    "KeepsTheMetadata": frozenset({"stale-metadata"}),
    "FreesAtTheStart": frozenset({"arena-mismatch", "overlapping-buffers"}),
    "FreesAtTheWait": frozenset({"arena-mismatch", "overlapping-buffers"}),
    "PlacesOutputs": frozenset({"arena-mismatch", "buffer-mismatch"}),
    "TakesRanksToBeAlike": frozenset({"buffer-mismatch"}),
    "InputsPlaced": frozenset({"arena-mismatch", "buffer-mismatch"}),
    "SizesInElements": frozenset({"overlapping-buffers", "buffer-mismatch"}),
    "CloneDropped": _VALUES,
    "EveryReductionIsASum": frozenset({"wrong-value"}),
    "OneShotOverAnotherGroup": frozenset({"wrong-value", "collective-mismatch", "deadlock"}),
}

MUTANTS: dict[str, type[Any]] = {name: globals()[name] for name in EXPECTED}
