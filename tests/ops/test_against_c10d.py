"""What the tables say of collectives is what torch's own kernels do on gloo."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from tcverify.execution import Lockstep, ProcessGroupPool, Run
from tcverify.ops import lookup, resolve
from tcverify.program import VARYING, InputSpec, Mesh, Program, Recipe
from tests import warm
from tests.support.async_programs import Functional, program
from tests.support.c10d_oracle import COPIES, WORLD, operand, sizes

DP = Mesh.grid({"dp": WORLD})
#: As the oracle's operands.
X = InputSpec(
    "x", (6, 3), torch.float64, (("dp", VARYING),),
    Recipe("given", values=tuple(v for rank in range(WORLD) for v in operand(rank).reshape(-1).tolist())),
)  # fmt: skip


@cache
def oracle() -> list[dict[str, Any]]:
    root = Path(__file__).parents[2]
    with tempfile.TemporaryDirectory() as directory:
        answers = Path(directory, "answers.json")
        environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONWARNINGS": "ignore"}
        code, _, errors = warm.run("-m", "tests.support.c10d_oracle", str(answers), cwd=root, env=environment)
        assert code == 0, errors[-2000:]
        found: list[dict[str, Any]] = json.loads(answers.read_text(encoding="utf-8"))
    return found


def functional(b: Functional, op: str, *args: Any) -> fx.Node:
    namespace = "" if "::" in op else "_c10d_functional::"
    return b.call(namespace + op, *args)


def wait(b: Functional, value: fx.Node) -> fx.Node:
    return functional(b, "wait_tensor", value)


def autograd(op: str, *given: Any) -> Callable[[Functional], Any]:
    def build(b: Functional) -> Any:
        more = sizes(b.representative) if op == "all_to_all_single" else given
        return wait(b, functional(b, f"_c10d_functional_autograd::{op}", b.x, *more, "dp"))

    return build


def reshard(gather: int, shard: int) -> Callable[[Functional], Any]:
    return lambda b: b.call("_dtensor::shard_dim_alltoall", b.x, gather, shard, "dp")


def batch(b: Functional) -> Any:
    there, back = (b.representative + 1) % WORLD, (b.representative - 1) % WORLD
    zeros = b.call("aten::zeros_like", b.x)
    made = functional(b, "batch_p2p_ops", ["isend", "irecv"], [there, back], [0, 0], [b.x, zeros], "dp")
    return [wait(b, b.getitem(made, i)) for i in range(2)]


def tagged(b: Functional) -> Any:
    if b.representative == 0:
        both = functional(b, "isend", b.x, 1, 7, "dp"), functional(b, "isend", b.call("aten::neg", b.x), 1, 8, "dp")
        return [wait(b, y) for y in both]
    if b.representative == 1:
        buffers = [b.call("aten::zeros_like", b.x) for _ in range(2)]
        both = functional(b, "irecv", buffers[0], 0, 8, "dp"), functional(b, "irecv", buffers[1], 0, 7, "dp")
        return [wait(b, y) for y in both]
    return []


CASES: dict[str, Callable[[Functional], Any]] = {
    "all_to_all": autograd("all_to_all_single"),
    "all_gather": autograd("all_gather_into_tensor", WORLD),
    "reduce_scatter": autograd("reduce_scatter_tensor", "avg", WORLD),
    "reshard": reshard(0, 1),
    "reshard_back": reshard(1, 0),
    "reshard_one": reshard(0, 0),
    "wrapped": lambda b: functional(b, "_wrap_tensor_autograd", b.x),
    "never_started": lambda b: wait(b, b.x),
    "batch": batch,
    "tagged": tagged,
}


def made(case: str) -> Program:
    return program(*[CASES[case]] * WORLD, mesh=DP, inputs=[X])


def plain(run: Run) -> list[Any]:
    assert run.finished, run.why
    return [[value.tolist() for value in result.outputs] for result in run.ranks]


@pytest.mark.parametrize("case", CASES)
def test_lockstep_computes_what_the_kernels_do(case: str) -> None:
    expected = [answer[case] for answer in oracle()]
    missing = [one["missing"] for one in expected if isinstance(one, dict) and "missing" in one]
    if missing:
        pytest.skip(f"this torch has no kernel to compare with: {missing[0]}")
    single = case not in ("batch", "tagged")
    assert plain(Lockstep().run(made(case))) == [[one] if single else one for one in expected]


@pytest.mark.parametrize(("op", "more"), COPIES)
def test_what_is_written_behind_a_start_that_copies_does_not_show(op: str, more: Any) -> None:
    """Not even where the collective reads as late as it may."""

    def build(b: Functional) -> Any:
        several = op.endswith("_coalesced")
        own = b.call("aten::clone", b.x)
        started = functional(b, op, [own] if several else own, more, "dp")
        b.call("aten::fill_.Scalar", own, -1.0)
        return wait(b, b.getitem(started, 0) if several else started)

    expected = [[answer[f"written_behind_{op}"]] for answer in oracle()]
    assert plain(Lockstep().run(program(build, mesh=DP, inputs=[X]), timing="wait")) == expected
    assert lookup(resolve(f"_c10d_functional::{op}")).copies


def test_so_do_process_groups(pool: Callable[[int], ProcessGroupPool]) -> None:
    for case in CASES:
        comparison = pool(WORLD).compare(made(case), made(case))
        assert comparison.original.finished, (case, comparison.original.why)
        assert not [delta for delta in comparison.deltas if delta.problem or delta.difference], case


def test_averages_of_integers_raise_there_and_here() -> None:
    assert all("cast" in answer["integer_average"]["error"] for answer in oracle())
    whole = InputSpec("x", (6, 3), torch.int64, (("dp", VARYING),))
    averaged = program(lambda b: wait(b, functional(b, "all_reduce", b.x, "avg", "dp")), mesh=DP, inputs=[whole])
    error = Lockstep().run(averaged).error
    assert error is not None
    assert "all_reduce averages int64; c10d divides no integers" in str(error.error)


@pytest.mark.parametrize(("gather", "shard", "sentence"), [(-1, 0, "counts dims from 0"), (1, 1, "by 2 ranks")])
def test_what_the_kernel_of_resharding_gets_wrong_is_refused(gather: int, shard: int, sentence: str) -> None:
    from tcverify.ops import ShapeError

    two = Mesh.grid({"dp": 2})
    with pytest.raises(ShapeError, match=sentence):
        program(reshard(gather, shard), mesh=two, inputs=[InputSpec("x", (6, 3))])
