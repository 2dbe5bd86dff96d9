"""Sequence parallelism on what compilers are given of tensor-parallel models: it fires, and keeps what they compute."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tcverify.capturing import UserFacts, load
from tcverify.execution import ProcessGroupPool
from tcverify.passes import SequenceParallel
from tcverify.passes.editing import op_name
from tcverify.program import REPLICATED, VARYING, Mesh, Placement, Program
from tcverify.verification.verifier import verify

MODELS = Path(__file__).parents[2] / "support" / "captured_llama.py"
TP2, GRID = Mesh.grid({"tp": 2}), Mesh.grid({"dp": 2, "tp": 2})
SCATTER, GATHER, REDUCE, WAIT = (
    f"_c10d_functional::{name}"
    for name in ("reduce_scatter_tensor", "all_gather_into_tensor", "all_reduce", "wait_tensor")
)


SLOW = pytest.mark.slow


@cache
def captured(model: str, mesh: Mesh = TP2) -> Program:
    """The program of all ranks. Over dp, where there is one, the ids vary."""
    placements: dict[str, dict[str, Placement]] = {"*": {"tp": REPLICATED}}
    if mesh is GRID:
        ids = next(spec.name for spec in captured(model, TP2).inputs if not spec.dtype.is_floating_point)
        placements[ids] = {"dp": VARYING}
    return load([f"{MODELS}:{model}"], UserFacts(mesh=mesh, placements=placements)).program


def rewritten(program: Program, rank: int = 0) -> tuple[dict[str, int], list[str]]:
    """How often each pattern fires on a rank, and the ops behind it."""
    pass_ = SequenceParallel()
    gm = pass_(program.graph_module(rank))
    return pass_.rewrites, [op_name(node) for node in gm.graph.nodes if node.op == "call_function"]


def assert_all_move(program: Program) -> None:
    """Two layers have four sums; each is followed by a norm, and no residual between is gathered."""
    for rank in range(program.world_size):
        rewrites, ops = rewritten(program, rank)
        assert rewrites == {"P1": 0, "P2": 0, "P3": 4, "P4": 0, "P5": 0}
        counted = Counter(ops)
        assert (counted[SCATTER], counted[GATHER], counted[REDUCE], counted[WAIT]) == (4, 4, 0, 8)


@pytest.mark.parametrize(
    "model",
    ["module_norm", "bf16_weight_last", *(pytest.param(m, marks=SLOW) for m in ("taken_apart", "bf16", "over_batch"))],
)
def test_every_sum_of_a_captured_model_moves(model: str) -> None:
    program = captured(model)
    assert_all_move(program)
    verdict = verify(SequenceParallel, program)
    assert (verdict.status, verdict.changed) == ("passed", True), verdict.doubts


@pytest.mark.parametrize("model", ["module_norm", pytest.param("bf16_weight_last", marks=SLOW)])
def test_on_a_process_group(model: str) -> None:
    with ProcessGroupPool(2) as pool:
        verdict = verify(SequenceParallel, captured(model), confirm=pool, deep=True)
    assert verdict.status == "passed", verdict.doubts
    assert len(verdict.executors) == 2


@SLOW
def test_two_of_data_parallelism_with_ids_of_their_own() -> None:
    program = captured("grid", GRID)
    assert_all_move(program)
    with ProcessGroupPool(4) as pool:
        verdict = verify(SequenceParallel, program, confirm=pool)
    assert verdict.status == "passed", verdict.doubts
    assert len(verdict.executors) == 2


@pytest.mark.parametrize("domain", ["exact", "native"])
def test_in_other_domains(domain: str) -> None:
    verdict = verify(SequenceParallel, captured("bf16"), domain=domain)
    assert verdict.status == "passed", verdict.doubts


def test_a_kernel_for_attention_hides_nothing() -> None:
    program = captured("kernel")
    assert any("flash_attention" in op for op in rewritten(program)[1])
    assert_all_move(program)
    verdict = verify(SequenceParallel, program)
    assert verdict.status == "passed", verdict.doubts


def test_tokens_that_the_group_does_not_divide_are_left_alone() -> None:
    program = captured("uneven")
    assert sum(rewritten(program)[0].values()) == 0
    assert verify(SequenceParallel, program).status == "passed"


def test_a_graph_with_its_backward_pass_keeps_its_meaning() -> None:
    """The backward pass reads what is inside the norms, so they stay."""
    program = captured("training")
    assert rewritten(program)[1].count(REDUCE) >= 8
    verdict = verify(SequenceParallel, program)
    assert verdict.status == "passed", verdict.doubts
