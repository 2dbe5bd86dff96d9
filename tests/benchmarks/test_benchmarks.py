"""Every benchmark runs to its end at a small size and prints its rows: with both sides, and what they are called. Its times are
nobody's business here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
BENCHMARKS = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))

#: What another one imports.
PARTS = {
    "bare", "clock_device", "clock_ops", "clock_profile", "clock_schedules", "clock_tables", "compiled_programs", "gpu",
    "production_models",
}  # fmt: skip

#: Options that make a benchmark small, and regular expressions of what it has to print.
SMALL: dict[str, tuple[str, tuple[str, ...]]] = {
    "diagnosis": ("--programs 3 --shrink-time 1 --tampered 3", (r"(?m)^all +(\d+) of \1 named", "0 said to diverge")),
    "domains": ("--programs 1 --sound 1", ("first program +float64 +native +exact", r"(?m)^ResidualNotSliced +#0 +#0 +#0")),
    "dtensor": ("", (r"\| transition \| DTensor \| here \|", r"\| P → R \| all_reduce \| all_reduce \|")),
    "exact": ("--programs 1", (r"(?m)^matmul +[\d.]+ ms +[\d.]+ ms", r"(?m)^structured +1 ")),
    "exposed": ("--programs 3", ("3 programs of strategy functional on 4 ranks", r"(?m)^sink_waits ")),
    "findings": (
        "run dtensor-topk-cache", (r"\| `dtensor-topk-cache` \| bad \| bad \| [\d.]+ \|", "0 of 1 differ from what is said")
    ),
    "first_finding": ("--seeds 1 --programs 5 ResidualNotSliced", (r"ResidualNotSliced +\d +[\d.]+ +> 5 +> [\d.]+ +\d+%",)),
    "gallery": ("", (r"(?m)^residual-added-twice +wrong-value +3 nodes +yes",)),
    "gpu_compile": (
        "--rehearse --seconds 300 --workers 2 --programs 5 --first 1007",
        ("a rehearsal", r"\| programs \| 5 \|", r"\| value \| 4 \| [34] \| [34] \|", r"\| crash \| 1 \| 1 \| 1 \|"),
    ),
    "limit": (
        "--programs 6 --rounds 1 --world-size 2",
        ("the bare collectives .* 100% on the clock", "pairs, all in flight", "campaign: ", "lockstep", "threaded process group"),
    ),
    "gpu_clocks": (
        "--rehearse",
        (r"rehearsal on the CPU", r"(?m)^name = \"measured\"", r"\| matrix product \| \d+ ", r"\| all \| 8 \| "),
    ),
    "gpu_native": (
        "--rehearse --seconds 300 --workers 2 --programs 12",
        (r"(?m)^1[12] sound programs, 0 false alarms; 0 planted losses never found", r"kept in fp8 \| 4 \| 4 \|"),
    ),
    "gpu_streams": (
        "--rehearse --seconds 300 --workers 2 --drawn 4",
        (r"\| TokenSharedByCollectives \| \d+ \| race.* \| wrong value \| \d+ of 20 \| yes \|", r", 0 disagreements\."),
    ),
    "minimise": ("--nodes 50 --limit 2", ("moves alone +cut down first", "transformer, raises, 4 ranks +pass-raised")),
    "multistream": ("--largest 100", (r"(?m)^chain +100 ", r"(?m)^branching +")),
    "mutants": ("--programs 2 --seeds 1", ("mutant +structured +mixed +wild", r"(?m)^ResidualNotSliced ")),
    "native": ("--programs 1", ("false alarms: 0 / ", r"found in (\d+) of \1")),
    "overlap": ("--programs 2", (r"(?m)^multistream +overlap +2 +2 ",)),
    "pytorch": ("run --minutes 0.1 --slice 5", (r"seed 0 .*: \d+ programs, \d+ changed",)),
    "production": (
        "--layers 1 --mesh 2x4 --only llama-tp --passes identity",
        (r"llama-tp_2x4_forward .* passed ", r"llama-tp_2x4_backward .* passed "),
    ),
    "production_defects": (
        "--layers 1 --mesh 2x2 --only residual_twice",
        (r"schedule_overlap_bucketing .* none .* passed", r"residual_twice .* refuted: .* wrong-value +. +[1-8] "),
    ),
    "reordering": ("--largest 500 --passes sink_waits", (r"(?m)^chain +sink_waits +", r"(?m)^backward +\(dependencies\)")),
    "power": (
        "tests.support.searched_passes --sound cancels_negations --seconds 40 --world-size 2 --side search",
        (r"cancels_negations_for_all +[\d.]+ s, [\d,]+", "search: 1 of 1"),
    ),
    "recall": (
        "torch:fx_graph_cse --seconds 6 --world-size 2 --side search",
        (r"\| torch:fx_graph_cse \| cse-merges-side-effects \| found \|", "search: [12] of 2"),
    ),
    "resharding": ("--every 200 --largest 500", ("every row between the meshes", "gather, collective", "growth: chain")),
    "scale": ("--programs 1 --ranks 2 --layers 1 --markdown", (r"\| 2 \| 1 of 1 \|", r"(?m)^\| 15 \| ")),
    "soak": ("--programs 100 --rows 4", ("verdict passed, exit code 0; left behind: nothing",)),
    "steering": (
        "--programs 10 --seeds 1 --ways none tcverify.passes:SequenceParallel=mixed",
        (r"without [\d.]+ ms, recording [\d.]+ ms",),
    ),
    "throughput": (
        "--programs 10 --world-size 2 --spawned 1",
        (r"campaign, lockstep and gloo +[\d.]+ programs/s", r"pairs, torch.multiprocessing.spawn +[\d.]+ programs/s"),
    ),
}  # fmt: skip

#: Benchmarks that need the extra "benchmarks".
EXTRA = {"soak": "psutil", "scale": "matplotlib"}


def test_each_is_known_here() -> None:
    assert {*SMALL, *PARTS} == set(BENCHMARKS)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_it_runs_to_its_end(name: str, tmp_path: Path) -> None:
    if name in EXTRA:
        pytest.importorskip(EXTRA[name], reason=f"{EXTRA[name]} is missing: pip install -e '.[benchmarks]'")
    options, expected = SMALL[name]
    ran = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *options.split()], cwd=tmp_path, text=True,
        env={**os.environ, "COLUMNS": "200"}, capture_output=True, timeout=600, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    for pattern in expected:
        assert re.search(pattern, ran.stdout), f"no {pattern!r} in\n{ran.stdout}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_device_all_is_said_to_be_skipped(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--out", str(tmp_path / "out")]
    ran = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=100, check=False)
    assert ran.returncode == 2
    said = ran.stderr.splitlines()[-1]  # torch may warn that there is no numpy
    assert said == "There is no CUDA device. Skipped: tests, streams, native, clocks, compile."
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", sorted(set(BENCHMARKS) - PARTS))
def test_it_says_how_it_is_called(name: str) -> None:
    assert f"python benchmarks/{name}.py" in (ROOT / "benchmarks" / f"{name}.py").read_text().partition('\n"""')[0]
