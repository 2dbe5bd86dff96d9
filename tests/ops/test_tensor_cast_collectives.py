"""What the collectives of the tensor_cast dialect ask for and compute, on a group with an order of its own."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tcverify.ops import Collective
from tcverify.ops.collective import complete
from tcverify.ops.dialects.tensor_cast import ops as tc


def value(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def on_group(op: Callable[..., Any], group: Sequence[int], *arguments: Sequence[Any]) -> list[torch.Tensor]:
    """Run a collective op on every member of `group` in one process; `arguments` holds each argument per member."""
    steps = [op(rank, *args) for rank, args in zip(group, zip(*arguments, strict=True), strict=True)]
    requests = [next(step) for step in steps]
    answers = complete([r.collective for r in requests], [r.tensor for r in requests])
    results = []
    for step, answer in zip(steps, answers, strict=True):
        with pytest.raises(StopIteration) as stop:
            step.send(answer)
        results.append(stop.value.value)
    return results


GROUP = [4, 1, 3]  # in an order of its own, with gaps
ADDENDS = [value(6, 4, seed=rank) for rank in GROUP]
GROUPS = [GROUP] * 3


def test_all_reduce_sums_over_the_group() -> None:
    for result in on_group(tc.all_reduce, GROUP, ADDENDS, GROUP, GROUPS):
        close(result, torch.stack(ADDENDS).sum(0))


@pytest.mark.parametrize(("dim", "axis"), [(0, 0), (-2, 0)])
def test_reduce_scatter_gives_the_chunk_at_the_position_in_the_group(dim: int, axis: int) -> None:
    results = on_group(tc.reduce_scatter, GROUP, ADDENDS, [dim] * 3, GROUP, GROUPS)
    for position, result in enumerate(results):
        close(result, torch.stack(ADDENDS).sum(0).narrow(axis, 2 * position, 2))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_all_gather_concatenates_in_group_order(dim: int) -> None:
    for result in on_group(tc.all_gather, GROUP, ADDENDS, [dim] * 3, GROUP, GROUPS):
        assert torch.equal(result, torch.cat(ADDENDS, dim))


def test_all_to_all_sends_chunk_j_to_position_j() -> None:
    sent = [[1, 2, 3], [0, 6, 0], [4, 1, 1]]
    received = [list(column) for column in zip(*sent, strict=True)]
    results = on_group(tc.all_to_all, GROUP, ADDENDS, received, sent, GROUP, GROUPS)
    assert torch.equal(results[0], torch.cat([ADDENDS[0][:1], ADDENDS[2][:4]]))
    assert torch.equal(results[1], torch.cat([ADDENDS[0][1:3], ADDENDS[1], ADDENDS[2][4:5]]))
    assert torch.equal(results[2], torch.cat([ADDENDS[0][3:], ADDENDS[2][5:]]))


def test_matmul_all_reduce_adds_the_bias_on_every_rank() -> None:
    left, right = [value(2, 3, 4, seed=r) for r in GROUP], [value(4, 5, seed=r) for r in GROUP]
    bias = value(5)
    expected = torch.stack([a @ b for a, b in zip(left, right, strict=True)]).sum(0) + 3 * bias
    for result in on_group(tc.matmul_all_reduce, GROUP, left, right, [bias] * 3, GROUP, GROUPS):
        close(result, expected)


def test_matmul_all_reduce_needs_no_bias() -> None:
    left, right = [value(3, 4, seed=r) for r in GROUP], [value(4, 5, seed=r) for r in GROUP]
    expected = torch.stack([a @ b for a, b in zip(left, right, strict=True)]).sum(0)
    for result in on_group(tc.matmul_all_reduce, GROUP, left, right, [None] * 3, GROUP, GROUPS):
        close(result, expected)


def test_the_target_of_pipeline_send_recv_gets_what_the_source_has() -> None:
    x = [value(2, seed=5), value(2, seed=6)]
    source, target = on_group(tc.pipeline_send_recv, [5, 2], x, [5, 5], [2, 2], [0, 0], [1, 1])
    assert torch.equal(source, x[0])
    assert torch.equal(target, x[0])


@pytest.mark.parametrize(("source", "target"), [(1, 2), (0, 0)])
def test_pipeline_send_recv_is_the_identity_on_other_ranks_and_within_one(source: int, target: int) -> None:
    x = value(2)
    with pytest.raises(StopIteration) as stop:
        next(tc.pipeline_send_recv(0, x, source, target, 0, 1))
    assert torch.equal(stop.value.value, x)
    assert stop.value.value.data_ptr() != x.data_ptr()


def test_a_request_says_what_the_rank_asks_for() -> None:
    request = next(tc.reduce_scatter(1, value(4, 6), -1, 1, [3, 1]))
    assert request.collective == Collective("reduce_scatter", (3, 1), (4, 6), torch.float64, 1, "sum")


@pytest.mark.parametrize("op", [tc.all_reduce, tc.reduce_scatter, tc.all_gather, tc.all_to_all])
@pytest.mark.parametrize(
    ("rank", "group", "sentence"),
    [
        (1, [0, 1], "on rank 0 says rank=1"),
        (0, [1, 2], r"on rank 0 names group \[1, 2\], to which it does not belong"),
        (0, [0, 1, 0], r"names group \[0, 1, 0\], in which a rank stands twice"),
    ],
)
def test_a_wrong_rank_or_group_is_named(op: Callable[..., Any], rank: int, group: list[int], sentence: str) -> None:
    between = {tc.all_reduce: (), tc.all_to_all: ([2, 2], [2, 2])}.get(op, (0,))
    with pytest.raises(ValueError, match=f"{op.__name__} {sentence}"):
        next(op(0, value(4, 4), *between, rank, group))


@pytest.mark.parametrize("op", [tc.reduce_scatter, tc.all_gather])
@pytest.mark.parametrize("dim", [2, -3])
def test_a_dim_that_does_not_exist_is_named(op: Callable[..., Any], dim: int) -> None:
    with pytest.raises(ValueError, match=rf"{op.__name__} on dim {dim} of a tensor of shape \[4, 4\]"):
        next(op(0, value(4, 4), dim, 0, [0, 1]))


def test_reduce_scatter_needs_a_size_that_the_group_divides() -> None:
    with pytest.raises(ValueError, match="cannot divide size 5 of dim 0 by 2 ranks"):
        next(tc.reduce_scatter(0, value(5, 4), 0, 0, [0, 1]))


def test_all_to_all_needs_a_split_per_member() -> None:
    with pytest.raises(ValueError, match=r"all_to_all over 2 ranks has splits \[4\] and \[2, 2\]"):
        next(tc.all_to_all(0, value(4, 4), [2, 2], [4], 0, [0, 1]))


def test_the_input_splits_of_all_to_all_cover_dim_0() -> None:
    with pytest.raises(ValueError, match=r"splits \[1, 2\] do not add up to size 4 of dim 0"):
        next(tc.all_to_all(0, value(4, 4), [2, 2], [1, 2], 0, [0, 1]))
