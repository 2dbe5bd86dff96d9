"""Passes that do legal but odd things are not refuted, and none slips through by doing them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import fx

from tcverify import Contract, verify
from tcverify.execution import Lockstep
from tcverify.ops import TensorSpec
from tcverify.program import PARTIAL, VARYING, GraphBuilder, InputSpec, Program, RankBinding, spmd_program
from tests.support.programs import TP2, reduce_then_norm
from tests.verification.test_verifier import insert, kinds, node

aten = torch.ops.aten


def output(gm: fx.GraphModule) -> fx.Node:
    return next(n for n in gm.graph.nodes if n.op == "output")


def replace_output(gm: fx.GraphModule, index: int, make: Callable[[fx.Node], fx.Node]) -> None:
    """Return `make(value)` in place of a value, under the value's own metadata."""
    last = output(gm)
    values = list(last.args[0])
    with gm.graph.inserting_before(last):
        new = make(values[index])
    new.meta["val"] = torch.empty_like(values[index].meta["val"])
    values[index] = new
    last.args = (tuple(values),)


def one_input(build: Callable[[GraphBuilder, fx.Node], object]) -> Program:
    x = InputSpec("x", (4, 8), placements=(("tp", VARYING),))
    return spmd_program(TP2, [x], lambda b: build(b, b.input("x")))


# ------------------------------------------------------------------------------------------- wrong, and seen to be


def test_nodes_behind_the_output_are_malformed() -> None:
    def forget_where(gm: fx.GraphModule) -> None:
        gm.graph.call_function(aten.neg.default, (node(gm, "rms_norm"),))

    assert kinds(forget_where) == ["malformed-graph"]


def test_a_recorded_cast_of_an_output_changes_the_signature() -> None:
    def cast(gm: fx.GraphModule) -> None:
        def half(value: fx.Node) -> fx.Node:
            return gm.graph.call_function(aten._to_copy.default, (value,), {"dtype": torch.bfloat16})

        replace_output(gm, 1, half)
        made = output(gm).args[0][1]  # type: ignore[index]
        made.meta["val"] = made.meta["val"].to(torch.bfloat16)  # type: ignore[union-attr]

    assert kinds(cast) == ["changed-signature"]


def test_metadata_that_lies_from_the_inputs_on_is_stale() -> None:
    def lie(gm: fx.GraphModule) -> None:
        for n in gm.graph.nodes:
            if n.op != "output":
                shape = (2, *n.meta["val"].shape[1:]) if n.meta["val"].dim() > 1 else tuple(n.meta["val"].shape)
                n.meta["val"] = n.meta["val"].new_empty(shape)

    assert kinds(lie, contract=Contract(metadata=True)) == ["stale-metadata"]


def test_metadata_of_an_input_cannot_be_dropped() -> None:
    def drop(gm: fx.GraphModule) -> None:
        del node(gm, "x").meta["val"]

    assert kinds(drop, contract=Contract(metadata=True)) == ["stale-metadata"]


def test_a_method_that_writes_into_an_input_is_seen() -> None:
    def write(gm: fx.GraphModule) -> None:
        with gm.graph.inserting_before(output(gm)):
            gm.graph.call_method("add_", (node(gm, "x"), 5))

    assert "wrong-value" in kinds(write)


@pytest.mark.parametrize("checks", [["equivalence"], ["metadata"], ["collectives"]])
def test_a_program_that_did_not_run_never_passes(checks: list[str]) -> None:
    verdict = verify(lambda gm: 3, reduce_then_norm(), checks=checks)
    assert (verdict.status, [d.reason for d in verdict.doubts]) == ("inconclusive", ["not-judged"])


@pytest.mark.parametrize(("dim", "kind"), [(0.0, "rewritten-raises"), ([0], "rewritten-raises")])
def test_arguments_that_no_collective_takes_are_findings(dim: object, kind: str) -> None:
    def gather(gm: fx.GraphModule) -> None:
        n = node(gm, "all_reduce")
        x, rank, group = n.args
        n.target, n.args = torch.ops.tensor_cast.all_gather.default, (x, dim, rank, group)  # type: ignore[assignment]

    assert kind in kinds(gather)


def test_negative_splits_are_findings() -> None:
    def split(gm: fx.GraphModule) -> None:
        n = node(gm, "all_reduce")
        x, rank, group = n.args
        n.target, n.args = torch.ops.tensor_cast.all_to_all.default, (x, [-1, 5], [-1, 5], rank, group)

    assert "rewritten-raises" in kinds(split)


