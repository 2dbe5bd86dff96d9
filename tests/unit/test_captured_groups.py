"""Mesh dims of captured groups, and what is assumed of captured inputs: of captures that are written by hand."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from tcverify.capturing import Captured, CapturedInput, GroupFacts
from tcverify.capturing.groups import mesh_of
from tcverify.capturing.sources import Told, _assumed
from tcverify.errors import ProgramError
from tcverify.ops import TensorSpec
from tcverify.program import MeshDim


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

    same, apart = _assumed([rank(own="one", shared="one"), rank(own="another", shared=None)], Told())
    assert "equal on all ranks, since nothing says otherwise: x and 2 of the parameters and constants" in same
    assert "different on the ranks, as the values are that they hold: weight (" in apart
