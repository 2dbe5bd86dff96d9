"""Tensor parallelism as a subject, alone and under FSDP2: it passes where it is sound, and planted defects of it show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("torch.distributed.fsdp", reason="this torch was built without torch.distributed")

from torch.distributed import fsdp
from torch.distributed.tensor import DTensor

from tcverify.application.apply import apply_pass
from tcverify.application.loading import load_pass
from tcverify.execution import ProcessGroupPool
from tcverify.ops import qualified_name
from tcverify.program import VARYING, Mesh, Placement, Program
from tcverify.pytorch.subjects import release
from tcverify.pytorch.tensor_parallel import TensorParallel
from tcverify.strategies.training.data_parallel import data_parallel_program, tensor_parallel_grid
from tcverify.strategies.training.model import TrainingStep
from tcverify.verification.verifier import Verdict, verify
from tests.sizes import by_night, crossed

if release(torch.__version__) < (2, 10):
    pytest.skip("this torch does not tell how process groups reduce", allow_module_level=True)

STAGES = ("linear tanh", "reversed scale mm", "skip tied two", "mm")
ALONE, UNEVEN, UNDER, REPLICAS = (tensor_parallel_grid(size, dims) for size, dims in ((2, 1), (3, 1), (4, 2), (8, 2)))

#: `fully_shard` of torch takes dims of a mesh.
takes_dims = pytest.mark.skipif(
    not hasattr(fsdp, "DataParallelMeshDims"), reason="fully_shard of this torch takes no dims of a mesh"
)


def program(mesh: Mesh, **facts: Any) -> Program:
    step = TrainingStep(**{"stages": STAGES, "microbatches": 2, "rows": 2, "scale_grads": False, **facts})
    return replace(data_parallel_program(mesh, step), options=step.options())


def judged(given: Program, **options: Any) -> Verdict:
    return verify(TensorParallel(**options), given)


def collectives(given: Program, **options: Any) -> list[tuple[str, str]]:
    """The collectives that rank 0 starts, each with its group."""
    subject = load_pass("tcverify.pytorch.tensor_parallel:TensorParallel", options)
    nodes = apply_pass(subject, given).rewritten.graphs[0].nodes
    names = {dim.name for dim in given.mesh.dims}
    named = [(qualified_name(node.target), node.args) for node in nodes if node.op == "call_function"]
    return [(name, group) for name, args in named for group in args if isinstance(group, str) and group in names]


LAYOUTS: list[dict[str, Any]] = [
    {"weights": "S0", "activations": "R"},
    {"weights": "S1", "activations": "S0", "parts": "model"},
    {"weights": "mixed", "activations": "S1", "parts": "loss"},
    {"weights": "R", "activations": "S0", "recompute": True},
]


@pytest.mark.parametrize(("layout", "mesh"), crossed(LAYOUTS, [UNDER, ALONE, UNEVEN]))
def test_training_on_sharded_parameters_computes_the_same(mesh: Mesh, layout: dict[str, Any]) -> None:
    verdict = judged(program(mesh, frozen=(1,), passes=2), **layout)
    assert verdict.status == "passed", verdict.doubts or verdict.findings


def test_replicas_of_shards_of_shards_compute_the_same() -> None:
    verdict = judged(program(REPLICAS), weights="mixed", activations="S0")
    assert verdict.status == "passed", verdict.doubts or verdict.findings


@takes_dims
@pytest.mark.parametrize(("mesh", "whole"), [(UNDER, "shard"), (UNDER, "replicate"), (REPLICAS, "shard")])
def test_parameters_may_be_distributed_over_the_whole_mesh(mesh: Mesh, whole: str) -> None:
    for layout in LAYOUTS[
        : 1 if mesh is REPLICAS else by_night(len(LAYOUTS), 2)
    ]:  # on eight ranks DTensor takes seconds
        verdict = judged(program(mesh, stages=("linear tanh", "skip two", "scale mm")), whole=whole, **layout)
        assert verdict.status == "passed", verdict.doubts or verdict.findings


@pytest.mark.parametrize(
    "options", [{}, {"sync": "last", "keep": True, "units": "pairs"}, {"dim": 1, "reshard": False}]
)
def test_options_of_fully_shard_compute_the_same(options: dict[str, Any]) -> None:
    verdict = judged(program(UNDER, steps=2, optimizer="sgd", clip="2"), weights="mixed", **options)
    assert verdict.status == "passed", verdict.doubts or verdict.findings


def test_what_lockstep_passes_also_passes_on_gloo(pool: Callable[[int], ProcessGroupPool]) -> None:
    verdict = verify(TensorParallel(weights="mixed"), program(UNDER), confirm=pool(4))
    assert verdict.status == "passed", verdict.doubts or verdict.findings
    assert verdict.executors == ["lockstep", "gloo"]


def test_options_decide_what_is_communicated() -> None:
    given = program(UNDER, stages=("mm", "mm"))
    groups = {group for _, group in collectives(given)}
    assert groups == {"dp", "tp"}
    assert {group for _, group in collectives(given, weights="R")} == {"dp"}
    rows = [name for name, group in collectives(given, weights="R", activations="S0") if group == "tp"]
    assert any("all_gather" in name for name in rows)


# --------------------------------------------------------------------------------------------------- planted defects


def test_gradients_that_stay_partial_refute(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    def left(self: Any, grad: Any) -> Any:
        return grad._local_tensor if isinstance(grad, DTensor) else grad

    monkeypatch.setattr(FSDPParam, "_get_grad_inner_tensor", left)
    verdict = judged(program(UNDER, stages=("scale", "mm")), weights="R", activations="S0")
    assert {finding.kind for finding in verdict.findings} == {"wrong-value"}


def test_shards_in_the_order_of_the_mesh_refute(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP shards what tensor parallelism has sharded: reading the result as if it had been first exchanges rows."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param
    from torch.distributed.tensor import Shard

    monkeypatch.setattr(_fsdp_param, "_StridedShard", lambda dim, split_factor: Shard(dim))
    verdict = judged(program(UNDER, stages=("mm",)), weights="S0")
    assert {finding.kind for finding in verdict.findings} == {"wrong-value"}


# ----------------------------------------------------------------------------------------------- what is not verified


def test_what_tensor_parallelism_does_not_take_is_declined() -> None:
    for given, why in [
        (program(Mesh.grid({"dp": 2})), "no dim 'tp'"),
        (program(Mesh.grid({"a": 1, "b": 1, "c": 1, "tp": 2})), "more than two others"),
    ]:
        verdict = judged(given)
        assert [(doubt.reason, why in doubt.detail) for doubt in verdict.doubts] == [("declined", True)], verdict.doubts


@pytest.mark.skipif(release(torch.__version__) < (2, 13), reason="this torch updates shards of which a rank has none")
def test_updates_that_dtensor_does_not_do_in_place_are_declined() -> None:
    verdict = judged(program(UNEVEN, stages=("scale",), optimizer="sgd"))
    assert [(doubt.reason, "in-place operations" in doubt.detail) for doubt in verdict.doubts] == [("declined", True)]


@pytest.mark.parametrize(("name", "placement"), [("x", Placement("shard", 0)), ("s0_0_mm_weight", VARYING)])
def test_what_ranks_of_tensor_parallelism_have_of_their_own_is_declined(name: str, placement: Placement) -> None:
    given = program(UNDER, stages=("mm",))
    inputs = [
        replace(spec, placements=(("tp", placement),), shape=(4, 2) if name == "x" else spec.shape)
        if spec.name == name
        else spec
        for spec in given.inputs
    ]
    verdict = judged(replace(given, inputs=tuple(inputs)))
    assert [(doubt.reason, "different values" in doubt.detail) for doubt in verdict.doubts] == [("declined", True)]


# ----------------------------------------------------------------------------------------------- what torch itself does


def test_fully_shard_gives_plain_gradients_to_dtensors_that_are_not_used() -> None:
    """A finding; its folder has a script on gloo."""
    given = program(UNDER, stages=("mm two", "mm ignore"))
    verdict = judged(given, parts="model")
    assert {finding.kind for finding in verdict.findings} == {"pass-raised"}
    assert judged(given, parts="stage").status == "passed"
