"""Bisection: the rewrite that is to blame is named, the sound ones are not."""

from __future__ import annotations

import random
from collections.abc import Callable, Set

import pytest
from torch import fx

from tcverify import Guarded, Program, verify
from tcverify.application import InProcess
from tcverify.application.loading import prepare_pass
from tcverify.explain.bisection import FindingTerms, bisect
from tcverify.explain.bisection.changes import changes_between
from tcverify.explain.bisection.search import minimise_subset, smallest_showing_prefix
from tcverify.passes import BUILTIN
from tcverify.program import Blame, RewriteRequest, count_rewrites, decode_blame, encode_blame, rewrite
from tcverify.program.graph import same_structure
from tcverify.strategies import DECODERS
from tests.mutants.sequence_parallel import ResidualNotSliced
from tests.support import rewriting_passes
from tests.support.pipelined_programs import gathered, scattered
from tests.support.programs import TP2
from tests.support.rewriting_passes import negations

HERE = "tests.support.rewriting_passes"


def blame(pass_: Callable[[fx.GraphModule], object], program: Program, kind: str = "wrong-value") -> Blame:
    with Guarded(f"{HERE}:{pass_.__name__}") as subject:
        verdict = verify(subject, program)
        assert kind in {finding.kind for finding in verdict.findings}
        return bisect(subject, verdict, FindingTerms(kind, subject.contract))


def numbers(found: Blame) -> list[int]:
    return [one.number for one in found.rewrites]


def test_the_rewrite_to_blame_is_named() -> None:
    found = blame(rewriting_passes.third, negations(7))
    assert str(found) == "rewrite 3 of 7, product at node 'neg_2'"
    assert found.trials <= 8


def test_of_a_pass_that_does_not_ask_the_changes_are_taken_apart() -> None:
    found = blame(rewriting_passes.silent_third, negations(7))
    assert str(found).startswith("change 3 of 7, at node '")
    assert "neg_2" in found.rewrites[0].nodes
    assert not {"neg", "neg_1", "neg_3"} & set(found.rewrites[0].nodes)


@pytest.mark.parametrize("pass_", [rewriting_passes.pair, rewriting_passes.silent_pair])
def test_defects_that_need_each_other_are_named_together(pass_: Callable[[fx.GraphModule], object]) -> None:
    found = blame(pass_, negations(4, joined=True))
    assert numbers(found) == [1, 2]
    assert found.total == 4
    assert not found.others
    assert "s 1 and 2 of 4 together, " in str(found)


def test_of_defects_that_show_alone_one_is_named_and_the_other_mentioned() -> None:
    found = blame(rewriting_passes.first_and_third, negations(4))
    assert len(found.rewrites) == 1
    assert numbers(found)[0] in (1, 3)
    assert found.others
    assert str(found).endswith("; others cause it too")


def test_a_rewrite_that_raises() -> None:
    found = blame(rewriting_passes.raising, negations(3), "pass-raised")
    assert str(found) == "rewrite 2 of 2, product at node 'neg_1'"


def test_what_is_wrong_outside_of_the_rewrites_is_found_in_the_changes() -> None:
    found = blame(rewriting_passes.outside, negations(3))
    assert not found.asked
    assert len(found.rewrites) == 1
    assert found.others


def test_matches_of_replace_pattern_are_counted() -> None:
    found = blame(rewriting_passes.by_replace_pattern, negations(3))
    assert found.asked
    assert (found.rewrites[0].pattern, found.total, found.others) == ("replace_pattern", 3, True)


def test_matches_of_inductors_patterns_are_counted() -> None:
    found = blame(rewriting_passes.by_inductor_pattern, negations(3))
    assert found.asked
    assert (found.rewrites[0].pattern, found.total, found.others) == ("absolute", 3, True)


def test_nothing_is_blamed_for_a_finding_that_is_not_there() -> None:
    with Guarded(f"{HERE}:sound") as subject:
        verdict = verify(subject, negations(3))
        assert verdict.status == "passed"
        found = bisect(subject, verdict, FindingTerms("wrong-value", subject.contract))
    assert found.rewrites == ()
    assert "does not occur" in found.why


def test_what_only_a_second_application_shows_is_not_bisected() -> None:
    with Guarded(f"{HERE}:third") as subject:
        verdict = verify(subject, negations(3))
        assert (
            "applied again" in bisect(subject, verdict, FindingTerms("unrepeatable", subject.contract, deep=True)).why
        )


