"""Ops that are taken apart: values on the way are steps of the op, and the one that is none is to blame."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import fx

from tcverify.domains import NATIVE, domain_of
from tcverify.execution import Lockstep
from tcverify.explain.diagnosis import Diagnosis, diagnose
from tcverify.explain.relations import steps
from tcverify.explain.relations.steps import steps_of
from tcverify.program import PARTIAL, Finding, GraphBuilder, InputSpec, Mesh, Program, Recipe, spmd_program

MESH = Mesh.grid({"tp": 2})
INPUTS = (
    InputSpec("x", (4, 6)),
    InputSpec("addend", (4, 6), placements=(("tp", PARTIAL),)),
    InputSpec("gain", (6,), recipe=Recipe("norm_weight")),
)
Build = Callable[[GraphBuilder, fx.Node, fx.Node, fx.Node], object]
WRONG = Finding("wrong-value", "equivalence", "output 0 is wrong", "", None, 0, {"label": "output 0"})


def program(build: Build) -> Program:
    def with_inputs(b: GraphBuilder) -> object:
        return build(b, b.input("x"), b.input("addend"), b.input("gain"))

    return spmd_program(MESH, INPUTS, with_inputs, seed=5)


def look(before: Build, after: Build) -> Diagnosis:
    return diagnose(program(before), program(after), WRONG)


def kinds(found: Diagnosis) -> dict[str, str]:
    return {name: relation.kind for name, relation in (found.relations or {}).items()}


def layer_norm(b: GraphBuilder, x: fx.Node, addend: fx.Node, gain: fx.Node) -> object:
    return b.call("tensor_cast::layer_norm", x, gain, None, 1e-6)


def norm_apart(correction: int, eps: float = 1e-6) -> Build:
    def build(b: GraphBuilder, x: fx.Node, addend: fx.Node, gain: fx.Node) -> object:
        mean = b.call("aten::mean.dim", x, [-1], True)
        variance = b.call("aten::var.correction", x, [-1], correction=correction, keepdim=True)
        scale = b.call("aten::rsqrt", b.call("aten::add.Tensor", variance, eps))
        return b.call("aten::mul.Tensor", b.call("aten::mul.Tensor", b.call("aten::sub.Tensor", x, mean), scale), gain)

    return build


def reduced(b: GraphBuilder, x: fx.Node, addend: fx.Node, gain: fx.Node) -> object:
    return b.call("tensor_cast::all_reduce", addend, b.rank, b.group("tp"))


def sum_apart(members: int) -> Build:
    def build(b: GraphBuilder, x: fx.Node, addend: fx.Node, gain: fx.Node) -> object:
        stacked = b.call("aten::unsqueeze", addend, 0)
        gathered = b.call("tensor_cast::all_gather", stacked, 0, b.rank, b.group("tp"))
        return b.call("aten::sum.dim_IntList", b.call("aten::slice.Tensor", gathered, 0, 0, members), [0])

    return build


def test_every_value_of_a_norm_taken_apart_is_explained() -> None:
    found = look(layer_norm, norm_apart(correction=0))
    assert found.first is None
    assert kinds(found) == {
        "x": "equal",
        "addend": "equal",
        "gain": "equal",
        **dict.fromkeys(("mean", "var", "add", "rsqrt", "sub", "mul"), "step"),
        "mul_1": "equal",
    }


def test_the_step_that_is_none_is_to_blame() -> None:
    first = look(layer_norm, norm_apart(correction=1)).first
    assert str(first) == "'var' is 6/5 of the original's 'mean in layer_norm'"


def test_behind_a_right_step_the_next_one_is_to_blame() -> None:
    first = look(layer_norm, norm_apart(correction=0, eps=1e-2)).first
    assert first is not None
    assert first.node == "add"


def test_an_output_that_is_a_step_alone_is_not_the_ops_result() -> None:
    def after(b: GraphBuilder, x: fx.Node, addend: fx.Node, gain: fx.Node) -> object:
        return b.call("aten::sub.Tensor", x, b.call("aten::mean.dim", x, [-1], True))

    assert str(look(layer_norm, after).first) == (
        "output 0 returns 'sub', which is equal to the original's 'sub in layer_norm'"
    )


def test_the_addends_of_a_sum_side_by_side_are_a_step() -> None:
    found = look(reduced, sum_apart(2))
    assert found.first is None
    assert kinds(found)["all_gather"] == kinds(found)["slice_1"] == "step"


def test_the_slice_that_drops_an_addend_is_to_blame() -> None:
    assert str(look(reduced, sum_apart(1)).first) == (
        "'slice_1' is the original's 'all_reduce' on rank 0, without the addend 'addend' of rank 1 over tp [0, 1]"
    )


def test_an_op_that_the_rewrite_keeps_has_no_steps() -> None:
    def after(b: GraphBuilder, x: fx.Node, addend: fx.Node, gain: fx.Node) -> object:
        mean = b.call("aten::mean.dim", x, [-1], True)
        return b.call("aten::add.Tensor", layer_norm(b, x, addend, gain), mean)  # type: ignore[arg-type]

    assert kinds(look(layer_norm, after))["mean"] == "unrelated"


@pytest.mark.parametrize("name", ["float64", "native", "exact:0"])
def test_steps_are_taken_in_every_domain(name: str) -> None:
    original = program(layer_norm)
    run = Lockstep().run(original, observe=True, domain=NATIVE if name == "native" else domain_of(name))
    found = steps_of(original, run, "layer_norm")
    assert {"mean", "sum", "sub", "rsqrt", "mul"} <= {label for label, _ in found}
    assert all(values.keys() == {0, 1} for _, values in found)


def test_large_ops_and_views_have_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    original = program(lambda b, x, a, g: b.call("aten::view", layer_norm(b, x, a, g), [6, 4]))
    run = Lockstep().run(original, observe=True)
    assert not steps_of(original, run, "view")
    monkeypatch.setattr(steps, "MAX_ELEMENTS", 10)
    assert not steps_of(original, run, "layer_norm")
