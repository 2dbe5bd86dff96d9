"""Fused quantisations of TensorCast are the ops that they fuse, however these quantise."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx

from tcverify import verify
from tcverify.ops.dialects.tensor_cast.fused import PARTS
from tcverify.program import VARYING, Contract, GraphBuilder, InputSpec, Mesh, Program, spmd_program

CONTRACT = Contract(metadata=False)
OPS = torch.ops.tensor_cast
SIGNATURES = (
    "quantize(Tensor x, Tensor scale, Tensor? offset, ScalarType out_dtype=1) -> Tensor",
    "dynamic_quantize_mxfp4(Tensor x, SymInt group_size) -> (Tensor, Tensor)",
    "rms_norm_quant(Tensor x, Tensor weight, Tensor quant_scale, Tensor quant_offset, float eps, ScalarType out_dtype=1)"
    " -> Tensor",
    "add_rms_norm_dynamic_quant2_mxfp4(Tensor x, Tensor residual, Tensor weight, float eps, SymInt group_size)"
    " -> (Tensor, Tensor, Tensor)",
)


def blocks(x: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty((*x.shape[:-1], x.shape[-1] // size))


FAKES = {
    "quantize": lambda x, scale, offset, out_dtype=torch.int8: x.new_empty(x.shape, dtype=torch.int8),
    "dynamic_quantize_mxfp4": blocks,
    "rms_norm_quant": lambda x, *rest: x.new_empty(x.shape, dtype=torch.int8),
    "add_rms_norm_dynamic_quant2_mxfp4": lambda x, residual, weight, eps, size: (*blocks(x, size), torch.empty_like(x)),
}


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[None]:
    with torch.library._scoped_library("tensor_cast", "FRAGMENT") as own:
        for signature in SIGNATURES:
            own.define(signature)
        for name, fake in FAKES.items():
            torch.library.register_fake(f"tensor_cast::{name}", fake, lib=own)
        yield


def program() -> Program:
    def build(b: GraphBuilder) -> Any:
        x, residual, weight, scale, offset = (b.input(name) for name in ("x", "residual", "weight", "scale", "offset"))
        normed = b.call("tensor_cast::rms_norm", x, weight, 1e-6)
        quantised = b.call("tensor_cast::quantize", normed, scale, offset)
        both = b.call("tensor_cast::add_rms_norm2", x, residual, weight, 1e-6)
        first, total = (b.call("python::getitem", both, place) for place in (0, 1))
        blocked = b.call("tensor_cast::dynamic_quantize_mxfp4", first, 4)
        values, scales = (b.call("python::getitem", blocked, place) for place in (0, 1))
        return quantised, values, scales, total

    shapes = {"x": (4, 8), "residual": (4, 8), "weight": (8,), "scale": (8,), "offset": (8,)}
    inputs = [InputSpec(name, shape, torch.float32, (("tp", VARYING),)) for name, shape in shapes.items()]
    return spmd_program(Mesh.grid({"tp": 2}), inputs, build)


class Fuses:
    """What a fusion pass of that library does; `eps` and `swapped` are its mistakes."""

    def __init__(self, eps: float = 1e-6, swapped: bool = False) -> None:
        self.eps, self.swapped = eps, swapped

    def __call__(self, module: fx.GraphModule) -> None:
        graph = module.graph
        x, residual, weight, scale, offset = (n for n in graph.nodes if n.op == "placeholder")
        quantised, values, scales, total = graph.output_node().args[0]
        given = (offset, scale) if self.swapped else (scale, offset)
        with graph.inserting_before(graph.output_node()):
            one = graph.call_function(OPS.rms_norm_quant.default, (x, weight, *given, self.eps))
            both = graph.call_function(
                OPS.add_rms_norm_dynamic_quant2_mxfp4.default, (x, residual, weight, self.eps, 4)
            )
            parts = [graph.call_function(operator.getitem, (both, place)) for place in range(3)]
        for old, new in zip((quantised, values, scales, total), (one, *parts), strict=True):
            old.replace_all_uses_with(new)
        graph.eliminate_dead_code()


@pytest.mark.parametrize("domain", ["float64", "exact", "native"])
def test_fusing_is_right(domain: str) -> None:
    verdict = verify(Fuses(), program(), domain=domain, contract=CONTRACT)
    assert (verdict.status, verdict.changed) == ("passed", True), (verdict.findings, verdict.doubts)


def test_all_fused_ops_name_the_parts_that_they_have() -> None:
    assert len(PARTS) == 13
    assert {name.partition("quant")[0].rstrip("_") for name in PARTS} == {
        "rms_norm", "add_rms_norm", "rms_norm_dynamic", "add_rms_norm_dynamic", "m3_swiglu",
    }  # fmt: skip
    assert "rms_norm_quant_per_token" not in PARTS


@pytest.mark.parametrize("mistake", [{"eps": 1e-2}, {"swapped": True}], ids=str)
def test_fusing_with_other_operands_is_refuted(mistake: dict[str, Any]) -> None:
    verdict = verify(Fuses(**mistake), program(), contract=CONTRACT)
    assert {finding.kind for finding in verdict.findings} == {"wrong-value"}, verdict.doubts