def test_time_that_runs_out_is_said() -> None:
    with Guarded(f"{HERE}:third") as subject:
        verdict = verify(subject, negations(7))
        found = bisect(subject, verdict, FindingTerms("wrong-value", subject.contract), seconds=0)
    assert "time ran out" in str(found)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [("sequence_parallel", "structured"), ("sink_waits", "functional"), ("comm_buffers", "functional")],
)
def test_no_change_is_the_original_and_all_are_the_rewritten_program(name: str, strategy: str) -> None:
    subject = InProcess(prepare_pass(BUILTIN[name], "", {}))
    several = 0
    for seed in range(6):
        choices = random.Random(seed).randbytes(DECODERS[strategy].width)
        original = DECODERS[strategy].decode(TP2, choices)
        rewritten = subject.apply(original).rewritten
        if rewritten is None or rewritten is original:
            continue
        changes = changes_between(original, rewritten)
        several += len(changes.rewrites) > 1
        everything = frozenset(one.number for one in changes.rewrites)
        assert everything
        for program, chosen in ((original, frozenset[int]()), (rewritten, everything)):
            hybrid = changes.hybrid(chosen)
            for rank in range(original.world_size):
                assert same_structure(program.graph(rank), hybrid.graph(rank))
        for one in everything:
            lint(changes.hybrid(frozenset({one})))
    assert several >= 2


def lint(program: Program) -> None:
    for graph in program.graphs:
        graph.lint()


def test_a_defect_of_one_norm_among_several_is_named() -> None:
    pass_ = ResidualNotSliced()
    for seed in range(20):
        program = DECODERS["structured"].decode(TP2, random.Random(seed).randbytes(DECODERS["structured"].width))
        subject = InProcess(prepare_pass(pass_, "", {}))
        verdict = verify(subject, program)
        if verdict.status == "refuted" and any(finding.kind == "rewritten-raises" for finding in verdict.findings):
            found = bisect(subject, verdict, FindingTerms("rewritten-raises", subject.contract))
            assert found.rewrites
            assert not found.asked
            assert not found.why
            return
    raise AssertionError("no program showed the defect")


@pytest.mark.parametrize("program", [gathered(2, (0, 1), 2), scattered(2, (0, 1), 2)])
def test_passes_of_ours_ask(program: Program) -> None:
    subject = InProcess(prepare_pass(BUILTIN["pipelined_matmul"], "", {}))
    ((ask, *others), *_) = subject.apply_counted(program, None).trace.rewrites
    assert not others
    assert ask.pattern in ("allgather-matmul", "matmul-reduce-scatter")
    left_out = subject.apply_counted(program, [frozenset()] * 2)
    assert not left_out.changed
    assert left_out.trace.rewrites == [[ask], [ask]]


def test_the_search_finds_what_is_minimal() -> None:
    draw = random.Random(0)
    for _ in range(200):
        total = draw.randint(1, 12)
        needed = frozenset(draw.sample(range(1, total + 1), draw.randint(1, min(3, total))))
        trials: list[Set[int]] = []

        def shows(chosen: Set[int], needed: Set[int] = needed, trials: list[Set[int]] = trials) -> bool:
            trials.append(chosen)
            return needed <= chosen

        last = smallest_showing_prefix(total, shows)
        assert last == max(needed)
        assert minimise_subset(range(1, last + 1), shows) == sorted(needed)
        assert len(trials) < 60


def test_a_pass_that_asks_is_free_outside_of_a_search() -> None:
    assert rewrite("anything", "node")
    with count_rewrites(frozenset({RewriteRequest("a", "x"), RewriteRequest("b", "y", 1)})) as asked:
        assert [rewrite("a", "x"), rewrite("a", "x"), rewrite("b", "y"), rewrite("b", "y")] == [
            True,
            False,
            False,
            True,
        ]
    assert asked == [
        RewriteRequest("a", "x"),
        RewriteRequest("a", "x", 1),
        RewriteRequest("b", "y"),
        RewriteRequest("b", "y", 1),
    ]


def test_blame_is_kept_in_files() -> None:
    found = blame(rewriting_passes.pair, negations(3, joined=True))
    assert decode_blame(encode_blame(found)) == found
    with pytest.raises(TypeError, match="is not of type int"):
        decode_blame({**encode_blame(found), "total": "3"})
