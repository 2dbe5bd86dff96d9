"""Metadata: `meta["val"]` of every rewritten node describes what the node really produces; outputs keep their dtypes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from tcverify.checks.evidence import Evidence
from tcverify.errors import UnsupportedOp
from tcverify.ops import ShapeError, TensorSpec, schema_of
from tcverify.ops.leaves import leaves
from tcverify.program import Program, RankConstant
from tcverify.program.finding import Doubt, Finding, Severity
from tcverify.program.specs import InferredSpecs, same_layout

_HINT = "if a later step propagates metadata again, declare that with --contract metadata=false"
_OWN = "give the node a tensor of its own, such as torch.empty_like(…) of what it has"


def check_metadata(evidence: Evidence) -> list[Finding | Doubt]:
    """Infer every node's spec from the recorded specs of its operands and compare it with what is recorded.

    Judging each node by its own operands reports the faulty node and not everything after it. Strides that no access
    can distinguish do not count, and nodes that were inconsistent before the pass are skipped.
    """
    rewritten = evidence.pair.rewritten
    promised = evidence.contract.metadata
    if rewritten is None or evidence.pair.foreign is not None:
        return []
    if rewritten is evidence.pair.original:
        return []  # the pass left it unchanged, including its metadata
    retyped = _retyped_output(evidence.pair.original, rewritten)
    if promised is False:
        return [] if retyped is None else [retyped]
    severity: Severity = "error" if promised else "hygiene"
    wrong = _inconsistent(rewritten)
    changed = retyped or _changed_inputs(evidence.pair.original, rewritten, severity)
    if not wrong and changed is None:
        return []
    before = {node for _, node, _ in _inconsistent(evidence.pair.original)}
    unannotated = _unannotated(evidence.pair.original)
    for rank, node, problem in wrong:
        if node not in before and not (unannotated and problem == _MISSING):
            title = f"meta['val'] of '{node}' {problem}"
            hint = f"{_OWN}\n{_HINT}" if problem.startswith(_SHARES) else _HINT
            stale = Finding("stale-metadata", "metadata", title, hint, node, rank, severity=severity)
            return [stale] if changed is None or changed.severity == "hygiene" else [stale, changed]
    return [] if changed is None else [changed]


_MISSING = "is missing"
_SHARES = "shares its storage"


def _graphs(original: Program, rewritten: Program) -> Iterator[tuple[int, fx.Graph, fx.Graph]]:
    """A rank, its original graph and its rewritten one: each pair once."""
    seen = set()
    for rank, (before, after) in enumerate(zip(original.ranks, rewritten.ranks, strict=True)):
        if (before.graph, after.graph) not in seen:
            seen.add((before.graph, after.graph))
            yield rank, original.graphs[before.graph], rewritten.graphs[after.graph]


def _changed_inputs(original: Program, rewritten: Program, severity: Severity) -> Finding | None:
    """The metadata of inputs, from which all else follows, must not change."""
    for rank, first, second in _graphs(original, rewritten):
        inputs = {
            node.name: node.meta["val"] for node in first.nodes if node.op == "placeholder" and "val" in node.meta
        }
        for node in second.nodes:
            if node.op != "placeholder" or node.name not in inputs:
                continue
            recorded, expected = node.meta.get("val"), inputs[node.name]
            if recorded is None or not same_layout(recorded, expected):
                problem = (
                    _MISSING if recorded is None else f"says {_text(recorded)}, but the input is {_text(expected)}"
                )
                title = f"meta['val'] of '{node.name}' {problem}"
                return Finding("stale-metadata", "metadata", title, _HINT, node.name, rank, severity=severity)
    return None


def _retyped_output(original: Program, rewritten: Program) -> Finding | None:
    """No output may have another dtype, whatever metadata says. Values do not show it: in the float64 domain all floating dtypes
    are one."""
    for rank, first, _ in _graphs(original, rewritten):
        inputs = {node.name: node.meta.get("val") for node in first.nodes if node.op == "placeholder"}
        before, after = (_outputs(program, rank, inputs) for program in (original, rewritten))
        for i, (mine, theirs) in enumerate(zip(before, after, strict=False)):
            if mine is not None and theirs is not None and mine[1] != theirs[1]:
                title = f"output {i} is {theirs[1]} after the pass, not {mine[1]}".replace("torch.", "")
                return Finding("changed-signature", "metadata", title, "", theirs[0], rank)
    return None


def _outputs(program: Program, rank: int, inputs: Mapping[str, Any]) -> list[tuple[str, torch.dtype] | None]:
    """Name and dtype of every output that is a tensor, in order; None for the others, and where it does not follow from inputs.

    Args:
        inputs: specs of the original's inputs, by name.
    """
    specs, binding = InferredSpecs(program.mesh.groups(rank)), program.ranks[rank]
    graph = program.graphs[binding.graph]
    for node in graph.nodes:
        if node.op == "placeholder":
            specs.keep_apart(node, inputs.get(node.name))
        elif node.op == "call_function" and all(specs.of.get(one) is not None for one in node.all_input_nodes):
            with contextlib.suppress(UnsupportedOp, ShapeError):
                specs.keep(node, specs.infer(node, binding.constants))
    found: list[tuple[str, torch.dtype] | None] = []

    def look(value: Any) -> Any:
        spec = specs.of.get(value) if isinstance(value, fx.Node) else None
        found.append((value.name, spec.dtype) if isinstance(spec, TensorSpec) else None)
        return value

    map_aggregate(next(n for n in graph.nodes if n.op == "output").args, look)
    return found


def _unannotated(program: Program) -> bool:
    """Whether the program came without metadata, so that the pass need not provide any."""
    return any("val" not in node.meta for graph in program.graphs for node in graph.nodes if node.op != "output")


def _inconsistent(program: Program) -> list[tuple[int, str, str]]:
    """Return (rank, node, problem) for nodes whose metadata does not follow from their operands'."""
    found = []
    for number, graph in enumerate(program.graphs):
        ranks = [rank for rank, binding in enumerate(program.ranks) if binding.graph == number]
        records = _Records(program.mesh.groups(ranks[0]) if ranks else {})
        for node in graph.nodes:
            # Ranks that share a graph share its metadata; only nodes with rank constants can differ.
            for rank in ranks if leaves((node.args, node.kwargs), RankConstant) else ranks[:1]:
                problem = records.judge(node, program.ranks[rank].constants, again=rank != ranks[0])
                if problem is not None:
                    found.append((rank, node.name, problem))
                    break
    return found


