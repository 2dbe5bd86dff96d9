"""Plans of placed programs: what is dead goes, what writes stays, and what is built is what the builder builds."""

from __future__ import annotations

import pytest

from tcverify.errors import ProgramError
from tcverify.ops import Layout
from tcverify.ops.dialects.multidevice import REDUCE, SET
from tcverify.ops.shapes import ShapeError
from tcverify.program import PlacedBuilder, PlacedInput, PlacedPlan, PlacedStep, Use, dumps
from tcverify.program.global_view.plan import uses

ROWS, WHOLE = Layout.parse("[2, 0] shard(0)"), Layout.parse("[1] replicated")
X = PlacedInput("x", (4, 2), ROWS)


def plan(*steps: PlacedStep, outputs: tuple[str, ...], inputs: tuple[PlacedInput, ...] = (X,)) -> PlacedPlan:
    return PlacedPlan(3, inputs, steps, outputs, seed=5, labels=("some",))


def test_a_plan_makes_what_the_builder_makes() -> None:
    steps = (
        PlacedStep("a", "aten::add.Tensor", (Use("x"), Use("x")), ROWS, {"alpha": 2}, stream_axis=0),
        PlacedStep("b", SET, (Use("a"),), WHOLE, stream_axis=1),
        PlacedStep("c", REDUCE, (Use("a"), 0, "max"), WHOLE),
    )
    b = PlacedBuilder(3)
    x = b.input("x", (4, 2), ROWS)
    y = b.call("aten::add.Tensor", x, x, alpha=2, stream_axis=0)
    built = b.build(b.set(y, WHOLE, stream_axis=1), b.reduce(y, 0, WHOLE, "max"), seed=5, labels=["some"])
    made, tensors = plan(*steps, outputs=("b", "c")).tensors()
    assert dumps(made) == dumps(built)
    assert [tensors[name].shape for name in ("a", "b", "c")] == [(4, 2), (4, 2), (2,)]


def test_what_no_output_needs_goes_but_writes_stay() -> None:
    steps = (
        PlacedStep("a", "aten::neg", (Use("x"),), ROWS),
        PlacedStep("b", SET, (Use("a"),), WHOLE),
        PlacedStep("dead", SET, (Use("y"),), WHOLE),
        PlacedStep("written", "aten::relu_", (Use("a"),), ROWS),
    )
    unread = PlacedInput("y", (4, 2), ROWS)
    left = plan(*steps, outputs=("b",), inputs=(X, unread)).live()
    assert [step.name for step in left.steps] == ["a", "b", "written"]
    assert left.inputs == (X,)
    assert plan(*steps, outputs=("x",)).live().steps == (steps[0], steps[3])


def test_steps_read_others_in_place() -> None:
    step = PlacedStep("a", "aten::cat", ([Use("x"), Use("y"), Use("x")], 0), ROWS)
    assert step.reads == ("x", "y")
    assert step.reading({"x": "z"}).reads == ("z", "y")
    assert uses({"key": [Use("b"), 3, Use("a")]}) == ("b", "a")


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(ProgramError, match="returns nothing"):
        plan(outputs=()).build()
    with pytest.raises(ProgramError, match="cannot divide"):
        plan(outputs=("x",), inputs=(PlacedInput("x", (3, 2), ROWS),)).build()
    with pytest.raises(ShapeError):
        plan(
            PlacedStep("a", "aten::matmul", (Use("x"), Use("x")), ROWS),
            outputs=("a",),
            inputs=(PlacedInput("x", (4, 3), ROWS),),
        ).build()
