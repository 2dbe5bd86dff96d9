"""Schedules of pipeline parallelism as a subject: they pass where they are sound, and planted defects of them show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx
from torch.autograd.graph import GradientEdge

pytest.importorskip("torch.distributed.pipelining.schedules", reason="this torch was built without torch.distributed")

from torch.distributed.pipelining import schedules, stage

from tcverify.errors import Unsupported
from tcverify.execution import ProcessGroupPool
from tcverify.ops import qualified_name
from tcverify.program import VARYING, Mesh, MeshDim, Program
from tcverify.pytorch.pipelining import PipelineSchedule, order_accumulations
from tcverify.pytorch.subjects import release
from tcverify.strategies.training.model import SCHEDULES, TrainingStep, training_program
from tcverify.strategies.training.pipelines import WIDTH, decode_step, line
from tcverify.verification.verifier import Verdict, verify
from tests.sizes import by_night

TWO = ("linear tanh", "mm")
FOUR = ("linear tanh", "skip", "scale", "mm")


def program(ranks: int = 2, **facts: Any) -> Program:
    step = TrainingStep(**{"stages": TWO, "microbatches": 2, "rows": 4, **facts})
    return replace(training_program(line(ranks), step), options=step.options())


def judged(given: Program, options: dict[str, Any] | None = None, **how: Any) -> Verdict:
    return verify(PipelineSchedule(**(options or {})), given, **how)


def refuted(given: Program, options: dict[str, Any] | None = None) -> set[str]:
    verdict = judged(given, options)
    assert verdict.status == "refuted", verdict.doubts
    return {finding.kind for finding in verdict.findings}


def since(minor: int, reason: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(release(torch.__version__) < (2, minor), reason=reason)


gradients = since(13, "stages of this torch need a gradient for all that they hand on")
lowered = since(10, "schedules of this torch choose their sends and gradient scaling elsewhere")
few = since(11, "schedules of this torch need a microbatch per stage")
#: Schedules, and why they fail in a torch.
NEEDS: dict[str, pytest.MarkDecorator] = {
    name: since(10, "ranks of this torch send to themselves between two stages of theirs")
    for name in ("ZBVZeroBubble", "DualPipeV")
}
NEEDS_FROM_FILE = {
    **NEEDS,
    "InterleavedZeroBubble": since(
        10, "of actions in a file, this torch computes other gradients than its schedule does"
    ),
}

SOUND = [
    *(
        pytest.param(
            {"schedule": name, "stages": TWO if how == "one" else FOUR, "microbatches": 4}, marks=NEEDS.get(name, ())
        )
        for name, how in SCHEDULES.items()
    ),
    pytest.param({"schedule": "GPipe", "microbatches": 1, "rows": 1, "loss": "sum", "scale_grads": False}, marks=few),
    {"schedule": "InterleavedZeroBubble", "stages": FOUR, "frozen": (1, 3)},
]
SOUND_SINCE_213 = [
    {"schedule": "1F1B", "stages": ("shift twice two", "ignore unused through"), "microbatches": 3, "rows": 3},
    {"schedule": "Interleaved1F1B", "stages": ("mm mask", "skip constant", "shift mm two", "relu linear two")},
    {"schedule": "Interleaved1F1B", "stages": FOUR, "frozen": (0, 1)},
]


@pytest.mark.parametrize(
    "facts",
    [*SOUND, *(pytest.param(facts, marks=gradients) for facts in SOUND_SINCE_213)],
    ids=lambda facts: str(facts["schedule"]),
)
def test_schedules_compute_what_the_model_computes_without_them(facts: dict[str, Any]) -> None:
    verdict = judged(program(**facts))
    assert verdict.status == "passed", verdict.doubts or verdict.findings
    assert verdict.changed


def test_a_pipeline_runs_over_the_last_dim_of_a_mesh_in_its_order() -> None:
    groups = ((3, 1), (0, 2))
    mesh = Mesh(4, (MeshDim("dp", ((0, 1), (2, 3))), MeshDim("pp", groups)))
    step = TrainingStep(schedule="Interleaved1F1B", stages=FOUR, microbatches=2, rows=2)
    verdict = judged(replace(training_program(mesh, step), options=step.options()))
    assert verdict.status == "passed", verdict.doubts or verdict.findings


def test_what_lockstep_passes_also_passes_on_gloo_and_in_the_exact_domain(
    pool: Callable[[int], ProcessGroupPool],
) -> None:
    verdict = judged(program(schedule="1F1B"), confirm=pool(2), domain="exact")
    assert verdict.status == "passed", verdict.doubts or verdict.findings
    assert verdict.executors == ["lockstep", "gloo"]


@pytest.mark.parametrize("actions", ["compute_only", "compute_comms"])
@pytest.mark.parametrize(
    "name", ["LoopedBFS", *(pytest.param(name, marks=mark) for name, mark in NEEDS_FROM_FILE.items())]
)
def test_actions_of_a_file_do_what_the_schedule_does(name: str, actions: str) -> None:
    verdict = judged(program(schedule=name, stages=FOUR, microbatches=4), {"actions": actions})
    assert verdict.status == "passed", verdict.doubts or verdict.findings


def test_what_a_rank_sends_is_waited_for_and_in_the_order_of_the_schedule() -> None:
    given = program(schedule="1F1B")
    ops = [qualified_name(node.target) for node in PipelineSchedule()(given.graph_module(0)).graph.nodes]
    messages = [op.partition("::")[2] for op in ops if op.endswith(("::isend", "::irecv"))]
    assert messages == ["isend", "isend", "irecv", "irecv"]
    count = Counter(ops)
    results = sum(op == "_c10d_functional::broadcast" for op in ops)
    assert count["_c10d_functional::wait_tensor"] == len(messages) + results


# ------------------------------------------------------------------------------------------------------------ declined


def test_what_a_schedule_refuses_is_declined() -> None:
    verdict = judged(program(schedule="1F1B", microbatches=1))
    assert verdict.status == "inconclusive"
    assert "microbatches" in str(verdict.doubts[0])


@pytest.mark.parametrize("stages", [("mm",), ("mm", "mm", "mm")])
def test_stages_that_cannot_be_shared_out_evenly_are_declined(stages: tuple[str, ...]) -> None:
    with pytest.raises(Unsupported, match="stages for 2 ranks"):
        PipelineSchedule()(program(schedule="LoopedBFS", stages=stages).graph_module(0))


def test_inputs_of_other_shapes_are_declined() -> None:
    """Slices of rows run on fewer of them, so that the graph alone does not tell."""
    given = program()
    module = given.graph_module(0)
    x = next(node for node in module.graph.nodes if node.name == "x")
    x.meta["val"] = x.meta["val"][:1]
    with pytest.raises(Unsupported, match="other shapes"):
        PipelineSchedule()(module)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"stages": ()}, {"stages": ("nonsense",)}, {"stages": (1,)}, {"rows": 0}, {"microbatches": 9}, {"frozen": 1},
        {"schedule": "None"}, {"loss": ()}, {"rows": "4"}, {"stages": "linear"}, {"loss": "sum"}, {"scale_grads": False},
        {"frozen": (0, 1)},
    ],
)  # fmt: skip
def test_a_graph_that_is_not_the_training_step_of_its_options_is_declined(options: dict[str, Any]) -> None:
    given = program()
    module = replace(given, options={**given.options, **options} if options else {}).graph_module(0)
    with pytest.raises(Unsupported):
        PipelineSchedule()(module)


def test_inputs_that_ranks_have_of_their_own_are_declined() -> None:
    given = program()
    own = tuple(replace(spec, placements=(("pp", VARYING),)) for spec in given.inputs)
    with pytest.raises(Unsupported, match="different values"):
        PipelineSchedule()(replace(given, inputs=own).graph_module(0))


def test_a_batch_that_runs_through_the_stages_twice_is_declined() -> None:
    with pytest.raises(Unsupported, match="once"):
        PipelineSchedule()(program(passes=2).graph_module(0))


# ------------------------------------------------------------------------------------------------------ planted defects


def test_a_deadlock_of_two_ranks_that_both_receive_first_refutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the fusion of a send with the receive that it depends on, 1F1B waits for a gradient before it sends."""
    monkeypatch.setattr(schedules, "_batch_p2p", _sends_last(schedules._batch_p2p))
    assert "deadlock" in refuted(program(schedule="1F1B", stages=("mm", "mm", "mm"), microbatches=3, rows=3, ranks=3))


