"""Finds the distinct graphs of all ranks: graphs that differ only in integers become one with rank constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from torch import fx

from tcverify.ops import TensorSpec, qualified_name
from tcverify.program.graph import KEPT_META, RankBinding, RankConstant, constant_value, describe, with_metadata


def share(
    graphs: Sequence[fx.Graph],
    known: Sequence[Mapping[str, Any]],
    names: Sequence[Mapping[Any, str]] | None = None,
    *,
    offsets: bool = True,
) -> tuple[tuple[fx.Graph, ...], tuple[RankBinding, ...]]:
    """Return the distinct graphs, described (see `graph.describe`), and what each rank runs.

    Args:
        graphs: one per rank, with specs or fake tensors in their metadata. Ranks may share one, which is then read once.
        known: per rank, constants whose names are reused if all their values match.
        names: per rank, new names of placeholders by target.
        offsets: whether graphs with different storage offsets count as different.
    """
    read: dict[tuple[int, int], _Outline] = {}
    outlines = []
    for rank, graph in enumerate(graphs):
        own = names[rank] if names is not None else {}
        place = id(graph), id(own) if names is not None else 0
        if place not in read:
            read[place] = _Outline(graph, own, offsets=offsets)
        outlines.append(read[place])
    keys = {id(outline): outline.key for outline in read.values()}
    first: dict[Any, int] = {}
    number = {place: first.setdefault(key, len(first)) for place, key in keys.items()}
    classes: dict[int, list[int]] = {}
    for rank, outline in enumerate(outlines):
        classes.setdefault(number[id(outline)], []).append(rank)
    shared: list[fx.Graph] = []
    bindings: list[RankBinding | None] = [None] * len(graphs)
    for ranks in classes.values():
        several = any(outlines[r] is not outlines[ranks[0]] for r in ranks)
        columns = _name_columns([outlines[r].constants for r in ranks], [known[r] for r in ranks]) if several else {}
        values: list[dict[str, Any]] = [{} for _ in ranks]
        for column, name in columns.items():
            for i, rank in enumerate(ranks):
                value = outlines[rank].constants[column]
                values[i][name] = list(value) if isinstance(value, tuple) else value
        for i, rank in enumerate(ranks):
            bindings[rank] = RankBinding(len(shared), values[i])
        shared.append(outlines[ranks[0]].graph_with(columns))
    return tuple(shared), tuple(b for b in bindings if b is not None)


def group_alike(graphs: Sequence[fx.Graph], constants: Sequence[Mapping[str, Any]]) -> list[int]:
    """For each graph, the first one that differs from it only in integers, names and metadata other than shapes.

    Args:
        graphs: of a program, as a rank runs each with these values of its rank constants.
    """
    first: dict[Any, int] = {}
    outlines = (_Outline(graph, {}, values) for graph, values in zip(graphs, constants, strict=True))
    return [first.setdefault(outline.structure, number) for number, outline in enumerate(outlines)]


def _is_hole(value: Any) -> bool:
    """Whether a constant may become a rank constant: an integer, or a non-empty list of integers.

    Not a tuple, whose integers become rank constants one by one: rank constants are lists, and a list has another meaning as an
        index.
    """
    if isinstance(value, list):
        return bool(value) and all(type(v) is int for v in value)
    return type(value) is int


class _Outline:
    """The parts of a graph.

    Attributes:
        key: equal for graphs that differ only in integers.
        constants: the integers, and lists of integers (as tuples), in order.
    """

    def __init__(
        self,
        graph: fx.Graph,
        names: Mapping[Any, str],
        values: Mapping[str, Any] = MappingProxyType({}),
        *,
        offsets: bool = True,
    ) -> None:
        self.constants: list[Any] = []
        self._graph = graph
        self._names = names
        self._values = values  # of rank constants, if there are any
        self._metadata = describe(graph)
        self._ends: list[int] = []  # per node, how many constants precede its end
        self._numbers: dict[fx.Node, int] = {}
        rows = []
        for number, (node, meta) in enumerate(zip(graph.nodes, self._metadata, strict=True)):
            target = node.target if isinstance(node.target, str) else qualified_name(node.target)
            name = names.get(node.target, node.name) if node.op == "placeholder" else node.name
            kept = [(key, meta[key]) for key in KEPT_META if key in meta]
            arguments = self._walk(node.args), self._walk(node.kwargs)
            rows.append(
                (node.op, name, target, arguments, _frozen(meta.get("val"), offsets), repr(kept) if kept else "")
            )
            self._numbers[node] = number
            self._ends.append(len(self.constants))
        self.key = tuple(rows)

    @property
    def structure(self) -> Any:
        """The key without names of nodes, and without metadata other than values."""
        numbers: dict[Any, int] = {}  # storages in order of appearance

        def numbered(val: Any) -> Any:
            if isinstance(val, TensorSpec) and val.alias is not None:
                return val.shape, val.stride, val.dtype, val.offset, numbers.setdefault(val.alias, len(numbers))
            return tuple(map(numbered, val)) if type(val) is tuple else val

        return tuple((op, target, arguments, numbered(val)) for op, _, target, arguments, val, _ in self.key)

    def _walk(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return ("node", self._numbers.get(value, -1))
        if isinstance(value, RankConstant) and value.name in self._values:
            value = constant_value(value, self._values)
        if _is_hole(value):
            self.constants.append(tuple(value) if isinstance(value, list) else value)
            return ("hole", isinstance(value, list))
        if isinstance(value, (list, tuple)):
            return (isinstance(value, list), *[self._walk(v) for v in value])
        if isinstance(value, dict):
            return ("dict", *[(k, self._walk(v)) for k, v in value.items()])
        if isinstance(value, slice):
            return ("slice", self._walk(value.start), self._walk(value.stop), self._walk(value.step))
        return (type(value).__name__, repr(value))

    def graph_with(self, columns: Mapping[int, str]) -> fx.Graph:
        """Return the graph, described, with some of its constants replaced by rank constants of these names."""
        column = -1

        def replaced(value: Any) -> Any:
            """Walk an argument in the order of `_walk`."""
            nonlocal column
            if isinstance(value, fx.Node):
                return value
            if _is_hole(value):
                column += 1
                return RankConstant(columns[column]) if column in columns else value
            if isinstance(value, (list, tuple)):
                made = [replaced(v) for v in value]
                if isinstance(value, list):
                    return made
                return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
            if isinstance(value, dict):
                return {k: replaced(v) for k, v in value.items()}
            if isinstance(value, slice):
                return slice(replaced(value.start), replaced(value.stop), replaced(value.step))
            return value

        copy = with_metadata(self._graph, self._metadata, self._names)
        start = 0
        for node, end in zip(copy.nodes, self._ends, strict=True):
            if any(c in columns for c in range(start, end)):
                column = start - 1
                args = replaced(node.args)
                node.args, node.kwargs = args, replaced(node.kwargs)
            start = end
        return copy


def _frozen(val: Any, offsets: bool) -> Any:
    """A hashable key for described metadata."""
    if isinstance(val, TensorSpec):
        return val if offsets or not val.offset else replace(val, offset=0)
    if isinstance(val, (tuple, list)):
        return (type(val).__name__, *[_frozen(v, offsets) for v in val])
    return repr(val)


def _name_columns(rows: Sequence[Sequence[Any]], known: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Name the columns whose values differ between ranks; equal columns share a name."""
    if len(rows) < 2:
        return {}
    names: dict[int, str] = {}
    by_values: dict[tuple[Any, ...], str] = {}
    for name in known[0]:
        values = tuple(_plain(constants.get(name)) for constants in known)
        by_values.setdefault(values, name)
    taken = {name for constants in known for name in constants}
    for column in range(len(rows[0])):
        values = tuple(_plain(row[column]) for row in rows)
        if all(v == values[0] for v in values):
            continue
        if values not in by_values:
            name = next(n for i in range(len(taken) + 1) if (n := f"c{i}") not in taken)
            taken.add(name)
            by_values[values] = name
        names[column] = by_values[values]
    return names


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
