"""Defects of comm-buffer lowering: each is found in a program made for it, in which the sound pass is not refuted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tcverify.passes import CommBuffers
from tcverify.program import Mesh, MeshDim, Program
from tcverify.program.graph import RankBinding
from tcverify.verification.verifier import verify
from tests.mutants.comm_buffers import EXPECTED, MUTANTS
from tests.passes.comm_buffers.test_comm_buffers import GRID, NEEDED, Builder, program


def two_under_way(b: Builder) -> Any:
    first = b.start(b.made(), "avg")
    second = b.start(b.made(b.relu(b.x)), "avg")
    return b.relu(b.wait(first)), b.relu(b.wait(second))


def read_after_the_next_is_made(b: Builder) -> Any:
    total = b.wait(b.start(b.made(), "avg"))
    other = b.made(b.relu(b.x))
    return b.relu(total), b.relu(b.wait(b.start(other, "avg")))


def made_under_way(b: Builder) -> Any:
    first = b.start(b.made(), "avg")
    other = b.made(b.relu(b.x))
    total = b.wait(first)
    return b.relu(total), b.relu(b.wait(b.start(other, "avg")))


def returned_operand(b: Builder) -> Any:
    x = b.made()
    return x, b.relu(b.wait(b.call("all_gather_into_tensor", x, 2, "tp")))


def gathered_then_summed(b: Builder) -> Any:
    x = b.made()
    gathered = b.call("all_gather_into_tensor", x, 2, "tp")
    return b.relu(b.wait(b.start(x, "avg"))), b.relu(b.wait(gathered))


TWINS = Mesh(2, (MeshDim("tp", ((0, 1),)), MeshDim("twin", ((0, 1),))))


def swapped(mesh: Mesh) -> Program:
    """Rank 0 starts its collectives on two groups in another order than the other ranks."""
    names = [dim.name for dim in mesh.dims]

    def build(order: Sequence[str]) -> Program:
        def written(b: Builder) -> Any:
            started = {name: b.start(b.made(), "sum", name) for name in order}
            return [b.relu(b.wait(started[name])) for name in names]

        return program(written, mesh)

    one, two = build(names), build(names[::-1])
    ranks = (one.ranks[0], *(RankBinding(1, binding.constants) for binding in two.ranks[1:]))
    return Program(mesh, (one.graphs[0], two.graphs[0]), ranks, one.inputs, one.seed)


PROGRAMS: dict[str, Program] = {
    "OverwritesWhatIsReadLater": program(NEEDED["read behind"]),
    "OverwritesWhatIsUnderWay": program(gathered_then_summed),
    "OverwritesInputs": program(NEEDED["an input"]),
    "DropsAllWaits": program(two_under_way),
    "KeepsTheMetadata": program(NEEDED["an input"]),
    "FreesAtTheStart": program(made_under_way),
    "FreesAtTheWait": program(read_after_the_next_is_made),
    "PlacesOutputs": program(returned_operand),
    "TakesRanksToBeAlike": swapped(GRID),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_defect_is_found_and_the_sound_pass_is_not_refuted(name: str) -> None:
    found = {finding.kind for finding in verify(MUTANTS[name](), PROGRAMS[name]).findings}
    assert found & EXPECTED[name], found
    verdict = verify(CommBuffers(), PROGRAMS[name])
    assert verdict.status == "passed", verdict.findings


def test_options_that_are_said_to_be_unsafe_are() -> None:
    found = {
        finding.kind
        for finding in verify(CommBuffers(unsafe_alike=True, unsafe_blocking=True), swapped(TWINS)).findings
    }
    assert "deadlock" in found
    assert "deadlock" not in {f.kind for f in verify(CommBuffers(unsafe_alike=True), swapped(TWINS)).findings}


def test_every_mutant_has_a_program() -> None:
    assert PROGRAMS.keys() == MUTANTS.keys() == EXPECTED.keys()
