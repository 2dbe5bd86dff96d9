"""Distributed checkpoints as a subject: sound layouts pass, planted defects of planners show, what does not fit is declined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch.distributed.checkpoint", reason="this torch was built without torch.distributed")

import torch
from torch.distributed.checkpoint import default_planner, planner_helpers

from tcverify.errors import Unsupported
from tcverify.execution import ProcessGroupPool
from tcverify.ops import qualified_name
from tcverify.program import PARTIAL, GraphBuilder, InputSpec, Mesh, MeshDim, Program, spmd_program
from tcverify.pytorch import subject
from tcverify.pytorch.checkpoint import Checkpoint
from tcverify.verification.verifier import Verdict, verify

LINE = Mesh.grid({"tp": 2})
GRID = Mesh.grid({"dp": 2, "tp": 2})


def program(mesh: Mesh, shapes: dict[str, tuple[int, ...]], **options: Any) -> Program:
    inputs = [InputSpec(name, shape) for name, shape in shapes.items()]
    return replace(spmd_program(mesh, inputs, copied(shapes)), options=options)


def copied(names: Any) -> Callable[[GraphBuilder], Any]:
    return lambda b: tuple(b.call("aten::clone", one) for one in [b.input(name) for name in names])


def judged(given: Program, **how: Any) -> Verdict:
    return verify(Checkpoint(), given, **how)


def refuted(given: Program) -> set[str]:
    verdict = judged(given)
    assert verdict.status == "refuted", verdict.doubts
    return {finding.kind for finding in verdict.findings}


@pytest.mark.parametrize("saved", subject("torch:checkpoint").draws["saved"])
@pytest.mark.parametrize(("mesh", "x"), [(LINE, "S1"), (GRID, ""), (GRID, "S0,S1"), (GRID, "F0,S0")])
def test_what_is_loaded_is_what_was_saved(saved: str, mesh: Mesh, x: str) -> None:
    placed = {"x": x, "y": x.replace("1", "0")} if x else {}
    verdict = judged(program(mesh, {"x": (5, 4), "y": (1,), "z": (), "empty": (0, 3)}, saved=saved, **placed))
    assert verdict.status == "passed", verdict.doubts or verdict.findings
    assert verdict.changed


@pytest.mark.parametrize("name", ["dedup_save_to_lowest_rank", "flatten_state_dict", "flatten_sharded_tensors"])
@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("cached", [True, False])
def test_planners_with_any_flags_move_the_same_elements(name: str, value: bool, cached: bool) -> None:
    placed = {"x": "S0,R", "y": "R,S0", name: value, "enable_plan_caching": cached}
    verdict = judged(program(GRID, {"x": (3, 4), "y": (4,), "z": (2,)}, saved="turned", **placed))
    assert verdict.status == "passed", verdict.doubts or verdict.findings


def test_what_lockstep_passes_also_passes_on_gloo_and_in_the_exact_domain(
    pool: Callable[[int], ProcessGroupPool],
) -> None:
    verdict = judged(program(LINE, {"x": (3, 4)}, x="S1"), confirm=pool(2), domain="exact")
    assert verdict.status == "passed", verdict.doubts or verdict.findings
    assert verdict.executors == ["lockstep", "gloo"]


def test_each_chunk_is_moved_once_from_the_rank_that_writes_it() -> None:
    given = program(GRID, {"x": (4, 4)}, x="S0,R", saved="same")
    nodes = list(Checkpoint()(given.graph_module(3)).graph.nodes)
    broadcasts = [n for n in nodes if n.op == "call_function" and qualified_name(n.target).endswith("::broadcast")]
    assert [node.args[1:] for node in broadcasts] == [(0, "dp"), (0, "tp"), (1, "dp"), (0, "tp")]


def test_inputs_that_differ_between_ranks_are_no_part_of_a_checkpoint() -> None:
    made = spmd_program(LINE, [InputSpec("x", (4,), placements=(("tp", PARTIAL),)), InputSpec("y", (4,))], copied("xy"))
    verdict = judged(made)
    assert verdict.status == "passed", verdict.doubts or verdict.findings
    alone = spmd_program(LINE, [InputSpec("x", (4,), placements=(("tp", PARTIAL),))], copied("x"))
    assert not judged(alone).changed


# ------------------------------------------------------------------------------------------------------------ declined


@pytest.mark.parametrize("x", ["S0", "S2,R", "Psum,R", "nonsense", "S0,R,R"])
def test_layouts_that_do_not_fit_are_declined(x: str) -> None:
    with pytest.raises(Unsupported):
        Checkpoint()(program(GRID, {"x": (4, 4)}, x=x).graph_module(0))


def test_a_mesh_that_is_no_grid_is_declined() -> None:
    mesh = Mesh(4, (MeshDim("dp", ((0, 1), (2, 3))),))
    with pytest.raises(Unsupported):
        Checkpoint()(program(mesh, {"x": (4, 4)}, x="S0").graph_module(0))


# ------------------------------------------------------------------------------------------------------ planted defects


def _regions(monkeypatch: pytest.MonkeyPatch, change: Callable[[int, int, int, int], tuple[int, ...]]) -> None:
    """Let other parts overlap than do: by dim, offset in what was saved, offset in what is loaded, length."""
    name = "_shards_get_overlap_region_wrt_saved_tensor"
    found = getattr(planner_helpers, name)
    monkeypatch.setattr(planner_helpers, name, lambda **shards: [change(*one) for one in found(**shards)])


def test_offsets_in_storage_that_ignore_a_dim_refute(monkeypatch: pytest.MonkeyPatch) -> None:
    given = program(GRID, {"x": (4, 4)}, x="S0,S1", saved="plain")
    assert judged(given).status == "passed"
    _regions(monkeypatch, lambda dim, saved, loaded, length: (dim, saved if dim == 0 else 0, loaded, length))
    assert refuted(given) == {"wrong-value"}
    assert judged(program(GRID, {"x": (4, 4)}, x="S0,S0", saved="plain")).status == "passed"


def test_destinations_that_are_off_by_one_for_uneven_shards_refute(monkeypatch: pytest.MonkeyPatch) -> None:
    _regions(monkeypatch, lambda dim, saved, loaded, length: (dim, saved, loaded - loaded % 2, length))
    assert judged(program(LINE, {"x": (4,)})).status == "passed"
    assert refuted(program(LINE, {"x": (5,)})) == {"wrong-value"}


def test_elements_that_nobody_reads_refute(monkeypatch: pytest.MonkeyPatch) -> None:
    create = planner_helpers.create_read_items_for_chunk_list
    monkeypatch.setattr(planner_helpers, "create_read_items_for_chunk_list", lambda *given: create(*given)[:-1])
    assert refuted(program(LINE, {"x": (4,)})) == {"wrong-value"}


def test_a_chunk_that_another_rank_writes_refutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deduplication takes all shards of a tensor for replicas."""

    def first_has_all(plans: list[Any], lowest: bool = False) -> list[Any]:
        items = {item.index: item for plan in plans for item in plan.items}
        return [replace(plan, items=[] if number else list(items.values())) for number, plan in enumerate(plans)]

    monkeypatch.setattr(default_planner, "dedup_save_plans", first_has_all)
    assert refuted(program(LINE, {"x": (4,)})) == {"wrong-value"}
    assert judged(program(LINE, {"x": (4,)}, saved="replicated")).status == "passed"


def test_offsets_without_the_inner_of_two_divisions_refute(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = planner_helpers.compute_local_shape_and_global_offset

    def outer(shape: Any, mesh: Any, placements: Any) -> Any:
        sizes, _ = compute(shape, mesh, placements)
        whole = [torch.distributed.tensor.Replicate()] * (len(placements) - 1)
        return sizes, compute(shape, mesh, [placements[0], *whole])[1]

    monkeypatch.setattr(planner_helpers, "compute_local_shape_and_global_offset", outer)
    assert refuted(program(GRID, {"x": (4,)}, x="S0,S0", saved="plain")) == {"wrong-value"}
    assert judged(program(GRID, {"x": (4,)}, x="S0,R", saved="plain")).status == "passed"


def test_plans_of_an_earlier_checkpoint_refute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_planner, "_compare_save_plans", lambda plan, other: True)
    given = program(LINE, {"x": (4,)}, x="R", saved="line", enable_plan_caching=True)
    assert refuted(given)
    assert judged(replace(given, options={**given.options, "enable_plan_caching": False})).status == "passed"
