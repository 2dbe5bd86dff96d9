"""A rewrite that is right only if inputs with an unknown placement are equal on the ranks: a condition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from tcverify import Contract, verify
from tcverify.execution import AnySize
from tcverify.program import (
    UNKNOWN,
    VARYING,
    GraphBuilder,
    InputSpec,
    Mesh,
    Placement,
    Program,
    dumps,
    loads,
    spmd_program,
)
from tcverify.verification.verifier import Verdict

MESH = Mesh.grid({"dp": 2, "tp": 2})
functional = torch.ops._c10d_functional


def scaled_sum(gain: Placement = UNKNOWN, names: tuple[str, ...] = ("gain",)) -> Program:
    """all_reduce(x) · gain · …"""

    def build(b: GraphBuilder) -> Any:
        x, *gains = (b.input(name) for name in ("x", *names))
        value = b.call("_c10d_functional::wait_tensor", b.call("_c10d_functional::all_reduce", x, "sum", "tp"))
        for one in gains:
            value = b.call("aten::mul.Tensor", value, one)
        return value

    placed = tuple((dim.name, gain) for dim in MESH.dims)
    inputs = [InputSpec("x", (4, 6), placements=(("tp", VARYING), ("dp", UNKNOWN)))]
    inputs += [InputSpec(name, (6,), placements=placed) for name in names]
    return spmd_program(MESH, inputs, build)


def node(gm: fx.GraphModule, name: str) -> fx.Node:
    return next(one for one in gm.graph.nodes if one.name.startswith(name))


def call(gm: fx.GraphModule, target: Any, *args: Any) -> fx.Node:
    made = gm.graph.call_function(target, args)
    made.meta["val"] = target(*fx.node.map_arg(args, lambda one: one.meta["val"]))
    return made


def before_the_sum(gm: fx.GraphModule) -> None:
    """sum(x) · gain ⇒ sum(x · gain): right where all ranks of tp have the same gain."""
    reduce, wait, mul = node(gm, "all_reduce"), node(gm, "wait"), node(gm, "mul")
    with gm.graph.inserting_before(reduce):
        early = call(gm, torch.ops.aten.mul.Tensor, reduce.args[0], mul.args[1])
    reduce.replace_input_with(reduce.args[0], early)  # type: ignore[arg-type]
    mul.replace_all_uses_with(wait)
    gm.graph.erase_node(mul)


def twice(gm: fx.GraphModule) -> None:
    """Wrong, whatever lies where."""
    before_the_sum(gm)
    reduce = node(gm, "all_reduce")
    with gm.graph.inserting_before(reduce):
        reduce.replace_input_with(reduce.args[0], call(gm, torch.ops.aten.mul.Tensor, reduce.args[0], 2.0))  # type: ignore[arg-type]


def judged(pass_: Any, program: Program, **options: Any) -> Verdict:
    return verify(pass_, program, **{"checks": ["equivalence", "purity", "interleavings"], **options})


@pytest.mark.parametrize("domain", ["float64", "exact"])
def test_what_is_right_where_an_input_is_equal_is_a_condition(domain: str) -> None:
    verdict = judged(before_the_sum, scaled_sum(), domain=domain)
    assert (verdict.status, verdict.findings) == ("inconclusive", [])
    assert [doubt.reason for doubt in verdict.doubts] == ["placement-needed"]
    assert "right only if gain is equal on all ranks of tp;" in verdict.doubts[0].detail
    assert "--placement gain=tp:replicated" in verdict.doubts[0].detail


def test_few_inputs_are_named() -> None:
    verdict = judged(before_the_sum, scaled_sum(names=("a", "b", "c", "d")))
    assert "right only if a is equal on all ranks of tp;" in verdict.doubts[0].detail


def test_what_is_known_settles_it() -> None:
    assert judged(before_the_sum, scaled_sum(Placement("replicated"))).status == "passed"
    verdict = judged(before_the_sum, scaled_sum(VARYING))
    assert [finding.kind for finding in verdict.findings] == ["wrong-value"]


def test_what_is_wrong_either_way_is_refuted() -> None:
    verdict = judged(twice, scaled_sum())
    assert [finding.kind for finding in verdict.findings] == ["wrong-value"]
    assert not verdict.doubts


def test_what_is_right_either_way_passes() -> None:
    assert judged(lambda gm: None, scaled_sum()).status == "passed"


def test_findings_that_do_not_depend_on_it_stay() -> None:
    def without_metadata(gm: fx.GraphModule) -> None:
        before_the_sum(gm)
        node(gm, "all_reduce").meta.clear()

    verdict = judged(
        without_metadata, scaled_sum(), checks=["equivalence", "metadata"], contract=Contract(metadata=True)
    )
    assert [finding.kind for finding in verdict.findings] == ["stale-metadata"]
    assert [doubt.reason for doubt in verdict.doubts] == ["placement-needed"]
    assert verdict.doubts[0].detail.startswith("right only if gain is equal on all ranks of tp;")


def test_the_pass_is_told_that_they_are_equal_and_files_keep_it() -> None:
    program = scaled_sum()
    placed = node(program.graph_modules()[0], "gain").meta["placement"]
    assert {str(placement) for placement in placed.values()} == {"replicated"}
    assert loads(dumps(program)).unknown == program.unknown == [("x", "dp"), ("gain", "dp"), ("gain", "tp")]
    assert program.with_equal(program.unknown).unknown == []


def test_more_ranks_than_process_groups_have_are_judged_in_lockstep_alone() -> None:
    def build(b: GraphBuilder) -> Any:
        return b.call(
            "_c10d_functional::wait_tensor", b.call("_c10d_functional::all_reduce", b.input("x"), "sum", "tp")
        )

    mesh = Mesh.grid({"dp": 32, "tp": 4})
    program = spmd_program(mesh, [InputSpec("x", (2,), placements=(("tp", VARYING),))], build)
    verdict = verify(lambda gm: None, program, confirm=AnySize("gloo", _never))
    assert (verdict.status, verdict.executors) == ("passed", ["lockstep"])
    assert [note.reason for note in verdict.notes] == ["not-confirmed"]


def _never(world_size: int) -> Any:
    raise AssertionError(f"a process group of {world_size} ranks was started")


def test_a_brief_verdict_names_no_inputs() -> None:
    verdict = judged(before_the_sum, scaled_sum(), brief=True)
    assert [doubt.reason for doubt in verdict.doubts] == ["placement-needed"]
    assert "gain" not in verdict.doubts[0].detail
