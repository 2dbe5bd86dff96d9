"""Collectives on symmetric memory: what each writes and returns, by what its parts compute."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory  # defines the ops
from torch import fx

from tcverify import verify
from tcverify.cost import load_device_profile, node_cost
from tcverify.execution import Lockstep, ProcessGroupPool
from tcverify.ops import ShapeError
from tcverify.program import VARYING, InputSpec, Mesh, MeshDim, Program, dumps, loads, spmd_program
from tcverify.program.builder import GraphBuilder

#: Position 0 is rank 2.
TP = Mesh(3, (MeshDim("tp", ((2, 0, 1),)),))
ORDER = (2, 0, 1)
X = InputSpec("x", (6, 3), placements=(("tp", VARYING),))
Y = InputSpec("y", (6, 3), placements=(("tp", VARYING),))
W = InputSpec("w", (3, 5))
V = InputSpec("v", (3, 2))


def program(build: Callable[[GraphBuilder], Any]) -> Program:
    made = spmd_program(TP, [X, Y, W, V], build)
    assert dumps(loads(dumps(made))) == dumps(made)
    return made


def needs(op: str, version: str) -> pytest.MarkDecorator:
    """Leave a test out where torch has no such op yet."""
    return pytest.mark.skipif(not hasattr(torch.ops.symm_mem, op), reason=f"torch {version} has {op} first")


def call(b: GraphBuilder, op: str, *args: Any, **kwargs: Any) -> fx.Node:
    return b.call(f"symm_mem::{op}", *args, **kwargs)


def outputs(made: Program) -> list[list[torch.Tensor]]:
    run = Lockstep().run(made)
    assert run.finished, run.why
    return [result.outputs for result in run.ranks]


def operands(made: Program, name: str = "x") -> list[torch.Tensor]:
    """An input by position in the group."""
    place = [n.name for n in made.graphs[0].find_nodes(op="placeholder")].index(name)
    return [made.values(rank)[place].double() for rank in ORDER]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def empty(b: GraphBuilder, *shape: int) -> fx.Node:
    return b.call("aten::empty.memory_format", list(shape), dtype=torch.float32)


@pytest.mark.parametrize(
    "name",
    [
        "one_shot_all_reduce",
        "multimem_one_shot_all_reduce",
        "one_shot_all_reduce_out",
        "multimem_one_shot_all_reduce_out",
    ],
)
def test_all_reduces_sum_into_a_new_tensor_or_the_one_that_is_given(name: str) -> None:
    def build(b: GraphBuilder) -> Any:
        x = b.input("x")
        if not name.endswith("_out"):
            return call(b, name, x, "sum", "tp")
        out = empty(b, 6, 3)
        return call(b, name, x, "sum", "tp", out), out

    made = program(build)
    for found in outputs(made):
        for value in found:
            close(value, torch.stack(operands(made)).sum(0))


@pytest.mark.parametrize("name", ["two_shot_all_reduce_", "multimem_all_reduce_"])
def test_all_reduces_in_place_write_into_their_operand(name: str) -> None:
    made = program(lambda b: call(b, name, b.call("aten::clone", b.input("x")), "sum", "tp"))
    for (found,) in outputs(made):
        close(found, torch.stack(operands(made)).sum(0))


def test_what_a_kernel_leaves_of_its_operand_is_of_no_use() -> None:
    def build(b: GraphBuilder) -> Any:
        x = b.call("aten::clone", b.input("x"))
        return call(b, "two_shot_all_reduce_out", x, "sum", "tp", empty(b, 6, 3)), x

    made = program(build)
    for total, left in outputs(made):
        close(total, torch.stack(operands(made)).sum(0))
        assert bool(left.isnan().all())


def test_a_copy_goes_through_the_buffer() -> None:
    def build(b: GraphBuilder) -> Any:
        x = b.input("x")
        buffer = b.call("aten::new_zeros", x, [24])
        total = call(b, "one_shot_all_reduce_copy", buffer, x, "sum", "tp")
        again = call(b, "one_shot_all_reduce_copy_out", buffer, total, "sum", "tp", empty(b, 6, 3))
        return total, again, buffer

    made = program(build)
    expected = torch.stack(operands(made)).sum(0)
    for total, again, buffer in outputs(made):
        close(total, expected)
        close(again, 3 * expected)
        close(buffer, torch.cat([expected.reshape(-1), torch.zeros(6, dtype=torch.float64)]))


def test_gathers_and_scatters_go_by_position() -> None:
    def build(b: GraphBuilder) -> Any:
        x = b.input("x")
        whole = call(b, "multimem_all_gather_out", x, "tp", empty(b, 18, 3))
        rows = call(b, "reduce_scatter_out", b.call("aten::clone", x), "tp", False, empty(b, 2, 3))
        columns = call(b, "reduce_scatter_out", b.call("aten::clone", x), "tp", True, empty(b, 6, 1))
        low = call(b, "_low_contention_all_gather", x, "tp")
        share = call(b, "_low_contention_reduce_scatter", x, "avg", "tp")
        low, share = (b.call("_c10d_functional::wait_tensor", value) for value in (low, share))
        return whole, rows, columns, low, share

    made = program(build)
    xs = operands(made)
    total = torch.stack(xs).sum(0)
    for rank, (whole, rows, columns, low, share) in enumerate(outputs(made)):
        at = ORDER.index(rank)
        assert torch.equal(whole, torch.cat(xs))
        assert torch.equal(low, torch.cat(xs))
        close(rows, total[2 * at : 2 * at + 2])
        close(columns, total[:, at : at + 1])
        close(share, total[2 * at : 2 * at + 2] / 3)


@needs("multimem_one_shot_reduce_out", "2.11")
def test_a_reduction_to_a_root_leaves_others_as_they_were() -> None:
    def build(b: GraphBuilder) -> Any:
        x = b.input("x")
        return call(b, "multimem_one_shot_reduce_out", x, "sum", 1, "tp", b.call("aten::zeros_like", x))

    made = program(build)
    found = outputs(made)
    close(found[0][0], torch.stack(operands(made)).sum(0))  # position 1 is rank 0
    assert not found[1][0].any()
    assert not found[2][0].any()


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gathered_products_are_those_of_their_parts(dim: int) -> None:
    def fused(b: GraphBuilder) -> Any:
        x, w, v = (b.input(name) for name in "xwv")
        if dim:  # what is gathered along the last dim meets as many rows
            w, v = (b.call("aten::cat", [y, y, y]) for y in (w, v))
        both = call(b, "fused_all_gather_matmul", x, [w, v], dim, "tp")
        products = b.getitem(both, 1)
        return b.getitem(both, 0), b.getitem(products, 0), b.getitem(products, 1)

    made = program(fused)
    gathered = torch.cat(operands(made), dim)
    w, v = (operands(made, name)[0] for name in "wv")
    w, v = (torch.cat([y, y, y]) if dim else y for y in (w, v))
    for whole, first, second in outputs(made):
        assert torch.equal(whole, gathered)
        close(first, gathered @ w)
        close(second, gathered @ v)


def test_what_is_not_asked_for_is_not_returned() -> None:
    made = program(lambda b: call(b, "fused_all_gather_matmul", b.input("x"), [b.input("w")], 0, "tp", return_A=False))
    run = Lockstep().run(made)
    assert run.ranks[0].outputs[0] is None


@pytest.mark.parametrize(("dim", "op"), [(0, "sum"), (0, "avg")])
def test_scattered_products_are_those_of_their_parts(dim: int, op: str) -> None:
    made = program(lambda b: call(b, "fused_matmul_reduce_scatter", b.input("x"), b.input("w"), op, dim, "tp"))
    w = operands(made, "w")[0]
    total = torch.stack([x @ w for x in operands(made)]).sum(0) / (3 if op == "avg" else 1)
    for rank, (found,) in enumerate(outputs(made)):
        close(found, total[2 * ORDER.index(rank) :][:2])


def parts(b: GraphBuilder) -> Any:
    x, w = b.input("x"), b.input("w")
    gathered = b.call("_c10d_functional::wait_tensor", b.call("_c10d_functional::all_gather_into_tensor", x, 3, "tp"))
    product = b.call("aten::mm", gathered, w)
    scattered = b.call("_c10d_functional::reduce_scatter_tensor", product, "sum", 3, "tp")
    return b.call("_c10d_functional::wait_tensor", scattered)


def _fused(module: fx.GraphModule, dim: int = 0) -> fx.GraphModule:
    """What the compiler's pass for overlapping products with communication makes of `parts`."""
    graph = module.graph
    x, w = graph.find_nodes(op="placeholder")
    mm = graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)[0]
    with graph.inserting_before(mm):
        both = graph.call_function(torch.ops.symm_mem.fused_all_gather_matmul.default, (x, [w], dim, "tp"))
        products = graph.call_function(operator.getitem, (both, 1))
        product = graph.call_function(operator.getitem, (products, 0))
    for node, value in (
        (both, (mm.args[0].meta["val"], [mm.meta["val"]])),
        (products, [mm.meta["val"]]),
        (product, mm.meta["val"]),
    ):
        node.meta["val"] = value
    mm.replace_all_uses_with(product)
    graph.erase_node(mm)
    for node in list(reversed(graph.nodes)):
        if node.name in ("wait_tensor", "all_gather_into_tensor"):
            graph.erase_node(node)
    module.recompile()
    return module


