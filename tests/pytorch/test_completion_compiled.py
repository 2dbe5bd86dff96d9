"""What Inductor made, run on threads and on gloo with completion chosen, gives what its record gives in lockstep."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from tcverify.application.apply import apply_pass
from tcverify.application.loading import load_pass
from tcverify.execution import Lockstep
from tcverify.program import GraphBuilder, InputSpec, Mesh, Program, dumps, spmd_program
from tcverify.pytorch.adversary import When
from tcverify.pytorch.subjects import release
from tcverify.strategies.functional.compiled import WIDTH, decode_compiled

LINE = Mesh.grid({"tp": 2})

#: Seeds of drawn programs that Inductor compiles, and their numbers of ranks.
DRAWN = {9: 3, 10: 2, 11: 3, 13: 3, 46: 2, 54: 2}

#: What the interpreter calls each choice.
TIMINGS: dict[When, str] = {"early": "issue", "late": "wait", "apart": "apart"}

HOWS = ("threads", "gloo")


#: The threaded process group scatters sums only.
_REFUSED = "ReduceScatter does not support"


def drawn(seed: int) -> Program:
    return decode_compiled(Mesh.grid({"tp": DRAWN[seed]}), random.Random(seed).randbytes(WIDTH))


def rounding(program: Program) -> float:
    """How far apart results may be, relative to their size: some of the programs compute in bfloat16."""
    return 1e-2 if any(spec.dtype is torch.bfloat16 for spec in program.inputs) else 1e-4


def reducing(b: GraphBuilder) -> Any:
    total = b.call("_c10d_functional::all_reduce", b.call("aten::relu", b.input("x")), "sum", "tp")
    return b.call("aten::mul.Tensor", b.call("_c10d_functional::wait_tensor", total), 2)


def gathering(b: GraphBuilder) -> Any:
    """The memory of the operand is free for the product behind it, once the gather has read."""
    x = b.input("x")
    gathered = b.call("_c10d_functional::all_gather_into_tensor", b.call("aten::relu", x), 2, "tp")
    product = b.call("aten::mm", x, x)
    return product, b.call("_c10d_functional::wait_tensor", gathered)


BUILT = {"reducing": reducing, "gathering": gathering}


def built(name: str) -> Program:
    return spmd_program(LINE, [InputSpec("x", (4, 4))], BUILT[name])


@cache
def ran() -> dict[str, Any]:
    """What `compiled_ranks` prints of all cases."""
    cases: list[dict[str, Any]] = [
        {"name": f"drawn {seed}", "program": json.loads(dumps(drawn(seed))), "plant": None} for seed in DRAWN
    ]
    for name, plant in (("reducing", "no wait"), ("gathering", "operand reused")):
        for defect in (None, plant):
            cases.append(
                {"name": f"{name} {defect}", "program": json.loads(dumps(built(name))), "plant": defect},
            )
    for defect in (None, "no wait"):
        cases.append({"name": f"function {defect}", "ranks": 2, "plant": defect})
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.pytorch.compiled_ranks"],
        input=json.dumps(cases), check=False, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def same(actual: Any, expected: list[list[float]], rounding: float = 1e-4) -> bool:
    """Whether a rank gave these values, up to rounding."""
    if not isinstance(actual, list) or len(actual) != len(expected):
        return False
    for one, other in zip(actual, expected, strict=True):
        if not isinstance(one, list) or len(one) != len(other):
            return False
        a, b = torch.tensor(one, dtype=torch.float64), torch.tensor(other, dtype=torch.float64)
        if not torch.allclose(a, b, rtol=rounding, atol=rounding / 10, equal_nan=True):
            return False
    return True


def in_lockstep(program: Program, timing: str) -> list[list[list[float]]]:
    """Outputs of each rank, and what its inputs hold at the end."""
    run = Lockstep().run(program, timing=timing)
    assert run.finished, run.why
    values = [pytree.tree_leaves([result.outputs, result.inputs]) for result in run.ranks]
    return [[one.double().flatten().tolist() for one in rank] for rank in values]


@pytest.mark.parametrize("seed", DRAWN)
def test_the_record_in_lockstep_gives_what_compiled_code_gives(seed: int) -> None:
    program = drawn(seed)
    pair = apply_pass(load_pass("tcverify.pytorch.compiling:Compile", {}), program)
    assert pair.rewritten is not None
    for when, timing in TIMINGS.items():
        expected = in_lockstep(pair.rewritten, timing)
        for how in HOWS:
            actual = ran()[f"drawn {seed} {how} {when}"]
            if how == "threads" and _REFUSED in str(actual):
                continue
            right = [same(*both, rounding(program)) for both in zip(actual, expected, strict=True)]
            assert right == [True] * DRAWN[seed], (how, when)


def test_threads_refuse_few_drawn_programs() -> None:
    """So that what is compared above is not nothing."""
    compared = [seed for seed in DRAWN if _REFUSED not in str(ran()[f"drawn {seed} threads late"])]
    assert len(compared) >= len(DRAWN) // 2


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", BUILT)
def test_sound_code_gives_what_the_program_gives_at_any_time(name: str, how: str) -> None:
    expected = in_lockstep(built(name), "issue")
    for when in ("plain", *TIMINGS):
        actual = ran()[f"{name} None {how} {when}"]
        assert all(same(*both) for both in zip(actual, expected, strict=True)), (when, actual)


@pytest.mark.parametrize("how", HOWS)
def test_code_without_a_wait_shows_unless_collectives_are_early(how: str) -> None:
    expected = in_lockstep(built("reducing"), "issue")
    right = {
        when: [same(*both) for both in zip(ran()[f"reducing no wait {how} {when}"], expected, strict=True)]
        for when in TIMINGS
    }
    assert right == {"early": [True, True], "late": [False, False], "apart": [False, False]}
    if how == "threads":  # where collectives are carried out when they are issued
        assert all(same(*both) for both in zip(ran()["reducing no wait threads plain"], expected, strict=True))


@pytest.mark.parametrize("how", HOWS)
def test_an_operand_that_is_reused_before_the_wait_shows_if_it_is_read_late(how: str) -> None:
    expected = in_lockstep(built("gathering"), "issue")
    right = {
        when: [same(*both) for both in zip(ran()[f"gathering operand reused {how} {when}"], expected, strict=True)]
        for when in TIMINGS
    }
    assert right == {"early": [True, True], "late": [False, False], "apart": [True, True]}


def of_layer(rank: int) -> list[list[float]]:
    """What the function gives, in Python's numbers."""
    inputs = [[float(i) - 2 + other for i in range(6)] for other in (0, 1)]
    total = [2 * (a + b) for a, b in zip(*inputs, strict=True)]
    return [[max(a, 0.0) + 1 for one in inputs for a in one] + total]


#: Elsewhere a compiled function takes no notice of a mode that asks for that.
compiled_under_modes = pytest.mark.skipif(
    release(torch.__version__) < (2, 11), reason="TorchDynamo of torch 2.9 compiles anew under a dispatch mode"
)


@compiled_under_modes
@pytest.mark.parametrize("how", HOWS)
def test_a_compiled_function_gives_the_same_at_any_time(how: str) -> None:
    for when in ("plain", *TIMINGS):
        actual = ran()[f"function None {how} {when}"]
        assert [same(actual[rank], of_layer(rank)) for rank in (0, 1)] == [True, True], (when, actual)


@compiled_under_modes
@pytest.mark.parametrize("how", HOWS)
def test_a_compiled_function_without_waits_shows(how: str) -> None:
    """So that it is compiled code that runs under the mode: run eagerly, the function waits."""
    found = {
        when: [same(ran()[f"function no wait {how} {when}"][rank], of_layer(rank)) for rank in (0, 1)]
        for when in TIMINGS
    }
    assert found == {"early": [True, True], "late": [False, False], "apart": [False, False]}
