"""Both versions of a program and what is known of them, as one rank sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import fx
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from tcverify.execution import Run
from tcverify.explain.relations import Measure, Relation, relation_between
from tcverify.explain.relations.originals import map_to_originals
from tcverify.explain.relations.storages import allocates, storage_root, writers, written_operands
from tcverify.explain.relations.tensors import FLOATING
from tcverify.ops import Collective
from tcverify.program import Program, RankConstant
from tcverify.program.graph import constant_value, in_host_ir, same_structure


@dataclass(frozen=True)
class Versions:
    """Both versions and their runs, as one rank sees them.

    Attributes:
        relations: of the rewritten nodes, in graph order.
        measure: by which values were compared.
    """

    program: Program
    before: Run
    rewritten: Program
    after: Run
    rank: int
    relations: Mapping[str, Relation] = field(default_factory=dict)
    measure: Measure = FLOATING

    @cached_property
    def old(self) -> fx.Graph:
        return self.program.graphs[self.program.ranks[self.rank].graph]

    @cached_property
    def new(self) -> fx.Graph:
        return self.rewritten.graphs[self.rewritten.ranks[self.rank].graph]

    def changed(self, rank: int) -> bool:
        """Whether the pass has changed a rank's graph."""
        before, after = (program.graphs[program.ranks[rank].graph] for program in (self.program, self.rewritten))
        return not same_structure(before, after, constants=self.program.ranks[rank].constants)

    @cached_property
    def old_nodes(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self.old.nodes}

    @cached_property
    def new_nodes(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self.new.nodes}

    def namesake(self, node: fx.Node) -> fx.Node | None:
        """The original's node of the same name, if it computes anything."""
        found = self.old_nodes.get(node.name)
        return found if found is not None and found.op not in ("placeholder", "output") else None

    def paired(self, node: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
        """The operands of a node with those of the original's of the same name, if both call one op; none if they do not fit."""
        namesake = self.namesake(node)
        if namesake is None or namesake.target != node.target:
            return []
        read, reads = namesake.all_input_nodes, node.all_input_nodes
        return list(zip(reads, read, strict=True)) if len(read) == len(reads) else []

    def reads_instead(self, operand: fx.Node, read: fx.Node) -> bool:
        """Whether a rewritten value is not what a value of the original is."""
        relation = relation_between(self.program, self.before, self.after, operand.name, read.name, self.measure)
        return relation is None or not relation.explained

    def writes(self, value: fx.Node, reader: fx.Node) -> list[fx.Node]:
        """What writes into the storage of a value of the rewritten graph between its definition and a reader."""
        return _between(self._written_new.get(storage_root(value), ()), value, reader, self._places_new)

    def original_writes(self, value: fx.Node, reader: fx.Node) -> list[fx.Node]:
        """As `writes`, in the original."""
        return _between(self._written_old.get(storage_root(value), ()), value, reader, self._places_old)

    def clobbers(self, value: fx.Node, reader: fx.Node) -> list[fx.Node]:
        """As `writes`, of nodes that write although the original's of their names, if there are any, write into nothing.

        In host IR, allocations are there to be written into.
        """
        if self.hosts and allocates(storage_root(value)):
            return []
        return [node for node in self.writes(value, reader) if not self._writes(node)]

    def _writes(self, node: fx.Node) -> bool:
        namesake = self.namesake(node)
        return namesake is not None and any(True for _ in written_operands(namesake))

    @cached_property
    def _written_new(self) -> dict[fx.Node, list[fx.Node]]:
        return writers(self.new)

    @cached_property
    def _written_old(self) -> dict[fx.Node, list[fx.Node]]:
        return writers(self.old)

    @cached_property
    def _places_new(self) -> dict[fx.Node, int]:
        return {node: place for place, node in enumerate(self.new.nodes)}

    @cached_property
    def _places_old(self) -> dict[fx.Node, int]:
        return {node: place for place, node in enumerate(self.old.nodes)}

    @cached_property
    def stands(self) -> dict[str, str]:
        """By inserted node, its counterpart in the original; see `map_to_originals` of relations."""
        return map_to_originals(self.old, self.new) if self.hosts else {}

    @cached_property
    def hosts(self) -> bool:
        """Whether the rewritten program is in host IR."""
        return any(map(in_host_ir, self.rewritten.graphs))

    def all_writers(self, root: fx.Node) -> Sequence[fx.Node]:
        """What writes into the storage that a node of the rewritten graph makes."""
        return self._written_new.get(root, ())

    @cached_property
    def called(self) -> dict[str, Collective]:
        """The collective that a rewritten node calls, by name."""
        return {call.node: call.collective for call in self.after.ranks[self.rank].calls}

    @cached_property
    def home(self) -> dict[str, frozenset[tuple[int, ...]]]:
        """By node of the original, the communicators of the nearest collectives that its value comes from."""
        calls = {call.node: call.collective.communicator for call in self.before.ranks[self.rank].calls}
        found: dict[str, frozenset[tuple[int, ...]]] = {}
        for node in self.old.nodes:
            if node.name in calls:
                found[node.name] = frozenset({calls[node.name]})
            else:
                found[node.name] = frozenset().union(*(found[operand.name] for operand in node.all_input_nodes))
        return found

    def arguments(self, node: fx.Node, *, rewritten: bool) -> dict[str, Any]:
        """The arguments of a call by name, with operands by their names and the rank's constants filled in."""
        binding = (self.rewritten if rewritten else self.program).ranks[self.rank]

        def plain(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return value
            return constant_value(value, binding.constants) if isinstance(value, RankConstant) else value

        names = [a.name for a in getattr(getattr(node.target, "_schema", None), "arguments", ())]
        args = [map_aggregate(a, plain) for a in node.args]
        named = {names[i] if i < len(names) else str(i): value for i, value in enumerate(args)}
        return {**named, **{key: map_aggregate(value, plain) for key, value in node.kwargs.items()}}


def output_leaves(graph: fx.Graph) -> list[Any]:
    """What the outputs are, one entry each: a node, the tuple that it is an element of, or a constant."""
    leaves: list[Any] = []
    for leaf in pytree.tree_leaves(graph.output_node().args[0]):
        value = leaf.meta.get("val") if isinstance(leaf, fx.Node) else None
        leaves += [leaf] * (len(value) if isinstance(value, (tuple, list)) else 1)
    return leaves


def output_node(graph: fx.Graph, index: int) -> fx.Node | None:
    """The node that output number `index` is, or is an element of."""
    leaves = output_leaves(graph)
    found = leaves[index] if 0 <= index < len(leaves) else None
    return found if isinstance(found, fx.Node) else None


def _between(nodes: Sequence[fx.Node], first: fx.Node, last: fx.Node, places: Mapping[fx.Node, int]) -> list[fx.Node]:
    return [node for node in nodes if places[first] < places[node] < places[last]]


__all__ = ["Versions", "output_leaves", "output_node", "storage_root", "writers", "written_operands"]
