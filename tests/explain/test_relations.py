"""Relations between values, planted one by one: what explains a value, and what only says what went wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch

from tcverify.domains.exact.field import P, canonical
from tcverify.execution import CollectiveCall, RankResult, Run
from tcverify.explain.relations import EXPLAINED, Measure
from tcverify.explain.relations.grouping import Grouping, groupings
from tcverify.explain.relations.layouts import RelationContext, layout
from tcverify.explain.relations.mistakes import recognise_mistake
from tcverify.explain.relations.relation import BRIEF, Relation
from tcverify.explain.relations.steps import neutral_of
from tcverify.explain.relations.tensors import values_close
from tcverify.ops import REDUCTIONS, Collective
from tcverify.program import InputSpec, Mesh, spmd_program

Values = dict[int, torch.Tensor]

TP = Grouping("over tp [0, 1] [2, 3]", {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)})
DP = Grouping("over dp [0, 2] [1, 3]", {0: (0, 2), 2: (0, 2), 1: (1, 3), 3: (1, 3)})
UNEVEN = Grouping("over ep [1, 2, 3]", {0: (0,), 1: (1, 2, 3), 2: (1, 2, 3), 3: (1, 2, 3)})
SETTING = RelationContext([TP, DP])


def value(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 0.5


def everywhere(tensor: torch.Tensor) -> Values:
    return {rank: tensor.clone() for rank in range(4)}


def each(make: Callable[[int], torch.Tensor]) -> Values:
    return {rank: make(rank) for rank in range(4)}


def related(
    new: Mapping[int, torch.Tensor], old: Mapping[int, torch.Tensor], setting: RelationContext = SETTING
) -> Relation:
    """As `relate` decides on one node and one candidate; the pool holds another value, and addends of the original's."""
    pool = [("bias", everywhere(value(4, 6, seed=9))), ("addend", ADDENDS)]
    found = layout(new, old, "x", setting) or recognise_mistake(new, old, "x", pool, setting)
    return found or Relation("unrelated", None, "unrelated")


X = value(4, 6)
WHOLE = everywhere(X)
ADDENDS = each(lambda r: value(4, 6, seed=20 + r % 2))
SUM = each(lambda r: ADDENDS[0] + ADDENDS[1])
VARYING = each(lambda r: value(4, 6, seed=40 + r))


def rows(tensor: torch.Tensor, part: int, parts: int = 2, dim: int = 0) -> torch.Tensor:
    return tensor.chunk(parts, dim)[part]


