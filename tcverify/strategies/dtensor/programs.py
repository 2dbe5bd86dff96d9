"""Programs of whole tensors for DTensor to divide: few ops of many kinds, with placements drawn for inputs and in between."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from hypothesis import strategies as st

from tcverify.ops import TensorSpec, qualified_name
from tcverify.program import Mesh, Program
from tcverify.strategies.draft import DraftValue, ProgramDraft
from tcverify.strategies.dtensor.gradients import with_gradients
from tcverify.strategies.dtensor.ops import FAMILIES
from tcverify.strategies.dtensor.writing import SIZES, DTensorWriter
from tcverify.strategies.meshes import drawn_on

#: World sizes of drawn meshes, and the meshes of each: row-major grids, as DTensor has them.
_MESHES: dict[int, tuple[dict[str, int], ...]] = {
    1: ({"tp": 1},),
    2: ({"tp": 2}, {"dp": 1, "tp": 2}),
    3: ({"tp": 3},),
    4: ({"dp": 2, "tp": 2}, {"tp": 4}),
    6: ({"dp": 2, "tp": 3}, {"dp": 3, "tp": 2}),
    8: ({"pp": 2, "dp": 2, "tp": 2}, {"dp": 2, "tp": 4}, {"dp": 4, "tp": 2}),
}
DTENSOR_WORLD_SIZES = (2, 4, 3, 6, 8, 2)

INPUTS = 2
INPUT_WIDTH = 5
RECORDS = 5
RECORD_WIDTH = 5
#: How many nodes may be given placements, inputs first.
PLACED = 14
PLACED_WIDTH = 4
#: From which second byte on a program has gradients.
_DIFFERENTIATED = 192
#: Bytes of a whole program: seed, number of records, inputs, records, placements.
WIDTH = 2 + INPUTS * INPUT_WIDTH + RECORDS * RECORD_WIDTH + PLACED * PLACED_WIDTH


@cache
def meshes(world_size: int) -> tuple[Mesh, ...]:
    """The meshes that are drawn at this world size: one of another size is a line."""
    return tuple(map(Mesh.grid, _MESHES.get(world_size, ({"tp": world_size},))))


def decode_dtensor(mesh: Mesh, choices: bytes) -> Program:
    """Decode any bytes into a program on `mesh`. What does not fit together is left out."""
    choices = choices.ljust(WIDTH, b"\0")
    w = DTensorWriter(ProgramDraft(mesh, scope=("dtensor",)))
    # Uneven shards, none of which or one of which is empty.
    sizes = (*SIZES, mesh.world_size + 1, mesh.world_size - 1)
    at = 2
    for _ in range(INPUTS):
        dims, one, two, three, how = choices[at : at + INPUT_WIDTH]
        at += INPUT_WIDTH
        shape = [sizes[n % len(sizes)] for n in (one, two, three, 1)][: (2, 2, 1, 3, 2, 3, 0, 4)[dims % 8]]
        if dims >= 250 and shape:
            shape[0] = 0
        w.values.append(w.input(shape, how))
    made: list[DraftValue] = []
    number = 1 + choices[1] % RECORDS
    for _ in range(number):
        family, which, a, b, c = choices[at : at + RECORD_WIDTH]
        at += RECORD_WIDTH
        x = w.values[-1 - (which // 8 % min(4, len(w.values)) if which % 8 > 4 else 0)]
        found = FAMILIES[family % len(FAMILIES)](w, x, a, b, c)
        w.values += found
        made += found
    ends = made[-2:] or w.values[-1:]
    # What is returned shares no memory with an input or with another result: DTensor promises nothing of that.
    outputs = [copied for end in ends for copied in w.call("clone", end)]
    program = w.draft.program(tuple(outputs), choices[0], ())
    if choices[1] >= _DIFFERENTIATED:
        program = with_gradients(program)
    placed = choices[2 + INPUTS * INPUT_WIDTH + RECORDS * RECORD_WIDTH :]
    return replace(program, options=_placements(program, placed))


def _placements(program: Program, choices: bytes) -> dict[str, str]:
    """Draw placements: for every input, and for one value in four."""
    found: dict[str, str] = {}
    reduced = {
        node.args[0]
        for node in program.graphs[0].nodes
        if qualified_name(node.target) == "_c10d_functional::all_reduce"
    }
    records = [choices[n : n + PLACED_WIDTH] for n in range(0, PLACED * PLACED_WIDTH, PLACED_WIDTH)]
    nodes = [n for n in program.graphs[0].nodes if n.op != "output" and isinstance(n.meta.get("val"), TensorSpec)]
    nodes = [n for n in nodes if not qualified_name(n.target).startswith("_c10d_functional") and n not in reduced]
    for node, record in zip(nodes, itertools.cycle(records)):
        whether, *each = record
        if node.op != "placeholder" and whether % 4 != 1:
            continue
        dims = len(node.meta["val"].shape)
        placed = _layout(each[: len(program.mesh.dims)], dims)
        if any(one != "R" for one in placed) or node.op != "placeholder":
            found[node.name] = ",".join(placed)
    return found


def _layout(choices: Sequence[int], dims: int) -> list[str]:
    """Placements over the dims of a mesh, as `torch:dtensor` reads them. FSDP shards what a dim behind it has sharded."""
    found: list[str] = []
    for choice in reversed(choices):
        sharded = next((one[1:] for one in found if one != "R"), None)
        if not dims or choice % 4 == 0:
            found.insert(0, "R")
        elif choice % 4 == 3 and sharded is not None:
            found.insert(0, f"F{sharded}")
        else:
            found.insert(0, f"S{choice // 4 % dims}")
    return found


def dtensor_programs(mesh: Mesh | None = None, world_size: int | None = None) -> st.SearchStrategy[Program]:
    """Draw programs for DTensor.

    Args:
        mesh: what they run on; None draws a row-major grid.
        world_size: of the drawn mesh; None draws up to 8.
    """
    return drawn_on_grids(decode_dtensor, WIDTH, mesh, world_size)


def drawn_on_grids(
    decode: Callable[[Mesh, bytes], Program], width: int, mesh: Mesh | None, world_size: int | None
) -> st.SearchStrategy[Program]:
    """Draw a mesh as `dtensor_programs` does, and bytes that are decoded into a program on it.

    Args:
        width: number of bytes of a program.
    """
    if mesh is not None:
        listed: tuple[Mesh, ...] = (mesh,)
    else:
        sizes = DTENSOR_WORLD_SIZES if world_size is None else (world_size,)
        listed = tuple(one for size in sizes for one in meshes(size))
    return drawn_on(listed, decode, width)


__all__ = ["DTENSOR_WORLD_SIZES", "decode_dtensor", "drawn_on_grids", "dtensor_programs", "meshes"]
