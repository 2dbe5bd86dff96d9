"""Layered layout of one or two graphs on a common grid: layers by the longest path, lanes that keep chains straight.

A grid column is half a box wide: an op takes two, an input one. Edges that would cross a box run in channels at the right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

#: Sizes in pixels: a grid column, the space between boxes, boxes, and what lies between two layers.
COLUMN = 104
SPACE = 12
BOX_HEIGHT = 52
LAYER_GAP = 34
CHANNEL = 11
TOP = 34
MARGIN = 10


@dataclass(frozen=True, slots=True)
class Item:
    """What is to be placed, in an order in which operands come first.

    Attributes:
        narrow: an input: one column wide, placed right above what reads it first.
        sides: the graphs in which it stands.
        operands: numbers of the items that it reads, by graph.
    """

    narrow: bool
    sides: set[str]
    operands: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Place:
    x: float
    y: float
    width: float
    layer: int
    column: int


@dataclass(frozen=True, slots=True)
class Edge:
    """A curve through points: straight down where x does not change, else bent in the space between two layers."""

    source: int
    target: int
    points: tuple[tuple[float, float], ...]

    def path(self, left: float) -> str:
        """Return it as SVG path data.

        Args:
            left: is added to every x.
        """
        (x, y), *rest = self.points
        parts = [f"M{x + left:g} {y:g}"]
        for next_x, next_y in rest:
            if next_x == x:
                parts.append(f"V{next_y:g}")
            else:
                middle = (y + next_y) / 2
                parts.append(f"C{x + left:g} {middle:g} {next_x + left:g} {middle:g} {next_x + left:g} {next_y:g}")
            x, y = next_x, next_y
        return "".join(parts)


@dataclass(slots=True)
class Layout:
    """Places by item, edges and widths by graph, tops of the layers and the height of all."""

    places: list[Place]
    edges: dict[str, list[Edge]]
    widths: dict[str, float]
    tops: list[float]
    height: float


@dataclass(slots=True)
class _Grid:
    """Which columns of a layer are taken in which graph."""

    taken: dict[tuple[str, int], set[int]] = field(default_factory=dict)

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

    def free(self, side: str, layers: range, column: int) -> bool:
        return not any(column in self.taken.get((side, layer), ()) for layer in layers)


def lay_out(items: Sequence[Item], sides: Sequence[str]) -> Layout:
    """Place items. They stand at the same place in all graphs that have them."""
    layers = _layers(items)
    grid = _Grid()
    columns = [0] * len(items)
    for i, item in enumerate(items):
        if not item.narrow:
            above = [o for side in sides for o in item.operands[side] if not items[o].narrow]
            nearest = max(above, key=lambda o: layers[o], default=None)
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
    tops = [float(TOP + layer * (BOX_HEIGHT + LAYER_GAP)) for layer in range(max(layers, default=0) + 1)]
    places = [
        Place(
            float(MARGIN + columns[i] * COLUMN),
            tops[layers[i]],
            float((1 if item.narrow else 2) * COLUMN - SPACE),
            layers[i],
            columns[i],
        )
        for i, item in enumerate(items)
    ]
    edges, widths = {}, {}
    for side in sides:
        edges[side], widths[side] = _route(items, places, grid, side)
    height = (tops[-1] + BOX_HEIGHT + MARGIN) if tops else TOP
    return Layout(places, edges, widths, tops, height)


def _layers(items: Sequence[Item]) -> list[int]:
    """The longest path to each item over the edges of all graphs; inputs right above their first reader."""
    layers: list[int] = []
    for item in items:
        above = [layers[o] for operands in item.operands.values() for o in operands if not items[o].narrow]
        layers.append(0 if item.narrow else 1 + max(above, default=0))
    first: dict[int, int] = {}
    for i, item in enumerate(items):
        for operands in item.operands.values():
            for o in operands:
                first[o] = min(first.get(o, layers[i]), layers[i])
    found = [first.get(i, 1) - 1 if item.narrow else layers[i] for i, item in enumerate(items)]
    return found


def _route(items: Sequence[Item], places: Sequence[Place], grid: _Grid, side: str) -> tuple[list[Edge], float]:
    """Draw the edges of one graph; return them and its width."""
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
        x, bottom, end = a.x + a.width / 2, a.y + BOX_HEIGHT, ends[source, target]
        way = straight.get((source, target), right + CHANNEL * (1 + channels.get(source, 0)))
        points = [(x, bottom), (way, bottom + LAYER_GAP), (way, b.y - LAYER_GAP), (end, b.y)]
        if b.layer == a.layer + 1:
            points = [(x, bottom), (end, b.y)]
        edges.append(Edge(source, target, tuple(points)))
    lanes = 1 + max(channels.values(), default=-1)
    return edges, right + MARGIN + CHANNEL * (lanes + 1 if lanes else 0)


def _column(x: float) -> int:
    return int((x - MARGIN) // COLUMN)


def _port(items: Sequence[Item], places: Sequence[Place], side: str, pair: tuple[int, int]) -> float:
    """Where an edge enters its target: operands from left to right as they stand above."""
    source, target = pair
    operands = sorted(items[target].operands[side], key=lambda o: (places[o].x + places[o].width / 2, o))
    place = places[target]
    step = place.width / (len(operands) + 1)
    return round(place.x + step * (operands.index(source) + 1), 1)


def _channels(spans: Mapping[int, tuple[int, int]]) -> dict[int, int]:
    """Give each source a channel that no other uses on its layers; the longest stand outermost."""
    found: dict[int, int] = {}
    used: list[list[tuple[int, int]]] = []
    for source, (first, last) in sorted(spans.items(), key=lambda s: (s[1][1] - s[1][0], s[0])):
        number = next((n for n, u in enumerate(used) if all(last <= a or b <= first for a, b in u)), len(used))
        if number == len(used):
            used.append([])
        used[number].append((first, last))
        found[source] = number
    return found
