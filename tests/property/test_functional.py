"""What holds of every asynchronous program, and how often there is something in them that passes stumble over."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch.utils import _pytree as pytree

from tcverify.execution import Lockstep, ProcessGroupPool, Run
from tcverify.execution.asynchrony import TIMINGS
from tcverify.program import Program
from tcverify.strategies import DECODERS, WORLD_SIZES, all_meshes, functional_programs
from tests.property.hazards import HAZARDS, found_in
from tests.sizes import by_night

ASYNCHRONOUS = ("functional", "data-parallel", "async-tp")


def sample(name: str, count: int, seed: int, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Iterator[Program]:
    generator = random.Random(seed)
    meshes = [mesh for size in world_sizes for mesh in all_meshes(size)]
    for _ in range(count):
        yield DECODERS[name].decode(generator.choice(meshes), generator.randbytes(DECODERS[name].width))


def outputs(run: Run) -> list[torch.Tensor]:
    assert run.finished, run.why
    return pytree.tree_leaves([result.outputs for result in run.ranks])


@settings(max_examples=by_night(60, 25), database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(functional_programs())
def test_programs_compute_the_same_whenever_collectives_read_and_write(program: Program) -> None:
    first, *others = [outputs(Lockstep().run(program, timing=timing)) for timing in TIMINGS]
    assert all(bool(value.isfinite().all()) for value in first)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_there_is_something_to_move_and_every_known_hazard(name: str) -> None:
    count = 120
    found = Counter(one for program in sample(name, count, seed=1) for one in found_in(program))
    shares = {key: found[key] / count for key in (*HAZARDS, "sinkable", "overlapping", "exposed")}
    assert shares["sinkable"] > 0.8, shares
    assert min(shares["overlapping"], shares["exposed"]) > 0.7, shares
    if name == "functional":
        assert min(shares[key] for key in HAZARDS) >= 0.03, shares


def test_shapes_of_programs_vary() -> None:
    programs = list(sample("functional", 120, seed=2))
    labels = Counter(label for program in programs for label in program.labels)
    for label in (
        "in-place", "coalesced", "out", "bucket", "integers", "waited-twice", "blocking", "swapped", "pipeline", "exchange",
        "barrier", "after", "ragged", "update", "write-before", "write-behind", "all-to-all", "buffer", "column-row",
    ):  # fmt: skip
        assert labels[label] >= 3, label
    sizes = sorted(program.size for program in programs)
    assert sizes[len(sizes) // 10] >= 12
    assert sizes[-1] <= 70
    elements = [s.numel for p in programs for n in p.graphs[0].nodes if hasattr(s := n.meta.get("val"), "numel")]
    assert min(elements) <= 2
    assert max(elements) >= 2000


def test_most_programs_say_what_time_their_ops_take() -> None:
    programs = list(sample("functional", 60, seed=3))
    timed = [p for p in programs if p.streams is not None]
    assert len(timed) >= 45
    skewed = [p for p in timed if "rank-dependent-costs" in p.labels]
    assert len(skewed) >= 2
    waits = [n for p in timed for g in p.graphs for n in g.nodes if "wait_tensor" in str(n.target)]
    assert {wait.meta.get("cost_s", 0.0) for wait in waits} == {0.0}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_process_groups_compute_what_lockstep_does(world_size: int) -> None:
    with ProcessGroupPool(world_size) as pool:
        for program in sample("functional", 8, seed=4, world_sizes=(world_size,)):
            pairs = zip(outputs(Lockstep().run(program)), outputs(pool.run(program)), strict=True)
            assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-8) for a, b in pairs), program.labels
