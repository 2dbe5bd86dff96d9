"""Diagnosis: where a rewritten program first computes something that the original does not explain.

Both versions run in lockstep with every node's value kept, and the values are related (see `relations`). The first value
on the way to a wrong output that nothing explains is where the two versions diverge.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from tcverify.errors import ProgramError, UnsupportedOp
from tcverify.execution import Lockstep, Run
from tcverify.ops import TensorSpec
from tcverify.program import Finding, Program
from tcverify.relations import Relation, relate, relation_between

#: Largest programs that are run: elements of all nodes' values together (256 MiB of float64), and nodes times ranks.
MAX_ELEMENTS = 1 << 25
MAX_NODES = 1 << 17


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where the rewritten program first computes something that the original does not explain.

    Attributes:
        node: of the rewritten graph.
        relation: of its value to the original's.
        output: number of the output, when the node's value is explained but is not what the output must be.
        operands: (name, relation) of its operands: to what the original's node of the same name reads there, if it has one.
        raises: whether there is no value, because the node raises on operands that are explained.
    """

    node: str
    relation: Relation
    output: int | None
    operands: tuple[tuple[str, Relation], ...]
    raises: bool = False

    def __str__(self) -> str:
        told = [(name, relation) for name, relation in self.operands if self.raises or relation.kind != "equal"]
        reads = "; ".join(f"'{name}', {relation.text}" for name, relation in told)
        if self.raises:
            return f"'{self.node}' raises: it reads {reads}" if reads else f"'{self.node}' raises"
        if self.output is not None:
            return f"output {self.output} returns '{self.node}', which is {self.relation.text}"
        because = f": it reads {reads}" if self.relation.kind == "unrelated" and reads else ""
        return f"'{self.node}' is {self.relation.text}{because}"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Both versions, run in lockstep, and how their values relate.

    Attributes:
        rank: whose graphs show what is wrong.
        before, after: the runs, every node's value kept; None where there was nothing to run.
        why: why a version did not run.
        relations: by node of the rewritten graph of `rank`.
        first: where the versions diverge, when values differ.
    """

    rank: int
    before: Run | None = None
    after: Run | None = None
    why: str = ""
    relations: Mapping[str, Relation] | None = None
    first: Divergence | None = None


def diagnose(program: Program, rewritten: Program | None, finding: Finding) -> Diagnosis:
    """Run both versions and relate their values. Never raises for what a program contains.

    Args:
        finding: what is to be explained.
    """
    rank = finding.rank if finding.rank is not None else 0
    if finding.kind == "run-died":
        return Diagnosis(rank, why="a run of tcverify ended on this program, so it is not run to be shown")
    before, why = _observe(program)
    if before is None or rewritten is None:
        return Diagnosis(rank, before, None, why)
    after, why = _observe(rewritten)
    if after is None:
        return Diagnosis(rank, before, None, why)
    relations, first = _first(_Versions(program, before, rewritten, after, rank), finding)
    if first is not None and first.relation.ranks and rank not in first.relation.ranks:
        # What this rank returns is wrong because of what another rank computed: that rank is the one to look at.
        other = first.relation.ranks[0]
        there, found = _first(_Versions(program, before, rewritten, after, other), finding)
        if found is not None:
            return Diagnosis(other, before, after, "", there, found)
    return Diagnosis(rank, before, after, "", relations, first)


def _observe(program: Program) -> tuple[Run | None, str]:
    nodes = sum(len(program.graphs[binding.graph].nodes) for binding in program.ranks)
    sizes = [sum(_elements(node.meta.get("val")) for node in graph.nodes) for graph in program.graphs]
    elements = sum(sizes[binding.graph] for binding in program.ranks)
    elements += sum(math.prod(spec.shape) for spec in program.inputs)
    if nodes > MAX_NODES or elements > MAX_ELEMENTS:
        return None, f"with {nodes} nodes and {elements} elements on all ranks it is too large to keep every value"
    try:
        return Lockstep().run(program, observe=True), ""
    except (UnsupportedOp, ProgramError) as error:
        return None, error.message


def _elements(value: Any) -> int:
    if isinstance(value, TensorSpec):
        return value.numel
    return sum(map(_elements, value)) if isinstance(value, (tuple, list)) else 0


@dataclass(frozen=True, slots=True)
class _Versions:
    """Both versions and their runs, as one rank sees them."""

    program: Program
    before: Run
    rewritten: Program
    after: Run
    rank: int

    @property
    def old(self) -> fx.Graph:
        return self.program.graphs[self.program.ranks[self.rank].graph]

    @property
    def new(self) -> fx.Graph:
        return self.rewritten.graphs[self.rewritten.ranks[self.rank].graph]


def _first(of: _Versions, finding: Finding) -> tuple[dict[str, Relation], Divergence | None]:
    """Relate all values, then go up from what is wrong through those that nothing explains, to the first in graph order."""
    relations = relate(of.program, of.before, of.rewritten, of.after, of.rank)
    failed = of.after.ranks[of.rank].error
    label = str(finding.data.get("label", ""))
    if failed is not None:
        return relations, _first_before_error(of, relations, failed.node, failed.message)
    if finding.kind != "wrong-value" or not of.after.finished:
        return relations, None
    if not label.startswith("output "):  # an input that is mutated, differently
        unexplained = [n for n in of.new.nodes if n.name in relations and not relations[n.name].explained]
        return relations, _upward(of, relations, unexplained)
    number = label.removeprefix("output ")
    index = int(number) if number.isdecimal() else -1
    old, new = _output(of.old, index), _output(of.new, index)
    if new is None or old is None or new.name not in relations:
        return relations, None
    relation = relations[new.name]
    if not relation.explained:
        return relations, _upward(of, relations, [new])
    instead = "" if relation.original == old.name else f", where the original returns '{old.name}'"
    return relations, _divergence(of, relations, new, replace(relation, text=relation.text + instead), index)


def _first_before_error(of: _Versions, relations: Mapping[str, Relation], name: str, message: str) -> Divergence | None:
    node = next((n for n in of.new.nodes if n.name == name), None)
    if node is None:
        return None
    relation = Relation("unrelated", None, f"where rank {of.rank} raises {message}", None, (of.rank,))
    above = _upward(of, relations, node.all_input_nodes)
    return above or replace(_divergence(of, relations, node, relation, None), raises=True)


def _output(graph: fx.Graph, index: int) -> fx.Node | None:
    """The node that output number `index` is, or is an element of."""
    (output,) = [node for node in graph.nodes if node.op == "output"]
    leaves: list[Any] = []
    for leaf in pytree.tree_leaves(output.args[0]):
        value = leaf.meta.get("val") if isinstance(leaf, fx.Node) else None
        leaves += [leaf] * (len(value) if isinstance(value, (tuple, list)) else 1)
    found = leaves[index] if 0 <= index < len(leaves) else None
    return found if isinstance(found, fx.Node) else None


def _upward(of: _Versions, relations: Mapping[str, Relation], start: Sequence[fx.Node]) -> Divergence | None:
    """The first in graph order of the unexplained values that lead to `start` through nothing but unexplained values."""
    seen: dict[str, fx.Node] = {}
    stack = list(start)
    while stack:
        node = stack.pop()
        relation = relations.get(node.name)
        if relation is not None and not relation.explained and node.name not in seen:
            seen[node.name] = node
            stack += node.all_input_nodes
    first = next((name for name in relations if name in seen), None)
    return None if first is None else _divergence(of, relations, seen[first], relations[first], None)


def _divergence(
    of: _Versions, relations: Mapping[str, Relation], node: fx.Node, relation: Relation, output: int | None
) -> Divergence:
    namesake = next((n for n in of.old.nodes if n.name == node.name and n.op != "placeholder"), None)
    read = namesake.all_input_nodes if namesake is not None else []
    alike = namesake is not None and namesake.target == node.target and len(read) == len(node.all_input_nodes)
    operands = []
    for i, operand in enumerate(node.all_input_nodes):
        known = relations.get(operand.name)
        if known is not None and alike and known.original != read[i].name:
            instead = relation_between(of.program, of.before, of.after, operand.name, read[i].name)
            known = instead or replace(known, kind="other", text=f"{known.text}, in place of '{read[i].name}'")
        if known is not None:
            operands.append((operand.name, known))
    return Divergence(node.name, relation, output, tuple(operands))


__all__ = ["Diagnosis", "Divergence", "diagnose"]