CASES: dict[str, tuple[Values, Values, str, str]] = {
    "equal": (WHOLE, WHOLE, "equal", "equal to the original's 'x'"),
    "rounding": (each(lambda r: X * (1 + 1e-14)), WHOLE, "equal", "equal to the original's 'x'"),
    "reshaped": (each(lambda r: X.reshape(2, 12)), WHOLE, "reshaped", "the original's 'x' in another shape"),
    "transposed": (each(lambda r: X.T), WHOLE, "transposed", "the original's 'x' with its dims in order [1, 0]"),
    "rows": (each(lambda r: rows(X, r % 2)), WHOLE, "shard", "a shard of the original's 'x' along dim 0 over tp [0, 1] [2, 3]"),
    "columns over dp": (
        each(lambda r: rows(X, r // 2, dim=1)), WHOLE, "shard",
        "a shard of the original's 'x' along dim 1 over dp [0, 2] [1, 3]",
    ),
    "a shard of a view": (
        each(lambda r: rows(X.reshape(2, 12), r % 2, dim=1)), WHOLE, "shard",
        "a shard of the original's 'x', seen as [2, 12], along dim 1 over tp [0, 1] [2, 3]",
    ),
    "a shard with a leading dim": (
        each(lambda r: rows(X, r % 2)[None]), WHOLE, "shard",
        "a shard of the original's 'x' along dim 1 over tp [0, 1] [2, 3]",
    ),
    "gathered": (
        each(lambda r: X), each(lambda r: rows(X, r % 2)), "gathered",
        "the original's 'x' gathered along dim 0 over tp [0, 1] [2, 3]",
    ),
    "partial": (ADDENDS, SUM, "partial", "a partial sum of the original's 'x' over tp [0, 1] [2, 3]"),
    "reduced": (SUM, ADDENDS, "reduced", "the sum of the original's 'x' over tp [0, 1] [2, 3]"),
    "a shard of a shard": (
        each(lambda r: rows(rows(X, r // 2), r % 2, dim=1)), WHOLE, "nested",
        "a shard along dim 1 over tp [0, 1] [2, 3] of a shard of the original's 'x' along dim 0 over dp [0, 2] [1, 3]",
    ),
    "an addend of a shard": (
        each(lambda r: rows(ADDENDS[r], r // 2)), SUM, "nested",
        "a partial sum over tp [0, 1] [2, 3] of a shard of the original's 'x' along dim 0 over dp [0, 2] [1, 3]",
    ),
    "a shard of a sum": (
        each(lambda r: rows(SUM[r], r % 2)), ADDENDS, "nested",
        "a shard along dim 0 over tp [0, 1] [2, 3] of the sum of the original's 'x' over tp [0, 1] [2, 3]",
    ),
    "the wrong shard": (
        each(lambda r: rows(X, 1 - r % 2)), WHOLE, "wrong-shard",
        "shard 1 of the original's 'x' along dim 0 on rank 0, whose position over tp [0, 1] [2, 3] is 0",
    ),
    "doubled": (each(lambda r: 2 * X), WHOLE, "scaled", "2 times the original's 'x' over tp [0, 1] [2, 3]"),
    "a third": (each(lambda r: X / 3), WHOLE, "scaled", "1/3 of the original's 'x'"),
    "negated": (each(lambda r: -X), WHOLE, "scaled", "the negative of the original's 'x'"),
    "slightly scaled": (each(lambda r: X * 1.001), WHOLE, "scaled", "1.001 times the original's 'x'"),
    "a scaled shard": (
        each(lambda r: 3 * rows(X, r % 2)), WHOLE, "scaled",
        "3 times a shard of the original's 'x' along dim 0 over tp [0, 1] [2, 3]",
    ),
    "a lost addend": (
        each(lambda r: ADDENDS[0]), SUM, "addends",
        "the original's 'x' on rank 0, without the addend 'addend' of rank 1 over tp [0, 1] [2, 3]",
    ),
    "an addend counted twice": (
        each(lambda r: ADDENDS[0] + 2 * ADDENDS[1]), SUM, "addends",
        "the original's 'x' on rank 0, with the addend 'addend' of rank 1 counted 2 times over tp [0, 1] [2, 3]",
    ),
    "something added": (each(lambda r: X + value(4, 6, seed=9)), WHOLE, "sum", "the original's 'x' plus 'bias'"),
    "something taken away": (
        each(lambda r: X - 2 * value(4, 6, seed=9)), WHOLE, "sum", "the original's 'x' minus 2 times 'bias'",
    ),
    "chunks in another order": (
        each(lambda r: torch.cat([X[2:], X[:2]])), WHOLE, "permuted",
        "the original's 'x' with its chunks along dim 0 in order [1, 0] on rank 0 over tp [0, 1] [2, 3]",
    ),
    "rows in another order": (
        each(lambda r: X[[0, 2, 1, 3]]), WHOLE, "permuted",
        "the original's 'x' with its rows along dim 0 in order [0, 2, 1, 3] on rank 0",
    ),
    "another rank's": (
        {**VARYING, 2: VARYING[0]}, VARYING, "other-rank", "on rank 2 what the original's 'x' is on rank 0",
    ),
    "another dtype": (each(lambda r: X.float().double().float()), each(lambda r: X.float().double()), "dtype",
                      "the original's 'x', but float32 and not float64"),
    "NaN": (each(lambda r: X.masked_fill(X > 0.4, float("nan"))), WHOLE, "not-finite", "NaN in "),
    "one row": (
        each(lambda r: torch.cat([X[:1].exp(), X[1:]])), WHOLE, "partly",
        "the original's 'x', except at index 0 along dim 0 on rank 0",
    ),
    "anything": (VARYING, WHOLE, "unrelated", "unrelated"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_planted_relation_is_recognised(case: str) -> None:
    new, old, kind, text = CASES[case]
    found = related(new, old)
    assert (found.kind, found.text[: len(text)]) == (kind, text)
    assert found.explained == (kind in EXPLAINED)
    assert found.brief == BRIEF[kind]


def test_uneven_parts_are_shards_and_ranks_outside_hold_the_whole() -> None:
    cuts = {0: X, 1: X[:1], 2: X[1:3], 3: X[3:]}
    found = related(cuts, WHOLE, RelationContext([UNEVEN]))
    assert found.text == "a shard of the original's 'x' along dim 0 over ep [1, 2, 3]"
    assert related({**cuts, 2: X[1:2]}, WHOLE, RelationContext([UNEVEN])).kind == "unrelated"


def test_values_of_ranks_may_differ_in_their_number_of_dims() -> None:
    assert related({0: X[:2], 1: X[2, 0], 2: X[:2], 3: X[2:]}, WHOLE).kind == "unrelated"


def test_a_shard_that_each_rank_has_of_its_own_value_loses_what_the_others_had() -> None:
    found = related(each(lambda r: rows(VARYING[r], r % 2)), VARYING)
    assert found.kind == "shard"
    assert found.loses
    assert found.text.endswith("each rank's of its own value")
    assert not related(each(lambda r: rows(X, r % 2)), WHOLE).loses


def test_addends_that_are_equal_are_told_to_be() -> None:
    assert related(each(lambda r: X / 2), WHOLE).alike
    assert not related(ADDENDS, SUM).alike


def test_values_without_elements_are_equal_only_in_shape_and_dtype() -> None:
    empty = everywhere(torch.empty(0, 6, dtype=torch.float64))
    assert related(empty, empty).kind == "equal"
    assert related(empty, everywhere(torch.empty(0, 3, dtype=torch.float64))).kind != "equal"
    assert related(empty, WHOLE).kind == "unrelated"


def test_zeros_are_equal_to_zeros_and_a_multiple_of_nothing() -> None:
    zeros = everywhere(torch.zeros(4, 6, dtype=torch.float64))
    assert related(zeros, zeros).kind == "equal"
    assert related(WHOLE, zeros).kind == "unrelated"
    assert related(zeros, WHOLE).kind == "unrelated"


def test_integers_and_booleans_are_compared_as_they_are() -> None:
    counts = everywhere(torch.arange(24).reshape(4, 6))
    assert related(counts, counts).kind == "equal"
    assert related(each(lambda r: rows(counts[r], r % 2)), counts).kind == "shard"
    assert related(each(lambda r: counts[r] + 1), counts).kind == "unrelated"
    flags = everywhere(X > 0)
    assert related(flags, flags).kind == "equal"
    assert related(each(lambda r: ~flags[r]), flags).kind == "unrelated"


def test_the_same_nan_and_infinities_are_equal() -> None:
    odd = X.clone()
    odd[0, 0], odd[1, 1] = float("nan"), float("inf")
    assert related(everywhere(odd), everywhere(odd)).kind == "equal"
    assert related(each(lambda r: odd.nan_to_num(0.0, posinf=float("inf"))), everywhere(odd)).kind != "equal"
    assert related(each(lambda r: rows(odd, r % 2)), everywhere(odd)).kind == "shard"


def test_few_elements_are_no_multiple_unless_the_factor_is_simple() -> None:
    one = everywhere(torch.tensor([0.3], dtype=torch.float64))
    assert related(each(lambda r: one[r] * 1.234567), one).kind == "unrelated"
    assert related(each(lambda r: one[r] * 2), one).kind == "scaled"


def test_residues_are_equal_or_not() -> None:
    setting = RelationContext([TP, DP], Measure(0.0, 0.0, P))
    field = everywhere(torch.tensor([[1.0, 5.0], [-7.0, 400000.0]], dtype=torch.float64))
    assert related(each(lambda r: field[r] + P), field, setting).kind == "equal"
    assert related(each(lambda r: field[r] + torch.eye(2)), field, setting).kind != "equal"
    doubled = each(lambda r: canonical(field[r] * 2))
    assert related(doubled, field, setting).text == "2 times the original's 'x' over tp [0, 1] [2, 3]"
    halves = each(lambda r: canonical(field[r] * pow(3, -1, P)))
    assert related(halves, field, setting).kind == "scaled"


def test_narrow_dtypes_differ_by_units_of_their_own() -> None:
    narrow = X.to(torch.bfloat16)
    assert values_close(narrow * 1.01, narrow)
    assert not values_close(narrow * 1.2, narrow)
    assert not values_close(narrow * 1.01, narrow, Measure(1e-9, 1.0))


def test_rows_are_chunks_in_another_order_only_where_whole_chunks_are() -> None:
    swapped, mixed = (related(everywhere(X[order]), WHOLE) for order in ([2, 3, 0, 1], [2, 3, 0, 0]))
    assert "with its chunks along dim 0 in order [1, 0] on rank 0" in swapped.text
    assert mixed.text.endswith("with its rows along dim 0 in order [2, 3, 0, 0] on rank 0")


def test_ranks_beside_the_groups_that_are_called_stand_alone() -> None:
    program = spmd_program(Mesh.grid({"tp": 4}), [InputSpec("x", (4,))], lambda b: b.input("x"))
    run = Run("lockstep", [RankResult(rank) for rank in range(4)])
    run.ranks[2].calls.append(
        CollectiveCall("sum", Collective("all_reduce", (2, 1), (4,), torch.float32, reduce_op="sum"))
    )
    mesh, called = groupings(program, run)
    assert (mesh.where, called.where) == ("over tp [0, 1, 2, 3]", "over [2, 1]")
    assert called.groups == {0: (0,), 1: (2, 1), 2: (2, 1), 3: (3,)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("reduce_op", ["sum", "product", "min", "max"])
def test_what_is_neutral_changes_no_value(reduce_op: str, dtype: torch.dtype) -> None:
    values = torch.tensor([-3, 0, 7]).to(dtype)
    neutral = neutral_of(reduce_op, dtype)
    assert neutral is not None
    assert torch.equal(REDUCTIONS[reduce_op](values, torch.full_like(values, neutral)), values)


def test_booleans_have_no_smallest_number() -> None:
    assert neutral_of("max", torch.bool) is None
