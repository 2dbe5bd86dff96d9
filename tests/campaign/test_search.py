"""The search: kernels, what is tried around them, and what a campaign finds with it that drawing alone does not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from tcverify.application import InProcess
from tcverify.application.loading import prepare_pass
from tcverify.campaign import Campaign, CampaignFinished, CampaignPlan, Corpus, Coverage
from tcverify.campaign.search import ProgramSearch, agenda, turns
from tcverify.campaign.search.edits import FAMILIES
from tcverify.campaign.search.more_ranks import move_to_more_ranks
from tcverify.execution import Lockstep
from tcverify.program import PARTIAL, InputSpec, Mesh, Program, dumps, spmd_program
from tcverify.report.coverage import kernel_lines, searched_line, suspect_lines
from tcverify.strategies import programs_of
from tests.sizes import by_night
from tests.support import searched_passes
from tests.support.searched_passes import (
    adds_negated,
    cancels_negations,
    cancels_negations_for_all,
    copies_sums,
    copies_what_is_sent,
)

SEEDS = (0, 1, 2)

#: The passes leave no metadata at what they add.
CHECKS = ["equivalence", "structure", "collectives"]


def chain(seed: int, ranks: int = 2) -> Program:
    """Sums of a reduction: nothing in them is negated."""
    mesh = Mesh.grid({"tp": ranks})
    inputs = [InputSpec("x", (2, 4), placements=(("tp", PARTIAL),)), InputSpec("y", (2, 4))]

    def build(b: Any) -> Any:
        x, y = b.input("x"), b.input("y")
        value = b.call("tensor_cast::all_reduce", x, b.rank, b.group("tp"))
        for _ in range(1 + seed % 3):
            value = b.call("aten::add.Tensor", value, y)
        return value

    return spmd_program(mesh, inputs, build, seed=seed)


def run(
    place: Path, pass_: Any, *, search: bool = True, seed: int = 0, **plan: Any
) -> tuple[CampaignFinished, ProgramSearch]:
    subject = InProcess(prepare_pass(pass_, "", {}))
    searching = ProgramSearch(subject, seed)
    options = {
        "programs": st.integers(0, 10_000).map(chain),
        "max_examples": 600,
        "seed": seed,
        "earlier": False,
        **plan,
    }
    made = CampaignPlan(
        mesh="2 ranks",
        report_dir=place,
        state_dir=place,
        search=searching if search else None,
        shrink_time=5.0,
        **options,
    )
    return Campaign(subject, made, None).run(), searching


@pytest.mark.parametrize("seed", SEEDS)
def test_a_defect_behind_conditions_that_no_program_reaches_is_found(tmp_path: Path, seed: int):
    """Programs have to be negated, twice, and the first negation read once more."""
    finished, _ = run(tmp_path, cancels_negations_for_all, seed=seed, fail_fast=True, checks=CHECKS)
    (found,) = finished.counterexamples
    assert found.finding.kind in ("wrong-value", "wrong-alias")
    assert found.program.size <= 3
    assert run(tmp_path, cancels_negations_for_all, seed=seed, search=False)[0].verdict != "refuted"


@pytest.mark.parametrize("pass_", [adds_negated, copies_sums])
@pytest.mark.parametrize("seed", by_night(SEEDS, SEEDS[:1]))
def test_what_functions_return_and_what_happens_twice_is_found(tmp_path: Path, seed: int, pass_: Any):
    finished, _ = run(tmp_path, pass_, seed=seed, max_examples=1_000, fail_fast=True, checks=CHECKS)
    assert finished.verdict == "refuted"
    assert run(tmp_path, pass_, seed=seed, search=False, checks=CHECKS)[0].verdict != "refuted"


def test_lines_that_wrong_kernels_have_in_common_are_suspected(tmp_path: Path):
    finished, _ = run(tmp_path, adds_negated, max_examples=1_000, checks=CHECKS)
    texts = Path(searched_passes.__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(texts, 1) if text.strip() == "if is_negated(second):") + 1
    assert finished.searched is not None
    first, *_ = finished.searched.suspects
    assert (first.file, first.first) == (searched_passes.__file__, line)
    assert first.wrong == first.of_wrong > 0
    assert first.passed < first.of_passed / 2
    text = suspect_lines(finished.searched)[0]
    assert f"searched_passes.py:{line}, reached by {first.wrong} of {first.of_wrong} failing kernel" in text
    assert text.endswith(f"by {first.passed} of {first.of_passed} passing")


def test_nothing_is_suspected_of_a_sound_pass(tmp_path: Path):
    finished, search = run(tmp_path, cancels_negations, checks=CHECKS)
    assert finished.searched is not None
    assert finished.searched.suspects == ()
    assert any(kernel.wrong is False for kernel in search.kernels)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_sound_pass_passes(tmp_path: Path, seed: int):
    finished, search = run(tmp_path, cancels_negations, seed=seed, checks=CHECKS)
    assert finished.verdict == "passed"
    assert finished.statistics.changed > 10
    assert any(kernel.changed for kernel in search.kernels)


@pytest.mark.parametrize("over", [True, False])
def test_nothing_is_learnt_once_the_time_is_over(over: bool):
    """A reduction takes many applications of the pass, each of which may take long."""
    applied = 0

    def counts(gm: Any) -> None:
        nonlocal applied
        applied += 1
        cancels_negations(gm)

    subject = InProcess(prepare_pass(counts, "", {}))
    search = ProgramSearch(subject, 0)
    for seed in range(turns.FIRST):
        program = chain(seed)
        search.note(program, subject.start(program, watch=search.watch)(), refuted=False)
        assert list(search.turn(lambda _: False)) == []
    before = applied
    search.until = time.monotonic() - 1 if over else None
    search.learn()
    assert (applied == before) == over
    assert bool(search.kernels) != over


def test_a_seed_repeats_a_search(tmp_path: Path):
    first, one = run(tmp_path, cancels_negations_for_all, max_examples=300)
    second, other = run(tmp_path, cancels_negations_for_all, max_examples=300)
    assert [case.id for case in first.counterexamples] == [case.id for case in second.counterexamples]
    assert [dumps(kernel.program) for kernel in one.kernels] == [dumps(kernel.program) for kernel in other.kernels]


def test_findings_name_the_line_that_made_them(tmp_path: Path):
    finished, _ = run(tmp_path, cancels_negations_for_all, checks=["equivalence"])
    found = next(case for case in finished.counterexamples if case.finding.kind == "wrong-value")
    texts = Path(searched_passes.__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(texts, 1) if text.endswith("# the line to blame"))
    assert line in {one.line for one in found.made_by}
    assert {one.function for one in found.made_by} == {"cancels_negations_for_all"}


def test_kernels_are_the_smallest_programs_that_show_what_a_pass_does(tmp_path: Path):
    finished, search = run(tmp_path, cancels_negations)
    changed = [kernel for kernel in search.kernels if kernel.changed]
    assert min(kernel.program.size for kernel in changed) == 2  # two negations
    assert finished.searched is not None
    lines = "\n".join(line.text for line in kernel_lines(finished.searched))
    assert "kernel: neg ⇒ clone" in lines
    assert "= neg(v" in lines
    assert all(kernel.rewritten is not None for kernel in finished.searched.kernels if kernel.changed)
    assert searched_line(finished.searched).startswith(f"searched: {len(search.kernels)} kernels (")
    assert finished.searched.tried > 100


def test_a_search_goes_on_with_other_ranks(tmp_path: Path):
    """What was learnt on two ranks makes the first programs on four; what is not seen there counts as never reached."""
    subject = InProcess(prepare_pass(cancels_negations, "", {}))
    search = ProgramSearch(subject, 0)
    found, made = [], []
    for ranks in (2, 4, 2):
        plan = CampaignPlan(
            st.integers(0, 10_000).map(lambda seed, ranks=ranks: chain(seed, ranks)), f"{ranks} ranks", tmp_path, tmp_path,
            max_examples=200, checks=CHECKS, earlier=False, search=search,
        )  # fmt: skip
        finished = Campaign(subject, plan, None).run()
        assert finished.verdict == "passed"
        assert {kernel.program.world_size for kernel in search.kernels} == {ranks}
        found.append(finished.statistics.changed)
        made.append(search.summary().tried)
    assert min(found) > 0
    assert made[1] - made[0] > made[0]  # the first programs on two ranks are all drawn


def test_a_search_ends_when_nothing_is_left_and_says_what_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(turns, "QUIET", 50)
    monkeypatch.setattr(
        agenda, "FAMILIES", {name: FAMILIES[name] for name in ("return a value", "put a call on an edge")}
    )
    finished, search = run(tmp_path, cancels_negations, max_examples=20_000, checks=CHECKS)
    assert finished.stop == "searched"
    assert finished.searched is not None
    assert finished.searched.exhausted == len(search.kernels)
    kernels = f"{len(search.kernels)} kernels ({finished.searched.behaviours} behaviours)"
    tried = f"{finished.searched.tried:,} in all"
    assert finished.searched.further > 0
    assert (
        searched_line(finished.searched) == f"searched: every program one edit away from {kernels} was tried, {tried}, "
        f"{finished.searched.further:,} of them further away"
    )


def test_what_a_search_has_learnt_begins_the_next_one(tmp_path: Path):
    """Its kernels are kept in the corpus: the next search need not wait for programs that are drawn."""
    corpus = Corpus(tmp_path / "corpus", pytest.fail)
    first, _ = run(tmp_path, cancels_negations_for_all, fail_fast=True, checks=CHECKS, corpus=corpus)
    coverage = Coverage([str(searched_passes.__file__)])
    second, search = run(
        tmp_path, cancels_negations_for_all, seed=1, fail_fast=True, checks=CHECKS, corpus=corpus, coverage=coverage
    )
    assert first.verdict == second.verdict == "refuted"
    assert second.statistics.programs < turns.FIRST < first.statistics.programs
    assert {point for kernel in search.kernels for point in kernel.reached} <= coverage.points


def test_kernels_of_which_the_files_are_damaged_are_left_out(tmp_path: Path):
    corpus = Corpus(tmp_path / "corpus", pytest.fail)
    run(tmp_path, cancels_negations, max_examples=100, checks=CHECKS, corpus=corpus)
    for path in (tmp_path / "corpus").glob("*.json"):
        path.write_text(path.read_text()[:-9])
    warnings: list[str] = []
    damaged = Corpus(tmp_path / "corpus", warnings.append)
    finished, _ = run(tmp_path, cancels_negations, max_examples=100, checks=CHECKS, corpus=damaged)
    assert finished.verdict == "passed"
    assert warnings


def test_a_search_that_leaves_programs_out_says_so(tmp_path: Path):
    finished, _ = run(tmp_path, cancels_negations_for_all, collect=True, checks=CHECKS)
    assert finished.searched is not None
    assert finished.searched.skipped > 0
    assert searched_line(finished.searched).endswith(f"; {finished.searched.skipped:,} with a known cause skipped")


def test_programs_move_to_more_ranks():
    made = list(move_to_more_ranks(chain(0), 4))
    assert [str(program.mesh) for program in made] == ["4 ranks; tp: [0, 1, 2, 3]"] * 2 + ["4 ranks; tp: [0, 1] [2, 3]"]
    assert [program.inputs[0].shape for program in made] == [(4, 8), (2, 4), (2, 4)]
    assert all(Lockstep().run(program).finished for program in made)
    assert list(move_to_more_ranks(chain(0), 3)) == []


def test_sizes_of_groups_that_calls_say_follow_to_more_ranks():
    def build(b: Any) -> Any:
        x = b.input("x")
        return b.call(
            "_c10d_functional::wait_tensor", b.call("_c10d_functional::reduce_scatter_tensor", x, "sum", 2, "tp")
        )

    program = spmd_program(Mesh.grid({"tp": 2}), [InputSpec("x", (2, 4))], build)
    larger, _, more = move_to_more_ranks(program, 4)
    assert "(%x, sum, 4, tp)" in str(larger.graphs[0])
    assert "(%x, sum, 2, tp)" in str(more.graphs[0])
    assert all(Lockstep().run(one).finished for one in (larger, more))


def test_a_pass_that_does_nothing_has_one_kernel_and_ends(tmp_path: Path):
    finished, search = run(tmp_path, lambda gm: None, max_examples=100)
    assert len(search.kernels) <= 2
    assert finished.verdict == "nothing tested"


def test_no_program_that_is_made_hangs_by_itself(tmp_path: Path):
    """Ranks send and receive in an order that fits: less of that, or the same on all ranks, hangs before any pass."""
    programs = programs_of("effects", world_size=2)
    finished, search = run(tmp_path, copies_what_is_sent, programs=programs, seed=4, max_examples=60, checks=CHECKS)
    assert finished.verdict == "passed"
    assert search.summary().tried > 15
    assert finished.statistics.doubts == {}


def test_known_causes_do_not_eat_the_run(tmp_path: Path):
    """Most of what is tried once a defect is known does not contain it."""
    finished, _ = run(tmp_path, cancels_negations_for_all, max_examples=1_000, collect=True, checks=CHECKS)
    counts = finished.statistics
    assert counts.refuted > 0
    assert counts.passed > 3 * counts.refuted


def test_a_pass_that_fails_leaves_no_kernel(tmp_path: Path):
    def raises(gm: Any) -> None:
        raise ValueError("no idea")

    finished, search = run(tmp_path, raises, max_examples=40)
    assert finished.verdict == "refuted"
    assert search.kernels == []
