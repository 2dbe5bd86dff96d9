"""Pipelines: several passes, one after the other, that are verified as one pass.

`tcverify.registry.pipelines` reads their names.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.fx.node import map_aggregate

from tcverify.errors import UnsupportedOp
from tcverify.ops import ShapeError, TensorSpec, infer
from tcverify.program.graph import describe, fake_values, with_metadata


def refresh_metadata(graph: fx.Graph) -> None:
    """Set `meta["val"]` of every call to what follows from the inputs; what cannot be inferred keeps what it has.

    For stages that promise no metadata: the next stage is given what a propagation step between the two would leave.
    """
    numbers = iter(range(1 << 60))
    records = describe(graph)
    known: dict[fx.Node, Any] = {}
    groups = getattr(graph.owning_module, "meta", {}).get("groups") or {}

    def spec(value: Any) -> Any:
        return known.get(value) if isinstance(value, fx.Node) else value

    for node, record in zip(graph.nodes, records, strict=True):
        found = record.get("val")
        if node.op == "placeholder" and isinstance(found, TensorSpec):
            found = TensorSpec(found.shape, found.stride, found.dtype, found.offset, next(numbers))
        if node.op == "call_function" and all(known.get(n) is not None for n in node.all_input_nodes):
            try:
                args, kwargs = map_aggregate(node.args, spec), dict(map_aggregate(node.kwargs, spec))
                found = infer(node.target, args, kwargs, numbers.__next__, groups)
            except (ShapeError, UnsupportedOp):
                pass
        known[node] = found
        if found is not None:
            record["val"] = found
    for node, value in zip(graph.nodes, fake_values(with_metadata(graph, records)), strict=True):
        if node.op == "call_function" and value is not None:
            node.meta["val"] = value


__all__ = ["refresh_metadata"]
