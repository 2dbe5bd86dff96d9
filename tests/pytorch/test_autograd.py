"""Gradients of forward passes with collectives: sound ones pass, planted defects of PyTorch show, and so do known ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("torch.distributed", reason="this torch was built without torch.distributed")

from torch.distributed import _functional_collectives as functional

from tcverify.execution import ProcessGroupPool
from tcverify.program import Mesh, Program
from tcverify.pytorch.autograd import Autograd
from tcverify.pytorch.subjects import SUBJECTS
from tcverify.strategies import all_meshes
from tcverify.strategies.training.collectives import Forward, gradients_program
from tcverify.verification.verifier import Verdict, verify
from tests.sizes import crossed

if not SUBJECTS["autograd"].here:
    pytest.skip("functional collectives of this torch have no gradients", allow_module_level=True)

LINE = Mesh.grid({"tp": 2})
TURNED = all_meshes(3)[1]
GRID = all_meshes(4)[2]
RUNS = SUBJECTS["autograd"].draws["run"]


def program(*calls: str, mesh: Mesh = LINE, wanted: tuple[int, ...] = (0, 1), **options: Any) -> Program:
    forward = Forward(((4, 4), (4, 4)), wanted, calls)
    return replace(gradients_program(mesh, forward, seed=1), options={**forward.options(), **options})


def judged(*calls: str, **options: Any) -> Verdict:
    return verify(Autograd(), program(*calls, **options))


def refuted(*calls: str, **options: Any) -> set[str]:
    verdict = judged(*calls, **options)
    assert verdict.status == "refuted", verdict.doubts
    return {finding.kind for finding in verdict.findings}


SOUND = {
    "reduced": ("all_reduce tp sum 0", "tanh 2", "matmul 3 1"),
    "reduced together": ("all_reduce tp sum 0 1", "mul 2 3"),
    "of which one is read": ("all_reduce tp sum 0 1", "detach 2"),
    "gathered": ("all_gather tp 1 0", "square 2", "all_gather tp 0 1", "matmul 4 3"),
    "gathered together": ("all_gather tp 0 0 1", "mul 2 3", "total 4"),
    "scattered": ("all_gather tp 0 0", "relu 2", "reduce_scatter tp sum 0 3"),
    "scattered together": ("all_gather tp 0 0 1", "reduce_scatter tp sum 0 2 3", "transpose 4", "mul 6 5"),
    "scattered columns": ("all_gather tp 1 0", "reduce_scatter tp sum 1 2", "add 3 1"),
    "exchanged": ("all_gather tp 0 0", "all_to_all tp equal 2", "transpose 3", "first 4"),
    "in unequal parts": ("all_gather tp 0 0", "all_to_all tp rising 2", "square 3"),
    "by two readers": ("all_reduce tp sum 0", "square 2", "relu 2", "all_reduce tp sum 3", "mul 5 4"),
}


@pytest.mark.parametrize(("calls", "run"), crossed(SOUND, RUNS))
@pytest.mark.parametrize("mesh", [LINE, TURNED], ids=["line", "turned"])
def test_gradients_of_sums_and_moves_pass(calls: str, run: str, mesh: Mesh) -> None:
    verdict = judged(*SOUND[calls], run=run, mesh=mesh)
    assert verdict.status == "passed", verdict.doubts or verdict.findings


@pytest.mark.parametrize("run", RUNS)
def test_collectives_over_either_dim_of_a_mesh_pass(run: str) -> None:
    calls = ("all_reduce dp sum 0", "all_gather tp 1 2", "mul 3 3", "reduce_scatter tp sum 1 4", "all_reduce tp sum 5")
    verdict = judged(*calls, mesh=GRID, run=run, functions="autograd")
    assert verdict.status == "passed", verdict.doubts or verdict.findings


@pytest.mark.parametrize("op", ["avg", "max", "min"])
def test_other_reductions_pass_or_are_declined(op: str) -> None:
    for calls in (
        (f"all_reduce tp {op} 0",),
        (f"all_reduce tp {op} 0 1", "all_reduce tp sum 2", f"all_reduce tp {op} 4"),
    ):
        verdict = judged(*calls)
        if verdict.doubts:
            assert [(one.reason, "backward only supports" in one.detail) for one in verdict.doubts] == [
                ("declined", True)
            ]
        else:
            assert verdict.status == "passed", verdict.findings


def test_inputs_that_the_loss_does_not_depend_on_have_gradients_of_zeros() -> None:
    assert judged("all_reduce tp sum 0 1", "detach 2", wanted=(0,)).status == "passed"
    assert judged("detach 0", "all_reduce tp sum 2").status == "passed"


def test_what_lockstep_passes_also_passes_on_gloo(pool: Callable[[int], ProcessGroupPool]) -> None:
    verdict = verify(Autograd(), program(*SOUND["scattered columns"]), confirm=pool(2))
    assert verdict.status == "passed", verdict.doubts or verdict.findings
    assert verdict.executors == ["lockstep", "gloo"]


@pytest.mark.parametrize(
    "changes",
    [
        {"options": {}},
        {"calls": ("square 0",)},
        {"calls": ("matmul 0 1", "cube 0")},
        {"shapes": ((4, 4), (4, 2))},
        {"wanted": (1,)},
    ],
)
def test_graphs_that_are_no_gradients_are_declined(changes: dict[str, Any]) -> None:
    given = program("all_reduce tp sum 0", "mul 2 1")
    (doubt,) = verify(Autograd(), replace(given, options=changes.get("options", {**given.options, **changes}))).doubts
    assert doubt.reason == "declined"
    assert "forward" in doubt.detail


# --------------------------------------------------------------------------------------------------- planted defects


def planted(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Any], Any]) -> None:
    """Have a functional collective give something else."""
    usual = getattr(functional, name)

    def changed(*given: Any) -> Any:
        return change(usual(*given))

    monkeypatch.setattr(functional, name, changed)


@pytest.mark.parametrize("run", [run for run in RUNS if run != "nn"])
def test_a_gradient_that_is_lost_refutes(monkeypatch: pytest.MonkeyPatch, run: str) -> None:
    planted(monkeypatch, "all_gather_tensor", lambda made: made.detach())
    assert refuted("all_gather tp 1 0", run=run) == {"wrong-value"}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def test_a_gradient_that_is_summed_twice_refutes(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, "reduce_scatter_tensor", Doubled.apply)
    assert refuted("reduce_scatter tp sum 0 0") == {"wrong-value"}


def test_a_gradient_that_is_not_summed_over_the_ranks_refutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As code on tensor parallel has it, where all ranks compute the same loss and count it once."""

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor, group: Any) -> torch.Tensor:
            return functional.wait_tensor(torch.ops._c10d_functional.all_reduce(value, "sum", group.group_name))

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return grad, None

    monkeypatch.setattr(functional, "all_reduce", lambda value, op, group: Identity.apply(value, group))
    assert refuted("all_reduce tp sum 0") == {"wrong-value"}


# ----------------------------------------------------------------------------------------------- what torch itself does


@pytest.mark.parametrize("run", [run for run in RUNS if run != "nn"])
def test_a_broadcast_has_no_gradient(run: str) -> None:
    """A finding; its folder has a script."""
    assert refuted("broadcast tp first 0", run=run) == {"wrong-value"}


def test_gradients_of_the_older_collectives_ignore_the_reduction() -> None:
    """A finding; its folder has a script."""
    for calls in (("all_reduce tp max 0",), ("reduce_scatter tp avg 0 0",)):
        assert refuted(*calls, run="nn") == {"wrong-value"}


def test_the_older_broadcast_keeps_strides() -> None:
    """A finding; its folder has a script."""
    assert refuted("transpose 0", "broadcast tp first 2", "detach 3", run="nn") == {"rewritten-raises"}
