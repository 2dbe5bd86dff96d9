"""`torch:compile`: what Inductor's code does, recorded, means what the graph meant; defects planted into Inductor show."""

from unittest import mock

import pytest

from tcverify import verify
from tcverify.application.apply import apply_pass
from tcverify.application.loading import load_pass
from tcverify.ops import qualified_name
from tcverify.program import InputSpec, Mesh, spmd_program
from tcverify.pytorch.compiling import Compile

_MESH = Mesh.grid({"tp": 2})


def _program():
    def build(b):
        x, w = b.input("x"), b.input("w")
        h = b.call("aten::relu", b.call("aten::mm", x, w))
        reduced = b.call("_c10d_functional::all_reduce", h, "sum", "tp")
        y = b.call("aten::sin", x)
        total = b.call("aten::add.Tensor", b.call("_c10d_functional::wait_tensor", reduced), h)
        gathered = b.call("_c10d_functional::all_gather_into_tensor", y, 2, "tp")
        turned = b.call("aten::mul.Tensor", b.call("aten::t", b.call("_c10d_functional::wait_tensor", gathered)), 2)
        mean = b.call("aten::mean.dim", turned, [-1], True)
        return total, b.call("aten::sub.Tensor", turned, mean), b.call("aten::reshape", turned, [2, 16])

    return spmd_program(_MESH, [InputSpec("x", (4, 4)), InputSpec("w", (4, 4))], build)


def _recorded(program):
    pair = apply_pass(load_pass("tcverify.pytorch.compiling:Compile", {}), program)
    assert pair.failure is None
    assert pair.rewritten is not None
    return [qualified_name(n.target) for n in pair.rewritten.graphs[0].nodes if n.op == "call_function"]


def test_the_recorded_graph_has_the_buffers_and_collectives_of_the_code():
    ops = _recorded(_program())
    assert "_c10d_functional::all_reduce_" in ops  # Inductor reduces in place
    assert "aten::empty_strided" in ops
    assert ops.count("_c10d_functional::wait_tensor") == 2


def test_sound_compilation_passes():
    assert verify(Compile(), _program()).status == "passed"


def test_ranks_that_are_not_compiled_keep_their_graph():
    program = _program()
    pair = apply_pass(load_pass("tcverify.pytorch.compiling:Compile", {"compiled_ranks": "first"}), program)
    assert pair.rewritten is not None
    calls = [
        [qualified_name(n.target) for n in pair.rewritten.graphs[binding.graph].nodes if n.op == "call_function"]
        for binding in pair.rewritten.ranks
    ]
    assert "_c10d_functional::all_reduce_" in calls[0]
    assert "_c10d_functional::all_reduce" in calls[1]
    assert verify(Compile(compiled_ranks="first"), program).status == "passed"


def test_code_that_does_not_wait_is_refuted():
    """Planted: Inductor lowers waits to nothing."""
    from torch._inductor import ir

    with mock.patch.object(ir._WaitKernel, "create_wait", return_value=None):
        verdict = verify(Compile(), _program())
    assert verdict.status == "refuted"
    assert {one.kind for one in verdict.findings} & {"missing-wait", "async-race", "wrong-value"}


def test_what_torch_compile_does_not_get_is_declined():
    def build(b):
        x = b.input("x")
        b.call("p2p::recv_", x, 0)
        return b.call("aten::relu", x)

    verdict = verify(Compile(), spmd_program(_MESH, [InputSpec("x", (4, 4))], build))
    assert verdict.status == "inconclusive"


@pytest.mark.parametrize("form", ["all_reduce_", "broadcast_"])
def test_collectives_that_write_into_operands_become_functional(form):
    def build(b):
        x = b.call("aten::clone", b.input("x"))
        argument = "sum" if form == "all_reduce_" else 0
        started = b.call(f"_c10d_functional::{form}", x, argument, "tp")
        return b.call("_c10d_functional::wait_tensor", started), x

    program = spmd_program(_MESH, [InputSpec("x", (4, 4))], build)
    assert verify(Compile(), program).status == "passed"


def test_collectives_whose_shapes_depend_on_the_group_are_recorded():
    def build(b):
        resharded = b.call("_dtensor::shard_dim_alltoall", b.call("aten::relu", b.input("x")), 0, 1, "tp")
        return b.call("aten::mul.Tensor", resharded, 2.0)

    program = spmd_program(_MESH, [InputSpec("x", (4, 4))], build)
    assert "_dtensor::shard_dim_alltoall" in _recorded(program)
    assert verify(Compile(), program).status == "passed"
