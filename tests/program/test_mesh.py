"""Meshes: grids, partitions in any order and size, positions."""

import pytest

from tcverify.errors import ProgramError
from tcverify.program import Mesh, MeshDim


def test_a_grid_is_row_major() -> None:
    mesh = Mesh.grid({"dp": 2, "tp": 3})
    assert mesh.world_size == 6
    assert mesh.dim("dp").groups == ((0, 3), (1, 4), (2, 5))
    assert mesh.dim("tp").groups == ((0, 1, 2), (3, 4, 5))


def test_the_middle_dim_of_a_grid_has_strided_groups() -> None:
    mesh = Mesh.grid({"a": 2, "b": 2, "c": 2})
    assert mesh.dim("b").groups == ((0, 2), (1, 3), (4, 6), (5, 7))


def test_the_largest_mesh_knows_every_position() -> None:
    dim = Mesh.grid({"dp": 32768, "tp": 2}).dim("tp")
    assert [dim.position(rank) for rank in range(65536)] == [0, 1] * 32768


@pytest.mark.parametrize("sizes", [{"dp": 2, "tp": 2}, {"tp": 1}, {"a": 3, "b": 1, "c": 2}])
def test_every_rank_of_a_grid_is_named_by_its_positions(sizes: dict[str, int]) -> None:
    mesh = Mesh.grid(sizes)
    coordinates = [tuple(dim.position(rank) for dim in mesh.dims) for rank in range(mesh.world_size)]
    assert coordinates == sorted(set(coordinates))  # row-major: the order of ranks is the order of coordinates
    assert len(coordinates) == mesh.world_size


def test_position_is_the_place_in_the_group_and_not_the_rank_number() -> None:
    dim = MeshDim("tp", ((3, 1), (0, 2)))
    assert [dim.position(rank) for rank in range(4)] == [0, 1, 1, 0]
    assert dim.group(1) == (3, 1)


def test_groups_may_have_different_sizes() -> None:
    mesh = Mesh(3, (MeshDim("tp", ((0,), (2, 1))),))
    assert mesh.dim("tp").group(1) == (2, 1)
    assert mesh.dim("tp").group(0) == (0,)


@pytest.mark.parametrize(
    "groups",
    [
        ((0, 1),),  # rank 2 is missing
        ((0, 1), (1, 2)),  # rank 1 stands twice
        ((0, 1, 2, 3),),  # rank 3 does not exist
        ((0, 0, 1, 2),),
        ((-1, 1, 2),),
        (),
    ],
)
def test_groups_that_do_not_partition_the_ranks_are_refused(groups: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ProgramError, match="'tp' do not partition ranks 0 to 2"):
        Mesh(3, (MeshDim("tp", groups),))


def test_two_dims_of_one_name_are_refused() -> None:
    dim = MeshDim("tp", ((0, 1),))
    with pytest.raises(ProgramError, match="distinct names"):
        Mesh(2, (dim, dim))


@pytest.mark.parametrize("world_size", [0, -1, 65537])
def test_world_sizes_out_of_range_are_refused(world_size: int) -> None:
    with pytest.raises(ProgramError, match=f"world size {world_size} is not between"):
        Mesh(world_size, ())


@pytest.mark.parametrize("sizes", [{}, {"tp": 0}, {"dp": 2, "tp": -1}])
def test_a_grid_needs_sizes_of_at_least_one(sizes: dict[str, int]) -> None:
    with pytest.raises(ProgramError, match="at least 1"):
        Mesh.grid(sizes)


def test_an_unknown_dim_is_named_with_those_that_exist() -> None:
    with pytest.raises(ProgramError, match=r"no dim 'ep'\n  hint: its dims are dp, tp"):
        Mesh.grid({"dp": 1, "tp": 2}).dim("ep")


def test_a_rank_outside_the_dim_is_named() -> None:
    with pytest.raises(ProgramError, match="no group for rank 7"):
        Mesh.grid({"tp": 2}).dim("tp").group(7)


def test_a_mesh_reads_as_its_groups() -> None:
    assert str(Mesh.grid({"dp": 2, "tp": 2})) == "4 ranks; dp: [0, 2] [1, 3]; tp: [0, 1] [2, 3]"


def test_of_many_ranks_a_mesh_shows_one_group_of_each_dim() -> None:
    assert str(Mesh.grid({"dp": 32, "tp": 4})) == (
        "128 ranks; dp: 4 groups of 32: [0, 4, …, 124] …; tp: 32 groups of 4: [0, 1, 2, 3] …"
    )
    uneven = Mesh(17, (MeshDim("ep", (tuple(range(16)), (16,))),))
    assert str(uneven) == "17 ranks; ep: 2 groups of 1 to 16: [0, 1, …, 15] …"
    assert str(Mesh.grid({"tp": 32})) == "32 ranks; tp: 1 group of 32: [0, 1, …, 31]"


def test_meshes_are_equal_by_content() -> None:
    assert Mesh.grid({"tp": 4}) == Mesh(4, (MeshDim("tp", ((0, 1, 2, 3),)),))
    assert hash(Mesh.grid({"tp": 4})) == hash(Mesh.grid({"tp": 4}))
    assert Mesh.grid({"tp": 4}) != Mesh(4, (MeshDim("tp", ((1, 0, 2, 3),)),))
