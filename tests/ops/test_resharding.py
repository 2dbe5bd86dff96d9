"""What a resharding means, against a reference that asks of every element where it lies."""

from __future__ import annotations

import itertools

import pytest
import torch

from tcverify.errors import ProgramError
from tcverify.ops import Collective, Layout, Resharding
from tcverify.ops.collective import REDUCTIONS, complete, mismatch
from tests.support.naive_layouts import numbered, reduce_over, same, spread

ONE_DIM = [
    "[0] replicated",
    "[2] shard(0)",
    "[0, 1] shard(0)",
    "[1, 0] shard(1)",
    "[2, 3] replicated",
    "[3, 0, 1, 2] shard(1)",
    "[0, 1, 2, 3] replicated",
]
TWO_DIMS = [
    "[[0, 1], [2, 3]] shard(0), shard(1)",
    "[[3, 1], [0, 2]] shard(1), replicated",
    "[[3, 1], [0, 2]] replicated, shard(0)",
    "[[2, 0], [1, 3]] replicated, replicated",
]
LAYOUTS = ONE_DIM + TWO_DIMS


def carried_out(made: Resharding, parts: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """What each of the ranks gets, by the meaning of a matched collective."""
    nothing = next(iter(parts.values())).new_empty(0)
    given = [parts.get(rank, nothing) for rank in made.ranks]
    calls = [
        Collective(
            "reshard", made.ranks, tuple(x.shape), x.dtype, dim=made.dim, reduce_op=made.reduce_op, resharding=made
        )
        for x in given
    ]
    assert mismatch(calls) is None
    return dict(zip(made.ranks, complete(calls, given), strict=True))


def agree(results: dict[int, torch.Tensor], expected: dict[int, torch.Tensor]) -> None:
    for rank, result in results.items():
        if rank in expected:
            assert same(result, expected[rank]), rank
            assert result.is_contiguous()
        else:
            assert result.numel() == 0, rank


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS)
def test_set_divides_the_same_tensor_anew(source: str, target: str) -> None:
    whole = numbered(4, 8)
    made = Resharding(Layout.parse(source), Layout.parse(target), (4, 8))
    parts = spread(whole, source)
    results = carried_out(made, parts)
    agree(results, spread(whole, target))
    addresses = {tensor.untyped_storage().data_ptr() for tensor in (*parts.values(), *results.values()) if len(tensor)}
    with_elements = [tensor for tensor in (*parts.values(), *results.values()) if len(tensor)]
    assert len(addresses) == len(with_elements), "two results share storage"


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", ONE_DIM[:-1] + TWO_DIMS[:1])
def test_reduce_sums_and_divides_anew(source: str, target: str, dim: int) -> None:
    whole = numbered(4, 8, 4)
    made = Resharding(Layout.parse(source), Layout.parse(target), (4, 8, 4), dim, "sum")
    agree(carried_out(made, spread(whole, source)), spread(whole.sum(dim), target))


@pytest.mark.parametrize("reduce_op", REDUCTIONS)
@pytest.mark.parametrize("dim", [0, 1])
def test_every_reduction(reduce_op: str, dim: int) -> None:
    dtype = torch.int64 if reduce_op in ("band", "bor", "bxor") else torch.float64
    whole = numbered(4, 4, dtype=dtype) % 7
    source, target = "[1, 3] shard(1)", "[0, 1] shard(0)"
    made = Resharding(Layout.parse(source), Layout.parse(target), (4, 4), dim, reduce_op)
    agree(carried_out(made, spread(whole, source)), spread(reduce_over(whole, dim, reduce_op), target))


