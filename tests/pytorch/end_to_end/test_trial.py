"""Cases run in PyTorch's public API: what goes wrong there is told, what goes right too, and nothing else as either."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tcverify.cases.counterexample import Counterexample, read_counterexample
from tcverify.cases.end_to_end import EndToEnd
from tcverify.errors import UsageError
from tcverify.program import GraphBuilder, InputSpec, Mesh, Program, spmd_program
from tcverify.pytorch import SUBJECTS
from tcverify.pytorch.end_to_end.pipeline import Code
from tcverify.pytorch.end_to_end.script import make_script
from tcverify.pytorch.end_to_end.trial import pipeline_of, run_script, try_end_to_end
from tcverify.registry.references import find
from tests.sizes import by_night
from tests.support.html_cases import case as other_case

REPORTS = Path(__file__).parents[3] / "reports" / "pytorch"

#: The versions in which findings show here are those of their folders.
ON_213 = pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the counterexamples are of torch 2.13")


def case_of(name: str) -> Counterexample:
    return read_counterexample(REPORTS / name / "counterexample.json")


def tried(case: Counterexample) -> EndToEnd:
    told = try_end_to_end(case)
    assert told is not None
    return told


@ON_213
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("wait-alias-unknown", "also in torch.compile: wrong value on ranks 0, 1"),
        ("collective-waited-twice", "also in torch.compile: raises AssertionError on ranks 0, 1"),
        ("dtensor-fill-partial", "also in DTensor: wrong value on ranks 0, 1"),
        (
            "comm-buffer-returned",
            "could not be reached in torch.compile: the code that it lowers to needs CUDA and symmetric memory",
        ),
        pytest.param(
            "decomp-comms-global-values", "also in torch.compile: wrong value on ranks 0, 1", marks=pytest.mark.slow
        ),
        pytest.param(
            "returned-copies-share-memory",
            "also in torch.compile: other memory is shared on ranks 0, 1",
            marks=pytest.mark.slow,
        ),
        pytest.param("dtensor-view-of-empty-hangs", "also in DTensor: does not return on ranks 0, 1", marks=pytest.mark.slow),
        pytest.param("cse-merges-side-effects", "also in torch.compile: other calls on ranks 0, 1", marks=pytest.mark.slow),
        pytest.param(
            "default-partition-drops-collectives", "also in torch.compile: waits forever on rank 1", marks=pytest.mark.slow
        ),
        pytest.param(
            "bucketing-returns-strided-views",
            "torch.compile gives the right result under these options",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_what_becomes_of_a_finding_is_told(name: str, says: str) -> None:
    told = str(tried(case_of(name)))
    assert told.removesuffix(", with default settings too") == says


@ON_213
def test_what_goes_wrong_with_default_settings_too_is_told() -> None:
    case = case_of("reinplaced-result-overwritten")  # which is said to be of a pass that has to be switched on
    facts = replace(case.facts, name="torch:ddp_fusion", target=SUBJECTS["ddp_fusion"].target)
    told = tried(replace(case, facts=facts))
    assert str(told) == "also in torch.compile: wrong value on ranks 0, 1, with default settings too"


@ON_213
def test_what_ranks_were_to_give_and_gave_is_told() -> None:
    told = tried(case_of("dtensor-fill-partial"))
    assert told.lines == ("rank 0: output 0: expected 3.0, got 6.0", "rank 1: output 0: expected 3.0, got 6.0")


def of_two(inputs: list[InputSpec], build: Callable[[GraphBuilder], object]) -> Program:
    """A program of two ranks."""
    return spmd_program(Mesh.grid({"tp": 2}), inputs, build)


def gathered() -> Program:
    """Two all_gathers that become one, of values that no bucket changes."""

    def build(b: GraphBuilder) -> object:
        inputs = [b.input(name) for name in "xy"]
        gathers = [b.call("_c10d_functional::all_gather_into_tensor", one, 2, "tp") for one in inputs]
        return tuple(b.call("_c10d_functional::wait_tensor", one) for one in gathers)

    return of_two([InputSpec("x", (2,)), InputSpec("y", (3,))], build)


def test_a_sound_program_is_right() -> None:
    case = replace(case_of("bucketing-cat-promotes-integers"), program=gathered())
    assert tried(case) == EndToEnd(
        "right", "torch.compile", "the same as eager on all ranks", ("rank 0: as expected", "rank 1: as expected")
    )


@ON_213
@pytest.mark.parametrize(("kind", "state"), [("wrong-alias", "shown"), ("wrong-value", "right")])
def test_memory_is_compared_where_the_finding_is_about_it(kind: str, state: str) -> None:
    case = case_of("returned-copies-share-memory")
    assert tried(replace(case, finding=replace(case.finding, kind=kind))).state == state


def test_results_with_memory_of_their_own_are_right() -> None:
    case = case_of("returned-copies-share-memory")

    def both(b: GraphBuilder) -> object:
        x = b.input("x")
        return b.call("aten::relu", x), b.call("aten::neg", x)

    program = of_two([InputSpec("x", (2,))], both)
    assert tried(replace(case, program=program)).state == "right"


@pytest.mark.parametrize("placed", by_night(["F0,S0", "S0,F0", "F1,S1", "R,F0"], ["F0,S0", "S0,F0"]))
def test_strided_shards_are_written_as_the_subject_distributes_them(placed: str) -> None:
    """Sums of a value in each layout: a part that is missing, or there twice, would show."""
    mesh = Mesh.grid({"dp": 2, "tp": 2})
    program = spmd_program(mesh, [InputSpec("x", (6, 4))], lambda b: b.call("aten::sum.dim_IntList", b.input("x"), [0]))
    case = replace(case_of("dtensor-fill-partial"), program=replace(program, options={"x": placed}))
    assert tried(case).state == "right"


def test_a_sound_program_is_right_when_the_pass_is_called() -> None:
    case = replace(case_of("bucketing-cat-promotes-integers"), program=gathered())
    assert run_script(make_script(case, pipeline_of(case), "call"), "the pass").state == "right"


def test_cases_of_other_passes_are_not_tried() -> None:
    found = other_case("wrong-value")
    assert try_end_to_end(found) is None
    with pytest.raises(UsageError, match="is not a pass of PyTorch"):
        pipeline_of(found)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        pytest.param("import time; time.sleep(60)", "the script did not end within 2 s", id="hangs"),
        pytest.param("raise ValueError('no luck')", "ValueError: no luck", id="raises"),
        pytest.param("import os; os.abort()", "the script ended with -6", id="dies"),
        pytest.param("print('torch 0'); print('rank 1 died'); raise SystemExit(2)", "rank 1 died", id="unsure"),
    ],
)
def test_a_script_that_fails_is_no_defect(text: str, why: str) -> None:
    assert run_script(text, "torch.compile", seconds=2) == EndToEnd("failed", "torch.compile", why)


@ON_213
def test_another_exception_than_that_of_the_finding_is_no_defect() -> None:
    case = case_of("collective-waited-twice")
    title = "the pass raised AssertionError: something else on the graph of rank 0"
    detail = 'File "torch/_inductor/fx_passes/bucketing.py", line 1, in elsewhere\nAssertionError: something else'
    told = tried(replace(case, finding=replace(case.finding, title=title, detail=detail)))
    assert told.state == "failed"
    assert "Expected single user" in told.detail


def test_what_cannot_be_written_down_is_not_reached() -> None:
    case = case_of("wait-alias-unknown")
    large = of_two([InputSpec("x", (100, 100))], lambda b: b.call("aten::relu", b.input("x")))
    told = tried(replace(case, program=large))
    assert (told.state, "20000 elements" in told.detail) == ("unreachable", True)


@pytest.mark.parametrize("name", [name for name, one in SUBJECTS.items() if one.here])
def test_every_subject_says_how_it_is_reached(name: str) -> None:
    from tcverify.pytorch.functional_graphs import known_options

    subject = find(SUBJECTS[name].target)[0]
    pipeline = subject.pipeline(subject.chosen({}, {}))
    assert (
        pipeline.settings or pipeline.backend != "inductor" or pipeline.placements is not None or pipeline.unreachable
    )
    if torch.__version__.startswith("2.13"):
        # A misspelt setting would be left out, and every case be told as right.
        assert {*pipeline.settings} - {*known_options(pipeline.settings)} <= UNKNOWN


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("manual_overlap_bucketing", {}),
        ("schedule_overlap_bucketing", {"estimates": "by_size"}),
        ("comms.sink_waits", {"estimate_op_runtime": "uneven"}),
    ],
)
def test_settings_name_what_the_script_has_defined(name: str, options: dict[str, str]) -> None:
    if not SUBJECTS[name].here:
        pytest.skip(f"torch {torch.__version__} has no {SUBJECTS[name].source}")
    made = find(SUBJECTS[name].target)[0]
    pipeline = made.pipeline(made.chosen(options, {}))
    script = make_script(replace(case_of("bucketing-cat-promotes-integers"), program=gathered()), pipeline, "users")
    named = [value for value in pipeline.settings.values() if isinstance(value, Code) and value.isidentifier()]
    assert all(script.index(f"def {one}(") < script.index("SETTINGS = ") for one in named)
    assert named


#: Settings that torch 2.13 does not have: arguments of passes, and settings of other versions.
UNKNOWN = {"aten_distributed_optimizations.max_off_bucket_gb"}
