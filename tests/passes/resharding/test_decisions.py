"""Which communications a resharding takes, on every rank: the table, and what it refuses."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from tcverify.errors import ProgramError, Unsupported
from tcverify.ops import Layout, Resharding
from tcverify.passes.resharding.decisions import PostedCommunication, ReshardingPlan, plan_resharding

FULL = "[0, 1, 2, 3]"
GRID = "[[0, 1], [2, 3]]"


def asked(
    source: str, target: str, shape: Sequence[int] = (12, 12), dim: int | None = None, op: str = "sum"
) -> Resharding:
    return Resharding(Layout.parse(source), Layout.parse(target), tuple(shape), dim, None if dim is None else op)


def plans(made: Resharding, dtype: torch.dtype = torch.float32) -> dict[int, ReshardingPlan]:
    return {rank: plan_resharding(made, rank, dtype) for rank in made.ranks}


def posted(made: Resharding) -> dict[int, list[tuple[str, tuple[int, ...], int | None]]]:
    """By rank, kind, team and root of what it posts."""
    return {rank: [(c.kind, c.team, c.root) for c in found.communications] for rank, found in plans(made).items()}


# ----------------------------------------------------------------------------------------------------- on the same mesh


def test_all_gather_counts_shards_by_position_in_the_mesh() -> None:
    team = (1, 0, 2)
    expected = ReshardingPlan(communications=(PostedCommunication("all_gather", team, axis=0),))
    assert plans(asked("[1, 0, 2] shard(0)", "[1, 0, 2] replicated")) == dict.fromkeys(team, expected)


def test_all_reduce_takes_the_whole_team() -> None:
    found = plans(asked(f"{FULL} shard(1)", f"{FULL} replicated", (6, 4), dim=1, op="max"))
    assert set(found.values()) == {
        ReshardingPlan(communications=(PostedCommunication("all_reduce", (0, 1, 2, 3), reduce_op="max"),))
    }


@pytest.mark.parametrize(
    ("shape", "dim", "scattered", "axis"),
    [((4, 8, 5), 0, 0, 1), ((8, 4, 5), 1, 0, 0), ((4, 1, 8), 0, 1, 2), ((1, 8, 4), 2, 1, 1)],
)
def test_reduce_scatter_counts_the_scattered_axis_in_the_operand(
    shape: tuple[int, ...], dim: int, scattered: int, axis: int
) -> None:
    found = plans(asked(f"{FULL} shard({dim})", f"{FULL} shard({scattered})", shape, dim=dim))
    expected = PostedCommunication("reduce_scatter", (0, 1, 2, 3), axis, reduce_op="sum")
    assert set(found.values()) == {ReshardingPlan(communications=(expected,))}


def test_all_to_all_brings_one_dim_together_and_divides_another() -> None:
    found = plans(asked("[1, 0] shard(1)", "[1, 0] shard(0)"))
    assert set(found.values()) == {
        ReshardingPlan(communications=(PostedCommunication("all_to_all", (1, 0), axis=1, split=0),))
    }


def test_on_a_mesh_of_two_dims_the_slice_through_the_rank_communicates() -> None:
    rows = posted(asked(f"{GRID} shard(1), shard(0)", f"{GRID} shard(1), replicated"))
    assert rows == {0: [("all_gather", (0, 1), None)], 1: [("all_gather", (0, 1), None)]} | {
        rank: [("all_gather", (2, 3), None)] for rank in (2, 3)
    }
    columns = posted(asked(f"{GRID} shard(0), shard(1)", f"{GRID} replicated, shard(0)", (2, 4), dim=0))
    assert {rank: found[0][1] for rank, found in columns.items()} == {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}
    assert {found[0][0] for found in columns.values()} == {"all_reduce"}


# ------------------------------------------------------------------------------------------------------------- local


def test_replicated_to_sharded_on_one_mesh_is_a_chunk_by_position() -> None:
    found = plans(asked("[1, 0, 2] replicated", "[1, 0, 2] shard(1)"))
    assert found == {
        1: ReshardingPlan(((0, 12), (0, 4))),
        0: ReshardingPlan(((0, 12), (4, 8))),
        2: ReshardingPlan(((0, 12), (8, 12))),
    }


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (f"{FULL} shard(1)", f"{FULL} shard(1)"),
        (f"{FULL} replicated", f"{FULL} replicated"),
        ("[2] shard(0)", "[2] shard(1)"),  # one rank divides nothing
        ("[2] replicated", "[[2]] shard(1), replicated"),
        ("[[0, 1]] shard(0), shard(1)", "[0, 1] shard(1)"),
    ],
)
def test_nothing_is_communicated_where_nothing_moves(source: str, target: str) -> None:
    made = asked(source, target)
    local = made.source.local_shape(made.shape)
    assert set(plans(made).values()) == {ReshardingPlan(tuple((0, size) for size in local))}


def test_a_reduced_dim_that_is_not_sharded_is_reduced_locally() -> None:
    found = plans(asked(f"{FULL} shard(1)", f"{FULL} shard(0)", (6, 8), dim=0))
    assert set(found.values()) == {ReshardingPlan(((0, 2),))}
    chunks = plans(asked(f"{GRID} replicated, shard(2)", f"{GRID} shard(0), shard(1)", (3, 4, 6), dim=0))
    assert chunks[2] == ReshardingPlan(((2, 4), (0, 3)))


def test_the_first_sender_alone_has_what_it_gets() -> None:
    assert posted(asked("[1, 0, 2] replicated", "[1] replicated")) == {1: [], 0: [], 2: []}
    assert plan_resharding(asked("[1, 0, 2] replicated", "[1] replicated"), 1, torch.float32).part is not None


# ------------------------------------------------------------------------------------------- from one mesh to another


def test_a_gather_for_each_receiver_whose_root_joins() -> None:
    assert posted(asked("[1, 2] shard(0)", "[0, 2] replicated")) == {
        1: [("gather", (1, 2, 0), 0), ("gather", (1, 2), 2)],
        2: [("gather", (1, 2, 0), 0), ("gather", (1, 2), 2)],
        0: [("gather", (1, 2, 0), 0)],
    }
    found = plans(asked("[1, 2] shard(0)", "[0, 2] replicated"))
    assert [(c.gives, c.gets) for c in found[0].communications] == [(False, True)]
    assert [(c.gives, c.gets) for c in found[2].communications] == [(True, False), (True, True)]


def test_the_first_sender_scatters_and_joins() -> None:
    assert posted(asked("[2, 0] replicated", "[1, 0] shard(0)")) == {
        2: [("scatter", (1, 0, 2), 2)],
        0: [("scatter", (1, 0, 2), 2)],
        1: [("scatter", (1, 0, 2), 2)],
    }
    found = plans(asked("[2, 0] replicated", "[1, 0] shard(0)"))
    assert [(c.gives, c.gets) for rank in (2, 0, 1) for c in found[rank].communications] == [
        (True, False), (False, True), (False, True),
    ]  # fmt: skip
    assert posted(asked("[0] replicated", "[0, 1] shard(0)"))[1] == [("scatter", (0, 1), 0)]


def test_the_first_sender_broadcasts() -> None:
    found = posted(asked("[2, 3] replicated", "[0, 1] replicated"))
    assert found == {2: [("broadcast", (0, 1, 2), 2)], 3: []} | {r: [("broadcast", (0, 1, 2), 2)] for r in (0, 1)}


def test_pairs_go_by_position_and_a_pair_of_one_rank_is_a_copy() -> None:
    assert posted(asked("[1, 2] shard(0)", "[0, 1] shard(0)")) == {
        1: [("send", (1, 0), None), ("recv", (2, 1), None)],
        2: [("send", (2, 1), None)],
        0: [("recv", (1, 0), None)],
    }
    found = plans(asked("[1, 2] shard(0)", "[1, 0] shard(0)"))
    assert found[1] == ReshardingPlan(((0, 6), (0, 12)))
    assert [c.kind for c in found[2].communications] == ["send"]
    assert posted(asked("[0] replicated", "[1] replicated"))[0] == [("send", (0, 1), None)]


def test_a_reduce_for_each_receiver_whose_root_joins() -> None:
    found = plans(asked("[0, 1] shard(0)", "[2, 0] replicated", (2, 5), dim=0, op="avg"))
    # a joined root gives an addend that counts for nothing, so that an average is a sum divided by the senders
    assert found[2] == ReshardingPlan(
        communications=(PostedCommunication("reduce", (0, 1, 2), reduce_op="sum", root=2, gives=False),), divisor=2
    )
    assert found[0] == ReshardingPlan(
        communications=(
            PostedCommunication("reduce", (0, 1, 2), reduce_op="sum", root=2, gets=False),
            PostedCommunication("reduce", (0, 1), reduce_op="avg", root=0),
        )
    )


def test_a_mesh_of_one_rank_counts_as_sharded_when_it_is_reduced() -> None:
    found = plans(asked("[0] replicated", "[0, 1] replicated", (3, 5), dim=0))
    assert found[0].part == ((0, 5),)
    assert [(c.kind, c.team, c.gets) for c in found[0].communications] == [("reduce", (0, 1), False)]
    assert found[1] == ReshardingPlan(
        communications=(PostedCommunication("reduce", (0, 1), reduce_op="sum", root=1, gives=False),)
    )


# ----------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (asked(f"{FULL} shard(0)", "[0, 1] shard(0)", (4, 4)), "4 senders and 2 receivers, which do not pair up"),
        (asked("[0, 1] shard(0)", "[2, 3] shard(1)"), "more than one axis: dim 0 loses its shard and dim 1 gains one"),
        (asked(f"{GRID} shard(0), shard(1)", f"{GRID} shard(1), shard(0)"), "changes 2 dims of mesh"),
        (asked(f"{GRID} shard(0), shard(1)", f"{GRID} replicated, replicated"), "changes 2 dims of mesh"),
        (
            asked(f"{GRID} shard(0), shard(1)", f"{GRID} replicated, replicated", (2, 4), dim=0),
            "changes 2 dims of mesh",
        ),
        (asked(f"{GRID} shard(0), replicated", "[0, 1] shard(0)"), r"mesh \[\[0, 1\], \[2, 3\]\] has 2 dims"),
        (asked("[0] replicated", f"{GRID} shard(0), replicated"), r"mesh \[\[0, 1\], \[2, 3\]\] has 2 dims"),
        (asked(f"{GRID} replicated, replicated", "[[0, 2], [1, 3]] replicated, replicated"), "has 2 dims"),
        (asked(f"{GRID} replicated, replicated", "[2] replicated", dim=0), "has 2 dims"),
        (asked(f"{FULL} shard(1)", f"{FULL} replicated"), "inner resharding: dim 1 .* dim 0 of local extent 12"),
        (asked("[0, 1] shard(1)", "[2] replicated"), "inner resharding"),
        (asked("[0] replicated", "[1, 2] shard(1)"), "inner resharding"),
        (asked(f"{FULL} shard(0)", f"{FULL} shard(1)", (4, 2, 8), dim=0), "inner resharding: dim 2"),
        (asked(f"{GRID} shard(0), shard(1)", f"{GRID} shard(0), replicated"), "inner resharding: dim 1"),
        (asked(f"{FULL} replicated", "[0, 1] replicated", dim=0), "reduces dim 0, which is not sharded"),
        (asked(f"{FULL} shard(0)", f"{FULL} replicated", dim=1), "reduces dim 1, which is not sharded"),
        (asked("[0, 1] shard(1)", "[2] replicated", dim=0), "reduces dim 0, which is not sharded"),
        (asked("[0, 1] shard(0)", "[1, 0] shard(0)", dim=0), "a reduce_scatter from mesh"),
        (asked("[0] shard(0)", "[1, 2] shard(0)", dim=0), "a reduce_scatter from mesh"),
        (asked("[0, 1] shard(0)", "[0, 1] replicated", dim=0, op="bxor"), "reduces float32 by bxor"),
    ],
)  # fmt: skip
def test_what_no_row_fits_is_refused(made: Resharding, message: str) -> None:
    for rank in made.ranks:
        with pytest.raises(Unsupported, match=message) as raised:
            plan_resharding(made, rank, torch.float32)
        assert raised.value.message.startswith(f"'{made}'")
        assert raised.value.hint


def test_integers_have_no_average() -> None:
    with pytest.raises(Unsupported, match="reduces int64 by avg"):
        plan_resharding(asked("[0, 1] shard(0)", "[0, 1] replicated", dim=0, op="avg"), 0, torch.int64)


def test_dims_of_local_extent_one_and_the_reduced_dim_do_not_make_a_resharding_inner() -> None:
    assert posted(asked(f"{FULL} shard(1)", f"{FULL} replicated", (1, 8)))[0][0][0] == "all_gather"
    assert posted(asked(f"{GRID} shard(0), shard(1)", f"{GRID} shard(0), replicated", (2, 8)))[0][0][0] == "all_gather"
    assert posted(asked(f"{FULL} shard(0)", f"{FULL} shard(0)", (12, 8), dim=0))[0][0][0] == "reduce_scatter"
    assert posted(asked("[0, 1] shard(1)", "[2, 3] shard(1)"))[0][0][0] == "send"  # whole parts go


# --------------------------------------------------------------------------------------------------- for all layouts

MESHES = ["[0]", "[2]", "[0, 1]", "[1, 0]", "[2, 3]", "[3, 0, 1, 2]", "[1, 0, 2]", "[[0, 3], [2, 1]]"]


def rows_that_fit() -> Iterator[Resharding]:
    for source, target in itertools.product(MESHES, MESHES):
        for before, after in itertools.product(_placements(source), _placements(target)):
            for shape, dim in itertools.product(((12, 12, 12), (4, 1, 12)), (None, 0, 2)):
                try:
                    made = asked(f"{source} {before}", f"{target} {after}", shape, dim)
                    plans(made)
                except (Unsupported, ProgramError):
                    continue
                yield made


def _placements(mesh: str) -> list[str]:
    one = ["replicated", "shard(0)", "shard(1)"]
    return one if "[[" not in mesh else [f"{a}, {b}" for a, b in itertools.product(one, one) if a != b or a == one[0]]


def test_all_of_a_team_post_the_same_in_the_same_order() -> None:
    count = 0
    for made in rows_that_fit():
        count += 1
        by_team: dict[tuple[int, ...], list[dict[int, PostedCommunication]]] = {}
        for rank, found in plans(made).items():
            met: dict[tuple[int, ...], int] = {}
            for c in found.communications:
                assert rank in c.team
                number = met[c.team] = met.get(c.team, -1) + 1
                matched = by_team.setdefault(c.team, [])
                matched += [{}] * (number + 1 - len(matched))
                matched[number] = {**matched[number], rank: c}
        for team, posts in by_team.items():
            for post in posts:
                assert set(post) == set(team)
                kinds = {(c.kind, c.axis, c.split, c.reduce_op, c.root) for c in post.values()}
                assert len(kinds) == 1 or {c.kind for c in post.values()} == {"send", "recv"}
                root = next(iter(post.values())).root
                assert root is None or root in team
    assert count > 300


def test_all_that_are_to_get_something_get_it_once() -> None:
    for made in rows_that_fit():
        for rank, found in plans(made).items():
            got = (found.part is not None) + sum(c.gets for c in found.communications)
            assert got == (rank in made.target.mesh)
            for c in found.communications:
                assert not c.gives or rank in made.source.mesh


def test_other_names_of_ranks_change_names_and_nothing_else() -> None:
    new = (3, 1, 0, 2)
    for made in rows_that_fit():
        renamed = replace(made, source=made.source.relabelled(new), target=made.target.relabelled(new))
        for rank, found in plans(made).items():
            expected = replace(
                found,
                communications=tuple(
                    replace(c, team=tuple(new[r] for r in c.team), root=None if c.root is None else new[c.root])
                    for c in found.communications
                ),
            )
            assert plan_resharding(renamed, new[rank], torch.float32) == expected
