"""Ranks that are stacked compute what each computes alone; those that cannot be stacked run one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, seed, settings

from tcverify import verify
from tcverify.campaign.hypothesis_settings import SETTINGS
from tcverify.domains import FLOAT64, NATIVE, Domain, Exact
from tcverify.execution import Lockstep, Run
from tcverify.execution.asynchrony import TIMINGS
from tcverify.execution.compare import compare_ranks, overlapping_outputs
from tcverify.execution.lockstep.lockstep import _execute
from tcverify.execution.lockstep.rank_rows import Alignment
from tcverify.execution.lockstep.stacked import run_stacked
from tcverify.passes import SequenceParallel
from tcverify.program import (
    PARTIAL,
    REPLICATED,
    VARYING,
    GraphBuilder,
    InputSpec,
    Mesh,
    Placement,
    Program,
    spmd_program,
)
from tcverify.program import shard as sharded
from tcverify.strategies import programs_of
from tests.mutants.sequence_parallel import FirstChunkForAll

MESH = Mesh.grid({"dp": 2, "tp": 8})


def one_by_one(program: Program, domain: Domain = FLOAT64) -> Run:
    return _execute(program, False, None, domain=domain)


def made(
    build: Callable[[GraphBuilder], Any], placement: Placement = VARYING, shape: tuple[int, ...] = (8, 4)
) -> Program:
    return spmd_program(MESH, [InputSpec("x", shape, torch.float64, (("tp", placement),))], build)


def same(plain: Run, stacked: Run, *, exactly: bool) -> None:
    for expected, actual in zip(plain.ranks, stacked.ranks, strict=True):
        assert (actual.structure, actual.input_names) == (expected.structure, expected.input_names)
        assert actual.calls == expected.calls
        assert overlapping_outputs(actual) == overlapping_outputs(expected)
        for delta in compare_ranks(expected, actual):
            assert delta.problem is None
            assert delta.difference <= (0 if exactly else 1e-12 * delta.scale)
        for mine, theirs in zip(actual.inputs, expected.inputs, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("domain", [FLOAT64, Exact(0)], ids=lambda domain: domain.name)
@pytest.mark.parametrize("strategy", ["mixed", "moe", "wild", "functional"])
def test_drawn_programs_compute_the_same(strategy: str, domain: Domain) -> None:
    seen: Counter[bool] = Counter()

    @seed(5)
    @settings(SETTINGS, max_examples=8)
    @given(programs_of(strategy, mesh=MESH))
    def compare(program: Program) -> None:
        plain, stacked = one_by_one(program, domain), run_stacked(program, domain)
        seen[stacked is not None] += 1
        if stacked is not None:
            same(plain, stacked, exactly=domain.kind == "exact")

    compare()
    assert seen[True] >= (2 if strategy == "functional" else 4)


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("strategy", ["bucketing", "overlap"])
def test_what_is_under_way_reads_and_writes_at_the_same_times(strategy: str, timing: str) -> None:
    seen: Counter[bool] = Counter()

    @seed(7)
    @settings(SETTINGS, max_examples=6)
    @given(programs_of(strategy, mesh=MESH))
    def compare(program: Program) -> None:
        plain = _execute(program, False, None, timing=timing)
        stacked = run_stacked(program, FLOAT64, timing)
        seen[stacked is not None] += 1
        if stacked is not None:
            same(plain, stacked, exactly=False)

    compare()
    assert seen[True] >= 2


RACES: dict[str, Callable[[GraphBuilder, Any, Any], Any]] = {
    "it writes into what a collective reads": lambda b, x, start: b.call("aten::add_.Tensor", x, 1.0),
    "it reads what a collective writes": lambda b, x, start: b.call("aten::neg", start),
    "neither": lambda b, x, start: b.call("aten::neg", x),
}


@pytest.mark.parametrize("race", RACES)
def test_races_show_at_the_extremes(race: str) -> None:
    """As they do where ranks run one by one: at the wait the collective has read, or written, something else."""

    def build(b: GraphBuilder) -> Any:
        x = b.input("x")
        start = b.call("_c10d_functional::all_to_all_single", x, [1] * 8, [1] * 8, "tp")
        beside = RACES[race](b, x, start)
        return beside, b.call("_c10d_functional::wait_tensor", start)

    program = made(build)
    runs = {timing: run_stacked(program, FLOAT64, timing) for timing in TIMINGS}
    assert all(runs.values())
    for timing, run in runs.items():
        assert run is not None
        same(_execute(program, False, None, timing=timing), run, exactly=False)
    outputs = [torch.stack(list(run.ranks[3].outputs)) for run in runs.values() if run is not None]
    alike = all(torch.allclose(outputs[0], other, equal_nan=True) for other in outputs[1:])
    assert alike == (race == "neither")


def test_an_op_that_ranks_call_with_other_constants_runs_rank_by_rank() -> None:
    """Between others that run at once."""

    def build(b: GraphBuilder) -> Any:
        x = b.call("aten::relu", b.input("x"))
        scaled = b.call("aten::mul.Tensor", x, b.constant("scale", float))
        return b.call("aten::neg", scaled)

    program = made(build)
    stacked = run_stacked(program, FLOAT64)
    assert stacked is not None
    same(one_by_one(program), stacked, exactly=True)


def test_what_no_rank_tells_from_others_is_computed_once() -> None:
    def build(b: GraphBuilder) -> Any:
        return b.call("aten::neg", b.input("x"))

    stacked = run_stacked(made(build, REPLICATED), FLOAT64)
    assert stacked is not None
    assert len({result.outputs[0].data_ptr() for result in stacked.ranks[1:]}) == 1


def test_slices_and_sums_of_groups() -> None:
    def build(b: GraphBuilder) -> Any:
        x = b.input("x")
        total = b.call("tensor_cast::all_reduce", x, b.rank, b.group("tp"))
        return x, b.call("aten::view", x, [4, 8]), total

    program = made(build, PARTIAL)
    stacked = run_stacked(program, FLOAT64)
    assert stacked is not None
    same(one_by_one(program), stacked, exactly=False)


@pytest.mark.parametrize(
    ("why", "build", "placement", "shape"),
    [
        ("shards of two sizes", lambda b: b.call("aten::neg", b.input("x")), sharded(0), (9, 4)),
        ("shards of two sizes, written", lambda b: b.call("aten::neg_", b.input("x")), sharded(0), (9, 4)),
    ],
)
def test_what_cannot_be_stacked_runs_rank_by_rank(
    why: str, build: Callable[[GraphBuilder], Any], placement: Placement, shape: tuple[int, ...]
) -> None:
    program = made(build, placement, shape)
    assert run_stacked(program, FLOAT64) is None, why
    run = Lockstep().run(program)
    assert run.finished
    same(one_by_one(program), run, exactly=True)


def test_what_is_written_in_place_is_each_ranks_own() -> None:
    def build(b: GraphBuilder) -> Any:
        x, out = b.input("x"), b.call("aten::zeros", [16, 4], dtype=torch.float64)
        first = b.call("aten::slice.Tensor", out, 0, 0, 8)
        b.call("aten::copy_", first, x)
        return out, b.call("aten::add_.Tensor", x, b.constant("r", lambda rank: rank))

    program = made(build)
    stacked = run_stacked(program, FLOAT64)
    assert stacked is not None
    same(one_by_one(program), stacked, exactly=True)


def rows_of(run: Run, output: int) -> int:
    """How many places in memory an output has, on all ranks."""
    return len({rank.outputs[output].data_ptr() for rank in run.ranks})


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("out", [False, True], ids=["into a new tensor", "into a buffer"])
def test_what_is_equal_on_some_ranks_is_kept_once_for_these(timing: str, *, out: bool) -> None:
    """Shards differ over both dims; what is gathered over one is equal over it, and what is computed from that too."""

    def build(b: GraphBuilder) -> Any:
        w, x = b.input("w"), b.input("x")
        into = {"out": b.call("aten::empty.memory_format", [32, 4], dtype=torch.float64)} if out else {}
        name = "all_gather_into_tensor_out" if out else "all_gather_into_tensor"
        whole = b.call("_c10d_functional::wait_tensor", b.call(f"_c10d_functional::{name}", w, 8, "tp", **into))
        mine = b.call("aten::mm", x, b.call("aten::t", whole))
        return b.call("aten::neg", whole), mine, b.call("aten::add.Tensor", whole, b.constant("r", float))

    inputs = [
        InputSpec("w", (64, 4), torch.float64, (("dp", sharded(0)), ("tp", sharded(0)))),
        InputSpec("x", (2, 4), torch.float64, (("tp", VARYING),)),
    ]
    program = spmd_program(MESH, inputs, build)
    stacked = run_stacked(program, FLOAT64, timing)
    assert stacked is not None
    same(_execute(program, False, None, timing=timing), stacked, exactly=False)
    assert [rows_of(stacked, output) for output in range(3)] == [2, 16, 16]


@pytest.mark.parametrize("timing", TIMINGS)
def test_what_is_still_written_into_is_kept_for_each_rank(timing: str) -> None:
    """Though it is equal on some: a buffer that is gathered into, then written into on every rank."""

    def build(b: GraphBuilder) -> Any:
        x = b.input("x")
        buffer = b.call("aten::zeros", [64, 4], dtype=torch.float64)
        started = b.call("_c10d_functional::all_gather_into_tensor_out", x, 8, "tp", out=buffer)
        whole = b.call("_c10d_functional::wait_tensor", started)
        negative = b.call("aten::neg", whole)
        b.call("aten::mul_.Tensor", b.call("aten::slice.Tensor", buffer, 0, 0, 8), b.constant("r", float))
        return negative, b.call("aten::neg", whole), x

    program = made(build)
    stacked = run_stacked(program, FLOAT64, timing)
    assert stacked is not None
    same(_execute(program, False, None, timing=timing), stacked, exactly=True)


def summed(b: GraphBuilder, value: Any, dim: str = "tp") -> Any:
    """What only a collective reads shows in what it gives alone."""
    return waited(b, b.call("_c10d_functional::all_reduce", value, "sum", dim))


def waited(b: GraphBuilder, value: Any) -> Any:
    return b.call("_c10d_functional::wait_tensor", value)


def _own_slice(b: GraphBuilder, value: Any, name: str = "slice") -> Any:
    first, last = (b.constant(f"{name}_{end}", lambda rank, end=end: 8 * (rank % 8 + end)) for end in range(2))
    return b.call("aten::slice.Tensor", value, 0, first, last)


def _negative_view(b: GraphBuilder, x: Any) -> Any:
    return summed(b, b.call("aten::_neg_view", x))


def _reduced_twice(b: GraphBuilder, x: Any) -> Any:
    listed = b.call("_c10d_functional::all_reduce_coalesced_", [x, x], "sum", "tp")
    return summed(b, waited(b, b.getitem(listed, 0)), "dp")


def _read_before_the_wait(b: GraphBuilder, x: Any) -> Any:
    started = b.call("_c10d_functional::all_reduce_", b.call("aten::neg", x), "sum", "tp")
    return b.call("aten::mul.Tensor", started, 2.0), waited(b, started)


def _written_by_rank(b: GraphBuilder, x: Any) -> Any:
    buffer = b.call("aten::zeros", [64, 4], dtype=torch.float64)
    b.call("aten::copy_", _own_slice(b, buffer), x)
    return summed(b, buffer)


def _picked_by_rank(b: GraphBuilder, x: Any) -> Any:
    parts = b.call("aten::split.Tensor", b.call("aten::neg", x), 1)
    mine = b.call("python::getitem", parts, b.constant("mine", lambda rank: rank % 8))
    b.call("aten::add_.Tensor", mine, 5.0)
    return summed(b, b.call("aten::cat", [b.getitem(parts, i) for i in range(8)]))


def _one_part_for_all(b: GraphBuilder, x: Any) -> Any:
    """A rank constant that picks the same part on all ranks, of what is equal on all."""
    total = summed(b, summed(b, x), "dp")
    part = b.call("aten::slice.Tensor", total, 0, b.constant("start", lambda rank: min(rank, 0) + 2 * (rank > 99)), 4)
    mine = b.call("aten::slice.Tensor", total, 0, b.constant("end", lambda rank: -8 - rank % 2), 4)
    return b.call("aten::add.Tensor", part, b.call("aten::exp", mine))


def _view_of_what_is_under_way(b: GraphBuilder, x: Any) -> Any:
    started = b.call("_c10d_functional::all_gather_into_tensor", x, 8, "tp")
    view = _own_slice(b, started)
    waited(b, started)
    return summed(b, b.call("aten::neg", view), "dp")


def _two_into_one_buffer(b: GraphBuilder, x: Any) -> Any:
    buffer = b.call("aten::zeros", [128, 4], dtype=torch.float64)
    halves = [b.call("aten::slice.Tensor", buffer, 0, start, start + 64) for start in (0, 64)]
    first, second = (
        b.call("_c10d_functional::all_gather_into_tensor_out", own, 8, "tp", out=half)
        for own, half in zip((x, b.call("aten::neg", x)), halves, strict=True)
    )
    waited(b, second)
    both = b.call("aten::mul.Tensor", buffer, 2.0)
    waited(b, first)
    return summed(b, both, "dp")


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize(
    "build",
    [
        _negative_view, _reduced_twice, _read_before_the_wait, _written_by_rank, _picked_by_rank, _one_part_for_all,
        _view_of_what_is_under_way, _two_into_one_buffer,
    ],
    ids=lambda build: build.__name__.strip("_"),
)  # fmt: skip
def test_views_and_writes_of_each_rank_count(build: Callable[[GraphBuilder, Any], Any], timing: str) -> None:
    inputs = [InputSpec("x", (8, 4), torch.float64, (("dp", VARYING), ("tp", VARYING)))]
    program = spmd_program(MESH, inputs, lambda b: build(b, b.input("x")))
    stacked = run_stacked(program, FLOAT64, timing)
    if stacked is None:  # several collectives of one op are not kept under way
        assert build is _reduced_twice
        assert timing != "issue"
        return
    same(_execute(program, False, None, timing=timing), stacked, exactly=False)


def test_an_alias_on_some_ranks_alone_is_told_of_these() -> None:
    def build(b: GraphBuilder) -> Any:
        x = b.call("aten::neg", b.input("x"))
        turned = b.call("aten::transpose.int", x, b.constant("dim", lambda rank: int(rank > 0)), 1)
        return x, b.call("aten::contiguous", turned)

    program = made(build, shape=(4, 4))
    stacked = run_stacked(program, FLOAT64)
    assert stacked is not None
    same(one_by_one(program), stacked, exactly=True)
    assert [overlapping_outputs(rank) for rank in stacked.ranks[:2]] == [[[], []], [[], [0]]]


def test_what_a_rank_contributes_is_what_it_computes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though nothing else than collectives reads it."""
    within = Alignment.within
    monkeypatch.setattr(Alignment, "within", lambda self, value, rows: within(self, value, rows) + 1)

    def build(b: GraphBuilder) -> Any:
        return summed(b, b.call("aten::neg", b.input("x")))

    assert run_stacked(made(build), FLOAT64) is None