def test_constants_that_files_cannot_nest_are_findings() -> None:
    def nest(gm: fx.GraphModule) -> None:
        deep: object = 1e-6
        for _ in range(100):
            deep = [deep]
        n = node(gm, "rms_norm")
        n.args = (*n.args[:2], deep)  # type: ignore[assignment]

    assert "rewritten-raises" in kinds(nest)


def test_what_a_pass_raises_or_returns_need_not_be_printable() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError

        __repr__ = __str__

    def raises(gm: fx.GraphModule) -> None:
        raise Mute

    assert kinds(raises) == ["pass-raised"]
    assert kinds(lambda gm: Mute()) == ["malformed-graph"]


def test_a_second_application_may_leave_rubbish() -> None:
    def break_next_time(gm: fx.GraphModule) -> None:
        norm = node(gm, "rms_norm")
        if norm.args[2] == 1e-6:
            norm.args = (*norm.args[:2], 1e-6 * (1 + 2**-52))
        else:
            norm.prepend(output(gm))
            norm.args = (norm, *norm.args[1:])

    assert kinds(break_next_time, deep=True) == ["impure-pass"]


def test_every_rank_keeps_its_own_signature() -> None:
    """Rank 1 takes an input that rank 0 does not; after the pass both graphs are the same."""

    def graph(*names: str) -> fx.Graph:
        made = fx.Graph()
        for number, name in enumerate(names):
            made.placeholder(name).meta["val"] = TensorSpec((4, 8), (8, 1), torch.float32, 0, number)
        x = next(iter(made.nodes))
        negated = made.call_function(aten.neg.default, (x,))
        negated.meta["val"] = TensorSpec((4, 8), (8, 1), torch.float32, 0, len(names))
        made.output((negated,))
        return made

    inputs = (InputSpec("x", (4, 8)), InputSpec("w", (4, 8)))
    program = Program(TP2, (graph("x"), graph("x", "w")), (RankBinding(0, {}), RankBinding(1, {})), inputs)

    def drop(gm: fx.GraphModule) -> None:
        replace_output(gm, 0, lambda value: gm.graph.call_function(aten.add.Tensor, (value, 0.0)))
        for n in gm.graph.find_nodes(op="placeholder", target="w"):
            gm.graph.erase_node(n)

    assert kinds(drop, program) == ["changed-signature"]


# --------------------------------------------------------------------------------------------- odd, and none the worse


def test_a_placeholder_may_be_renamed() -> None:
    def rename(gm: fx.GraphModule) -> None:
        node(gm, "x").name = "another"
        insert(gm, "rms_norm", aten.mul.Tensor, 1.0)

    assert kinds(rename) == []


def test_the_graph_of_the_given_module_may_be_replaced() -> None:
    def replace(gm: fx.GraphModule) -> fx.GraphModule:
        given = gm.graph
        made = fx.Graph()
        made.output(made.graph_copy(given, {}))
        given.erase_node(output(gm))
        gm.graph = made
        return gm

    assert kinds(replace) == []


def test_a_module_may_have_an_attribute_named_graph_module() -> None:
    def wrap(gm: fx.GraphModule) -> fx.GraphModule:
        made = fx.GraphModule(gm, gm.graph)
        made.graph_module = torch.nn.Identity()
        return made

    assert kinds(wrap) == []


def _same(x: torch.Tensor) -> torch.Tensor:
    return x + 0.0


def _call_function(gm: fx.GraphModule, value: fx.Node) -> fx.Node:
    return gm.graph.call_function(_same, (value,))


def _call_method(gm: fx.GraphModule, value: fx.Node) -> fx.Node:
    return gm.graph.call_method("float", (value,))


def _call_module(gm: fx.GraphModule, value: fx.Node) -> fx.Node:
    gm.unit = torch.nn.Linear(8, 8, bias=False)
    with torch.no_grad():
        gm.unit.weight.copy_(torch.eye(8))
    return gm.graph.call_module("unit", (value,))


def _constant(gm: fx.GraphModule, value: fx.Node) -> fx.Node:
    zero = gm.graph.call_function(aten.full.default, ([8], 0.0))
    zero.meta["val"] = value.meta["val"].new_empty((8,))
    return gm.graph.call_function(aten.add.Tensor, (value, zero))


def _integer_division(gm: fx.GraphModule, value: fx.Node) -> fx.Node:
    one = gm.graph.call_function(aten.full.default, ([8], 1))
    one.meta["val"] = value.meta["val"].new_empty((8,), dtype=torch.int64)
    unit = gm.graph.call_function(aten.floor_divide.default, (one, one))
    unit.meta["val"] = torch.empty_like(one.meta["val"])
    return gm.graph.call_function(aten.mul.Tensor, (value, unit))


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("make", [_call_function, _call_method, _call_module, _constant, _integer_division])
def test_whatever_fx_allows_may_be_inserted(make: Callable[[fx.GraphModule, fx.Node], fx.Node], deep: bool) -> None:
    def change(gm: fx.GraphModule) -> None:
        replace_output(gm, 1, lambda value: make(gm, value))

    assert kinds(change, deep=deep) == []


