"""Folds of the drawing: stretches away from what is to be seen, each one slot high until it is opened."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from tcverify.report.html.folding import BOX_HEIGHT, Fold, fold, hidden_edges, path, slack, slots, top
from tcverify.report.html.layout import ItemPlace, LayoutEdge
from tcverify.report.html.page import make_page
from tests.support.html_cases import case


@pytest.mark.parametrize(
    ("layers", "visible", "folds"),
    [
        (0, [], []),
        (5, [0, 1, 2, 3, 4], []),
        (5, [0, 4], [(1, 3)]),
        (6, [2, 4], [(0, 1)]),
        (6, [2], [(0, 1), (3, 5)]),
        (3, [], [(0, 2)]),
    ],
)
def test_stretches_out_of_sight_are_folded_unless_they_are_one_layer(
    layers: int, visible: list[int], folds: list[tuple[int, int]]
) -> None:
    assert [(f.first, f.last) for f in fold(layers, visible)] == folds


def test_a_closed_fold_is_one_slot() -> None:
    assert slots(7, [Fold(1, 3), Fold(5, 6)]) == [0, 1, 1, 1, 2, 3, 3]
    assert slots(3, []) == [0, 1, 2]


def test_an_edge_leads_down_from_box_to_box() -> None:
    edge = LayoutEdge(0, 1, 50.0, 300.0, 80.0)
    assert path(edge, 400.0, 0.0, 0, 1).startswith(f"M50 {top(0) + BOX_HEIGHT}C50 ")
    far = path(edge, 400.0, 0.0, 0, 4)
    numbers = [float(n) for n in re.findall(r"[-\d.]+", far)]
    assert numbers[1] == top(0) + BOX_HEIGHT
    assert numbers[-1] == top(4)
    assert f"V{top(4) - 34}" in far
    assert " 300 " in far


def test_channels_move_to_what_is_in_sight() -> None:
    inside, beyond = LayoutEdge(0, 1, 50.0, 120.0, 50.0), LayoutEdge(0, 2, 50.0, 411.0, 60.0)
    seen = [ItemPlace(10.0, 196.0, 0, 0)]
    moved = slack(400.0, seen, [inside, beyond])
    assert moved == 400.0 - 206.0
    assert " 217 " in path(beyond, 400.0, moved, 0, 3)
    assert path(inside, 400.0, moved, 0, 3) == path(inside, 400.0, 0.0, 0, 3)


def test_a_fold_swallows_its_own_edges_and_all_but_one_from_the_same_source() -> None:
    places = [ItemPlace(0.0, 10.0, layer, 0) for layer in range(5)]
    edges = [LayoutEdge(o, i, 0.0, 0.0, 0.0) for o, i in ((0, 1), (1, 2), (0, 2), (2, 4), (0, 4))]
    assert hidden_edges(edges, places, [Fold(1, 3)]) == {1, 2}
    assert hidden_edges(edges, places, []) == set()


def test_nothing_of_a_folded_drawing_is_drawn_over_something_else() -> None:
    drawing = make_page(case("wrong-value", 30), None).sheets[0].drawing
    for panel in drawing.panels:
        rows = sorted(
            {(b.y, b.y + BOX_HEIGHT) for b in panel.boxes if not b.away}
            | {(f.y, f.y + BOX_HEIGHT) for f in panel.folds}
        )
        assert all(bottom < above for (_, bottom), (above, _) in pairwise(rows))
        assert len(panel.folds) == 2
        assert max(f.x + f.width for f in panel.folds) <= panel.width
        shown = [line for line in panel.lines if not line.away]
        assert all(line.path for line in shown)
        assert len(shown) < len(panel.lines) / 4


def test_what_is_to_blame_is_in_sight_however_far_it_is() -> None:
    for number in (9, 60):
        page = make_page(case("wrong-value", number), None)
        (box,) = [b for b in page.sheets[0].drawing.panels[1].boxes if b.flag]
        assert not box.away
        assert page.focus == box.id
