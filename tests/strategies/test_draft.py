"""Drafts: typing, editing and the order of steps."""

from __future__ import annotations

import pytest
import torch

from tcverify.errors import InternalError
from tcverify.ops import ShapeError
from tcverify.program import PARTIAL, Mesh, MeshDim, Recipe, shard
from tcverify.strategies.draft import RANK, DraftGroup, DraftValue, NoSite, PerRank, ProgramDraft, fork

TP2 = Mesh.grid({"tp": 2})
UNEVEN = Mesh(3, (MeshDim("tp", ((0,), (1, 2))),))
ALL_REDUCE = "tensor_cast::all_reduce"


def tokens(draft: ProgramDraft, rows: int = 4, sharded: bool = False) -> DraftValue:
    return draft.input("x", (rows, 8), torch.float32, (("tp", shard(0) if sharded else PARTIAL),), Recipe())


def names(draft: ProgramDraft, result: DraftValue) -> list[str]:
    return [n.name for n in draft.program(result, 0, ()).graphs[0].nodes if n.op == "call_function"]


def test_values_have_a_shape_as_soon_as_they_are_written() -> None:
    draft = ProgramDraft(TP2)
    part = draft.call("tensor_cast::reduce_scatter", tokens(draft), 0, RANK, DraftGroup("tp"))
    assert draft.shape(part) == (2, 8)


def test_what_differs_between_ranks_has_no_shape() -> None:
    draft = ProgramDraft(TP2)
    x = tokens(draft, rows=3, sharded=True)
    assert [draft.spec(x, rank).shape for rank in (0, 1)] == [(2, 8), (1, 8)]
    with pytest.raises(NoSite):
        draft.shape(x)


def test_a_call_that_some_rank_cannot_run_is_not_added() -> None:
    draft = ProgramDraft(UNEVEN)
    x = tokens(draft, rows=3)
    with pytest.raises(NoSite):
        draft.typed_call("tensor_cast::reduce_scatter", x, 0, RANK, DraftGroup("tp"))
    assert len(draft) == 1
    draft.typed_call("tensor_cast::reduce_scatter", x, 1, RANK, DraftGroup("tp"))


def test_members_of_a_group_contribute_equal_shapes() -> None:
    draft = ProgramDraft(TP2)
    x = tokens(draft, rows=3, sharded=True)
    with pytest.raises(NoSite):
        draft.typed_call(ALL_REDUCE, x, RANK, DraftGroup("tp"))
    draft.typed_call(ALL_REDUCE, x, RANK, PerRank("alone", lambda rank: [rank]))


def test_check_raises_for_what_an_edit_has_broken() -> None:
    draft = ProgramDraft(TP2)
    x = tokens(draft)
    made = draft.call("aten::view", x, [8, 4])
    draft.check(made)
    draft.change(made, args=(x, [5, 5]))
    with pytest.raises(ShapeError):
        draft.check(made)


def test_readers_are_redirected_but_for_what_the_new_value_reads() -> None:
    draft = ProgramDraft(TP2)
    x = tokens(draft)
    total = draft.call(ALL_REDUCE, x, RANK, DraftGroup("tp"))
    end = draft.call("tensor_cast::gelu", total)
    draft.behind = total
    between = draft.call("tensor_cast::silu", total)
    draft.redirect(total, between)
    assert names(draft, end) == ["all_reduce", "silu", "gelu"]


def test_a_step_behind_a_value_runs_before_its_other_readers() -> None:
    draft = ProgramDraft(TP2)
    x = tokens(draft)
    total = draft.call(ALL_REDUCE, x, RANK, DraftGroup("tp"))
    end = draft.call("tensor_cast::gelu", total)
    draft.behind = total
    written = draft.call("aten::add_.Tensor", total, 0.5)
    draft.change(written, on=total)
    assert names(draft, end) == ["all_reduce", "add_", "gelu"]


def test_a_write_into_what_is_not_needed_is_dropped() -> None:
    draft = ProgramDraft(TP2)
    x, other = tokens(draft), tokens(draft)
    total = draft.call("aten::clone", other)
    draft.change(draft.call("aten::add_.Tensor", total, 0.5), on=total)
    assert names(draft, draft.call("tensor_cast::gelu", x)) == ["gelu"]


def test_a_copy_is_changed_apart() -> None:
    draft = ProgramDraft(TP2)
    x = tokens(draft)
    made = draft.call("tensor_cast::gelu", x)
    trial = fork(draft)
    trial.change(made, op="tensor_cast::silu")
    assert (names(draft, made), names(trial, made)) == (["gelu"], ["silu"])


def test_an_input_cannot_be_changed() -> None:
    draft = ProgramDraft(TP2)
    with pytest.raises(InternalError, match="an input of a draft cannot be changed"):
        draft.change(tokens(draft), args=())


def test_values_of_one_rank_constant() -> None:
    draft = ProgramDraft(TP2)
    x = tokens(draft)
    start = PerRank("start", lambda rank: 2 * rank)
    end = PerRank("end", lambda rank: 2 * rank + 2)
    program = draft.program(draft.call("aten::slice.Tensor", x, 0, start, end), 0, ())
    assert [binding.constants["start"] for binding in program.ranks] == [0, 2]
