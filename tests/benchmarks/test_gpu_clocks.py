"""The arithmetic of the cost model's comparison with a device, its profile in TOML, and its checks, tried on the CPU."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tcverify.cost import PROFILES, parse_profile
from tcverify.program import GraphBuilder, InputSpec, Mesh, spmd_program

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A script there imports others by their bare names."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    before = set(sys.modules)
    yield
    for name in {name for name in sys.modules if name.startswith("clock_")} - before:
        del sys.modules[name]


def test_rank_correlation() -> None:
    from clock_tables import ranks_of, spearman

    assert ranks_of([3.0, 1.0, 3.0, 2.0]) == [3.5, 1.0, 3.5, 2.0]
    assert spearman([1, 2, 3, 4], [10, 20, 30, 1000]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]) == pytest.approx(0.8)  # 1 − 6 Σd² / n(n² − 1)
    assert math.isnan(spearman([1, 1, 1], [1, 2, 3]))
    assert math.isnan(spearman([1, 2], [1, 2]))


def test_share_within_a_factor() -> None:
    from clock_tables import within

    assert within([0.4, 0.5, 1.0, 2.0, 2.1], 2) == pytest.approx(0.6)
    assert math.isnan(within([], 2))


def test_profile_of_a_known_device() -> None:
    from clock_device import CpuClock
    from clock_profile import Measured, profile_section

    class Named(CpuClock):
        name = "NVIDIA H200"  # type: ignore[assignment]

    rates = {torch.float32: 50e12, torch.bfloat16: 700e12, torch.float8_e4m3fn: 1200e12}
    found = Measured(rates, 4.3e12, 2e-6, 1.5e-6, {"add": 4e-6}, 1e-6, ["products of int8: none"])
    markdown, profile, text = profile_section(Named(), found)
    again = parse_profile(text, "the text")
    known = PROFILES["h100-sxm"]
    assert (profile.name, again.name) == ("h200", "h200")
    assert dict(again.matmul_flops) == pytest.approx(dict(known.matmul_flops))
    assert again.interconnects == known.interconnects
    assert again.memory_rate == pytest.approx(4.3e12, rel=1e-3)
    assert again.matmul_rate(torch.bfloat16) == pytest.approx(700e12, rel=1e-3)  # its share is the median of three
    assert (again.launch.matmul, again.launch.vector) == (2e-6, 1.5e-6)
    assert any("NVIDIA H200" in source and torch.__version__ in source for source in again.sources)
    assert "Not measured: products of int8: none" in markdown


def test_profile_of_an_unknown_device_where_little_could_be_measured() -> None:
    from clock_device import CpuClock
    from clock_profile import Measured, profile_text

    again = parse_profile(profile_text(CpuClock(), Measured({torch.float32: 1e12}, 0.0)), "the text")
    assert again.matmul_rate(torch.float32) == pytest.approx(1e12)
    assert again.memory_rate == pytest.approx(PROFILES["h100-sxm"].memory_rate, rel=1e-3)


def test_time_of_an_op_and_a_replay_without_work() -> None:
    from clock_device import CpuClock, CpuReplay, Replay, Work
    from clock_ops import time_op

    def double(b: GraphBuilder) -> Any:
        x = b.input("x")
        return b.call("aten::add_.Tensor", b.call("aten::mm", x, x), 1.0)

    program = spmd_program(Mesh.grid({"tp": 1}), [InputSpec("x", (8, 8))], double)
    mm, add = [node for node in program.graph_module(0).graph.nodes if node.op == "call_function"]
    for node in (mm, add):
        seconds, same = time_op(CpuClock(), node, 3)
        assert 0 < seconds < 1
        assert same

    class Lazy(CpuReplay):
        def run(self) -> None:
            pass

    class LazyClock(CpuClock):
        def capture(self, work: Work) -> Replay:
            return Lazy(work)

    assert not time_op(LazyClock(), mm, 3)[1]
    assert not time_op(LazyClock(), add, 3)[1]


def test_schedules_compute_what_programs_do() -> None:
    from clock_device import CpuClock
    from clock_schedules import TimedSchedule, measure_schedules

    found = measure_schedules(CpuClock(), PROFILES["h100-sxm"], 1e-6, True, 6, math.inf)
    assert len(found.timed) == 6
    assert not found.refused
    assert not found.wrong
    assert all(t.predicted < t.predicted_serial for t in found.timed)
    fast = TimedSchedule("copy", 1, 2, 1.0, 2.0, [1.0, 1.1, 1.2], [2.0, 2.1, 2.2], True)
    slow = TimedSchedule("copy", 1, 2, 1.0, 2.0, fast.one, fast.several, True)
    noisy = TimedSchedule("copy", 1, 2, 1.0, 2.0, [1.0, 2.0, 3.0], [1.1, 2.1, 3.1], True)
    assert [t.outcome for t in (fast, slow, noisy)] == ["faster", "slower", "undecided"]
    assert fast.gain == pytest.approx(2.1 / 1.1)


def test_schedules_that_compute_something_else_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from clock_device import CpuClock
    from clock_schedules import DeviceProgram, measure_schedules

    calls = iter(range(1_000_000))

    def unsteady(program: Any, step: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Each time another sum."""
        return tensor + next(calls)

    monkeypatch.setattr(DeviceProgram, "communicate", unsteady)
    found = measure_schedules(CpuClock(), PROFILES["h100-sxm"], 1e-6, True, 4, math.inf)
    assert found.wrong
