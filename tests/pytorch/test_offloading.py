"""Offloading of activations frees what others still own; where it does not, nothing is found."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from tcverify.ops import lookup, schema_of
from tcverify.program import VARYING, GraphBuilder, InputSpec, Mesh, Program, spmd_program
from tcverify.pytorch import SUBJECTS
from tcverify.strategies import DECODERS
from tcverify.verification.verifier import verify

if not SUBJECTS["activation_offloading"].here:
    pytest.skip("this torch offloads no activations", allow_module_level=True)

from tcverify.pytorch.offloading import ActivationOffload, waits_free
from tcverify.pytorch.partitioning import DefaultPartition
from tests.sizes import by_night

TP2 = Mesh.grid({"tp": 2})
INPUTS = [InputSpec(name, (2, 2), placements=(("tp", VARYING),)) for name in ("x", "w", "g")]
Build = Callable[..., Any]


def program(build: Build, **options: Any) -> Program:
    made = spmd_program(TP2, INPUTS, lambda b: build(b, *(b.input(one.name) for one in INPUTS)))
    return replace(made, options={"partitioner": "default", **options})


def saved(b: GraphBuilder, x: fx.Node, w: fx.Node, g: fx.Node) -> Any:
    """A product that the backward alone reads again."""
    hidden = b.call("aten::mm", x, w)
    return [b.call("aten::relu", hidden), b.call("aten::mm", g, hidden)]


def saved_and_viewed(b: GraphBuilder, x: fx.Node, w: fx.Node, g: fx.Node) -> Any:
    hidden = b.call("aten::mm", x, w)
    return [b.call("aten::view", hidden, [4]), b.call("aten::mm", hidden, g)]


def detached(b: GraphBuilder, x: fx.Node, w: fx.Node, g: fx.Node) -> Any:
    made = b.call("aten::exp", b.call("aten::mm", x, w))
    return [made, b.call("aten::mul.Tensor", g, b.call("aten::detach", made))]


def input_saved(b: GraphBuilder, x: fx.Node, w: fx.Node, g: fx.Node) -> Any:
    return [b.call("aten::mm", x, w), b.call("aten::mm", b.call("aten::neg", x), g)]


def kinds(made: Program) -> set[str]:
    return {finding.kind for finding in verify(ActivationOffload(), made).findings}


@pytest.mark.parametrize("partitioner", ["default", "min_cut"])
@pytest.mark.parametrize("separate_stream", [False, True])
@pytest.mark.parametrize("moved", [False, True])
def test_an_activation_is_copied_there_and_back(partitioner: str, separate_stream: bool, moved: bool) -> None:
    options = {"partitioner": partitioner, "separate_stream": separate_stream, "sink_wait": moved, "prefetch": moved}
    made = program(saved, **options)
    gm = ActivationOffload()(made.graph_module(0))
    assert gm is not None
    copies = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
    freed = [node for node in gm.graph.nodes if "resize_storage_bytes" in str(node.target)]
    assert (len(copies), len(freed)) == (2, 2 if separate_stream and waits_free() else 0)
    assert kinds(made) == set()


def gathered(b: GraphBuilder, x: fx.Node, w: fx.Node, g: fx.Node) -> Any:
    """What is gathered in the forward is read again in the backward, as under sequence parallelism."""
    part = b.call("aten::mm", x, w)
    start = b.call("_c10d_functional::all_gather_into_tensor", part, 2, "tp")
    aside = b.call("aten::neg", x)
    return [b.call("_c10d_functional::wait_tensor", start), aside, b.call("aten::mm", part, g)]


@pytest.mark.parametrize(("build", "options", "kind"), [
    (saved_and_viewed, {}, "freed-output"),
    (detached, {"cut": 0.75}, "freed-output"),
    (input_saved, {"inputs": True}, "freed-input"),
    (gathered, {"cut": 0.75}, "async-race"),
])  # fmt: skip
def test_what_others_own_is_freed(build: Build, options: dict[str, Any], kind: str) -> None:
    assert not waits_free() or kind in kinds(program(build, **options))
    assert kinds(program(build, **options, separate_stream=False)) == set()


def owns_its_memory(node: fx.Node, outputs: Any, returned: Any, kept: Any) -> bool:
    """`can_offload`, mended."""
    if node not in outputs or node in returned or node.op != "call_function" or _is_view(node):
        return False
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor) or not value.is_contiguous():
        return False
    return not any(_is_view(user) or _is_start(user) for user in node.users)


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    schema = schema_of(node.target) if node.op == "call_function" else None
    return schema is not None and any(one.alias_info for one in schema.returns)


def _is_start(node: fx.Node) -> bool:
    return node.op == "call_function" and lookup(node.target).phase == "start"


def test_where_only_what_is_owned_is_offloaded_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._functorch._activation_offloading import activation_offloading

    monkeypatch.setattr(activation_offloading, "can_offload", owns_its_memory)
    decoder = DECODERS["traced"]
    fired = 0
    for seed in range(by_night(60, 24)):
        drawn = decoder.decode(TP2, bytes((seed * 37 + k * 101) % 251 for k in range(decoder.width)))
        made = replace(drawn, options={"partitioner": "default", "cut": (0.5, 0.25, 0.75)[seed % 3]})
        verdict = verify(ActivationOffload(), made)
        if verdict.status == "inconclusive" or verify(DefaultPartition(), made).status != "passed":
            continue  # what the partitioner does wrong is not about offloading
        assert not verdict.findings
        gm = ActivationOffload()(made.graph_module(0))
        fired += gm is not None and any("gpu_reload" in node.name for node in gm.graph.nodes)
    assert fired > by_night(5, 2)
