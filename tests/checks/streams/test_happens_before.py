"""Lowered graphs, each with a defect that happens-before finds, beside a sound neighbour of which it says nothing."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx

from tcverify import Contract, verify
from tcverify.application import Pair
from tcverify.checks import CHECKS, Evidence
from tcverify.program import Mesh, MeshDim
from tcverify.program.finding import Doubt
from tests.support.lowered import Build, Lowering, findings, judge, kinds, program
from tests.support.programs import reduce_then_norm

GRID = Mesh.grid({"dp": 2, "tp": 2})


def race(build: Build, **options: Any) -> dict[str, Any]:
    """The data of the race that is the only finding."""
    (found,) = findings(build, **options)
    assert found.kind == "race", found
    return found.data


# ------------------------------------------------------------------------------------------------------ reads of writes


def cross(b: Lowering, *, waits: bool) -> Any:
    """mm on stream 0, relu of it on stream 1, joined by the output."""
    product = b.mm(b.x)
    token = b.record(product)
    out = b.relu(b.wait(product, 1, *([token] if waits else [])))
    return b.wait(out, 0, b.record(out, 1))


def test_a_read_on_another_stream_needs_a_token() -> None:
    assert kinds(lambda b: cross(b, waits=True)) == []
    (found,) = findings(lambda b: cross(b, waits=False))
    assert (found.kind, found.node, found.rank) == ("race", "relu", 0)
    assert found.title == (
        "'relu' on stream 1 reads 'mm' before its write on stream 0 is complete: no wait of 'relu' follows a record of 'mm'"
    )
    assert found.data == {"kind": "RAW", "first": "mm", "second": "relu", "streams": [0, 1], "value": "mm"}
    assert "stream 0: [mm]" in found.detail
    assert "stream 1: [relu]" in found.detail
    assert "records of 'mm': '_internal_record'" in found.detail
    assert "'relu' waits for: none" in found.detail


def test_order_is_transitive_through_streams_and_tokens() -> None:
    def build(b: Lowering, *, middle: bool) -> Any:
        first = b.mm(b.x)
        token = b.record(first)
        second = b.relu(b.wait(b.x, 1, *([token] if middle else [])))
        later = b.record(second, 1)
        third = b.add(b.wait(first, 2, later), b.wait(second, 2, later))
        return b.wait(third, 0, b.record(third, 2)), b.wait(second, 0, later)

    assert kinds(lambda b: build(b, middle=True)) == []
    assert race(lambda b: build(b, middle=False))["first"] == "mm"


def test_a_later_op_of_a_stream_comes_after_what_an_earlier_one_waited_for() -> None:
    def build(b: Lowering, *, gate: bool) -> Any:
        product = b.mm(b.x)
        token = b.record(product)
        first = b.relu(b.wait(product if gate else b.y, 1, *([token] if gate else [])))
        second = b.relu(b.wait(product, 1))  # bound without a token of its own
        return b.wait(b.add(b.wait(first, 1), b.wait(second, 1)), 0), b.record(second, 1)

    def joined(b: Lowering, *, gate: bool) -> Any:
        product = b.mm(b.x)
        token = b.record(product)
        first = b.relu(b.wait(product if gate else b.y, 1, *([token] if gate else [])))
        second = b.relu(b.wait(product, 1))
        return b.wait(first, 0, b.record(second, 1)), second

    assert kinds(lambda b: joined(b, gate=True)) == []
    assert race(lambda b: joined(b, gate=False))["second"] == "relu_1"
    assert "race" in kinds(lambda b: build(b, gate=True))  # the outputs are not joined


def test_a_tuple_is_recorded_through_its_items() -> None:
    def build(b: Lowering, *, of: int | None) -> Any:
        both = b.call("aten::split.Tensor", b.mm(b.x), 2)
        norm = b.call("tensor_cast::add_rms_norm2", b.x, b.y, b.x, 1e-6)
        items = [b.getitem(norm, 0), b.getitem(norm, 1)]
        token = b.record(items[0]) if of is None else b.record(b.getitem(both, of))
        out = b.relu(b.wait(items[1], 1, token))
        return b.wait(out, 0, b.record(out, 1))

    assert kinds(lambda b: build(b, of=None)) == []
    found = findings(lambda b: build(b, of=0))  # a view of what mm made: by position, the norm
    assert {f.kind for f in found} == {"race", "anchor-mismatch"}
    assert next(f for f in found if f.kind == "race").data["first"] == "add_rms_norm2"


def test_views_are_no_work_and_keep_their_storage() -> None:
    def build(b: Lowering, *, waits: bool) -> Any:
        product = b.mm(b.x)
        flat = b.call("aten::view", product, [16])
        token = b.record(flat)
        turned = b.call("aten::t", b.call("aten::view", flat, [4, 4]))
        out = b.relu(b.wait(turned, 1, *([token] if waits else [])))
        return b.wait(out, 0, b.record(out, 1))

    assert kinds(lambda b: build(b, waits=True)) == []
    assert race(lambda b: build(b, waits=False)) == {
        "kind": "RAW", "first": "mm", "second": "relu", "streams": [0, 1], "value": "t"
    }  # fmt: skip


def test_reshape_is_work_exactly_when_it_copies() -> None:
    def build(b: Lowering, *, copies: bool) -> Any:
        product = b.mm(b.x)
        token = b.record(product)
        given = b.call("aten::t", product) if copies else product
        flat = b.call("aten::reshape", given, [16])  # of a transposed tensor: a copy, on stream 0
        out = b.relu(b.wait(flat, 1, token))
        return b.wait(out, 0, b.record(out, 1))

    assert kinds(lambda b: build(b, copies=False)) == []
    assert race(lambda b: build(b, copies=True))["first"] == "reshape"


def test_two_views_of_one_storage_count_as_one_also_where_they_do_not_overlap() -> None:
    """Which elements a kernel touches is not looked at; runtimes track storages."""

    def build(b: Lowering, *, waits: bool) -> Any:
        product = b.mm(b.x)
        token = b.record(product)
        top = b.call("aten::slice.Tensor", product, 0, 0, 2)
        below = b.call("aten::slice.Tensor", product, 0, 2, 4)
        read = b.relu(b.wait(top, 1, token))
        done = b.record(read, 1)
        half = b.call("aten::slice.Tensor", b.y, 0, 0, 2)
        added = b.call("aten::add_.Tensor", below, b.wait(half, 0, *([done] if waits else [])))
        return b.wait(read, 0, done), added

    assert kinds(lambda b: build(b, waits=True)) == []
    assert race(lambda b: build(b, waits=False))["kind"] == "WAR"


def test_nested_waits_are_bound_by_the_latest_and_wait_for_all_tokens() -> None:
    def build(b: Lowering, *, inner: bool) -> Any:
        first, token = b.mm(b.x), None
        token = b.record(first)
        second = b.relu(b.wait(b.y, 2))
        other = b.record(second, 2)
        value = b.wait(b.wait(first, 5, *([token] if inner else [])), 1, other)
        out = b.add(value, b.wait(second, 1, other))
        return b.wait(out, 0, b.record(out, 1))

    assert kinds(lambda b: build(b, inner=True)) == []
    assert race(lambda b: build(b, inner=False))["streams"] == [0, 1]


def test_a_second_user_of_a_wait_is_fine_on_its_stream_and_mismatched_elsewhere() -> None:
    def build(b: Lowering, *, stream: int | None) -> Any:
        product = b.mm(b.x)
        gated = b.wait(product, 1, b.record(product))
        first = b.relu(gated)
        mark = b.record(first, 1)
        second = b.call("aten::neg", gated)
        done = b.record(second, 1) if stream is not None else mark
        return b.wait(first, 0, done), b.wait(second, 0, done)

    assert kinds(lambda b: build(b, stream=1)) == []
    (mismatch, missing) = findings(lambda b: build(b, stream=None))
    assert mismatch.kind == "anchor-mismatch"
    assert mismatch.title.startswith("'neg' runs on stream 1 by data flow, but")
    assert missing.data["first"] == "neg"


def test_waits_inside_lists_bind() -> None:
    def build(b: Lowering, *, waits: bool) -> Any:
        product = b.mm(b.x)
        token = b.record(product)
        tokens = [token] if waits else []
        out = b.call("tensor_cast::cat", [b.wait(product, 1, *tokens), b.wait(b.y, 1, *tokens)], 0)
        return b.wait(out, 0, b.record(out, 1))

    assert kinds(lambda b: build(b, waits=True)) == []
    assert race(lambda b: build(b, waits=False))["second"] == "cat"


def test_python_operators_on_tensors_are_work_and_on_numbers_are_not() -> None:
    def build(b: Lowering, *, waits: bool) -> Any:
        product = b.mm(b.x)
        token = b.record(product)
        size = b.call("aten::sym_size.int", b.x, 0)
        double = b.call("python::mul", size, 2)  # host work between a record and a wait: no matter
        out = b.call("python::add", b.wait(product, 1, *([token] if waits else [])), double)
        return b.wait(out, 0, b.record(out, 1))

    assert kinds(lambda b: build(b, waits=True)) == []
    assert race(lambda b: build(b, waits=False))["second"] == "add"


def test_ungated_operands_are_allowed_where_order_comes_from_elsewhere() -> None:
    def build(b: Lowering, *, waits: bool) -> Any:
        product = b.mm(b.x)
        token = b.record(product)
        out = b.add(product, b.wait(b.y, 1, *([token] if waits else [])))  # product itself is ungated
        return b.wait(out, 0, b.record(out, 1))

    assert kinds(lambda b: build(b, waits=True)) == []
    assert race(lambda b: build(b, waits=False))["value"] == "mm"


def test_deps_that_no_record_made_give_no_order() -> None:
    def build(b: Lowering) -> Any:
        product = b.mm(b.x)
        out = b.relu(b.wait(product, 1, product))
        return b.wait(out, 0, b.record(out, 1))

    assert race(build)["first"] == "mm"


# ------------------------------------------------------------------------------------------------------------- writes


def test_a_write_waits_for_readers() -> None:
    def build(b: Lowering, *, waits: bool) -> Any:
        product = b.mm(b.x)
        read = b.relu(b.wait(product, 1, b.record(product)))
        done = b.record(read, 1)
        added = b.call("aten::add_.Tensor", product, b.wait(b.y, 0, *([done] if waits else [])))
        return added, b.wait(read, 0, done)

    assert kinds(lambda b: build(b, waits=True)) == []
    (found,) = findings(lambda b: build(b, waits=False))
    assert found.title == (
        "'add_' on stream 0 writes into 'mm' before its read by 'relu' on stream 1 is complete: "
        "no wait of 'add_' follows a record of 'relu'"
    )
    assert found.data["kind"] == "WAR"


def test_every_reader_since_the_last_write_counts() -> None:
    def build(b: Lowering, *, streams: tuple[int, ...]) -> Any:
        product = b.mm(b.x)
        token = b.record(product)
        reads, marks = [], []
        for stream in (1, 2, 3):
            reads.append(b.relu(b.wait(product, stream, token)))
            marks.append(b.record(reads[-1], stream))
        b.call("aten::add_.Tensor", product, b.wait(b.y, 0, *[marks[s - 1] for s in streams]))
        return [b.wait(read, 0, *marks) for read in reads]

    assert kinds(lambda b: build(b, streams=(1, 2, 3))) == []
    assert race(lambda b: build(b, streams=(1, 3)))["first"] == "relu_1"


def test_writes_of_one_storage_are_ordered() -> None:
    def build(b: Lowering, *, waits: bool) -> Any:
        product = b.mm(b.x)
        token = b.record(product)
        added = b.call("aten::add_.Tensor", product, b.wait(b.y, 1, *([token] if waits else [])))
        return b.wait(added, 0, b.record(added, 1))

    assert kinds(lambda b: build(b, waits=True)) == []
    found = race(lambda b: build(b, waits=False))
    assert (found["kind"], found["first"], found["second"]) == ("WAW", "mm", "add_")


def test_the_result_of_an_in_place_op_is_produced_by_it() -> None:
    def build(b: Lowering, *, late: bool) -> Any:
        product = b.mm(b.x)
        early = b.record(product)
        added = b.call("aten::add_.Tensor", product, b.y)
        token = b.record(added) if late else early
        out = b.relu(b.wait(added, 1, token))
        return b.wait(out, 0, b.record(out, 1))

    assert kinds(lambda b: build(b, late=True)) == []
    assert race(lambda b: build(b, late=False))["first"] == "add_"


def test_a_gated_operand_that_is_written_is_a_copy() -> None:
    """The write goes to the copy, so that readers of the value itself need not be ordered with it."""

    def build(b: Lowering, *, gated: bool) -> Any:
        product = b.mm(b.x)
        read = b.relu(b.wait(product, 1, b.record(product)))
        done = b.record(read, 1)
        b.call("aten::neg_", b.wait(product, 0) if gated else product)
        return b.wait(read, 0, done)

    assert kinds(lambda b: build(b, gated=True)) == []
    assert race(lambda b: build(b, gated=False))["kind"] == "WAR"


# ----------------------------------------------------------------------------------------------------------- boundary


def test_outputs_are_joined_with_the_main_stream() -> None:
    def build(b: Lowering, *, join: bool) -> Any:
        out = b.relu(b.wait(b.x, 1))
        token = b.record(out, 1)
        return {"value": [b.wait(out, 0, token) if join else out]}

    assert kinds(lambda b: build(b, join=True)) == []
    (found,) = findings(lambda b: build(b, join=False))
    assert found.title == (
        "output 'relu' is read on stream 0 before its write on stream 1 is complete: "
        "no wait of the outputs follows a record of 'relu'"
    )
    assert found.data["kind"] == "output"
    assert found.node == "relu"
    assert "--contract boundary=lenient" in found.detail
    assert kinds(lambda b: build(b, join=False), boundary="lenient") == []


def test_an_op_of_the_main_stream_can_join_an_output() -> None:
    def build(b: Lowering, *, last: int) -> Any:
        out = b.relu(b.wait(b.x, 1))
        token = b.record(out, 1)
        other = b.call("aten::neg", b.wait(b.y, last, token))
        return out, b.wait(other, 0, b.record(other, last)) if last else other

    assert kinds(lambda b: build(b, last=0)) == []
    assert kinds(lambda b: build(b, last=2)) == []

    def loose(b: Lowering) -> Any:
        out = b.relu(b.wait(b.x, 1))
        b.record(out, 1)
        return out, b.call("aten::neg", b.y)

    assert race(loose)["kind"] == "output"


def test_inputs_that_are_mutated_are_joined_too() -> None:
    def build(b: Lowering, *, join: bool) -> Any:
        added = b.call("aten::add_.Tensor", b.x, b.wait(b.y, 1))
        token = b.record(added, 1)
        return b.relu(b.wait(b.y, 0, *([token] if join else [])))

    assert kinds(lambda b: build(b, join=True)) == []
    (found,) = findings(lambda b: build(b, join=False))
    assert found.title.startswith(
        "input 'x', which the graph mutates, is read on stream 0 before its write by 'add_' on stream 1"
    )
    assert kinds(lambda b: build(b, join=False), boundary="lenient") == []


def test_waits_on_outputs_bind_to_the_main_stream() -> None:
    def build(b: Lowering, *, stream: int) -> Any:
        out = b.relu(b.wait(b.x, 1))
        return b.wait(out, stream, b.record(out, 1))

    assert kinds(lambda b: build(b, stream=0)) == []
    (found,) = findings(lambda b: build(b, stream=1))
    assert found.kind == "stream-conflict"
    assert found.title == "outputs are read on stream 0, but waits bind them to stream 1"
    assert kinds(lambda b: build(b, stream=1), boundary="lenient") == []


def test_inputs_may_be_written_on_the_main_stream() -> None:
    def build(b: Lowering, *, waits: bool) -> Any:
        first = b.mm(b.y)
        token = b.record(first)
        out = b.relu(b.wait(b.x, 1, *([token] if waits else [])))
        return b.wait(out, 0, b.record(out, 1)), first

    assert kinds(lambda b: build(b, waits=True), inputs="stream0") == []
    assert kinds(lambda b: build(b, waits=False)) == []
    (found,) = findings(lambda b: build(b, waits=False), inputs="stream0")
    assert found.title == (
        "'relu' on stream 1 reads input 'x' before its write on stream 0 is complete: "
        "no wait of 'relu' follows a record of an op of stream 0"
    )
    assert "--contract inputs=ready" in found.detail


def test_an_input_can_be_recorded_at_the_beginning() -> None:
    def build(b: Lowering, *, first: bool) -> Any:
        token = b.record(b.x) if first else None
        out = b.relu(b.wait(b.x, 1, *([token] if token is not None else [])))
        return b.wait(out, 0, b.record(out, 1))

    assert kinds(lambda b: build(b, first=True), inputs="stream0") == []
    assert kinds(lambda b: build(b, first=False), inputs="stream0") == ["race"]


# -------------------------------------------------------------------------------------------------------- collectives


def collectives(b: Lowering, *, waits: bool, dims: tuple[str, str] = ("tp", "tp")) -> Any:
    first = b.reduce(b.wait(b.x, 1), dim=dims[0])
    token = b.record(first, 1)
    second = b.reduce(b.wait(b.y, 2, *([token] if waits else [])), dim=dims[1])
    other = b.record(second, 2)
    return b.wait(first, 0, token, other), b.wait(second, 0, other)


@pytest.mark.parametrize("run", [False, True])
def test_collectives_of_one_communicator_are_ordered(run: bool) -> None:
    assert kinds(lambda b: collectives(b, waits=True), run=run) == []
    (found,) = findings(lambda b: collectives(b, waits=False), run=run)
    assert found.kind == "unordered-collectives"
    assert found.title == (
        "'all_reduce_1' on stream 2 is not ordered after 'all_reduce' on stream 1, and both are collectives of group [0, 1]"
    )
    assert found.data["streams"] == [1, 2]


@pytest.mark.parametrize("run", [False, True])
def test_collectives_of_two_communicators_need_no_order(run: bool) -> None:
    assert kinds(lambda b: collectives(b, waits=False, dims=("tp", "dp")), mesh=GRID, run=run) == []


@pytest.mark.parametrize("run", [False, True])
def test_communicators_are_looked_at_on_every_rank_of_a_graph(run: bool) -> None:
    # the groups of rank 0 differ, those of rank 2 are one
    mesh = Mesh(4, (MeshDim("dp", ((0,), (1,), (2, 3))), MeshDim("tp", ((0, 1), (2, 3)))))
    (found,) = findings(lambda b: collectives(b, waits=False, dims=("tp", "dp")), mesh=mesh, run=run)
    assert (found.kind, found.rank) == ("unordered-collectives", 2)
    assert "both are collectives of group [2, 3]" in found.title


@pytest.mark.parametrize("run", [False, True])
def test_fused_ops_on_compute_streams_are_collectives_too(run: bool) -> None:
    def build(b: Lowering, *, waits: bool) -> Any:
        first = b.reduce(b.wait(b.x, 1))
        token = b.record(first, 1)
        gated = b.wait(b.x, 0, *([token] if waits else []))
        fused = b.call("tensor_cast::matmul_all_reduce", gated, b.y, None, b.rank, b.group("tp"))
        return b.wait(first, 0, token), fused

    assert kinds(lambda b: build(b, waits=True), run=run) == []
    assert kinds(lambda b: build(b, waits=False), run=run) == ["unordered-collectives"]


def test_sends_between_other_ranks_are_no_collectives_of_a_rank() -> None:
    def build(b: Lowering, *, pair: tuple[int, int]) -> Any:
        first = b.call("tensor_cast::pipeline_send_recv", b.wait(b.x, 1), 0, 1, 0, 1)
        token = b.record(first, 1)
        second = b.call("tensor_cast::pipeline_send_recv", b.wait(b.y, 2), *pair, 0, 1)
        other = b.record(second, 2)
        return b.wait(first, 0, token, other), b.wait(second, 0, other)

    assert kinds(lambda b: build(b, pair=(2, 3)), mesh=GRID) == []
    assert kinds(lambda b: build(b, pair=(0, 1)), mesh=GRID) == ["unordered-collectives"]


# --------------------------------------------------------------------------------------------------------------- ranks


def test_the_rank_that_shows_it_is_named() -> None:
    sound, racy = (lambda b: cross(b, waits=True)), (lambda b: cross(b, waits=False))
    (found,) = findings(sound, racy)
    assert found.rank == 1
    assert findings(sound, sound) == []


def test_streams_that_depend_on_the_rank_are_read_for_every_rank() -> None:
    def build(b: Lowering, *, of_record: bool) -> Any:
        stream = b.constant("stream", lambda rank: 1 + rank)
        out = b.relu(b.wait(b.x, stream))
        return b.wait(out, 0, b.record(out, stream if of_record else 1))

    assert kinds(lambda b: build(b, of_record=True)) == []
    (found,) = findings(lambda b: build(b, of_record=False))
    assert (found.kind, found.rank) == ("stream-conflict", 1)


# ------------------------------------------------------------------------------------------------------------- honesty


def test_ops_of_which_nothing_is_known_make_it_doubtful() -> None:
    def build(b: Lowering) -> Any:
        product = b.mm(b.x)
        strange = b._graph.call_function(torch.relu, (product,))
        strange.meta["val"] = product.meta["val"]
        return b.wait(strange, 0, b.record(strange))

    (doubt,) = judge("happens-before", program(build))
    assert isinstance(doubt, Doubt)
    assert "'relu'" in doubt.detail


def test_a_pass_that_lowers_without_a_token_is_refuted() -> None:
    def lower(gm: fx.GraphModule, *, token: bool, strange: bool = False) -> None:
        """Put the norm on stream 1."""
        reduced, norm, output = (next(n for n in gm.graph.nodes if n.name == name) for name in _NAMES)
        anchors = torch.ops.tensor_cast
        with gm.graph.inserting_after(reduced):
            mark = gm.graph.call_function(anchors._internal_record.default, (reduced, 0))
        with gm.graph.inserting_before(norm):
            gate = gm.graph.call_function(
                anchors._internal_wait_and_bind.default, (reduced, 1, [mark] if token else [])
            )
        norm.replace_input_with(reduced, gate)
        with gm.graph.inserting_after(norm):
            done = gm.graph.call_function(anchors._internal_record.default, (norm, 1))
        with gm.graph.inserting_before(output):
            join = gm.graph.call_function(anchors._internal_wait_and_bind.default, (norm, 0, [done]))
            if strange:
                gm.graph.call_function(torch.relu, (join,))
        output.replace_input_with(norm, join)
        gm.recompile()

    contract = Contract(metadata=False)
    assert verify(lambda gm: lower(gm, token=True), reduce_then_norm(), contract=contract).status == "passed"
    verdict = verify(lambda gm: lower(gm, token=False), reduce_then_norm(), contract=contract)
    assert [(f.kind, f.node, f.rank) for f in verdict.findings] == [("race", "rms_norm", 0)]
    verdict = verify(lambda gm: lower(gm, token=True, strange=True), reduce_then_norm(), contract=contract)
    assert verdict.status == "inconclusive"
    assert "reads and writes" in verdict.doubts[0].detail


_NAMES = ("all_reduce", "rms_norm", "output")


def test_graphs_on_too_many_streams_are_doubtful() -> None:
    def build(b: Lowering, *, streams: int) -> Any:
        return [b.wait(out := b.relu(b.wait(b.x, 1 + i)), 0, b.record(out, 1 + i)) for i in range(streams)][:0]

    (doubt,) = judge("happens-before", program(lambda b: build(b, streams=1200)), boundary="lenient")
    assert isinstance(doubt, Doubt)
    assert "streams" in doubt.detail


def test_metadata_is_not_believed() -> None:
    """Two values that are said to share a storage, and do not."""

    def build(b: Lowering) -> Any:
        product = b.mm(b.x)
        product.meta["val"] = b.x.meta["val"]
        added = b.call("aten::add_.Tensor", b.wait(b.y, 1), 1)
        return product, b.wait(added, 0, b.record(added, 1))

    assert kinds(build) == []


def test_a_tuple_without_metadata_is_followed() -> None:
    def build(b: Lowering, *, waits: bool) -> Any:
        norm = b.call("tensor_cast::add_rms_norm2", b.x, b.y, b.x, 1e-6)
        item = b._graph.call_function(operator.getitem, (norm, -1))
        token = b.record(b.getitem(norm, 0))
        out = b._graph.call_function(
            torch.ops.aten.relu.default, (b.wait(b.getitem(norm, 0), 1, *([token] if waits else [])),)
        )
        again = b._graph.call_function(torch.ops.tensor_cast._internal_record.default, (out, 1))
        joined = b._graph.call_function(torch.ops.tensor_cast._internal_wait_and_bind.default, (out, 0, [again]))
        return joined, item

    assert kinds(lambda b: build(b, waits=True)) == []
    assert kinds(lambda b: build(b, waits=False)) == ["race"]


@pytest.mark.parametrize("check", ["happens-before", "schedule"])
def test_programs_that_the_pass_left_alone_are_not_judged(check: str) -> None:
    racy = program(lambda b: cross(b, waits=False))
    assert CHECKS[check](Evidence(Pair(racy, racy), Contract(schedule=True))) == []
    assert CHECKS[check](Evidence(Pair(racy, None, changed=True), Contract(schedule=True))) == []
    plain = program(lambda b: b.mm(b.x))
    assert CHECKS[check](Evidence(Pair(plain, plain, changed=True), Contract(schedule=True))) == []


def _written_between(late: bool) -> Build:
    """An op reads a wait's result; what it waits for is written into before (or, where late, behind) that."""

    def build(b: Lowering) -> object:
        value = b.mm(b.x)
        gate = b.wait(value, 0)
        read = b.relu(gate) if late else None
        written = b.work("aten::mul_.Scalar", value, 2.0)
        return [read if read is not None else b.relu(gate), written]

    return build


def test_a_wait_that_stands_before_a_write_is_no_copy_on_a_runtime() -> None:
    assert kinds(_written_between(late=True)) == []
    found = findings(_written_between(late=False))
    assert [f.kind for f in found] == ["anchor-mismatch"]
    assert "'relu' reads" in found[0].title
    assert "'mul_' has written since" in found[0].title
