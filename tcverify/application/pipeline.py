"""Pipelines: several passes, one after the other, that are verified as one pass.

`tcverify.registry.pipelines` parses their names.
"""

from __future__ import annotations

import contextlib

from torch import fx

from tcverify.errors import UnsupportedOp
from tcverify.ops import ShapeError, TensorSpec
from tcverify.program.graph import describe, fake_values, with_metadata
from tcverify.program.specs import InferredSpecs


def refresh_metadata(graph: fx.Graph) -> None:
    """Set `meta["val"]` of every call to what follows from the inputs; nodes that cannot be inferred keep theirs.

    For stages that promise no metadata: the next stage gets the metadata that a propagation step in between would set.
    """
    records = describe(graph)
    specs = InferredSpecs(getattr(graph.owning_module, "meta", {}).get("groups") or {})
    for node, record in zip(graph.nodes, records, strict=True):
        found = record.get("val")
        if node.op == "placeholder" and isinstance(found, TensorSpec):
            found = found.stored(specs.fresh())
        if node.op == "call_function" and all(specs.of.get(n) is not None for n in node.all_input_nodes):
            with contextlib.suppress(ShapeError, UnsupportedOp):
                found = specs.infer(node)
        specs.keep(node, found)
        if found is not None:
            record["val"] = found
    for node, value in zip(graph.nodes, fake_values(with_metadata(graph, records)), strict=True):
        if node.op == "call_function" and value is not None:
            node.meta["val"] = value


__all__ = ["refresh_metadata"]
