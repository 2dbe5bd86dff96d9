"""Finds, in asynchronous graphs, what known defects of reordering and bucketing passes need to show themselves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from tcverify.ops import TensorSpec, lookup, qualified_name, schema_of
from tcverify.program import Program


@dataclass
class Reading:
    """A rank's calls in order, with what they touch and when collectives are under way.

    Attributes:
        touches: per call, the storages of its operands and results; of views none.
        writes: per call, the storages that it writes into, waits left out.
        flights: (start, last wait of it), by place.
    """

    nodes: list[fx.Node]
    place: dict[fx.Node, int]
    touches: list[set[int]] = field(default_factory=list)
    writes: list[set[int]] = field(default_factory=list)
    flights: list[tuple[int, int]] = field(default_factory=list)


def storages(value: Any) -> set[int]:
    if isinstance(value, (list, tuple)):
        return set().union(*map(storages, value)) if value else set()
    return {value.alias} if isinstance(value, TensorSpec) and value.alias is not None else set()


def of_operands(node: fx.Node) -> set[int]:
    return set().union(*(storages(operand.meta["val"]) for operand in node.all_input_nodes), set())


def phase(node: fx.Node) -> str | None:
    return lookup(node.target).phase


def name_of(node: fx.Node) -> str:
    return qualified_name(node.target).split("::")[1]


def is_view(node: fx.Node) -> bool:
    own = storages(node.meta["val"])
    return bool(own) and own <= of_operands(node) and not lookup(node.target).collective and not written(node)


def written(node: fx.Node) -> set[int]:
    schema = schema_of(node.target)
    if schema is None or phase(node) == "wait":
        return set()
    found: set[int] = set()
    for position, argument in enumerate(schema.arguments):
        given = node.kwargs.get(argument.name) if argument.kwarg_only else node.args[position : position + 1]
        if argument.alias_info is not None and argument.alias_info.is_write:
            fx.node.map_arg(given, lambda n: found.update(storages(n.meta["val"])))
    return found


def read(graph: fx.Graph) -> Reading:
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    reading = Reading(nodes, {node: i for i, node in enumerate(nodes)})
    under_way: dict[int, set[int]] = {}
    for i, node in enumerate(nodes):
        own = storages(node.meta["val"])
        reading.touches.append(set() if is_view(node) else own | of_operands(node))
        reading.writes.append(written(node))
        if phase(node) == "start":
            under_way[i] = own | reading.writes[-1]
        elif phase(node) == "wait":
            for start, left in list(under_way.items()):
                if left & own:
                    left -= own
                    if not left:
                        reading.flights.append((start, i))
                        del under_way[start]
    assert not under_way
    return reading


# ------------------------------------------------------------------------------------------------------------ what is


def sinkable(r: Reading, program: Program) -> bool:
    """A wait that can move behind the next call: it neither needs nor touches what the wait and its start touch."""
    for start, wait in r.flights:
        if wait + 1 < len(r.nodes) and not is_view(r.nodes[wait + 1]):
            arrived = storages(r.nodes[wait].meta["val"])
            if not (r.touches[wait + 1] & arrived) and not (r.writes[wait + 1] & of_operands(r.nodes[start])):
                return True
    return False


def overlapping(r: Reading, program: Program) -> bool:
    """Two collectives under way at once."""
    return any(a < c < b for a, b in r.flights for c, _ in r.flights)


def exposed(r: Reading, program: Program) -> bool:
    """A collective that nothing runs beside."""
    return any(all(is_view(n) for n in r.nodes[start + 1 : wait]) for start, wait in r.flights)


def reused_in_place(r: Reading, program: Program) -> bool:
    """PT-108811: what an in-place all_reduce has written is read on, behind a call whose result is as large."""
    for start, wait in r.flights:
        if name_of(r.nodes[start]) == "all_reduce_":
            spec = r.nodes[wait].meta["val"]
            later = [i for i in range(wait + 1, len(r.nodes)) if spec.alias in r.touches[i]]
            fresh = [i for i in range(wait + 1, len(r.nodes)) if _fresh(r, i) and _numel(r, i) == spec.numel]
            if any(i < later[-1] for i in fresh if later):
                return True
    return False


def _fresh(r: Reading, i: int) -> bool:
    own = storages(r.nodes[i].meta["val"])
    return bool(own) and not own & of_operands(r.nodes[i])


def _numel(r: Reading, i: int) -> int:
    value = r.nodes[i].meta["val"]
    return value.numel if isinstance(value, TensorSpec) else -1


def write_behind(r: Reading, program: Program) -> bool:
    """PT-112439: what a collective has read is written into once it has been waited for."""
    return any(r.writes[i] & of_operands(r.nodes[s]) for s, w in r.flights for i in range(w + 1, len(r.nodes)))


def view_returned(r: Reading, program: Program) -> bool:
    """PT-118802: an output is a view of what was waited for."""
    outputs = next(n for n in r.nodes[0].graph.nodes if n.op == "output").all_input_nodes if r.nodes else ()
    return any(n.op == "call_function" and is_view(n) and n.args and phase_of(n.args[0]) == "wait" for n in outputs)


def phase_of(node: Any) -> str | None:
    return phase(node) if isinstance(node, fx.Node) and node.op == "call_function" else None


def sizes_by_rank(r: Reading, program: Program) -> bool:
    """PT-141697: two collectives under way at once whose sizes differ between ranks."""
    graphs = {binding.graph for binding in program.ranks}
    pairs = [(r.nodes[a].name, r.nodes[c].name) for a, b in r.flights for c, _ in r.flights if a < c < b]
    seen: dict[str, set[Any]] = {}
    for index in graphs:
        for node in program.graphs[index].nodes:
            if node.op == "call_function" and phase(node) == "start":
                seen.setdefault(node.name, set()).add(repr([s.meta["val"].shape for s in node.all_input_nodes]))
    return any(len(seen[a]) > 1 and len(seen[b]) > 1 for a, b in pairs)


def last_uses_side_by_side(r: Reading, program: Program) -> bool:
    """PT-160113: the last two calls that read a storage follow each other, and one of them is, or reads, a collective's."""
    arrived = {alias for _, wait in r.flights for alias in storages(r.nodes[wait].meta["val"])}
    last: dict[int, int] = {alias: i for i, touched in enumerate(r.touches) for alias in touched}
    for i in range(1, len(r.nodes)):
        both = of_operands(r.nodes[i]) & of_operands(r.nodes[i - 1])
        ending = {alias for alias in both if last.get(alias) == i}
        apart = r.nodes[i - 1] not in r.nodes[i].all_input_nodes
        busy = (r.touches[i] | r.touches[i - 1]) & arrived or "start" in (phase(r.nodes[i]), phase(r.nodes[i - 1]))
        if ending and apart and busy:
            return True
    return False