def test_the_fused_form_of_a_program_is_verified_and_a_wrong_one_refuted() -> None:
    made = program(parts)
    import torch.distributed._symmetric_memory

    with ProcessGroupPool(3, timeout=60) as pool:
        sound = verify(_fused, made, confirm=pool, domain="exact")
    assert (sound.status, sound.changed, sound.executors) == ("passed", True, ["lockstep", "gloo"]), sound.findings

    def other_group(module: fx.GraphModule) -> fx.GraphModule:
        module = _fused(module)
        node = next(n for n in module.graph.nodes if "fused" in n.name)
        factor = node.args[1][0]
        with module.graph.inserting_before(node):
            doubled = module.graph.call_function(torch.ops.aten.neg.default, (factor,))
        doubled.meta["val"] = factor.meta["val"].clone()
        node.args = (node.args[0], [doubled], *node.args[2:])
        module.recompile()
        return module

    assert verify(other_group, made).status == "refuted"


@needs("_low_contention_all_gather_ce_multicast", "2.15")
def test_a_gather_by_multicast_goes_by_position_and_blocks() -> None:
    def build(b: GraphBuilder) -> Any:
        x = b.input("x")
        whole = call(b, "_low_contention_all_gather_ce_multicast", x, "tp")
        given = call(b, "_low_contention_all_gather_ce_multicast_out", x, "tp", empty(b, 18, 3))
        return b.call("aten::mul.Tensor", whole, 1.0), given

    made = program(build)
    for whole, given in outputs(made):
        assert torch.equal(whole, torch.cat(operands(made)))
        assert torch.equal(given, whole)
    with pytest.raises(ShapeError, match="writes shape"):
        program(lambda b: call(b, "_low_contention_all_gather_ce_multicast_out", b.input("x"), "tp", empty(b, 6, 3)))


