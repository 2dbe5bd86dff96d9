"""What diagnoses say of lowered resharding: which communication is wrong, and why, for planted defects."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tcverify.cases.fingerprint import fingerprint
from tcverify.execution import Lockstep
from tcverify.explain.diagnosis import Diagnosis, diagnose
from tcverify.explain.relations import relate
from tcverify.passes.resharding.host_program import HostProgram
from tcverify.passes.resharding.pipelined.gather import GATHER_FORMS
from tcverify.program import PlacedBuilder, Program
from tcverify.program.finding import Finding
from tcverify.verification.verifier import verify
from tests.support import resharding_defects as defects
from tests.support.pipelined_programs import gathered, scattered


def one(
    source: str, target: str, *, op: str | None = None, world: int = 4, shape: tuple[int, ...] = (12, 3)
) -> Program:
    """relu of a set, or of a reduction over dim 0."""
    b = PlacedBuilder(world)
    x = b.input("x", shape, source)
    return b.build(b.call("aten::relu", b.set(x, target) if op is None else b.reduce(x, 0, target, op)))


def diagnosed(program: Program, edit: defects.Edit, **options: object) -> tuple[Finding, Diagnosis]:
    verdict = verify(defects.planted(edit, **options), program)
    finding = next((f for f in verdict.findings if f.kind == "wrong-value"), verdict.findings[0])
    return finding, diagnose(program, verdict.pair.rewritten, finding)


CASES: list[tuple[Callable[[], Program], defects.Edit, str, str]] = [
    (
        lambda: one("[1, 0] shard(0)", "[1, 0] replicated"), defects.rank_order, "all_gather",
        "'all_gather' is the original's 'set_1' with its chunks along dim 0 in order [1, 0] on rank 0 over m0 [1, 0]: "
        "it gathers in the order of ranks [0, 1], where the layout of 'x' has [1, 0]",
    ),
    (
        lambda: one("[2] replicated", "[1, 0] shard(0)"), defects.scattered_in_rank_order, "scatter",
        "it divides in the order of ranks [0, 1], where the layout of 'set_1' has [1, 0]",
    ),
    (
        lambda: one("[0, 1] shard(0)", "[2] replicated", op="min", shape=(2, 3)), defects.zero_for_max, "full",
        "rank 2 has no part to reduce by 'min', and gives 0, which changes the result",
    ),
    (
        lambda: one("[0, 1, 2] shard(0)", "[0, 1, 2] replicated", op="max", shape=(3, 5)), defects.other_reduction,
        "all_reduce", "it reduces by 'min', where the original reduces by 'max'",
    ),
    (
        lambda: one("[0, 1] shard(0)", "[2, 3] shard(0)"), defects.crossed_pairs, "recv",
        "it comes from rank 1, where rank 0 has this part of 'x'",
    ),
    (
        lambda: one("[0, 1] shard(0)", "[2, 3] replicated"), defects.last_receiver_forgotten, "empty",
        "nothing writes into it, where the original has 'set_1'",
    ),
    (
        lambda: gathered(2, (1, 0), 3), defects.next_chunk, "copy__1",
        "is chunk [0] of the original's 'matmul': it is written to where chunk [1] of 'matmul' belongs",
    ),
    (
        lambda: gathered(2, (1, 0), 3), defects.lost_chunk, "empty_1",
        "nothing writes into it at 2 along dim 0, where the original has 'matmul'",
    ),
    (
        lambda: one("[0, 1, 2] shard(0)", "[0, 1, 2] replicated", op="sum", shape=(3, 5)), defects.sharded_team,
        "all_reduce", "its team [2] lacks ranks 0, 1, which hold a part of 'x'",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("make", "edit", "node", "words"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_the_cause_is_told(make: Callable[[], Program], edit: defects.Edit, node: str, words: str) -> None:
    _, found = diagnosed(make(), edit)
    assert found.first is not None
    assert (found.first.node, words in str(found.first)) == (node, True), str(found.first)


def test_an_addend_that_another_rank_doubles() -> None:
    program = one("[0, 1] shard(0)", "[0, 1] replicated", op="sum", shape=(2, 5))
    _, found = diagnosed(program, defects.wrong_addend)
    assert found.first is not None
    assert str(found.first) == (
        "'all_reduce' is the original's 'reduce' on rank 0, with the addend 'x' of rank 1 counted 2 times over m0 [0, 1]"
    )


def test_a_long_way_to_a_communication() -> None:
    program = one("[0, 1] shard(0)", "[0, 1] replicated", op="sum", shape=(2, 5))
    verdict = verify(defects.planted(defects.long_way), program, checks=["equivalence"])
    found = diagnose(program, verdict.pair.rewritten, verdict.findings[0]).first
    assert found is not None
    assert found.node == "neg_default"
    assert "the negative of" in found.relation.text


def test_memory_that_is_read_after_it_is_freed() -> None:
    _, found = diagnosed(one("[0, 1] shard(0)", "[0, 1] replicated"), defects.freed_early)
    assert found.first is not None
    assert str(found.first) == "'relu' raises: it reads 'empty', which 'deallocate_default' has freed"


def test_pipelined_in_a_wrong_order_names_the_first_trip() -> None:
    _, found = diagnosed(gathered(3, (1, 0, 2), 2), defects.rank_order)
    assert found.first is not None
    assert found.first.node == "all_gather"
    assert "it gathers in the order of ranks [0, 1, 2], where the layout of 'a' has [1, 0, 2]" in str(found.first)


SOUND = [
    *(lambda form=form: (gathered(3, (1, 0, 2), 2), {"form": form}) for form in GATHER_FORMS),
    lambda: (scattered(2, (1, 0), 2), {}),
    lambda: (one("[1, 0] shard(0)", "[1, 0] replicated"), {}),
    lambda: (one("[0, 1] shard(0)", "[2, 0] replicated"), {}),
    lambda: (one("[0, 1] shard(0)", "[2] replicated", op="max", shape=(2, 3)), {}),
    lambda: (one("[0, 1] shard(0)", "[2] replicated", op="avg", shape=(4, 3)), {}),
    lambda: (one("[0, 1, 3] shard(0)", "[0, 1, 3] replicated", op="sum"), {}),
    lambda: (one("[0, 1] shard(0)", "[0, 1] shard(1)", shape=(4, 6)), {}),
    lambda: (one("[0, 1] shard(0)", "[2, 3] shard(0)"), {}),
]


@pytest.mark.parametrize("make", SOUND)
def test_of_sound_lowerings_nothing_is_said(make: Callable[[], tuple[Program, dict[str, object]]]) -> None:
    program, options = make()
    verdict = verify(HostProgram(**options), program)  # type: ignore[arg-type]
    assert verdict.status == "passed"
    assert verdict.pair.rewritten is not None
    for rank in range(program.world_size):
        finding = Finding("wrong-value", "equivalence", "", "", None, rank, {"label": "output 0"})
        found = diagnose(program, verdict.pair.rewritten, finding)
        assert found.first is None, str(found.first)


@pytest.mark.parametrize("form", ["collective", "broadcast"])
def test_every_value_of_a_sound_pipeline_is_explained(form: str) -> None:
    program = gathered(2, (1, 0), 2)
    rewritten = verify(HostProgram(form=form), program).pair.rewritten
    assert rewritten is not None
    before, after = (Lockstep().run(p, observe=True) for p in (program, rewritten))
    for rank in range(2):
        relations = relate(program, before, rewritten, after, rank)
        assert all(relation.explained for relation in relations.values())
        assert relations["empty"].text == "equal to the original's 'set_1'"
        assert relations["empty_1"].text == "equal to the original's 'matmul'"


APART: list[tuple[Callable[[], Program], defects.Edit, str]] = [
    (
        lambda: one("[0, 1] shard(0)", "[2, 3] shard(0)"), defects.send_forgotten,
        "'recv' is posted by rank 2, but rank 0 posts no send to rank 2",
    ),
    (
        lambda: one("[0, 1] shard(0)", "[2, 3] replicated"), defects.gather_forgotten,
        "'gather_1' is posted by rank 0, but rank 1 posts no gather of team [0, 1, 3]",
    ),
    (
        lambda: one("[0] replicated", "[1, 2] replicated"), defects.own_root,
        "'broadcast' is not what ranks 1, 0 post: its root is rank 1, which has no part of 'x': its mesh is [0]",
    ),
    (
        lambda: one("[0, 1] shard(0)", "[2, 0, 1] replicated"), defects.turned_round,
        "'gather' is what rank 0 calls next, where rank 1 calls 'gather_1' first",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("make", "edit", "sentence"), APART, ids=lambda value: getattr(value, "__name__", None))
def test_ranks_that_do_not_meet(make: Callable[[], Program], edit: defects.Edit, sentence: str) -> None:
    finding, found = diagnosed(make(), edit)
    assert finding.kind in ("deadlock", "collective-mismatch")
    assert str(found.first) == sentence


def test_a_defect_has_one_fingerprint_whatever_the_sizes() -> None:
    found = set()
    for program in (
        one("[1, 0] shard(0)", "[1, 0] replicated"),
        one("[2, 0, 1] shard(0)", "[2, 0, 1] replicated", shape=(3, 2)),
        gathered(2, (1, 0), 2),
        gathered(3, (1, 0, 2), 1),
    ):
        verdict = verify(defects.planted(defects.rank_order), program)
        (finding,) = (f for f in verdict.findings if f.kind == "wrong-value")
        found.add(fingerprint(program, verdict.pair.rewritten, finding))
    assert found == {"all_gather: order of ranks"}
