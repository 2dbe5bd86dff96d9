"""What holds of training steps that are drawn for data parallelism."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from hypothesis import Phase, find, settings

from tcverify.errors import Unsupported
from tcverify.execution import Lockstep
from tcverify.program import Mesh, Program, dumps, loads
from tcverify.strategies import training_programs
from tcverify.strategies.training.data_parallel import (
    WIDTH,
    data_parallel_program,
    decode_data_parallel,
    decode_step,
    grid,
    tensor_parallel_grid,
)
from tcverify.strategies.training.model import BATCH, ENDS, LAYERS, LOSSES, Model, TrainingStep
from tcverify.strategies.training.optimizers import CLIPS, MAX_NORM, OPTIMIZERS


def sample(count: int, seed: int) -> Iterator[Program]:
    generator = random.Random(seed)
    for _ in range(count):
        yield decode_data_parallel(
            grid(generator.choice((2, 3, 4)), generator.choice((1, 2))), generator.randbytes(WIDTH)
        )


def test_programs_run_and_are_what_their_bytes_say() -> None:
    for program in sample(8, seed=1):
        assert Lockstep().run(program).finished, program.options
        assert dumps(loads(dumps(program))) == dumps(program)


def test_any_bytes_decode_and_zeros_give_the_smallest() -> None:
    smallest = decode_data_parallel(grid(2, 1), b"")
    assert "schedule" not in smallest.options
    assert TrainingStep.of(smallest.options) == TrainingStep(stages=("mm", "mm"), scale_grads=False)
    assert smallest.size <= min(program.size for program in sample(4, seed=2))
    for filled in (b"\xff" * WIDTH, b"\x11" * 9):
        assert dumps(decode_data_parallel(grid(4, 2), filled)) == dumps(decode_data_parallel(grid(4, 2), filled))


def test_all_kinds_of_stages_and_batches_are_drawn() -> None:
    generator = random.Random(3)
    steps = [decode_step(generator.randbytes(WIDTH)) for _ in range(300)]
    assert all(TrainingStep.of(step.options()) == step for step in steps)
    words = Counter(word for step in steps for stage in step.stages for word in stage.split())
    assert set(words) == {*LAYERS, *ENDS, "shift", "ignore", "reversed", "first", "second"}
    assert {step.passes for step in steps} == {step.steps for step in steps} == {1, 2}
    assert {step.loss for step in steps} == set(LOSSES)
    assert {len(step.stages) for step in steps} == {1, 2, 3, 4}
    assert any(step.frozen for step in steps)
    assert any(step.alternating for step in steps)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_is_that_of_torch_on_the_whole_batch(optimizer: str, clip: str) -> None:
    """By autograd, on the rows of all ranks at once."""
    step = TrainingStep(
        stages=("linear tanh two", "second scale", "skip mm"),
        microbatches=2,
        rows=4,
        scale_grads=False,
        passes=2,
        steps=2,
        optimizer=optimizer,
        clip=clip,
    )
    mesh = grid(4, 2)
    program = data_parallel_program(mesh, step, seed=5)
    ranks = [dict(zip(step.inputs(), map(torch.Tensor.double, program.values(rank)), strict=True)) for rank in range(4)]
    model = Model(step, {name: value for name, value in ranks[0].items() if name not in BATCH})
    chosen = OPTIMIZERS[optimizer]
    update = getattr(torch.optim, chosen.torch)(model.parameters(), **chosen.options, foreach=False)
    norms = [torch.tensor(0.0)]
    for _ in range(2):
        update.zero_grad()
        for own in ranks:
            for start in (0, 2):
                output = model(own["x"][start : start + 2], microbatch=start // 2)
                (step.loss_of(output, own["target"][start : start + 2]) / 4).backward()
        if clip:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, CLIPS[clip]))
        update.step()
    assert (max(norms) > MAX_NORM) == bool(clip)
    params = {name.rpartition(".")[2]: one for name, one in model.named_parameters()}
    (returned,) = (node.args[0] for node in program.graphs[0].nodes if node.op == "output")
    assert {*returned["params"]} == {*params}
    expected = [params[name].grad for name in returned["grads"]] + [
        params[name].detach() for name in returned["params"]
    ]
    for result in Lockstep().run(program).ranks:
        torch.testing.assert_close(list(result.outputs[-len(expected) :]), expected)


def test_options_that_describe_no_step_are_refused() -> None:
    """The last stage says how many outputs there are, and each microbatch trains a parameter; an optimizer follows each step."""
    assert TrainingStep.of({"stages": ("first mm", "mm")}).running(1) == [1]
    for options in (
        {"stages": ("mm", "first mm")},
        {"stages": ("mm",), "optimizer": "newton"},
        {"stages": ("mm",), "optimizer": "sgd", "clip": "3"},
        {"stages": ("mm",), "steps": 2},
        {"stages": ("first mm", "mm"), "frozen": (1,), "microbatches": 2, "rows": 2},
    ):
        with pytest.raises(Unsupported):
            TrainingStep.of(options)


def test_meshes_are_those_that_are_asked_for() -> None:
    first = settings(max_examples=10, phases=[Phase.generate], database=None)
    wanted = Mesh.grid({"a": 2, "b": 2})
    assert find(training_programs(mesh=wanted), lambda program: True, settings=first).mesh == wanted
    assert find(training_programs(world_size=5), lambda program: True, settings=first).world_size == 5


def test_meshes_of_two_dims_have_one_shard_where_ranks_are_few() -> None:
    def sizes(mesh: Mesh) -> list[int]:
        return [len(dim.group(0)) for dim in mesh.dims]

    assert [sizes(grid(ranks, 2)) for ranks in (2, 3, 4, 6)] == [[2, 1], [3, 1], [2, 2], [3, 2]]
    assert [sizes(tensor_parallel_grid(ranks, 2)) for ranks in (2, 3, 4, 8)] == [[2], [3], [2, 2], [2, 2, 2]]
    for make in (grid, tensor_parallel_grid):
        assert all(make(ranks, dims).world_size == ranks for ranks in range(1, 17) for dims in (1, 2))