class _Records:
    """What the nodes of a graph produce according to metadata, each with the storage that it really has.

    Storage is tracked from the placeholders on, independently of metadata: a record may keep the storage of an operand
    that the pass has replaced. That is harmless unless two values with separate storage share it.
    """

    def __init__(self, groups: Mapping[str, Sequence[int]]) -> None:
        self._values = InferredSpecs(groups)
        self._meaning: dict[
            int, tuple[int | None, str]
        ] = {}  # recorded storage -> the real one, and the node that recorded it

    def judge(self, node: fx.Node, constants: Mapping[str, Any], *, again: bool) -> str | None:
        """Return what is wrong with the metadata of a node, or None. Nodes come in graph order.

        Args:
            again: the node was judged before, with the constants of another rank.
        """
        if node.op == "output":
            return None
        recorded = node.meta.get("val")
        if node.op == "placeholder" or recorded is None or any(n not in self._values.of for n in node.all_input_nodes):
            if recorded is None:
                return None if node.op == "placeholder" or _produces_nothing(node) else _MISSING
            apart = self._values.keep_apart(node, recorded)
            return self._shared_by_mistake(node.name, recorded, apart) if node.op == "placeholder" else None
        try:
            expected = self._values.infer(node, constants)
        except (UnsupportedOp, ShapeError) as error:
            self._values.keep_apart(node, recorded)
            if isinstance(error, UnsupportedOp):
                return None
            return f"cannot be right: its operands' metadata does not fit together ({error})"
        if not again:
            self._values.keep(node, expected)
        if not same_layout(recorded, expected):
            return f"says {_text(recorded)}, but the node produces {_text(expected)}"
        return None if again else self._shared_by_mistake(node.name, recorded, expected)

    def _shared_by_mistake(self, name: str, recorded: Any, expected: Any) -> str | None:
        for said, real in zip(leaves(recorded, TensorSpec), leaves(expected, TensorSpec), strict=False):
            if said.alias is None:
                continue
            first, owner = self._meaning.setdefault(said.alias, (real.alias, name))
            if first != real.alias:
                return f"{_SHARES} with that of '{owner}', which the node does not alias"
        return None


def _produces_nothing(node: fx.Node) -> bool:
    """Whether a call has no result that metadata could describe."""
    schema = schema_of(node.target) if node.op == "call_function" else None
    return schema is not None and not schema.returns


def _text(val: Any) -> str:
    def one(spec: Any) -> str:
        if not isinstance(spec, TensorSpec):
            return repr(spec)
        contiguous = TensorSpec.contiguous(spec.shape, spec.dtype).layout == spec.layout
        return str(spec) if contiguous else f"{spec} of stride {list(spec.stride)}"

    if isinstance(val, (tuple, list)):
        return "(" + ", ".join(one(s) for s in val) + ")"
    return one(val)
