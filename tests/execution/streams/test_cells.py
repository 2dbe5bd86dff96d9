"""Cells: storages divided by the views of them."""

from __future__ import annotations

import itertools

import pytest
import torch

from tcverify.execution.streams.memory_cells import Cells, view_of


def divided(tensors: list[torch.Tensor]) -> Cells:
    cells = Cells([torch.empty(0, dtype=tensors[0].dtype, device=tensors[0].device).set_(tensors[0].untyped_storage())])
    for tensor in tensors:
        cells.add(view_of(0, tensor))
    cells.divide()
    return cells


def overlapping(tensors: list[torch.Tensor]) -> set[tuple[int, int]]:
    """Which views of one storage share an element, as cells say it."""
    cells = divided(tensors)
    assert not cells.coarse
    views = [view_of(0, tensor) for tensor in tensors]
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


def test_cost_goes_by_runs_of_elements_and_not_by_their_number() -> None:
    rows = torch.empty(64, 1 << 18, device="meta")  # 16 M elements, no memory
    assert overlapping([rows, *rows]) == {(0, i) for i in range(1, 65)}
    columns = torch.empty(256, 1 << 16, device="meta")
    assert overlapping([*columns.chunk(16, dim=1), columns[7]]) == {(i, 16) for i in range(16)}
    assert len(divided([*rows]).storages) == 64


def test_a_buffer_of_too_many_pieces_is_not_divided() -> None:
    every_second = torch.empty(1 << 22, device="meta")[::2]
    assert divided([every_second, every_second[1:]]).coarse
    assert not divided([every_second]).coarse


def test_views_of_another_element_size() -> None:
    buffer = torch.empty(4, 6)
    halves = buffer.view(torch.int16)
    assert overlapping([buffer[0], halves[0, 4:6], halves[1, 4:6]]) == {(0, 1)}


def test_windows_of_one_buffer_overlap() -> None:
    buffer = torch.arange(12.0)
    windows = buffer.as_strided((3, 4), (2, 1), 0)  # elements 0 to 7
    assert overlapping([windows, buffer[7], buffer[8]]) == {(0, 1)}
