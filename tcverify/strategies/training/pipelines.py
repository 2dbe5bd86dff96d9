"""Training steps in stages, drawn for schedules of pipeline parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from hypothesis import strategies as st

from tcverify.program import Mesh, Program
from tcverify.strategies.choices import weighted_table
from tcverify.strategies.meshes import drawn_on
from tcverify.strategies.training.model import (
    IGNORE,
    LAYERS,
    LOSSES,
    REVERSED,
    SCHEDULES,
    SHARED,
    SHIFT,
    TrainingStep,
    training_program,
)

#: World sizes that are drawn; a pipeline has a rank at least per process.
PIPELINE_WORLD_SIZES = (2, 3, 4, 2)

HEADER = 7
STAGES = 8
STAGE_WIDTH = 4
#: Bytes of a whole program: seed, schedule, stages per rank, microbatches, rows, loss, frozen stages; then each stage.
WIDTH = HEADER + STAGES * STAGE_WIDTH

#: The first layer has parameters.
_FIRST = weighted_table(("mm", 4), ("linear", 3), ("skip", 3), ("twice", 2), ("scale", 2), ("unused", 1), ("bias", 1))
_SECOND = weighted_table(
    ("", 4), ("tanh", 4), ("relu", 1), ("mm", 2), ("scale", 2), ("twice", 1), ("linear", 1), ("biases", 1)
)
_THIRD = weighted_table(("", 6), ("tied", 1), ("biases", 1))
_ENDS = weighted_table(("", 8), ("two", 4), ("through", 2), ("constant", 1), ("mask", 1))
_NAMES = tuple(SCHEDULES)


@cache
def line(world_size: int) -> Mesh:
    """The mesh of a pipeline."""
    return Mesh.grid({"pp": world_size})


def decode_pipelining(mesh: Mesh, choices: bytes) -> Program:
    """Decode any bytes into a training step for a pipeline over the last dim of a mesh."""
    step = decode_step(len(mesh.dims[-1].group(0)) if mesh.dims else 1, choices)
    return replace(training_program(mesh, step, seed=choices[0] if choices else 0), options=step.options())


def decode_step(ranks: int, choices: bytes) -> TrainingStep:
    """Decode any bytes into a training step for so many ranks."""
    choices = choices.ljust(WIDTH, b"\0")
    _, which, several, many, rows, how, frozen = choices[:HEADER]
    name = _NAMES[which % len(_NAMES)]
    number = ranks * ({"one": 1, "back": 2}.get(SCHEDULES[name]) or 1 + (several + 1) % 3)
    records = [choices[at : at + STAGE_WIDTH] for at in range(HEADER, WIDTH, STAGE_WIDTH)]
    microbatches = _microbatches(name, ranks, number, many)
    return TrainingStep(
        schedule=name,
        stages=tuple(stage_words(records[k % STAGES], last=k == number - 1) for k in range(number)),
        microbatches=microbatches,
        rows=microbatches * (1 + rows % 2),
        frozen=frozen_stages(number, frozen),
        loss=list(LOSSES)[how % 2],
        scale_grads=how // 2 % 4 != 3,
    )


def stage_words(record: Sequence[int], last: bool) -> str:
    """The words of a stage."""
    first, second, end, flags = record
    layers, shapes = [], set[tuple[int, ...]]()
    for layer in (_FIRST[first % len(_FIRST)], _SECOND[second % len(_SECOND)], _THIRD[end // len(_ENDS) % len(_THIRD)]):
        if layer and SHARED.get(layer, ()) in {(), *shapes}:
            layers.append(layer)
            shapes.update(LAYERS[layer][0].values())
    words = [
        SHIFT if flags % 8 == 7 else "",
        IGNORE if flags // 8 % 8 == 7 else "",
        REVERSED if flags // 64 % 2 else "",
        *layers,
        _ENDS[end % len(_ENDS)],
    ]
    if last and words[-1] == "mask":  # a loss is of numbers
        words[-1] = ""
    return " ".join(word for word in words if word)


def _microbatches(name: str, ranks: int, stages: int, choice: int) -> int:
    """How many microbatches: mostly what the schedule takes."""
    if choice % 16 == 15:
        return 1 + choice // 16
    extra = choice % 4
    if SCHEDULES[name] == "rounds":
        return ranks * (1 + extra % 2) if extra < 3 else 1 + choice // 4 % ranks
    return stages + extra if name in ("1F1B", "DualPipeV") else 1 + choice % (stages + 2)


def frozen_stages(stages: int, choice: int) -> tuple[int, ...]:
    """Stages whose parameters are not trained; one at least is."""
    if choice % 4 != 3:
        return ()
    found = tuple(stage for stage in range(stages) if choice >> 2 + stage % 6 & 1)
    return found if len(found) < stages else found[1:]


def pipelining_programs(mesh: Mesh | None = None, world_size: int | None = None) -> st.SearchStrategy[Program]:
    """Draw training steps for pipelines.

    Args:
        mesh: what they run on: a pipeline over its last dim, the same over its others; None draws a line.
        world_size: of the drawn mesh; None draws 2, 3 or 4.
    """
    sizes = PIPELINE_WORLD_SIZES if world_size is None else (world_size,)
    listed = tuple(map(line, sizes)) if mesh is None else (mesh,)
    return drawn_on(listed, decode_pipelining, WIDTH)


__all__ = [
    "HEADER", "PIPELINE_WORLD_SIZES", "STAGES", "STAGE_WIDTH", "WIDTH", "decode_pipelining", "decode_step", "frozen_stages",
    "line", "pipelining_programs", "stage_words",
]  # fmt: skip
