"""FSDP2 and DistributedDataParallel as subjects: they pass where they are sound, and planted defects of them show."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("torch.distributed.fsdp", reason="this torch was built without torch.distributed")

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from tcverify.application.apply import apply_pass
from tcverify.application.loading import load_pass
from tcverify.errors import Unsupported
from tcverify.execution import ProcessGroupPool
from tcverify.ops import qualified_name
from tcverify.program import VARYING, Mesh, Program
from tcverify.pytorch.ddp import DistributedDataParallelPass
from tcverify.pytorch.fully_shard import FullyShard
from tcverify.pytorch.subjects import SUBJECTS, release
from tcverify.strategies.training.data_parallel import data_parallel_program, grid
from tcverify.strategies.training.model import TrainingStep
from tcverify.strategies.training.optimizers import CLIPS, OPTIMIZERS
from tcverify.verification.verifier import Verdict, verify
from tests.sizes import crossed

if release(torch.__version__) < (2, 10):
    pytest.skip("this torch does not tell how process groups reduce", allow_module_level=True)

STAGES = ("linear tanh", "reversed scale mm", "skip tied two", "mm ignore")


def program(mesh: Mesh | None = None, **facts: Any) -> Program:
    step = TrainingStep(**{"stages": STAGES, "microbatches": 2, "rows": 2, "scale_grads": False, **facts})
    return replace(data_parallel_program(mesh or grid(2, 1), step), options=step.options())


def judged(kind: type, given: Program, options: dict[str, Any] | None = None, **how: Any) -> Verdict:
    return verify(kind(**(options or {})), given, **how)


def refuted(kind: type, given: Program, options: dict[str, Any] | None = None) -> set[str]:
    verdict = judged(kind, given, options)
    assert verdict.status == "refuted", verdict.doubts
    return {finding.kind for finding in verdict.findings}


def wrapped(kind: type, given: Program, options: dict[str, Any]) -> Program:
    return apply_pass(load_pass(f"{kind.__module__}:{kind.__name__}", options), given).rewritten


def calls(made: Program, name: str) -> int:
    """How often the first rank calls an op."""
    return sum(node.op == "call_function" and name in qualified_name(node.target) for node in made.graphs[0].nodes)


FSDP = {
    "each stage": {},
    "pairs": {"units": "pairs", "reshard": False},
    "all": {"units": "all", "order": "together"},
    "accumulated": {"sync": "last", "keep": True, "recompute": True},
    "reduced later": {"sync": "all_reduce", "prefetch": True, "dim": 1},
    "evaluated": {"order": "evaluated", "prefetch": True, "recompute": True},
    "told what to divide by": {"divide": "shards", "unshard": True},
    "sums": {"divide": "ranks", "sums": True, "sync": "last"},
}
#: Beside the stages above: one is frozen, all run twice, and a second step follows an update.
MODEL: dict[str, Any] = {"frozen": (1,), "passes": 2, "steps": 2, "optimizer": "sgd"}

DDP = {
    "small buckets": {"bucket": 1},
    "views": {"views": True, "sync": "last"},
    "unused": {"unused": True, "recompute": True},
    "static": {"static": True, "bucket": 64},
    "together": {"order": "together"},
}


@pytest.mark.parametrize(("name", "ranks"), crossed(FSDP, [(4, 2), (3, 1)]))
def test_fully_sharded_training_computes_the_same_gradients(name: str, ranks: tuple[int, int]) -> None:
    verdict = judged(FullyShard, program(grid(*ranks), **MODEL), FSDP[name])
    assert verdict.status == "passed", verdict.doubts or verdict.findings


#: Settings that some versions of torch have.
SETTINGS = {
    "caught in forward": {"aborted": "forward", "prefetch": True, "unshard": True},
    "caught in backward": {"aborted": "backward", "sync": "last", "units": "pairs"},
    "two buffers": {"buffers": 2},
    "kept memory": {"storage": True, "aborted": "forward"},
    "finalized each": {"finalized": "manual"},
    "finalized last": {"finalized": "handle", "sync": "last"},
    "finalized together": {"finalized": "handle", "order": "together"},
}


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
def test_settings_of_fully_shard_compute_the_same_or_are_declined(options: dict[str, Any]) -> None:
    verdict = judged(FullyShard, program(grid(4, 2), **MODEL), options)
    lacking = [SUBJECTS["fully_shard"].lacks(name) for name in options]
    if any(lacking):
        (doubt,) = verdict.doubts
        assert doubt.reason == "declined"
        assert any(name and name in doubt.detail for name in lacking), doubt
    else:
        assert verdict.status == "passed", verdict.doubts or verdict.findings


@pytest.mark.skipif(not hasattr(FSDPModule, "finalize_backward"), reason="this torch finalizes each backward itself")
def test_gradients_that_are_not_reduced_yet_cannot_be_finalized() -> None:
    (doubt,) = judged(FullyShard, program(grid(4, 2)), {"finalized": "manual", "sync": "all_reduce"}).doubts
    assert (doubt.reason, "cannot be finalized" in doubt.detail) == ("declined", True)


@pytest.mark.parametrize("options", [{}, {"sync": "last", "divide": "ranks"}, {"sync": "all_reduce", "wide": "all"}])
def test_replicas_may_average_in_a_hook(options: dict[str, Any]) -> None:
    given = program(grid(4, 2), **MODEL)
    verdict = judged(FullyShard, given, {**options, "hook": True})
    assert verdict.status == "passed", verdict.doubts or verdict.findings


@pytest.mark.skipif(not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="this torch reduces no zeros")
def test_zeros_are_reduced_for_parameters_without_gradients() -> None:
    given = program(grid(4, 2), stages=("first mm", "unused second scale", "mm"))
    for options in ({"zeros": True}, {"zeros": True, "sync": "last", "units": "all"}):
        verdict = judged(FullyShard, given, options)
        assert verdict.status == "passed", verdict.doubts or verdict.findings


#: One after the other: how the optimizer goes through parameters, and to which norm gradients are clipped.
UPDATES = list(zip(OPTIMIZERS, itertools.cycle(["together", "by one", "fused"]), itertools.cycle(CLIPS), strict=False))


@pytest.mark.parametrize(("update", "kind"), crossed(UPDATES, [FullyShard, DistributedDataParallelPass]))
def test_parameters_are_updated_the_same(kind: type, update: tuple[str, str, str]) -> None:
    optimizer, kernels, clip = update
    if kernels == "fused" and (kind is FullyShard or not OPTIMIZERS[optimizer].fused):
        kernels = "by one"
    given = program(**{**MODEL, "optimizer": optimizer, "clip": clip})
    verdict = judged(kind, given, {"kernels": kernels, "zeroed": clip == "inf"})
    assert verdict.status == "passed", verdict.doubts or verdict.findings


@pytest.mark.parametrize("shards", ["parameters", "buckets"])
@pytest.mark.parametrize("kernels", ["by one", "together", "fused"])
def test_ranks_may_update_a_share_of_the_parameters_each(shards: str, kernels: str) -> None:
    given, options = program(grid(3, 1), **{**MODEL, "optimizer": "adam", "clip": "2"}), {"kernels": kernels}
    verdict = judged(DistributedDataParallelPass, given, {**options, "shards": shards})
    assert verdict.status == "passed", verdict.doubts or verdict.findings
    whole = wrapped(DistributedDataParallelPass, given, options)
    assert calls(verdict.pair.rewritten, "broadcast") > calls(whole, "broadcast")


@pytest.mark.parametrize(
    ("wide", "options"),
    crossed(
        ["reductions", "all", "forward and backward"],
        [{}, {"sync": "last", "units": "pairs"}, {"sync": "all_reduce", "recompute": True}],
    ),
)
def test_mixed_precision_computes_the_same(wide: str, options: dict[str, Any]) -> None:
    given = program(grid(4, 2), **MODEL)
    verdict = judged(FullyShard, given, {**options, "wide": wide})
    assert verdict.status == "passed", verdict.doubts or verdict.findings
    assert calls(verdict.pair.rewritten, "_to_copy") > 0


RESTORED = ("shards", "flat", "full", "broadcast")


@pytest.mark.parametrize("kind", [FullyShard, DistributedDataParallelPass])
@pytest.mark.parametrize(("restored", "given"), [*zip(RESTORED, itertools.cycle(["trained", "all", "groups"]))])
def test_a_state_that_is_saved_goes_on_in_a_new_model(kind: type, restored: str, given: str) -> None:
    meshes = [grid(3, 1), grid(4, 2) if kind is FullyShard else grid(3, 1)]
    for mesh, optimizer in zip(meshes, ("momentum", "amsgrad"), strict=True):
        step = program(mesh, **{**MODEL, "optimizer": optimizer, "clip": "2"})
        verdict = judged(kind, step, {"restored": restored, "given": given, "kernels": "together"})
        assert verdict.status == "passed", verdict.doubts or verdict.findings


@pytest.mark.parametrize("kind", [FullyShard, DistributedDataParallelPass])
def test_a_state_of_which_nothing_is_known_of_unread_parameters_is_restored(kind: type) -> None:
    step = program(grid(3, 1), **{**MODEL, "stages": ("unused mm", "scale", "mm"), "optimizer": "adam"})
    verdict = judged(
        kind, step, {"restored": "shards", "unused": True} if kind is not FullyShard else {"restored": "full"}
    )
    assert verdict.status == "passed", verdict.doubts or verdict.findings


@pytest.mark.parametrize("kind", [FullyShard, DistributedDataParallelPass])
def test_parameters_may_have_two_names(kind: type) -> None:
    step = program(grid(3, 1), **{**MODEL, "stages": ("linear tied", "scale mm"), "optimizer": "adam"})
    verdict = judged(kind, step, {"aliases": True, "given": "all"})
    assert verdict.status == "passed", verdict.doubts or verdict.findings


@pytest.mark.parametrize("options", DDP.values(), ids=DDP)
def test_training_with_buckets_of_gradients_computes_the_same(options: dict[str, Any]) -> None:
    verdict = judged(DistributedDataParallelPass, program(grid(3, 1), **MODEL), options)
    assert verdict.status == "passed", verdict.doubts or verdict.findings


PAIRS = pytest.param(
    {"sync": "last", "units": "pairs"},
    marks=pytest.mark.skipif(
        release(torch.__version__) < (2, 12),
        reason="FSDP2 of this torch gathers a list of modules for its first one only",
    ),
)


@pytest.mark.parametrize("options", [{}, {"sync": "last"}, PAIRS])
def test_stages_that_some_microbatches_leave_out_are_sharded(options: dict[str, Any]) -> None:
    verdict = judged(FullyShard, program(grid(4, 2), stages=("first mm", "second scale", "mm")), options)
    assert verdict.status == "passed", verdict.doubts or verdict.findings


@pytest.mark.parametrize("kind", [FullyShard, DistributedDataParallelPass])
def test_what_lockstep_passes_also_passes_on_gloo_and_in_the_exact_domain(
    kind: type, pool: Callable[[int], ProcessGroupPool]
) -> None:
    verdict = judged(kind, program(stages=("mm", "scale")), confirm=pool(2), domain="exact")
    assert verdict.status == "passed", verdict.doubts or verdict.findings
    assert verdict.executors == ["lockstep", "gloo"]


def test_the_same_is_recorded_when_dtensor_knows_the_layouts_of_the_update() -> None:
    given, subject = program(steps=2, optimizer="sgd"), load_pass("tcverify.pytorch.fully_shard:FullyShard", {})
    first, again = [str(apply_pass(subject, given).rewritten.graphs[0]) for _ in range(2)]
    assert first == again


def test_options_decide_what_is_communicated() -> None:
    def count(options: dict[str, Any], name: str) -> int:
        return calls(wrapped(FullyShard, program(), options), name)

    assert count({}, "_to_copy") == 0
    kept, gathered = count({"reshard": False}, "all_gather_into_tensor_out"), count({}, "all_gather_into_tensor_out")
    assert 0 < kept < gathered
    assert count({"sync": "last"}, "reduce_scatter") == count({}, "reduce_scatter") // 2 > 0


def test_the_reducer_itself_is_recorded() -> None:
    """It is C++, and rebuilds its buckets in the order of rank 0 before the second forward."""
    large, small = [
        calls(wrapped(DistributedDataParallelPass, program(), {"bucket": size}), "all_reduce_") for size in (1 << 20, 1)
    ]
    assert 0 < large < small
    assert calls(wrapped(DistributedDataParallelPass, program(), {}), "broadcast_")


# --------------------------------------------------------------------------------------------------- planted defects


def test_gradients_that_are_not_divided_refute(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    def summed(*args: Any, **kwargs: Any) -> Any:
        return None, None, dist.ReduceOp.SUM, dist.ReduceOp.SUM

    monkeypatch.setattr(_fsdp_collectives, "_get_gradient_divide_factors", summed)
    assert refuted(FullyShard, program()) == {"wrong-value"}


def test_parameters_that_are_gathered_in_another_order_refute(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    copy_out = _fsdp_param_group.foreach_all_gather_copy_out

    def turned(result: Any, params: Any, *others: Any, **named: Any) -> None:
        copy_out(result, [params[1], params[0], *params[2:]] if _alike(params) else params, *others, **named)

    def _alike(params: Any) -> bool:
        return len(params) > 1 and params[0]._orig_size == params[1]._orig_size

    monkeypatch.setattr(_fsdp_param_group, "foreach_all_gather_copy_out", turned)
    assert refuted(FullyShard, program(stages=("mm mm", "scale"))) == {"wrong-value"}


def test_gradients_that_are_never_reduced_refute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FSDPModule, "set_requires_gradient_sync", _never(FSDPModule.set_requires_gradient_sync))
    assert refuted(FullyShard, program(), {"sync": "last"}) == {"wrong-value"}


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="this torch cannot go on behind an error")
def test_a_step_that_goes_on_where_a_backward_was_aborted_refutes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FSDPModule, "reset_iter_state", lambda self: None)
    assert refuted(FullyShard, program(grid(4, 2), **MODEL), {"aborted": "backward"}) == {"wrong-value"}


def test_a_hook_that_is_not_called_refutes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FSDPModule, "set_all_reduce_hook", lambda self, hook: None)
    assert refuted(FullyShard, program(grid(4, 2)), {"hook": True}) == {"wrong-value"}


def test_norms_of_shards_alone_refute(monkeypatch: pytest.MonkeyPatch) -> None:
    def local(parameters: Any, norm: float, kind: float) -> None:
        grads = [one.grad.to_local() for one in parameters if one.grad is not None]
        factor = norm / torch.nn.utils.get_total_norm(grads, kind)
        torch._foreach_mul_(grads, factor.clamp(max=1.0))

    given = program(stages=("mm",), optimizer="sgd", clip="2")
    assert judged(FullyShard, given).status == "passed"
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", local)
    assert refuted(FullyShard, given) == {"wrong-value"}


def test_shares_that_are_not_broadcast_refute(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged(DistributedDataParallelPass, program(**MODEL), {"shards": "parameters"}).status == "passed"
    from torch.distributed.optim import ZeroRedundancyOptimizer  # which warns where it is imported first

    monkeypatch.setattr(ZeroRedundancyOptimizer, "_sync_params", lambda self: None)
    assert refuted(DistributedDataParallelPass, program(**MODEL), {"shards": "parameters"}) == {"wrong-value"}


def test_gradients_that_outlive_a_step_refute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", lambda self, set_to_none=True: None)
    assert refuted(DistributedDataParallelPass, program(**MODEL)) == {"wrong-value"}


def test_only_updates_may_be_refused_by_dtensor(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    def refusing(*given: Any, **named: Any) -> None:
        raise RuntimeError("this reduction is not supported")

    (doubt,) = judged(FullyShard, program(stages=("mm",), optimizer="sgd"), {"kernels": "fused"}).doubts
    assert doubt.reason == "declined"
    assert "does not have a sharding strategy" in doubt.detail
    monkeypatch.setattr(_fsdp_param_group, "foreach_reduce", refusing)
    assert refuted(FullyShard, program(stages=("mm",))) == {"pass-raised"}


def test_updates_that_read_values_are_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: Any, closure: Any = None) -> None:
        for one in self.param_groups[0]["params"]:
            one.detach().mul_(one.detach().sum().item())

    monkeypatch.setattr(torch.optim.SGD, "step", read)
    (doubt,) = judged(DistributedDataParallelPass, program(**MODEL)).doubts
    assert doubt.reason == "declined"
    assert "Python number" in doubt.detail


@pytest.mark.parametrize("kind", [FullyShard, DistributedDataParallelPass])
@pytest.mark.parametrize("lost", ["model", "optimizer"])
def test_a_state_that_is_not_restored_refutes(kind: type, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.checkpoint import state_dict

    step, options = program(**{**MODEL, "optimizer": "momentum"}), {"restored": "full"}
    assert judged(kind, step, options).status == "passed"
    if lost == "model":
        monkeypatch.setattr(state_dict, "_load_model_state_dict", lambda model, *others: None)
    else:
        monkeypatch.setattr(state_dict, "_load_optim_state_dict", lambda model, *others: None)
    assert refuted(kind, step, options) == {"wrong-value"}


def test_each_rank_takes_what_the_first_one_sends() -> None:
    step = program(grid(3, 1), **{**MODEL, "optimizer": "adam"})
    made = {how: wrapped(FullyShard, step, {"restored": how}) for how in ("full", "broadcast")}
    sent = {(how, op): calls(made[how], op) > 0 for how in made for op in ("broadcast", "all_to_all")}
    assert [found for found, some in sent.items() if some] == [("full", "all_to_all"), ("broadcast", "broadcast")]


def _never(announce: Callable[..., None]) -> Callable[..., None]:
    return lambda self, value, **named: announce(self, False, **named)


def test_a_step_that_is_never_synchronized_refutes(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.parallel import DistributedDataParallel

    @contextlib.contextmanager
    def left_off(self: Any) -> Iterator[None]:
        self.require_backward_grad_sync = False
        yield

    monkeypatch.setattr(DistributedDataParallel, "no_sync", left_off)
    assert refuted(DistributedDataParallelPass, program(), {"sync": "last"}) == {"wrong-value"}


# ----------------------------------------------------------------------------------------------- what is not verified


def test_what_the_wrappers_do_not_take_is_declined() -> None:
    unread = program(stages=("unused mm", "mm"))
    for kind, given, why in [
        (DistributedDataParallelPass, unread, "gets no gradient"),
        (DistributedDataParallelPass, program(grid(4, 2)), "takes one"),
        (DistributedDataParallelPass, program(**MODEL), "ZeroRedundancyOptimizer gives"),
        (FullyShard, program(grid(4, 2)), "PREMUL_SUM"),
        (FullyShard, program(Mesh.grid({"a": 1, "b": 1, "c": 2})), "one or two"),
        (FullyShard, program(Mesh(1, ())), "no dims"),
        (FullyShard, program(stages=("unused mm", "mm"), optimizer="adamw"), "gets no gradient, and decays"),
        (FullyShard, replace(program(), options=TrainingStep(stages=("mm",)).options()), "is not the training step"),
    ]:
        told = {
            "PREMUL_SUM": {"divide": "ranks"},
            "ZeroRedundancyOptimizer gives": {"shards": "buckets", "restored": "full"},
        }
        verdict = judged(kind, given, told.get(why, {}))
        assert verdict.status == "inconclusive"
        assert [(doubt.reason, why in doubt.detail) for doubt in verdict.doubts] == [("declined", True)], verdict.doubts
    assert judged(DistributedDataParallelPass, unread, {"unused": True}).status == "passed"
    assert judged(DistributedDataParallelPass, unread, {"static": True}).status == "passed"


@pytest.mark.parametrize("kind", [FullyShard, DistributedDataParallelPass])
def test_parameters_that_ranks_have_of_their_own_are_declined(kind: type) -> None:
    given = program(stages=("mm",))
    own = [
        replace(spec, placements=(("dp", VARYING),)) if spec.name.endswith("weight") else spec for spec in given.inputs
    ]
    verdict = judged(kind, replace(given, inputs=tuple(own)))
    assert [(doubt.reason, "different values" in doubt.detail) for doubt in verdict.doubts] == [("declined", True)]


def test_parameters_of_other_dtypes_are_declined() -> None:
    gm = program(stages=("mm", "bias")).graph_module(0)
    bias = next(node for node in gm.graph.nodes if node.name.endswith("bias"))
    bias.meta["val"] = bias.meta["val"].to(torch.int64)
    with pytest.raises(Unsupported, match="other dtypes"):
        FullyShard()(gm)


def test_stages_that_some_microbatches_leave_out_need_to_be_looked_for() -> None:
    given = program(stages=("first mm", "second scale", "mm"))
    for options in ({}, {"static": True}, {"static": True, "unused": True}, {"unused": True, "order": "together"}):
        assert judged(DistributedDataParallelPass, given, options).status == "inconclusive"
    assert judged(DistributedDataParallelPass, given, {"unused": True, "sync": "last"}).status == "passed"


# ----------------------------------------------------------------------------------------------- what torch itself does


def test_a_static_graph_fails_where_the_first_backward_does_not_reduce() -> None:
    """A finding; its folder has a script."""
    assert refuted(DistributedDataParallelPass, program(), {"static": True, "sync": "last"}) == {"pass-raised"}
    assert judged(DistributedDataParallelPass, program(), {"static": True}).status == "passed"


@pytest.mark.parametrize(
    ("stages", "optimizer", "options"),
    [
        (("mm",), "sgd", {"restored": "full"}),
        (("mm",), "adam", {"restored": "flat and full"}),
        (("unused",), "adam", {"restored": "flat"}),
        (("mm tied",), "adam", {"restored": "full", "aliases": True}),
    ],
)
def test_some_states_cannot_be_loaded(stages: tuple[str, ...], optimizer: str, options: dict[str, Any]) -> None:
    """Findings; their folders have scripts."""
    given = program(stages=stages, optimizer=optimizer, steps=2)
    assert refuted(FullyShard, given, options) == {"pass-raised"}
    assert judged(FullyShard, given, {**options, "restored": "shards"}).status == "passed"


def test_gradients_of_parameters_in_one_shard_are_divided_twice() -> None:
    """A finding; its folder has a script on gloo."""
    options = {"divide": "ranks", "sums": True}
    assert refuted(FullyShard, program(grid(2, 2)), options) == {"wrong-value"}
    for other in ({**options, "divide": "mean"}, {**options, "sums": False}):
        assert judged(FullyShard, program(grid(2, 2)), other).status == "passed"


@pytest.mark.skipif(release(torch.__version__) >= (2, 15), reason="this torch does not lose them")
def test_replicas_lose_gradients_of_stages_that_the_last_microbatch_leaves_out() -> None:
    """A finding; its folder has a script on gloo."""
    options = {"sync": "all_reduce"}
    assert refuted(FullyShard, program(grid(4, 2), stages=("first mm", "mm")), options) == {"wrong-value"}
    assert refuted(FullyShard, program(grid(4, 2), stages=("first mm", "mm")), {**options, "units": "all"}) == {
        "pass-raised"
    }
    assert judged(FullyShard, program(grid(4, 2), stages=("second mm", "mm")), options).status == "passed"


def test_norms_of_empty_shards_are_refused_by_their_kernel() -> None:
    """A finding; its folder has a script on gloo."""
    for clip, mesh, status in (
        ("inf", grid(3, 1), "refuted"),
        ("2", grid(3, 1), "passed"),
        ("inf", grid(2, 1), "passed"),
    ):
        verdict = judged(FullyShard, program(mesh, stages=("mm",), optimizer="sgd", clip=clip))
        assert verdict.status == status, verdict.doubts or verdict.findings


@pytest.mark.skipif(release(torch.__version__) >= (2, 15), reason="this torch accumulates in another way")
@pytest.mark.parametrize("units", ["each", "all"])
def test_accumulation_in_mixed_precision_wants_that_all_microbatches_use_all_parameters(units: str) -> None:
    """Two findings; their folders have scripts on gloo."""
    options, given = {"sync": "last", "units": units}, program(stages=("second mm", "mm"))
    assert judged(FullyShard, given, options).status == "passed"
    assert refuted(FullyShard, given, {**options, "wide": "forward and backward"}) == {"pass-raised"}
