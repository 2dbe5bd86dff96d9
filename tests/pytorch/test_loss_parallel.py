"""The parallel loss of DTensor: it passes where it is sound, planted defects of it show, and so do the known ones of torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import find, settings
from torch.nn import functional as F

pytest.importorskip("torch.distributed.tensor.parallel", reason="this torch was built without torch.distributed")

from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss as loss_module

from tcverify.execution import Lockstep, ProcessGroupPool
from tcverify.program import GraphBuilder, Mesh, Program, spmd_program
from tcverify.pytorch.loss_parallel import LossParallel
from tcverify.strategies import cross_entropy_programs
from tcverify.strategies.dtensor.losses import WIDTH, Loss, decode_loss, loss_program
from tcverify.verification.verifier import verify

LINE = Mesh.grid({"tp": 2})
GRID = Mesh.grid({"dp": 2, "tp": 2})


def program(mesh: Mesh = LINE, rows: str = "R", **facts: Any) -> Program:
    loss = Loss(**{"shape": (5, 3), "reduction": "sum", "ignored": -100, "masked": False, "weighted": False, **facts})
    by_rows = [rows] * (len(mesh.dims) - 1)
    placed = {"logits": [*by_rows, f"S{loss.classes}"], "target": [*by_rows, "R"], "mask": [*by_rows, "R"]}
    names = [spec.name for spec in loss.inputs]
    return loss_program(mesh, loss, {name: ",".join(each) for name, each in placed.items() if name in names})


def refuted(given: Program) -> set[str]:
    verdict = verify(LossParallel(), given)
    assert verdict.status == "refuted", verdict.doubts
    return {finding.kind for finding in verdict.findings}


SOUND: dict[str, dict[str, Any]] = {
    "mean": {"reduction": "mean"},
    "each": {"reduction": "none"},
    "of one row": {"shape": (4,), "reduction": "mean"},
    "sequences": {"shape": (2, 5, 3)},
    "weights": {"weighted": True, "reduction": "mean"},
    "ignored": {"masked": True, "reduction": "mean"},
    "an ignored class, with weights": {"masked": True, "weighted": True, "ignored": 1},
}


@pytest.mark.parametrize("facts", SOUND.values(), ids=SOUND)
def test_sound_losses_pass(facts: dict[str, Any]) -> None:
    verdict = verify(LossParallel(), program(**facts))
    assert verdict.status == "passed", verdict.doubts or verdict.findings
    assert verdict.changed


@pytest.mark.parametrize("rows", ["R", "S0"])
def test_rows_may_be_sharded_over_other_dims(rows: str) -> None:
    verdict = verify(LossParallel(), program(GRID, rows))
    if verdict.doubts:  # before 2.12, meshes have to have one dim
        assert [doubt.reason for doubt in verdict.doubts] == ["declined"]
    else:
        assert verdict.status == "passed", verdict.findings


@pytest.mark.parametrize("left", ["nll_loss_backward", "_log_softmax_backward_data", "nll_loss_forward"])
def test_the_gradient_of_a_part_is_declined(left: str) -> None:
    whole = program()

    def build(b: GraphBuilder) -> Any:
        logits, target, grad = map(b.input, ("logits", "target", "grad"))
        if left == "_log_softmax_backward_data":
            return b.call("aten::_log_softmax_backward_data", logits, logits, 1, torch.float32)
        softmax = b.call("aten::_log_softmax", logits, 1, False) if left == "nll_loss_backward" else logits
        parts = b.call("aten::nll_loss_forward", softmax, target, None, 2, -100)
        total = b.getitem(parts, 1)
        return b.call("aten::nll_loss_backward", grad, softmax, target, None, 2, -100, total)

    given = replace(spmd_program(LINE, whole.inputs, build), options=whole.options)
    (doubt,) = verify(LossParallel(), given).doubts
    assert (doubt.reason, "cross entropy" in doubt.detail) == ("declined", True)


def test_logits_that_are_not_sharded_on_classes_are_declined() -> None:
    for options in ({}, {"logits": "S0"}, {"logits": "S1", "target": "S0"}):
        (doubt,) = verify(LossParallel(), replace(program(), options=options)).doubts
        assert doubt.reason == "declined", doubt


def test_a_mean_over_several_dims_is_declined() -> None:
    verdict = verify(LossParallel(), program(GRID, reduction="mean"))
    assert [doubt.reason for doubt in verdict.doubts] == ["declined"]


def test_what_lockstep_passes_also_passes_on_gloo(pool: Callable[[int], ProcessGroupPool]) -> None:
    verdict = verify(LossParallel(), program(), confirm=pool(2))
    assert verdict.status == "passed", verdict.doubts or verdict.findings
    assert verdict.executors == ["lockstep", "gloo"]


def test_programs_compute_cross_entropy_and_its_gradient() -> None:
    given = program(weighted=True, masked=True, reduction="mean")
    logits, target, mask, weight, grad = given.values(0)
    run = Lockstep().run(given)
    assert run.finished, run.why
    logits = logits.double().requires_grad_()
    expected = F.cross_entropy(logits, torch.where(mask, target, -100), weight.double())
    found, gradient = run.ranks[0].outputs
    torch.testing.assert_close(found.double(), expected.detach())
    torch.testing.assert_close(gradient.double(), torch.autograd.grad(expected, logits, grad.double())[0])


# --------------------------------------------------------------------------------------------------- planted defects


def test_sums_of_shards_alone_refute(monkeypatch: pytest.MonkeyPatch) -> None:
    def local(x: torch.Tensor, dim: int, *others: Any) -> torch.Tensor:
        return torch.log_softmax(x, dim)

    monkeypatch.setattr(loss_module, "_log_softmax", local)
    assert refuted(program()) == {"wrong-value"}


def test_gradients_of_other_classes_refute(monkeypatch: pytest.MonkeyPatch) -> None:
    backward = loss_module._nll_loss_and_log_softmax_backward

    def turned(*given: Any) -> torch.Tensor:
        return backward(*given).flip(1)

    monkeypatch.setattr(loss_module, "_nll_loss_and_log_softmax_backward", turned)
    assert refuted(program(shape=(5, 4))) == {"wrong-value"}


def test_what_raises_does_not_leave_it_enabled() -> None:
    handlers = DTensor._op_dispatcher._custom_op_handlers
    before = dict(handlers)
    assert refuted(program(Mesh.grid({"tp": 3}), shape=(2, 2, 1, 2))) == {"pass-raised"}
    assert handlers == before


# ----------------------------------------------------------------------------------------------- what torch itself does


def test_gradients_of_pixels_change_places() -> None:
    """A finding; its folder has a script. Of one row of pixels, they do not."""
    assert refuted(program(shape=(1, 2, 2, 3))) == {"wrong-value"}
    assert verify(LossParallel(), program(shape=(1, 2, 1, 3))).status == "passed"


def test_weights_of_ignored_targets_are_read() -> None:
    """A finding; its folder has a script."""
    assert refuted(program(shape=(8, 2), masked=True, weighted=True)) == {"rewritten-raises"}


def test_ranks_without_classes_disagree_with_the_others() -> None:
    """A finding; its folder has a script."""
    assert "collective-mismatch" in refuted(program(Mesh.grid({"tp": 3}), shape=(2, 2)))


# ----------------------------------------------------------------------------------------------------------- strategy


@pytest.mark.parametrize(
    "wanted",
    [
        lambda facts: facts["reduction"] == "mean" and facts["weighted"],
        lambda facts: facts["masked"] and facts["ignored"] >= 0,
        lambda facts: len(facts["shape"]) == 4 and min(facts["shape"][2:]) > 1,
        lambda facts: len(facts["shape"]) == 1,
        lambda facts: facts["shape"][-1] < 3 and facts["reduction"] == "none",
    ],
)
def test_losses_of_all_kinds_are_drawn(wanted: Callable[[dict[str, Any]], bool]) -> None:
    def has(given: Program) -> bool:
        specs = {spec.name: spec for spec in given.inputs}
        text = next(node for node in given.graphs[0].nodes if "nll_loss" in str(node.target)).args
        return wanted(
            {
                "shape": specs["logits"].shape, "weighted": "weight" in specs, "masked": "mask" in specs,
                "reduction": ("none", "mean", "sum")[text[3]], "ignored": text[4],
            }
        )  # fmt: skip

    assert has(find(cross_entropy_programs(), has, settings=settings(max_examples=2000, database=None)))


def test_all_bytes_decode_into_losses() -> None:
    for choices in (b"", bytes(WIDTH), b"\xff" * WIDTH, bytes(range(100, 100 + WIDTH))):
        for mesh in (LINE, GRID, Mesh.grid({"tp": 3})):
            assert Lockstep().run(decode_loss(mesh, choices)).finished
