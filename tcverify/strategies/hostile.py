"""Programs that no well-behaved compiler passes on: their metadata is missing or wrong."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from hypothesis import strategies as st
from torch import fx

from tcverify.ops import TensorSpec
from tcverify.program import Program
from tcverify.registry.choices import HostileName


def with_hostile(programs: st.SearchStrategy[Program], hostile: Collection[HostileName]) -> st.SearchStrategy[Program]:
    """Draw programs that do what is in `hostile`, see `HOSTILE`."""
    return with_hostile_metadata(programs) if "metadata" in hostile else programs


def with_hostile_metadata(programs: st.SearchStrategy[Program]) -> st.SearchStrategy[Program]:
    """Draw programs in most of which `meta["val"]` of some node, or of all nodes, is missing or wrong."""
    return st.tuples(programs, st.integers(0, 5), st.integers(0, 255)).map(lambda drawn: spoil(*drawn))


def spoil(program: Program, how: int, where: int) -> Program:
    """Corrupt the metadata of a program that is not shared.

    Args:
        how: 0 leaves the program unchanged; 1 and 2 drop the metadata of one node and of all nodes; 3 to 5 give a node the
            wrong dtype, or a larger or smaller size along dim 0.
        where: picks the node.
    """
    names = [node.name for node in program.graphs[0].nodes if _has_tensor(node)]
    if not how or not names:
        return program
    chosen = set(names) if how == 2 else {names[where % len(names)]}
    for graph in program.graphs:
        for node in graph.nodes:
            if node.name not in chosen or not _has_tensor(node):
                continue
            if how <= 2:
                del node.meta["val"]
            else:
                node.meta["val"] = _wrong(node.meta["val"], how - 3)
    return replace(program, labels=(*program.labels, "missing-metadata" if how <= 2 else "stale-metadata"))


def _has_tensor(node: fx.Node) -> bool:
    return node.op == "call_function" and isinstance(node.meta.get("val"), TensorSpec)


def _wrong(spec: TensorSpec, how: int) -> TensorSpec:
    if how == 0 or not spec.shape:
        return replace(spec, dtype=torch.bfloat16 if spec.dtype is torch.float32 else torch.float32)
    size = 2 * spec.shape[0] + 1 if how == 1 else spec.shape[0] // 2
    return replace(TensorSpec.contiguous((size, *spec.shape[1:]), spec.dtype), alias=spec.alias)


__all__ = ["spoil", "with_hostile", "with_hostile_metadata"]
