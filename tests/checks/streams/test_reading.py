"""Anchors are read by data flow and by position: what each binds, and where the two differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import fx

from tcverify.checks.streams.anchors import is_lowered, reading_of
from tcverify.checks.streams.reading import BEGINNING, StreamReading
from tcverify.checks.streams.replay import replay_streams
from tcverify.execution import Lockstep
from tcverify.program.finding import Finding
from tests.support.lowered import Build, Lowering, findings, judge, kinds, program


def read(build: Build, rank: int = 0) -> StreamReading:
    return reading_of(program(build), rank)


def mismatch(build: Build, **options: Any) -> Finding:
    (found,) = [f for f in findings(build, **options) if f.kind == "anchor-mismatch"]
    return found


def joined(b: Lowering, value: fx.Node, stream: int) -> fx.Node:
    return b.wait(value, 0, b.record(value, stream))


# ---------------------------------------------------------------------------------------------------------- kinds


def test_what_is_work_and_what_is_not() -> None:
    def build(b: Lowering) -> Any:
        product = b.mm(b.x)
        flat = b.call("aten::view", product, [16])
        size = b.call("aten::sym_size.int", product, 0)
        b.call("python::mul", size, 2)
        zeros = b.call("aten::zeros", [4, 4])  # without operands
        tupled = b.call("aten::split.Tensor", product, 2)  # a tuple of views
        b.call("aten::neg_", b.getitem(tupled, 0))
        region = b.call("tensor_cast::_internal_mark_region_begin", zeros, 1)
        same = b.call("aten::contiguous", region)
        added = b.call("python::add", same, 1)
        b.call("python::getitem", added, 0)  # a view of a tensor
        b.call("aten::t", joined(b, added, 0))
        return flat, added

    reading = read(build)
    assert [op.name for op in reading.ops] == ["mm", "zeros", "neg_", "_internal_mark_region_begin", "add"]
    assert reading.output is not None
    assert not reading.unknown


def test_plain_graphs_are_read_as_one_stream() -> None:
    reading = read(lambda b: b.relu(b.mm(b.x)))
    assert not reading.lowered
    assert [(op.stream, op.positional_stream, op.after) for op in reading.ops] == [(0, 0, ()), (0, 0, ())]


def test_a_graph_is_lowered_when_it_has_an_anchor() -> None:
    assert not is_lowered(program(lambda b: b.relu(b.x)).graphs[0])
    assert is_lowered(program(lambda b: b.wait(b.x, 0)).graphs[0])
    assert is_lowered(program(lambda b: (b.relu(b.x), b.record(b.x))).graphs[0])


# -------------------------------------------------------------------------------------------------- streams by data flow


def test_the_stream_comes_from_waits_then_from_the_record_then_it_is_0() -> None:
    def build(b: Lowering) -> Any:
        by_wait = b.relu(b.wait(b.x, 3))
        by_record = b.call("aten::zeros", [4, 4])
        token = b.record(by_record, 2)
        neither = b.relu(b.y)
        return [b.wait(value, 0, b.record(by_wait, 3), token) for value in (by_wait, by_record)], neither

    assert [op.stream for op in read(build).ops] == [3, 2, 0]


def test_nested_waits_the_latest_gives_the_stream() -> None:
    def build(b: Lowering) -> Any:
        first = b.mm(b.x)
        one, two = b.record(first), None
        second = b.relu(b.wait(b.y, 1))
        two = b.record(second, 1)
        return b.add(b.wait(b.wait(b.wait(b.x, 7, one), 8), 5, two), b.wait(b.y, 5))

    op = read(build).ops[-1]
    assert (op.stream, sorted(op.after)) == (5, [0, 1])


def test_a_record_stands_for_the_op_that_made_the_value_through_aliases() -> None:
    def build(b: Lowering) -> Any:
        norm = b.call("tensor_cast::add_rms_norm2", b.x, b.y, b.x, 1e-6)
        item = b.call("aten::view", b.getitem(norm, 1), [16])
        b.record(item)
        added = b.call("aten::add_.Scalar", item, 1)
        b.record(b.call("aten::view", added, [2, 8]))
        b.record(b.x)
        return added

    reading = read(build)
    assert [record.op for record in reading.records.values()] == [0, 1, BEGINNING]
    assert [record.positional_op for record in reading.records.values()] == [0, 1, 1]


# ------------------------------------------------------------------------------------------------------------ conflicts


CONFLICTS: list[Callable[[Lowering, bool], Any]] = [
    lambda b, bad: joined(b, b.add(b.wait(b.x, 1), b.wait(b.y, 2 if bad else 1)), 1),
    lambda b, bad: joined(b, b.relu(b.wait(b.x, 2 if bad else 1)), 1),
    lambda b, bad: joined(b, b.call("tensor_cast::cat", [b.wait(b.x, 1), b.wait(b.y, 2 if bad else 1)], 0), 1),
]


@pytest.mark.parametrize("build", CONFLICTS, ids=["two waits", "wait and record", "in a list"])
def test_anchors_of_an_op_agree(build: Callable[[Lowering, bool], Any]) -> None:
    assert kinds(lambda b: build(b, False)) == []
    found = next(f for f in findings(lambda b: build(b, True)) if f.kind == "stream-conflict")
    assert "bind it to streams" in found.title
    assert sorted(found.data["streams"]) == [1, 2]
    assert found.data["anchors"]


def test_two_records_of_an_op_agree() -> None:
    def build(b: Lowering, other: int) -> Any:
        out = b.relu(b.wait(b.x, 1))
        return b.wait(out, 0, b.record(out, 1), b.record(out, other))

    assert kinds(lambda b: build(b, 1)) == []
    assert kinds(lambda b: build(b, 2)) == ["stream-conflict"]


def test_a_stream_is_a_number() -> None:
    def build(b: Lowering, stream: Any) -> Any:
        out = b.relu(b.wait(b.x, 1))
        gated = b.wait(out, 0, b.record(out, 1))
        gated.args = (gated.args[0], stream, gated.args[2])
        return gated

    assert kinds(lambda b: build(b, 0)) == []
    for stream in (None, 0.0, True, "0"):
        (found,) = findings(lambda b, stream=stream: build(b, stream))  # type: ignore[misc]
        assert found.kind == "stream-conflict"
        assert "names no stream" in found.title


# ----------------------------------------------------------------------------------------------------------- mismatches


def test_an_op_between_a_wait_and_its_op_takes_the_wait() -> None:
    def build(b: Lowering, *, between: bool) -> Any:
        if not between:
            b.call("aten::neg", b.x)
        gated = b.wait(b.x, 1)
        if between:
            b.call("aten::neg", b.x)
        return joined(b, b.relu(gated), 1)

    assert kinds(lambda b: build(b, between=False)) == []
    found = mismatch(lambda b: build(b, between=True))
    assert found.title == (
        "'neg' runs on stream 0 by data flow, but a runtime that binds pending waits to the next op runs it on stream 1"
    )
    assert found.data == {"aspect": "stream"}
    assert "[neg]" in found.detail


def test_views_between_a_wait_and_its_op_do_not_matter() -> None:
    def build(b: Lowering) -> Any:
        gated = b.wait(b.x, 1)
        flat = b.call("aten::view", b.y, [16])
        out = b.relu(gated)
        item = b.call("aten::view", out, [16])
        return joined(b, item, 1), flat

    assert kinds(build) == []


def test_a_wait_whose_only_user_is_a_view_binds_nothing() -> None:
    def build(b: Lowering, *, through: bool) -> Any:
        product = b.mm(b.x)
        token = b.record(product)
        if through:
            value = b.call("aten::view", b.wait(product, 1, token), [16])
        else:
            value = b.wait(b.call("aten::view", product, [16]), 1, token)
        out = b.relu(value)
        return joined(b, out, 1)

    assert kinds(lambda b: build(b, through=False)) == []
    assert "anchor-mismatch" not in kinds(lambda b: build(b, through=False))
    found = findings(lambda b: build(b, through=True))  # by data flow, only the record binds it: no token
    assert {f.kind for f in found} == {"anchor-mismatch", "race"}
    race = next(f for f in found if f.kind == "race")
    assert (race.data["first"], race.data["second"]) == ("mm", "relu")


def test_a_dead_wait_binds_the_next_op_by_position() -> None:
    def build(b: Lowering, *, dead: bool, stream: int) -> Any:
        if dead:
            b.wait(b.y, stream)
        return joined(b, b.relu(b.wait(b.x, 1) if stream == 1 else b.x), 1 if stream == 1 else 0)

    assert kinds(lambda b: build(b, dead=False, stream=2)) == []
    assert mismatch(lambda b: build(b, dead=True, stream=2)).node == "relu"
    assert kinds(lambda b: build(b, dead=True, stream=1)) == []  # an earlier wait on the same stream, without tokens


def test_a_dead_wait_with_a_token_orders_by_position_alone() -> None:
    def build(b: Lowering, *, token: bool) -> Any:
        product = b.mm(b.x)
        mark = b.record(product)
        b.wait(b.y, 1, *([mark] if token else []))
        return joined(b, b.relu(b.wait(b.y, 1)), 1), product

    assert kinds(lambda b: build(b, token=False)) == []
    found = mismatch(lambda b: build(b, token=True))
    assert found.title == "'relu' waits for 'mm' by position, by a wait that does not stand on its operands"
    assert found.data == {"aspect": "order"}


def test_a_token_that_only_the_data_flow_sees() -> None:
    def build(b: Lowering, *, shared: bool) -> Any:
        product = b.mm(b.x)
        mark = b.record(product)
        gated = b.wait(product, 1, mark)
        first = b.relu(b.wait(gated, 1))
        token = b.record(first, 1)
        second = b.relu(b.wait(gated if shared else b.wait(product, 1, mark), 2))
        return b.wait(first, 0, token, b.record(second, 2)), second

    assert kinds(lambda b: build(b, shared=False)) == []
    found = mismatch(lambda b: build(b, shared=True))
    assert found.title == "'relu_1' waits for 'mm' by data flow, but a runtime gives that wait to an earlier op"
    assert found.data == {"aspect": "order"}


def test_a_record_follows_its_op_at_once() -> None:
    def build(b: Lowering, *, late: bool) -> Any:
        product = b.mm(b.x)
        token = None if late else b.record(product)
        other = b.call("aten::neg", b.y)
        token = b.record(product) if token is None else token
        return joined(b, b.relu(b.wait(product, 1, token)), 1), other

    assert kinds(lambda b: build(b, late=False)) == []
    found = mismatch(lambda b: build(b, late=True))
    assert found.title == "record '_internal_record' stands for 'mm' by data flow, but 'neg' was issued last"
    assert found.data == {"aspect": "record"}


def test_a_record_of_an_input_behind_an_op_marks_the_op() -> None:
    found = mismatch(lambda b: (b.mm(b.x), b.record(b.y))[0])
    assert found.title == "record '_internal_record' stands for no op by data flow, but 'mm' was issued last"


def test_a_stream_by_record_needs_the_record_at_once() -> None:
    def build(b: Lowering, *, apart: bool) -> Any:
        out = b.call("aten::zeros", [4, 4])
        if not apart:
            return joined(b, out, 1)
        gated = b.wait(b.x, 0)
        token = b.record(out, 1)
        return b.relu(gated), b.wait(out, 0, token)

    assert kinds(lambda b: build(b, apart=False)) == []
    assert mismatch(lambda b: build(b, apart=True)).node == "zeros"


def test_the_outputs_take_what_is_pending() -> None:
    def build(b: Lowering, *, stream: int) -> Any:
        out = b.relu(b.x)
        b.wait(out, stream)
        return out

    assert kinds(lambda b: build(b, stream=0)) == []
    assert mismatch(lambda b: build(b, stream=1)).node == "output"
    assert kinds(lambda b: build(b, stream=1), boundary="lenient") == []


def test_keyword_arguments_of_anchors_are_read() -> None:
    def build(b: Lowering) -> Any:
        product = b.mm(b.x)
        token = b.record(product)
        gated = b.wait(product, 1, token)
        gated.kwargs = dict(zip(("x", "stream_id", "deps"), gated.args, strict=True))
        gated.args = ()
        return joined(b, b.relu(gated), 1)

    assert kinds(build) == []
    assert Lockstep().run(program(build)).finished


ODD: dict[str, Callable[[Lowering, fx.Node, fx.Node], tuple[Any, ...]]] = {
    "no arguments": lambda b, value, token: (),
    "a value alone": lambda b, value, token: (value,),
    "a number as value": lambda b, value, token: (1.5, 1, [token]),
    "no list of tokens": lambda b, value, token: (value, 1, token),
    "nothing for tokens": lambda b, value, token: (value, 1, None),
    "numbers for tokens": lambda b, value, token: (value, 1, [1, 2]),
    "a token as value": lambda b, value, token: (token, 1, [token]),
    "a node as stream": lambda b, value, token: (value, value, [token]),
    "a huge stream": lambda b, value, token: (value, 10**30, [token]),
    "a negative stream": lambda b, value, token: (value, -1, [token]),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("anchor", ["wait", "record"])
def test_odd_anchors_raise_nothing(name: str, anchor: str) -> None:
    def build(b: Lowering) -> Any:
        product = b.mm(b.x)
        token = b.record(product)
        odd = b.wait(product, 1, token) if anchor == "wait" else b.record(product)
        out = b.relu(b.wait(product, 1, token))
        late = b.add(out, odd) if anchor == "wait" else out
        result = joined(b, late, 1), token, odd, 3, None
        odd.args = ODD[name](b, product, token)[: 3 if anchor == "wait" else 2]
        return result

    for check in ("happens-before", "schedule"):
        for boundary in ("strict", "lenient"):
            for found in judge(check, program(build), boundary=boundary, inputs="stream0", schedule=True):
                assert isinstance(found, Finding)
    assert replay_streams(program(build), 0).ops


def test_a_graph_without_outputs_or_work_is_read() -> None:
    assert kinds(lambda b: ()) == []
    assert kinds(lambda b: b.wait(b.x, 0)) == []
    assert kinds(lambda b: (b.record(b.x), 1)) == []
    assert kinds(lambda b: b.wait(b.x, 0), inputs="stream0") == []


def test_long_chains_are_read() -> None:
    def build(b: Lowering) -> Any:
        value, tokens = b.x, []
        for i in range(2000):
            value = b.relu(b.wait(value, i % 3, *tokens))
            tokens = [b.record(value, i % 3)]
            value = b.call("aten::t", value)
        for _ in range(300):
            value = b.wait(value, 0, *tokens)
        return value

    assert kinds(build) == []


def test_ranks_share_a_reading_unless_their_streams_differ() -> None:
    made = program(lambda b: joined(b, b.reduce(b.wait(b.x, 1)), 1))
    assert reading_of(made, 0) is reading_of(made, 1)

    def by_rank(b: Lowering) -> Any:
        stream = b.constant("stream", lambda rank: 1 + rank)
        out = b.relu(b.wait(b.x, stream))
        return b.wait(out, 0, b.record(out, stream))

    one_graph = program(by_rank)
    twice = program(by_rank, by_rank)
    assert [reading_of(twice, rank).ops[0].stream for rank in (0, 1)] == [1, 2]
    assert reading_of(one_graph, 0).ops[0].stream == 1
