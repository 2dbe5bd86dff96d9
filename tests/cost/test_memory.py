"""Liveness and peak memory: by hand, and against a recomputation that looks at every node anew."""

from __future__ import annotations

import operator
import random
from typing import Any

import pytest
import torch
from torch import fx

from tcverify.cost import lifetimes, memory_profile
from tcverify.ops import TensorSpec
from tcverify.program import GraphBuilder, InputSpec, Mesh, Program, spmd_program
from tests.sizes import by_night

ONE = Mesh.grid({"tp": 1})


def program(build: Any, *shapes: tuple[int, ...]) -> Program:
    inputs = [InputSpec(f"x{i}", shape) for i, shape in enumerate(shapes)]
    return spmd_program(ONE, inputs, lambda b: build(b, *[b.input(spec.name) for spec in inputs]))


def both(built: Program) -> list[fx.Graph]:
    """The graph with specs and with fake tensors in its metadata."""
    return [built.graphs[0], built.graph(0)]


def by_name(graph: fx.Graph) -> dict[str, int]:
    return {node.name: size for node, size in zip(graph.nodes, memory_profile(graph).current, strict=True)}


def test_a_value_lives_from_its_node_to_its_last_reader() -> None:
    def build(b: GraphBuilder, x: fx.Node) -> object:
        first = b.call("aten::mul.Tensor", x, 2.0)  # 400 bytes each
        second = b.call("aten::relu", first)
        third = b.call("aten::neg", second)
        return b.call("aten::add.Tensor", third, x)

    for graph in both(program(build, (100,))):
        profile = memory_profile(graph)
        assert by_name(graph) == {"x0": 400, "mul": 800, "relu": 1200, "neg": 1200, "add": 1200, "output": 800}
        assert profile.peak_bytes == 1200
        assert profile.peak_node.name == "relu"
        assert profile.unknown == ()


def test_inputs_and_outputs_stay() -> None:
    def build(b: GraphBuilder, x: fx.Node, unused: fx.Node) -> object:
        early = b.call("aten::neg", x)
        late = b.call("aten::relu", x)
        return early, late

    for graph in both(program(build, (100,), (25,))):
        assert by_name(graph) == {"x0": 500, "x1": 500, "neg": 900, "relu": 1300, "output": 1300}


def test_a_value_that_nobody_reads_lives_while_its_node_runs() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    dead = graph.call_function(torch.ops.aten.neg.default, (x,))
    live = graph.call_function(torch.ops.aten.relu.default, (x,))
    graph.output(live)
    for number, node in enumerate((x, dead, live)):
        node.meta["val"] = TensorSpec((100,), (1,), torch.float32, 0, number)
    assert by_name(graph) == {"x": 400, "neg_default": 800, "relu_default": 800, "output": 800}


def test_a_view_keeps_its_base_and_adds_nothing() -> None:
    def build(b: GraphBuilder, x: fx.Node) -> object:
        base = b.call("aten::mul.Tensor", x, 2.0)
        view = b.call("aten::slice.Tensor", base, 0, 0, 10)
        other = b.call("aten::neg", x)
        return b.call("aten::add.Tensor", view, b.call("aten::slice.Tensor", other, 0, 0, 10))

    for graph in both(program(build, (100,))):
        sizes = by_name(graph)
        assert sizes["slice_1"] == 800
        assert sizes["neg"] == 1200
        assert sizes["add"] == 3 * 400 + 40  # the whole base, though ten of its elements are read
        assert sizes["output"] == 440


def test_an_in_place_op_takes_no_storage_of_its_own() -> None:
    def build(b: GraphBuilder, x: fx.Node) -> object:
        copy = b.call("aten::clone", x)
        written = b.call("aten::add_.Tensor", copy, x)
        return b.call("aten::neg", written)

    for graph in both(program(build, (100,))):
        assert by_name(graph) == {"x0": 400, "clone": 800, "add_": 800, "neg": 1200, "output": 800}


def test_a_view_of_an_input_that_is_returned_is_the_input() -> None:
    def build(b: GraphBuilder, x: fx.Node) -> object:
        return b.call("aten::view", x, [10, 10])

    for graph in both(program(build, (100,))):
        assert set(by_name(graph).values()) == {400}


def test_results_of_a_tuple_live_apart_once_they_are_taken() -> None:
    def build(b: GraphBuilder, x: fx.Node, gain: fx.Node) -> object:
        pair = b.call("tensor_cast::add_rms_norm2", x, x, gain, 1e-6)
        first = b.getitem(pair, 0)
        product = b.call("aten::neg", first)
        return b.call("aten::relu", product)

    for graph in both(program(build, (10, 10), (10,))):
        assert by_name(graph) == {
            "x0": 440, "x1": 440, "add_rms_norm2": 1240, "getitem": 1240, "neg": 1240, "relu": 1240, "output": 840,
        }  # fmt: skip


