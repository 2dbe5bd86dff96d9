"""Code of ranks on threads, whose collectives lockstep carries out."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tcverify.domains import NATIVE
from tcverify.errors import Unsupported
from tcverify.execution import Lockstep, Run
from tcverify.execution.asynchrony import TIMINGS, Moment
from tcverify.execution.compare import overlapping_outputs
from tcverify.ops import define_ops
from tcverify.program import VARYING, GraphBuilder, InputSpec, Mesh, Program, spmd_program
from tcverify.pytorch.executing import run_calls
from tcverify.pytorch.functional import functional_copy
from tcverify.strategies import DECODERS

define_ops()

CPU = torch.device("cpu")
c10d = torch.ops._c10d_functional
Call = Callable[[torch.Tensor], Any]


def summed(size: int = 2) -> Program:
    """A value that is summed over all ranks and waited for."""

    def build(b: GraphBuilder) -> Any:
        started = b.call("_c10d_functional::all_reduce", b.input("x"), "sum", "tp")
        return (b.call("_c10d_functional::wait_tensor", started),)

    return spmd_program(Mesh.grid({"tp": size}), [InputSpec("x", (3, 5), placements=(("tp", VARYING),))], build)


def run(calls: list[Call], timing: Moment = "issue") -> Run:
    return run_calls(summed(len(calls)), calls, CPU, timing)


def start(x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = c10d.all_reduce.default(x, "sum", "tp")
    return made


def right(x: torch.Tensor) -> list[torch.Tensor]:
    return [c10d.wait_tensor.default(start(x))]


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("strategy", ["functional", "compiled", "bucketing"])
def test_eager_code_gives_what_the_graph_gives(strategy: str, timing: Moment) -> None:
    decoder, mesh = DECODERS[strategy], Mesh.grid({"tp": 2})
    compared = 0
    for seed in range(8):
        program = decoder.decode(mesh, random.Random(seed).randbytes(decoder.width))
        try:
            calls = [functional_copy(program.graph_module(rank)) for rank in range(2)]
        except Unsupported:
            continue
        found = run_calls(program, calls, CPU, timing)
        expected = Lockstep().run(program, domain=NATIVE)
        assert found.finished, found.why
        for mine, theirs in zip(found.ranks, expected.ranks, strict=True):
            assert len(mine.outputs) == len(theirs.outputs)
            for one, other in zip([*mine.outputs, *mine.inputs], [*theirs.outputs, *theirs.inputs], strict=True):
                compared += 1
                assert torch.equal(one, other)
    assert compared > 20


@pytest.mark.parametrize(("timing", "poisoned"), [("issue", False), ("wait", True), ("apart", True)])
def test_who_does_not_wait_reads_poison(timing: Moment, poisoned: bool) -> None:
    found = run([lambda x: [start(x) + 0]] * 2, timing)
    assert bool(found.ranks[0].outputs[0].isnan().all()) == poisoned


@pytest.mark.parametrize(("timing", "seen"), [("issue", False), ("wait", True), ("apart", False)])
def test_a_write_to_an_operand_in_flight_shows_where_it_is_read_late(timing: Moment, seen: bool) -> None:
    def overwritten(x: torch.Tensor) -> list[torch.Tensor]:
        late, copied = c10d.all_gather_into_tensor.default(x, 2, "tp"), start(x)
        x.zero_()
        return [c10d.wait_tensor.default(late), c10d.wait_tensor.default(copied)]

    found = run([overwritten] * 2, timing)
    late, copied = (bool((output == 0).all()) for output in found.ranks[1].outputs)
    assert (late, copied) == (seen, False)


def test_a_rank_that_does_not_take_part_leaves_the_others_waiting_and_no_thread() -> None:
    before = threading.active_count()
    found = run([right, lambda x: [x]])
    assert found.hang is not None
    assert [one.rank for one in found.hang.waits] == [0]
    assert found.hang.finished == 1
    assert threading.active_count() == before


def test_ranks_that_call_other_collectives_disagree() -> None:
    found = run([right, lambda x: [c10d.wait_tensor.default(c10d.all_reduce.default(x, "max", "tp"))]])
    assert found.mismatch is not None
    assert "reduces by" in found.mismatch[0]


def test_code_that_raises_is_an_observation_and_what_is_not_supported_is_none() -> None:
    def broken(x: torch.Tensor) -> Any:
        raise KeyError("gone")

    def foreign(x: torch.Tensor) -> Any:
        raise Unsupported("a kernel")

    found = run([broken, right])
    assert str(found.ranks[0].error) == "node 'the code' raises KeyError: 'gone'"
    with pytest.raises(Unsupported, match="a kernel"):
        run([foreign, right])


def test_a_group_that_the_mesh_does_not_have_is_refused() -> None:
    found = run([lambda x: [c10d.wait_tensor.default(c10d.all_reduce.default(x, "sum", "dp"))], right])
    assert "group 'dp', which the mesh does not have" in str(found.ranks[0].error)


def test_results_share_memory_where_they_overlap() -> None:
    def parts(x: torch.Tensor) -> Any:
        made = x.new_zeros(6)
        return [made[:3], made[3:], made[2:4], made[:0], 7]

    assert overlapping_outputs(run([parts] * 2).ranks[0]) == [[], [], [0, 1], [], []]
