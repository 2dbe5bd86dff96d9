"""What was captured as JSON-able data, on its way from the process that captured it."""

from __future__ import annotations

from typing import Any

from tcverify.capturing.record import Captured, CapturedInput, GroupFacts, GroupSize
from tcverify.errors import ProgramError
from tcverify.program import NotSerialisable, Placement
from tcverify.program.codec import encode_graph, encode_recipe
from tcverify.program.decoding import Reader


def encode_captured(captured: Captured) -> dict[str, Any]:
    """Write what was captured.

    Raises:
        NotSerialisable: the graph holds what has no meaning here; the message names the node.
    """
    if captured.module is not None:
        owner = next(n for n in captured.graph.nodes if n.op == "get_attr")
        raise NotSerialisable(f"node '{owner.name}' is the submodule '{owner.target}' of a higher-order op")
    return {
        "graph": encode_graph(captured.graph),
        "inputs": [
            {
                "name": one.name,
                "role": one.role,
                "placements": None if one.placements is None else [[d, str(p)] for d, p in one.placements],
                "shape": None if one.shape is None else list(one.shape),
                "recipe": encode_recipe(one.recipe),
                "digest": one.digest,
            }
            for one in captured.inputs
        ],
        "groups": {name: [facts.label, list(facts.ranks)] for name, facts in captured.groups.items()},
        "sizes": {name: [one.size, one.position] for name, one in captured.sizes.items()},
        "rank": captured.rank,
        "notes": list(captured.notes),
    }


def decode_captured(data: Any, where: str) -> Captured:
    """Read what `encode_captured` wrote.

    Raises:
        ProgramError: an op of the graph has no meaning in this process.
    """
    reader = Reader(where)
    graph = reader.graph(data["graph"], 0)
    specs = {node.name: node.meta["val"] for node in graph.nodes if node.op == "placeholder"}
    inputs = tuple(
        CapturedInput(
            one["name"],
            specs[one["name"]],
            one["role"],
            None if one["placements"] is None else tuple((d, Placement.parse(p)) for d, p in one["placements"]),
            None if one["shape"] is None else tuple(one["shape"]),
            reader.recipe(one["recipe"], one["name"]),
            one["digest"],
        )
        for one in data["inputs"]
    )
    groups = {name: GroupFacts(label, tuple(ranks)) for name, (label, ranks) in data["groups"].items()}
    if len(specs) != len(inputs):
        raise ProgramError(f"{where}: its graph has {len(specs)} inputs, but {len(inputs)} are described")
    sizes = {name: GroupSize(size, position) for name, (size, position) in data["sizes"].items()}
    return Captured(graph, inputs, groups, sizes, data["rank"], None, tuple(data["notes"]))


__all__ = ["decode_captured", "encode_captured"]
