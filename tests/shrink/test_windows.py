"""Large failing programs come down to their cause: cut, made narrow, and reduced by single moves after that."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from torch import fx

from tcverify.application import InProcess, Pair
from tcverify.application.loading import prepare_pass
from tcverify.execution import Lockstep, Run
from tcverify.passes import SequenceParallel
from tcverify.passes.identity import Identity
from tcverify.program import (
    PARTIAL,
    VARYING,
    Finding,
    GraphBuilder,
    InputSpec,
    Mesh,
    Program,
    Recipe,
    compute_nodes,
    program_id,
    shard,
    spmd_program,
)
from tcverify.shrink import Reduction, greedy, reduce, suspects_of
from tcverify.shrink.graph import inseparable_calls as units
from tcverify.shrink.graph import replacements, windows
from tcverify.shrink.graph.async_groups import count_untidy, phase_of
from tcverify.shrink.graph.given_values import clamp_indices, fix_to_rank, keep_ranks, plain_input, with_shape
from tcverify.shrink.graph.inseparable_calls import units_of
from tcverify.shrink.graph.legalize import facts_of, legalize_edit
from tcverify.shrink.graph.narrowing import is_wide, narrow
from tcverify.shrink.graph.replacements import Values
from tcverify.shrink.graph.search import SketchSearch
from tcverify.shrink.graph.sketch import program_of, sketch_of
from tcverify.shrink.graph.step_facts import Facts
from tcverify.shrink.graph.windows import keep_calls
from tcverify.verification.verifier import Verdict, verify
from tests.mutants.foreign import SunkBelowConstant
from tests.sizes import NIGHT, by_night
from tests.support import large_programs as large
from tests.support.large_cases import CASES, Case
from tests.support.predicates import named

TP2, TP4 = Mesh.grid({"tp": 2}), Mesh.grid({"tp": 4})


def judging(case: Case) -> Callable[[Program], Verdict]:
    """Verifies the pass of a case on a program."""
    subject = InProcess(prepare_pass(case.defect, "", {}))
    return lambda program: verify(subject, program, contract=case.contract)


def showing(case: Case) -> Callable[[Program], bool]:
    """Whether the finding of a case shows on a program."""
    judge = judging(case)
    return lambda trial: any(f.kind == case.kind for f in judge(trial).findings)


@cache
def refuted(case: Case, nodes: int) -> tuple[Program, Verdict]:
    """The program of a case, and by what the pass is refuted on it."""
    program = case.make(nodes)
    return program, judging(case)(program)


@cache
def reduced(case: Case, nodes: int) -> Reduction:
    """What the program of a case comes down to."""
    program, verdict = refuted(case, nodes)
    return reduce(program, showing(case), None, suspects_of(verdict, case.kind))


def has_tanh(program: Program) -> bool:
    """A tanh, in a program that runs."""
    return bool(named(program, "aten::tanh")) and Lockstep().run(program).finished


# ------------------------------------------------------------------------------------------------------ known minima


IDS = [case.name.replace(", ", "-").replace(" ", "_") for case in CASES]

#: Cases whose cause is looked for without suspects too: at one place, at several, and in graphs that differ.
UNGUIDED = ("decomposed, one place", "pipeline, one place", "uneven, one place", "far apart")


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_large_failing_program_comes_down_to_its_cause(case: Case) -> None:
    program, verdict = refuted(case, 200)
    assert case.kind in {finding.kind for finding in verdict.findings}
    assert program.size > windows.LARGE

    found = reduced(case, 200)

    assert showing(case)(found.program)
    assert found.program.size <= case.most
    assert not found.cut


@pytest.mark.parametrize("case", [case for case in CASES if case.name in UNGUIDED], ids=lambda case: case.name)
def test_so_it_does_without_suspects(case: Case) -> None:
    program, shows = case.make(by_night(400, 200)), showing(case)
    assert program.size > windows.LARGE

    found = reduce(program, shows)

    assert shows(found.program)
    assert found.program.size <= case.most


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_two_thousand_nodes_take_less_than_two_minutes(case: Case) -> None:
    (program, verdict), shows = refuted(case, 2000), showing(case)

    begun = time.monotonic()
    found = reduce(program, shows, begun + 120.0, suspects_of(verdict, case.kind))

    print(f"{case.name:<28} {program.size} to {found.program.size} in {time.monotonic() - begun:.1f} s, {found.trials}")
    assert not found.cut
    assert found.program.size <= case.most
    assert shows(found.program)


def test_suspects_change_the_number_of_trials_and_not_what_is_left() -> None:
    case = CASES[0]
    (program, verdict), shows = refuted(case, by_night(600, 200)), showing(case)

    guided = reduce(program, shows, None, suspects_of(verdict, case.kind))
    misled = reduce(program, shows, None, ["rms_norm", "no_node_of_this_name"])

    assert guided.program.size == misled.program.size == case.most
    assert guided.trials < misled.trials


def test_the_same_program_is_left_every_time() -> None:
    case = next(case for case in CASES if case.name == "streams, one place")
    program, verdict = refuted(case, 200)

    first, second = reduced(case, 200), reduce(program, showing(case), None, suspects_of(verdict, case.kind))

    assert program_id(first.program) == program_id(second.program)
    assert first.trials == second.trials


# ----------------------------------------------------------------------------------------- nothing to find, or no time


@pytest.mark.parametrize(("make", "layers"), [(large.tensor_parallel, 14), (large.uneven_readers, 28)])
def test_a_program_that_shows_nothing_stays_as_it_is(make: Callable[[int], Program], layers: int) -> None:
    program = make(by_night(40, layers))
    assert program.size > windows.LARGE

    found = reduce(program, lambda _: False, time.monotonic() + (2.0 if NIGHT else 0.5))

    assert found.program is program


def test_a_sound_pass_shows_nothing_on_any_cut() -> None:
    """What stands for values must not break what a pass may rest on: then a sound pass would be refuted."""
    program = large.transformer(40, 2, marked=20)
    subject = InProcess(prepare_pass(SequenceParallel(), "", {}))
    facts, values = facts_of(sketch_of(program)), Values(program)
    changed = 0
    for made in random_cuts(facts, values, 20, seed=3):
        verdict = verify(subject, made)
        assert verdict.status == "passed", (verdict.findings, verdict.doubts)
        changed += verdict.changed
    assert changed > 5


def test_at_the_deadline_the_best_so_far_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    program = large.tensor_parallel(40)
    asked: list[Program] = []
    shown: list[Program] = []
    monkeypatch.setattr(greedy.time, "monotonic", lambda: float(len(asked)))  # a trial takes a second

    def shows(trial: Program) -> bool:
        asked.append(trial)
        if named(trial, "aten::sigmoid"):
            shown.append(trial)
            return True
        return False

    found = reduce(program, shows, 3.5)

    assert found.cut
    assert found.trials == len(asked) == 4
    assert found.program is shown[-1]
    assert 1 < found.program.size < program.size / 4


def test_after_the_deadline_nothing_is_asked() -> None:
    program = large.tensor_parallel(40)

    found = reduce(program, lambda _: pytest.fail("asked"), time.monotonic() - 1.0, ["sigmoid_3"])

    assert (found.program, found.cut, found.trials) == (program, True, 0)


# ---------------------------------------------------------------------------------------------------- cuts are programs


def random_cuts(facts: Facts, values: Values, count: int, seed: int) -> Iterator[Program]:
    """Programs of some of the units of another."""
    generator = random.Random(seed)
    every = units_of(facts, values.run)
    for _ in range(count):
        share = generator.choice([0.05, 0.3, 0.8])
        chosen = [unit for unit in every if generator.random() < share]
        keep = [{name for unit in chosen for i, name in unit.places if i == g} for g in range(len(facts.steps))]
        edit = keep_calls(facts, values, keep)
        assert edit is not None
        fitted = legalize_edit(facts, edit)
        assert fitted is not None
        assert count_untidy(fitted) <= count_untidy(facts)
        yield program_of(fitted.sketch)


LARGE: dict[str, Callable[[], Program]] = {
    "transformer": lambda: large.transformer(20, 2, 10),
    "tensor parallel": lambda: large.tensor_parallel(10, 4, 5, large.copy_then_write),
    "gradients": lambda: large.data_parallel(20, 2),
    "pipeline": lambda: large.pipeline(4, 10, 4, 2),
    "uneven": lambda: large.uneven_readers(30, 4, 15),
    "streams": lambda: large.branches(20, 2, 10),
    "far apart": lambda: large.far_apart(30),
}


@pytest.mark.parametrize("name", LARGE)
def test_any_units_of_a_program_make_one_that_runs(name: str) -> None:
    program = LARGE[name]()
    facts, values = facts_of(sketch_of(program)), Values(program)

    for made in random_cuts(facts, values, by_night(20, 7), seed=7):
        run = Lockstep().run(made)
        assert run.finished, run.why


@pytest.mark.parametrize("name", ["pipeline", "uneven"])
def test_without_what_meets_cuts_would_hang(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "meetings", lambda facts, run: ())
    program = LARGE[name]()
    facts, values = facts_of(sketch_of(program)), Values(program)

    assert any(not Lockstep().run(made).finished for made in random_cuts(facts, values, 20, seed=7))


def test_what_starts_and_its_wait_are_one_unit() -> None:
    program = large.data_parallel(12)
    facts = facts_of(sketch_of(program))

    found = [unit for unit in units_of(facts, None) if any("all_reduce" in name for _, name in unit.places)]

    assert len(found) == 12
    for unit in found:
        phases = [phase_of(facts.steps[number][name]) for number, name in unit.places]
        assert phases == ["start", "wait"]


def test_transfers_that_meet_are_one_unit() -> None:
    program = large.pipeline(3, 2, 4)
    facts = facts_of(sketch_of(program))

    found = units_of(facts, Lockstep().run(program))

    sends = [unit for unit in found if any(name.startswith("send") for _, name in unit.places)]
    assert [sorted(name for _, name in unit.places) for unit in sends] == [
        ["recv", "send"],
        ["recv_1", "send_1"],
        ["recv_2", "send_2"],
    ]


def test_a_value_that_is_equal_on_all_ranks_is_replaced_by_one_that_is() -> None:
    program = large.transformer(6)
    facts, values = facts_of(sketch_of(program)), Values(program)
    middle = "add_2"
    (norm,) = (user.name for user in facts.users[0][middle] if "rms_norm" in user.name)

    after_sum = keep_calls(facts, values, [{norm}])
    before_sum = keep_calls(facts, values, [{"all_reduce_2"}])

    assert after_sum is not None
    assert before_sum is not None
    (equal,) = (spec for spec in after_sum.inputs if spec.name == f"%{middle}")
    (addend,) = (spec for spec in before_sum.inputs if spec.name.startswith("%"))
    assert equal.placements == ()
    assert addend.placements == (("tp", PARTIAL),)


def test_what_stands_under_a_root_stays_above_zero() -> None:
    program = large.tensor_parallel(4)
    facts, values = facts_of(sketch_of(program)), Values(program)

    edit = keep_calls(facts, values, [{"rsqrt_2"}])

    assert edit is not None
    (spec,) = (spec for spec in edit.inputs if spec.name.startswith("%"))
    assert spec.recipe == Recipe("norm_weight")


def test_one_name_may_be_another_value_in_another_graph() -> None:
    """Nodes of graphs that differ share names by chance: shapes tell that they are no one value."""
    mesh = TP2
    specs = [InputSpec("x", (4, 6)), InputSpec("y", (3, 2))]

    def graph(name: str, rank: int) -> tuple[GraphBuilder, fx.Graph]:
        b = GraphBuilder(mesh, {spec.name: spec for spec in specs}, rank)
        value = b.call("aten::relu", b.input(name))
        if rank:
            value = b.call("aten::neg", value)
        return b, b.finish(b.call("aten::tanh", value) if rank else b.call("aten::tanh", b.call("aten::abs", value)))

    (b0, first), (b1, second) = graph("x", 0), graph("y", 1)
    bindings = tuple(large.RankBinding(i, b.bindings(i)) for i, b in enumerate((b0, b1)))
    program = Program(mesh, (first, second), bindings, tuple(specs))
    facts, values = facts_of(sketch_of(program)), Values(program)

    edit = keep_calls(facts, values, [{"abs_1"}, {"neg"}])

    assert edit is not None
    fitted = legalize_edit(facts, edit)
    assert fitted is not None
    made = program_of(fitted.sketch)
    assert sorted(spec.shape for spec in made.inputs) == [(3, 2), (4, 6)]
    assert Lockstep().run(made).finished


def test_small_programs_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "units_of", lambda *_: pytest.fail("cut"))

    assert reduce(large.transformer(6), has_sigmoid_running).program.size == 1


def has_sigmoid_running(program: Program) -> bool:
    return bool(named(program, "aten::sigmoid")) and Lockstep().run(program).finished


# ------------------------------------------------------------------------------------------------------------ suspects


def test_suspects_are_where_the_pass_has_been() -> None:
    program = large.transformer(30, 2, marked=17)

    verdict = verify(SunkBelowConstant(), program)

    assert set(suspects_of(verdict, "wrong-value")) & {"all_reduce_17", "add_17", "add_18"}
    assert "all_reduce" not in suspects_of(verdict, "wrong-value")


def verdict_of(program: Program, rewritten: Program | None, **finding: object) -> Verdict:
    found = Finding("pass-raised", "application", **{"title": "", **finding})  # type: ignore[arg-type]
    return Verdict("refuted", [found], [], Pair(program, rewritten, changed=rewritten is not None))


def test_nodes_that_a_finding_quotes_are_suspects() -> None:
    program = large.tensor_parallel(4)
    said = verdict_of(program, None, title="ValueError: cannot move 'mm_3'", detail="While executing %sigmoid_1 : ...")

    assert suspects_of(said, "pass-raised") == ("mm_3", "sigmoid_1")
    assert suspects_of(said, "wrong-value") == ()


def test_of_a_node_that_the_pass_has_made_the_nearest_are_suspects() -> None:
    program = large.tensor_parallel(4)

    def clones(gm: fx.GraphModule) -> fx.GraphModule:
        node = next(n for n in gm.graph.nodes if n.name == "sigmoid_2")
        with gm.graph.inserting_after(node):
            made = gm.graph.call_function(torch.ops.aten.clone.default, (node,), name="made_by_the_pass")
        node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
        return gm

    rewritten = verify(clones, program).pair.rewritten
    said = verdict_of(program, rewritten, node="made_by_the_pass")

    assert suspects_of(said, "pass-raised")[0] == "sigmoid_2"


def test_a_pass_that_changes_nothing_has_no_suspects() -> None:
    assert suspects_of(verify(Identity(), large.tensor_parallel(4)), "wrong-value") == ()


# ---------------------------------------------------------------------------------------------------------- wide programs


def elements(program: Program) -> int:
    return sum(torch.Size(spec.shape).numel() for spec in program.inputs)


def test_a_wide_program_is_made_narrow_first() -> None:
    program = large.transformer(22, 2, tokens=64, hidden=128)
    asked: list[Program] = []

    def shows(trial: Program) -> bool:
        asked.append(trial)
        return has_sigmoid_running(trial)

    found = reduce(program, shows)

    assert found.program.size == 1
    assert elements(asked[0]) < elements(program) / 64
    assert asked[0].size == program.size


@pytest.mark.parametrize("kind", ["given", "integers"])
def test_indices_stay_inside_of_what_they_index(kind: str) -> None:
    rows = 1024
    table = InputSpec("table", (rows, 512))
    values = tuple(float(i * 7 % rows) for i in range(24))
    recipe = Recipe("given", values=values) if kind == "given" else Recipe("integers", float(rows))
    specs = [table, InputSpec("indices", (24,), torch.int64, recipe=recipe)]

    def build(b: GraphBuilder) -> fx.Node:
        value = b.call("aten::embedding", b.input("table"), b.input("indices"))
        for _ in range(160):
            value = b.call("aten::tanh", value)
        return value

    def shows(trial: Program) -> bool:
        return bool(named(trial, "aten::embedding")) and Lockstep().run(trial).finished

    search = SketchSearch(spmd_program(TP2, specs, build), shows, None)
    assert is_wide(search)
    narrow(search)
    assert not is_wide(search)
    assert shows(search.program)

    found = reduce(search.program, shows).program

    assert [node.name for node in compute_nodes(found.graphs[0])] == ["embedding"]
    assert elements(found) <= 4


def test_views_with_static_shapes_follow() -> None:
    specs = [InputSpec("x", (16, 2048)), InputSpec("weight", (2048, 2048)), InputSpec("cos", (16, 128))]

    def build(b: GraphBuilder) -> fx.Node:
        value, weight, cos = (b.input(spec.name) for spec in specs)
        for _ in range(45):
            heads = b.call("aten::view", b.call("aten::mm", value, weight), [16, 16, 128])
            turned = b.call("aten::mul.Tensor", b.call("aten::transpose.int", heads, 0, 1), cos)
            value = b.call("aten::reshape", b.call("aten::transpose.int", turned, 0, 1), [16, 2048])
        return value

    program = spmd_program(TP2, specs, build)
    search = SketchSearch(program, lambda trial: trial.size == program.size and Lockstep().run(trial).finished, None)

    narrow(search)

    assert elements(search.program) < elements(program) / 64


# --------------------------------------------------------------------------------------------------------- given values


def local(spec: InputSpec, mesh: Mesh, rank: int) -> torch.Tensor:
    return spec.values(mesh, rank, 0)


GIVEN = Recipe("given", values=tuple(float(i) for i in range(24)))


def test_of_given_values_those_at_the_same_indices_stay() -> None:
    spec = InputSpec("x", (4, 6), torch.int64, recipe=GIVEN)

    smaller = with_shape(spec, (3, 2))

    assert torch.equal(local(smaller, TP2, 0), local(spec, TP2, 0)[:3, :2])


def test_of_values_given_to_each_member_so_do_those_of_each() -> None:
    spec = InputSpec("x", (3, 4), torch.int64, (("tp", VARYING),), GIVEN)

    smaller = with_shape(spec, (2, 4))

    for rank in range(2):
        assert torch.equal(local(smaller, TP2, rank), local(spec, TP2, rank)[:2])


def test_values_follow_the_ranks_that_are_left() -> None:
    mesh = Mesh.grid({"dp": 2, "tp": 2})
    spec = InputSpec("x", (6,), torch.int64, (("dp", VARYING), ("tp", VARYING)), GIVEN)
    ranks = [1, 3]
    after = Mesh.grid({"dp": 2, "tp": 1})

    smaller = keep_ranks(spec, mesh, after, ranks)

    for new, old in enumerate(ranks):
        assert torch.equal(local(smaller, after, new), local(spec, mesh, old))


def test_a_shard_of_given_values_is_what_the_rank_holds() -> None:
    spec = InputSpec("x", (4, 6), torch.int64, (("tp", shard(0)),), GIVEN)

    made = fix_to_rank(spec, TP2, 1, 0)

    assert made.placements == ()
    assert torch.equal(local(made, TP2, 0), local(spec, TP2, 1))


def test_given_values_give_way_to_drawn_ones_in_their_range() -> None:
    assert plain_input(InputSpec("x", (24,), torch.int64, recipe=GIVEN)).recipe == Recipe("integers", 24.0)
    assert plain_input(InputSpec("x", (24,), recipe=GIVEN)).recipe == Recipe()
    mask = Recipe("given", values=(0.0, 1.0))
    assert plain_input(InputSpec("x", (2,), torch.bool, recipe=mask)).recipe == Recipe("mask")
    negative = InputSpec("x", (2,), torch.int64, recipe=Recipe("given", values=(-1.0, 1.0)))
    assert plain_input(negative) is negative


def test_integers_are_cut_off_at_the_size_that_they_index() -> None:
    specs = [InputSpec("i", (24,), torch.int64, recipe=GIVEN), InputSpec("f", (24,), recipe=GIVEN)]
    program = spmd_program(TP2, specs, lambda b: (b.input("i"), b.input("f")))
    sketch = sketch_of(program)

    made = clamp_indices(sketch, {32: 4, 1000: 2})

    assert made is not None
    assert max(made.inputs[0].recipe.values) == 3
    assert made.inputs[1] == specs[1]
    assert clamp_indices(sketch, {16: 4}) is None  # they are no indices of so small a dim


def test_a_program_with_given_indices_is_reduced_with_them() -> None:
    program = large.transformer(4)

    def shows(trial: Program) -> bool:
        return bool(named(trial, "aten::embedding")) and Lockstep().run(trial).finished

    found = reduce(program, shows).program

    assert found.size == 1
    table, indices = sorted(found.inputs, key=lambda spec: spec.dtype.is_floating_point, reverse=True)
    assert torch.Size(table.shape).numel() <= 2
    assert indices.recipe.kind == "integers"
    assert torch.Size(indices.shape).numel() <= 2


def test_values_of_programs_that_are_too_large_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    program = large.transformer(4)
    assert Values(program).varies("add_2") == frozenset()
    monkeypatch.setattr(replacements, "MAX_ELEMENTS", 100)
    blind = Values(program)

    assert isinstance(blind.run, Run)
    assert blind.varies("add_2") == {"tp"}
