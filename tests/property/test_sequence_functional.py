"""Sequence parallelism on drawn layers of functional collectives: it fires often, and is never refuted."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from tcverify.application import InProcess
from tcverify.application.loading import prepare_pass
from tcverify.execution import ProcessGroupPool
from tcverify.passes import SequenceParallel
from tcverify.passes.editing import op_name
from tcverify.program import Program
from tcverify.strategies import DECODERS, WORLD_SIZES, all_meshes
from tcverify.strategies.sequence_parallel.choices import LAYER
from tcverify.verification.verifier import verify
from tests.sizes import by_night

NAME = "sequence-functional"


def sample(count: int, seed: int, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Iterator[Program]:
    generator = random.Random(seed)
    meshes = [mesh for size in world_sizes for mesh in all_meshes(size)]
    for _ in range(count):
        yield DECODERS[NAME].decode(generator.choice(meshes), generator.randbytes(DECODERS[NAME].width))


def judge(count: int, seed: int, domain: str = "float64") -> Counter[str]:
    """Verify so many programs; count how many changed, and in how many each pattern fired."""
    subject = InProcess(prepare_pass(SequenceParallel, "", {}))
    found: Counter[str] = Counter()
    for program in sample(count, seed):
        verdict = verify(subject, program, domain=domain)
        assert verdict.status == "passed", (program.labels, [f.title for f in verdict.findings], verdict.doubts)
        found["changed"] += verdict.changed
        found.update(pattern for pattern, times in verdict.pair.rewrites.items() if times)
    return found


def test_it_fires_in_a_third_of_the_programs_and_is_not_refuted() -> None:
    count = by_night(200, 50)
    found = judge(count, seed=1)
    assert found["changed"] >= 67 / 200 * count, found
    assert found["P1"] >= 7 / 200 * count, found
    assert found["P3"] >= 56 / 200 * count, found


def test_in_the_exact_domain() -> None:
    assert judge(25, seed=2, domain="exact")["changed"] >= 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 7))
def test_soak(seed: int) -> None:
    assert judge(400, seed)["changed"] >= 400 / 3


@pytest.mark.parametrize("world_size", [2, 4])
def test_on_a_process_group(world_size: int) -> None:
    subject = InProcess(prepare_pass(SequenceParallel, "", {}))
    with ProcessGroupPool(world_size) as pool:
        for program in sample(12, 8, (world_size,)):
            verdict = verify(subject, program, confirm=pool)
            assert verdict.status == "passed", (program.labels, verdict.findings, verdict.doubts)
            assert len(verdict.executors) == 2


def test_programs_hold_what_captured_ones_do_and_what_passes_stumble_over() -> None:
    programs = list(sample(150, seed=9))
    ops = Counter(op for p in programs for op in {op_name(n) for g in p.graphs for n in g.nodes})
    for op in (
        "_fused_rms_norm",
        "rms_norm",
        "native_layer_norm",
        "layer_norm",
        "rsqrt",
        "embedding",
        "_to_copy",
        "detach",
    ):
        assert ops[f"aten::{op}"] >= 3, op
    assert ops["tensor_cast::rms_norm"] >= 3
    labels = Counter(label for program in programs for label in program.labels)
    odd = set(LAYER["odd"]) - {"none"}
    for label in (
        *odd, "avg", "max", "coalesced", "in-place", "already-parallel", "waited-twice", "write-behind", "halved", "sum-read",
        "residual-read", "statistic-read", "inside-read", "residual-varying", "residual-sliced", "residual-gathered",
        "residual-two", "residual-row",
    ):  # fmt: skip
        assert labels[label] >= 2, label
    sizes = sorted(program.size for program in programs)
    assert sizes[len(sizes) // 10] >= 10
    assert sizes[-1] <= 120
