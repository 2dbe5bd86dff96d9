"""Stream-parallel loops: what each op computes at one index, which ops share a loop, on which streams; and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from tcverify import verify
from tcverify.errors import Unsupported, UsageError
from tcverify.execution import ProcessGroupPool, explore
from tcverify.ops import TensorSpec, fake_tensor, new_fake_mode, resolve
from tcverify.passes.editing import op_name
from tcverify.passes.resharding.stream_loops import StreamParallelType
from tcverify.program import Placed, PlacedBuilder, Program

Body = Callable[[PlacedBuilder, dict[str, Placed]], Placed]
Pools = Callable[[int], ProcessGroupPool]

MESH = "[1, 0, 2]"


def build(body: Body, mesh: str = MESH) -> Program:
    """x [4, 6], y [6, 5], v [6], p [3, 4, 6] (sharded on dim 0), b [2, 4, 6] and c [2, 6, 3]; others on all ranks of the mesh."""
    builder = PlacedBuilder(3)
    shapes = {"x": (4, 6), "y": (6, 5), "v": (6,), "b": (2, 4, 6), "c": (2, 6, 3)}
    inputs = {name: builder.input(name, shape, f"{mesh} replicated") for name, shape in shapes.items()}
    inputs["p"] = builder.input("p", (3, 4, 6), f"{mesh} shard(0)")
    return builder.build(body(builder, inputs))


def on(op: str, *operands: str, axis: int, **more: object) -> Body:
    def body(b: PlacedBuilder, i: dict[str, Placed]) -> Placed:
        return b.call(op, *(i.get(name, name) for name in operands), stream_axis=axis, **more)

    return body


def transposed(b: PlacedBuilder, i: dict[str, Placed]) -> Placed:
    """An elementwise op keeps the strides of its operand."""
    turned = b.call("aten::transpose.int", i["b"], 0, 2)
    return b.call("aten::permute", b.call("aten::exp", turned, stream_axis=1), [2, 1, 0])


BODIES: dict[str, Body] = {
    "add": on("aten::add.Tensor", "x", "x", axis=0),
    "add with broadcasting": on("aten::add.Tensor", "x", "v", axis=0),
    "add along the dim of both": on("aten::add.Tensor", "x", "v", axis=1),
    "add to a repeated dim": lambda b, i: b.call(
        "aten::add.Tensor", i["x"], b.call("aten::sum.dim_IntList", i["x"], [0], True), stream_axis=0
    ),
    "where": lambda b, i: b.call(
        "aten::where.self", b.call("aten::gt.Scalar", i["x"], 0.0), i["x"], i["v"], stream_axis=1
    ),
    "clone": on("aten::clone", "x", axis=1, memory_format=torch.contiguous_format),
    "sum over the dim before": lambda b, i: b.call("aten::sum.dim_IntList", i["b"], [0], stream_axis=0),
    "sum over the dim behind": lambda b, i: b.call("aten::sum.dim_IntList", i["b"], [-1], stream_axis=1),
    "sum over two dims": lambda b, i: b.call("aten::sum.dim_IntList", i["b"], [0, 2], stream_axis=0),
    "sum that keeps its dim": lambda b, i: b.call("aten::amax", i["b"], [1], True, stream_axis=2),
    "softmax along another dim": lambda b, i: b.call("aten::softmax.int", i["b"], -1, stream_axis=1),
    "matmul on M": on("aten::matmul", "x", "y", axis=0),
    "matmul on N": on("aten::matmul", "x", "y", axis=1),
    "mm on M": on("aten::mm", "x", "y", axis=0),
    "mm on N": on("aten::mm", "x", "y", axis=1),
    "matmul with a vector": on("aten::matmul", "x", "v", axis=0),
    "vector with matmul": on("aten::matmul", "v", "y", axis=0),
    "batched matmul on the batch": on("aten::bmm", "b", "c", axis=0),
    "batched matmul on M": on("aten::bmm", "b", "c", axis=1),
    "batched matmul on N": on("aten::bmm", "b", "c", axis=2),
    "matmul of a batch and one matrix on the batch": on("aten::matmul", "b", "y", axis=0),
    "matmul of a batch and one matrix on M": on("aten::matmul", "b", "y", axis=1),
    "matmul of a batch and one matrix on N": on("aten::matmul", "b", "y", axis=2),
    "matmul of one matrix and a batch on M": on("aten::matmul", "x", "c", axis=1),
    "matmul of one matrix and a batch on N": on("aten::matmul", "x", "c", axis=2),
    "matmul of one matrix and a batch on the batch": on("aten::matmul", "x", "c", axis=0),
    "linear on rows": lambda b, i: b.call(
        "aten::linear", i["b"], b.call("aten::t", i["y"]), b.call("aten::sum.dim_IntList", i["y"], [0]), stream_axis=1
    ),
    "linear on columns": lambda b, i: b.call(
        "aten::linear", i["b"], b.call("aten::t", i["y"]), b.call("aten::sum.dim_IntList", i["y"], [0]), stream_axis=2
    ),
    "linear without bias on columns": lambda b, i: b.call("aten::linear", i["x"], b.call("aten::t", i["y"]), stream_axis=1),
    "set from shards": lambda b, i: b.set(i["p"], f"{MESH} replicated", stream_axis=1),
    "set to shards of another dim": lambda b, i: b.set(
        b.call("aten::mul.Tensor", i["b"], 2.0), "[0, 2] shard(1)", stream_axis=0
    ),
    "set to one rank": lambda b, i: b.set(i["p"], "[2] replicated", stream_axis=2),
    "reduce": lambda b, i: b.reduce(i["p"], 0, f"{MESH} replicated", stream_axis=0),
    "reduce to shards": lambda b, i: b.reduce(i["p"], 0, f"{MESH} shard(1)", stream_axis=0),
    "strides in another order": transposed,
}  # fmt: skip


def calls(program: Program, name: str) -> list[fx.Node]:
    """Calls of an op on rank 0 behind the pass."""
    gm = program.graph_module(0)
    StreamParallelType(number_of_streams=2)(gm)
    return [node for node in gm.graph.nodes if op_name(node) == name]


@pytest.mark.parametrize("name", BODIES)
def test_an_op_is_computed_part_by_part(name: str) -> None:
    verdict = verify(StreamParallelType(number_of_streams=2), build(BODIES[name]))
    assert verdict.status == "passed", [finding.title for finding in verdict.findings]
    assert verdict.changed


@pytest.mark.parametrize("name", BODIES)
def test_no_stream_axis_is_left_and_metadata_stays_as_it_was(name: str) -> None:
    gm = build(BODIES[name]).graph_module(0)
    before = [TensorSpec.of(node.meta["val"]).layout for node in gm.graph.find_nodes(op="output")[0].all_input_nodes]
    StreamParallelType()(gm)
    after = [TensorSpec.of(node.meta["val"]).layout for node in gm.graph.find_nodes(op="output")[0].all_input_nodes]
    assert before == after
    assert not any("stream_axis" in node.meta for node in gm.graph.nodes)


def chain(b: PlacedBuilder, i: dict[str, Placed]) -> Placed:
    """Gather, product, elementwise: one loop. Then along another dim: a loop of its own."""
    whole = b.set(i["p"], f"{MESH} replicated", stream_axis=1)
    product = b.call("aten::matmul", whole, i["y"], stream_axis=1)
    loss = b.call("aten::relu", b.call("aten::add.Tensor", product, product, stream_axis=1), stream_axis=1)
    return b.call("aten::sum.dim_IntList", loss, [1], stream_axis=0)


@pytest.mark.parametrize("streams", [1, 2, 3, 4])
def test_every_number_of_streams_gives_the_same_in_any_order(streams: int) -> None:
    program = build(chain)
    verdict = verify(StreamParallelType(number_of_streams=streams), program)
    assert verdict.status == "passed", [finding.title for finding in verdict.findings]
    modules = program.graph_modules()
    for gm in modules:
        StreamParallelType(number_of_streams=streams)(gm)
    found = explore(program.with_graphs([gm.graph for gm in modules]), inputs="stream0", systematic=True)
    assert found is not None
    assert not found.observations


@pytest.mark.parametrize("name", ["set to shards of another dim", "batched matmul on N", "linear on columns"])
def test_the_exact_domain_agrees(name: str) -> None:
    verdict = verify(StreamParallelType(number_of_streams=2), build(BODIES[name]), domain="exact")
    assert (verdict.status, verdict.notes) == ("passed", [])


@pytest.mark.parametrize("name", ["set from shards", "set to one rank", "reduce to shards", "matmul on N"])
def test_gloo_computes_what_lockstep_computes(name: str, pool: Pools) -> None:
    verdict = verify(StreamParallelType(number_of_streams=3), build(BODIES[name]), confirm=pool(3))
    assert verdict.status == "passed", [finding.title for finding in verdict.findings]
    assert "gloo" in verdict.executors


def test_ops_whose_axes_map_share_a_loop() -> None:
    gm, pass_ = build(chain).graph_module(0), StreamParallelType(number_of_streams=2)
    pass_(gm)
    assert pass_.rewrites == {"loops": 2, "ops": 5}
    names = [op_name(node) for node in gm.graph.nodes]
    first = names[: names.index("aten::sum.dim_IntList")]
    assert first.count("multidevice::set") == first.count("aten::matmul") == 4
    # Every part is selected once per trip: of x, and of the results of set, matmul, add and relu. The sum has begun to read.
    assert first.count("aten::select.int") == 4 * 5 + 1


def test_trips_take_the_workers_in_turn_and_the_caller_joins_each() -> None:
    gm = build(BODIES["matmul on M"]).graph_module(0)
    StreamParallelType(number_of_streams=3)(gm)
    story = []
    for node in gm.graph.nodes:
        name = op_name(node)
        if name in ("host_ir::set_current_stream", "host_ir::synchronize"):
            token = node.args[0]
            stream = "caller" if op_name(token) == "host_ir::current_stream" else f"worker {token.args[0]}"
            story.append(f"{'set' if 'set_' in name else 'wait for'} {stream}")
        elif name == "aten::matmul":
            story.append("matmul")
    began = [
        f"{step} {who}".strip() for n in range(3) for step, who in (("set", f"worker {n}"), ("wait for", "caller"))
    ]
    trips = [step for n in (0, 1, 2, 0) for step in (f"set worker {n}", "matmul", "set caller", f"wait for worker {n}")]
    assert story == began + trips


def test_an_op_between_two_ends_the_loop() -> None:
    def body(b: PlacedBuilder, i: dict[str, Placed]) -> Placed:
        first = b.call("aten::relu", i["x"], stream_axis=0)
        other = b.call("aten::neg", i["x"])
        return b.call("aten::add.Tensor", b.call("aten::exp", first, stream_axis=0), other)

    program = build(body)
    assert len(calls(program, "host_ir::current_stream")) == 2
    assert verify(StreamParallelType(number_of_streams=2), program).status == "passed"


def test_an_attribute_between_two_is_there_before_the_loop() -> None:
    graph, mode = fx.Graph(), new_fake_mode()
    x = graph.placeholder("x")
    first = graph.call_function(resolve("aten::relu"), (x,))
    weight = graph.get_attr("weight")
    second = graph.call_function(resolve("aten::add.Tensor"), (first, weight))
    graph.output((second,))
    for node in (x, first, weight, second):
        node.meta["val"] = fake_tensor(TensorSpec.contiguous((4, 3), torch.float32), mode)
    first.meta["stream_axis"] = second.meta["stream_axis"] = 0
    root = torch.nn.Module()
    root.register_buffer("weight", torch.ones(4, 3))
    gm, pass_ = fx.GraphModule(root, graph), StreamParallelType()
    pass_(gm)
    assert pass_.rewrites == {"loops": 1, "ops": 2}
    gm.graph.lint()


SEPARATE: dict[str, Body] = {
    "another dim": lambda b, i: b.call("aten::exp", b.call("aten::relu", i["x"], stream_axis=0), stream_axis=1),
    "nothing read": lambda b, i: b.call(
        "aten::add.Tensor", b.call("aten::relu", i["x"], stream_axis=0), b.call("aten::exp", i["x"], stream_axis=0)
    ),
    "read whole": lambda b, i: b.call(
        "aten::matmul", i["b"], b.call("aten::relu", i["c"], stream_axis=1), stream_axis=1
    ),
    "read whole and in parts": lambda b, i: (lambda square: b.call("aten::matmul", square, square, stream_axis=0))(
        b.call("aten::matmul", b.call("aten::t", i["x"]), i["x"], stream_axis=0)
    ),
    "two communications": lambda b, i: b.set(
        b.set(i["p"], f"{MESH} replicated", stream_axis=1), "[0] replicated", stream_axis=1
    ),
}


@pytest.mark.parametrize("name", SEPARATE)
def test_what_does_not_map_has_a_loop_of_its_own(name: str) -> None:
    program = build(SEPARATE[name])
    assert len(calls(program, "host_ir::current_stream")) == 2
    verdict = verify(StreamParallelType(number_of_streams=2), program)
    assert verdict.status == "passed", [finding.title for finding in verdict.findings]


def test_ranks_that_see_different_ops_between_agree_on_the_order_of_communication() -> None:
    """Rank 1 takes part in all three, and reads one from the other; rank 0 gives to the first and gets from the last."""
    b = PlacedBuilder(2)
    x = b.input("x", (4, 3), "[0] replicated")
    there = b.set(x, "[1] replicated", stream_axis=0)
    back = b.set(b.call("aten::relu", there, stream_axis=0), "[0] replicated", stream_axis=0)
    verdict = verify(StreamParallelType(number_of_streams=2), b.build(back))
    assert verdict.status == "passed", [finding.title for finding in verdict.findings]


def test_a_chain_on_one_rank_shares_a_loop() -> None:
    b = PlacedBuilder(2)
    x = b.input("x", (4, 3), "[0] shard(1)")
    there = b.set(x, "[0] replicated", stream_axis=0)
    program = b.build(b.set(there, "[0] replicated", stream_axis=0))
    assert len(calls(program, "host_ir::current_stream")) == 1
    assert verify(StreamParallelType(), program).status == "passed"


def test_ranks_that_only_give_take_the_same_steps() -> None:
    b = PlacedBuilder(2)
    x = b.input("x", (4, 3), "[0] replicated")
    program = b.build(b.set(x, "[1] replicated", stream_axis=0))
    assert len(calls(program, "multidevice::set")) == 4
    assert not calls(program, "aten::empty.memory_format")


def test_a_loop_without_trips_leaves_its_results_alone() -> None:
    b = PlacedBuilder(2)
    x = b.input("x", (0, 4), "[0, 1] shard(1)")
    whole = b.set(x, "[0, 1] replicated", stream_axis=0)
    program = b.build(b.call("aten::relu", whole, stream_axis=0))
    gm = program.graph_module(0)
    StreamParallelType()(gm)
    assert [op_name(node) for node in gm.graph.nodes if node.op == "call_function"] == ["aten::empty.memory_format"] * 2
    assert verify(StreamParallelType(), program).status == "passed"


def test_a_graph_without_stream_axes_is_not_touched() -> None:
    gm = build(lambda b, i: b.call("aten::relu", i["x"])).graph_module(0)
    code = gm.code
    pass_ = StreamParallelType()
    assert pass_(gm).code == code
    assert not any(pass_.rewrites.values())


def test_views_behind_a_result_share_its_storage() -> None:
    gm = build(lambda b, i: b.call("aten::t", b.call("aten::relu", i["x"], stream_axis=0))).graph_module(0)
    StreamParallelType()(gm)
    storages = {
        name: next(node for node in gm.graph.nodes if op_name(node) == name).meta["val"].untyped_storage()._cdata
        for name in ("aten::empty.memory_format", "aten::t")
    }
    assert len(set(storages.values())) == 1


@pytest.mark.parametrize(("axis", "shapes"), [(1, ((4, 3), (3,))), (0, ((4,), ())), (0, ((), (4,)))])
def test_the_dtype_that_is_computed_in_stays(axis: int, shapes: tuple[tuple[int, ...], ...]) -> None:
    """What a tensor without dims says counts less: a part of a vector must not become one."""
    b = PlacedBuilder(2)
    x = b.input("x", shapes[0], "[0, 1] replicated", torch.int32)
    y = b.call("aten::add.Scalar", b.input("y", shapes[1], "[0, 1] replicated", torch.int64), 2**33)
    ahead = b.call("aten::bitwise_right_shift.Tensor", b.call("aten::sub.Tensor", y, x, stream_axis=axis), y)
    program = b.build(ahead, b.call("aten::gt.Tensor", y, x, stream_axis=axis))
    verdict = verify(StreamParallelType(), program)
    assert verdict.status == "passed", [finding.title for finding in verdict.findings]
    assert verdict.changed


# ----------------------------------------------------------------------------------------------------------- refusals

REFUSED: dict[str, tuple[Body, str]] = {
    "linear with a vector": (
        on("aten::linear", "x", "v", axis=0),
        r"its weight is not a matrix, or its bias not a vector",
    ),
    "linear with a bias for every element": (
        lambda b, i: (lambda m: b.call("aten::linear", m, m, b.call("aten::mm", m, b.call("aten::t", m)), stream_axis=1))(
            b.call("aten::relu", i["x"])
        ),
        r"its weight is not a matrix, or its bias not a vector",
    ),
    "linear with one number as its bias": (
        lambda b, i: b.call("aten::linear", i["x"], b.call("aten::t", i["y"]), b.call("aten::sum", i["v"]), stream_axis=1),
        r"its weight is not a matrix, or its bias not a vector",
    ),
    "sharded in the result": (
        lambda b, i: b.set(i["x"], f"{MESH} shard(1)", stream_axis=1),
        r"'set_1' .* its stream axis 1 is sharded over ranks in layout '\[1, 0, 2\] shard\(1\)'",
    ),
    "sharded in the operand": (
        lambda b, i: b.set(i["p"], f"{MESH} replicated", stream_axis=0),
        r"its stream axis 0 is sharded over ranks in layout '\[1, 0, 2\] shard\(0\)'",
    ),
    "sharded in the operand, counted from the result": (
        lambda b, i: b.reduce(b.set(i["b"], f"{MESH} shard(2)"), 0, f"{MESH} replicated", stream_axis=1),
        r"its stream axis 1 is sharded",
    ),
    "sharded in a local op": (on("aten::relu", "p", axis=0), r"its stream axis 0 is sharded"),
    "split": (
        lambda b, i: b.call("aten::view", i["x"], [2, 2, 6], stream_axis=0),
        r"stream axis 0 is split or merged from dims of 'x' by aten::view",
    ),
    "merged": (
        lambda b, i: b.call("aten::reshape", i["b"], [8, 6], stream_axis=0),
        r"stream axis 0 is split or merged from dims of 'b' by aten::reshape",
    ),
    "view": (
        lambda b, i: b.call("aten::view", i["b"], [2, 24], stream_axis=0),
        r"aten::view gives a view, and computes nothing",
    ),
    "transposed": (lambda b, i: b.call("aten::t", i["x"], stream_axis=0), r"aten::t gives a view"),
    "softmax": (
        lambda b, i: b.call("aten::softmax.int", i["x"], -1, stream_axis=1),
        r"aten::softmax.int mixes the positions along its stream axis 1",
    ),
    "cumsum": (
        lambda b, i: b.call("aten::cumsum", i["x"], 0, stream_axis=0),
        r"aten::cumsum mixes the positions along its stream axis 0",
    ),
    "sum that keeps the axis": (
        lambda b, i: b.call("aten::sum.dim_IntList", i["x"], [0], True, stream_axis=0),
        r"aten::sum.dim_IntList mixes the positions along its stream axis 0",
    ),
    "unknown": (
        lambda b, i: b.call("aten::flip", i["x"], [0], stream_axis=1),
        r"nothing is known of how aten::flip treats the positions",
    ),
    "in place": (
        lambda b, i: b.call("aten::relu_", b.call("aten::neg", i["x"]), stream_axis=0),
        r"aten::relu_ writes into an operand",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_refused_in_words_and_left_as_it_was(name: str) -> None:
    body, words = REFUSED[name]
    gm = build(body).graph_module(0)
    before = str(gm.graph)
    with pytest.raises(Unsupported, match=words) as refused:
        StreamParallelType()(gm)
    assert refused.value.hint
    assert str(gm.graph) == before


def test_several_results_are_refused() -> None:
    gm = build(lambda b, i: b.call("aten::relu", i["x"])).graph_module(0)
    node = next(node for node in gm.graph.nodes if node.op == "call_function")
    node.target = resolve("aten::max.dim")
    node.args = (node.args[0], 0)
    node.meta.update(stream_axis=0, val=(node.meta["val"], node.meta["val"]))
    with pytest.raises(Unsupported, match=r"'relu' .* aten::max.dim has several results"):
        StreamParallelType()(gm)


@pytest.mark.parametrize(("axis", "words"), [("1", "'1'"), (True, "'True'"), (1.0, "'1.0'")])
def test_an_axis_that_is_no_number_is_refused(axis: object, words: str) -> None:
    gm = build(lambda b, i: b.call("aten::relu", i["x"])).graph_module(0)
    next(node for node in gm.graph.nodes if node.op == "call_function").meta["stream_axis"] = axis
    with pytest.raises(Unsupported, match=words):
        StreamParallelType()(gm)


@pytest.mark.parametrize("axis", [2, -1])
@pytest.mark.parametrize("name", ["add", "reduce"])
def test_an_axis_that_the_result_does_not_have_is_refused(name: str, axis: int) -> None:
    gm = build(BODIES[name]).graph_module(0)
    next(node for node in gm.graph.nodes if node.op == "call_function").meta["stream_axis"] = axis
    with pytest.raises(Unsupported, match=f"its result has 2 dims, and the axis is {axis}"):
        StreamParallelType()(gm)


def test_an_input_has_no_stream_axis() -> None:
    gm = build(lambda b, i: b.call("aten::relu", i["x"])).graph_module(0)
    next(iter(gm.graph.nodes)).meta["stream_axis"] = 0
    with pytest.raises(Unsupported, match="is not an op: it is placeholder"):
        StreamParallelType()(gm)


@pytest.mark.parametrize("number", [0, -1, "two", 1.5])
def test_the_number_of_streams_is_at_least_one(number: object) -> None:
    with pytest.raises(UsageError, match="number_of_streams"):
        StreamParallelType(number_of_streams=number)  # type: ignore[arg-type]


def test_the_number_of_streams_comes_as_text_and_is_promised() -> None:
    pass_ = StreamParallelType(number_of_streams="3")
    assert (pass_.contract.streams, pass_.contract.inputs) == (3, "stream0")


@pytest.mark.parametrize("which", ["p", "set_1"])
def test_a_resharding_of_unknown_shape_is_refused(which: str) -> None:
    gm = build(BODIES["set from shards"]).graph_module(0)
    del next(node for node in gm.graph.nodes if node.name == which).meta["val"]
    before = str(gm.graph)
    with pytest.raises(Unsupported, match=f"the shape of '{which}' is not known"):
        StreamParallelType()(gm)
    assert str(gm.graph) == before
