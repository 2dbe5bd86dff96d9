"""Finds the distinct graphs among those of all ranks: graphs that differ in integers alone become one with rank constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from tcverify.ops import qualified_name
from tcverify.program.graph import KEPT_META, RankBinding, RankConstant, copy_graph


def share(
    graphs: Sequence[fx.Graph], known: Sequence[Mapping[str, Any]]
) -> tuple[tuple[fx.Graph, ...], tuple[RankBinding, ...]]:
    """Return the distinct graphs and what each rank runs.

    Args:
        graphs: one per rank, described (see `graph.describe`).
        known: per rank, constants whose names are reused where all their values fit.
    """
    classes: dict[Any, list[int]] = {}
    flat: list[list[Any]] = []
    for rank, graph in enumerate(graphs):
        key, constants = _outline(graph)
        classes.setdefault(key, []).append(rank)
        flat.append(constants)
    shared: list[fx.Graph] = []
    bindings: list[RankBinding | None] = [None] * len(graphs)
    for ranks in classes.values():
        names = _name_columns([flat[r] for r in ranks], [known[r] for r in ranks])
        values: list[dict[str, Any]] = [{} for _ in ranks]
        for column, name in names.items():
            for i, rank in enumerate(ranks):
                value = flat[rank][column]
                values[i][name] = list(value) if isinstance(value, tuple) else value
        for i, rank in enumerate(ranks):
            bindings[rank] = RankBinding(len(shared), values[i])
        shared.append(_with_constants(graphs[ranks[0]], names))
    return tuple(shared), tuple(b for b in bindings if b is not None)


def _is_hole(value: Any) -> bool:
    """Whether a constant may become a rank constant: an integer, or a non-empty list of integers.

    Not a tuple, whose integers do so one by one: rank constants come as lists, and as an index a list means another thing.
    """
    if isinstance(value, list):
        return bool(value) and all(type(v) is int for v in value)
    return type(value) is int


def _outline(graph: fx.Graph) -> tuple[Any, list[Any]]:
    """Return a hashable outline of the graph with integers left out, and the integers (and integer lists) in order."""
    numbers: dict[fx.Node, int] = {}
    constants: list[Any] = []

    def outline(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return ("node", numbers.get(value, -1))
        if _is_hole(value):
            constants.append(tuple(value) if isinstance(value, list) else value)
            return ("hole", isinstance(value, list))
        if isinstance(value, (list, tuple)):
            return (isinstance(value, list), tuple(outline(v) for v in value))
        if isinstance(value, dict):
            return ("dict", tuple((k, outline(v)) for k, v in value.items()))
        if isinstance(value, slice):
            return ("slice", outline(value.start), outline(value.stop), outline(value.step))
        return (type(value).__name__, repr(value))

    rows = []
    for number, node in enumerate(graph.nodes):
        target = node.target if isinstance(node.target, str) else qualified_name(node.target)
        meta = repr([(key, node.meta[key]) for key in ("val", *KEPT_META) if key in node.meta])
        rows.append((node.op, node.name, target, outline(node.args), outline(node.kwargs), meta))
        numbers[node] = number
    return tuple(rows), constants


def _name_columns(rows: Sequence[Sequence[Any]], known: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Name the columns whose value is not the same on every rank; equal columns share a name."""
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


def _with_constants(graph: fx.Graph, names: Mapping[int, str]) -> fx.Graph:
    if not names:
        return graph
    column = -1

    def replace(value: Any) -> Any:
        """Walk an argument in the order of `_outline`."""
        nonlocal column
        if isinstance(value, fx.Node):
            return value
        if _is_hole(value):
            column += 1
            return RankConstant(names[column]) if column in names else value
        if isinstance(value, (list, tuple)):
            made = [replace(v) for v in value]
            if isinstance(value, list):
                return made
            return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
        if isinstance(value, dict):
            return {k: replace(v) for k, v in value.items()}
        if isinstance(value, slice):
            return slice(replace(value.start), replace(value.stop), replace(value.step))
        return value

    copy = copy_graph(graph)
    for node in copy.nodes:
        args = replace(node.args)
        node.args, node.kwargs = args, replace(node.kwargs)
    return copy