def test_groups_to_which_the_same_is_contributed_are_answered_once() -> None:
    """Over dp all hold the same: both groups of tp sum the same addends. Of dp, each group sums its own."""

    def build(b: GraphBuilder) -> Any:
        x = b.input("x")
        return [
            b.call("_c10d_functional::wait_tensor", b.call("_c10d_functional::all_reduce", x, "sum", dim))
            for dim in ("tp", "dp")
        ]

    program = made(build, PARTIAL)
    stacked = run_stacked(program, FLOAT64)
    assert stacked is not None
    same(one_by_one(program), stacked, exactly=False)
    assert [rows_of(stacked, output) for output in range(2)] == [1, 8]


def test_versions_of_a_program_keep_once_what_they_read_and_return_alike() -> None:
    def build(b: GraphBuilder, *, turned: bool) -> Any:
        x = b.input("x")
        doubled = b.call("aten::add.Tensor", x, x)
        return doubled, b.call("aten::view", doubled, [4, 8]), b.call("aten::neg", x) if turned else x

    before = run_stacked(made(lambda b: build(b, turned=False)), FLOAT64)
    assert before is not None
    after = run_stacked(made(lambda b: build(b, turned=True)), FLOAT64, beside=before)
    assert after is not None
    for mine, theirs in zip(before.ranks, after.ranks, strict=True):
        places = [[tensor.data_ptr() for tensor in (*rank.outputs, *rank.inputs)] for rank in (mine, theirs)]
        assert [a == b for a, b in zip(*places, strict=True)] == [True, True, False, True]
        differing = [delta.label for delta in compare_ranks(mine, theirs) if delta.difference]
        assert differing == ["output 2"]
        assert overlapping_outputs(theirs) == [[], [0], []]