def test_slices_and_tuples_that_depend_on_the_rank_keep_their_meaning() -> None:
    program = one_input(
        lambda b, x: (
            b.call("python::getitem", x, (b.constant("i", lambda rank: rank), 0)),
            b.call("python::getitem", x, slice(0, b.constant("n", lambda rank: 2))),
        )
    )

    def change(gm: fx.GraphModule) -> None:
        replace_output(gm, 1, lambda value: gm.graph.call_function(aten.add.Tensor, (value, 0.0)))
        replace_output(gm, 0, lambda value: gm.graph.call_function(aten.add.Tensor, (value, 0.0)))

    identical = verify(copy.deepcopy, program)
    assert (identical.status, identical.changed) == ("passed", False)
    rewritten = verify(change, program, checks=["structure", "metadata"]).pair.rewritten
    assert rewritten is not None
    before, after = Lockstep().run(program), Lockstep().run(rewritten)
    for mine, theirs in zip(before.ranks, after.ranks, strict=True):
        assert [v.tolist() for v in mine.outputs] == [v.tolist() for v in theirs.outputs]


def test_a_discrete_result_that_flips_under_rounding_is_ill_conditioned() -> None:
    """x · 0.1 · 0.7 and x · 0.07 differ by rounding: which one is larger, only rounding says."""

    def build(b: GraphBuilder, x: fx.Node) -> fx.Node:
        product = b.call("aten::mul.Tensor", b.call("aten::mul.Tensor", x, 0.1), 0.7)
        return b.call("aten::gt.Tensor", product, b.call("aten::mul.Tensor", x, 0.07))

    def commute(gm: fx.GraphModule) -> None:
        tenth, product = (n for n in gm.graph.nodes if n.args[1:] in ((0.1,), (0.7,)))
        tenth.args, product.args = (tenth.args[0], 0.7), (tenth, 0.1)

    program = one_input(build)
    verdict = verify(commute, program)
    assert (verdict.status, [d.reason for d in verdict.doubts]) == ("inconclusive", ["ill-conditioned"])


def test_a_discrete_result_that_is_plainly_wrong_is_refuted() -> None:
    program = spmd_program(
        TP2,
        [InputSpec("x", (4, 8), placements=(("tp", PARTIAL),))],
        lambda b: b.call(
            "aten::gt.Scalar", b.call("tensor_cast::all_reduce", b.input("x"), b.rank, b.group("tp")), 0.0
        ),
    )

    def turn(gm: fx.GraphModule) -> None:
        next(n for n in gm.graph.nodes if n.target is aten.gt.Scalar).target = aten.lt.Scalar

    assert kinds(turn, program) == ["wrong-value"]


def test_a_group_that_names_a_rank_outside_the_mesh_raises_there() -> None:
    def widen(gm: fx.GraphModule) -> None:
        reduced = node(gm, "all_reduce")
        reduced.args = (*reduced.args[:2], [0, 1, 7])

    (finding,) = verify(widen, reduce_then_norm()).findings
    assert finding.kind == "rewritten-raises"
    assert "rank 7, which the mesh does not have" in finding.title


@pytest.mark.parametrize("stranger", ["1", 1.5, None, [1]])
def test_a_group_that_names_what_is_no_rank_raises_there(stranger: object) -> None:
    def misname(gm: fx.GraphModule) -> None:
        reduced = node(gm, "all_reduce")
        reduced.args = (*reduced.args[:2], [0, stranger])  # type: ignore[list-item]

    (finding,) = verify(misname, reduce_then_norm()).findings
    assert finding.kind in ("rewritten-raises", "malformed-graph")


def test_a_program_that_no_file_holds_is_inconclusive_for_a_guarded_pass() -> None:
    program = reduce_then_norm()
    graphs = [program.graph(rank) for rank in range(2)]
    held = program.with_graphs(graphs, [torch.nn.Identity(), torch.nn.Identity()])
    for graph in held.graphs:
        norm = next(n for n in graph.nodes if "rms_norm" in n.name)
        with graph.inserting_after(norm):
            same = graph.call_module("same", (norm,))
        norm.replace_all_uses_with(same, delete_user_cb=lambda user, new=same: user is not new)
    for module in held.modules:
        assert module is not None
        module.add_module("same", torch.nn.Identity())
    verdict = verify("tcverify.passes.identity:Identity", held)
    assert (verdict.status, verdict.doubts[0].reason) == ("inconclusive", "not-portable")
