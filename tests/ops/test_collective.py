"""Collectives: what they compute, and how their members disagree."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tcverify.errors import InternalError
from tcverify.ops import Collective, complete, mismatch

F64 = torch.float64
A = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=F64)
B = torch.tensor([[10.0, 20.0], [30.0, 40.0]], dtype=F64)


def call(kind: str, group: Sequence[int] = (0, 1), shape: tuple[int, ...] = (2, 2), **more: object) -> Collective:
    return Collective(kind, tuple(group), shape, F64, **more)  # type: ignore[arg-type]


def values(kind: str, *, group: Sequence[int] = (0, 1), **more: object) -> list[list[list[float]]]:
    """The members' results for contributions A and B, in group order."""
    made = call(kind, group, **more)  # type: ignore[arg-type]
    return [result.tolist() for result in complete([made] * 2, [A, B])]


# ------------------------------------------------------------------------------------------------------ complete


def test_all_reduce_gives_every_member_the_sum() -> None:
    assert values("all_reduce", reduce_op="sum") == [[[11.0, 22.0], [33.0, 44.0]]] * 2


def test_reduce_scatter_gives_rows_by_position() -> None:
    assert values("reduce_scatter", dim=0, reduce_op="sum") == [[[11.0, 22.0]], [[33.0, 44.0]]]


def test_permute_brings_everyone_what_another_sends_there() -> None:
    made = call("permute", (4, 2, 7), shape=(1,), targets=(1, 2, 0))
    contributions = [torch.tensor([float(position)]) for position in range(3)]
    assert [result.item() for result in complete([made] * 3, contributions)] == [2.0, 0.0, 1.0]


def test_reduce_scatter_gives_columns_by_position() -> None:
    assert values("reduce_scatter", dim=1, reduce_op="sum") == [[[11.0], [33.0]], [[22.0], [44.0]]]


def test_all_gather_stacks_rows_in_group_order() -> None:
    assert values("all_gather", dim=0) == [[[1.0, 2.0], [3.0, 4.0], [10.0, 20.0], [30.0, 40.0]]] * 2


def test_all_gather_joins_columns_in_group_order() -> None:
    assert values("all_gather", dim=1) == [[[1.0, 2.0, 10.0, 20.0], [3.0, 4.0, 30.0, 40.0]]] * 2


def test_positions_and_not_rank_numbers_order_the_results() -> None:
    # A belongs to the first member of [1, 0], which is rank 1
    assert values("reduce_scatter", group=(1, 0), dim=0, reduce_op="sum")[0] == [[11.0, 22.0]]
    assert values("all_gather", group=(1, 0), dim=0)[1] == [[1.0, 2.0], [3.0, 4.0], [10.0, 20.0], [30.0, 40.0]]


def test_send_recv_moves_what_the_source_has() -> None:
    assert values("send_recv", group=(1, 0), root=1) == [A.tolist(), A.tolist()]


def test_all_to_all_exchanges_uneven_chunks() -> None:
    tensors = [torch.arange(4.0), torch.arange(10.0, 13.0)]
    calls = [
        Collective("all_to_all", (1, 0), (4,), torch.float32, splits=((3, 1), (3, 0))),
        Collective("all_to_all", (1, 0), (3,), torch.float32, splits=((0, 3), (1, 3))),
    ]
    assert mismatch(calls) is None
    assert [t.tolist() for t in complete(calls, tensors)] == [[0.0, 1.0, 2.0], [3.0, 10.0, 11.0, 12.0]]


KINDS: dict[str, dict[str, object]] = {
    "all_reduce": {"reduce_op": "sum"},
    "reduce_scatter": {"dim": 0, "reduce_op": "sum"},
    "all_gather": {"dim": 0},
    "all_to_all": {"splits": ((1, 1), (1, 1))},
    "send_recv": {"root": 0},
}


@pytest.mark.parametrize("kind", KINDS)
def test_results_share_storage_with_nothing(kind: str) -> None:
    tensors = [A.clone(), B.clone()]
    results = complete([call(kind, **KINDS[kind])] * 2, tensors)  # type: ignore[arg-type]
    addresses = {t.untyped_storage().data_ptr() for t in [*tensors, *results]}
    assert len(addresses) == 4
    assert torch.equal(tensors[0], A)
    assert torch.equal(tensors[1], B)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "send_recv"])
