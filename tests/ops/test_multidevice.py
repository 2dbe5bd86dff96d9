"""The dialect of programs whose tensors carry layouts: shapes, errors, and what lockstep and gloo make of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from tcverify import verify
from tcverify.domains import NATIVE, Exact
from tcverify.errors import ProgramError
from tcverify.execution import Lockstep, ProcessGroupPool
from tcverify.ops import ShapeError, TensorSpec, infer, resolve
from tcverify.program import PlacedBuilder, Program, RankBinding
from tests.support.naive_layouts import reduce_over, same, spread, whole_input

LOCKSTEP = Lockstep()

#: Meshes of two stages: alone, several, all, some, in other orders.
MESHES = ["[0]", "[1]", "[0, 1, 2, 3]", "[0, 2, 3]", "[1, 0, 2]", "[1, 0]"]


def shape_of(op: str, *args: Any) -> TensorSpec:
    found = infer(resolve(f"multidevice::{op}"), args, {}, lambda: 99)
    assert isinstance(found, TensorSpec)
    return found


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec(shape, TensorSpec.contiguous(shape, dtype).stride, dtype, 0, 1)


# --------------------------------------------------------------------------------------------------------------- shapes


def test_shapes_of_set() -> None:
    given = "[0, 1] shard(0)", "[2, 1, 0] shard(1)", [4, 6], torch.float32
    assert shape_of("set", spec(2, 6), *given, 0).shape == (4, 2)
    assert shape_of("set", None, *given, 2).shape == (4, 2)
    gone = "[0, 1] shard(0)", "[2] replicated", [4, 6], torch.float32
    assert shape_of("set", spec(2, 6), *gone, 0).shape == (0,)
    assert shape_of("set", None, *gone, 2).shape == (4, 6)


def test_shapes_and_dtypes_of_reduce() -> None:
    given = 1, "max", "[0, 1] shard(0)", "[1, 2] shard(1)", [4, 6, 8], torch.bfloat16
    made = shape_of("reduce", spec(2, 6, 8, dtype=torch.bfloat16), *given, 1)
    assert (made.shape, made.dtype, made.alias) == ((4, 4), torch.bfloat16, 99)
    made = shape_of("reduce", None, *given, 2)
    assert (made.shape, made.dtype) == ((4, 4), torch.bfloat16)


LIES = "[0, 1] shard(0)", "[2] replicated", [4, 6], torch.float32

REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    r"rank 3 neither has nor gets a part of '\[4, 6\]": ("set", (None, *LIES, 3)),
    r"rank 0 is in mesh \[0, 1\] and gives no operand": ("set", (None, *LIES, 0)),
    r"rank 2 is not in mesh \[0, 1\] and gives an operand": ("set", (spec(2, 6), *LIES, 2)),
    r"operand on rank 1 has shape \[4, 6\].*it holds \[2, 6\]": ("set", (spec(4, 6), *LIES, 1)),
    r"has dtype torch.int64, and is said to have torch.float32": ("set", (spec(2, 6, dtype=torch.int64), *LIES, 1)),
    r"'\[0, 1\] shared' is not a layout": ("set", (spec(2, 6), "[0, 1] shared", *LIES[1:], 0)),
    r"cannot divide size 5 of dim 0": ("set", (spec(2, 6), *LIES[:2], [5, 6], torch.float32, 0)),
    r"'mean' is not known": ("reduce", (spec(2, 6), 0, "mean", *LIES, 0)),
    r"has no dim 2 to reduce": ("reduce", (spec(2, 6), 2, "sum", *LIES, 0)),
    r"no elements to reduce along dim 1": ("reduce", (spec(2, 0), 1, "sum", *LIES[:2], [4, 0], torch.float32, 0)),
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_the_shapes_refuse(words: str) -> None:
    op, args = REFUSED[words]
    with pytest.raises(ShapeError, match=words):
        shape_of(op, *args)


# ------------------------------------------------------------------------------------------------------ what they compute


def two_stages(first: str, second: str, op: str) -> tuple[Program, Callable[[torch.Tensor], torch.Tensor], str]:
    """A tensor on one mesh goes to another, and is added to itself there. Returns what the whole becomes, and where it lies."""
    b = PlacedBuilder(4)
    x = b.input("x", (12, 12, 2), f"{first} shard(0)")
    target = f"{second} {'replicated' if op == 'sum of shards' else 'shard(0)'}"
    if op == "set":
        moved, rule = b.set(x, target), lambda whole: whole
    else:
        dim = 1 if op == "sum" else 0
        moved, rule = b.reduce(x, dim, target), lambda whole: whole.sum(dim)
    return b.build(b.call("aten::add.Tensor", moved, moved)), lambda whole: 2 * rule(whole), target


@pytest.mark.parametrize("op", ["set", "sum", "sum of shards"])
@pytest.mark.parametrize("first", MESHES)
@pytest.mark.parametrize("second", MESHES)
def test_two_stages_on_all_pairs_of_meshes(first: str, second: str, op: str) -> None:
    program, rule, target = two_stages(first, second, op)
    expected = spread(rule(whole_input(program)), target)
    run = LOCKSTEP.run(program)
    assert run.finished, run.why
    for result in run.ranks:
        assert len(result.outputs) == (result.rank in expected)
        for found in result.outputs:
            torch.testing.assert_close(found, expected[result.rank])


PIPELINE = ["[5]", "[2, 4]", "[0]", "[0, 1, 4]", "[1, 3]", "[2]", "[4, 5]"]


def test_a_pipeline_through_many_meshes() -> None:
    b = PlacedBuilder(6)
    x = b.input("x", (6, 6), f"{PIPELINE[0]} shard(0)")
    for stage, mesh in enumerate(PIPELINE[1:]):
        x = b.call("aten::neg", b.set(x, f"{mesh} shard({stage % 2})"))
    program = b.build(x)
    expected = spread(whole_input(program), "[4, 5] shard(1)")
    run = LOCKSTEP.run(program)
    assert run.finished, run.why
    for result in run.ranks:
        assert same(result.outputs, expected[result.rank]) if result.rank in expected else not result.outputs


def many() -> tuple[Program, list[tuple[str, torch.Tensor]]]:
    """All kinds of transitions in one program, with what the whole becomes in each."""
    b = PlacedBuilder(4)
    x = b.input("x", (12, 8, 4), "[1, 3, 0] shard(0)")
    n = b.input("n", (4, 4), "[[2, 0], [1, 3]] shard(1), shard(0)", torch.int16)
    made = []
    for target in (
        "[1, 3, 0] replicated",
        "[2] replicated",
        "[0, 1, 2, 3] shard(1)",
        "[[3, 0], [1, 2]] shard(0), shard(2)",
    ):
        made.append((target, b.set(x, target), lambda x, n: x))
    for target, op in (("[1, 3, 0] replicated", "sum"), ("[3, 2] shard(0)", "max"), ("[2] replicated", "avg")):
        made.append((target, b.reduce(x, 0, target, op), lambda x, n, op=op: reduce_over(x, 0, op)))
    for target in ("[[2, 0], [1, 3]] replicated, shard(0)", "[0, 3] shard(1)"):
        made.append((target, b.set(n, target), lambda x, n: n))
    made.append(
        ("[2, 0] replicated", b.reduce(n, 1, "[2, 0] replicated", "bxor"), lambda x, n: reduce_over(n, 1, "bxor"))
    )
    program = b.build(*(placed for _, placed, _ in made))
    wholes = whole_input(program, "x"), whole_input(program, "n")
    return program, [(target, rule(*wholes)) for target, _, rule in made]


def test_gloo_and_lockstep_compute_what_is_meant(pool: Callable[[int], ProcessGroupPool]) -> None:
    program, expected = many()
    for run in (LOCKSTEP.run(program), pool(4).run(program)):
        assert run.finished, run.why
        for result in run.ranks:
            outputs = iter(result.outputs)
            for target, whole in expected:
                parts = spread(whole, target)
                if result.rank in parts:
                    found = next(outputs)
                    assert found.dtype == whole.dtype
                    torch.testing.assert_close(found, parts[result.rank])
            assert next(outputs, None) is None


def test_other_number_domains(pool: Callable[[int], ProcessGroupPool]) -> None:
    program, _ = many()
    for domain in (NATIVE, Exact(0)):
        here, there = LOCKSTEP.run(program, domain=domain), pool(4).run(program, domain=domain)
        assert here.finished, here.why
        assert there.finished, there.why
        for a, b in zip(here.ranks, there.ranks, strict=True):
            assert [t.dtype for t in a.outputs] == [t.dtype for t in b.outputs]
            for x, y in zip(a.outputs, b.outputs, strict=True):
                torch.testing.assert_close(x, y)


# ------------------------------------------------------------------------------------- members that disagree, by planting


def edited(program: Program, rank: int, position: int, value: Any) -> Program:
    """The program with one argument of one rank's first set replaced."""
    graph = program.graph(rank)
    [node, *_] = graph.find_nodes(op="call_function", target=torch.ops.multidevice.set.default)
    node.update_arg(position, value)
    graphs = [program.graph(r) if r != rank else graph for r in range(program.world_size)]
    ranks = tuple(RankBinding(r, {}) for r in range(program.world_size))
    return Program(program.mesh, tuple(_with_specs(g) for g in graphs), ranks, program.inputs)


