"""The reducer on odd programs: whatever their graphs hold, it goes on, or leaves them as they are."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from tcverify.execution import Lockstep
from tcverify.ops import TensorSpec, resolve
from tcverify.program import (
    VARYING,
    InputSpec,
    Mesh,
    MeshDim,
    NotSerialisable,
    Program,
    RankBinding,
    RankConstant,
    compute_nodes,
    dumps,
    loads,
    shard,
    spmd_program,
)
from tcverify.shrink import reduce
from tcverify.shrink.graph.legalize import facts_of, legalize_edit
from tcverify.shrink.graph.sketch import Ref, replace_steps, sketch_of
from tests.support.predicates import has_neg, named, ops, reduced_then_normed
from tests.support.programs import TP2, reduce_then_norm

aten = torch.ops.aten
resolve("tensor_cast::all_reduce")  # defines the ops that are used below


def _foreign(x: torch.Tensor) -> torch.Tensor:
    return x + 1.0


def hand_made(*build: Callable[[fx.Graph, fx.Node], Any], modules: tuple[torch.nn.Module, ...] = ()) -> Program:
    """Each rank runs a graph of its own on x, without metadata but for that of x."""
    graphs = []
    for one in build:
        graph = fx.Graph()
        x = graph.placeholder("x")
        x.meta["val"] = TensorSpec((2, 4), (4, 1), torch.float32, 0, 0)
        graph.output(one(graph, x))
        graphs.append(graph)
    bindings = tuple(RankBinding(i if len(graphs) > 1 else 0, {"rank": i, "tp": [0, 1]}) for i in range(2))
    inputs = (InputSpec("x", (2, 4), placements=(("tp", VARYING),)),)
    return Program(TP2, tuple(graphs), bindings, inputs, modules=modules)


def _owner() -> torch.nn.Module:
    module = torch.nn.Module()
    module.unit = torch.nn.Identity()
    module.weight = torch.nn.Parameter(torch.ones(4))
    return module


def _send(rank: int) -> Callable[[fx.Graph, fx.Node], Any]:
    def build(graph: fx.Graph, x: fx.Node) -> Any:
        before = graph.call_function(aten.neg.default, (x,)) if rank == 0 else x
        moved = graph.call_function(torch.ops.tensor_cast.pipeline_send_recv.default, (before, 0, 1, 0, 1))
        return graph.call_function(aten.relu.default, (moved,)) if rank else (moved, x)

    return build


def _written(graph: fx.Graph, x: fx.Node) -> Any:
    copy = graph.call_function(aten.clone.default, (x,))
    view = graph.call_function(aten.view.default, (copy, [8]))
    graph.call_function(aten.add_.Tensor, (view, 1.0))
    graph.call_function(aten.neg.default, (x,))  # dead
    return copy


def _noted(graph: fx.Graph, x: fx.Node) -> Any:
    first = graph.call_function(aten.neg.default, (x,))
    second = graph.call_function(aten.relu.default, (x,))
    second.meta["after"] = [first]
    return [second, {"a": (x, None, 3.5, slice(1, 2))}]


ODD: dict[str, Callable[[], Program]] = {
    "foreign function": lambda: hand_made(lambda g, x: g.call_function(_foreign, (g.call_function(_foreign, (x,)),))),
    "method": lambda: hand_made(lambda g, x: g.call_method("add_", (g.call_method("float", (x,)), 1.0))),
    "attribute": lambda: hand_made(
        lambda g, x: g.call_function(aten.mul.Tensor, (g.call_function(aten.neg.default, (x,)), g.get_attr("weight"))),
        modules=(_owner(),),
    ),
    "module": lambda: hand_made(lambda g, x: g.call_module("unit", (x,)), modules=(_owner(),)),
    "a module of each rank": lambda: hand_made(
        lambda g, x: g.call_module("unit", (x,)), lambda g, x: g.get_attr("weight"), modules=(_owner(), _owner())
    ),
    "another graph on each rank": lambda: hand_made(_send(0), _send(1)),
    "writes": lambda: hand_made(_written),
    "metadata that names nodes": lambda: hand_made(_noted),
    "no output": lambda: hand_made(lambda g, x: ()),
    "nothing as output": lambda: hand_made(lambda g, x: None),
    "numbers as outputs": lambda: hand_made(lambda g, x: (1, 2.5, "text", [])),
    "an input as output": lambda: hand_made(lambda g, x: {"a": x, "b": [x, x]}),
    "operands that do not fit": lambda: hand_made(
        lambda g, x: g.call_function(aten.mm.default, (g.call_function(aten.relu.default, (x,)), x))
    ),
    "arguments that are no op's": lambda: hand_made(
        lambda g, x: g.call_function(aten.relu.default, (x, x, 7), {"what": None})
    ),
    "a group of strangers": lambda: hand_made(
        lambda g, x: g.call_function(torch.ops.tensor_cast.all_reduce.default, (x, 0, [5, 6]))
    ),
    "a group that is no list": lambda: hand_made(
        lambda g, x: g.call_function(torch.ops.tensor_cast.all_reduce.default, (x, True, 3))
    ),
    "a tuple read whole": lambda: hand_made(
        lambda g, x: g.call_function(aten.split.Tensor, (g.call_function(aten.neg.default, (x,)), 2, 1))
    ),
    "a creation": lambda: hand_made(
        lambda g, x: g.call_function(aten.add.Tensor, (g.call_function(aten.full.default, ([2, 4], 1.0)), x))
    ),
    "not a number": lambda: hand_made(lambda g, x: g.call_function(aten.add.Tensor, (x, float("nan")))),
    "an empty input": lambda: spmd_program(
        Mesh(3, (MeshDim("tp", ((0, 1, 2),)),)),
        [InputSpec("x", (2, 0), placements=(("tp", shard(0)),)), InputSpec("unread", ())],
        lambda b: b.call("aten::relu", b.input("x")) if b.input("unread") else None,
    ),
    "one rank": lambda: spmd_program(
        Mesh.grid({"tp": 1}), [InputSpec("x", (2, 2))], lambda b: b.call("aten::relu", b.input("x"))
    ),
    "unsigned integers": lambda: spmd_program(
        Mesh.grid({"tp": 2}), [InputSpec("x", (2, 4))],
        lambda b: b.call("aten::_to_copy", b.call("aten::_to_copy", b.input("x"), dtype=torch.uint64), dtype=torch.uint16),
    ),
    "unequal shapes": lambda: spmd_program(
        Mesh.grid({"tp": 2}),
        [InputSpec("x", (5, 4), placements=(("tp", shard(0)),))],
        lambda b: b.call("aten::neg", b.call("aten::relu", b.input("x"))),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("salt", range(4))
def test_no_program_is_too_odd(name: str, salt: int) -> None:
    """Whatever is kept: everything, nothing, or some of it."""

    def shows(program: Program) -> bool:
        for rank in range(program.world_size):
            program.graph_module(rank)
        try:
            text = dumps(program)
        except NotSerialisable:
            text = str([graph.python_code("self").src for graph in program.graphs])
        else:
            assert dumps(loads(text)) == text
        return salt == 0 or (salt > 1 and random.Random(f"{salt} {text}").random() < 0.4)

    program = ODD[name]()
    found = reduce(program, shows)
    assert not found.cut
    assert found.program.size <= program.size
    if salt == 0:
        assert found.program.size == 0
    if salt == 1:
        assert found.program is program


def test_a_rank_constant_without_a_value_is_no_obstacle() -> None:
    program = hand_made(lambda g, x: g.call_function(aten.slice.Tensor, (x, 0, RankConstant("gone"), 2)))
    assert reduce(program, lambda _: True).program.size == 0


def test_only_what_matters_is_left_of_ranks_that_run_different_graphs() -> None:
    found = reduce(ODD["another graph on each rank"](), lambda one: has_neg(one) and Lockstep().run(one).finished)
    assert [
        ops_of for ops_of in ([n.target.__name__ for n in compute_nodes(g)] for g in found.program.graphs) if ops_of
    ] == [["neg.default"]]


def test_writes_go_where_they_do_not_matter() -> None:
    found = reduce(ODD["writes"](), lambda one: bool(named(one, "aten::clone")))
    assert ops(found.program) == ["clone"]


def test_writes_stay_where_they_matter() -> None:
    found = reduce(ODD["writes"](), lambda one: bool(named(one, "aten::add_.Tensor")))
    assert ops(found.program) == ["add_.Tensor"]


def test_dead_code_goes_where_it_does_not_matter() -> None:
    found = reduce(ODD["writes"](), has_neg)
    assert ops(found.program) == ["neg"]


def test_inputs_that_nobody_reads_go() -> None:
    program = reduce_then_norm()
    unread = replace(program, inputs=(*program.inputs, InputSpec("unread", (3,))))
    assert [spec.name for spec in reduce(unread, reduced_then_normed).program.inputs] == ["x", "gain"]


def test_no_step_reads_what_its_rank_lacks() -> None:
    """On rank 0, `select_int` is a row of what rank 1 does not have."""

    def build(rank: int) -> Callable[[fx.Graph, fx.Node], Any]:
        def one(graph: fx.Graph, x: fx.Node) -> Any:
            source = graph.call_function(aten.relu.default, (x,)) if rank == 0 else x
            return graph.call_function(aten.neg.default, (graph.call_function(aten.select.int, (source, 0, 0)),))

        return one

    program = hand_made(build(0), build(1))
    facts = facts_of(sketch_of(program))
    assert not facts.precedes("relu_default", "select_int")
    assert facts.precedes("x", "select_int")
    assert legalize_edit(facts, replace_steps(facts.sketch, {"select_int": Ref("relu_default")})) is None
    assert legalize_edit(facts, replace_steps(facts.sketch, {"select_int": Ref("x")})) is not None
    reduction = reduce(program, has_neg)
    assert has_neg(reduction.program)
    for graph in reduction.program.graphs:
        graph.lint()