def test_a_group_of_one_gets_its_own_value_afresh(kind: str) -> None:
    more = {**KINDS[kind], "splits": ((2,), (2,))} if kind == "all_to_all" else KINDS[kind]
    tensor = A.clone()
    (result,) = complete([call(kind, (3,), **more)], [tensor])  # type: ignore[arg-type]
    assert torch.equal(result, A)
    assert result.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_contiguous_whatever_the_contributions_are(kind: str) -> None:
    wide = [torch.arange(64.0).reshape(2, 4, 4, 2).permute(0, 3, 1, 2) for _ in range(2)]  # channels last
    assert not wide[0].is_contiguous()
    more = KINDS[kind]
    results = complete([Collective(kind, (0, 1), (2, 2, 4, 4), torch.float32, **more)] * 2, wide)  # type: ignore[arg-type]
    assert all(result.is_contiguous() for result in results)


def test_the_order_of_a_sum_changes_rounding_alone() -> None:
    tensors = [torch.tensor([t], dtype=F64) for t in (1.0, 1e16, -1e16)]
    calls = [Collective("all_reduce", (0, 1, 2), (1,), F64, reduce_op="sum")] * 3
    assert complete(calls, tensors)[0].item() == 0.0
    assert complete(calls, tensors, [1, 2, 0])[0].item() == 1.0


def test_the_order_of_a_sum_does_not_move_chunks() -> None:
    made = call("reduce_scatter", dim=0, reduce_op="sum")
    assert [t.tolist() for t in complete([made] * 2, [A, B], [1, 0])] == [[[11.0, 22.0]], [[33.0, 44.0]]]


def test_integers_are_summed_as_integers() -> None:
    made = Collective("all_reduce", (0, 1), (1,), torch.int64, reduce_op="sum")
    total = complete([made] * 2, [torch.tensor([2**60]), torch.tensor([1])])[0]
    assert total.tolist() == [2**60 + 1]


def test_an_unknown_kind_is_an_internal_error() -> None:
    with pytest.raises(InternalError, match="no semantics for collective gossip"):
        complete([call("gossip")] * 2, [A, B])


# ------------------------------------------------------------------------------------------------------ mismatch

SCATTER = call("reduce_scatter", (4, 2), dim=0, reduce_op="sum")
EXCHANGE = call("all_to_all", (4, 2), splits=((1, 1), (1, 1)))


@pytest.mark.parametrize("kind", KINDS)
def test_equal_calls_agree(kind: str) -> None:
    assert mismatch([call(kind, **KINDS[kind])] * 2) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"kind": "all_gather"}, "rank 4 calls reduce_scatter while rank 2 calls all_gather"),
        ({"reduce_op": "max"}, "in reduce_scatter, rank 4 reduces by sum while rank 2 reduces by max"),
        ({"root": 2}, "in reduce_scatter, rank 4 has root None while rank 2 has root 2"),
        (
            {"dtype": torch.bfloat16},
            "in reduce_scatter, rank 4 sends torch.float64 while rank 2 sends torch.bfloat16",
        ),
        ({"dim": 1}, "in reduce_scatter, rank 4 works on dim 0 while rank 2 works on dim 1"),
        (
            {"shape": (2, 3)},
            "in reduce_scatter, rank 4 contributes shape [2, 2] while rank 2 contributes [2, 3]",
        ),
    ],
)
def test_the_first_disagreement_is_said_in_a_sentence(change: dict[str, object], sentence: str) -> None:
    assert mismatch([SCATTER, replace(SCATTER, **change)]) == sentence  # type: ignore[arg-type]


def test_the_last_member_is_compared_too() -> None:
    calls = [call("all_reduce", (0, 1, 2), reduce_op="sum")] * 2
    odd = call("all_reduce", (0, 1, 2), (4,), reduce_op="sum")
    assert mismatch([*calls, odd]) == "in all_reduce, rank 0 contributes shape [2, 2] while rank 2 contributes [4]"


def test_chunks_of_all_to_all_compare_pairwise() -> None:
    odd = replace(EXCHANGE, splits=((1, 1), (2, 0)))
    assert mismatch([EXCHANGE, odd]) == "in all_to_all, rank 4 sends 1 rows to rank 2, which expects 2"


def test_members_of_all_to_all_may_contribute_different_sizes() -> None:
    calls = [
        call("all_to_all", shape=(5, 2), splits=((2, 3), (2, 1))),
        call("all_to_all", shape=(1, 2), splits=((1, 0), (3, 0))),
    ]
    assert mismatch(calls) is None


def test_sizes_behind_dim_0_of_all_to_all_are_equal() -> None:
    odd = replace(EXCHANGE, shape=(2, 3))
    assert mismatch([EXCHANGE, odd]) == "in all_to_all, rank 4 and rank 2 disagree on the sizes behind dim 0"


def test_a_collective_reads_as_a_call() -> None:
    assert str(SCATTER) == "reduce_scatter(float64[2, 2], dim 0, sum) of group [4, 2]"
    assert str(EXCHANGE) == "all_to_all(float64[2, 2], in [1, 1] out [1, 1]) of group [4, 2]"
