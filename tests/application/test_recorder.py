"""What is reached of a pass's code: by `sys.monitoring` where there is one, and by `sys.settrace`, with the same result."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tcverify import Guarded
from tcverify.application import CodePoint, Watch, source_of
from tcverify.application.coverage.recorder import Recorder, Scope
from tcverify.campaign import Coverage
from tcverify.campaign.coverage import EACH_TIME
from tcverify.report.coverage import reach_line, unreached_lines
from tests.support import reached_code, rewriting_passes
from tests.support.reached_code import line
from tests.support.rewriting_passes import negations

FILE = reached_code.__file__
WAYS = [pytest.param(False, id="settrace")]
if hasattr(sys, "monitoring"):
    WAYS.append(pytest.param(True, id="monitoring"))


@pytest.fixture(params=WAYS)
def recorder(request: pytest.FixtureRequest) -> Iterator[Recorder]:
    before = sys.gettrace()  # coverage.py's own
    sys.settrace(None)
    with contextlib.closing(Recorder(Scope([FILE]), monitored=request.param)) as made:
        yield made
    sys.settrace(before)


def run() -> None:
    reached_code.count([1, 4, 2], False)
    reached_code.count([1], True)
    reached_code.end(1)
    reached_code.end(0)
    reached_code.loop([0])
    reached_code.defines(1)
    reached_code.Holder().method()
    with contextlib.suppress(ZeroDivisionError):
        reached_code.raises(0)


def outcomes(points: list[CodePoint]) -> set[tuple[int, int]]:
    return {(point.line, point.outcome) for point in points if point.outcome >= 0}


def test_lines_and_outcomes_of_conditions(recorder: Recorder) -> None:
    with recorder.watching():
        run()
    found = recorder.taken()
    assert {point.file for point in found} == {FILE}
    assert outcomes(found) == {
        (line("between"), 0), (line("between"), 1), (line("hundred"), 0), (line("while"), 0), (line("several"), 0),
        (line("not flag"), 0), (line("not flag"), 1), (line("end"), 0), (line("end"), 1), (line("loop"), 0),
        (line("defines"), 1),
    }  # fmt: skip
    lines = {point.line for point in found if point.outcome < 0}
    assert {line("first"), line("two"), line("number"), line("division")} <= lines
    assert not {line("minus"), line("down"), line("early"), line("printed"), line("never")} & lines


def test_conditions_that_functions_return(recorder: Recorder) -> None:
    with recorder.watching():
        reached_code.answers(7)
    assert (line("answers"), 0) not in outcomes(recorder.taken())
    with recorder.watching():
        reached_code.answers(3)
        reached_code.answers(4)
    assert {one for one in outcomes(recorder.taken()) if one[0] == line("answers")} == {(line("answers"), 1)}
    recorder.ask([])
    with recorder.watching(), contextlib.suppress(TypeError):
        reached_code.answers("no number")  # type: ignore[arg-type]
    assert recorder.taken() == []
    with recorder.watching():
        reached_code.answers(-1)
    assert outcomes(recorder.taken()) == {(line("answers"), 0)}
    assert line("answers") in next(one for one in source_of(FILE).functions if one.name == "answers").conditions


def test_only_what_is_new_is_told(recorder: Recorder) -> None:
    with recorder.watching():
        run()
    assert recorder.taken()
    with recorder.watching():
        run()
        reached_code.loop([1])
    new, again = recorder.taken(), recorder.taken()
    assert again == []
    assert set(new) == {CodePoint(FILE, line("loop"), 1), CodePoint(FILE, line("printed"))}


def test_other_files_do_not_count(recorder: Recorder) -> None:
    with recorder.watching():
        source_of(FILE)
        Scope([FILE]).of(FILE)
    assert recorder.taken() == []


def test_where_watching_costs_time_ever_fewer_programs_are_watched() -> None:
    before = sys.gettrace()
    sys.settrace(None)
    watched = []
    try:
        recorder = Recorder(Scope([FILE]), monitored=False)
        for number in range(1, 65):
            with recorder.watching():
                if sys.gettrace() is not None:
                    watched.append(number)
                if number in (4, 5, 20):  # nobody looks at 20
                    reached_code.end(number - 4)
            recorder.taken()
    finally:
        sys.settrace(before)
    assert watched == [1, 2, 4, 5, 6, 8, 16, 32, 64]


def test_what_was_done_to_no_program_that_was_watched_is_watched_the_first_time() -> None:
    before = sys.gettrace()
    sys.settrace(None)
    missed = []
    try:
        recorder = Recorder(Scope([FILE]), monitored=False)
        for number in range(1, 20):
            with recorder.watching():
                pass
            if recorder.misses(number in (3, 4, 7, 14)):
                missed.append(number)
                with recorder.watching():
                    assert sys.gettrace() is not None
            recorder.taken()
    finally:
        sys.settrace(before)
    assert missed == [3]


def test_what_changes_a_program_is_reached_whenever_that_is() -> None:
    place = inspect.getsourcelines(rewriting_passes.rarely)[1] + 3
    with Guarded(f"{rewriting_passes.__name__}:rarely", covered=()) as subject:
        pairs = [subject.apply(negations(number)) for number in (1, 1, 1, 1, 3)]  # before 3.12 the 5th is not watched
    assert [pair.changed for pair in pairs] == [False, False, False, False, True]
    assert CodePoint(rewriting_passes.__file__, place) in pairs[-1].trace.reached


def test_what_can_be_reached_of_a_file() -> None:
    functions = {one.name: one for one in source_of(FILE).functions}
    assert {"count", "end", "loop", "never", "Holder.method", "line"} <= set(functions)
    assert functions["never"].lines == {line("never")}
    assert line("several") in functions["count"].conditions
    assert source_of("/nowhere.py").functions == ()


def test_coverage_says_what_was_never_reached() -> None:
    coverage = Coverage([FILE])
    first = [CodePoint(FILE, line("first")), CodePoint(FILE, line("between")), CodePoint(FILE, line("between"), 1)]
    coverage.add(first[:2])
    coverage.add(first)
    (report,) = coverage.report()
    assert (report.lines_reached, report.outcomes_reached) == (2, 1)
    assert report.always_true == (line("between"),)
    assert report.uncalled == ()  # nothing that was called names another function
    assert (line("between") + 1, line("not flag") + 2) in report.unreached
    told = unreached_lines([report])
    assert any(f"false on line {line('between')}" in text for text in told)
    assert reach_line([report]).startswith("coverage of tests/support/reached_code.py: 2 of ")


def test_functions_count_that_what_was_called_can_call() -> None:
    coverage = Coverage([FILE])
    coverage.add([CodePoint(FILE, line("answers"))])
    (report,) = coverage.report()
    assert report.uncalled == ("end",)
    assert report.lines == sum(len(one.lines) for one in source_of(FILE).functions if one.name in ("answers", "end"))


def test_what_a_pass_reaches_in_its_process() -> None:
    with Guarded(f"{rewriting_passes.__name__}:raising", covered=()) as subject:
        coverage = Coverage(subject.files)
        coverage.add(subject.apply(negations(1)).trace.reached)
        assert [subject.apply(negations(1)).trace.reached for _ in range(2)] == [
            [],
            [],
        ]  # the 4th program is watched anywhere
        (before,) = [one for one in coverage.report() if one.file == rewriting_passes.__file__]
        coverage.add(subject.apply(negations(2)).trace.reached)
        (after,) = [one for one in coverage.report() if one.file == rewriting_passes.__file__]
    assert after.lines_reached == before.lines_reached + 1
    assert after.outcomes_reached == before.outcomes_reached + 1
    assert (after.unreached, after.uncalled) == ((), ())


def test_what_nobody_took_note_of_is_told_again_by_the_same_process() -> None:
    with Guarded(f"{rewriting_passes.__name__}:raising", covered=()) as subject:
        once = subject.apply(negations(1)).trace.reached
        (pid,) = subject.pids
        subject.start(negations(2), watch=Watch())  # and nobody waits for the end
        again = subject.apply(negations(2)).trace.reached
        assert subject.pids == [pid]
        assert again
        assert not {*again} & {*once}
        assert subject.apply(negations(2)).trace.reached == []


def test_all_is_told_again_by_the_same_process_once_it_has_forgotten() -> None:
    with Guarded(f"{rewriting_passes.__name__}:raising", covered=()) as subject:
        once = subject.apply(negations(2)).trace.reached
        (pid,) = subject.pids
        subject.forget()
        assert {*subject.start(negations(2), watch=Watch())().trace.reached} == {*once}
        assert subject.pids == [pid]


def test_a_pass_whose_code_is_not_asked_for_is_not_watched() -> None:
    with Guarded(f"{rewriting_passes.__name__}:sound") as subject:
        assert subject.files == ()
        assert subject.apply(negations(2)).trace.reached == []


def test_modules_can_be_named_in_place_of_those_that_define_the_pass() -> None:
    with Guarded(f"{rewriting_passes.__name__}:sound", covered=["tests.support.reached_code"]) as subject:
        assert subject.files == (FILE,)
        assert subject.apply(negations(2)).trace.reached == []


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "    if not SWITCHED_ON:\n        return\n    change(gm)\n",
            "it returned at {file}:6, because `not SWITCHED_ON` was true {each}",
        ),
        (
            "    for node in gm.graph.nodes:\n        if node.op == 'get_attr':\n            change(gm)\n",
            "`node.op == 'get_attr'` was false {each} at {file}:6",
        ),
        ("    if SWITCHED_ON or gm:\n        gm.recompile()\n", ""),
        ("    if len(gm.graph.nodes) > 4:\n        return\n    gm.recompile()\n", ""),
    ],
)
def test_the_condition_that_kept_a_pass_from_going_on_is_named(tmp_path: Path, body: str, said: str) -> None:
    file = tmp_path / "switched.py"
    file.write_text(f"SWITCHED_ON = False\n\n\ndef switched(gm):\n{body}\n\ndef change(gm):\n    gm.graph.lint()\n")
    with Guarded(f"{file}:switched", covered=()) as subject:
        coverage = Coverage(subject.files)
        for number in (1, 2, 3):
            coverage.add(subject.apply(negations(number)).trace.reached)
    assert coverage.decided() == said.format(file="switched.py", each=EACH_TIME)
