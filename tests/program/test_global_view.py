"""The builder of programs whose tensors carry layouts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tcverify.errors import ProgramError
from tcverify.execution import Lockstep
from tcverify.ops import Layout, ShapeError
from tcverify.program import Placed, PlacedBuilder, Program, Recipe, dumps, loads, program_id
from tests.support.naive_layouts import same, spread, whole_input

LOCKSTEP = Lockstep()


def names(program: Program, rank: int) -> list[str]:
    return [node.name for node in program.graph(rank).nodes if node.op != "output"]


def two_stages() -> Program:
    b = PlacedBuilder(4)
    x = b.input("x", (8, 4), "[0, 1] shard(0)")
    w = b.input("w", (4, 6), "[1, 3] replicated", torch.bfloat16)
    first = b.call("aten::relu", x)
    moved = b.set(b.call("aten::_to_copy", first, dtype=torch.bfloat16), "[1, 3] shard(0)", stream_axis=0)
    product = b.call("aten::mm", moved, w, stream_axis=0)
    total = b.reduce(product, 0, "[2] replicated", "max")
    return b.build(product, b.call("aten::relu", total), seed=5, labels=("two stages",))


# ------------------------------------------------------------------------------------------------------------- programs


def test_a_rank_has_what_it_takes_part_in_under_the_names_of_all() -> None:
    program = two_stages()
    assert names(program, 0) == ["x", "relu", "_to_copy", "set_1"]
    assert names(program, 1) == ["x", "w", "relu", "_to_copy", "set_1", "mm", "reduce"]
    assert names(program, 2) == ["reduce", "relu_1"]
    assert names(program, 3) == ["w", "set_1", "mm", "reduce"]


def test_layouts_and_stream_axes_are_in_the_metadata() -> None:
    program = two_stages()
    metas = {node.name: node.meta for rank in range(4) for node in program.graph(rank).nodes}
    assert {name: meta.get("layout") for name, meta in metas.items() if "layout" in meta} == {
        "x": "[0, 1] shard(0)", "w": "[1, 3] replicated", "relu": "[0, 1] shard(0)", "_to_copy": "[0, 1] shard(0)",
        "mm": "[1, 3] shard(0)", "relu_1": "[2] replicated",
    }  # fmt: skip
    assert {name for name, meta in metas.items() if meta.get("stream_axis") == 0} == {"set_1", "mm"}
    assert program.labels == ("two stages",)


def test_a_rank_that_only_gives_away_knows_the_stream_axis_too() -> None:
    """It takes as many steps as those that get something."""
    [node] = two_stages().graph(0).find_nodes(op="call_function", target=torch.ops.multidevice.set.default)
    assert (node.meta["stream_axis"], tuple(node.meta["val"].shape)) == (0, (0,))


def test_what_ranks_return() -> None:
    run = LOCKSTEP.run(two_stages())
    assert run.finished, run.why
    assert [[tuple(t.shape) for t in result.outputs] for result in run.ranks] == [[], [(4, 6)], [(6,)], [(4, 6)]]


def test_a_program_survives_json() -> None:
    program = two_stages()
    again = loads(dumps(program))
    assert dumps(again) == dumps(program)
    assert program_id(again) == program_id(program)
    for rank in range(4):
        assert [n.meta.get("layout") for n in again.graph(rank).nodes] == [
            n.meta.get("layout") for n in program.graph(rank).nodes
        ]
    for before, after in zip(LOCKSTEP.run(program).ranks, LOCKSTEP.run(again).ranks, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(before.outputs, after.outputs, strict=True))


@pytest.mark.parametrize(
    "layout",
    [
        "[2] shard(0)",
        "[3, 1] shard(1)",
        "[1, 3, 0] replicated",
        "[5, 0, 3, 2] shard(0)",
        "[[5, 0], [3, 2]] shard(1), shard(0)",
        "[[5, 0, 1], [3, 2, 4]] replicated, shard(1)",
        "[[[5, 0], [3, 2]]] shard(1), replicated, shard(0)",
    ],
)
def test_inputs_are_parts_of_one_tensor(layout: str) -> None:
    b = PlacedBuilder(6)
    program = b.build(b.input("x", (12, 12), layout), seed=3)
    expected = spread(whole_input(program), layout)
    for result in LOCKSTEP.run(program).ranks:
        assert same(result.outputs, expected[result.rank]) if result.rank in expected else not result.outputs


def test_inputs_on_several_meshes() -> None:
    layouts = {"x": "[1, 0] shard(0)", "y": "[[2, 0], [3, 1]] shard(0), shard(1)", "z": "[0, 1] shard(0)"}
    b = PlacedBuilder(4)
    placed = [b.input(name, (4, 4), layout) for name, layout in layouts.items()]
    program = b.build(*placed)
    for result in LOCKSTEP.run(program).ranks:
        parts = [spread(whole_input(program, name), layout) for name, layout in layouts.items()]
        expected = [part[result.rank] for part in parts if result.rank in part]
        assert all(torch.equal(a, b) for a, b in zip(result.outputs, expected, strict=True))


def test_recipes_and_dtypes_of_inputs() -> None:
    b = PlacedBuilder(2)
    program = b.build(b.input("n", (4, 4), "[1, 0] shard(1)", torch.int16, Recipe("integers", 9.0)))
    assert {t.dtype for result in LOCKSTEP.run(program).ranks for t in result.outputs} == {torch.int16}


def test_a_program_without_inputs_or_outputs() -> None:
    program = PlacedBuilder(3).build()
    assert [names(program, rank) for rank in range(3)] == [[], [], []]
    assert LOCKSTEP.run(program).finished


def test_dead_code_goes_on_all_ranks_alike() -> None:
    b = PlacedBuilder(3)
    x = b.input("x", (4, 4), "[0, 1] shard(0)")
    b.set(b.call("aten::neg", x), "[2] replicated")  # nobody needs it
    kept = b.set(x, "[2, 1] shard(1)")
    program = b.build(b.call("aten::relu", kept))
    assert [names(program, rank) for rank in range(3)] == [["x", "set_2"], ["x", "set_2", "relu"], ["set_2", "relu"]]


def test_writes_stay_though_nobody_reads_them() -> None:
    b = PlacedBuilder(2)
    x = b.input("x", (4, 4), "[0, 1] shard(0)")
    own = b.call("aten::neg", x)
    b.call("aten::add_.Tensor", own, x)
    program = b.build(own)
    assert names(program, 0) == ["x", "neg", "add_"]
    for result in LOCKSTEP.run(program).ranks:
        assert not result.outputs[0].any()


def test_ranks_share_graphs_where_only_numbers_differ() -> None:
    b = PlacedBuilder(4)
    program = b.build(b.set(b.input("x", (8, 4), "[2, 0, 1, 3] shard(0)"), "[2, 0, 1, 3] replicated"))
    assert len(program.graphs) == 1


def test_names_are_equal_though_an_input_takes_the_name_of_an_op() -> None:
    b = PlacedBuilder(2)
    b.input("relu", (4, 4), "[0] replicated")
    b.input("relu_2", (4, 4), "[1] replicated")
    x = b.input("x", (4, 4), "[0, 1] replicated")
    program = b.build(b.call("aten::relu", x), b.call("aten::relu", b.call("aten::relu", x)))
    assert [n for n in names(program, 0) if n not in ("x", "relu")] == ["relu_1", "relu_3", "relu_4"]
    assert [n for n in names(program, 1) if n not in ("x", "relu_2")] == ["relu_1", "relu_3", "relu_4"]


def test_long_chains() -> None:
    b = PlacedBuilder(2)
    x = b.input("x", (2, 2), "[0, 1] shard(0)")
    for step in range(1500):
        x = b.set(x, f"[0, 1] shard({(step + 1) % 2})")
    program = b.build(x)
    assert program.size == 1500


def test_the_example_of_the_page_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "resharding.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(page.split("```python")[1].split("```")[0], names)  # noqa: S102 - a page of this repository
    run = LOCKSTEP.run(names["program"])
    assert run.finished, run.why
    assert [len(result.outputs) for result in run.ranks] == [0, 0, 1, 1]


# --------------------------------------------------------------------------------------------------------------- errors

Wrong = Callable[[PlacedBuilder, Placed], Any]

REFUSED: dict[str, Wrong] = {
    r"layout '\[0, 4\] shard\(0\)' names a rank that 4 ranks do not have": lambda b, x: b.set(x, "[0, 4] shard(0)"),
    r"'\[0, 1\] shards' is not a layout": lambda b, x: b.set(x, "[0, 1] shards"),
    r"layout '\[0, 9\] replicated' names a rank": lambda b, x: b.set(x, Layout.parse("[0, 9] replicated")),
    r"cannot divide size 4 of dim 1 evenly by 3": lambda b, x: b.set(x, "[0, 1, 2] shard(1)"),
    r"shards dim 2 of a tensor of shape": lambda b, x: b.set(x, "[0, 1] shard(2)"),
    r"no dim 2 to reduce": lambda b, x: b.reduce(x, 2, "[0, 1] replicated"),
    r"reduction 'mean' is not known": lambda b, x: b.reduce(x, 0, "[0, 1] replicated", "mean"),
    r"aten::add.Tensor takes operands on meshes \[0, 1\], \[2\]": lambda b, x: b.call(
        "aten::add.Tensor", x, b.set(x, "[2] replicated")
    ),
    r"aten::ones takes operands on meshes none": lambda b, x: b.call("aten::ones", [2]),
    r"cannot have a result on \[1, 0\]": lambda b, x: b.call("aten::relu", x, layout="[1, 0] shard(0)"),
    r"input 'y' is added after a call": lambda b, x: (b.call("aten::relu", x), b.input("y", (4,), "[0] replicated")),
    r"input 'x' is added twice": lambda b, x: b.input("x", (4,), "[2] replicated"),
    r"'for' cannot be the name of an input": lambda b, x: b.input("for", (4,), "[0] replicated"),
    r"'a b' cannot be the name of an input": lambda b, x: b.input("a b", (4,), "[0] replicated"),
    r"a world of 0 ranks": lambda b, x: PlacedBuilder(0),
    r"stream axis 2 .*of shape \[4, 4\]": lambda b, x: b.call("aten::relu", x, stream_axis=2),
    r"stream axis -1 ": lambda b, x: b.set(x, "[1] replicated", stream_axis=-1),
    r"cannot be that of a result of aten::sum.dim_IntList: its shape": lambda b, x: b.call("aten::sum.dim_IntList", x, [0, 1]),
    r"has been built already": lambda b, x: (b.build(x), b.build(x)),
    r"aten::max.dim has several results": lambda b, x: b.call("aten::max.dim", x, 0),
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_built(words: str) -> None:
    b = PlacedBuilder(4)
    x = b.input("x", (8, 4), "[0, 1] shard(0)")
    with pytest.raises(ProgramError, match=words):
        REFUSED[words](b, x)


def test_parts_that_do_not_fit_together() -> None:
    b = PlacedBuilder(2)
    x = b.input("x", (8, 4), "[0, 1] shard(0)")
    y = b.input("y", (8, 4), "[0, 1] replicated")
    with pytest.raises(ShapeError):
        b.call("aten::mm", x, y)
