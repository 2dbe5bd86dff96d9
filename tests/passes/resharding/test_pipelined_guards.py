"""What cannot be pipelined is declined with a message of its own; what needs no pipeline is left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tcverify.errors import Unsupported, UsageError
from tcverify.passes.base import disable_passes
from tcverify.passes.resharding.pipelined import PipelinedMatmul
from tcverify.program import Placed, PlacedBuilder, Program
from tcverify.verification.verifier import verify
from tests.support.pipelined_programs import gathered, pipelined, scattered

PAIR, WHOLE = "[1, 0]", "[1, 0] replicated"
GRID = "[[0, 1], [2, 3]]"
SHAPE = (3, 2, 2, 4)


class Case:
    """A gathered matmul on two ranks, and one thing that is different."""

    def __init__(self, world: int = 2) -> None:
        self.b = PlacedBuilder(world)

    def a(self, layout: str = f"{PAIR} shard(1)", shape: tuple[int, ...] = SHAPE) -> Placed:
        return self.b.input("a", shape, layout)

    def w(self, layout: str = WHOLE, shape: tuple[int, ...] = (4, 4)) -> Placed:
        return self.b.input("w", shape, layout)

    def multiplied(self, *operands: Placed, op: str = "aten::matmul", axis: int = 0, **options: Any) -> Program:
        return self.b.build(self.b.call(op, *operands, stream_axis=axis, **options))


def dim_0(c: Case) -> Program:
    a, w = c.a(f"{PAIR} shard(0)", (4, 2, 2, 4)), c.w()
    return c.multiplied(c.b.set(a, WHOLE), w)


def dim_2(c: Case) -> Program:
    a, w = c.a(f"{PAIR} shard(2)"), c.w()
    return c.multiplied(c.b.set(a, WHOLE), w)


def split(c: Case) -> Program:
    a, w = c.a(shape=(3, 4, 2, 4)), c.w()
    return c.multiplied(c.b.set(a, WHOLE), w)


def matrix(c: Case) -> Program:
    a, w = c.a(shape=(4, 2)), c.w(shape=(2, 4))
    return c.multiplied(c.b.set(a, WHOLE), w)


def parallel(c: Case) -> Program:
    a, w = c.a(), c.w()
    return c.multiplied(c.b.set(c.b.call("aten::relu", a, stream_axis=0), WHOLE), w)


def second_sharded(c: Case) -> Program:
    a, w = c.a(), c.w(f"{PAIR} shard(1)", (4, 8))
    return c.multiplied(c.b.set(a, WHOLE), w, layout=f"{PAIR} shard(3)")


def bias_sharded(c: Case) -> Program:
    a, w, bias = c.a(), c.w(), c.b.input("bias", (8,), f"{PAIR} shard(0)")
    return c.multiplied(c.b.set(a, WHOLE), w, bias, op="aten::linear")


def result_sharded(c: Case) -> Program:
    a, w = c.a(), c.w()
    return c.multiplied(c.b.set(a, WHOLE), w, layout=f"{PAIR} shard(3)")


def batched(c: Case) -> Program:
    a, w = c.a(), c.w(shape=(3, 2, 4, 4))
    return c.multiplied(c.b.set(a, WHOLE), w)


def other_axis(c: Case) -> Program:
    a, w = c.a(), c.w()
    return c.multiplied(c.b.set(a, WHOLE), w, axis=2)


def several_dims(c: Case) -> Program:
    a, w = c.a(f"{GRID} replicated, shard(1)"), c.w(f"{GRID} replicated, replicated")
    return c.multiplied(c.b.set(a, f"{GRID} replicated, replicated"), w)


def not_gathered(c: Case) -> Program:
    a, w = c.a(), c.w()
    return c.multiplied(a, w, layout=WHOLE)


def bias_of_rows(c: Case) -> Program:
    a, w, bias = c.a(), c.w(), c.b.input("bias", (2, 4), WHOLE)
    return c.multiplied(c.b.set(a, WHOLE), w, bias, op="aten::linear")


def bias_of_sum(c: Case) -> Program:
    a, w, bias = c.a(f"{PAIR} shard(0)", (2, 4, 2, 4)), c.w(), c.b.input("number", (), WHOLE)
    partial = c.b.call("aten::linear", a, w, bias)
    return c.b.build(c.b.reduce(partial, 0, f"{PAIR} shard(1)", stream_axis=0))


def other_product(c: Case) -> Program:
    a, w = c.a(shape=(4, 2)), c.w(shape=(2, 4))
    return c.multiplied(c.b.set(a, WHOLE), w, op="aten::mm")


MESSAGES: list[tuple[Callable[[Case], Program], int, str]] = [
    (dim_0, 2, "'set_1', the first operand of 'matmul', is gathered along dim 0, which is also the stream axis"),
    (dim_2, 2, "'set_1', the first operand of 'matmul', is gathered along dim 2"),
    (split, 2, "has shape [3, 4, 2, 4]: dim 1 is not one shard for each of 2 ranks"),
    (matrix, 2, "has shape [4, 2]: dim 1 is not one shard for each of 2 ranks"),
    (parallel, 2, "dim 0 of 'relu', which 'set_1' gathers, is parallel over streams already"),
    (second_sharded, 2, "'w', the other of 'matmul', is in layout '[1, 0] shard(1)', and chunks need the whole of it"),
    (bias_sharded, 2, "'bias', the bias of 'linear', is in layout '[1, 0] shard(0)'"),
    (result_sharded, 2, "'matmul', the result of 'matmul', is in layout '[1, 0] shard(3)'"),
    (batched, 2, "'w', the other of 'matmul', has shape [3, 2, 4, 4]"),
    (other_axis, 2, "the stream axis of 'matmul' is dim 2, and its chunks are of dim 0"),
    (several_dims, 4, "is gathered over mesh [[0, 1], [2, 3]], which has several dims"),
    (
        not_gathered,
        2,
        "operand 'a' of 'matmul' is in layout '[1, 0] shard(1)', and the result is in '[1, 0] replicated'",
    ),
    (bias_of_rows, 2, "'bias', the bias of 'linear', has shape [2, 4], and chunks take a vector"),
    (bias_of_sum, 2, "'number', the bias of 'linear', has shape [], and chunks take a vector"),
    (other_product, 2, "'mm' calls aten::mm, which cannot be pipelined"),
]


@pytest.mark.parametrize(("build", "world", "message"), MESSAGES, ids=[build.__name__ for build, *_ in MESSAGES])
def test_every_precondition_has_a_message_of_its_own(
    build: Callable[[Case], Program], world: int, message: str
) -> None:
    program = build(Case(world))
    for gm in program.graph_modules():
        before = str(gm.graph)
        with pytest.raises(Unsupported) as caught:
            PipelinedMatmul()(gm)
        assert message in caught.value.message
        assert caught.value.hint
        assert str(gm.graph) == before
    others = [text for other, _, text in MESSAGES if other is not build and text in caught.value.message]
    assert others == []


@pytest.mark.parametrize("name", ["w", "matmul"])
def test_layouts_must_be_known(name: str) -> None:
    gm = gathered(2, (0, 1), 2).graph_modules()[0]
    node = next(node for node in gm.graph.nodes if node.name == name)
    del node.meta["layout"]
    with pytest.raises(Unsupported, match=f"the layout of '{name}'"):
        PipelinedMatmul()(gm)


def test_shapes_must_be_known() -> None:
    gm = gathered(2, (0, 1), 2).graph_modules()[0]
    del next(node for node in gm.graph.nodes if node.name == "matmul").meta["val"]
    with pytest.raises(Unsupported, match="the shape of 'matmul' is not known"):
        PipelinedMatmul()(gm)


@pytest.mark.parametrize(
    ("chunks", "on_reduce", "on_matmul", "words"),
    [
        (3, 1, None, "is dim 1 of the result"),
        (3, None, 1, "is the dim that is summed of the result"),
        (3, None, 2, "is dim 1 of the result"),
        (3, 0, 3, "is dim 0 and dim 2 of the result"),
        (None, None, 0, "is the dim that is summed of the result"),
    ],
)
def test_chunks_of_sums_are_of_dim_0(
    chunks: int | None, on_reduce: int | None, on_matmul: int | None, words: str
) -> None:
    gm = scattered(2, (0, 1), chunks, 0 if chunks is None else 1).graph_modules()[0]
    for node in gm.graph.nodes:
        axis = {"matmul": on_matmul, "reduce": on_reduce}.get(node.name)
        node.meta.pop("stream_axis", None)
        if axis is not None:
            node.meta["stream_axis"] = axis
    with pytest.raises(Unsupported, match=words):
        PipelinedMatmul()(gm)


def test_vectors_have_no_chunks() -> None:
    b = PlacedBuilder(2)
    a, v = b.input("a", (2, 4, 3), "[0, 1] shard(0)"), b.input("v", (3,), "[0, 1] replicated")
    program = b.build(b.reduce(b.call("aten::matmul", a, v), 0, "[0, 1] shard(0)", stream_axis=0))
    with pytest.raises(Unsupported, match="'matmul' multiplies vectors"):
        PipelinedMatmul()(program.graph_modules()[0])


def test_a_declined_program_is_skipped() -> None:
    verdict = verify(PipelinedMatmul(), dim_2(Case()))
    assert (verdict.status, [doubt.reason for doubt in verdict.doubts]) == ("inconclusive", ["declined"])


# --------------------------------------------------------------------------------------------------------- left alone


def no_axis(c: Case) -> Program:
    a, w = c.a(), c.w()
    return c.b.build(c.b.call("aten::matmul", c.b.set(a, WHOLE), w))


def no_communication(c: Case) -> Program:
    a, w = c.a(), c.w()
    return c.multiplied(a, w)


def copied(c: Case) -> Program:
    a, w = c.a(WHOLE), c.w()
    return c.multiplied(c.b.set(a, WHOLE), w)


def other_mesh(c: Case) -> Program:
    a, w = c.a(), c.w("[0, 1] replicated")
    return c.multiplied(c.b.set(a, "[0, 1] replicated"), w)


def other_shard(c: Case) -> Program:
    a, w = c.a(), c.w()
    return c.multiplied(c.b.set(a, f"{PAIR} shard(2)"), w)


def second_gathered(c: Case) -> Program:
    a, w = c.a(WHOLE), c.w(f"{PAIR} shard(0)")
    return c.multiplied(a, c.b.set(w, WHOLE))


def no_product(c: Case) -> Program:
    return c.multiplied(c.b.set(c.a(), WHOLE), op="aten::relu")


def alone(c: Case) -> Program:
    a, w = c.a("[1] shard(1)", (3, 4, 2, 4)), c.w("[1] replicated")
    return c.multiplied(c.b.set(a, "[1] replicated"), w)


def sum_alone(c: Case) -> Program:
    a, w = c.a("[1] shard(0)", (1, 3, 4, 4)), c.w("[1] replicated")
    return c.b.build(c.b.reduce(c.b.call("aten::matmul", a, w), 0, "[1] shard(1)", stream_axis=2))


@pytest.mark.parametrize(
    "build", [alone, sum_alone, no_axis, no_communication, copied, other_mesh, other_shard, second_gathered, no_product]
)
def test_what_needs_no_pipeline_is_left_alone(build: Callable[[Case], Program]) -> None:
    program = build(Case())
    for gm in program.graph_modules():
        before, done = str(gm.graph), PipelinedMatmul()
        assert str(done(gm).graph) == before
        assert done.rewrites == {"allgather-matmul": 0, "matmul-reduce-scatter": 0}
    verdict = verify(PipelinedMatmul(), program)
    assert (verdict.status, verdict.changed) == ("passed", False)


# ------------------------------------------------------------------------------------------------------------ options


def test_options_come_as_words() -> None:
    made = PipelinedMatmul(number_of_streams="2", form="ring", reduce_form="p2p", sync_streams="true")
    assert (made.streams.number, made.streams.sync, made.form, made.reduce_form) == (2, True, "ring", "p2p")
    assert made.contract.streams == 2
    assert PipelinedMatmul().contract == PipelinedMatmul.contract


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"number_of_streams": 0}, "option number_of_streams"),
        ({"number_of_streams": True}, "option number_of_streams"),
        ({"number_of_streams": "many"}, "option number_of_streams"),
        ({"form": "reduce"}, "option form"),
        ({"reduce_form": "broadcast"}, "option reduce_form"),
        ({"sync_streams": "maybe"}, "option sync_streams"),
        ({"streams": 3}, "has no option 'streams'"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        PipelinedMatmul(**options)
    assert words in caught.value.message


def test_a_disabled_pass_changes_nothing() -> None:
    program = gathered(2, (0, 1), 3)
    pipelined(program, 0, enabled=False)
    with disable_passes("pipelined_matmul"):
        pipelined(program, 0)
    pipelined(program, 1)


def test_the_dump_shows_what_was_done(tmp_path: Any) -> None:
    pipelined(gathered(2, (0, 1), 2), dump=tmp_path)
    written = sorted(tmp_path.iterdir())
    assert len(written) == 2
    assert written[0].read_text().startswith("# after pipelined_matmul (allgather-matmul: 1, matmul-reduce-scatter: 0)")
