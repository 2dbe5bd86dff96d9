"""What holds of programs that are drawn for DTensor."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

from tcverify.execution import Lockstep
from tcverify.program import Program, dumps, loads
from tcverify.pytorch.dtensor import DTensorProgram
from tcverify.strategies import dtensor_programs
from tcverify.strategies.dtensor.programs import WIDTH, decode_dtensor, meshes
from tcverify.verification.verifier import verify


def sample(count: int, seed: int) -> Iterator[Program]:
    generator = random.Random(seed)
    for _ in range(count):
        yield decode_dtensor(generator.choice(meshes(generator.choice((2, 3, 4)))), generator.randbytes(WIDTH))


def test_most_programs_run_and_are_what_their_bytes_say() -> None:
    finished = 0
    for program in sample(120, seed=1):
        finished += Lockstep().run(program).finished
        assert dumps(loads(dumps(program))) == dumps(program)
    assert finished >= 115  # kernels refuse some dtypes that shapes do not tell of


def test_any_bytes_decode() -> None:
    assert decode_dtensor(meshes(2)[0], b"").size >= 1
    assert decode_dtensor(meshes(2)[0], b"\xff" * WIDTH).size >= 1
    assert dumps(decode_dtensor(meshes(4)[0], b"\x11" * 9)) == dumps(decode_dtensor(meshes(4)[0], b"\x11" * 9))


def test_programs_divide_tensors_and_ops_are_of_many_kinds() -> None:
    ops, placed = Counter[str](), Counter[str]()
    for program in sample(200, seed=2):
        ops.update(str(node.target) for node in program.graphs[0].nodes if node.op == "call_function")
        placed.update(one for value in program.options.values() for one in str(value).split(","))
    assert len(ops) > 120
    assert min(placed[one] for one in ("R", "S0", "S1", "S2")) > 5


def test_dtensor_does_most_of_what_is_drawn() -> None:
    statuses = Counter(
        verify(DTensorProgram(), program, checks=["equivalence"]).status for program in sample(12, seed=4)
    )
    assert statuses["passed"] >= 6


def test_the_strategy_heeds_mesh_and_world_size() -> None:
    from hypothesis import find

    mesh = meshes(3)[0]
    assert find(dtensor_programs(mesh=mesh), lambda program: True).mesh == mesh
    assert find(dtensor_programs(world_size=8), lambda program: True).world_size == 8
