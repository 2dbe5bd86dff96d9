"""Scripts hold the program as it is: its values, its ops, the graph of each rank."""

from __future__ import annotations

import ast
import math
from dataclasses import replace

import pytest
import torch

from tcverify.cases.counterexample import Counterexample
from tcverify.errors import Unsupported
from tcverify.program import GraphBuilder, InputSpec, Mesh, MeshDim, Program, Recipe, spmd_program
from tcverify.pytorch.end_to_end.code import input_literals, rank_code, text_of
from tcverify.pytorch.end_to_end.script import error_of, limits_of, make_script
from tcverify.pytorch.end_to_end.trial import pipeline_of
from tests.pytorch.end_to_end.test_trial import case_of, gathered, of_two

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES)
def test_literals_are_the_values(dtype: torch.dtype) -> None:
    kind = "mask" if dtype == torch.bool else "wide" if dtype == torch.int64 else "uniform"
    recipe = Recipe(kind, 1.0 if dtype.is_floating_point else 5.0)
    specs = [InputSpec("x", (2, 3), dtype, recipe=recipe), InputSpec("y", (0, 2), dtype)]
    program = of_two(specs, lambda b: (b.input("x"), b.input("y")))
    for rank, literals in enumerate(input_literals(program)):
        for literal, value in zip(literals, program.values(rank), strict=True):
            again = eval(literal, {"torch": torch})  # noqa: S307 - it is what scripts hold
            assert (again.dtype, again.shape) == (value.dtype, value.shape)
            assert torch.equal(again, value)


def test_what_ranks_run_differently_are_different_functions() -> None:
    case = case_of("wait-alias-unknown")
    first = of_two([InputSpec("x", (4,))], lambda b: b.call("aten::relu", b.input("x")))
    alike = make_script(_of(case, first), pipeline_of(case), "users")
    assert "STEPS = [step, step]" in alike
    program = case_of("default-partition-repeats-effects").program
    texts = [text_of(rank_code(program, rank), "step") for rank in range(2)]
    assert texts[0] != texts[1]
    apart = make_script(_of(case, program), pipeline_of(case), "users")
    assert "STEPS = [step_0, step_1]" in apart


def _of(case: Counterexample, program: Program) -> Counterexample:
    return replace(case, program=program)


def test_names_of_the_script_are_left_to_it() -> None:
    program = of_two([InputSpec("step", (2,))], lambda b: b.call("aten::relu", b.input("step")))
    code = rank_code(program, 0)
    assert code.parameters == ("step_",)
    assert code.inputs == ("step",)
    assert "(step_)" in code.lines[0].text


def test_ops_of_programs_alone_are_refused() -> None:
    program = of_two([InputSpec("x", (2,))], lambda b: b.call("tensor_cast::gelu", b.input("x")))
    with pytest.raises(Unsupported, match="which torch alone does not have"):
        rank_code(program, 0)


def test_groups_out_of_order_are_refused() -> None:
    mesh = Mesh(2, (MeshDim("tp", ((1, 0),)),))
    program = spmd_program(mesh, [InputSpec("x", (2,))], lambda b: b.call("aten::relu", b.input("x")))
    case = case_of("wait-alias-unknown")
    with pytest.raises(Unsupported, match=r"dist\.new_group sorts ranks"):
        make_script(_of(case, program), pipeline_of(case), "users")


def test_limits_are_those_of_rounding() -> None:
    specs = [InputSpec("x", (64,)), InputSpec("n", (2,), torch.int64)]

    def build(b: GraphBuilder) -> object:
        x, n = b.input("x"), b.input("n")
        return b.call("aten::sum", x), b.call("aten::add.Tensor", n, n)

    program = of_two(specs, build)
    limits = limits_of(program, [rank_code(program, rank) for rank in range(2)])
    assert set(limits) == {"output 0"}  # integers, and what is only passed on, have to be equal
    total = abs(program.values(0)[0].sum().item())
    assert 0 < limits["output 0"] < 1e-3 * max(1.0, total)
    assert math.isfinite(limits["output 0"])


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("collective-waited-twice", ("AssertionError", "process_collective_bucket")),
        ("deduplicated-waits-out-of-order", ("RuntimeError", "check_arg")),
        ("async-tp-negative-dim", ("ValueError", None)),
        ("wait-alias-unknown", None),
    ],
)
def test_the_exception_of_a_finding(name: str, error: tuple[str, str | None] | None) -> None:
    assert error_of(case_of(name), by_function=True) == error


def test_scripts_import_torch_alone() -> None:
    case = _of(case_of("bucketing-cat-promotes-integers"), gathered())
    for way in ("users", "call"):
        tree = ast.parse(make_script(case, pipeline_of(case), way))  # type: ignore[arg-type]
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        known = {"torch", "datetime", "os", "sys", "tempfile", "time", "traceback", "warnings"}
        assert {name.partition(".")[0] for name in names} <= known


def test_what_a_file_calls_a_placement_is_no_code() -> None:
    case = case_of("dtensor-fill-partial")
    program = replace(case.program, options={"x": "S0)]; print(['"})
    with pytest.raises(Unsupported, match="is no placement"):
        make_script(replace(case, program=program), pipeline_of(replace(case, program=program)), "users")
