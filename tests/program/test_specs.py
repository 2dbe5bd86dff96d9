"""Storages and writes: what signatures, inference, checks and passes say of them, against what torch does when it runs the ops.

Torch tells which results lie in the storage of an operand by the address of that storage, and what an op has written by versions
and contents.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import fx
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from tcverify.checks.memory.storage import memory_of
from tcverify.errors import UnsupportedOp
from tcverify.ops import RESIZE, TensorSpec, aliased_operands, lookup, mutated_operands
from tcverify.ops.leaves import leaves
from tcverify.passes.storages import accesses, mutated_nodes
from tcverify.program import Program
from tcverify.program.graph import copy_graph
from tcverify.program.specs import InferredSpecs, storages_of
from tcverify.pytorch.groups import fake_groups
from tcverify.registry.strategies import STRATEGIES
from tests.sizes import by_night

#: Namespaces whose ops torch itself runs; of others, the tables say what they return.
TORCH_RUNS = ("aten", "prims", "python", "_c10d_functional", "fsdp")

JUDGED: Counter[str] = Counter()


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@dataclass
class Execution:
    """A run of one rank's graph by torch.

    Attributes:
        values: by node, as far as the run has come.
        written: by node that torch has run, the storages of earlier values that it has changed.
    """

    graph: fx.Graph
    values: dict[fx.Node, Any] = field(default_factory=dict)
    written: dict[fx.Node, set[int]] = field(default_factory=dict)

    def run(self) -> None:
        specs = InferredSpecs()
        generator = torch.Generator().manual_seed(0)
        for node in self.graph.nodes:
            if node.op == "output":
                return
            if node.op == "placeholder":
                value = node.meta["val"]
                self.values[node] = torch.rand(value.shape, generator=generator).to(value.dtype)
                specs.keep(node, TensorSpec.of(self.values[node], specs.fresh()))
                continue
            try:
                specs.keep(node, specs.infer(node))
            except UnsupportedOp:
                return
            op = lookup(node.target)
            if op.name == RESIZE or op.name.split("::")[0] not in TORCH_RUNS:
                self.values[node] = self._as_inferred(node, specs)
            else:
                self._call(node)

    def _call(self, node: fx.Node) -> None:
        before = [(t, t._version, t.detach().clone()) for t in leaves(tuple(self.values.values()), torch.Tensor)]
        args, kwargs = (
            map_aggregate(a, lambda v: self.values[v] if isinstance(v, fx.Node) else v)
            for a in (node.args, node.kwargs)
        )
        self.values[node] = node.target(*args, **kwargs)
        self.written[node] = {
            address(t)
            for t, version, content in before
            if t._version != version or not torch.equal(_bits(t), _bits(content))
        }

    def _value(self, leaf: Any) -> Any:
        return self.values[leaf] if isinstance(leaf, fx.Node) else leaf

    def _as_inferred(self, node: fx.Node, specs: InferredSpecs) -> Any:
        known: dict[int | None, torch.UntypedStorage] = {}
        for operand in node.all_input_nodes:
            tensors = leaves(self.values[operand], torch.Tensor)
            for spec, tensor in zip(leaves(specs.of[operand], TensorSpec), tensors, strict=True):
                known[spec.alias] = tensor.untyped_storage()

        def made(leaf: Any) -> Any:
            if not isinstance(leaf, TensorSpec):
                return leaf
            if leaf.alias not in known:
                known[leaf.alias] = torch.zeros(leaf.extent, dtype=leaf.dtype).untyped_storage()
            empty = torch.empty(0, dtype=leaf.dtype)
            return empty.set_(known[leaf.alias], leaf.offset, leaf.shape, leaf.stride)

        return pytree.tree_map(made, specs.of[node])


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype == torch.bool:
        return tensor
    copy = tensor.flatten().clone(memory_format=torch.contiguous_format)  # of one element the stride may be any
    return copy.view(torch.uint8)


def executed(program: Program) -> Execution:
    graph = program.graph(0)
    found = Execution(graph)
    with torch.no_grad(), fake_groups(0, program.world_size, program.mesh.groups(0)):
        found.run()
    return found


def addresses(run: Execution, node: fx.Node) -> list[int]:
    return [address(tensor) for tensor in leaves(run.values[node], torch.Tensor)]


# --------------------------------------------------------------------------------------------------------- judgements


def signatures_hold(run: Execution) -> None:
    """An op writes into no more than its schema says, and shares storage with no more."""
    for node, written in run.written.items():
        op = lookup(node.target)
        declared = {one for operand in mutated_operands(node) for one in addresses(run, operand)}
        assert written <= declared, (node.name, op.name)
        if op.name.startswith("aten::"):
            empty = {address(t) for t in leaves(tuple(run.values.values()), torch.Tensor) if not t.numel()}
            assert declared - empty <= written, (node.name, op.name)
        operands = {one for operand in node.all_input_nodes for one in addresses(run, operand)}
        if not op.aliases:
            assert operands.isdisjoint(addresses(run, node)), (node.name, op.name)
        elif aliases := list(aliased_operands(node)):
            results = run.values[node] if isinstance(run.values[node], tuple) else (run.values[node],)
            for number, result in enumerate(results):
                named = {one for operand, a in aliases if number in a.results for one in addresses(run, operand)}
                shared = operands.intersection(map(address, leaves(result, torch.Tensor)))
                assert shared <= named, (node.name, op.name, number)
        JUDGED["writes" if declared else "views" if op.aliases else "own"] += 1


def storages_are(run: Execution, found: dict[fx.Node, tuple[int, ...]]) -> dict[int, int]:
    """Storages have one number exactly where they are one. Returns the numbers by address."""
    meaning: dict[int, int] = {}
    for node in run.values:
        real = tuple(dict.fromkeys(addresses(run, node)))
        assert len(found[node]) == len(real), node.name
        for number, one in zip(found[node], real, strict=True):
            assert meaning.setdefault(number, one) == one, node.name
    numbers = {one: number for number, one in meaning.items()}
    assert len(numbers) == len(meaning)
    return numbers


def checks_see_it(run: Execution, program: Program) -> None:
    binding = program.ranks[0]
    memory = memory_of(program.graphs[binding.graph], binding.constants)
    numbers = {node: number for number, node in enumerate(run.graph.nodes)}
    storage = storages_are(run, {node: memory.holds[number] for node, number in numbers.items()})
    for node, written in run.written.items():
        assert {storage[one] for one in written} <= set(memory.writes[numbers[node]]), node.name
    for node, value in run.values.items():
        for (number, first, end), tensor in zip(
            memory.regions[numbers[node]], leaves(value, torch.Tensor), strict=True
        ):
            assert number == storage[address(tensor)]
            if tensor.numel():
                assert first == tensor.storage_offset() * tensor.itemsize, node.name
                last = tensor.flatten()[-1:] if tensor.is_contiguous() else tensor[tuple(n - 1 for n in tensor.shape)]
                assert end == last.storage_offset() * tensor.itemsize + tensor.itemsize, node.name


def passes_see_it(run: Execution, graph: fx.Graph) -> None:
    """What shares storage or is written, shares storage or is written for passes too, whatever metadata says."""
    nodes = dict(zip(run.graph.nodes, graph.nodes, strict=True))
    found, mutated = accesses(graph), mutated_nodes(graph)
    classes: dict[int, set[int]] = {}
    for node in run.values:
        for one in addresses(run, node):
            classes[one] = classes.get(one, set(found.results[nodes[node]])) & set(found.results[nodes[node]])
            assert classes[one], node.name
    for node, written in run.written.items():
        if lookup(node.target).phase == "wait":
            continue
        for one in written:
            assert not classes[one].isdisjoint(found.writes[nodes[node]]), node.name
        holders = {nodes[other] for other in run.values if not written.isdisjoint(addresses(run, other))}
        assert holders <= mutated, node.name


@pytest.mark.parametrize("strategy", ["functional", "peephole", "fsdp", "wild", "overlap", "compiled"])
def test_torch_shares_and_writes_what_is_said(strategy: str) -> None:
    @given(STRATEGIES.get(strategy)(world_size=2))
    @settings(max_examples=by_night(200, 25), deadline=None, suppress_health_check=list(HealthCheck))
    def compare(program: Program) -> None:
        run = executed(program)
        signatures_hold(run)
        specs = InferredSpecs(program.mesh.groups(0))
        for node in run.values:
            if node.op == "placeholder":
                specs.keep_recorded(node, node.meta["val"])
            else:
                specs.keep(node, specs.infer(node))
        storages_are(run, {node: storages_of(spec) for node, spec in specs.of.items()})
        checks_see_it(run, program)
        passes_see_it(run, run.graph)
        passes_see_it(run, copy_graph(run.graph, meta=lambda node: {}))

    JUDGED.clear()
    compare()
    assert JUDGED["own"] > 20, JUDGED
    assert JUDGED["views"] > 5, JUDGED
