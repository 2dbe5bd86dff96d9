"""Programs as large as captured models: repeated layers, in all dialects, of which one may hold what the others do not.

What is asked of a layer that is `marked` shows in it alone, so that a defect that needs it fires at one place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from tcverify.program import (
    REPLICATED,
    VARYING,
    GraphBuilder,
    InputSpec,
    Mesh,
    Placement,
    Program,
    RankBinding,
    Recipe,
    StreamSettings,
    shard,
    spmd_program,
)
from tests.support.hand_written import Keeping

C = "_c10d_functional::"
WAIT = f"{C}wait_tensor"

#: Default numbers of tokens and hidden size.
TOKENS, HIDDEN = 8, 8

#: What a marked layer does besides.
Mark = Callable[[GraphBuilder, fx.Node], fx.Node]


def plus_constant(b: GraphBuilder, value: fx.Node) -> fx.Node:
    """A number is added to a sum over ranks: what a pass may wrongly add once per rank."""
    return b.call("aten::add.Tensor", value, 0.25)


def copy_then_write(b: GraphBuilder, value: fx.Node) -> fx.Node:
    """A copy keeps what a write then changes: what a pass may wrongly do without."""
    made = b.call("aten::relu", value)
    copy = b.call("aten::clone", made)
    written = b.call("aten::add_.Tensor", made, 1.0)
    return b.call("aten::mul.Tensor", b.call("aten::neg", copy), written)


def mesh_of(ranks: int) -> Mesh:
    """One dim, "tp"."""
    return Mesh.grid({"tp": ranks})


def _parameter(
    name: str, shape: tuple[int, ...], placement: Placement = REPLICATED, kind: str = "uniform"
) -> InputSpec:
    return InputSpec(
        name, shape, placements=(("tp", placement),) if placement != REPLICATED else (), recipe=Recipe(kind)
    )


def _weights(layers: int, hidden: int) -> list[InputSpec]:
    """The parameters of `layers` layers, as a capture lifts them: column- and row-parallel projections and norm weights."""
    found = []
    for i in range(layers):
        found += [
            _parameter(f"norm{i}", (hidden,), kind="norm_weight"),
            _parameter(f"into{i}", (hidden, 2 * hidden), shard(1)),
            _parameter(f"out{i}", (2 * hidden, hidden), shard(0)),
        ]
    return found


def transformer(
    layers: int,
    ranks: int = 2,
    marked: int | None = None,
    mark: Mark = plus_constant,
    tokens: int = TOKENS,
    hidden: int = HIDDEN,
) -> Program:
    """tensor_cast, tensor parallel: two norms, two projections, an all_reduce and a residual per layer, and an embedding first.

    Eight compute nodes a layer.
    """
    given = Recipe("given", values=tuple(float(i * 5 % 16) for i in range(tokens)))
    specs = [
        InputSpec("table", (16, hidden)),
        InputSpec("indices", (tokens,), dtype=torch.int64, recipe=given),
        *_weights(layers, hidden),
    ]

    def build(b: GraphBuilder) -> Any:
        named = {spec.name: b.input(spec.name) for spec in specs}
        residual = b.call("aten::embedding", named["table"], named["indices"])
        for i in range(layers):
            x = b.call("tensor_cast::rms_norm", residual, named[f"norm{i}"], 1e-6)
            x = b.call("aten::mm", x, named[f"into{i}"])
            gate = b.call("aten::sigmoid", x)
            x = b.call("aten::mul.Tensor", x, gate)
            x = b.call("aten::mm", x, named[f"out{i}"])
            x = b.call("tensor_cast::all_reduce", x, b.rank, b.group("tp"))
            if i == marked:
                x = mark(b, x)
            residual = b.call("aten::add.Tensor", x, residual)
        return b.call("tensor_cast::rms_norm", residual, named["norm0"], 1e-6)

    return spmd_program(mesh_of(ranks), specs, build)


def tensor_parallel(
    layers: int, ranks: int = 2, marked: int | None = None, mark: Mark = plus_constant, hidden: int = HIDDEN
) -> Program:
    """`_c10d_functional`, norms decomposed as tracing leaves them: fifteen compute nodes a layer, the waits among them."""
    specs = [InputSpec("x", (TOKENS, hidden)), *_weights(layers, hidden)]

    def build(b: GraphBuilder) -> Any:
        named = {spec.name: b.input(spec.name) for spec in specs}
        residual = named["x"]
        for i in range(layers):
            square = b.call("aten::pow.Tensor_Scalar", residual, 2)
            mean = b.call("aten::mean.dim", square, [-1], True)
            scale = b.call("aten::rsqrt", b.call("aten::add.Tensor", mean, 1e-6))
            x = b.call("aten::mul.Tensor", b.call("aten::mul.Tensor", residual, scale), named[f"norm{i}"])
            x = b.call("aten::mm", x, named[f"into{i}"])
            x = b.call("aten::mul.Tensor", x, b.call("aten::sigmoid", x))
            x = b.call("aten::mm", x, named[f"out{i}"])
            x = b.call("aten::view", b.call("aten::view", x, [TOKENS * hidden]), [TOKENS, hidden])
            x = b.call(WAIT, b.call(f"{C}all_reduce", x, "sum", "tp"))
            if i == marked:
                x = mark(b, x)
            residual = b.call("aten::add.Tensor", x, residual)
        return residual

    return spmd_program(mesh_of(ranks), specs, build)


def data_parallel(layers: int, ranks: int = 2, marked: int | None = None, hidden: int = HIDDEN) -> Program:
    """Forward and backward of a deep network: gradients are summed asynchronously, and all waits stand at the end.

    Ten compute nodes a layer, and as many outputs as layers. A marked layer exchanges its gradient in place of summing it, and
    writes into it behind the wait.
    """
    specs = [
        InputSpec("x", (TOKENS, hidden), placements=(("tp", VARYING),)),
        *(_parameter(f"weight{i}", (hidden, hidden)) for i in range(layers)),
    ]
    parts = [hidden // ranks] * ranks

    def build(b: GraphBuilder) -> Any:
        named = {spec.name: b.input(spec.name) for spec in specs}
        value, kept = named["x"], []
        for i in range(layers):
            made = b.call("aten::mm", value, named[f"weight{i}"])
            kept.append((value, made))
            value = b.call("aten::tanh", made)
        gradient, started = value, []
        for i in reversed(range(layers)):
            before, made = kept[i]
            gradient = b.call("aten::mul.Tensor", gradient, b.call("aten::sigmoid", made))
            own = b.call("aten::mm", b.call("aten::t", before), gradient)
            op, *more = ("all_to_all_single", parts, parts) if i == marked else ("all_reduce", "avg")
            begun = b.call(f"{C}{op}", own, *more, "tp")
            started.append((i, own, begun))
            gradient = b.call("aten::mm", gradient, b.call("aten::t", named[f"weight{i}"]))
        results = []
        for i, own, begun in started:
            done = b.call(WAIT, begun)
            if i == marked:
                b.call("aten::add_.Tensor", own, 1.0)
                done = b.call("aten::add.Tensor", done, own)
            results.append(done)
        return tuple(results)

    return spmd_program(mesh_of(ranks), specs, build)


def pipeline(batches: int, layers: int, ranks: int = 4, marked: int | None = None, hidden: int = HIDDEN) -> Program:
    """Two stages whose ranks run different graphs: the first sends each micro-batch on to the second.

    Within a stage of several ranks all layers end in an all_reduce over "tp". A marked micro-batch has a constant added behind
    one of them, in the second stage.
    """
    width = ranks // 2
    mesh = Mesh.grid({"pp": 2, "tp": width})
    shapes = (hidden, hidden)
    parameters = [_parameter(f"weight{i}", shapes, VARYING) for i in range(layers)]
    first = [InputSpec("x", (TOKENS, hidden)), *parameters]
    second = [InputSpec(f"buffer{i}", (TOKENS, hidden)) for i in range(batches)] + parameters
    specs = {spec.name: spec for spec in (*first, *second)}

    def stage(number: int) -> tuple[GraphBuilder, fx.Graph]:
        b = Keeping(mesh, specs, number * width)
        named = {spec.name: b.input(spec.name) for spec in (first, second)[number]}
        peer = b.constant("peer", lambda rank: (rank + width) % ranks)
        results = []
        for batch in range(batches):
            if number == 0:
                value = b.call("aten::mul.Tensor", named["x"], 0.5 + batch)
            else:
                value = b.call("p2p::recv", named[f"buffer{batch}"], peer)
            for i in range(layers):
                value = b.call("aten::tanh", b.call("aten::mm", value, named[f"weight{i}"]))
                value = b.call("tensor_cast::all_reduce", value, b.rank, b.group("tp"))
                if number == 1 and batch == marked and i == layers // 2:
                    value = plus_constant(b, value)
            if number == 0:
                b.call("p2p::send", value, peer)
            results.append(value)
        return b, b.finish(tuple(results))

    builders, graphs = zip(*(stage(number) for number in range(2)), strict=True)
    bindings = tuple(RankBinding(rank // width, builders[rank // width].bindings(rank)) for rank in range(ranks))
    return Program(mesh, graphs, bindings, tuple(specs.values()))


def branches(layers: int, ranks: int = 2, marked: int | None = None, hidden: int = HIDDEN) -> Program:
    """tensor_cast, with costs, for passes that lay ops on streams: every layer has two arms, one of which is summed over ranks.

    Eight compute nodes a layer. A marked layer sums the other arm, and writes into it.
    """
    specs = [InputSpec("x", (TOKENS, hidden)), _parameter("weight", (hidden, hidden), VARYING)]

    def build(b: GraphBuilder) -> Any:
        value, weight = b.input("x"), b.input("weight")

        def timed(cost_us: int, op: str, *args: Any) -> fx.Node:
            node = b.call(op, *args)
            node.meta["cost_s"] = cost_us * 1e-6
            return node

        for i in range(layers):
            left = timed(20, "aten::mm", value, weight)
            left = timed(30, "tensor_cast::all_reduce", left, b.rank, b.group("tp"))
            right = timed(25, "aten::relu", timed(20, "aten::mm", value, weight))
            if i == marked:
                left = timed(30, "tensor_cast::all_reduce", right, b.rank, b.group("tp"))
                right = timed(5, "aten::mul_.Tensor", right, 0.5)
            both = timed(5, "aten::add.Tensor", left, right)
            value = timed(5, "aten::mul.Tensor", timed(5, "aten::tanh", both), timed(5, "aten::sigmoid", both))
        return value

    return replace(spmd_program(mesh_of(ranks), specs, build), streams=StreamSettings())


def uneven_readers(layers: int, ranks: int = 2, marked: int | None = None, hidden: int = HIDDEN) -> Program:
    """`_c10d_functional`, a graph of its own on every rank: of a marked layer's sum, the last rank reads nothing.

    Five compute nodes a layer, six on even ranks, whose nodes have other names therefore.
    """
    specs = [InputSpec("x", (TOKENS, hidden)), _parameter("weight", (hidden, hidden), VARYING)]
    mesh = mesh_of(ranks)

    def graph_of(rank: int) -> tuple[GraphBuilder, fx.Graph]:
        b = Keeping(mesh, {spec.name: spec for spec in specs}, rank)
        value, weight = b.input("x"), b.input("weight")
        for i in range(layers):
            made = b.call("aten::tanh", b.call("aten::mm", value, weight))
            done = b.call(WAIT, b.call(f"{C}all_reduce", made, "sum", "tp"))
            if rank % 2 == 0:
                made = b.call("aten::neg", made)
            value = b.call("aten::add.Tensor", made, made if i == marked and rank == ranks - 1 else done)
        return b, b.finish(value)

    builders, graphs = zip(*map(graph_of, range(ranks)), strict=True)
    return Program(mesh, graphs, tuple(RankBinding(i, b.bindings(i)) for i, b in enumerate(builders)), tuple(specs))


def far_apart(layers: int, ranks: int = 2, hidden: int = HIDDEN) -> Program:
    """A deep network at whose two ends one call is made, with a write in the middle into what it reads.

    Four compute nodes a layer.
    """
    specs = [InputSpec("x", (TOKENS, hidden)), _parameter("weight", (hidden, hidden), VARYING)]

    def build(b: GraphBuilder) -> Any:
        x, weight = b.input("x"), b.input("weight")
        written = b.call("aten::relu", x)
        first = value = b.call("aten::sigmoid", written)
        for i in range(layers):
            if i == layers // 2:
                b.call("aten::add_.Tensor", written, 1.0)
            value = b.call("aten::tanh", b.call("aten::mm", value, weight))
            value = b.call("tensor_cast::all_reduce", value, b.rank, b.group("tp"))
            value = b.call("aten::mul.Tensor", value, 0.5)
        last = b.call("aten::sigmoid", written)
        return b.call("aten::add.Tensor", b.call("aten::add.Tensor", value, last), first)

    return spmd_program(mesh_of(ranks), specs, build)


def prepared_weights(layers: int, ranks: int = 2, hidden: int = HIDDEN) -> Program:
    """Each layer prepares its weight just before it multiplies by it: four compute nodes a layer."""
    specs = [InputSpec("x", (TOKENS, hidden)), *(_parameter(f"weight{i}", (hidden, hidden)) for i in range(layers))]

    def build(b: GraphBuilder) -> Any:
        named = {spec.name: b.input(spec.name) for spec in specs}
        value = named["x"]
        for i in range(layers):
            prepared = b.call("aten::mul.Tensor", named[f"weight{i}"], 0.5)
            value = b.call("aten::tanh", b.call("aten::mm", value, prepared))
            value = b.call("tensor_cast::all_reduce", value, b.rank, b.group("tp"))
        return value

    return spmd_program(mesh_of(ranks), specs, build)
