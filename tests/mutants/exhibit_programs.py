"""Programs of exhibits that strategies draw too rarely."""

from __future__ import annotations

import torch
from torch import fx

from tcverify.ops import RESIZE
from tcverify.program import PARTIAL, GraphBuilder, InputSpec, Mesh, Program, Recipe, spmd_program

TP2 = Mesh.grid({"tp": 2})
PARTIAL_X = InputSpec("x", (4, 6), placements=(("tp", PARTIAL),))
ROW = InputSpec("row", (4, 6))
GAIN = InputSpec("gain", (6,), recipe=Recipe("norm_weight"))


def _reduced(b: GraphBuilder, value: fx.Node) -> fx.Node:
    return b.call("tensor_cast::all_reduce", value, b.rank, b.group("tp"))


def constant_behind_sum() -> Program:
    """all_reduce → + 0.5"""
    return spmd_program(TP2, [PARTIAL_X], lambda b: b.call("aten::add.Tensor", _reduced(b, b.input("x")), 0.5), seed=1)


def collective_read_on_one_rank() -> Program:
    """Both ranks sum; rank 0 alone returns a value that was made of the sum, rank 1 one that was not."""

    def build(b: GraphBuilder) -> object:
        x, row = b.input("x"), b.input("row")
        return b.call("aten::add.Tensor", row, _reduced(b, x)), b.call("aten::neg", row)

    program = spmd_program(TP2, [PARTIAL_X, ROW], build, seed=1)
    graphs = []
    for rank, kept in ((0, 0), (1, 1)):
        graph = program.graph(rank)
        (output,) = [node for node in graph.nodes if node.op == "output"]
        (values,) = output.args
        output.args = (values[kept],)  # type: ignore[index]
        for value in values:  # type: ignore[union-attr]
            if not value.users:  # type: ignore[union-attr]
                graph.erase_node(value)  # type: ignore[arg-type]
        graphs.append(graph)
    return program.with_graphs(graphs)


def read_around_a_write() -> Program:
    """relu(y), a write into y, relu(y) again; both are summed."""

    def build(b: GraphBuilder) -> object:
        made = b.call("aten::neg", b.input("row"))
        before = b.call("aten::relu", made)
        b.call("aten::add_.Tensor", made, 1.0)
        return b.call("aten::sub.Tensor", before, b.call("aten::relu", made))

    return spmd_program(TP2, [ROW], build, seed=1)


def copied_before_a_write() -> Program:
    """A copy of y, a write into y, and the difference."""

    def build(b: GraphBuilder) -> object:
        made = b.call("aten::neg", b.input("row"))
        copied = b.call("aten::clone", made)
        b.call("aten::add_.Tensor", made, 1.0)
        return b.call("aten::sub.Tensor", copied, made)

    return spmd_program(TP2, [ROW], build, seed=1)


def equal_results() -> Program:
    """Two results of equal value, each in a tensor of its own."""

    def build(b: GraphBuilder) -> object:
        row = b.input("row")
        return b.call("aten::neg", row), b.call("aten::neg", row)

    return spmd_program(TP2, [ROW], build, seed=1)


def sums_of_two_dtypes() -> Program:
    """A sum in bfloat16 and one in float32."""
    half = InputSpec("half", (4, 6), torch.bfloat16, placements=(("tp", PARTIAL),))

    def build(b: GraphBuilder) -> object:
        values = b.input("half"), b.input("x")
        return tuple(_reduced(b, value) for value in values)

    return spmd_program(TP2, [half, PARTIAL_X], build, seed=1)


def mean_of_six() -> Program:
    """x − mean(x) over six elements."""

    def build(b: GraphBuilder) -> object:
        row = b.input("row")
        return b.call("aten::sub.Tensor", row, b.call("aten::mean.dim", row, [-1], True))

    return spmd_program(TP2, [ROW], build, seed=1)


def sum_with_alpha() -> Program:
    """row + 2 · row' → rms_norm"""

    def build(b: GraphBuilder) -> object:
        row, gain, other = b.input("row"), b.input("gain"), b.input("other")
        total = b.call("aten::add.Tensor", row, other, alpha=2.0)
        return b.call("tensor_cast::rms_norm", total, gain, 1e-6)

    return spmd_program(TP2, [ROW, GAIN, InputSpec("other", (4, 6))], build, seed=1)


def freed_behind_a_wait() -> Program:
    """An all_gather of y that is waited for, then y is freed."""

    def build(b: GraphBuilder) -> object:
        made = b.call("aten::neg", b.input("x"))
        gathered = b.call("_c10d_functional::all_gather_into_tensor", made, 2, "tp")
        waited = b.call("_c10d_functional::wait_tensor", gathered)
        b.call(RESIZE, made, 0)
        return waited

    return spmd_program(TP2, [PARTIAL_X], build, seed=1)


def parameter_copied_twice() -> Program:
    """Two values are copied into a parameter, one after the other; what is read in between is returned."""

    def build(b: GraphBuilder) -> object:
        parameter, sources, found = b.input("parameter"), [b.input("row"), b.input("other")], []
        b.call(RESIZE, parameter, 0)
        for source in sources:
            b.call(RESIZE, parameter, 4 * 6 * 4)
            b.call("fsdp::copy_", parameter, b.call("aten::neg", source))
            found.append(b.call("aten::sin", parameter))
            b.call(RESIZE, parameter, 0)
        return tuple(found)

    return spmd_program(TP2, [InputSpec("parameter", (4, 6)), ROW, InputSpec("other", (4, 6))], build, seed=1)
