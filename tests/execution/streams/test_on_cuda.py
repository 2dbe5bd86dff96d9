"""What CUDA devices have to show of streams: what queues in their place show."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tcverify.execution import executors, explore, explore_on_cuda, of_any_size
from tcverify.execution.streams.cuda_streams import CudaDevice
from tcverify.execution.streams.issue import issue
from tcverify.passes import Multistream
from tcverify.verification.verifier import verify
from tests.support.device_programs import ONE, TWO, cross, every_op, reduced, seen_of
from tests.support.lowered import program
from tests.support.programs import TP2
from tests.support.random_lowered import draw
from tests.support.stream_programs import Builder, is_lowered, lowered
from tests.support.stream_programs import program as lowerable

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_a_sound_program_is_right_under_delays() -> None:
    assert explore_on_cuda(program(cross, mesh=ONE), seeds=range(5)) == []
    assert explore_on_cuda(program(reduced, mesh=TP2), seeds=range(5)) == []


def test_a_missing_wait_shows_under_delay() -> None:
    found = explore_on_cuda(program(lambda b: cross(b, waits=False), mesh=ONE))
    assert [(o.kind, o.order) for o in found] == [("output", "starve stream 0, on CUDA")]
    found = explore_on_cuda(program(lambda b: cross(b, joins=False), mesh=ONE))
    assert [(o.kind, o.order) for o in found] == [("output", "starve stream 1, on CUDA")]


def test_a_collective_that_is_not_waited_for_shows() -> None:
    found = explore_on_cuda(program(lambda b: reduced(b, waits=False), mesh=TP2))
    assert {(o.rank, o.order) for o in found} == {(0, "starve stream 1, on CUDA"), (1, "starve stream 1, on CUDA")}


def test_shows_the_wrong_outputs_that_queues_show() -> None:
    wrong = 0
    for seed in range(3, 10):
        drawn = draw(seed, TWO)
        issued, _ = issue(drawn.program)
        orders = every_op(issued)
        found = explore(drawn.program, orders=orders)
        assert found is not None
        adversary = {(o.rank, o.text.split(" differs")[0]) for o in found.observations if o.kind == "output"}
        queues = seen_of(drawn.program, orders)
        device = seen_of(drawn.program, orders, CudaDevice())
        assert bool(device) == bool(queues), (seed, device, queues)
        assert {(rank, text.split(" in ")[0]) for rank, text in device} <= adversary, (seed, device)
        wrong += bool(device)
    assert wrong > 1


def test_deep_verification_runs_the_streams_on_the_device() -> None:
    def build(b: Builder) -> Any:
        return b.add(b.mm(b.all_reduce(b["x"])), b.mm(b.mm(b["r"])))

    original = lowerable(build)
    assert is_lowered(lowered(original))
    with executors("cuda") as executor_of:
        confirm = of_any_size("cuda", executor_of, original.world_size)
        verdict = verify(Multistream(), original, deep=True, confirm=confirm)
    assert verdict.status == "passed", (verdict.findings, verdict.doubts)
