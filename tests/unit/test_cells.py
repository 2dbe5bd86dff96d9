"""Cells: storages divided by the views of them."""

from __future__ import annotations

import itertools

import pytest
import torch

from tcverify.execution.cells import Cells, view_of


def overlapping(tensors: list[torch.Tensor]) -> set[tuple[int, int]]:
    """Which views of one storage share an element, as cells say it."""
    whole = torch.empty(0).set_(tensors[0].untyped_storage())
    cells = Cells([whole])
    views = [view_of(0, tensor) for tensor in tensors]
    for view in views:
        cells.add(view)
    cells.divide()
    return {
        (i, j)
        for (i, a), (j, b) in itertools.combinations(enumerate(views), 2)
        if set(cells.of([a])) & set(cells.of([b]))
    }


def test_rows_of_one_buffer_do_not_touch_each_other() -> None:
    buffer = torch.empty(4, 6)
    assert overlapping([*buffer]) == set()
    assert overlapping([buffer, *buffer]) == {(0, 1), (0, 2), (0, 3), (0, 4)}


def test_columns_do_not_touch_each_other_though_they_interleave() -> None:
    buffer = torch.empty(4, 6)
    assert overlapping([buffer[:, 1], buffer[:, 2], buffer[1]]) == {(0, 2), (1, 2)}


def test_what_has_no_elements_touches_nothing() -> None:
    empty, full = torch.empty(3, 0), torch.empty(4, 6)
    assert overlapping([empty, *empty, empty]) == set()
    assert overlapping([full, full[:, 2:2], full[1:1]]) == set()


def test_chunks_that_overlap_by_one_row() -> None:
    buffer = torch.empty(8, 3)
    assert overlapping([buffer[0:4], buffer[3:6], buffer[6:8]]) == {(0, 1)}


@pytest.mark.parametrize("seed", range(20))
def test_overlap_is_that_of_elements(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(most: int) -> int:
        return int(torch.randint(0, most, (), generator=generator))

    buffer = torch.empty(6, 4, 5)
    views = []
    for _ in range(5):
        view = buffer.permute(*torch.randperm(3, generator=generator).tolist())
        for dim in range(3):
            start = draw(view.shape[dim])
            view = view.narrow(dim, start, 1 + draw(view.shape[dim] - start))
        views.append(view[:: 1 + draw(2)])
    marked = []
    for view in views:
        marks = torch.zeros(buffer.numel(), dtype=torch.bool)
        marks.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
        marked.append(marks)
    expected = {(i, j) for i, j in itertools.combinations(range(5), 2) if bool((marked[i] & marked[j]).any())}
    assert overlapping(views) == expected


def test_views_without_elements_touch_nothing() -> None:
    buffer = torch.empty(4)
    assert overlapping([buffer[:0], buffer]) == set()
