"""Asynchronous programs for tests of communication buffers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from tcverify.passes import CommBuffers
from tcverify.passes.comm_buffers.plan import Buffer
from tcverify.program import Program
from tcverify.strategies import all_meshes
from tcverify.strategies.functional import programs as functional


def drawn(count: int, seed: int) -> Iterator[Program]:
    """Programs as the strategy for asynchronous programs draws them, on meshes of two to four ranks."""
    generator = random.Random(seed)
    meshes = [mesh for size in (2, 3, 4) for mesh in all_meshes(size)]
    for _ in range(count):
        yield functional.decode_functional(generator.choice(meshes), generator.randbytes(functional.WIDTH))


def lower(program: Program, **options: Any) -> Program:
    """Return the program as the pass leaves it on all ranks."""
    modules = program.graph_modules()
    for module in modules:
        CommBuffers(**options)(module)
    return program.with_graphs([module.graph for module in modules])


def clash(first: Buffer, second: Buffer) -> bool:
    """Whether both are needed at the same time, and lie in the same bytes."""
    together = first.birth <= second.death and second.birth <= first.death
    return together and first.offset < second.offset + second.nbytes and second.offset < first.offset + first.nbytes
