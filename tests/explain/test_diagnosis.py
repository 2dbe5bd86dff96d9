"""Diagnosis: where two versions diverge, and how values relate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import fx

from tcverify.explain.diagnosis import Diagnosis, diagnose, diagnosing
from tcverify.program import PARTIAL, Finding, GraphBuilder, InputSpec, Mesh, MeshDim, Program, shard, spmd_program

MESH = Mesh.grid({"tp": 2})
INPUTS = (
    InputSpec("x", (4, 6)),
    InputSpec("addend", (4, 6), placements=(("tp", PARTIAL),)),
    InputSpec("part", (4, 6), placements=(("tp", shard(0)),)),
)
Build = Callable[[GraphBuilder, fx.Node, fx.Node, fx.Node], object]
WRONG = Finding("wrong-value", "equivalence", "output 0 is wrong", "", None, 0, {"label": "output 0"})


def program(build: Build, mesh: Mesh = MESH) -> Program:
    def with_inputs(b: GraphBuilder) -> object:
        return build(b, b.input("x"), b.input("addend"), b.input("part"))

    return spmd_program(mesh, INPUTS, with_inputs, seed=5)


def silu(b: GraphBuilder, value: fx.Node) -> fx.Node:
    return b.call("aten::silu", value)


def reduced(b: GraphBuilder, value: fx.Node) -> fx.Node:
    return b.call("tensor_cast::all_reduce", value, b.rank, b.group("tp"))


def gathered(b: GraphBuilder, value: fx.Node, group: list[int] | None = None) -> fx.Node:
    return b.call("tensor_cast::all_gather", value, 0, b.rank, group or b.group("tp"))


def scattered(b: GraphBuilder, value: fx.Node) -> fx.Node:
    return b.call("tensor_cast::reduce_scatter", value, 0, b.rank, b.group("tp"))


def chunk(b: GraphBuilder, value: fx.Node, position: Callable[[int], int]) -> fx.Node:
    start = b.constant("start", lambda rank: 2 * position(rank))
    end = b.constant("end", lambda rank: 2 * position(rank) + 2)
    return b.call("aten::slice.Tensor", value, 0, start, end)


def look(before: Build, after: Build, finding: Finding = WRONG) -> Diagnosis:
    return diagnose(program(before), program(after), finding)


RELATIONS: dict[str, tuple[Build, Build, str]] = {
    "equal": (lambda b, x, a, p: silu(b, x), lambda b, x, a, p: silu(b, x), "equal to the original's 'silu'"),
    "reshaped": (
        lambda b, x, a, p: silu(b, x),
        lambda b, x, a, p: b.call("aten::view", silu(b, x), [6, 4]),
        "the original's 'silu' in another shape",
    ),
    "shard": (
        lambda b, x, a, p: reduced(b, a),
        lambda b, x, a, p: scattered(b, a),
        "a shard of the original's 'all_reduce' along dim 0 over tp [0, 1]",
    ),
    "gathered": (
        lambda b, x, a, p: silu(b, p),
        lambda b, x, a, p: silu(b, gathered(b, p)),
        "the original's 'silu' gathered along dim 0 over tp [0, 1]",
    ),
    "partial": (
        lambda b, x, a, p: b.call("aten::neg", reduced(b, a)),
        lambda b, x, a, p: b.call("aten::neg", a),
        "a partial sum of the original's 'neg' over tp [0, 1]",
    ),
    "reduced": (
        lambda b, x, a, p: b.call("aten::neg", a),
        lambda b, x, a, p: b.call("aten::neg", reduced(b, a)),
        "the sum of the original's 'neg' over tp [0, 1]",
    ),
    "scaled": (
        lambda b, x, a, p: silu(b, x),
        lambda b, x, a, p: reduced(b, silu(b, x)),
        "2 times the original's 'silu' over tp [0, 1]",
    ),
    "wrong-shard": (
        lambda b, x, a, p: silu(b, x),
        lambda b, x, a, p: chunk(b, silu(b, x), lambda rank: 1 - rank),
        "shard 1 of the original's 'silu' along dim 0 on rank 0, whose position over tp [0, 1] is 0",
    ),
    "permuted": (
        lambda b, x, a, p: silu(b, x),
        lambda b, x, a, p: gathered(b, chunk(b, silu(b, x), lambda rank: rank), [1, 0]),
        "the original's 'silu' with its chunks along dim 0 in order [1, 0] on rank 0 over tp [0, 1]",
    ),
    "unrelated": (
        lambda b, x, a, p: silu(b, x),
        lambda b, x, a, p: b.call("aten::tanh", silu(b, x)),
        "unrelated to any value of the original near it",
    ),
}


@pytest.mark.parametrize("kind", RELATIONS)
def test_relations_are_recognised(kind: str) -> None:
    before, after, text = RELATIONS[kind]
    found = list((look(before, after).relations or {}).values())[-1]
    assert (found.kind, found.text) == (kind, text)


def test_it_is_on_the_rank_where_the_value_is_wrong() -> None:
    before: Build = lambda b, x, a, p: silu(b, x)  # noqa: E731
    after: Build = lambda b, x, a, p: gathered(b, chunk(b, silu(b, x), lambda rank: 0))  # noqa: E731
    found = look(before, after)
    assert found.rank == 1
    assert "is shard 0 of the original's 'silu' along dim 0 on rank 1" in str(found.first)


def test_unexplained_values_that_lead_to_explained_ones_are_not_where_it_diverges() -> None:
    def after(b: GraphBuilder, x: fx.Node, addend: fx.Node, part: fx.Node) -> object:
        doubled = b.call("aten::mul.Tensor", x, 3.0)
        halved = b.call("aten::div.Tensor", doubled, 3.0)
        return b.call("aten::mul.Tensor", silu(b, halved), 5.0)

    found = look(lambda b, x, a, p: silu(b, x), after)
    assert found.first is not None
    assert found.first.node == "mul_1"


def test_an_output_that_is_explained_but_another_value_is_where_it_diverges() -> None:
    found = look(lambda b, x, a, p: reduced(b, a), lambda b, x, a, p: scattered(b, a))
    assert str(found.first).startswith(
        "output 0 returns 'reduce_scatter', which is a shard of the original's 'all_reduce'"
    )


def test_a_part_that_is_taken_in_the_order_of_another_group_is_where_it_diverges() -> None:
    """And not the all_gather behind it, which puts the parts together in the order of its own group."""
    ranks = Mesh(2, (MeshDim("turned", ((1, 0),)), MeshDim("tp", ((0, 1),))))

    def after(b: GraphBuilder, x: fx.Node, addend: fx.Node, part: fx.Node) -> object:
        return gathered(b, silu(b, chunk(b, reduced(b, addend), lambda rank: 1 - rank)))

    found = diagnose(program(lambda b, x, a, p: silu(b, reduced(b, a)), ranks), program(after, ranks), WRONG)
    assert str(found.first).endswith(": it is divided over [1, 0], where the original has 'all_reduce' from [0, 1]")


def test_it_tells_what_is_read_in_place_of_what_the_original_reads() -> None:
    found = look(lambda b, x, a, p: silu(b, reduced(b, a)), lambda b, x, a, p: silu(b, a))
    assert str(found.first) == (
        "'silu' is unrelated to the original's 'silu': "
        "it reads 'addend', a partial sum of the original's 'all_reduce' over tp [0, 1]"
    )


def test_ranks_that_wait_for_ever_tell_how_far_they_came() -> None:
    def build(b: GraphBuilder, x: fx.Node, addend: fx.Node, part: fx.Node) -> object:
        return b.call("tensor_cast::all_gather", silu(b, x), b.constant("dim", lambda rank: rank), b.rank, [0, 1])

    found = look(lambda b, x, a, p: silu(b, x), build, Finding("collective-mismatch", "collectives", "dims", rank=1))
    assert list(found.relations or {}) == ["x", "addend", "part", "silu"]


def test_programs_that_are_too_large_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosing, "MAX_ELEMENTS", 100)
    found = look(lambda b, x, a, p: silu(b, x), lambda b, x, a, p: silu(b, x))
    assert found.before is found.after is found.first is None
    assert "too large to keep every value" in found.why


def test_a_program_that_ended_a_run_is_not_run() -> None:
    died = replace(WRONG, kind="run-died")
    assert diagnose(program(lambda b, x, a, p: silu(b, x)), None, died).before is None
