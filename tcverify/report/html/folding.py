"""Folds of a drawing: runs of layers, far from what changed, that are shown as one until they are opened.

Every layer of the drawing gets a slot from the top. A closed fold is one slot, whatever it holds; an open one has a slot for
its handle above those of its layers. The page's script computes the same when a fold is opened or closed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from tcverify.report.html.layout import ItemPlace, LayoutEdge

#: Sizes in pixels: a box, the space between two layers, and the space above the first.
BOX_HEIGHT = 52
LAYER_GAP = 34
TOP = 34

#: Least number of layers that a fold replaces: one would save nothing.
MIN_LAYERS = 2


@dataclass(frozen=True, slots=True)
class Fold:
    """Layers `first` to `last`."""

    first: int
    last: int


def fold(layers: int, visible: Collection[int]) -> tuple[Fold, ...]:
    """Return the longest runs of layers that need not be visible.

    Args:
        layers: their number.
    """
    found = []
    first = None
    for layer in range(layers + 1):
        hidden = layer < layers and layer not in visible
        if hidden and first is None:
            first = layer
        elif not hidden and first is not None:
            if layer - first >= MIN_LAYERS:
                found.append(Fold(first, layer - 1))
            first = None
    return tuple(found)


def slots(layers: int, folds: Iterable[Fold]) -> list[int]:
    """Return the slot of every layer, with all folds closed."""
    inside = {layer for f in folds for layer in range(f.first + 1, f.last + 1)}
    found: list[int] = []
    for layer in range(layers):
        found.append(0 if not found else found[-1] + (layer not in inside))
    return found


def top(slot: int) -> int:
    """Pixels from the top of the drawing."""
    return TOP + slot * (BOX_HEIGHT + LAYER_GAP)


def slack(right: float, boxes: Iterable[ItemPlace], edges: Iterable[LayoutEdge]) -> float:
    """How far the channels of a graph may move to the left, in pixels, as long as only this part is visible.

    Args:
        right: end of all boxes; channels are beyond it.
    """
    ends = [place.x + place.width for place in boxes]
    ends += [x for edge in edges for x in (edge.start, edge.way, edge.end) if x <= right]
    return right - max(ends, default=right)


def path(edge: LayoutEdge, right: float, moved: float, source: int, target: int) -> str:
    """Return an edge as SVG path data: straight down on its way, bent in the space between two layers.

    Args:
        right, moved: channels are beyond `right`, and are moved to the left by `moved`.
        source, target: the slots of its ends.
    """
    start, end = edge.start, edge.end
    way = edge.way - moved if edge.way > right else edge.way
    y, bottom = top(source) + BOX_HEIGHT, top(target)
    if target - source == 1:
        return f"M{start:g} {y}" + _bend(start, y, end, bottom)
    above, below = y + LAYER_GAP, bottom - LAYER_GAP
    return f"M{start:g} {y}" + _bend(start, y, way, above) + f"V{below}" + _bend(way, below, end, bottom)


def _bend(x: float, y: int, to_x: float, to_y: int) -> str:
    if x == to_x:
        return f"V{to_y}"
    middle = (y + to_y) // 2
    return f"C{x:g} {middle} {to_x:g} {middle} {to_x:g} {to_y}"


def hidden_edges(edges: Sequence[LayoutEdge], places: Sequence[ItemPlace], folds: Sequence[Fold]) -> set[int]:
    """Numbers of the edges that a closed fold hides: those inside it, and all but one from the same source into it."""
    where = {layer: i for i, f in enumerate(folds) for layer in range(f.first, f.last + 1)}
    hidden = set()
    known: set[tuple[int, int]] = set()
    for i, edge in enumerate(edges):
        source, target = where.get(places[edge.source].layer), where.get(places[edge.target].layer)
        if target is not None and (source == target or (edge.source, target) in known):
            hidden.add(i)
        elif target is not None:
            known.add((edge.source, target))
    return hidden


__all__ = ["BOX_HEIGHT", "LAYER_GAP", "TOP", "Fold", "fold", "hidden_edges", "path", "slack", "slots", "top"]