def test_an_alias_that_only_one_version_returns_is_told_though_values_are_kept_once() -> None:
    def build(b: GraphBuilder, *, copied: bool) -> Any:
        doubled = b.call("aten::neg", b.input("x"))
        flat = b.call("aten::view", doubled, [32])
        return doubled, b.call("aten::clone", flat) if copied else flat

    versions = [made(lambda b, copied=copied: build(b, copied=copied)) for copied in (False, True)]
    comparison = Lockstep().compare(*versions)
    assert {(d.rank, d.label) for d in comparison.deltas if d.alias} == {(rank, "output 1") for rank in range(16)}


@pytest.mark.parametrize("ranks", [2, 16])
def test_the_same_place_in_memory_read_with_another_sign_is_another_value(ranks: int) -> None:
    def build(b: GraphBuilder, *, conjugated: bool) -> Any:
        pairs = b.call("aten::view_as_complex", b.input("x"))
        return b.call("aten::imag", b.call("aten::_conj", pairs) if conjugated else pairs)

    mesh, spec = Mesh.grid({"tp": ranks}), InputSpec("x", (4, 2), torch.float32)
    before, after = (
        spmd_program(mesh, [spec], lambda b, turned=turned: build(b, conjugated=turned)) for turned in (False, True)
    )
    assert all(delta.difference for delta in Lockstep().compare(before, after).deltas if not delta.alias)


