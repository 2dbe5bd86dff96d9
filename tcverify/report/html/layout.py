"""Layered layout of one or two graphs on a common grid: layers by the longest path, lanes that keep chains straight.

A grid column is half a box wide: an op takes two, an input one. Edges that would cross a box run in channels at the right.
Heights are not assigned here: folding decides which layers are drawn, and where (see `folding`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

#: Sizes in pixels: a grid column, the space between boxes, boxes, and the space between two layers.
COLUMN = 104
SPACE = 12
CHANNEL = 11
MARGIN = 10


@dataclass(frozen=True, slots=True)
class LayoutItem:
    """An item to place, in an order in which operands come first.

    Attributes:
        narrow: whether it is an input: one column wide, placed right above its first reader.
        sides: the graphs that contain it.
        operands: numbers of the items that it reads, by graph.
        below: numbers of items that it is drawn below even if it does not read them; in the column of the first.
    """

    narrow: bool
    sides: set[str]
    operands: Mapping[str, tuple[int, ...]]
    below: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ItemPlace:
    """The position of an item: pixels from the left edge of its graph, its layer, and its grid column."""

    x: float
    width: float
    layer: int
    column: int


@dataclass(frozen=True, slots=True)
class LayoutEdge:
    """From the bottom of an item to the top of another that reads it.

    Attributes:
        start, way, end: pixels from the left: where it starts, where it goes straight down, where it ends.
    """

    source: int
    target: int
    start: float
    way: float
    end: float


@dataclass(slots=True)
class DrawingLayout:
    """Places by item; edges, right ends of the items and channels beyond them by graph; and the number of layers."""

    places: list[ItemPlace]
    edges: dict[str, list[LayoutEdge]]
    rights: dict[str, float]
    channels: dict[str, int]
    layers: int


@dataclass(slots=True)
class _Grid:
    """Which columns of a layer are occupied in which graph."""

    taken: dict[tuple[str, int], set[int]] = field(default_factory=dict)
    stacks: dict[tuple[str, int], list[int]] = field(default_factory=dict)

    def place(self, sides: set[str], layer: int, width: int, wanted: int) -> int:
        """Take the free columns that are nearest to the wanted one."""
        rows = [self.taken.setdefault((side, layer), set()) for side in sides]
        distance = 0
        while True:
            for column in (wanted - distance, wanted + distance):
                if column >= 0 and not any(column + i in row for row in rows for i in range(width)):
                    for row in rows:
                        row.update(range(column, column + width))
                    return column
            distance += 1

    def stack(self) -> None:
        """Record the layers by column; nothing is placed after that."""
        for side, layer in sorted(self.taken):
            for column in self.taken[side, layer]:
                self.stacks.setdefault((side, column), []).append(layer)

    def free(self, side: str, layers: range, column: int) -> bool:
        stack = self.stacks.get((side, column), [])
        at = bisect_left(stack, layers.start)
        return at == len(stack) or stack[at] >= layers.stop


def lay_out(items: Sequence[LayoutItem], sides: Sequence[str]) -> DrawingLayout:
    """Place items. They have the same position in all graphs that contain them."""
    layers = _layers(items)
    grid = _Grid()
    columns = [0] * len(items)
    for i, item in enumerate(items):
        if not item.narrow:
            above = [o for side in sides for o in item.operands[side] if not items[o].narrow]
            nearest = max(above, key=lambda o: layers[o], default=None) if not item.below else item.below[0]
            columns[i] = grid.place(item.sides, layers[i], 2, 0 if nearest is None else columns[nearest])
    reader: dict[int, int] = {}
    for i, item in enumerate(items):
        for side in sides:
            for o in item.operands[side]:
                if items[o].narrow and (o not in reader or layers[i] < layers[reader[o]]):
                    reader[o] = i
    for i, item in enumerate(items):
        if item.narrow:
            columns[i] = grid.place(item.sides, layers[i], 1, columns[reader[i]] if i in reader else 0)
    places = [
        ItemPlace(
            float(MARGIN + columns[i] * COLUMN),
            float((1 if item.narrow else 2) * COLUMN - SPACE),
            layers[i],
            columns[i],
        )
        for i, item in enumerate(items)
    ]
    grid.stack()
    layout = DrawingLayout(places, {}, {}, {}, 1 + max(layers, default=-1))
    for side in sides:
        _route(items, layout, grid, side)
    return layout


def _layers(items: Sequence[LayoutItem]) -> list[int]:
    """The longest path to each item over the edges of all graphs; inputs right above their first reader."""
    layers: list[int] = []
    for item in items:
        above = [layers[o] for operands in item.operands.values() for o in operands if not items[o].narrow]
        above += [layers[o] for o in item.below]
        layers.append(0 if item.narrow else 1 + max(above, default=0))
    first: dict[int, int] = {}
    for i, item in enumerate(items):
        for operands in item.operands.values():
            for o in operands:
                first[o] = min(first.get(o, layers[i]), layers[i])
    found = [first.get(i, 1) - 1 if item.narrow else layers[i] for i, item in enumerate(items)]
    return found


def _route(items: Sequence[LayoutItem], layout: DrawingLayout, grid: _Grid, side: str) -> None:
    """Route the edges of one graph."""
    places = layout.places
    right = max((p.x + p.width for p, item in zip(places, items, strict=True) if side in item.sides), default=0.0)
    wanted = [(o, i) for i, item in enumerate(items) for o in item.operands[side]]
    ends = {pair: _port(items, places, side, pair) for pair in wanted}
    straight: dict[tuple[int, int], float] = {}
    reach: dict[int, int] = {}  # per source, the last layer to which a channel must lead
    for source, target in wanted:
        between = range(places[source].layer + 1, places[target].layer)
        start = places[source].x + places[source].width / 2
        way = next((x for x in (start, ends[source, target]) if grid.free(side, between, _column(x))), None)
        if way is not None:
            straight[source, target] = way
        else:
            reach[source] = max(reach.get(source, 0), places[target].layer)
    channels = _channels({s: (places[s].layer, last) for s, last in reach.items()})
    edges = []
    for source, target in wanted:
        a, b = places[source], places[target]
        start, end = a.x + a.width / 2, ends[source, target]
        way = straight.get((source, target), right + CHANNEL * (1 + channels.get(source, 0)))
        edges.append(LayoutEdge(source, target, start, end if b.layer == a.layer + 1 else way, end))
    layout.edges[side] = edges
    layout.rights[side] = right
    layout.channels[side] = 1 + max(channels.values(), default=-1)


def _column(x: float) -> int:
    return int((x - MARGIN) // COLUMN)


def _port(items: Sequence[LayoutItem], places: Sequence[ItemPlace], side: str, pair: tuple[int, int]) -> float:
    """Where an edge enters its target: operands from left to right in their order above."""
    source, target = pair
    operands = sorted(items[target].operands[side], key=lambda o: (places[o].x + places[o].width / 2, o))
    place = places[target]
    step = place.width / (len(operands) + 1)
    return round(place.x + step * (operands.index(source) + 1), 1)


def _channels(spans: Mapping[int, tuple[int, int]]) -> dict[int, int]:
    """Give each source a channel that no other uses on its layers; the longest are outermost."""
    found: dict[int, int] = {}
    used: list[list[tuple[int, int]]] = []
    for source, (first, last) in sorted(spans.items(), key=lambda s: (s[1][1] - s[1][0], s[0])):
        number = next((n for n, u in enumerate(used) if all(last <= a or b <= first for a, b in u)), len(used))
        if number == len(used):
            used.append([])
        used[number].append((first, last))
        found[source] = number
    return found