def test_an_average_is_over_the_dim_and_not_over_the_ranks() -> None:
    whole = numbered(6, 2)
    made = Resharding(Layout.parse("[0, 1] shard(0)"), Layout.parse("[0, 1] replicated"), (6, 2), 0, "avg")
    results = carried_out(made, spread(whole, "[0, 1] shard(0)"))
    torch.testing.assert_close(results[1], whole.mean(0))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_sums_in_another_order_are_the_same_but_for_rounding(order: tuple[int, ...]) -> None:
    whole = torch.randn(7, 3, dtype=torch.float32, generator=torch.Generator().manual_seed(1))
    made = Resharding(Layout.parse("[0, 1, 2] replicated"), Layout.parse("[0] replicated"), (7, 3), 0, "sum")
    given = [whole.clone() for _ in made.ranks]
    call = Collective("reshard", made.ranks, (7, 3), torch.float32, dim=0, reduce_op="sum", resharding=made)
    result = complete([call] * 3, given, order)[0]
    torch.testing.assert_close(result, whole.double().sum(0).float(), rtol=1e-5, atol=1e-5)


REPEATED = Resharding(Layout.parse("[1, 0] replicated"), Layout.parse("[2] replicated"), (2,))


def test_of_replicas_that_differ_by_rounding_the_first_counts() -> None:
    """So that what is meant is a function of what ranks hold."""
    given = torch.tensor([1.0, 3.0], dtype=torch.float64)
    assert same(carried_out(REPEATED, {1: given, 0: given * (1 + 1e-9)})[2], given)


@pytest.mark.parametrize("other", [numbered(2) + 1, torch.tensor([float("nan"), 0.0], dtype=torch.float64)])
def test_replicas_that_differ_are_an_error(other: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"ranks 1 and 0 hold different values of what '\[1, 0\] replicated' repeats"):
        carried_out(REPEATED, {1: numbered(2), 0: other})


def test_replicas_are_compared_by_mesh_dim() -> None:
    made = Resharding(Layout.parse("[[0, 1], [2, 3]] shard(0), replicated"), Layout.parse("[0] replicated"), (4,))
    parts = spread(numbered(4), str(made.source))
    assert made.disagreement(parts) is None
    assert made.disagreement({**parts, 3: parts[3] + 1}) == (2, 3)
    assert made.disagreement({**parts, 0: parts[0] + 1}) == (0, 1)


def test_who_takes_part_in_order() -> None:
    made = Resharding(Layout.parse("[3, 1] shard(0)"), Layout.parse("[0, 1, 4] replicated"), (4,))
    assert made.ranks == (3, 1, 0, 4)
    assert str(made) == "[4] [3, 1] shard(0) → [0, 1, 4] replicated"
    reducing = Resharding(made.source, made.target, (4, 2), 0, "max")
    assert reducing.result_shape == (2,)
    assert str(reducing) == "[4, 2] max over dim 0, [3, 1] shard(0) → [0, 1, 4] replicated"


@pytest.mark.parametrize(
    ("source", "target", "shape", "dim", "words"),
    [
        ("[0, 1] shard(0)", "[0, 1] replicated", (3, 2), None, "cannot divide size 3 of dim 0"),
        ("[0, 1] replicated", "[0, 1] shard(1)", (2, 3), None, "cannot divide size 3 of dim 1"),
        ("[0, 1] shard(2)", "[0, 1] replicated", (2, 2), None, "shards dim 2 of a tensor of shape"),
        ("[0, 1] replicated", "[0, 1] shard(1)", (2, 2), 0, "shards dim 1 of a tensor of shape"),
        ("[0, 1] replicated", "[0, 1] replicated", (2, 2), 2, "has no dim 2 to reduce"),
        ("[0, 1] replicated", "[0, 1] replicated", (2, 2), -1, "has no dim -1 to reduce"),
        ("[0, 1] replicated", "[0, 1] replicated", (0, 2), 0, "no elements to reduce"),
    ],
)
def test_what_cannot_be_asked_for(
    source: str, target: str, shape: tuple[int, ...], dim: int | None, words: str
) -> None:
    with pytest.raises(ProgramError, match=words):
        Resharding(Layout.parse(source), Layout.parse(target), shape, dim, None if dim is None else "sum")


@pytest.mark.parametrize(("dim", "reduce_op"), [(0, None), (None, "sum"), (0, "mean")])
def test_a_reduction_has_a_dim_and_a_known_op(dim: int | None, reduce_op: str | None) -> None:
    layout = Layout.parse("[0, 1] replicated")
    with pytest.raises(ProgramError, match="reduc"):
        Resharding(layout, layout, (2, 2), dim, reduce_op)
