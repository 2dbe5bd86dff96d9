"""Runs both versions of a program, relates their values, and finds where they diverge."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from tcverify.domains import FLOAT64, NATIVE, Domain, domain_of
from tcverify.domains.exact.field import P
from tcverify.errors import ProgramError, UnsupportedOp
from tcverify.execution import Lockstep, Run
from tcverify.explain.diagnosis.anchors import find_misplaced_anchor
from tcverify.explain.diagnosis.blame import find_first_suspicious, is_suspicious
from tcverify.explain.diagnosis.causes import cause, find_freed_operand, operands_of
from tcverify.explain.diagnosis.communications import find_host_fault
from tcverify.explain.diagnosis.divergence import Diagnosis, Divergence
from tcverify.explain.diagnosis.operands import describe_late_read, find_first_unlike
from tcverify.explain.diagnosis.unmatched import disagreement
from tcverify.explain.diagnosis.versions import (
    Versions,
    output_node,
    storage_root,
    writers,
    written_operands,
)
from tcverify.explain.relations import Relation, relate
from tcverify.explain.relations.tensors import FLOATING, Measure
from tcverify.ops import TensorSpec
from tcverify.program import Finding, Program

#: Largest programs that are run: elements of all nodes' values together (256 MiB of float64), and nodes times ranks.
MAX_ELEMENTS = 1 << 25
MAX_NODES = 1 << 17

#: How closely values are compared when nothing differs by more than usual.
CLOSE = Measure(2.0**-44, 1.0)

#: How values of the exact domain are compared.
RESIDUES = Measure(0.0, 0.0, P)


def diagnose(program: Program, rewritten: Program | None, finding: Finding) -> Diagnosis:
    """Run both versions and relate their values. Never raises for what a program contains.

    Args:
        finding: what is to be explained.
    """
    rank = finding.rank if finding.rank is not None else 0
    if finding.kind == "run-died":
        return Diagnosis(rank, why="a run of tcverify ended on this program, so it is not run to be shown")
    domain = _domain(finding)
    before, why = _observe(program, domain)
    if before is None and domain is not FLOAT64:
        domain = FLOAT64
        before, why = _observe(program, domain)
    if before is None or rewritten is None:
        return Diagnosis(rank, before, None, why)
    after, why = _observe(rewritten, domain)
    if after is None:
        return Diagnosis(rank, before, None, why)
    measure = RESIDUES if domain.kind == "exact" else FLOATING
    of = _related(program, before, rewritten, after, rank, measure)
    first = _first(of, finding)
    if first is None and finding.kind == "wrong-value" and after.finished and domain.kind != "exact":
        measure = CLOSE
        of = _related(program, before, rewritten, after, rank, measure)
        first = _first(of, finding)
    if first is not None and first.relation.ranks and rank not in first.relation.ranks:
        # What this rank returns is wrong because of what another rank computed: that rank is the one to look at.
        there = _related(program, before, rewritten, after, first.relation.ranks[0], measure)
        found = _first(there, finding)
        if found is not None:
            of, first = there, found
    # The cause is to be seen where the pass has changed something.
    elsewhere = first is not None and first.relation.kind != "unmet" and not of.changed(of.rank)
    for other in filter(of.changed, range(program.world_size) if elsewhere else ()):
        there = _related(program, before, rewritten, after, other, measure)
        found = _first(there, finding)
        if found is not None:
            of, first = there, found
            break
    return Diagnosis(of.rank, before, after, "", of.relations, first)


def _domain(finding: Finding) -> Domain:
    """The number domain in which a finding shows."""
    return {"exact": domain_of("exact:0"), "native": NATIVE}.get(finding.domain, FLOAT64)


def _observe(program: Program, domain: Domain) -> tuple[Run | None, str]:
    nodes = sum(len(program.graphs[binding.graph].nodes) for binding in program.ranks)
    sizes = [sum(_elements(node.meta.get("val")) for node in graph.nodes) for graph in program.graphs]
    elements = sum(sizes[binding.graph] for binding in program.ranks)
    elements += sum(math.prod(spec.shape) for spec in program.inputs)
    if nodes > MAX_NODES or elements > MAX_ELEMENTS:
        return None, f"with {nodes} nodes and {elements} elements on all ranks it is too large to keep every value"
    try:
        run = Lockstep().run(program, observe=True, domain=domain)
    except (UnsupportedOp, ProgramError) as error:
        return None, error.message
    for result in run.ranks:
        result.values = pytree.tree_map_only(torch.Tensor, _computable, result.values)
    return run, ""


def _computable(value: torch.Tensor) -> torch.Tensor:
    """A value as one with which torch computes: numbers of 8 bits as bfloat16, which holds them all, and wide unsigned integers
    as int64, where those are still different that were."""
    if value.is_floating_point() and value.itemsize == 1:
        return value.to(torch.bfloat16)
    return value.to(torch.int64) if value.dtype in _UNSIGNED else value


#: Integers with which torch does not compute.
_UNSIGNED = frozenset({torch.uint16, torch.uint32, torch.uint64})


def _elements(value: Any) -> int:
    if isinstance(value, TensorSpec):
        return value.numel
    return sum(map(_elements, value)) if isinstance(value, (tuple, list)) else 0


def _related(program: Program, before: Run, rewritten: Program, after: Run, rank: int, measure: Measure) -> Versions:
    relations = relate(program, before, rewritten, after, rank, measure)
    return Versions(program, before, rewritten, after, rank, relations, measure)


def _first(of: Versions, finding: Finding) -> Divergence | None:
    """Where the versions diverge: from what is wrong, go up through all that is not as it should be."""
    failed = of.after.ranks[of.rank].error
    if failed is not None:
        return _before_error(of, failed.node, failed.message)
    if finding.kind in ("collective-mismatch", "deadlock"):
        return disagreement(of)
    if finding.kind == "anchor-mismatch":
        return find_misplaced_anchor(of, finding.node)
    if not of.after.finished:
        return None
    label = str(finding.data.get("label", ""))
    number = label.removeprefix("output ")
    index = int(number) if label.startswith("output ") and number.isdecimal() else None
    if finding.kind == "wrong-alias" and index is not None:
        return _shared(of, index, finding.detail)
    if finding.kind != "wrong-value":
        return None
    return _written(of, label) if index is None else _returned(of, index)


def _before_error(of: Versions, name: str, message: str) -> Divergence | None:
    node = of.new_nodes.get(name)
    if node is None:
        return None
    above = None if find_freed_operand(of, node) else find_first_suspicious(of, node.all_input_nodes)
    if above is not None:
        return _divergence(of, above)
    relation = Relation("unrelated", None, f"where rank {of.rank} raises {message}", None, (of.rank,))
    return _divergence(of, node, relation, raises=True)


def _returned(of: Versions, index: int) -> Divergence | None:
    """Where output number `index` goes wrong."""
    old, new = output_node(of.old, index), output_node(of.new, index)
    if new is None or old is None or new.name not in of.relations:
        return None
    relation = of.relations[new.name]
    if not relation.explained or relation.loses:
        found = find_first_suspicious(of, [new])
        return None if found is None else _divergence(of, found)
    if relation.kind == "equal" and relation.original == old.name:
        found = next(iter(of.clobbers(new, of.new.output_node())), None)
        return None if found is None else _divergence(of, found)
    if relation.kind in ("equal", "gathered", "reduced") and new.name == old.name:
        misread = find_first_unlike(of, new)
        if misread is not None and misread is not new:
            return _divergence(of, misread)
        if misread is new and describe_late_read(of, new):
            return _divergence(of, new)
    instead = "" if relation.original == old.name else f", where the original returns '{old.name}'"
    return _divergence(of, new, replace(relation, text=relation.text + instead), output=index)


def _shared(of: Versions, index: int, detail: str) -> Divergence | None:
    """The output that shares storage otherwise."""
    new = output_node(of.new, index)
    if new is None or new.name not in of.relations:
        return None
    found = _divergence(of, new, output=index)
    return replace(found, cause=detail)


def _written(of: Versions, label: str) -> Divergence | None:
    """Where the value of an input after the run goes wrong: what is written into it, or that nothing is."""
    name = label.removeprefix("input '").removesuffix("' after the run")
    old, new = _writers(of.old_nodes.get(name), of.old), _writers(of.new_nodes.get(name), of.new)
    found = find_first_suspicious(of, [written for writer in new for written in (writer, *writer.all_input_nodes)])
    if found is not None:
        return _divergence(of, found)
    for writer in old:
        node = of.new_nodes.get(writer.name)
        if node is None or node in new:
            continue
        into = next(written_operands(node), None)
        if into is not None:
            made = storage_root(into)
            copy = f"'{into.name}'" if made is into else f"'{into.name}', which belongs to '{made.name}'"
            cause_ = f"it writes into {copy}, where the original's writes into input '{name}'"
            return replace(_divergence(of, node), cause=cause_)
    changed = next((w for w in new if w.name not in {writer.name for writer in old}), None)
    if changed is not None:
        return replace(
            _divergence(of, changed), cause=f"it writes into input '{name}', which the original leaves alone"
        )
    missing = next((w for w in old if w.name not in of.new_nodes), None)
    if missing is not None and name in of.new_nodes:
        text = f"never written by '{missing.name}', which the original writes into it"
        return _divergence(of, of.new_nodes[name], Relation("unrelated", name, text))
    unexplained = [n for n in of.new.nodes if n.name in of.relations and is_suspicious(of, n)]
    found = find_first_suspicious(of, unexplained)
    return None if found is None else _divergence(of, found)


def _writers(value: fx.Node | None, graph: fx.Graph) -> list[fx.Node]:
    """The nodes that write into an input, in graph order."""
    return writers(graph).get(value, []) if value is not None else []


def _divergence(
    of: Versions,
    node: fx.Node,
    relation: Relation | None = None,
    *,
    output: int | None = None,
    raises: bool = False,
) -> Divergence:
    relation = of.relations[node.name] if relation is None else relation
    operands = operands_of(of, node)
    alone = bool(relation.ranks) and len(relation.ranks) < of.program.mesh.world_size and of.rank in relation.ranks
    if output is None and not raises and _another_value(of, node, relation):
        relation = replace(relation, kind="other", text="not what the original's is")
    why = cause(of, node, relation, operands, output=output, raises=raises)
    aspect = "" if raises or output is not None else find_host_fault(of, node)[0]
    return Divergence(node.name, relation, output, operands, raises, why, of.rank, alone and not raises, aspect)


def _another_value(of: Versions, node: fx.Node, relation: Relation) -> bool:
    """Whether a node calls what the original's of its name calls, and has the value of another one, if of any."""
    namesake = of.namesake(node)
    if namesake is None or namesake.target != node.target or relation.original == node.name:
        return relation.kind == "unrelated" and namesake is not None and isinstance(node.meta.get("val"), (tuple, list))
    return relation.kind == "equal"


__all__ = ["diagnose"]