def _with_specs(graph: fx.Graph) -> fx.Graph:
    for node in graph.nodes:
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor):
            node.meta["val"] = TensorSpec(tuple(val.shape), tuple(val.stride()), val.dtype, 0, None)
    return graph


def one_set() -> Program:
    b = PlacedBuilder(3)
    return b.build(b.set(b.input("x", (4, 4), "[0, 1] shard(0)"), "[1, 2] shard(0)"))


@pytest.mark.parametrize(
    ("rank", "position", "value", "words"),
    [
        (1, 2, "[1, 2] shard(1)", "reshards"),
        (1, 2, "[1, 2, 0] replicated", "waits|reshards|never"),
        (1, 5, 0, "rank 1 calls as rank 0"),
        (1, 2, "[1, 2] sharded", "is not a layout"),
        (1, 2, "[1, 7] shard(0)", "rank 7, which the mesh does not have"),
        (1, 3, [4, 6], r"has shape \[2, 4\]"),
    ],
)
def test_what_lockstep_says_of_ranks_that_disagree(rank: int, position: int, value: Any, words: str) -> None:
    run = LOCKSTEP.run(edited(one_set(), rank, position, value))
    assert not run.finished
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(run.why)


def test_a_pass_that_changes_a_layout_on_one_rank_is_refuted() -> None:
    def turned(gm: fx.GraphModule) -> fx.GraphModule:
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.multidevice.set.default):
            node.update_arg(2, "[2, 1] shard(0)")
        gm.recompile()
        return gm

    verdict = verify(turned, one_set())
    assert verdict.status == "refuted"
    assert "equivalence" in {finding.check for finding in verdict.findings}


def test_a_pass_that_does_nothing_is_not_refuted() -> None:
    program, _ = many()
    assert verify(lambda gm: gm, program).status == "passed"


def test_a_layout_that_is_wrong_is_told_before_anything_runs() -> None:
    b = PlacedBuilder(2)
    x = b.input("x", (4,), "[0, 1] shard(0)")
    with pytest.raises(ProgramError, match="names a rank that 2 ranks do not have"):
        b.set(x, "[2] replicated")