def test_the_second_result_is_not_kept_by_the_first() -> None:
    def build(b: GraphBuilder, x: fx.Node, gain: fx.Node) -> object:
        pair = b.call("tensor_cast::add_rms_norm2", x, x, gain, 1e-6)
        return b.getitem(pair, 0)

    graph = program(build, (10, 10), (10,)).graphs[0]
    found, _ = lifetimes(graph)
    spans = [(storage.first, storage.last, storage.nbytes) for storage in found]
    assert sorted(spans) == [(0, 4, 40), (0, 4, 400), (2, 3, 400), (2, 4, 400)]


def test_unknown_sizes_are_named_and_count_nothing() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.ops.aten.neg.default, (x,))
    graph.output(y)
    x.meta["val"] = TensorSpec.contiguous((100,), torch.float32)
    profile = memory_profile(graph)
    assert profile.unknown == (y,)
    assert profile.peak_bytes == 400


def test_symbolic_sizes_are_unknown() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    given = torch.empty(100)
    torch._dynamo.mark_dynamic(given, 0)
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch._subclasses.FakeTensorMode(shape_env=ShapeEnv()).from_tensor(given)
    graph.output(x)
    assert memory_profile(graph).unknown == (x,)


# --------------------------------------------------------------------------------------------------- against an oracle


def random_program(seed: int) -> Program:
    """Chains, views, in-place writes, tuples and dead ends over tensors of several sizes."""
    rng = random.Random(seed)

    def build(b: GraphBuilder, *inputs: fx.Node) -> object:
        values = list(inputs)
        owned: list[fx.Node] = []
        for _ in range(rng.randrange(2, 25)):
            x = rng.choice(values)
            kind = rng.randrange(6)
            rows = b.shape(x)[0]
            if kind == 0:
                made = b.call("aten::neg", x)
            elif kind == 1:
                start = rng.randrange(rows)
                made = b.call("aten::slice.Tensor", x, 0, start, rng.randrange(start + 1, rows + 1))
            elif kind == 2:
                made = b.call("aten::cat", [x, rng.choice(values)])
            elif kind == 3:
                made = b.call("aten::t", b.call("aten::t", x))
            elif kind == 4 and owned:
                made = b.call("aten::mul_.Tensor", rng.choice(owned), 2.0)
            else:
                parts = b.call("aten::split.Tensor", x, max(rows // 2, 1))
                made = b.getitem(parts, rng.randrange(len(parts.meta["val"])))
            if kind in (0, 2):
                owned.append(made)
            values.append(made)
        return [rng.choice(values) for _ in range(rng.randrange(1, 4))]

    return program(build, (rng.randrange(1, 9), 4), (rng.randrange(1, 9), 4))


def recomputed(graph: fx.Graph) -> list[int]:
    """Bytes that live at each node, each found by asking every storage anew whether someone needs it then or later."""
    nodes = list(graph.nodes)

    def leaves(value: Any) -> list[TensorSpec]:
        if isinstance(value, TensorSpec):
            return [value]
        return [leaf for item in value for leaf in leaves(item)] if isinstance(value, (list, tuple)) else []

    held = {node: leaves(node.meta["val"]) for node in nodes if node.op != "output"}
    storages = {leaf.alias for values in held.values() for leaf in values}
    totals = []
    for now in range(len(nodes)):
        total = 0
        for storage in storages:
            holders = [n for n, values in held.items() if any(v.alias == storage for v in values)]
            made = min(nodes.index(n) for n in holders) <= now
            needed = nodes[now] in holders or any(nodes.index(user) >= now for n in holders for user in n.users)
            later = any(nodes.index(n) > now for n in holders)
            is_input = any(n.op == "placeholder" for n in holders)
            if is_input or (made and (needed or later)):
                extents = []
                for values in held.values():
                    for v in values:
                        if v.alias == storage and v.numel:
                            last = torch.empty(0).set_(torch.UntypedStorage(1 << 16), v.offset, v.shape, v.stride)[
                                tuple(size - 1 for size in v.shape)
                            ]
                            extents.append((last.storage_offset() + 1) * v.dtype.itemsize)
                total += max(extents, default=0)
        totals.append(total)
    return totals


@pytest.mark.parametrize("seed", range(60))
def test_liveness_equals_its_recomputation(seed: int) -> None:
    built = random_program(seed)
    expected = recomputed(built.graphs[0])
    for graph in both(built):
        profile = memory_profile(graph)
        assert list(profile.current) == expected
        assert profile.peak_bytes == max(expected)
        assert list(graph.nodes).index(profile.peak_node) == expected.index(max(expected))


def test_a_long_chain_is_linear_work() -> None:
    pairs = by_night(3_000, 1_000)
    graph = fx.Graph()
    x = graph.placeholder("x")
    for number in range(pairs):
        x.meta["val"] = (TensorSpec((64,), (1,), torch.float32, 0, number),)
        item = graph.call_function(operator.getitem, (x, 0))
        item.meta["val"] = x.meta["val"][0]
        x = graph.call_function(torch.ops.aten.neg.default, (item,))
    x.meta["val"] = TensorSpec((64,), (1,), torch.float32, 0, pairs)
    graph.output(x)
    assert memory_profile(graph).peak_bytes == 3 * 256
