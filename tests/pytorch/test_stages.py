"""Stages of traced pipelines take each other's place; where parts keep their order, nothing is found."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

pytest.importorskip("torch.distributed.pipelining", reason="this torch was built without torch.distributed")

from torch.distributed.pipelining import _IR
from torch.fx.passes.split_module import split_module

from tcverify.errors import Unsupported
from tcverify.program import VARYING, GraphBuilder, InputSpec, Mesh, Program, spmd_program
from tcverify.pytorch.stages import TracedStages, _stages
from tcverify.strategies import DECODERS
from tcverify.verification.verifier import verify
from tests.sizes import by_night

TP2 = Mesh.grid({"tp": 2})
INPUTS = [InputSpec(name, (2, 2), placements=(("tp", VARYING),)) for name in ("x", "w")]
Build = Callable[..., Any]


def program(build: Build, **options: Any) -> Program:
    made = spmd_program(TP2, INPUTS, lambda b: build(b, *(b.input(one.name) for one in INPUTS)))
    return replace(made, options=options)


def chain(b: GraphBuilder, x: fx.Node, w: fx.Node) -> Any:
    return b.call("aten::mm", b.call("aten::exp", b.call("aten::mm", x, w)), w)


def branches(b: GraphBuilder, x: fx.Node, w: fx.Node) -> Any:
    first = b.call("aten::mm", x, w)
    return b.call("aten::sub.Tensor", b.call("aten::exp", first), b.call("aten::sin", first))


def uneven_branches(b: GraphBuilder, x: fx.Node, w: fx.Node) -> Any:
    first = b.call("aten::mm", x, w)
    made = b.call("aten::sub.Tensor", b.call("aten::mul.Tensor", first, x), b.call("aten::sin", first))
    return b.call("aten::add.Tensor", made, w)


def test_a_chain_of_stages_computes_what_the_model_does() -> None:
    verdict = verify(TracedStages(), program(chain, run=1))
    assert verdict.status == "passed", verdict.findings or verdict.doubts


def test_a_barrier_can_be_traced() -> None:
    def waiting(b: GraphBuilder, x: fx.Node, w: fx.Node) -> Any:
        h = b.call("aten::relu", x)
        b.call("p2p::barrier", "tp")
        return b.call("aten::neg", b.call("aten::mm", h, w))

    verdict = verify(TracedStages(), program(waiting, run=2))
    assert verdict.status == "passed", verdict.doubts or verdict.findings


@pytest.mark.parametrize(("build", "kind"), [(branches, "wrong-value"), (uneven_branches, "pass-raised")])
def test_branches_take_each_others_place(build: Build, kind: str) -> None:
    """A finding; its folder has a script on gloo."""
    assert [finding.kind for finding in verify(TracedStages(), program(build, run=1)).findings] == [kind]


def test_where_parts_keep_their_order_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_IR, "split_module", functools.partial(split_module, keep_original_order=True))
    for build in (branches, uneven_branches):
        assert verify(TracedStages(), program(build, run=1)).status == "passed"
    ran = 0
    decoder = DECODERS["traced"]
    for seed in range(by_night(30, 10)):
        drawn = decoder.decode(TP2, bytes((seed * 37 + k * 101) % 251 for k in range(decoder.width)))
        verdict = verify(TracedStages(run=1 + seed % 3), drawn)
        assert not verdict.findings, verdict.findings
        ran += verdict.status == "passed"
    assert ran > by_night(5, 1)


def test_no_collective_is_under_way_between_stages() -> None:
    def build(b: GraphBuilder, x: fx.Node, w: fx.Node) -> Any:
        start = b.call("_c10d_functional::all_reduce", b.call("aten::exp", x), "sum", "tp")
        product = b.call("aten::mm", x, w)
        return b.call("aten::add.Tensor", b.call("_c10d_functional::wait_tensor", start), product)

    graph = program(build).graphs[0]
    assert list(_stages(graph, 1).values()) == [0, 1, 1, 1, 2]


def test_a_stage_that_hands_nothing_on_is_declined() -> None:
    def build(b: GraphBuilder, x: fx.Node, w: fx.Node) -> Any:
        b.call("_c10d_functional::wait_tensor", b.call("_c10d_functional::all_reduce", x, "sum", "tp"))
        return b.call("aten::mm", x, w)

    with pytest.raises(Unsupported, match="hands nothing on"):
        TracedStages(run=1)(program(build).graph_module(0))


def test_a_constant_of_the_module_is_declined() -> None:
    module = program(chain).graph_module(0)
    module.register_buffer("constant", torch.zeros(2, 2))
    (product, *_) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    with module.graph.inserting_before(product):
        product.replace_input_with(product.args[0], module.graph.get_attr("constant"))
    with pytest.raises(Unsupported, match="'constant' is a constant"):
        TracedStages()(module)