def test_an_alias_that_only_some_ranks_return_is_told_of_these() -> None:
    """What is turned is copied to be contiguous; where a dim is swapped with itself, nothing is."""

    def build(b: GraphBuilder, *, copied: bool) -> Any:
        other = b.constant("other", lambda rank: 1 - rank % 2)
        doubled = b.call("aten::neg", b.input("x"))
        turned = b.call("aten::contiguous", b.call("aten::transpose.int", doubled, other, 1))
        return doubled, b.call("aten::clone", turned) if copied else turned

    square = [InputSpec("x", (4, 4), torch.float64, (("tp", VARYING),))]
    plain, copied = (
        spmd_program(MESH, square, lambda b, copied=copied: build(b, copied=copied)) for copied in (False, True)
    )
    found = {delta.rank for delta in Lockstep().compare(plain, copied).deltas if delta.alias}
    assert found == set(range(0, 16, 2))


def test_other_domains_are_left_alone() -> None:
    assert run_stacked(made(lambda b: b.call("aten::neg", b.input("x"))), NATIVE) is None


def test_ranks_that_wait_for_each_other_are_told_by_name() -> None:
    """Half of the ranks name another group than their peers do."""

    def build(b: GraphBuilder) -> Any:
        group = b.constant("g", lambda rank: list(range(16)) if rank < 8 else list(range(8, 16)))
        return b.call("tensor_cast::all_reduce", b.input("x"), b.rank, group)

    program = made(build)
    assert run_stacked(program, FLOAT64) is None
    run = Lockstep().run(program)
    assert run.hang is not None
    assert run.why == one_by_one(program).why


def test_a_defect_is_found_on_stacked_ranks() -> None:
    found: Counter[str] = Counter()

    @seed(11)
    @settings(SETTINGS, max_examples=4)
    @given(programs_of("structured", mesh=MESH))
    def hunt(program: Program) -> None:
        if run_stacked(program, FLOAT64) is not None:
            found.update(finding.kind for finding in verify(FirstChunkForAll(), program).findings)
            assert verify(SequenceParallel(), program).status == "passed"

    hunt()
    assert found["wrong-value"]
