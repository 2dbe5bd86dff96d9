"""Training steps of which every rank computes its own rows, drawn for what averages gradients over the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from torch import fx

from tcverify.program import GraphBuilder, InputSpec, Mesh, Placement, Program, spmd_program
from tcverify.strategies.meshes import drawn_on
from tcverify.strategies.training.model import BATCH, FIRST, LOSSES, SECOND, TrainingStep, write_step, write_update
from tcverify.strategies.training.optimizers import CLIPS, OPTIMIZERS
from tcverify.strategies.training.pipelines import HEADER, STAGE_WIDTH, STAGES, frozen_stages, stage_words

#: What updates parameters: nothing half of the time.
_OPTIMIZERS = (*[""] * len(OPTIMIZERS), *OPTIMIZERS)
_CLIPS = ("", "", *CLIPS)

#: Name of the mesh dim over which ranks have the same rows.
TENSOR_PARALLEL = "tp"

#: World sizes that are drawn.
TRAINING_WORLD_SIZES = (2, 3, 4)

#: Bytes of a whole program: mesh and seed, stages, microbatches, rows, loss, frozen stages; then each stage.
WIDTH = HEADER + STAGES * STAGE_WIDTH


def decode_data_parallel(mesh: Mesh, choices: bytes) -> Program:
    """Decode any bytes into a training step on every rank of a mesh."""
    step = decode_step(choices)
    told = {name: value for name, value in step.options().items() if name != "schedule"}  # which is of pipelines
    return replace(data_parallel_program(mesh, step, seed=choices[0] if choices else 0), options=told)


def decode_step(choices: bytes) -> TrainingStep:
    """Decode any bytes into the training step of a rank."""
    choices = choices.ljust(WIDTH, b"\0")
    _, _, several, many, rows, how, choice = choices[:HEADER]
    number = 1 + (several + 1) % 4
    records = [choices[at : at + STAGE_WIDTH] for at in range(HEADER, WIDTH, STAGE_WIDTH)]
    microbatches = 1 + many % 3
    frozen = frozen_stages(number, choice)
    optimizer = _OPTIMIZERS[many // 3 % len(_OPTIMIZERS)]
    stages = [stage_words(records[k], last=k == number - 1) for k in range(number)]
    if number - 1 not in frozen:  # it trains in all microbatches
        stages[:-1] = [_sometimes(record, words) for record, words in zip(records, stages[:-1], strict=False)]
    return TrainingStep(
        stages=tuple(stages),
        microbatches=microbatches,
        rows=microbatches * (1 + rows % 2),
        frozen=frozen,
        loss=list(LOSSES)[how % 2],
        scale_grads=False,
        passes=1 + (how // 2 % 4 == 3),
        steps=1 + how // 8 % 2 if optimizer else 1,
        optimizer=optimizer,
        clip=_CLIPS[how // 16 % len(_CLIPS)] if optimizer else "",
    )


def _sometimes(record: Sequence[int], words: str) -> str:
    """The words of a stage that perhaps runs in every other microbatch only."""
    first, second, _, flags = record
    return f"{FIRST if second % 2 else SECOND} {words}" if flags >= 128 and first % 2 else words


def data_parallel_program(mesh: Mesh, step: TrainingStep, seed: int = 0) -> Program:
    """The training step on the rows of each rank of data parallelism, and the mean of the gradients over these ranks.

    Ranks of tensor parallel have the same rows. It returns the losses and outputs of all steps, the gradients of the last, and
    parameters where they are updated.

    Args:
        step: what a rank does; its rows are those of one rank.
    """

    def build(b: GraphBuilder) -> Any:
        given = {name: b.input(name) for name in step.inputs()}
        losses, outputs = [], []
        kept: list[fx.Node] = []
        for number in range(1, step.steps + 1):
            result = write_step(b, step, given)
            losses += result["losses"]
            outputs += result["outputs"]
            grads = {name: _averaged(b, grad) for name, grad in result["grads"].items()}
            if step.optimizer:
                updated, grads, kept = write_update(b, step, number, given, grads, kept)
                given |= updated
        params = {"params": {name: given[name] for name in grads}} if step.optimizer else {}
        return {"losses": losses, "outputs": tuple(outputs), "grads": grads, **params}

    inputs = inputs_of(mesh, step.inputs(), BATCH, TENSOR_PARALLEL)
    return spmd_program(mesh, inputs, build, seed=seed, labels=("training",))


def inputs_of(mesh: Mesh, shapes: Mapping[str, tuple[int, ...]], batch: Collection[str], alike: str) -> list[InputSpec]:
    """The inputs of a training step.

    Args:
        shapes: by name, on one rank.
        batch: of which each rank has rows of its own.
        alike: name of the mesh dim over which ranks have the same ones.
    """
    data = [dim for dim in mesh.dims if dim.name != alike]
    rows = tuple((dim.name, Placement("shard", 0)) for dim in data)
    ranks = math.prod(len(dim.group(0)) for dim in data)
    return [
        InputSpec(name, (ranks * shape[0], *shape[1:]), placements=rows) if name in batch else InputSpec(name, shape)
        for name, shape in shapes.items()
    ]


def _averaged(b: GraphBuilder, grad: fx.Node) -> fx.Node:
    for dim in b.mesh.dims:
        if dim.name != TENSOR_PARALLEL:
            reduced = b.call("_c10d_functional::all_reduce", grad, "avg", dim.name)
            grad = b.call("_c10d_functional::wait_tensor", reduced)
    return grad


def grid(world_size: int, dims: int) -> Mesh:
    """A mesh for data parallelism; of two dims, the last one has one rank where the number of ranks is odd, or 2."""
    if dims == 2:
        shards = 2 if world_size > 2 and world_size % 2 == 0 else 1
        return Mesh.grid({"replicate": world_size // shards, "shard": shards})
    return Mesh.grid({"dp": world_size})


def tensor_parallel_grid(world_size: int, dims: int) -> Mesh:
    """A mesh for tensor parallelism. Of two dims, the first is of data parallelism; from eight ranks on there are two of these
    where the number of ranks allows."""
    if dims == 1 or world_size == 2 or world_size % 2:
        return Mesh.grid({TENSOR_PARALLEL: world_size})
    if world_size < 8 or world_size % 4:
        return Mesh.grid({"dp": world_size // 2, TENSOR_PARALLEL: 2})
    return Mesh.grid({"replicate": world_size // 4, "shard": 2, TENSOR_PARALLEL: 2})


def training_programs(mesh: Mesh | None = None, world_size: int | None = None) -> st.SearchStrategy[Program]:
    """Draw training steps for data parallelism.

    Args:
        mesh: what they run on; None draws one or two dims.
        world_size: of the drawn mesh; None draws 2, 3 or 4.
    """
    return _drawn(grid, mesh, world_size)


def tensor_parallel_programs(mesh: Mesh | None = None, world_size: int | None = None) -> st.SearchStrategy[Program]:
    """Draw training steps for tensor parallelism, alone or under data parallelism. See `training_programs`.

    Args:
        mesh: what they run on; None draws a dim of tensor parallel, or dims of data parallel in front of it.
    """
    return _drawn(tensor_parallel_grid, mesh, world_size)


def _drawn(make: Callable[[int, int], Mesh], mesh: Mesh | None, world_size: int | None) -> st.SearchStrategy[Program]:
    sizes = TRAINING_WORLD_SIZES if world_size is None else (world_size,)
    listed = [make(size, dims) for size in sizes for dims in (1, 2)] if mesh is None else [mesh]
    return drawn_on(listed, decode_data_parallel, WIDTH)


__all__ = [
    "TENSOR_PARALLEL",
    "TRAINING_WORLD_SIZES",
    "WIDTH",
    "data_parallel_program",
    "decode_data_parallel",
    "decode_step",
    "grid",
    "inputs_of",
    "tensor_parallel_grid",
    "tensor_parallel_programs",
    "training_programs",
]
