"""Diagnosis: where a rewritten program first computes something that the original does not explain.

Both versions run in lockstep with every node's value kept, and the values are related (see `relations`). The first value
on the way to a wrong output that nothing explains is where the two versions diverge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from tcverify.errors import ProgramError, UnsupportedOp
from tcverify.execution import Lockstep, Run
from tcverify.ops import TensorSpec
from tcverify.program import Finding, Program
from tcverify.relations import Relation, relate

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
        operands: (name, relation) of its operands.
        raises: whether there is no value, because the node raises on operands that are explained.
    """

    node: str
    relation: Relation
    output: int | None
    operands: tuple[tuple[str, Relation], ...]
    raises: bool = False

    def __str__(self) -> str:
        if self.output is not None:
            return f"output {self.output} returns '{self.node}', which is {self.relation.text}"
        return f"'{self.node}' is {self.relation.text}"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Both versions, run in lockstep, and how their values relate.

    Attributes:
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
    relations = relate(program, before, rewritten, after, rank)
    first = _first(program, rewritten, after, relations, finding, rank)
    return Diagnosis(rank, before, after, "", relations, first)


def _observe(program: Program) -> tuple[Run | None, str]:
    nodes = sum(len(program.graphs[binding.graph].nodes) for binding in program.ranks)
    sizes = [sum(_elements(node.meta.get("val")) for node in graph.nodes) for graph in program.graphs]
    elements = sum(sizes[binding.graph] for binding in program.ranks)
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


def _first(
    program: Program, rewritten: Program, after: Run, relations: Mapping[str, Relation], finding: Finding, rank: int
) -> Divergence | None:
    """Go up from what is wrong through values that nothing explains; the first of them in graph order."""
    graph = rewritten.graphs[rewritten.ranks[rank].graph]
    nodes = {node.name: node for node in graph.nodes}
    failed = after.ranks[rank].error
    if failed is not None:
        start = nodes.get(failed.node)
        if start is None:
            return None
        relation = Relation("unrelated", None, f"where rank {rank} raises {failed.message}", None, (rank,))
        return _upward(start.all_input_nodes, relations) or replace(
            _divergence(start, relation, None, relations), raises=True
        )
    label = str(finding.data.get("label", ""))
    if finding.kind != "wrong-value" or not after.finished:
        return None
    if not label.startswith("output "):
        unexplained = [n for n in graph.nodes if n.name in relations and not relations[n.name].explained]
        return _upward(unexplained, relations)
    index = int(label.removeprefix("output ")) if label.removeprefix("output ").isdecimal() else -1
    old = _output(program.graphs[program.ranks[rank].graph], index)
    new = _output(graph, index)
    if new is None or old is None or new.name not in relations:
        return None
    relation = relations[new.name]
    if not relation.explained:
        return _upward([new], relations)
    instead = "" if relation.original == old.name else f", where the original returns '{old.name}'"
    return _divergence(new, Relation(relation.kind, relation.original, relation.text + instead), index, relations)


def _output(graph: fx.Graph, index: int) -> fx.Node | None:
    """The node that output number `index` is."""
    (output,) = [node for node in graph.nodes if node.op == "output"]
    leaves: list[Any] = []
    fx.node.map_aggregate(output.args[0], leaves.append)
    found = leaves[index] if 0 <= index < len(leaves) else None
    return found if isinstance(found, fx.Node) else None


def _upward(start: Sequence[fx.Node], relations: Mapping[str, Relation]) -> Divergence | None:
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
    return None if first is None else _divergence(seen[first], relations[first], None, relations)


def _divergence(node: fx.Node, relation: Relation, output: int | None, relations: Mapping[str, Relation]) -> Divergence:
    operands = tuple((o.name, relations[o.name]) for o in node.all_input_nodes if o.name in relations)
    return Divergence(node.name, relation, output, operands)


__all__ = ["Diagnosis", "Divergence", "diagnose"]