def _sends_last(batch: Callable[..., Any]) -> Callable[..., Any]:
    """A batch whose receives are waited for before its sends start."""

    def batched(ops: list[Any], desc: str | None = None) -> Any:
        receives = [one for one in ops if one.op is schedules.dist.irecv]
        for work in batch(receives, desc):
            work.wait()
        return batch([one for one in ops if one not in receives], desc)

    return batched


def test_a_gradient_that_is_not_accumulated_refutes(monkeypatch: pytest.MonkeyPatch) -> None:
    backward = stage.stage_backward
    done = []

    def loses_one(*args: Any, **kwargs: Any) -> Any:
        result = backward(*args, **kwargs)
        done.append(result)
        for weight in _weights_of(args[0]) if len(done) == 1 else ():
            weight.grad = None
        return result

    monkeypatch.setattr(stage, "stage_backward", loses_one)
    assert refuted(program(schedule="GPipe", stages=("mm", "mm"))) == {"wrong-value"}


def _weights_of(output: Any) -> list[Any]:
    """The leaves behind a value that have gradients."""
    outputs = output if isinstance(output, (tuple, list)) else [output]
    found, todo = [], [one.node if isinstance(one, GradientEdge) else one.grad_fn for one in outputs]
    while todo:
        one = todo.pop()
        if one is None:
            continue
        if hasattr(one, "variable"):
            found.append(one.variable)
        todo += [other for other, _ in one.next_functions]
    return found


