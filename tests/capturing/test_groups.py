"""Mesh dims of captured groups, and what is assumed of captured inputs: of captures that are written by hand."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from tcverify.capturing import Captured, CapturedInput, GroupFacts, for_all_ranks, program_of
from tcverify.capturing.groups import mesh_of
from tcverify.capturing.input_placements import find_varying_inputs
from tcverify.capturing.sources import UserFacts, _assumed
from tcverify.errors import ProgramError
from tcverify.ops import TensorSpec
from tcverify.program import REPLICATED, Mesh, MeshDim


def captured(**groups: tuple[str | None, tuple[int, ...]]) -> Captured:
    return Captured(fx.Graph(), (), {name: GroupFacts(*facts) for name, facts in groups.items()})


def test_groups_that_overlap_are_dims_of_their_own() -> None:
    left, right = (None, (0, 1)), (None, (1, 2))
    mesh, names = mesh_of([captured(a=left), captured(b=left, c=right), captured(d=right)], None)
    assert mesh.dims == (MeshDim("group0", ((0, 1), (2,))), MeshDim("group1", ((0,), (1, 2))))
    assert names == [{"a": "group0"}, {"b": "group0", "c": "group1"}, {"d": "group1"}]


def test_groups_that_overlap_and_come_first_on_their_ranks_are_dims_of_their_own() -> None:
    left, right = (None, (0, 1)), (None, (1, 2))
    mesh, names = mesh_of([captured(a=left), captured(c=right, b=left), captured(d=right)], None)
    assert mesh.dims == (MeshDim("group0", ((0, 1), (2,))), MeshDim("group0_1", ((0,), (1, 2))))
    assert names == [{"a": "group0"}, {"c": "group0_1", "b": "group0"}, {"d": "group0_1"}]


def test_groups_beside_each_other_are_one_dim() -> None:
    first, second = (None, (1, 0)), (None, (2, 3))
    mesh, names = mesh_of([captured(a=first), captured(b=first), captured(c=second), captured(d=second)], None)
    assert mesh.dims == (MeshDim("group0", ((1, 0), (2, 3))),)
    assert [next(iter(mine.values())) for mine in names] == ["group0"] * 4


def test_a_group_without_the_rank_that_uses_it_is_refused() -> None:
    with pytest.raises(ProgramError, match="used by rank 1 of 2"):
        mesh_of([captured(a=(None, (0,))), captured(b=(None, (0,)))], None)


def test_what_is_assumed_of_inputs_goes_by_the_values_that_ranks_hold() -> None:
    spec = TensorSpec.contiguous((2,), torch.float32)

    def rank(*, own: str, shared: str | None) -> Captured:
        inputs = (
            CapturedInput("x", spec),
            CapturedInput("gain", spec, "parameter", digest="same"),
            CapturedInput("weight", spec, "parameter", digest=own),
            CapturedInput("bias", spec, "parameter", digest=shared),
        )
        return Captured(fx.Graph(), inputs)

    captures = [rank(own="one", shared="one"), rank(own="another", shared="one")]
    program = program_of(captures, Mesh.grid({"tp": 2}), unknown=True)
    assert program.unknown == [("x", "tp")]
    assert {spec.name: [str(p) for _, p in spec.placements] for spec in program.inputs} == {
        "x": ["unknown"], "gain": [], "weight": ["varying"], "bias": [],
    }  # fmt: skip
    unknown, apart = _assumed(program, captures, UserFacts())
    assert "placement unknown, treated as different on the ranks: x" in unknown
    assert "different on the ranks, according to the values or the graph: weight (" in apart


def test_what_a_graph_gathers_or_sums_every_rank_has_its_own_of() -> None:
    functional = torch.ops._c10d_functional
    graph = fx.Graph()
    weight, grad, x = map(graph.placeholder, ("weight", "grad", "x"))
    cast = graph.call_function(torch.ops.prims.convert_element_type.default, (weight, torch.bfloat16))
    moved = graph.call_function(torch.ops.aten.view.default, (cast, [-1]))
    joined = graph.call_function(torch.ops.aten.cat.default, ([moved, moved],))
    whole = graph.call_function(functional.all_gather_into_tensor.default, (joined, 2, "dp"))
    reduced = graph.call_function(functional.reduce_scatter_tensor.default, (grad, "sum", 2, "dp"))
    product = graph.call_function(torch.ops.aten.mul.Tensor, (x, whole))
    graph.output((graph.call_function(functional.all_reduce.default, (product, "sum", "tp")), reduced))
    assert find_varying_inputs(graph) == {"weight": {"dp": None}, "grad": {"dp": None}}

    spec = TensorSpec.contiguous((2,), torch.float32)
    groups = {"dp": GroupFacts("dp", (0, 2)), "tp": GroupFacts("tp", (0, 1))}
    mesh = Mesh.grid({"dp": 2, "tp": 2})
    one = Captured(graph, tuple(CapturedInput(name, spec) for name in ("weight", "grad", "x")), groups)
    captures = for_all_ranks(one, mesh)
    said = {"g*": {"tp": REPLICATED}}
    placed = {
        s.name: {d: str(p) for d, p in s.placements} for s in program_of(captures, mesh, said, unknown=True).inputs
    }
    assert placed == {
        "weight": {"dp": "varying", "tp": "unknown"}, "grad": {"dp": "varying"}, "x": {"dp": "unknown", "tp": "unknown"},
    }  # fmt: skip
