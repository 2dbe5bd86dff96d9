"""Deallocation in host programs with one defect put back in each class."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from tcverify.ops import lookup
from tcverify.ops.dialects.host_ir import DEALLOCATE
from tcverify.passes.comm_buffers.storages import Analysis, Storage
from tcverify.passes.editing import op_name
from tcverify.passes.resharding.deallocation import InsertDeallocations, Walk
from tcverify.passes.resharding.writing import HostWriter
from tcverify.program.stream_options import MAIN_STREAM
from tests.mutants.resharding import Mutant
from tests.mutants.resharding_streams import Edited

Last = dict[Storage, fx.Node]


class Deallocations(InsertDeallocations):
    """The sound pass, of which subclasses override what is needed until when."""

    def last_touched(self, graph: fx.Graph, found: Analysis) -> Last:
        last = super().last_touched(graph, found)
        self.change(last, graph, found)
        return last

    def change(self, last: Last, graph: fx.Graph, found: Analysis) -> None:
        raise NotImplementedError


class FreedAtThePost(Mutant):
    """What a communication touches last is freed where it is posted: the wait does not count."""

    class stage(Deallocations):
        def change(self, last: Last, graph: fx.Graph, found: Analysis) -> None:
            for storage, node in last.items():
                if op_name(node) == "host_ir::wait":
                    (last[storage],) = node.all_input_nodes


class FreedBeforeTheJoin(Mutant):
    """What a worker uses last is freed behind that, on whatever stream is current, without waiting for the others."""

    class stage(InsertDeallocations):
        def walk(self, found: Analysis, last: Last) -> Walk:
            class Impatient(Walk):
                def _await_caller(self, storage: Storage, node: fx.Node) -> None:
                    self._free(storage, node)

            return Impatient(found, last)


class ViewsDoNotCount(Mutant):
    """A storage is needed until the last use of the value that made it, whoever reads it through a view later."""

    class stage(Deallocations):
        def change(self, last: Last, graph: fx.Graph, found: Analysis) -> None:
            position = {node: number for number, node in enumerate(graph.nodes)}
            for node in graph.nodes:
                storage = found.storage(node)
                if storage in last and node.users and not lookup(node.target).aliases:
                    last[storage] = max(node.users, key=position.__getitem__)


class OutputsFreed(Edited):
    """What the graph returns is freed behind its last use, as if nobody read it."""

    def edit(self, graph: fx.Graph) -> None:
        _freed_at_the_end(graph, [node for node in graph.output_node().all_input_nodes if node.op == "call_function"])


class InputsFreed(Edited):
    """What the caller gave is freed at the end."""

    def edit(self, graph: fx.Graph) -> None:
        returned = graph.output_node().all_input_nodes
        _freed_at_the_end(graph, [n for n in graph.find_nodes(op="placeholder") if n.users and n not in returned])


def _freed_at_the_end(graph: fx.Graph, values: Iterable[fx.Node]) -> None:
    writer = HostWriter(graph)
    with writer.before(graph.output_node()):
        for value in list(values)[:1]:
            writer.deallocate(value)


class FreedTwice(Mutant):
    """What has views is freed for each of its names."""

    class stage(InsertDeallocations):
        def rewrite(self, graph: fx.Graph) -> Iterable[fx.Node]:
            displaced = super().rewrite(graph)
            for free in [node for node in graph.nodes if op_name(node) == DEALLOCATE]:
                (value,) = free.all_input_nodes
                if any(lookup(user.target).aliases for user in value.users if user is not free and user.op != "output"):
                    with graph.inserting_after(free):
                        graph.node_copy(free)
            return displaced


class UnreadNotFreed(Mutant):
    """What nobody reads has no last use, and is never freed: what a communication brings that no local op asks for."""

    class stage(Deallocations):
        def change(self, last: Last, graph: fx.Graph, found: Analysis) -> None:
            read = {
                storage
                for node in graph.nodes
                if not op_name(node).startswith("host_ir::")
                for operand in node.all_input_nodes
                for storage in found.held(operand)
            }
            for storage in [one for one in last if one not in read]:
                del last[storage]


class TripsNotFreed(Mutant):
    """What the trips of loops make for themselves is never freed."""

    class stage(InsertDeallocations):
        def walk(self, found: Analysis, last: Last) -> Walk:
            class Forgetful(Walk):
                def _free(self, storage: Storage, node: fx.Node) -> None:
                    if self._current == MAIN_STREAM and op_name(node) != "host_ir::synchronize":
                        super()._free(storage, node)

            return Forgetful(found, last)


class OutputsOfCommunicationsKept(Mutant):
    """The outputs of communications are not freed: only what local ops make is."""

    class stage(Deallocations):
        def change(self, last: Last, graph: fx.Graph, found: Analysis) -> None:
            posted = [n for n in graph.nodes if n.op == "call_function" and lookup(n.target).phase == "start"]
            for value in {operand for node in posted for operand in node.all_input_nodes}:
                storage = found.storage(value)
                if storage is not None and op_name(value) == "aten::empty.memory_format":
                    last.pop(storage, None)


_FREED = frozenset({"use-after-free", "race", "async-race", "rewritten-raises"})

#: The kinds of findings, one of which each defect shows.
EXPECTED: dict[str, frozenset[str]] = {
    "FreedAtThePost": _FREED,
    "FreedBeforeTheJoin": _FREED,
    "ViewsDoNotCount": _FREED,
    "OutputsFreed": frozenset({"freed-output"}),
    "InputsFreed": frozenset({"freed-input"}),
    "FreedTwice": frozenset({"double-free"}),
    "UnreadNotFreed": frozenset({"leak"}),
    "TripsNotFreed": frozenset({"leak"}),
    "OutputsOfCommunicationsKept": frozenset({"leak"}),
}

MUTANTS: dict[str, type[Mutant]] = {name: globals()[name] for name in EXPECTED}