@lowered
def test_gradients_scaled_twice_refute(monkeypatch: pytest.MonkeyPatch) -> None:
    reduce_grad = stage._PipelineStageBase.perform_reduce_grad

    def twice(self: Any, factor: int) -> None:
        reduce_grad(self, factor)
        reduce_grad(self, factor)

    monkeypatch.setattr(stage._PipelineStageBase, "perform_reduce_grad", twice)
    given = program(schedule="Interleaved1F1B", stages=FOUR)
    assert refuted(given) == {"wrong-value"}
    assert judged(program(schedule="Interleaved1F1B", stages=FOUR, scale_grads=False)).status == "passed"


def _changed_actions(monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[int, list[Any]]], None]) -> None:
    """Let schedules of several stages per rank have other actions than they made."""
    lower = schedules._add_send_recv

    def lowered(*args: Any, **kwargs: Any) -> Any:
        made = lower(*args, **kwargs)
        change(made)
        return made

    monkeypatch.setattr(schedules, "_add_send_recv", lowered)


def _places(actions: list[Any], what: str) -> list[int]:
    return [k for k, one in enumerate(actions) if one.computation_type.name == what]


@lowered
def test_a_microbatch_that_is_sent_before_another_refutes(monkeypatch: pytest.MonkeyPatch) -> None:
    def overtake(made: dict[int, list[Any]]) -> None:
        first, second = _places(made[1], "RECV_F")[:2]
        made[1].insert(first, made[1].pop(second))

    _changed_actions(monkeypatch, overtake)
    assert refuted(program(schedule="LoopedBFS", stages=FOUR)) == {"wrong-value"}


@lowered
def test_a_send_that_is_missing_refutes(monkeypatch: pytest.MonkeyPatch) -> None:
    _changed_actions(monkeypatch, lambda made: made[0].pop(_places(made[0], "SEND_F")[-1]))
    assert refuted(program(schedule="LoopedBFS", stages=FOUR)) & {"deadlock", "unmatched-collective", "order-mismatch"}


