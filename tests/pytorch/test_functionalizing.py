"""Functional collectives lose later writes into their tensors; where the tensor itself is used on, nothing is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from tcverify.program import VARYING, GraphBuilder, InputSpec, Mesh, Program, spmd_program
from tcverify.pytorch import SUBJECTS
from tcverify.strategies import DECODERS
from tcverify.verification.verifier import verify

if not SUBJECTS["functionalize_collectives"].here:
    pytest.skip("this torch makes no collectives functional", allow_module_level=True)

from tcverify.pytorch.functionalizing import FunctionalizeCollectives

TP2 = Mesh.grid({"tp": 2})
INPUTS = [InputSpec("x", (2, 2), placements=(("tp", VARYING),))]


def program(build: Any) -> Program:
    return spmd_program(TP2, INPUTS, lambda b: build(b, b.input("x")))


def kinds(made: Program) -> set[str]:
    return {finding.kind for finding in verify(FunctionalizeCollectives(), made).findings}


def reduced(b: GraphBuilder, x: fx.Node) -> fx.Node:
    return b.call("_c10d_functional::wait_tensor", b.call("_c10d_functional::all_reduce_", x, "avg", "tp"))


def divided(b: GraphBuilder, x: fx.Node) -> Any:
    return b.call("aten::neg", b.call("aten::div_.Tensor", reduced(b, x), 2))


def divided_by_its_name(b: GraphBuilder, x: fx.Node) -> Any:
    """What writes names the tensor, not the result of the collective."""
    reduced(b, x)
    return b.call("aten::neg", b.call("aten::div_.Tensor", x, 2))


def read_by_a_view(b: GraphBuilder, x: fx.Node) -> Any:
    made = b.call("aten::neg", x)
    row = b.call("aten::select.int", made, 0, 1)
    b.call("aten::div_.Tensor", reduced(b, made), 2)
    return b.call("aten::neg", row)


def read(b: GraphBuilder, x: fx.Node) -> Any:
    before = b.call("aten::neg", x)
    return [before, b.call("aten::neg", reduced(b, x)), b.call("aten::abs", x)]


def gathered_into(b: GraphBuilder, x: fx.Node) -> Any:
    """The second wait names the first collective, and is for the one that came into its memory since."""
    out = b.call("aten::cat", [x, x])
    first = b.call("_c10d_functional::all_reduce_", out, "sum", "tp")
    b.call("_c10d_functional::wait_tensor", first)
    b.call("_c10d_functional::all_gather_into_tensor_out", x, 2, "tp", out=out)
    return b.call("_c10d_functional::wait_tensor", first)


@pytest.mark.parametrize("build", [divided, divided_by_its_name, read_by_a_view])
def test_later_writes_do_not_reach_the_tensor(build: Any) -> None:
    assert kinds(program(build)) == {"wrong-value"}


def test_readers_alone_see_the_value() -> None:
    made = program(read)
    gm = FunctionalizeCollectives()(made.graph_module(0))
    assert gm is not None
    assert [node.target._opname for node in gm.graph.nodes if node.op == "call_function"] == [
        "neg", "all_reduce", "wait_tensor", "copy_", "neg", "abs",
    ]  # fmt: skip
    assert kinds(made) == set()


def test_where_the_tensor_is_used_on_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import _functionalize_collectives as module

    emit = module._emit_collective_chain

    def emit_and_use_the_tensor(*args: Any) -> fx.Node:
        copy = emit(*args).next
        assert copy.target is torch.ops.aten.copy_.default
        return copy

    monkeypatch.setattr(module, "_emit_collective_chain", emit_and_use_the_tensor)
    for build in (divided, divided_by_its_name, read_by_a_view, read, gathered_into):
        assert kinds(program(build)) == set()
    fired = 0
    for seed in range(120):
        decoder = DECODERS["wild" if seed % 2 else "functional"]
        made = decoder.decode(TP2, bytes((seed * 37 + k * 101) % 251 for k in range(decoder.width)))
        verdict = verify(FunctionalizeCollectives(), made)
        assert not verdict.findings, verdict.findings
        fired += verdict.status == "passed" and verdict.changed
    assert fired > 5