def start_behind_effect(r: Reading, program: Program) -> bool:
    """PT-189454: a collective starts behind opaque communication on which it does not depend."""
    for i, node in enumerate(r.nodes):
        if lookup(node.target).effect:
            own = storages(node.meta["val"]) | r.writes[i]
            if any(start > i and not own & of_operands(r.nodes[start]) for start, _ in r.flights):
                return True
    return False


def user_before_next_input(r: Reading, program: Program) -> bool:
    """PT-158663: a gathered value is used before what the next gather reads has been computed."""
    gathers = [(s, w) for s, w in r.flights if name_of(r.nodes[s]).startswith("all_gather")]
    for (_, wait), (second, _) in itertools.pairwise(gathers):
        made = [r.place.get(operand, -1) for operand in r.nodes[second].all_input_nodes]
        arrived = storages(r.nodes[wait].meta["val"])
        used = [i for i in range(wait + 1, second) if arrived & r.touches[i]]
        if used and made and max(made) > wait:
            return True
    return False


def alike_but_in_kind(r: Reading, program: Program) -> bool:
    """PT-175150: a reduce_scatter and an all_reduce of one group and dtype, neither made of the other."""
    starts = [r.nodes[s] for s, _ in r.flights]
    for one in starts:
        for other in starts:
            kinds = name_of(one).startswith("reduce_scatter"), name_of(other).startswith("all_reduce")
            if all(kinds) and _key(one) == _key(other) and not _reaches(one, other) and not _reaches(other, one):
                return True
    return False


def _key(node: fx.Node) -> Any:
    return node.args[-1], node.args[1], node.all_input_nodes[0].meta["val"].dtype


def _reaches(a: fx.Node, b: fx.Node) -> bool:
    seen, todo = set(), [a]
    while todo:
        node = todo.pop()
        if node is b:
            return True
        todo += [user for user in node.users if user not in seen]
        seen.update(node.users)
    return False


HAZARDS: dict[str, Callable[[Reading, Program], bool]] = {
    "PT-108811": reused_in_place,
    "PT-112439": write_behind,
    "PT-118802": view_returned,
    "PT-141697": sizes_by_rank,
    "PT-160113": last_uses_side_by_side,
    "PT-189454": start_behind_effect,
    "PT-158663": user_before_next_input,
    "PT-175150": alike_but_in_kind,
}


def found_in(program: Program) -> Iterator[str]:
    """The names of the hazards that a program has, and "sinkable", "overlapping", "exposed"."""
    r = read(program.graphs[program.ranks[0].graph])
    known = {**HAZARDS, "sinkable": sinkable, "overlapping": overlapping, "exposed": exposed}
    yield from (name for name, holds in known.items() if holds(r, program))
