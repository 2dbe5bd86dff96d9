"""The original as a reference for values of a rewritten graph: its nodes, their values, and which of them are near."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tcverify.execution import Run
from tcverify.explain.relations.combinations import Pool
from tcverify.explain.relations.grouping import groupings
from tcverify.explain.relations.layouts import RelationContext
from tcverify.explain.relations.relation import Relation
from tcverify.explain.relations.steps import NamedValues, steps_of
from tcverify.explain.relations.storages import allocates, is_communication, storage_root, written_operands
from tcverify.explain.relations.tensors import Measure, Values
from tcverify.program import Program
from tcverify.program.graph import in_host_ir, same_structure

#: Number of original values that a rewritten one is compared with, besides the one of the same name.
MAX_CANDIDATES = 16

#: A value with more readers than this says little about their counterparts.
MAX_READERS = 8

#: Ops that are taken apart at most, and elements of their steps that are kept at most, over all ranks: 64 MiB.
MAX_APART, MAX_KEPT = 256, 1 << 23

#: Values of the original that could have been added to one of it.
MAX_POOL = 6

RankValues = Mapping[int, Any]


@dataclass(frozen=True, slots=True)
class Originals:
    """The original, as one rank's graph and all ranks' values.

    Attributes:
        alike: names of nodes by a print of their values, to find those that are the same far away.
        apart: names of nodes that the rewritten graph no longer has, or has as another op: they may have been decomposed.
        steps: of an op, what it computes on its way.
        stands: by inserted node of the rewritten graph, its counterpart in the original; see `map_to_originals`.
        fills: by communication that writes all of an allocation, the counterpart of that.
        peers: by node of the rewritten graph, the ranks on which that name means the same.
    """

    nodes: Mapping[str, fx.Node]
    values: Mapping[str, RankValues]
    alike: Mapping[Any, str]
    rank: int
    setting: RelationContext
    apart: frozenset[str]
    steps: Callable[[str], list[NamedValues]]
    stands: Mapping[str, str]
    fills: Mapping[str, str]
    peers: Callable[[str], frozenset[int] | None]


def originals_of(
    program: Program, before: Run, rewritten: Program, after: Run, rank: int, measure: Measure
) -> Originals:
    graph = program.graphs[program.ranks[rank].graph]
    values = values_by_node(graph, before)
    alike: dict[Any, str] = {}
    for name, by_rank in values.items():
        print_ = fingerprint_value(by_rank.get(rank))
        if print_ is not None:
            alike.setdefault(print_, name)
    setting = RelationContext(groupings(program, before, after), measure)
    nodes = {node.name: node for node in graph.nodes}
    kept = {node.name: node.target for node in rewritten.graphs[rewritten.ranks[rank].graph].nodes}
    calls = [node for node in graph.nodes if node.op == "call_function"]
    apart = [node.name for node in calls if kept.get(node.name) != node.target]
    taken: dict[str, list[NamedValues]] = {}
    size = 0

    def steps(name: str) -> list[NamedValues]:
        nonlocal size
        if name not in taken:
            taken[name] = steps_of(program, before, name) if len(taken) < MAX_APART and size < MAX_KEPT else []
            size += sum(value.numel() for _, of_step in taken[name] for value in of_step.values())
        return taken[name]

    new_graph = rewritten.graphs[rewritten.ranks[rank].graph]
    together = _alike_graphs(rewritten, rank) if any(map(in_host_ir, rewritten.graphs)) else None

    def peers(name: str) -> frozenset[int] | None:
        return None if name in nodes else together

    stands = map_to_originals(graph, new_graph) if together is not None else {}
    return Originals(
        nodes, values, alike, rank, setting, frozenset(apart), steps, stands, _fills(new_graph, stands), peers
    )


def _alike_graphs(program: Program, rank: int) -> frozenset[int]:
    """The ranks whose graphs do what that of `rank` does: only there do inserted nodes of one name mean the same."""
    mine = program.ranks[rank].graph
    alike = {
        number: number == mine or same_structure(program.graphs[mine], graph, integers=False)
        for number, graph in enumerate(program.graphs)
    }
    return frozenset(r for r, binding in enumerate(program.ranks) if alike[binding.graph])


def _fills(graph: fx.Graph, stands: Mapping[str, str]) -> dict[str, str]:
    """By communication that writes the whole of an allocation, what the original has in place of that."""
    found = {}
    for node in graph.nodes:
        into = next(written_operands(node), None) if is_communication(node) else None
        root = storage_root(into) if into is not None else None
        if root is not None and root.name in stands and _numel(root) == _numel(node):
            found[node.name] = stands[root.name]
    return found


def _numel(node: fx.Node) -> Any:
    return getattr(node.meta.get("val"), "numel", None)


def map_to_originals(old: fx.Graph, new: fx.Graph) -> dict[str, str]:
    """By name of an inserted node, its counterpart in the original: what the same op, or the output, reads there."""
    originals = {node.name: node for node in old.nodes}
    found: dict[str, str] = {}
    for node in new.nodes:
        namesake = old.output_node() if node.op == "output" else originals.get(node.name)
        if namesake is None or namesake.op != node.op or (node.op != "output" and namesake.target != node.target):
            continue
        mine, theirs = node.all_input_nodes, namesake.all_input_nodes
        if len(mine) == len(theirs):
            for operand, read in zip(mine, theirs, strict=True):
                if operand.name not in originals:
                    found.setdefault(operand.name, read.name)
    return found


def values_by_node(graph: fx.Graph, run: Run) -> dict[str, dict[int, Any]]:
    """Per node name the values by rank."""
    found: dict[str, dict[int, Any]] = {node.name: {} for node in graph.nodes}
    for result in run.ranks:
        for name, value in (result.values or {}).items():
            if name in found:
                found[name][result.rank] = value
    return found


def fingerprint_value(value: Any) -> Any:
    """A fingerprint of a value, independent of its shape; None for values of which many are equal."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.numel() < 2:
        return None
    size = float(value.abs().sum())
    return (value.numel(), round(math.log2(size) * (1 << 20))) if 0 < size < math.inf else None


