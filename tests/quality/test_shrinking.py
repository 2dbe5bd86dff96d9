"""What a defect needs is what a drawn program shrinks to: ceilings on the size of minimal programs.

Sizes count compute nodes. Hypothesis alone is measured here; the project's graph reducer takes over where it stops.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, find, settings
from torch import fx

from tcverify.ops import qualified_name
from tcverify.program import Program
from tcverify.strategies import transformer_programs

SEEDS = range(3)

_SETTINGS = settings(
    max_examples=2000,
    database=None,
    deadline=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


def _calls(program: Program, op: str) -> list[fx.Node]:
    return [
        node
        for graph in program.graphs
        for node in graph.nodes
        if node.op == "call_function" and qualified_name(node.target) == f"tensor_cast::{op}"
    ]


def _is(node: object, *ops: str) -> bool:
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    return qualified_name(node.target) in ops


def _name(node: fx.Node) -> str:
    return qualified_name(node.target) if node.op == "call_function" else node.op


def reduced_then_normed(program: Program) -> bool:
    return any(_is(node.args[0], "tensor_cast::all_reduce") for node in _calls(program, "rms_norm"))


def reduced_then_added_and_normed(program: Program) -> bool:
    return any(_is(node.args[0], "tensor_cast::all_reduce") for node in _calls(program, "add_rms_norm"))


def region_between(program: Program) -> bool:
    marker = "tensor_cast::_internal_mark_region_begin"
    return any(
        _is(node.args[0], marker) and _is(node.args[0].args[0], "tensor_cast::all_reduce")  # type: ignore[union-attr]
        for node in _calls(program, "rms_norm")
    )


def region_read_in_full(program: Program) -> bool:
    return any(
        {_name(user) for user in marker.users} >= {"tensor_cast::rms_norm", "output"}
        for marker in _calls(program, "_internal_mark_region_begin")
    )


def normed_twins(program: Program) -> bool:
    """One value is summed over two groups of more than one rank, and a norm reads each sum."""
    found: dict[object, set[tuple[int, ...]]] = {}
    for norm in _calls(program, "rms_norm"):
        if _is(norm.args[0], "tensor_cast::all_reduce"):
            value, _, group = norm.args[0].args  # type: ignore[union-attr]
            found.setdefault(value, set()).add(tuple(program.ranks[0].constants[group.name]))  # type: ignore[union-attr,arg-type]
    return any(len([group for group in groups if len(group) > 1]) > 1 for groups in found.values())


def view_between(program: Program) -> bool:
    return any(
        _is(node.args[0], "aten::view") and _is(node.args[0].args[0], "tensor_cast::all_reduce")  # type: ignore[union-attr]
        for node in _calls(program, "rms_norm")
    )


def read_twice(program: Program) -> bool:
    return any(
        len([user for user in node.users if user.op == "call_function"]) > 1 for node in _calls(program, "all_reduce")
    )


def chained_residual(program: Program) -> bool:
    """The residual output of one add_rms_norm2 is an operand of another."""
    return any(
        _is(node.args[1], "python::getitem") and node.args[1].args[1] == 1  # type: ignore[union-attr]
        for node in _calls(program, "add_rms_norm2")
    )


@pytest.mark.parametrize(
    ("shows", "ceiling"),
    [
        pytest.param(reduced_then_normed, 2, id="all_reduce-rms_norm"),
        pytest.param(reduced_then_added_and_normed, 2, id="all_reduce-add_rms_norm"),
        pytest.param(region_between, 3, id="all_reduce-region-rms_norm"),
        pytest.param(region_read_in_full, 2, id="region-read-in-full"),
        pytest.param(normed_twins, 4, id="twins"),
        pytest.param(view_between, 3, id="all_reduce-view-rms_norm"),
        pytest.param(read_twice, 3, id="all_reduce-read-twice"),
        pytest.param(chained_residual, 2, id="add_rms_norm2-chain"),
    ],
)
def test_shrinks_to_what_is_needed(shows: Callable[[Program], bool], ceiling: int) -> None:
    sizes = [find(transformer_programs(), shows, settings=_SETTINGS, random=random.Random(seed)).size for seed in SEEDS]
    assert max(sizes) <= ceiling, f"shrunk to {sizes} compute nodes"
