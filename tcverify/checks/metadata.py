"""Metadata: `meta["val"]` of every rewritten node says what the node really produces."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx
from torch.fx.node import map_aggregate

from tcverify.checks.evidence import Evidence
from tcverify.errors import UnsupportedOp
from tcverify.ops import ShapeError, TensorSpec, infer
from tcverify.program import Program, RankConstant
from tcverify.program.finding import Doubt, Finding
from tcverify.program.graph import constant_value, map_structure

_HINT = "if a later step propagates metadata anew, say so with --contract metadata=false"


def check_metadata(evidence: Evidence) -> list[Finding | Doubt]:
    """Infer every node's spec from the recorded specs of its operands and compare it with what is recorded.

    Judging each node by its own operands names the node that went wrong and not everything after it. Strides that no
    access can tell apart do not count, and nodes that were inconsistent before the pass are skipped.
    """
    rewritten = evidence.pair.rewritten
    if rewritten is None or not evidence.contract.metadata or evidence.pair.foreign is not None:
        return []
    wrong = _inconsistent(rewritten)
    if not wrong:
        return []
    before = {node for _, node, _ in _inconsistent(evidence.pair.original)}
    unannotated = _unannotated(evidence.pair.original)
    for rank, node, problem in wrong:
        if node not in before and not (unannotated and problem == _MISSING):
            title = f"meta['val'] of '{node}' {problem}"
            return [Finding("stale-metadata", "metadata", title, _HINT, node, rank)]
    return []


_MISSING = "is missing"


def _unannotated(program: Program) -> bool:
    """Whether the program came without metadata, so that none can be asked of the pass."""
    return any("val" not in node.meta for graph in program.graphs for node in graph.nodes if node.op != "output")


def _inconsistent(program: Program) -> list[tuple[int, str, str]]:
    """Return (rank, node, problem) for nodes whose record does not follow from their operands'."""
    found = []
    for number, graph in enumerate(program.graphs):
        ranks = [rank for rank, binding in enumerate(program.ranks) if binding.graph == number]
        constants = [program.ranks[rank].constants for rank in ranks]
        storage = _Storage()
        for node in graph.nodes:
            if node.op in ("placeholder", "output"):
                storage.own(node)
                continue
            # Ranks that share a graph share its metadata; only nodes with rank constants can differ.
            several = ranks if _has_constants(node) else ranks[:1]
            for rank, bound in zip(several, constants, strict=False):
                problem = _judge(node, bound) or storage.shared_by_mistake(node, bound)
                if problem is not None:
                    found.append((rank, node.name, problem))
                    break
            storage.own(node)
    return found


def _has_constants(node: fx.Node) -> bool:
    found = False

    def look(value: Any) -> Any:
        nonlocal found
        found = found or isinstance(value, RankConstant)
        return value

    map_aggregate((node.args, node.kwargs), look)
    return found


def _infer(node: fx.Node, constants: Mapping[str, Any], fresh: Callable[[], int]) -> Any:
    def known(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return value.meta["val"]
        return constant_value(value, constants) if isinstance(value, RankConstant) else value

    return infer(node.target, map_aggregate(node.args, known), dict(map_aggregate(node.kwargs, known)), fresh)


def _judge(node: fx.Node, constants: Mapping[str, Any]) -> str | None:
    if "val" not in node.meta:
        return _MISSING
    if any("val" not in operand.meta for operand in node.all_input_nodes):
        return None
    try:
        expected = _infer(node, constants, itertools.count(1 << 30).__next__)
    except UnsupportedOp:
        return None
    except ShapeError as error:
        return f"cannot be right: its operands' metadata does not fit together ({error})"
    recorded = node.meta["val"]
    if map_structure(_layout, recorded) != map_structure(_layout, expected):
        return f"says {_text(recorded)}, but the node produces {_text(expected)}"
    return None


def _layout(spec: Any) -> Any:
    return spec.layout if isinstance(spec, TensorSpec) else spec


def _text(val: Any) -> str:
    def one(spec: Any) -> str:
        if not isinstance(spec, TensorSpec):
            return repr(spec)
        contiguous = TensorSpec.contiguous(spec.shape, spec.dtype).layout == spec.layout
        return str(spec) if contiguous else f"{spec} of stride {list(spec.stride)}"

    if isinstance(val, (tuple, list)):
        return "(" + ", ".join(one(s) for s in val) + ")"
    return one(val)


class _Storage:
    """Which node first recorded each fake storage."""

    def __init__(self) -> None:
        self._owners: dict[int, str] = {}

    def own(self, node: fx.Node) -> None:
        for alias in _aliases(node.meta.get("val")):
            self._owners.setdefault(alias, node.name)

    def shared_by_mistake(self, node: fx.Node, constants: Mapping[str, Any]) -> str | None:
        """Say whose storage the record of `node` shares, when the op makes a storage of its own."""
        shared = [alias for alias in _aliases(node.meta.get("val")) if alias in self._owners]
        if not shared or any("val" not in operand.meta for operand in node.all_input_nodes):
            return None
        try:
            legal = set(_aliases(_infer(node, constants, itertools.count(1 << 30).__next__)))
        except (UnsupportedOp, ShapeError):
            return None
        for alias in shared:
            if alias not in legal:
                return f"shares its storage with that of '{self._owners[alias]}', which the node does not alias"
        return None


def _aliases(val: Any) -> list[int]:
    found: list[int] = []

    def look(spec: Any) -> None:
        if isinstance(spec, TensorSpec) and spec.alias is not None:
            found.append(spec.alias)

    map_structure(look, val)
    return found