@pytest.mark.parametrize(
    ("op", "args", "sentence"),
    [
        ("fused_all_gather_matmul", ("x", ["w"], 3, "tp"), "gathers along dim 3"),
        ("fused_matmul_reduce_scatter", ("x", "w", "sum", 1, "tp"), "cannot be divided by 3 ranks"),
        ("_low_contention_reduce_scatter", ("w", "sum", "tp"), "_low_contention_reduce_scatter"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(op: str, args: tuple[Any, ...], sentence: str) -> None:
    def build(b: GraphBuilder) -> Any:
        nodes = {name: b.input(name) for name in "xyw"}
        nodes["w"] = b.call("aten::new_zeros", nodes["w"], [4, 2]) if op.startswith("_low") else nodes["w"]
        return call(b, op, *[[nodes[v] for v in a] if isinstance(a, list) else nodes.get(a, a) for a in args])

    with pytest.raises(ShapeError, match=sentence):
        program(build)


def test_fused_ops_cost_their_product_and_their_communication() -> None:
    profile = load_device_profile("h100-sxm")
    mesh = Mesh.grid({"tp": 4})

    def cost(rows: int, inner: int) -> float:
        inputs = [InputSpec("x", (rows, inner)), InputSpec("w", (inner, 4096))]
        made = spmd_program(
            mesh, inputs, lambda b: call(b, "fused_matmul_reduce_scatter", b.input("x"), b.input("w"), "sum", 0, "tp")
        )
        node = next(n for n in made.graphs[0].nodes if n.op == "call_function")
        found = node_cost(node, profile, groups={"tp": (0, 1, 2, 3)})
        assert found is not None
        return found

    assert cost(4096, 65536) > 7 * cost(4096, 8192)  # bound by the product
    assert cost(8192, 64) > 1.5 * cost(4096, 64)  # bound by what is scattered
