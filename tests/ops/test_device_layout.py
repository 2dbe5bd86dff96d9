"""Meshes of ranks, and how tensors lie on them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tcverify.errors import ProgramError
from tcverify.ops import DeviceMesh, Layout
from tests.support.naive_layouts import numbered, same, spread

LAYOUTS = [
    "[0] replicated",
    "[3] shard(1)",
    "[0, 1] shard(0)",
    "[1, 0] shard(1)",
    "[5, 2, 3] replicated",
    "[2, 0, 1, 7] shard(0)",
    "[[0, 1], [2, 3]] shard(0), shard(1)",
    "[[0, 1], [2, 3]] shard(1), shard(0)",
    "[[3, 1], [0, 2]] replicated, shard(1)",
    "[[3, 1], [0, 2]] shard(0), replicated",
    "[[4, 0, 2], [1, 3, 5]] shard(1), replicated",
    "[[4], [0]] shard(0), shard(1)",
    "[[[0, 1], [2, 3]], [[7, 6], [5, 4]]] shard(1), replicated, shard(0)",
]


@pytest.mark.parametrize("text", LAYOUTS)
def test_a_layout_is_written_as_it_is_read(text: str) -> None:
    layout = Layout.parse(text)
    assert str(layout) == text
    assert Layout.parse(str(layout)) == layout
    assert Layout.parse(text.replace(", ", " ,  ")) == layout


@pytest.mark.parametrize("text", LAYOUTS)
def test_each_rank_holds_the_elements_that_lie_at_its_place(text: str) -> None:
    layout, whole = Layout.parse(text), numbered(4, 12)
    expected = spread(whole, text)
    assert set(expected) == set(layout.mesh.ranks)
    for rank, part in expected.items():
        assert layout.local_shape(whole.shape) == tuple(part.shape)
        assert same(whole[layout.place(rank, whole.shape)], part)
    assert layout.global_shape(layout.local_shape(whole.shape)) == tuple(whole.shape)


@pytest.mark.parametrize("text", LAYOUTS)
def test_holders_have_every_element_once(text: str) -> None:
    layout, whole = Layout.parse(text), numbered(4, 12)
    parts = spread(whole, text)
    held = torch.cat([parts[rank].flatten() for rank in layout.holders()])
    assert sorted(held.tolist()) == sorted(whole.flatten().tolist())
    unlike = {tuple(part.flatten().tolist()) for part in parts.values()}
    assert layout.is_sharded == (len(unlike) > 1)
    assert len(unlike) == len(list(layout.holders()))


def test_parts_and_mesh_dims_by_tensor_dim() -> None:
    layout = Layout.parse("[[0, 1, 2], [3, 4, 5]] shard(2), shard(0)")
    assert [layout.parts(dim) for dim in range(3)] == [3, 1, 2]
    assert [layout.mesh_dim(dim) for dim in range(3)] == [1, None, 0]
    assert layout.local_shape((6, 5, 4)) == (2, 5, 2)


def test_a_mesh_of_one_rank_divides_nothing() -> None:
    layout = Layout.parse("[3] shard(0)")
    assert not layout.is_sharded
    assert layout.local_shape((5,)) == (5,)
    assert layout.place(3, (5,)) == (slice(0, 5),)


def test_ways_to_make_a_layout() -> None:
    mesh = DeviceMesh.of(2, 0)
    assert Layout.sharded(mesh, 1) == Layout.parse("[2, 0] shard(1)")
    square = DeviceMesh.nested([[2, 0], [1, 3]])
    assert Layout.replicated(square) == Layout.parse("[[2, 0], [1, 3]] replicated, replicated")


def test_tensors_without_elements_lie_anywhere() -> None:
    layout = Layout.parse("[0, 1] shard(0)")
    assert layout.local_shape((0, 3)) == (0, 3)
    assert layout.place(1, (0, 3)) == (slice(0, 0), slice(0, 3))


# ------------------------------------------------------------------------------------------------------------- meshes


def test_meshes_are_equal_in_shape_and_order() -> None:
    assert DeviceMesh.of(0, 1) == DeviceMesh((2,), (0, 1))
    assert DeviceMesh.of(0, 1) != DeviceMesh.of(1, 0)
    assert DeviceMesh.nested([[0, 1]]) != DeviceMesh.of(0, 1)
    assert len({DeviceMesh.of(0, 1), DeviceMesh.of(1, 0), DeviceMesh.nested([[0], [1]]), DeviceMesh.of(0, 1)}) == 3


@pytest.mark.parametrize("shape", [(1,), (6,), (2, 3), (3, 1, 2), (2, 2, 2)])
def test_coordinates_and_slices_are_those_of_an_array(shape: tuple[int, ...]) -> None:
    count = int(torch.tensor(shape).prod())
    ranks = random.Random(count).sample(range(12), count)
    array = torch.tensor(ranks).reshape(shape)
    mesh = DeviceMesh.nested(array.tolist())
    assert (mesh.shape, mesh.ranks, mesh.size, mesh.ndim) == (shape, tuple(ranks), count, len(shape))
    assert str(mesh) == str(array.tolist())
    for rank in ranks:
        at = tuple(int(i) for i in (array == rank).nonzero()[0])
        assert mesh.coordinates(rank) == at
        for dim in range(len(shape)):
            row = array[(*at[:dim], slice(None), *at[dim + 1 :])].tolist()
            assert mesh.slice(rank, dim) == tuple(row)
            assert tuple(row) in mesh.slices(dim)
    for dim in range(len(shape)):
        teams = mesh.slices(dim)
        assert sorted(rank for team in teams for rank in team) == sorted(ranks)
        assert {len(team) for team in teams} == {shape[dim]}


def test_relabelled_ranks_stand_where_they_stood() -> None:
    mesh, new = DeviceMesh.nested([[0, 2], [1, 3]]), [5, 4, 7, 6]
    assert str(mesh.relabelled(new)) == "[[5, 7], [4, 6]]"
    layout = Layout(mesh, (0, None)).relabelled(new)
    assert str(layout) == "[[5, 7], [4, 6]] shard(0), replicated"
    for rank in mesh.ranks:
        assert layout.place(new[rank], (4,)) == Layout(mesh, (0, None)).place(rank, (4,))


# ------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "empty or of different lengths"),
        ([[]], "empty or of different lengths"),
        ([[0, 1], [2]], "empty or of different lengths"),
        ([[0, 1], 2], "empty or of different lengths"),
        ([0, [1, 2]], "not a mesh of ranks"),
        (3, "not a mesh of ranks"),
        ([0, 1.0], "not a mesh of ranks"),
        ([True, False], "not a mesh of ranks"),
        (["0"], "not a mesh of ranks"),
        ([None], "not a mesh of ranks"),
        ([0, 1, 0], "names a rank twice, or a negative one"),
        ([0, -1], "names a rank twice, or a negative one"),
        ([[0, 1], [1, 2]], "names a rank twice, or a negative one"),
    ],
)
def test_what_is_no_mesh(rows: Any, words: str) -> None:
    with pytest.raises(ProgramError, match=words):
        DeviceMesh.nested(rows)


@pytest.mark.parametrize(("shape", "ranks"), [((), ()), ((0,), ()), ((2,), (0,)), ((2, 2), (0, 1, 2)), ((-1,), (0,))])
def test_a_mesh_has_as_many_ranks_as_its_shape_says(shape: tuple[int, ...], ranks: tuple[int, ...]) -> None:
    with pytest.raises(ProgramError, match="cannot hold"):
        DeviceMesh(shape, ranks)


def test_ranks_and_dims_that_a_mesh_lacks() -> None:
    mesh = DeviceMesh.nested([[0, 1], [2, 3]])
    for ask in (lambda: mesh.coordinates(4), lambda: mesh.slice(4, 0)):
        with pytest.raises(ProgramError, match=r"rank 4 is not in mesh \[\[0, 1\], \[2, 3\]\]"):
            ask()
    for dim in (2, -1):
        with pytest.raises(ProgramError, match=f"has no dim {dim}"):
            mesh.slice(0, dim)
    assert [rank in mesh for rank in (3, 4, "3")] == [True, False, False]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "shard(0)",
        "[0, 1]",
        "[0, 1] shard",
        "[0, 1] shard()",
        "[0, 1] shard(x)",
        "[0, 1] shard(-1)",
        "[0, 1] shard(123)",
        "[0, 1] Shard(0)",
        "[0, 1] partial",
        "[0, 1] shard(0) shard(1)",
        "[0, 1] shard(0),",
        "[0, 1 shard(0)",
        "0, 1] shard(0)",
        "[0, 1,] shard(0)",
        "[0; 1] shard(0)",
        "[01] replicated",
        "[0] shard(٣)",
        None,
        7,
        ["[0, 1] shard(0)"],
    ],
)
def test_what_is_no_layout(text: Any) -> None:
    with pytest.raises(ProgramError, match="is not a layout") as raised:
        Layout.parse(text)
    assert "[0, 1] shard(0)" in str(raised.value.hint)
    assert len(str(raised.value)) < 400


def test_a_mesh_too_deep_to_be_read() -> None:
    with pytest.raises(
        ProgramError, match=r"is not a (layout|mesh)"
    ) as raised:  # Python 3.12 reads it, and finds no rank
        Layout.parse("[" * 5000 + "]" * 5000 + " replicated")
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[0, 1] shard(0), replicated", "has 1 dims, and 2 placements"),
        ("[[0, 1], [2, 3]] shard(0)", "has 2 dims, and 1 placements"),
        ("[[0, 1], [2, 3]] shard(1), shard(1)", "divides a tensor dim over two mesh dims"),
        ("[0, 0] shard(0)", "names a rank twice"),
        ("[-1, 0] shard(0)", "a negative one"),
        ("[] replicated", "empty or of different lengths"),
        ("[[0, 1], [2]] replicated, replicated", "of different lengths"),
        ('["a"] replicated', "not a mesh of ranks"),
        ("[1e3] replicated", "not a mesh of ranks"),
        ("[NaN] replicated", "not a mesh of ranks"),
        ("[" * 17 + "0" + "]" * 17 + " replicated", "a mesh has 17 dims, and can have 16"),
        ("[" * 400 + "0" + "]" * 400 + " replicated", "a mesh has 400 dims"),
    ],
)
def test_layouts_that_cannot_be(text: str, words: str) -> None:
    with pytest.raises(ProgramError, match=words):
        Layout.parse(text)


def test_a_negative_dim_is_not_sharded() -> None:
    with pytest.raises(ProgramError, match="or a negative one"):
        Layout(DeviceMesh.of(0, 1), (-1,))


def test_shapes_that_cannot_lie_so() -> None:
    layout = Layout.parse("[0, 1, 2] shard(1)")
    with pytest.raises(ProgramError, match=r"shards dim 1 of a tensor of shape \[6\]"):
        layout.check((6,))
    with pytest.raises(ProgramError, match="cannot divide size 4 of dim 1 evenly by 3 ranks") as raised:
        layout.local_shape((6, 4))
    assert "multiples" in str(raised.value.hint)
    with pytest.raises(ProgramError, match="rank 3 is not in mesh"):
        layout.place(3, (6, 6))
    layout.check((5, 6))
