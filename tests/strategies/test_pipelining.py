"""What holds of training steps that are drawn for pipelines."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from hypothesis import Phase, find, settings
from torch import fx

from tcverify.errors import Unsupported
from tcverify.execution import Lockstep
from tcverify.program import Mesh, Program, dumps, loads
from tcverify.strategies import pipelining_programs
from tcverify.strategies.training.model import (
    ENDS,
    LAYERS,
    SCHEDULES,
    Stage,
    TrainingStep,
    boundaries,
    training_program,
)
from tcverify.strategies.training.pipelines import WIDTH, decode_pipelining, decode_step, line


def sample(count: int, seed: int) -> Iterator[Program]:
    generator = random.Random(seed)
    for _ in range(count):
        yield decode_pipelining(line(generator.choice((2, 3, 4))), generator.randbytes(WIDTH))


def test_programs_run_and_are_what_their_bytes_say() -> None:
    for program in sample(8, seed=1):
        assert Lockstep().run(program).finished, program.options
        assert dumps(loads(dumps(program))) == dumps(program)


def test_any_bytes_decode_and_zeros_give_the_smallest() -> None:
    smallest = decode_pipelining(line(2), b"")
    step = TrainingStep.of(smallest.options)
    assert step == TrainingStep(stages=("mm", "mm"))
    assert smallest.size <= min(program.size for program in sample(4, seed=2))
    for filled in (b"\xff" * WIDTH, b"\x11" * 9):
        assert dumps(decode_pipelining(line(4), filled)) == dumps(decode_pipelining(line(4), filled))


def test_all_kinds_of_schedules_stages_and_batches_are_drawn() -> None:
    generator = random.Random(3)
    steps = [decode_step(2 + k % 3, generator.randbytes(WIDTH)) for k in range(300)]
    assert all(TrainingStep.of(step.options()) == step for step in steps)
    words = Counter(word for step in steps for stage in step.stages for word in stage.split())
    assert {step.schedule for step in steps} == set(SCHEDULES)
    assert set(words) == {*LAYERS, *ENDS, "shift", "ignore", "reversed"}
    assert any(step.frozen for step in steps)
    assert all(set(step.frozen) != set(range(len(step.stages))) for step in steps)
    assert any(step.microbatches < len(step.stages) for step in steps)
    assert {step.scale_grads for step in steps} == {True, False}


def test_layers_share_parameters_and_modules_have_them_in_either_order() -> None:
    step = TrainingStep(stages=("linear tied biases", "reversed scale mm tied biases"))
    assert [list(read) for _, read in step.layers(0)] == [
        ["s0_0_linear_weight", "s0_0_linear_bias"],
        ["s0_0_linear_weight", "s0_1_tied_bias"],
        ["s0_0_linear_bias", "s0_2_biases_bias"],
    ]
    used = ["s1_1_scale_weight", "s1_2_mm_weight", "s1_3_tied_bias", "s1_4_biases_bias"]
    assert list(step.parameters(1)) == used[::-1]
    module = Stage(step, 1, {name: torch.zeros(shape) for name, shape in step.parameters(1).items()})
    assert [name for name, _ in module.named_parameters()] == used[::-1]
    with pytest.raises(Unsupported):
        TrainingStep.of({"stages": ("scale tied",)})


def test_gradients_are_those_of_the_whole_batch() -> None:
    """Against autograd on all rows at once: where losses are summed, microbatches change nothing but the order of sums."""
    step = TrainingStep(
        stages=("linear tanh two", "skip", "twice"), microbatches=3, rows=6, loss="sum", scale_grads=False
    )
    values = {name: torch.linspace(-1, 1, 12).resize_(shape).sin() for name, shape in step.inputs().items()}
    given, weights = values["x"], {name: one.requires_grad_() for name, one in values.items() if name.startswith("s")}
    hidden = torch.tanh(given @ weights["s0_0_linear_weight"].T + weights["s0_0_linear_bias"])
    hidden = hidden + torch.tanh(hidden)
    hidden = hidden + torch.tanh(hidden @ weights["s1_0_skip_weight"])
    hidden = torch.tanh(hidden @ weights["s2_0_twice_weight"]) @ weights["s2_0_twice_weight"]
    loss = ((hidden - values["target"]) ** 2).sum()
    loss.backward()
    graph = training_program(line(1), step).graph(0)
    found = fx.Interpreter(fx.GraphModule({}, graph)).run(*values.values())
    assert sum(float(one.detach()) for one in found["losses"]) == pytest.approx(float(loss.detach()))
    torch.testing.assert_close(found["outputs"][0].detach(), hidden.detach())
    assert set(found["grads"]) == set(weights)
    for name, grad in found["grads"].items():
        torch.testing.assert_close(grad.detach(), weights[name].grad)


def test_stages_are_placed_as_schedules_expect() -> None:
    placed = {
        name: [TrainingStep(schedule=name).rank_of(stage, 3) for stage in range(6)]
        for name in ("LoopedBFS", "ZBVZeroBubble")
    }
    assert placed == {"LoopedBFS": [0, 1, 2, 0, 1, 2], "ZBVZeroBubble": [0, 1, 2, 2, 1, 0]}


def test_what_stages_hand_on_is_told_with_whether_it_requires_gradients() -> None:
    step = TrainingStep(stages=("mm two", "mm mask", "mm"), rows=2, microbatches=2, frozen=(0,))
    values = {name: torch.zeros(shape) for name, shape in step.inputs().items()}
    edges = [[(tuple(x.shape), x.requires_grad) for x in edge] for edge in boundaries(step, values)]
    one, trained = ((1, 2), False), ((1, 2), True)
    assert edges == [[one], [one, one], [trained, one], [trained]]


def test_the_strategy_heeds_mesh_and_world_size() -> None:
    grid = Mesh.grid({"dp": 2, "pp": 2})
    first = settings(phases=[Phase.generate], database=None)  # without shrinking, in which each step traces a model
    assert find(pipelining_programs(mesh=grid), lambda program: True, settings=first).mesh == grid
    assert find(pipelining_programs(world_size=5), lambda program: True, settings=first).world_size == 5


@pytest.mark.parametrize(
    "options", [{"stages": ("odd",)}, {"rows": 65, "microbatches": 1}, {"frozen": [0]}, {"loss": 1}]
)
def test_options_that_are_no_training_step_are_declined(options: dict[str, object]) -> None:
    with pytest.raises(Unsupported):
        TrainingStep.of(options)
