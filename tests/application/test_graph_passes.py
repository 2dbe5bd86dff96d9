"""Passes that take a `Graph`, passes that have run already, and by what name a pass is found again."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from tcverify import PARTIAL, InputSpec, Mesh, Program, spmd_program, verify
from tcverify.application import AppliedPass, PassFacts, load_pass
from tcverify.application.loading import prepare_pass, reference_of, takes_graph
from tcverify.application.pair import Pair
from tcverify.errors import InternalError
from tcverify.program import Contract
from tests.support import checked_passes as passes


def summed() -> Program:
    x = InputSpec("x", (4, 6), placements=(("tp", PARTIAL),))
    return spmd_program(
        Mesh.grid({"tp": 2}),
        [x],
        lambda b: b.call(
            "_c10d_functional::wait_tensor", b.call("_c10d_functional::all_reduce", b.input("x"), "sum", "tp")
        ),
    )


def typed(graph: torch.fx.Graph) -> None:
    """The annotation stands here as text."""


def of_module(gm: fx.GraphModule) -> None: ...


def test_passes_that_take_a_graph_say_so() -> None:
    assert takes_graph(passes.Graphwise())
    assert takes_graph(typed)
    assert not takes_graph(of_module)
    assert not takes_graph(passes.unannotated)


def test_passes_on_graphs_are_verified_like_others() -> None:
    assert verify(passes.Graphwise, summed()).status == "passed"
    assert verify(passes.Graphwise, summed()).changed
    assert verify("tests.support.checked_passes:GraphwiseWrong", summed()).status == "refuted"


def test_a_graph_that_is_returned_becomes_that_of_a_module() -> None:
    def renewed(graph: fx.Graph) -> fx.Graph:
        return passes._copy(graph)

    gm = summed().graph_module(0)
    made = prepare_pass(renewed, "", {}).call(gm)
    assert isinstance(made, fx.GraphModule)
    assert made.graph is not gm.graph
    assert verify(renewed, summed()).status == "passed"


def test_passes_are_found_again_by_name() -> None:
    assert reference_of(passes.forget_sum) == "tests.support.checked_passes:forget_sum"
    assert reference_of(passes.Graphwise) == "tests.support.checked_passes:Graphwise"
    assert reference_of(passes.Graphwise()) == "tests.support.checked_passes:Graphwise"
    other = passes.Graphwise()
    other.applicable_to = "nothing"
    assert reference_of(other) is None  # its class would make another one
    assert reference_of(lambda gm: gm) is None
    assert load_pass("tests.support.checked_passes:Graphwise").facts.name == "Graphwise"


def test_what_a_pass_has_done_already_is_judged_without_it() -> None:
    program = summed()
    pair = Pair(program, program, changed=False)
    done = AppliedPass(PassFacts("mine"), Contract(), pair)
    assert verify(done, program).status == "passed"
    assert verify(done, program).pair is pair
    done.close()
    with pytest.raises(InternalError, match="another program"):
        verify(done, summed())