def candidates_of(node: fx.Node, originals: Originals, found: Mapping[str, Relation]) -> Iterator[str]:
    """Names of original nodes that may correspond to a rewritten node: its namesake, those of its operands, and the
    users of these in the original."""
    known = [found[o.name] for o in node.all_input_nodes if o.name in found]
    if allocates(node) and originals.peers(node.name) is not None:
        yield from _of_its_shape(node, originals)
    known += [part for relation in known for part in relation.parts]
    roots = [originals.nodes[r.original] for r in known if r.original is not None]
    namesake = [originals.nodes[node.name]] if node.name in originals.nodes else []
    if node.name in originals.stands:
        namesake.append(originals.nodes[originals.stands[node.name]])
    yield from list_neighbours(roots, namesake)


def _of_its_shape(node: fx.Node, originals: Originals) -> Iterator[str]:
    """Possible purposes of an allocation: its counterpart in the original, or else values of its shape."""
    stood = originals.stands.get(node.name)
    if stood is not None:
        yield stood
        return
    shape = getattr(node.meta.get("val"), "shape", None)
    alike = (n.name for n in originals.nodes.values() if n.op == "call_function" and _shape(n) == shape)
    yield from itertools.islice(alike, MAX_CANDIDATES)


def _shape(node: fx.Node) -> Any:
    return getattr(node.meta.get("val"), "shape", ())


def list_neighbours(roots: Sequence[fx.Node], namesake: Sequence[fx.Node] = ()) -> Iterator[str]:
    """Names of a few nodes of the original, and of what reads them, directly or at second hand."""
    seen: set[str] = set()
    users = [user for root in roots if len(root.users) <= MAX_READERS for user in root.users]
    further = [user for near in users if len(near.users) <= MAX_READERS for user in near.users]
    for candidate in (*namesake, *roots, *users, *further):
        if candidate.op != "output" and candidate.name not in seen:
            seen.add(candidate.name)
            yield candidate.name
            if len(seen) > MAX_CANDIDATES:
                return


def pool_of(node: fx.Node, name: str, originals: Originals, found: Mapping[str, Relation]) -> Pool:
    """What the original's node reads, and what the rewritten node does: tensors that could have been added to its value."""
    read = [operand.name for operand in originals.nodes[name].all_input_nodes]
    stood = [found[o.name].original for o in node.all_input_nodes if o.name in found]
    pool: list[tuple[str, Values]] = []
    for source in dict.fromkeys(n for n in (*read, *stood) if n is not None):
        values = originals.values[source]
        if values and all(isinstance(value, torch.Tensor) for value in values.values()):
            pool.append((source, values))
    return pool[:MAX_POOL]
