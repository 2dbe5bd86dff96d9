"""What the multistream pass leaves alone, and what it takes for an input."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from tcverify.passes import Multistream
from tests.support.stream_programs import GRID, TP2, Builder, is_lowered, lowered, node, program


def overlapping(b: Builder) -> Any:
    """A collective that three products can hide."""
    return b.add(b.all_reduce(b["x"]), b.mm(b.mm(b.mm(b["v"]))))


def test_a_second_run_changes_nothing() -> None:
    gm = Multistream()(program(overlapping).graph_module(0))
    before = gm.code
    assert Multistream()(gm).code == before


def _without_metadata(gm: fx.GraphModule) -> None:
    del node(gm.graph, "mm").meta["val"]


def _with_stale_metadata(gm: fx.GraphModule) -> None:
    val = node(gm.graph, "mm").meta["val"]
    node(gm.graph, "mm").meta["val"] = val.new_empty((8, 8), dtype=torch.bfloat16)


def _with_a_method(gm: fx.GraphModule) -> None:
    add = node(gm.graph, "add")
    with gm.graph.inserting_before(add):
        made = gm.graph.call_method("relu", (add.args[1],))
        made.meta["val"] = add.args[1].meta["val"]
    add.replace_input_with(add.args[1], made)


def _with_an_unknown_op(gm: fx.GraphModule) -> None:
    node(gm.graph, "mm").target = torch.matmul


def _with_an_odd_cost(gm: fx.GraphModule) -> None:
    node(gm.graph, "mm").meta["cost_s"] = float("nan")


def _without_a_cost(gm: fx.GraphModule) -> None:
    del node(gm.graph, "mm").meta["cost_s"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_without_metadata, "'mm'"),
        (_with_stale_metadata, "'mm'"),
        (_with_a_method, "call_method"),
        (_with_an_unknown_op, "no meaning"),
        (_with_an_odd_cost, "not a time"),
        (_without_a_cost, "no device"),
    ],
)
def test_what_cannot_be_relied_on_leaves_the_graph_alone(
    change: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    gm = program(overlapping).graph_module(0)
    change(gm)
    before = str(gm.graph)
    with caplog.at_level("INFO"):
        Multistream()(gm)
    assert str(gm.graph) == before
    assert len(caplog.records) == 1
    assert reason in caplog.text


def _with_an_effect(b: Builder) -> Any:
    b.call("p2p::barrier", "tp")
    return overlapping(b)


def _asynchronous(b: Builder) -> Any:
    started = b.call("_c10d_functional::all_reduce", b["x"], "sum", "tp")
    return b.add(b.call("_c10d_functional::wait_tensor", started), b.mm(b.mm(b.mm(b["v"]))))


@pytest.mark.parametrize(("build", "reason"), [(_with_an_effect, "has effects"), (_asynchronous, "is asynchronous")])
def test_what_communicates_beside_the_host_leaves_the_graph_alone(
    build: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    gm = program(build).graph_module(0)
    before = str(gm.graph)
    with caplog.at_level("INFO"):
        Multistream()(gm)
    assert str(gm.graph) == before
    assert len(caplog.records) == 1
    assert reason in caplog.text


def test_symbolic_shapes_leave_the_graph_alone() -> None:
    def two_products(x: torch.Tensor, size: int) -> torch.Tensor:
        return torch.mm(x, x.t()) @ x[:size]

    gm = make_fx(two_products, tracing_mode="symbolic")(torch.ones(6, 4), 6)
    before = str(gm.graph)
    Multistream(device="l4")(gm)
    assert str(gm.graph) == before


def test_items_of_constants_are_numbers() -> None:
    original = program(overlapping)
    gm = original.graph_module(0)
    add = node(gm.graph, "add")
    with gm.graph.inserting_before(add):
        two = gm.graph.call_function(operator.getitem, ((1, 2), 1))
        two.meta["val"] = 2
    add.update_kwarg("alpha", two)
    Multistream()(gm)
    assert is_lowered(gm.graph)
    gm.graph.lint()


def test_attributes_are_inputs() -> None:
    original = program(overlapping)
    gm = original.graph_module(0)
    gm.register_buffer("kept", torch.ones(8, 8))
    add = node(gm.graph, "add")
    with gm.graph.inserting_before(add):
        kept = gm.graph.get_attr("kept")
        kept.meta["val"] = add.args[1].meta["val"].new_empty((8, 8))
    add.replace_input_with(add.args[1], kept)
    Multistream()(gm)
    assert is_lowered(gm.graph)
    assert kept.next.op != "placeholder"
    gm.graph.lint()


@pytest.mark.parametrize("mesh", [TP2, GRID], ids=["2", "2x2"])
def test_a_graph_without_work_is_left_alone(mesh: Any) -> None:
    original = program(lambda b: (b["x"], b.view(b["r"], 64)), mesh=mesh)
    assert not is_lowered(lowered(original))
