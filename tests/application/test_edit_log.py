"""Which lines of a pass edit which nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import fx

from tcverify import Guarded, verify
from tcverify.application import InProcess, Watch
from tcverify.application.coverage.recorder import Scope
from tcverify.application.edit_log import EditRecorder
from tcverify.application.loading import prepare_pass
from tcverify.program import PARTIAL, InputSpec, Mesh, Program, spmd_program
from tests.support import searched_passes

FILE = str(searched_passes.__file__)


@pytest.fixture
def program() -> Program:
    mesh = Mesh.grid({"tp": 2})
    inputs = [InputSpec("x", (2, 4), placements=(("tp", PARTIAL),)), InputSpec("y", (2, 4))]

    def build(b):
        x, y = b.input("x"), b.input("y")
        return b.call("aten::add.Tensor", b.call("tensor_cast::all_reduce", x, b.rank, b.group("tp")), y)

    return spmd_program(mesh, inputs, build)


def line(words: str) -> int:
    texts = Path(FILE).read_text().splitlines()
    return next(number for number, text in enumerate(texts, 1) if text.endswith(f"# {words}"))


def test_every_kind_of_edit_is_recorded(program):
    recorder = EditRecorder(Scope([FILE]))
    module = program.graph_module(0)
    with recorder.watching():
        searched_passes.inserts_and_moves(module)
    found = recorder.taken()
    assert next((one.what, one.line) for one in found["neg_default"]) == ("creates", line("creates"))
    edits = {(one.what, one.line) for one in found["add"]}
    assert {("rewires", line("assigns")), ("rewires", line("updates")), ("moves", line("moves"))} <= edits
    assert ("retargets", line("retargets")) in {(one.what, one.line) for one in found["neg_default"]}
    assert ("erases", line("erases")) in {(one.what, one.line) for places in found.values() for one in places}
    assert {one.function for places in found.values() for one in places} == {"inserts_and_moves"}
    assert recorder.taken() == {}


def test_edits_of_others_are_filed_under_the_line_of_the_pass_that_led_to_them_or_nowhere(program):
    recorder = EditRecorder(Scope([FILE]))
    graph = program.graph_module(0).graph
    with recorder.watching():
        graph.call_function(searched_passes.NEG, (next(iter(graph.nodes)),))
    assert recorder.taken() == {}


def _raise_inside(recorder: EditRecorder) -> None:
    before = fx.Graph.create_node
    with recorder.watching():
        assert fx.Graph.create_node is not before
        raise ValueError("out")


def test_graphs_are_as_they_were_afterwards(program):
    before = dict(vars(fx.Graph)), dict(vars(fx.Node))
    recorder = EditRecorder(Scope([FILE]))
    with pytest.raises(ValueError, match="out"):
        _raise_inside(recorder)
    assert (dict(vars(fx.Graph)), dict(vars(fx.Node))) == before


def test_a_process_of_its_own_says_the_same(program):
    here = InProcess(prepare_pass(searched_passes.inserts_and_moves, "", {})).start(program, watch=Watch(edits=True))()
    with Guarded("tests.support.searched_passes:inserts_and_moves", covered=()) as subject:
        there = subject.start(program, watch=Watch(edits=True))()
    assert here.trace.edited == there.trace.edited
    assert len(there.trace.edited) == 2
    assert verify(searched_passes.inserts_and_moves, program).status == "refuted"
