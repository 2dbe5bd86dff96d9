"""Permutation: a reordered graph has the nodes of the original, and every edge among them still points forward.

Edges through storage are compared by what they guarantee: every reader sees the same last writer as before, and writers
keep their order. This holds exactly when every read after a write, write after a read and write after a write keeps its order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from torch import fx

from tcverify.checks.ordering.accesses import Accesses, AccessStep
from tcverify.checks.ordering.asynchrony import asynchrony_of
from tcverify.ops import qualified_name
from tcverify.ops.leaves import leaves
from tcverify.program import Program, RankConstant
from tcverify.program.finding import Finding
from tcverify.program.graph import constant_value

CHECK = "order"

#: A storage identified independently of the version: the node that created it, and which of that node's storages it is.
_Storage = tuple[str, int]


def changed_nodes(original: Program, rewritten: Program) -> Finding | None:
    """The first node, on the lowest rank, that only one version has, or that differs from the node of the same name."""
    pairs: dict[tuple[int, int], list[tuple[fx.Node, fx.Node]]] = {}
    for rank in range(original.world_size):
        old, new = original.ranks[rank], rewritten.ranks[rank]
        graphs = original.graphs[old.graph], rewritten.graphs[new.graph]
        varying = pairs.get((old.graph, new.graph))
        if varying is None:
            before, after = ({node.name: node for node in graph.nodes} for graph in graphs)
            for name in after.keys() - before.keys():
                first = next(n for n in after if n == name or n not in before)
                return _changed(f"the original has no node '{first}'", first, rank)
            gone = next((name for name in before if name not in after), None)
            if gone is not None:
                return _changed(f"node '{gone}' of the original is missing", gone, rank)
            same = [(before[name], node) for name, node in after.items()]
            varying = pairs[old.graph, new.graph] = [
                pair for pair in same if leaves([(node.args, node.kwargs) for node in pair], RankConstant)
            ]
        else:
            same = varying
        for mine, theirs in same:
            if _signature(mine, old.constants) != _signature(theirs, new.constants):
                return _changed(f"'{theirs.name}' is a different call", theirs.name, rank, mine, theirs)
    return None


def _changed(title: str, name: str, rank: int, mine: fx.Node | None = None, theirs: fx.Node | None = None) -> Finding:
    lines = ["the pass promises only to move nodes"]
    if mine is not None and theirs is not None:
        lines += [f"before: {mine.format_node()}", f"after: {theirs.format_node()}"]
    return Finding("changed-nodes", CHECK, title, "\n".join(lines), name, rank, {})


def _signature(node: fx.Node, constants: Mapping[str, Any]) -> Any:
    """What a node does, in a form that can be compared between graphs."""

    def known(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return ("node", value.name)
        if isinstance(value, RankConstant):
            value = constant_value(value, constants)
        if isinstance(value, (list, tuple)):
            return ("list", *map(known, value))
        if isinstance(value, dict):
            return ("dict", *((key, known(v)) for key, v in value.items()))
        if isinstance(value, slice):
            return ("slice", known(value.start), known(value.stop), known(value.step))
        return (type(value).__name__, repr(value))

    target = node.target if isinstance(node.target, str) else qualified_name(node.target)
    return node.op, target, known(node.args), known(dict(node.kwargs))


def broken_edge(before: Accesses, after: Accesses, rank: int, *, whole: bool, starts: bool) -> Finding | None:
    """The first edge that points backward in the new order.

    Args:
        whole: whether to check all edges of the original; edges that nodes of the rewritten graph declare are always checked.
        starts: whether all communication keeps its order.
    """
    hopeless = {edge[3:5] for edge in _declared(before)}  # the original violates them already
    found = [*_declared(after)]
    if whole:
        place = {step.name: index for index, step in enumerate(after.steps)}
        found += _through_storage(before, after, place)
        found += _communication(before, after, place, starts=starts)
        found += _declared(before, place)
    found = [edge for edge in found if edge[5] != "declared" or edge[3:5] not in hopeless]
    if not found:
        return None
    _, title, detail, first, second, edge = min(found)
    data = {"first": first, "second": second, "edge": edge}
    return Finding("broken-order", CHECK, title, detail, second, rank, data)


#: (place in the new order, title, detail, node that must come first, node that must come later, kind of edge).
_Broken = tuple[int, str, str, str, str, str]


_DECLARED = "declared by meta['after']: an order that no operand shows, which passes that move nodes have to keep"


def _declared(of: Accesses, place: Mapping[str, int] | None = None) -> Iterator[_Broken]:
    place = {step.name: index for index, step in enumerate(of.steps)} if place is None else place
    for step in of.steps:
        for name in step.after:
            if name in place and place[name] > place[step.name]:
                title = f"'{step.name}' precedes '{name}', although its meta['after'] requires the opposite"
                yield place[step.name], title, _DECLARED, name, step.name, "declared"


# ------------------------------------------------------------------------------------------------------------- storage


def _through_storage(before: Accesses, after: Accesses, place: Mapping[str, int]) -> Iterator[_Broken]:
    was_read, was_written = _versions(before)
    is_read, is_written = _versions(after)
    rank_of = {storage: {name: i for i, name in enumerate(writers)} for storage, writers in was_written.items()}
    for storage, writers in is_written.items():
        numbers = [rank_of.get(storage, {}).get(name, -1) for name in writers]
        for (first, a), (second, b) in zip(
            zip(writers, numbers, strict=True), zip(writers[1:], numbers[1:], strict=True), strict=False
        ):
            if 0 <= b < a:
                title = f"'{first}' writes into '{storage[0]}' before '{second}', which wrote there first"
                yield place[first], title, "write after write", second, first, "write after write"
                break
    stood = {step.name: index for index, step in enumerate(before.steps)}
    for (reader, storage), writer in is_read.items():
        was = was_read.get((reader, storage), writer)
        if was == writer or reader in rank_of.get(storage, {}):  # the order of writers covers this
            continue
        if was is not None and place[was] > place[reader]:
            title = f"'{reader}' reads '{storage[0]}' before '{was}' has written it"
            yield place[reader], title, "read after write", was, reader, "read after write"
        elif writer is not None and stood[writer] > stood[reader]:
            title = f"'{writer}' writes into '{storage[0]}' before '{reader}' has read what was there"
            yield place[writer], title, "write after read", reader, writer, "write after read"


def _versions(of: Accesses) -> tuple[dict[tuple[str, _Storage], str | None], dict[_Storage, list[str]]]:
    """(Reader, storage) → its last writer, None if that is the node that created it; and the writers of every storage
    in order."""
    last: dict[_Storage, str] = {}
    read: dict[tuple[str, _Storage], str | None] = {}
    written: dict[_Storage, list[str]] = {}
    for step in of.steps:
        reads, writes = _touched(step)
        for storage in reads:
            read[step.name, of.owner[storage]] = last.get(of.owner[storage])
        for storage in writes:
            last[of.owner[storage]] = step.name
            written.setdefault(of.owner[storage], []).append(step.name)
    for storage in of.inputs:  # the caller reads them at the end
        read.setdefault((of.steps[-1].name, of.owner[storage]), last.get(of.owner[storage]))
    return read, written


def _touched(step: AccessStep) -> tuple[dict[int, None], dict[int, None]]:
    """What a step reads and writes of earlier values, at any time."""
    reads = dict.fromkeys((*step.reads, *(s for t in step.transfers for s in t.source)))
    made = {storage for storage in step.holds if storage not in step.touches}
    targets = (s for t in step.transfers for s in t.target if s not in made)
    return reads, dict.fromkeys((*step.writes, *step.resized, *targets))


# ------------------------------------------------------------------------------------------------------- communication


def _communication(before: Accesses, after: Accesses, place: Mapping[str, int], *, starts: bool) -> Iterator[_Broken]:
    """Edges among starts, blocking collectives, side effects, and the points at which a rank waits for data."""
    issued = [step for step in before.steps if step.issues]
    # Two effects, or an effect and a start, keep their order; so do any two nodes, if the pass promises it.
    last: AccessStep | None = None
    last_effect: AccessStep | None = None
    for step in issued:
        for earlier in (last if starts or step.effect else None, last_effect):
            if earlier is not None and place[earlier.name] > place[step.name]:
                why = "ops with an effect must keep their order relative to all communication"
                if not (step.effect or earlier.effect):
                    why = "ranks agree on the order in which collectives start"
                title = f"'{step.name}' comes before '{earlier.name}', which came before it"
                kind = "effect" if step.effect or earlier.effect else "start order"
                yield place[step.name], title, why, earlier.name, step.name, kind
                return
        if last is None or place[step.name] > place[last.name]:
            last = step
        if step.effect and (last_effect is None or place[step.name] > place[last_effect.name]):
            last_effect = step
    yield from _arrivals(before, after, place)


def _arrivals(before: Accesses, after: Accesses, place: Mapping[str, int]) -> Iterator[_Broken]:
    """A rank must not wait for something before it starts what it previously started earlier."""
    then, now = asynchrony_of(before).landed, asynchrony_of(after).landed
    places = [place[step.name] if step.issues else -1 for step in before.steps]
    latest = list(accumulate(places, max))
    lands = {(after.steps[flight.start].name, flight.number): wait for flight, wait in now.items()}
    for flight, wait in then.items():
        start = before.steps[flight.start].name
        wait_now = lands.get((start, flight.number))
        if wait_now is not None and latest[wait] > wait_now:
            other, name = after.steps[latest[wait]].name, after.steps[wait_now].name
            title = f"'{name}' waits for '{start}' before '{other}' is issued, which came before the wait"
            why = "ranks that wait for one collective before they start another can deadlock"
            yield wait_now, title, why, other, name, "wait after start"
            return


__all__ = ["broken_edge", "changed_nodes"]
