"""What holds of every program that any strategy draws, and how often sequence parallelism finds something to do in them."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator

import pytest
from torch.utils import _pytree as pytree

from tcverify.application import InProcess, Subject
from tcverify.application.loading import prepare_pass
from tcverify.execution import Lockstep
from tcverify.ops import TensorSpec
from tcverify.passes import Identity, SequenceParallel
from tcverify.program import Program, dumps, loads
from tcverify.registry.strategies import ALONE
from tcverify.strategies import DECODERS, STRATEGIES, WORLD_SIZES, all_meshes
from tcverify.verification.verifier import verify
from tests.sizes import by_night

#: "mixed" draws from the others.
EACH = pytest.mark.parametrize("name", [name for name in DECODERS if name != "mixed"])

#: Larger values would only hide errors: next to them a small difference is rounding.
LARGEST = 1e3


def sample(name: str, count: int, seed: int, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Iterator[Program]:
    """Uniform choices on all meshes: what a campaign draws, without Hypothesis' mutation and shrinking."""
    generator = random.Random(seed)
    meshes = [mesh for size in world_sizes for mesh in all_meshes(size)]
    decoder = DECODERS[name]
    for _ in range(count):
        yield decoder.decode(generator.choice(meshes), generator.randbytes(decoder.width))


@EACH
def test_programs_run_and_their_metadata_says_what_they_compute(name: str) -> None:
    for program in sample(name, by_night(60, 8), seed=1):
        run = Lockstep().run(program, observe=True)
        assert run.finished, run.hang or run.mismatch or run.error
        for result, binding in zip(run.ranks, program.ranks, strict=True):
            outputs = [value for value in pytree.tree_leaves(result.outputs) if value.numel()]
            limit = math.inf if any(spec.recipe.kind == "wide" for spec in program.inputs) else LARGEST
            assert all(float(value.abs().max()) < limit for value in outputs)  # and finite
            assert result.values is not None
            for node in program.graphs[binding.graph].nodes:
                if node.op == "output":
                    continue
                specs = pytree.tree_leaves(node.meta["val"], is_leaf=lambda leaf: isinstance(leaf, TensorSpec))
                if specs == [None]:  # it only communicates
                    assert result.values[node.name] is None
                    continue
                for spec, value in zip(specs, pytree.tree_leaves(result.values[node.name]), strict=True):
                    assert tuple(value.shape) == spec.shape, node.name


@EACH
def test_files_round_trip_and_equal_bytes_give_equal_programs(name: str) -> None:
    count = by_night(40, 10)
    for first, second in zip(sample(name, count, seed=2), sample(name, count, seed=2), strict=True):
        text = dumps(first)
        assert dumps(second) == text
        assert dumps(loads(text)) == text


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("choices", [b"", b"\0" * 500, b"\xff" * 500, bytes(range(256))])
def test_any_bytes_decode_on_any_mesh(name: str, choices: bytes) -> None:
    for mesh in all_meshes(3):
        assert Lockstep().run(DECODERS[name].decode(mesh, choices)).finished


@EACH
def test_the_identity_is_never_refuted_nor_in_doubt(name: str) -> None:
    subject = InProcess(prepare_pass(Identity, "", {}))
    verdicts = [verify(subject, program) for program in sample(name, by_night(60, 8), seed=4)]
    assert [v.findings or v.doubts for v in verdicts if v.status != "passed"] == []


def test_every_strategy_has_a_decoder_and_mixed_draws_them_all() -> None:
    assert set(STRATEGIES) == {*DECODERS, *ALONE}
    programs = list(sample("mixed", 80, seed=5))
    others = ("near-miss", "aimed", "experts", "wild", "overlap")
    kinds = Counter(next((k for k in others if k in p.labels), "structured") for p in programs)
    assert set(kinds) == {"structured", *others}
    assert 0.3 <= kinds["structured"] / len(programs) <= 0.65


def test_most_mixed_programs_say_what_time_their_ops_take() -> None:
    programs = list(sample("mixed", 120, seed=7))
    timed = [p for p in programs if p.streams is not None]
    assert 0.7 <= len(timed) / len(programs) <= 0.97
    costs = [n.meta.get("cost_s") for p in timed for g in p.graphs for n in g.nodes if n.op == "call_function"]
    assert min(cost for cost in costs if cost is not None) >= 0  # of waits
    assert any(cost is None for cost in costs)
    assert len({p.streams for p in timed}) >= 20
    skewed = [p for p in timed if "rank-dependent-costs" in p.labels]
    assert any(_costs(p, 0) != _costs(p, 1) for p in skewed)


def _costs(program: Program, rank: int) -> list[float | None]:
    return [node.meta.get("cost_s") for node in program.graph(rank).nodes]


def shares(name: str, world_size: int, count: int, subject: Subject) -> dict[str, float]:
    """In how many of the programs each pattern of sequence parallelism fires."""
    fired: Counter[str] = Counter()
    for program in sample(name, count, seed=6, world_sizes=(world_size,)):
        fired.update(pattern for pattern, times in subject.apply(program).rewrites.items() if times)
    return {pattern: fired[pattern] / count for pattern in SequenceParallel.PATTERNS}


#: Patterns of structured programs; the others are those of programs with experts.
STRUCTURED = ("P1", "P2", "P3")


@pytest.mark.parametrize(
    "world_size", [4, *(pytest.param(size, marks=pytest.mark.slow) for size in WORLD_SIZES if size < 4)]
)
def test_each_pattern_fires_in_a_fifth_of_a_small_sample(world_size: int) -> None:
    found = shares("structured", world_size, 80, InProcess(prepare_pass(SequenceParallel, "", {})))
    assert min(found[pattern] for pattern in STRUCTURED) >= 0.2, found


@pytest.mark.parametrize(
    "world_size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in WORLD_SIZES if size > 2)]
)
def test_experts_and_attention_are_kept_on_local_tokens_often_enough(world_size: int) -> None:
    found = shares("moe", world_size, by_night(120, 60), InProcess(prepare_pass(SequenceParallel, "", {})))
    assert min(found[pattern] for pattern in STRUCTURED) >= 0.15, found
    assert found["P4"] >= 0.15, found
    assert found["P5"] >= 0.02, found


@pytest.mark.slow
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_each_pattern_fires_in_a_quarter_of_the_structured_programs(world_size: int) -> None:
    """`-s` shows the shares of all strategies."""
    subject = InProcess(prepare_pass(SequenceParallel, "", {}))
    for name in DECODERS:
        found = shares(name, world_size, 500, subject)
        print(
            f"{name:<12}{world_size} ranks  " + "  ".join(f"{pattern} {share:.0%}" for pattern, share in found.items())
        )
        if name == "structured":
            assert min(found[pattern] for pattern in STRUCTURED) >= 0.25, found
        if name == "moe":
            assert found["P4"] >= 0.2, found
            assert found["P5"] >= 0.03, found
