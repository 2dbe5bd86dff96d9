"""The changes that a pass has made to a program, taken apart: those that hang together by data flow are one change.

A hybrid of the original and the rewritten program makes some of the changes and leaves out the others. What reads a node that
was removed or inserted belongs to the same change, so that every hybrid is a graph; whether it is right is for `verify` to say.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.fx.node import map_aggregate

from tcverify.ops import TensorSpec
from tcverify.ops.leaves import leaves
from tcverify.program import Program, RankConstant, Rewrite
from tcverify.program.graph import KEPT_META, constant_value, map_structure
from tcverify.program.partition import Partition
from tcverify.report.alignment import correspondence

#: Number of nodes that are listed for one change.
MAX_NODES = 8

#: Added to the numbers of the storages of the rewritten graph, where no value of the original lies in them.
_FOREIGN = 1 << 40


@dataclass(frozen=True)
class Changes:
    """The changes of a pair of programs, in graph order; number i is the i-th change on every rank.

    Attributes:
        rewrites: what they are.
    """

    rewrites: tuple[Rewrite, ...]
    _original: Program
    _ranks: tuple[_Rank, ...]

    def hybrid(self, chosen: Set[int]) -> Program:
        """The original with only the chosen changes (their numbers, from 1). Raises `TcverifyError` if it is not a
        valid program."""
        return self._original.with_graphs([rank.hybrid(chosen) for rank in self._ranks])


def changes_between(original: Program, rewritten: Program) -> Changes:
    """Find the changes that lead from the original to the rewritten program. Neither may hold graphs that files cannot."""
    ranks = tuple(_Rank(original, rewritten, rank) for rank in range(original.world_size))
    fullest = max(ranks, key=lambda rank: len(rank.names))
    rewrites = tuple(
        Rewrite(number, node=names[0], nodes=tuple(names[:MAX_NODES])) for number, names in enumerate(fullest.names, 1)
    )
    return Changes(rewrites, original, ranks)


class _Groups:
    """Disjoint sets of nodes, each of them one change; a pair is represented by its node of the rewritten graph.

    Args:
        partner_after: the partners of the original's nodes.
    """

    def __init__(self, partner_after: Mapping[fx.Node, fx.Node]) -> None:
        self._partner_after = partner_after
        self._sets: Partition[fx.Node] = Partition()

    def find(self, node: fx.Node) -> fx.Node:
        """The representative of the set of this node."""
        return self._sets.of(self._partner_after.get(node, node))

    def join(self, one: fx.Node, other: fx.Node) -> None:
        """Make one set of those of two nodes."""
        self._sets.join(self.find(one), self.find(other))


class _Rank:
    """What a pass has changed on one rank.

    Attributes:
        names: for each change the nodes that it concerns, those of the rewritten graph first.
    """

    def __init__(self, original: Program, rewritten: Program, rank: int) -> None:
        self._constants = original.ranks[rank].constants, rewritten.ranks[rank].constants
        both = correspondence(original, rewritten, rank)
        self._before, self._after = both.before, dict.fromkeys(both.after)
        pairs = [(p, i) for i, p in enumerate(both.partners) if p is not None]
        self._partner_after: dict[fx.Node, fx.Node] = {both.before[p]: both.after[i] for p, i in pairs}
        self._partner_before: dict[fx.Node, fx.Node] = {both.after[i]: both.before[p] for p, i in pairs}
        self._storages = self._aligned_storages()
        self._rows = both.rows()
        self._slots: dict[fx.Node, list[fx.Node | None]] = {}
        self._number: dict[fx.Node, int] = {}
        self.names: list[list[str]] = []
        self._divide()

    def _paired(self, node: fx.Node) -> bool:
        return node in self._partner_after or node in self._partner_before

    def _divide(self) -> None:
        """Number the changes, and note which one each node belongs to, and each operand of a pair."""
        groups = _Groups(self._partner_after)
        changed = {node for row in self._rows if row.mark == "moved" for node in (row.before, row.after) if node}
        for node in (*self._before, *self._after):
            if not self._paired(node):
                changed.add(node)
                for user in node.users:
                    if not self._paired(user):
                        groups.join(node, user)
        reshaped = {new for new, old in self._partner_before.items() if _shape(new) != _shape(old)}
        for new, old in self._partner_before.items():
            rewired = self._rewired(new, old, groups)
            if rewired or new in reshaped or any(new.meta.get(key) != old.meta.get(key) for key in KEPT_META):
                changed.add(new)
            for operand in _operands(new) if new in reshaped else ():
                if operand in reshaped or not self._paired(operand):
                    groups.join(operand, new)
        self._number_changes(changed, groups)

    def _rewired(self, new: fx.Node, old: fx.Node, groups: _Groups) -> bool:
        """Whether a pair calls something else than before, or reads something else through its own change.

        Records whose changes decide what it reads, and merges what can only change together.
        """
        mine, theirs = _operands(old), _operands(new)
        if self._skeleton(old, 0) != self._skeleton(new, 1):
            for operand in (*mine, *theirs):
                if not self._paired(operand):
                    groups.join(operand, new)
            return True
        self._slots[new] = [self._decides(new, *slot) for slot in zip(mine, theirs, strict=True)]
        for slot in zip(mine, theirs, strict=True):
            if not any(map(self._paired, slot)):
                groups.join(*slot)
        return new in self._slots[new]

    def _number_changes(self, changed: Set[fx.Node], groups: _Groups) -> None:
        """Number the groups of changed nodes in the order of the rows, and note their names.

        Args:
            changed: nodes without a partner, and nodes of the rewritten graph.
        """
        numbers: dict[fx.Node, int] = {}
        for row in self._rows:
            for node in filter(None, (row.after, row.before)):
                if self._partner_after.get(node, node) not in changed or node.op == "placeholder":
                    continue
                number = numbers.setdefault(groups.find(node), len(numbers) + 1)
                if number > len(self.names):
                    self.names.append([])
                self._number[node] = number
                if node.name not in self.names[number - 1]:
                    self.names[number - 1].append(node.name)

    def _decides(self, reader: fx.Node, old: fx.Node, new: fx.Node) -> fx.Node | None:
        """Whose change decides what a pair reads in one place: of what was removed or inserted, or its own; None: no change's."""
        if self._partner_after.get(old) is new:
            return None
        return next((node for node in (new, old) if not self._paired(node)), reader)

    def _skeleton(self, node: fx.Node, side: int) -> str:
        """What a node calls, without its operands."""

        def hole(value: Any) -> Any:
            if isinstance(value, RankConstant):
                return constant_value(value, self._constants[side])
            return "*" if isinstance(value, fx.Node) else value

        return repr((str(node.target), map_aggregate(node.args, hole), map_aggregate(node.kwargs, hole)))

    def _aligned_storages(self) -> dict[int, int]:
        """The storage of the original that a storage of the rewritten graph is, by number, where values of both lie in it."""
        found: dict[int, int] = {}
        for new, old in self._partner_before.items():
            theirs, ours = _storage(new), _storage(old)
            if theirs is not None and ours is not None:
                found.setdefault(theirs, ours)
        return found

    def hybrid(self, chosen: Set[int]) -> fx.Graph:
        """This rank's graph with the chosen changes, values described by specs."""
        reads: dict[fx.Node, list[fx.Node]] = {}  # by node, in the order of either graph
        for row in self._rows:
            if row.before is not None and row.after is not None:
                taken = self._number.get(row.after, 0) in chosen
                node = row.after if taken else row.before
            else:
                node = next(node for node in (row.before, row.after) if node is not None)
                if (self._number.get(node, 0) in chosen) is (node is row.before):
                    continue
            reads[node] = self._read(node, chosen)
        standing = {self._partner_after.get(node, node): node for node in reads}
        operands = {n: [standing[self._partner_after.get(o, o)] for o in found] for n, found in reads.items()}
        return self._copy(_sorted(operands), operands)

    def _read(self, node: fx.Node, chosen: Set[int]) -> list[fx.Node]:
        """The operands of a node with the chosen changes, as nodes of either graph."""
        new = self._partner_after.get(node, node)
        slots = self._slots.get(new)
        if slots is None:
            return _operands(node)
        both = zip(slots, _operands(self._partner_before[new]), _operands(new), strict=True)
        return [
            theirs if decides is not None and self._number[decides] in chosen else mine for decides, mine, theirs in both
        ]  # fmt: skip

    def _copy(self, nodes: Sequence[fx.Node], operands: Mapping[fx.Node, Sequence[fx.Node]]) -> fx.Graph:
        graph = fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        names = {node.name for node in nodes}
        for node in nodes:
            theirs = node in self._after
            read = iter(operands[node])

            def convert(value: Any, read: Iterator[fx.Node] = read, side: int = int(theirs)) -> Any:
                if isinstance(value, fx.Node):
                    return made[next(read)]
                return constant_value(value, self._constants[side]) if isinstance(value, RankConstant) else value

            args, kwargs = map_aggregate(node.args, convert), dict(map_aggregate(node.kwargs, convert))
            copy = graph.create_node(node.op, node.target, args, kwargs, node.name)
            copy.meta.update(node.meta)
            if theirs and "val" in node.meta:
                copy.meta["val"] = map_structure(self._moved, node.meta["val"])
            if "after" in copy.meta:
                copy.meta["after"] = type(copy.meta["after"])(name for name in copy.meta["after"] if name in names)
            made[node] = copy
        return graph

    def _moved(self, spec: Any) -> Any:
        """The spec of a value of the rewritten graph, with its storage numbered as the original's are."""
        if not isinstance(spec, TensorSpec) or spec.alias is None:
            return spec
        return spec.stored(self._storages.get(spec.alias, spec.alias + _FOREIGN))


