"""What a diagnosis says of the cause: which argument, operand, group or call, for one planted mistake each."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import fx

from tcverify.execution import Lockstep
from tcverify.explain.diagnosis import diagnose
from tcverify.ops import resolve
from tcverify.program import (
    PARTIAL,
    VARYING,
    Finding,
    GraphBuilder,
    InputSpec,
    Mesh,
    MeshDim,
    Program,
    Recipe,
    spmd_program,
)
from tcverify.verification.verifier import verify

MESH = Mesh(2, (MeshDim("tp", ((0, 1),)), MeshDim("ep", ((1, 0),))))
INPUTS = (
    InputSpec("addend", (4, 6), placements=(("tp", PARTIAL),)),
    InputSpec("residual", (4, 6)),
    InputSpec("own", (4, 6), placements=(("tp", VARYING),)),
    InputSpec("gain", (6,), recipe=Recipe("norm_weight")),
)
Build = Callable[[GraphBuilder, dict[str, fx.Node]], object]
Edit = Callable[[fx.Graph, dict[str, fx.Node], int], None]


def program(build: Build) -> Program:
    return spmd_program(MESH, INPUTS, lambda b: build(b, {spec.name: b.input(spec.name) for spec in INPUTS}), seed=5)


def block(b: GraphBuilder, given: dict[str, fx.Node]) -> object:
    """all_reduce, add and norm."""
    reduced = b.call("tensor_cast::all_reduce", given["addend"], b.rank, b.group("tp"))
    total = b.call("aten::add.Tensor", reduced, given["residual"])
    return b.call("tensor_cast::rms_norm", total, given["gain"], 1e-6)


def local(
    b: GraphBuilder, given: dict[str, fx.Node], start: Callable[[int], int], *, order: str = "tp", dim: int = 0
) -> object:
    """The same on shards of the tokens, with the nodes of `block` under their names."""
    scattered = b.call("tensor_cast::reduce_scatter", given["addend"], 0, b.rank, b.group("tp"))
    low = b.constant("low", start)
    high = b.constant("high", lambda rank: start(rank) + 2)
    mine = b.call("aten::slice.Tensor", given["residual"], 0, low, high)
    normed = b.call("tensor_cast::rms_norm", b.call("aten::add.Tensor", scattered, mine), given["gain"], 1e-6)
    return b.call("tensor_cast::all_gather", normed, dim, b.rank, b.group(order))


def edited(before: Program, edit: Edit) -> Program:
    graphs = [before.graph(rank) for rank in range(before.world_size)]
    for rank, graph in enumerate(graphs):
        edit(graph, {node.name: node for node in graph.nodes}, rank)
    return before.with_graphs(graphs)


def finding(before: Program, after: Program) -> Finding:
    """What `verify` finds, as a pass that makes the one of the other."""
    made = iter(range(before.world_size))

    def rewrite(gm: fx.GraphModule) -> fx.GraphModule:
        return fx.GraphModule(gm, after.graph(next(made)))

    return verify(rewrite, before, checks=["equivalence", "collectives"]).findings[0]


def told(before: Program, after: Program) -> str:
    return str(diagnose(before, after, finding(before, after)).first)


def put(graph: fx.Graph, behind: fx.Node, op: str, *args: object) -> None:
    """Insert a call whose result is read in place of `behind`."""
    with graph.inserting_after(behind):
        made = graph.create_node("call_function", resolve(op), (behind, *args), name="inserted")
    made.meta["val"] = behind.meta["val"]
    behind.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)


def other_eps(graph: fx.Graph, node: dict[str, fx.Node], rank: int) -> None:
    node["rms_norm"].update_arg(2, 1e-5)


def other_op(graph: fx.Graph, node: dict[str, fx.Node], rank: int) -> None:
    node["add"].target = resolve("aten::sub.Tensor")


def reads_addend(graph: fx.Graph, node: dict[str, fx.Node], rank: int) -> None:
    node["add"].update_arg(0, node["addend"])


def reads_other(graph: fx.Graph, node: dict[str, fx.Node], rank: int) -> None:
    node["add"].update_arg(1, node["own"])


def adds_up_again(graph: fx.Graph, node: dict[str, fx.Node], rank: int) -> None:
    put(graph, node["all_reduce"], "tensor_cast::all_reduce", rank, [0, 1])


def gathers_again(graph: fx.Graph, node: dict[str, fx.Node], rank: int) -> None:
    put(graph, node["rms_norm"], "tensor_cast::all_gather", 0, rank, [0, 1])


def left_out_on_rank_1(graph: fx.Graph, node: dict[str, fx.Node], rank: int) -> None:
    if rank == 1:
        node["all_reduce"].replace_all_uses_with(node["addend"])
        graph.erase_node(node["all_reduce"])


EDITS: dict[str, tuple[Edit, str]] = {
    "another eps": (other_eps, "its 'eps' is 1e-05, where the original's is 1e-06: what it reads is the same"),
    "another op": (other_op, "'add' is .*: it calls sub.Tensor, where the original's 'add' calls add.Tensor"),
    "an addend read": (
        reads_addend,
        r"'add' is .*: it reads 'addend', a partial sum of the original's 'all_reduce' over tp \[0, 1\]",
    ),
    "another value read": (reads_other, "it reads 'own', equal to the original's 'own', instead of 'residual'"),
    "added up twice": (
        adds_up_again,
        r"'inserted' is 2 times the original's 'all_reduce' over tp \[0, 1\]: it sums 'all_reduce' over \[0, 1\], "
        "although every rank has the whole value",
    ),
    "gathered twice": (gathers_again, r"it gathers 'rms_norm' over \[0, 1\], although every rank has the whole value"),
    "left out on one rank": (
        left_out_on_rank_1,
        "'all_reduce' is called by rank 0, but the graph of rank 1 no longer has it: it ends",
    ),
}


@pytest.mark.parametrize("mistake", EDITS)
def test_the_cause_of_an_edit_is_told(mistake: str) -> None:
    edit, text = EDITS[mistake]
    before = program(block)
    assert_told(told(before, edited(before, edit)), text)


@pytest.mark.parametrize("rank", [0, 1])
def test_where_one_rank_leaves_a_collective_out_the_graph_that_has_changed_is_shown(rank: int) -> None:
    def leave_out(gm: fx.GraphModule) -> None:
        (reduced,) = gm.graph.find_nodes(op="call_function", target=resolve("tensor_cast::all_reduce"))
        if reduced.args[1] == rank:
            reduced.replace_all_uses_with(reduced.args[0])
            gm.graph.erase_node(reduced)

    verdict = verify(leave_out, program(block))
    assert verdict.pair.rewritten is not None
    found = diagnose(verdict.pair.original, verdict.pair.rewritten, verdict.findings[0])
    assert found.rank == rank


@pytest.mark.parametrize("rank", [0, 1])
def test_where_one_rank_makes_alike_collectives_in_another_order_both_meetings_are_told(rank: int) -> None:
    """The graph of the other rank is unchanged and has the wrong value as well: it would show nothing."""

    def two(b: GraphBuilder, given: dict[str, fx.Node]) -> object:
        first = b.call("tensor_cast::all_reduce", given["addend"], b.rank, b.group("tp"))
        second = b.call("tensor_cast::all_reduce", given["own"], b.rank, b.group("tp"))
        return first, second

    def swap(gm: fx.GraphModule) -> None:
        first, second = gm.graph.find_nodes(op="call_function", target=resolve("tensor_cast::all_reduce"))
        if first.args[1] == rank:
            first.prepend(second)

    verdict = verify(swap, program(two))
    assert verdict.pair.rewritten is not None
    assert verdict.findings[0].kind == "wrong-value"
    found = diagnose(verdict.pair.original, verdict.pair.rewritten, verdict.findings[0])
    assert found.rank == rank
    other = f"rank {1 - rank}'s"
    assert f"it meets {other} 'all_reduce_1', where the original's meets {other} 'all_reduce'" in str(found.first)


def assert_told(sentence: str, pattern: str) -> None:
    assert re.search(pattern, sentence), sentence


def test_nothing_diverges_where_shards_are_put_together_again() -> None:
    before, after = program(block), program(lambda b, given: local(b, given, lambda rank: 2 * rank))
    found = diagnose(before, after, Finding("wrong-value", "equivalence", "", "", None, 0, {"label": "output 0"}))
    assert found.first is None
    assert all(relation.explained for relation in (found.relations or {}).values())


def test_the_wrong_slice_is_to_blame_and_not_what_is_computed_from_it() -> None:
    before, after = program(block), program(lambda b, given: local(b, given, lambda rank: 0))
    assert_told(told(before, after), "'slice_1' is shard 0 of the original's 'residual' along dim 0 on rank 1")


def test_a_shard_that_is_returned_lacks_a_gather_only_in_place_of_its_whole() -> None:
    def whole(b: GraphBuilder, given: dict[str, fx.Node]) -> object:
        return b.call("tensor_cast::all_reduce", given["addend"], b.rank, b.group("tp"))

    def first_rows(b: GraphBuilder, given: dict[str, fx.Node]) -> object:
        return b.call("aten::slice.Tensor", whole(b, given), 0, 0, 2)

    def own_rows(b: GraphBuilder, given: dict[str, fx.Node]) -> object:
        return b.call("tensor_cast::reduce_scatter", given["addend"], 0, b.rank, b.group("tp"))

    shard = Finding("wrong-value", "equivalence", "", "", None, 1, {"label": "output 0"})
    assert str(diagnose(program(whole), program(own_rows), shard).first).endswith(": nothing gathers it")
    assert str(diagnose(program(first_rows), program(own_rows), shard).first).endswith(
        ", where the original returns 'slice_1'"
    )


def test_a_gather_in_another_order_tells_both_groups() -> None:
    before, after = program(block), program(lambda b, given: local(b, given, lambda rank: 2 * rank, order="ep"))
    assert_told(
        told(before, after), r"'all_gather' is .*: it gathers over \[1, 0\] what is divided over \[0, 1\]: 'rms_norm'"
    )


def test_a_gather_along_another_dim_tells_both_dims() -> None:
    before, after = program(block), program(lambda b, given: local(b, given, lambda rank: 2 * rank, dim=1))
    assert_told(
        told(before, after), "'all_gather'.*: it gathers along dim 1 what is divided along dim 0: 'rms_norm', a shard"
    )


def test_a_whole_beside_a_shard_is_told() -> None:
    def whole(b: GraphBuilder, given: dict[str, fx.Node]) -> object:
        reduced = b.call("tensor_cast::all_reduce", given["addend"], b.rank, b.group("tp"))
        return b.call("tensor_cast::add_rms_norm", reduced, given["residual"], given["gain"], 1e-6)

    def unsliced(graph: fx.Graph, node: dict[str, fx.Node], rank: int) -> None:
        reduced = node["all_reduce"]
        with graph.inserting_after(reduced):
            args = (reduced.args[0], 0, rank, [0, 1])
            scattered = graph.create_node(
                "call_function", resolve("tensor_cast::reduce_scatter"), args, name="scattered"
            )
        reduced.replace_all_uses_with(scattered)
        graph.erase_node(reduced)

    before = program(whole)
    text = (
        "^'add_rms_norm' raises: it reads the whole of 'residual', where its other operand 'scattered' is a shard of "
        r"the original's 'all_reduce' along dim 0 over tp \[0, 1\]$"
    )
    assert_told(told(before, edited(before, unsliced)), text)


def test_chunks_of_a_value_that_differs_between_ranks_are_blamed_where_they_are_taken() -> None:
    def whole(b: GraphBuilder, given: dict[str, fx.Node]) -> object:
        return b.call("aten::silu", b.call("aten::neg", given["own"]))

    def parts(b: GraphBuilder, given: dict[str, fx.Node]) -> object:
        low, high = b.constant("low", lambda rank: 2 * rank), b.constant("high", lambda rank: 2 * rank + 2)
        mine = b.call("aten::slice.Tensor", b.call("aten::neg", given["own"]), 0, low, high)
        return b.call("tensor_cast::all_gather", b.call("aten::silu", mine), 0, b.rank, b.group("tp"))

    sentence = told(program(whole), program(parts))
    assert_told(sentence, "^'slice_1' is a shard of the original's 'neg'.*'neg' differs between the ranks")


def test_a_copy_that_is_written_into_in_place_of_an_input_is_told() -> None:
    def writes(b: GraphBuilder, given: dict[str, fx.Node]) -> object:
        return b.call("aten::neg", b.call("aten::add_.Tensor", given["residual"], given["addend"]))

    def copies(b: GraphBuilder, given: dict[str, fx.Node]) -> object:
        copy = b.call("aten::clone", given["residual"])
        return b.call("aten::neg", b.call("aten::add_.Tensor", copy, given["addend"]))

    sentence = told(program(writes), program(copies))
    assert_told(
        sentence, "'add_' has the value of the original's, but it writes into 'clone', where the original's writes into"
    )


def test_a_value_read_before_it_is_written_into_is_told() -> None:
    def writes(b: GraphBuilder, given: dict[str, fx.Node]) -> object:
        made = b.call("aten::neg", given["residual"])
        b.call("aten::add_.Tensor", made, given["addend"])
        return b.call("aten::silu", made)

    def late(graph: fx.Graph, node: dict[str, fx.Node], rank: int) -> None:
        node["silu"].append(node["add_"])

    before = program(writes)
    assert_told(
        told(before, edited(before, late)), "'silu' is .*: it reads 'neg', the value before 'add_' writes into 'neg'"
    )


def test_outputs_that_share_storage_no_more_are_told() -> None:
    def twice(b: GraphBuilder, given: dict[str, fx.Node]) -> object:
        made = b.call("aten::neg", given["residual"])
        return made, b.call("aten::view", made, [6, 4])

    def copies(graph: fx.Graph, node: dict[str, fx.Node], rank: int) -> None:
        put(graph, node["view"], "aten::clone")

    before = program(twice)
    assert_told(
        told(before, edited(before, copies)),
        "output 1 returns 'inserted', .*: it shares memory with output 0 in the original",
    )


def test_differences_below_the_usual_precision_are_traced_too() -> None:
    def scales(graph: fx.Graph, node: dict[str, fx.Node], rank: int) -> None:
        put(graph, node["rms_norm"], "aten::mul.Tensor", 1 + 1e-11)

    before = program(block)
    assert_told(told(before, edited(before, scales)), r"^'inserted' is \(1 \+ 1e-11\) times the original's 'rms_norm'$")


def test_a_finding_of_the_exact_domain_is_traced_in_residues() -> None:
    before = program(block)

    def scales(graph: fx.Graph, node: dict[str, fx.Node], rank: int) -> None:
        put(graph, node["add"], "aten::mul.Tensor", 2.0)

    exact = Finding("wrong-value", "equivalence", "", "", None, 0, {"label": "output 0", "domain": "exact"})
    found = diagnose(before, edited(before, scales), exact)
    assert found.before is not None
    assert found.before.domain == "exact:0"
    assert str(found.first) == "'inserted' is 2 times the original's 'add' over tp [0, 1]"
    assert Lockstep().run(before).domain == "float64"


def test_values_of_one_byte_are_related_in_the_native_domain() -> None:
    inputs = [InputSpec("q", (4, 6), dtype=torch.float8_e4m3fn)]

    def dequantised(b: GraphBuilder) -> object:
        return b.call("aten::silu", b.call("aten::_to_copy", b.input("q"), dtype=torch.float32))

    before = spmd_program(MESH, inputs, dequantised, seed=5)

    def other(graph: fx.Graph, node: dict[str, fx.Node], rank: int) -> None:
        node["silu"].target = resolve("aten::tanh")

    native = Finding("wrong-value", "equivalence", "", "", None, 0, {"label": "output 0", "domain": "native"})
    found = diagnose(before, edited(before, other), native)
    assert found.before is not None
    assert found.before.domain == "native"
    assert {name: relation.kind for name, relation in (found.relations or {}).items()}["q"] == "equal"
    assert_told(str(found.first), "'silu' is .*: it calls tanh, where the original's 'silu' calls silu")


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64])
def test_unsigned_integers_are_related(dtype: torch.dtype) -> None:
    def counted(b: GraphBuilder) -> object:
        x = b.input("x")
        return b.call("aten::_to_copy", b.call("aten::abs", x), dtype=dtype), b.call("aten::neg", x)

    before = spmd_program(MESH, [InputSpec("x", (4, 6))], counted)

    def other(graph: fx.Graph, node: dict[str, fx.Node], rank: int) -> None:
        node["neg"].target = resolve("aten::tanh")

    native = Finding("wrong-value", "equivalence", "", "", None, 0, {"label": "output 1", "domain": "native"})
    found = diagnose(before, edited(before, other), native)
    assert {name: relation.kind for name, relation in (found.relations or {}).items()}["_to_copy"] == "equal"
    assert_told(str(found.first), "'neg' is .*: it calls tanh, where the original's 'neg' calls neg")


def test_tuples_are_related_element_by_element() -> None:
    def norm(b: GraphBuilder, given: dict[str, fx.Node]) -> object:
        reduced = b.call("tensor_cast::all_reduce", given["addend"], b.rank, b.group("tp"))
        made = b.call("tensor_cast::add_rms_norm2", reduced, given["residual"], given["gain"], 1e-6)
        return b.getitem(made, 0), b.getitem(made, 1)

    def twice(graph: fx.Graph, node: dict[str, fx.Node], rank: int) -> None:
        node["add_rms_norm2"].update_arg(3, 1e-2)

    def other_item(graph: fx.Graph, node: dict[str, fx.Node], rank: int) -> None:
        node["getitem"].update_arg(1, 1)

    before = program(norm)
    found = diagnose(before, edited(before, twice), finding(before, edited(before, twice)))
    assert_told(str(found.first), "'add_rms_norm2' is .*: its 'eps' is 0.01, where the original's is 1e-06")
    assert (found.relations or {})["getitem_1"].kind == "equal"
    assert_told(
        told(before, edited(before, other_item)),
        "'getitem', which is equal to .*: it takes item 1, where the original's takes item 0$",
    )


def in_place(graph: fx.Graph, node: dict[str, fx.Node], rank: int) -> None:
    node["add"].target = resolve("aten::add_.Tensor")


@pytest.mark.parametrize("returned", [False, True])
def test_what_overwrites_a_value_that_is_read_later_is_named(returned: bool) -> None:
    def build(b: GraphBuilder, given: dict[str, fx.Node]) -> object:
        first = b.call("aten::neg", given["residual"])
        second = b.call("aten::add.Tensor", first, given["addend"])
        return (first, second) if returned else b.call("aten::mul.Tensor", second, first)

    before = program(build)
    whom = "the program returns" if returned else "'mul' reads"
    assert told(before, edited(before, in_place)) == (
        f"'add' has the value of the original's, but it writes into 'neg', which {whom} later and the original does not change"
    )


def test_a_write_that_the_original_makes_too_is_not_named() -> None:
    def build(b: GraphBuilder, given: dict[str, fx.Node]) -> object:
        first = b.call("aten::neg", given["residual"])
        b.call("aten::add_.Tensor", first, given["addend"])
        return b.call("tensor_cast::rms_norm", first, given["gain"], 1e-6)

    assert told(program(build), edited(program(build), other_eps)).startswith("'rms_norm' is")