def test_a_gradient_of_the_wrong_stage_refutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a rank with two stages the gradients go to the other one."""
    monkeypatch.setattr(
        stage._PipelineStageBase, "get_bwd_send_ops", _turned(stage._PipelineStageBase.get_bwd_send_ops)
    )
    assert refuted(program(schedule="GPipe", stages=("mm", "mm", "mm"), ranks=3, microbatches=3, rows=3))


def _turned(ops_of: Callable[..., Any]) -> Callable[..., Any]:
    def turned(self: Any, chunk: int) -> Any:
        ops = ops_of(self, chunk)
        for one in ops:
            one.peer = one.group_peer = (self.stage_index + 1) % self.group_size
        return ops

    return turned


def test_weights_without_the_gradients_of_a_microbatch_refute(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = stage._PipelineStageBase.backward_weight_one_chunk

    def forgets(self: Any, chunk: int, last_backward: bool = False) -> None:
        if chunk != 1:
            weight(self, chunk, last_backward=last_backward)

    monkeypatch.setattr(stage._PipelineStageBase, "backward_weight_one_chunk", forgets)
    assert refuted(program(schedule="InterleavedZeroBubble", stages=FOUR, microbatches=4)) == {"wrong-value"}


# ----------------------------------------------------------------------------------------------- what torch itself does


@since(13, "this torch does not lose them")
def test_zero_bubble_loses_gradients_behind_frozen_stages() -> None:
    """A finding; its folder has a script on gloo."""
    frozen = {"schedule": "InterleavedZeroBubble", "stages": FOUR, "frozen": (0,)}
    verdict = judged(program(**frozen))
    said = verdict.status, [finding.kind for finding in verdict.findings]
    assert said == ("refuted", ["wrong-value"])


SHARING = {
    "counted twice": ("wrong-value", "reversed bias biases biases", "mm"),
    "freed between": ("pass-raised", "mm scale tied", "mm"),
    "freed by itself": ("pass-raised", "reversed linear tied", "mm"),
}


@pytest.mark.parametrize("what", SHARING)
def test_zero_bubble_takes_shared_parameters_apart(what: str) -> None:
    """Two findings; their folders have scripts."""
    kind, *stages = SHARING[what]
    shared = {"schedule": "InterleavedZeroBubble", "stages": ("mm", "mm", *stages)}
    assert refuted(program(**shared)) & {kind, "impure-pass"}
    assert judged(program(**{**shared, "schedule": "Interleaved1F1B"})).status == "passed"


@since(13, "this torch adds up gradients of what is applied twice")
def test_where_groups_are_disjoint_and_keep_what_they_need_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.pipelining import _backward

    groups_of = _backward.get_param_groups

    def disjoint(*args: Any) -> list[dict[str, Any]]:
        merged: list[dict[str, Any]] = []
        for group in groups_of(*args):
            kept = [one for one in merged if one["params"].isdisjoint(group["params"])]
            for one in (one for one in merged if one not in kept):
                group = {key: group[key] | one[key] for key in group}
            merged = [*kept, group]
        return merged

    def keeps(weights: Any, groups: Any, retain_graph: bool = False) -> Any:
        return _backward.stage_backward_weight(weights, groups, retain_graph=True)

    monkeypatch.setattr(_backward, "get_param_groups", disjoint)
    monkeypatch.setattr(stage, "stage_backward_weight", keeps)
    for _, *stages in SHARING.values():
        verdict = judged(program(schedule="InterleavedZeroBubble", stages=("mm", "mm", *stages)))
        assert verdict.status == "passed", verdict.findings
    shared = 0
    for seed in range(by_night(150, 60)):
        step = replace(decode_step(2, bytes((seed * 37 + k * 101) % 251 for k in range(WIDTH))), frozen=())
        if not step.schedule.endswith("ZeroBubble") or step.microbatches > 4:
            continue
        verdict = judged(replace(training_program(line(2), step), options=step.options()))
        assert not verdict.findings, (step, verdict.findings)
        shared += verdict.status == "passed" and any({"tied", "biases"} & {*words.split()} for words in step.stages)
    assert shared > by_night(5, 2)


def test_gradients_add_up_in_one_order_whatever_order_torch_has_them_in() -> None:
    def summed(order: Sequence[int]) -> str:
        graph = fx.Graph()
        given = [graph.placeholder(f"g{number}") for number in range(4)]
        sums = {number: given[number] for number in range(2)}
        for number in order:
            sums[number] = graph.call_function(torch.ops.aten.add_.Tensor, (sums[number], given[2 + number]))
        graph.output(tuple(sums.values()))
        order_accumulations(graph)
        graph.lint()
        return str(graph)

    assert summed([0, 1, 0, 1]) == summed([1, 0, 1, 0]) == summed([1, 0, 0, 1])
    assert summed([0, 0]) != summed([0, 1])