def _operands(node: fx.Node) -> list[fx.Node]:
    """The operands of a node place by place, those that it reads twice also twice."""
    return leaves((node.args, node.kwargs), fx.Node)


def _storage(node: fx.Node) -> int | None:
    spec = node.meta.get("val")
    return spec.alias if isinstance(spec, TensorSpec) else None


def _shape(node: fx.Node) -> str:
    def of(spec: Any) -> Any:
        return (spec.shape, spec.dtype) if isinstance(spec, TensorSpec) else spec

    return repr(map_structure(of, node.meta.get("val")))


def _sorted(operands: Mapping[fx.Node, Sequence[fx.Node]]) -> list[fx.Node]:
    """The nodes in an order in which operands come first, as close to the given one as that allows."""
    nodes = list(operands)
    place = {node: i for i, node in enumerate(nodes)}
    waiting = {node: set(found) for node, found in operands.items()}
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node, found in waiting.items():
        for operand in found:
            readers.setdefault(operand, []).append(node)
    ready = [place[node] for node, found in waiting.items() if not found]
    heapq.heapify(ready)
    ordered: list[fx.Node] = []
    while ready:
        node = nodes[heapq.heappop(ready)]
        ordered.append(node)
        for reader in readers.get(node, ()):
            waiting[reader].discard(node)
            if not waiting[reader]:
                heapq.heappush(ready, place[reader])
    return ordered


__all__ = ["Changes", "changes_between"]
