"""Comm-buffer lowering with one defect put back in each class."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from tcverify.passes import CommBuffers
from tcverify.passes.comm_buffers.lowering import Lowering
from tcverify.passes.comm_buffers.plan import BufferRequest
from tcverify.passes.comm_buffers.storages import Analysis, Storage


class Mutant(CommBuffers):
    """The sound pass; subclasses put a defect back and carry their own name."""

    def __init_subclass__(cls) -> None:
        cls.name = cls.__name__


class OverwritesWhatIsReadLater(Mutant):
    """The operand counts as dead where the collective starts, whoever reads it later (PT-108811)."""

    class lowering(Lowering):
        def may_overwrite(self, storage: Storage, start: fx.Node) -> bool:
            return not storage.returned


class OverwritesWhatIsUnderWay(Mutant):
    """Other collectives that still read the operand do not count."""

    class lowering(Lowering):
        def may_overwrite(self, storage: Storage, start: fx.Node) -> bool:
            return not storage.returned and storage.touched <= self.analysis.flights[start].position


class OverwritesInputs(Mutant):
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


class KeepsTheMetadata(Mutant):
    """What is inserted carries none, and what lives elsewhere says that it does not."""

    class lowering(Lowering):
        def describe(self) -> None:
            pass


class FreesAtTheStart(Mutant):
    """A place is free again where the collective starts."""

    def wanted(self, graph: fx.Graph, found: Analysis) -> list[BufferRequest]:
        position = {node.name: number for node, number in found.position.items()}
        return [replace(w, death=max(position[name] for name in w.collectives)) for w in super().wanted(graph, found)]


class FreesAtTheWait(Mutant):
    """A place is free again where the collective ends, though its result lives there."""

    def wanted(self, graph: fx.Graph, found: Analysis) -> list[BufferRequest]:
        ends = {start.name: flight.end for start, flight in found.flights.items()}
        return [
            replace(w, death=min(w.death, max(ends.get(name, w.death) for name in w.collectives)))
            for w in super().wanted(graph, found)
        ]


class PlacesOutputs(Mutant):
    """What is returned lives in a buffer."""

    def wanted(self, graph: fx.Graph, found: Analysis) -> list[BufferRequest]:
        for storage in {id(s): s for node in found.position for s in found.held(node)}.values():
            storage.returned = False
        return super().wanted(graph, found)


class TakesRanksToBeAlike(Mutant):
    """Places follow from what a rank sees of its own graph, whatever the others run."""

    def agrees(self, group: str) -> bool:
        return True


#: The kinds of findings, one of which each defect shows.
EXPECTED: dict[str, frozenset[str]] = {
    "OverwritesWhatIsReadLater": frozenset({"wrong-value", "async-race"}),
    "OverwritesWhatIsUnderWay": frozenset({"wrong-value", "async-race"}),
    "OverwritesInputs": frozenset({"wrong-value"}),
    "DropsAllWaits": frozenset({"wrong-value", "async-race", "missing-wait"}),
    "KeepsTheMetadata": frozenset({"stale-metadata"}),
    "FreesAtTheStart": frozenset({"arena-mismatch", "overlapping-buffers"}),
    "FreesAtTheWait": frozenset({"arena-mismatch", "overlapping-buffers"}),
    "PlacesOutputs": frozenset({"arena-mismatch", "buffer-mismatch"}),
    "TakesRanksToBeAlike": frozenset({"buffer-mismatch"}),
}

MUTANTS: dict[str, type[Mutant]] = {name: globals()[name] for name in EXPECTED}
