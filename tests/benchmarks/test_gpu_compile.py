"""The campaign on compiled code, on the CPU: what is planted is found, what is sound passes, and findings can be replayed."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tcverify.execution import RankResult
from tcverify.ops import define_ops
from tcverify.pytorch.effects import define_shapes

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")

#: Programs that torch.compile gets right, and in which each planted defect takes effect.
SOUND = (1005, 1007, 1012)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """What draws, compiles and judges programs."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import compiled_programs

    monkeypatch.setenv(compiled_programs.TRITON_CACHE, str(tmp_path))
    define_ops()
    define_shapes()
    return compiled_programs


@pytest.mark.parametrize("number", SOUND)
def test_a_sound_program_passes(programs: ModuleType, number: int) -> None:
    one, program = programs.drawn(number)
    outcome = programs.examine(number, one, program, CPU)
    assert (outcome.status, outcome.cause) == ("passed", "")
    assert outcome.seen.ranks
    assert outcome.seen.kernels
    assert outcome.collectives


@pytest.mark.parametrize("plant", ["value", "block", "wait"])
def test_a_planted_defect_is_found(programs: ModuleType, plant: str) -> None:
    one, program = programs.drawn(0, plant)
    outcome = programs.examine(0, one, program, CPU, plant)
    assert outcome.seen.planted
    assert outcome.status == "refuted", outcome
    assert programs.examine(0, one, program, CPU).status == "passed"


def test_an_exception_of_inductor_is_a_finding_with_its_place(
    programs: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.scheduler import Scheduler

    def fails(*_: object) -> None:
        raise KeyError("gone")

    monkeypatch.setattr(Scheduler, "codegen", fails)
    one, program = programs.drawn(1007)
    outcome = programs.examine(1007, one, program, CPU)
    assert outcome.status == "refuted"
    assert outcome.cause.startswith("Inductor raises InductorError: KeyError: 'gone'")


def test_results_that_are_nan_are_wrong_unless_values_come_close_to_the_range(
    programs: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, program = programs.drawn(2, "wait")
    calls = [lambda *_, k=k: undefined(k) for k in range(program.world_size)]
    originals = [programs.placed(program.graph_module(rank), CPU) for rank in range(program.world_size)]

    def undefined(rank: int) -> object:
        return programs.pytree.tree_map(lambda v: v * float("nan"), eager.ranks[rank].outputs)

    eager = programs.run_calls(program, originals, CPU)
    reference = programs.Lockstep().run(program)
    after = programs.run_calls(program, calls, CPU)
    assert programs.judged(program, reference, eager, after)[0].startswith("wrong-value: output N is wrong")
    monkeypatch.setattr(programs, "range_used", lambda _: 0.5)
    assert programs.judged(program, reference, eager, after).reason == "overflow"


def test_a_defect_is_known_by_a_part_of_the_program_and_by_the_options_that_it_needs(programs: ModuleType) -> None:
    name = "overlap-reorders-collectives"
    case = next(case for finding, case in programs.known_defects() if finding.folder.name == name)
    wrong, hangs = (programs.Outcome(0, "compile", cause=cause) for cause in ("wrong-value: output N", "ranks wait"))
    assert programs.known_as(case, wrong) == name
    assert programs.known_as(case, hangs) == ""
    assert programs.known_as(replace(case, options={**case.options, "compiled_ranks": "all"}), wrong) == ""
    assert programs.known_as(replace(case, options={}), wrong) == ""


def test_results_that_lie_otherwise_in_memory_differ(programs: ModuleType) -> None:
    def rank(output: torch.Tensor, given: torch.Tensor) -> RankResult:
        return RankResult(0, outputs=[output], inputs=[given], input_names=["x"])

    x, turned = torch.zeros(3, 4), torch.zeros(4, 3).t()
    differs = programs.other_layout
    assert differs(rank(x, turned), rank(x.clone(), turned)) is None
    assert differs(rank(x, turned), rank(turned.clone(), turned))[0] == "an output has another stride"
    assert differs(rank(x.view(12), x), rank(x.clone().view(12), x))[1] == (
        "output 0 shares memory with the inputs [] instead of ['x']"
    )
    row = torch.zeros(1, 4)
    assert differs(rank(row, x), rank(torch.zeros(8).as_strided((1, 4), (7, 1)), x)) is None


def test_options_that_a_finding_does_not_need_are_left_out(programs: ModuleType) -> None:
    one, program = programs.drawn(3, "value")
    program = replace(program, options={"inplace_buffers": False, "aggressive_fusion": True})
    outcome = programs.Outcome(3, one.name, "refuted", "wrong", plant="value")

    def examined(number: int, subject: object, given: object, device: object) -> object:
        return programs.Outcome(number, "compile", cause="wrong" if "aggressive_fusion" in given.options else "")  # type: ignore[attr-defined]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "examine", examined)
        assert programs.with_fewer_options(outcome, one, program, CPU, 60.0).options == {"aggressive_fusion": True}


@pytest.mark.slow
def test_a_worker_that_dies_is_a_finding_and_is_replayed(tmp_path: Path, programs: ModuleType) -> None:
    script = str(ROOT / "benchmarks" / "gpu_compile.py")
    ran = subprocess.run(
        [sys.executable, script, "--rehearse", "--seconds", "200", "--workers", "2", "--programs", "1", "--first", "1007"],
        cwd=tmp_path, text=True, capture_output=True, timeout=300, check=False,
    )  # fmt: skip
    assert "| crash | 1 | 1 | 1 |" in ran.stdout
    assert ran.returncode == 0, ran.stdout
    one, program = programs.drawn(0, "wait")
    outcome = programs.Outcome(0, one.name, plant="wait", program=programs.dumps(program))
    kept = tmp_path / "case.json"
    kept.write_text(json.dumps({**vars(outcome), "seen": {}, "program": json.loads(outcome.program)}))
    again = subprocess.run(
        [sys.executable, script, "--rehearse", "--replay", str(kept)],
        text=True, capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    assert again.returncode == 1, again.stderr
    assert again.stdout.startswith("refuted: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu_compile.py")],
        cwd=tmp_path, text=True, capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    assert ran.returncode == 2
    assert ran.stderr.splitlines()[-1] == "there is no CUDA device; --rehearse runs on the CPU"
