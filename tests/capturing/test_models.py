"""Models under every kind of parallelism, captured in every way that torch has, run and are verified as programs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch.torch_version import TorchVersion

from tcverify import Contract, verify
from tcverify.capturing import program_of
from tcverify.capturing.processes import CaptureSource, capture_all
from tcverify.errors import ProgramError
from tcverify.execution import Lockstep, ProcessGroupPool
from tcverify.ops import lookup
from tcverify.passes.identity import Identity
from tcverify.program import VARYING, Program, dumps, loads
from tests.support import captured_models, eager_programs
from tests.support.captured_models import WORLD, captured, ops_of
from tests.support.captured_passes import swapped, without_a_collective

#: make_fx on fake tensors asks for the shapes of what c10d's own ops return.
needs_fake_kernels = pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "Meta"),
    reason="c10d of this torch has no Meta kernels, so that make_fx cannot capture collectives of process groups",
)

#: Up to 2.11 (measured; 2.12 is not), ring attention reads sizes out of tensors, which make_fx refuses.
needs_traceable_ring = pytest.mark.skipif(
    TorchVersion(torch.__version__) < (2, 12),
    reason="make_fx cannot capture the ring attention of this torch: it reads sizes out of tensors",
)

#: Model, way, and ops that make the capture what it is. Those that compile take their time.
QUICK = [
    (
        "tensor_parallel",
        "capture",
        {"_c10d_functional::all_reduce", "aten::_scaled_dot_product_flash_attention_for_cpu"},
    ),
    ("expert_parallel", "joint", {"_c10d_functional::all_to_all_single"}),
    pytest.param(
        "fully_sharded",
        "make_fx",
        {"fsdp::all_gather_copy_in", "_c10d_functional::all_gather_into_tensor_out"},
        marks=needs_fake_kernels,
    ),
    pytest.param(
        "context_parallel",
        "make_fx",
        {"aten::_scaled_dot_product_flash_attention", "_c10d_functional::all_to_all_single"},
        marks=needs_traceable_ring,
    ),
]
SLOW = [
    ("tensor_parallel", "make_fx", {"aten::add_.Scalar"}),
    ("tensor_parallel", "forward", set()),
    ("tensor_parallel", "backward", {"aten::silu_backward"}),
    (
        "sequence_parallel",
        "capture",
        {"_c10d_functional::reduce_scatter_tensor", "_c10d_functional::all_gather_into_tensor"},
    ),
    ("sequence_parallel", "joint", {"_c10d_functional::reduce_scatter_tensor"}),
    ("training", "joint", {"aten::nll_loss_backward"}),
    ("training", "make_fx", {"aten::nll_loss_forward"}),
    ("vocabulary_parallel", "make_fx", {"aten::gather"}),
    ("gathered_parameters", "joint", {"_c10d_functional::reduce_scatter_tensor"}),
    ("gathered_parameters", "make_fx", {"_c10d_functional::all_gather_into_tensor"}),
    ("data_parallel", "make_fx", {"aten::embedding_dense_backward", "_c10d_functional::all_reduce"}),
    ("vocabulary_parallel", "joint", {"aten::index_put", "aten::embedding_dense_backward"}),
    ("expert_parallel", "export", {"_c10d_functional::all_to_all_single"}),
]


@cache
def made(model: str, way: str) -> Program:
    return captured(model, way)


Pools = Callable[[int], ProcessGroupPool]


def check(model: str, way: str, ops: set[str], group: ProcessGroupPool) -> None:
    program = made(model, way)
    assert ops <= ops_of(program)
    targets = {n.target for graph in program.graphs for n in graph.nodes if n.op == "call_function"}
    assert [lookup(t).name for t in targets if lookup(t).run is None] == []
    assert dumps(loads(dumps(program))) == dumps(program)
    run = Lockstep().run(program)
    assert run.finished, run.why
    for result in run.ranks:
        assert all(bool(v.isfinite().all()) for v in result.outputs if isinstance(v, torch.Tensor))
    for domain in ("float64", "native", "exact"):
        for sound in (Identity(), swapped):
            verdict = verify(sound, program, domain=domain, confirm=group)
            assert (verdict.status, verdict.doubts, verdict.notes) == ("passed", [], []), (domain, verdict.findings)
            assert verdict.executors == ["lockstep", "gloo"]
    planted = verify(
        without_a_collective, program, contract=Contract(strict=True)
    )  # of equal inputs, values may stay right
    assert not planted.changed or planted.status == "refuted"


@pytest.mark.parametrize(("model", "way", "ops"), QUICK)
def test_a_captured_model_is_verified(model: str, way: str, ops: set[str], pool: Pools) -> None:
    check(model, way, ops, pool(WORLD))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "way", "ops"), SLOW)
def test_every_captured_model_is_verified(model: str, way: str, ops: set[str], pool: Pools) -> None:
    check(model, way, ops, pool(WORLD))


def test_a_missing_collective_of_a_captured_model_is_refuted() -> None:
    verdict = verify(without_a_collective, made("tensor_parallel", "capture"))
    assert (verdict.status, verdict.changed) == ("refuted", True)


@needs_traceable_ring
def test_graphs_of_ring_attention_differ_by_rank() -> None:
    program = made("context_parallel", "make_fx")
    assert len(program.graphs) == 2
    assert len({len(graph.nodes) for graph in program.graphs}) == 2


@pytest.mark.parametrize(
    ("model", "way", "why"),
    [
        ("tensor_parallel", "export", "DTensorSpec"),
        ("fully_sharded", "capture", "AOTAutograd cannot capture the model"),
        pytest.param("context_parallel", "forward", "_scaled_dot_product_flash_attention", marks=needs_traceable_ring),
    ],
)
def test_what_torch_cannot_capture_is_said(model: str, way: str, why: str) -> None:
    """docs/captures.md says which way serves for which model; where torch learns to, the table changes."""
    with pytest.raises(ProgramError, match=why):
        captured_models.captured(model, way)


# -------------------------------------------------------------------------------------------- collectives of process groups


def eager(name: str) -> Program:
    sources = [
        CaptureSource(f"{eager_programs.__file__}:{name}", rank, eager_programs.WORLD)
        for rank in range(eager_programs.WORLD)
    ]
    graphs = [one for found in capture_all(sources) if isinstance(found, list) for one in found]
    return program_of(graphs, placements={"x_1": {"world": VARYING}})


@needs_fake_kernels
def test_collectives_of_process_groups_mean_what_torch_says(pool: Pools) -> None:
    program = eager("everything")
    assert not [op for op in ops_of(program) if op.startswith("c10d::")]
    run = Lockstep().run(program)
    assert run.finished, run.why
    xs = [program.values(rank)[0].double() for rank in range(3)]
    assert not torch.equal(xs[0], xs[1])
    stacked = torch.stack(xs)
    for rank, result in enumerate(run.ranks):
        total, largest, sent, *more = result.outputs
        parts, (whole, pile, share, mean, exchanged), pieces, (came, handed) = (
            more[:3],
            more[3:8],
            more[8:11],
            more[11:],
        )
        torch.testing.assert_close(total, stacked.sum(0))
        assert torch.equal(largest, stacked.amax(0))
        assert torch.equal(sent, xs[1])
        assert torch.equal(torch.stack(parts), stacked)
        assert torch.equal(whole, torch.cat(xs))
        assert torch.equal(pile, stacked)
        mine = slice(2 * rank, 2 * rank + 2)
        torch.testing.assert_close(share, stacked.sum(0)[mine])
        torch.testing.assert_close(mean, stacked.mean(0)[mine])
        assert torch.equal(exchanged, torch.cat([x[mine] for x in xs]))
        assert torch.equal(torch.cat(pieces), exchanged)
        assert torch.equal(came, xs[0] if rank == 1 else torch.zeros_like(came))
        assert torch.equal(handed, xs[2][mine])
    verdict = verify(Identity(), program, confirm=pool(3))
    assert (verdict.status, verdict.executors) == ("passed", ["lockstep", "gloo"])


@needs_fake_kernels
def test_a_collective_without_a_functional_form_is_named() -> None:
    with pytest.raises(
        ProgramError, match="'reduce_' calls c10d::reduce_: no functional collective reduces on one rank"
    ):
        eager("rooted")
