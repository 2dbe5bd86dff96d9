"""Which nodes of two graphs correspond: what a pass left unchanged, changed, moved, removed and inserted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import fx

from tcverify.ops import qualified_name
from tcverify.program import Program
from tcverify.report.listing import call_text, longest_increasing, value_text

#: What a pass did with a node; see `Row`.
Mark: TypeAlias = Literal["same", "changed", "moved", "removed", "inserted"]


@dataclass(frozen=True, slots=True)
class Row:
    """One node, or a pair of corresponding nodes.

    Attributes:
        mark: "same"; "changed" (same name and op, other operands or shape); "moved" (same call at another position, a row for
            each position); "removed" or "inserted".
        before, after: the nodes; None in a graph without a node here.
    """

    mark: Mark
    before: fx.Node | None
    after: fx.Node | None


@dataclass(frozen=True, slots=True)
class Correspondence:
    """Which nodes of two graphs correspond.

    Attributes:
        before, after: the nodes of both graphs, in their order.
        partners: for each node after, the position of its partner before; None without a partner.
        equal: for each node after, whether it has a partner that makes the same call and has a value of the same shape.
    """

    before: list[fx.Node]
    after: list[fx.Node]
    partners: list[int | None]
    equal: list[bool]

    def rows(self) -> list[Row]:
        """Both graphs as one sequence, in which the nodes of each keep their order."""
        return _merge(self.before, self.after, self.partners, self.equal)


def align(before: Program, after: Program, rank: int, other: int | None = None) -> list[Row]:
    """Merge both graphs of a rank into one sequence, in which the nodes of each keep their order; see `correspondence`."""
    return correspondence(before, after, rank, other).rows()


def correspondence(before: Program, after: Program, rank: int, other: int | None = None) -> Correspondence:
    """Find which nodes of both graphs of a rank correspond.

    Names need not be kept: nodes correspond when they make the same call on corresponding operands, else when they share
    name and op. Cost is n log n in the number of nodes.

    Args:
        other: the rank in `after`, if it is another one; constants then do not count, as they differ between ranks.
    """
    whole = other is None
    binding = before.ranks[rank]
    old = list(before.graphs[binding.graph].nodes)
    numbers = {node: i for i, node in enumerate(old)}
    texts = [_call(node, binding.constants, lambda n: f"%{numbers[n]}", whole) for node in old]
    by_text: dict[str, list[int]] = {}
    for i in reversed(range(len(old))):
        by_text.setdefault(texts[i], []).append(i)
    by_name = {node.name: i for i, node in enumerate(old)}

    binding = after.ranks[rank if other is None else other]
    new = list(after.graphs[binding.graph].nodes)
    names: dict[fx.Node, str] = {}
    partners: list[int | None] = []
    equal: list[bool] = []
    taken: set[int] = set()
    for node in new:
        text = _call(node, binding.constants, lambda n: names[n], whole)
        namesake = by_name.get(node.name)
        partner = None
        if namesake is not None and namesake not in taken and texts[namesake] == text:
            partner = namesake
        else:
            same = by_text.get(text, [])
            while same and same[-1] in taken:
                same.pop()
            if same:
                partner = same[-1]
            elif namesake is not None and namesake not in taken and _same_op(old[namesake], node):
                partner = namesake
        if partner is not None:
            taken.add(partner)
        names[node] = f"%{partner}" if partner is not None else f"+{len(names)}"
        partners.append(partner)
        equal.append(partner is not None and texts[partner] == text and _value(old[partner]) == _value(node))
    return Correspondence(old, new, partners, equal)


def _call(node: fx.Node, constants: Mapping[str, Any], name: Callable[[fx.Node], str], whole: bool) -> str:
    """What a node does: an input is identified by its name, an op also by its dialect; constants count on request."""
    if node.op == "placeholder":
        return f"input {node.name}"
    if not whole:
        return f"{node.op} {qualified_name(node.target)} {' '.join(map(name, node.all_input_nodes))}"
    return f"{node.op} {qualified_name(node.target)} {call_text(node, constants, name)}"


def _value(node: fx.Node) -> str:
    return value_text(node.meta.get("val"))


def _same_op(first: fx.Node, second: fx.Node) -> bool:
    return first.op == second.op and (first.op == "output" or first.target == second.target)


def _merge(
    old: Sequence[fx.Node], new: Sequence[fx.Node], partners: Sequence[int | None], equal: Sequence[bool]
) -> list[Row]:
    paired = [(i, p) for i, p in enumerate(partners) if p is not None]
    kept = [paired[k] for k in longest_increasing([p for _, p in paired])]
    moved = {p for _, p in paired} - {p for _, p in kept}
    rows: list[Row] = []
    i = j = 0
    for b, a in [*kept, (len(new), len(old))]:
        rows += [Row("moved" if k in moved else "removed", old[k], None) for k in range(j, a)]
        rows += [Row("inserted" if partners[k] is None else "moved", None, new[k]) for k in range(i, b)]
        if b < len(new):
            rows.append(Row("same" if equal[b] else "changed", old[a], new[b]))
        i, j = b + 1, a + 1
    return rows
