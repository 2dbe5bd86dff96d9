"""The planted faults fit the sources as they are, and what runs them tells those that tests show from those that none does."""

import ast
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.quality.fault_list import DoesNotApply, Fault, read_faults
from tests.quality.nearest import ROOT
from tests.quality.planted_faults import KILLED, OVERDUE, SURVIVED, UNJUDGED, as_markdown, chosen, judge_all

FAULTS = read_faults()

#: Areas that have faults of their own, whatever else does.
AREAS = {
    "application", "campaign", "capturing", "checks", "cost", "domains", "execution", "explain", "ops", "passes", "program",
    "report", "shrink", "strategies", "verification",
}  # fmt: skip

#: What starts a run: a fault there fails nearly every test, whatever that is about.
LEFT_OUT = (
    "tcverify/__init__.py",
    "tcverify/__main__.py",
    "tcverify/cli/main.py",
    "tcverify/cli/options.py",
    "tcverify/cli/arguments.py",
    "tcverify/cli/running.py",
)


def test_there_are_many_and_they_are_spread() -> None:
    assert len(FAULTS) >= 80
    assert len({fault.file for fault in FAULTS}) >= 40
    areas = Counter(fault.area for fault in FAULTS)
    assert set(areas) >= AREAS
    assert max(areas.values()) <= len(FAULTS) // 4
    assert max(Counter(fault.name for fault in FAULTS).values()) == 1


def test_each_applies_to_one_place_and_is_another_program() -> None:
    problems = []
    for fault in FAULTS:
        text = (ROOT / fault.file).read_text(encoding="utf-8")
        try:
            if ast.dump(ast.parse(fault.apply(text))) == ast.dump(ast.parse(text)):
                problems.append(f"{fault.name} changes nothing")
        except (DoesNotApply, SyntaxError) as error:
            problems.append(f"{fault.name}: {error}")
    assert problems == []


def test_the_test_of_each_exists() -> None:
    def missing(test: str) -> bool:
        file, *names = test.partition("[")[0].split("::")
        text = (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).is_file() else ""
        return any(re.search(rf"^ *(?:async )?(?:def|class) {name}\b", text, re.MULTILINE) is None for name in names)

    assert [f"{one.name}: {one.test}" for one in FAULTS if one.test and missing(one.test)] == []


def test_each_has_a_reason_and_none_ends_every_run() -> None:
    assert [fault.name for fault in FAULTS if len(fault.why.split()) < 6] == []
    assert [fault.name for fault in FAULTS if fault.file in LEFT_OUT or fault.file.endswith("__init__.py")] == []


def fault(name: str, old: str, new: str, file: str = "tcverify/sums.py") -> Fault:
    return Fault("sums", name, file, "it adds up something else", old, new)


def test_a_fault_that_fits_nowhere_or_twice_does_not_apply() -> None:
    with pytest.raises(DoesNotApply, match="occurs 2 times"):
        fault("twice", "a", "b").apply("a + a")
    with pytest.raises(DoesNotApply, match="occurs 0 times"):
        fault("nowhere", "c", "b").apply("a + a")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in {
        "pyproject.toml": (
            "[tool.pytest.ini_options]\n"
            "addopts = ['--import-mode=importlib', '-m', 'not slow']\n"
            "markers = ['slow: left out']\n"
        ),
        "tcverify/__init__.py": "",
        "tcverify/sums.py": (
            "def total(numbers):\n    found = 0\n    for one in numbers:\n        found += one\n    return found\n"
        ),
        "tests/test_total.py": (
            "import pytest\nfrom tcverify.sums import total\n\n"
            "def test_of_none():\n    assert total([]) == 0\n\n"
            "@pytest.mark.parametrize('last', [0, 3])\n"
            "def test_of_some(last):\n    assert total([1, 2, last]) == 3 + last\n"
        ),
        "tests/test_late.py": (
            "import tcverify.sums\nimport pytest\n\n"
            "@pytest.mark.slow\ndef test_never_run():\n    assert tcverify.sums.total([-1]) == 1\n"
        ),
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_what_tests_show_is_killed_and_what_none_shows_survives(project: Path) -> None:
    before = {path: path.read_bytes() for path in sorted(project.rglob("*.*"))}
    wrong = fault("last-one-counts-alone", "found += one", "found = one")
    harmless = fault("another-order", "for one in numbers", "for one in reversed(numbers)")
    nowhere = fault("nowhere", "product", "sum")
    no_import = fault("not-to-be-imported", "def total", "import nothing_like_it\ndef total")
    found = list(judge_all([wrong, harmless, nowhere, no_import], root=project, jobs=2, limit=100))
    assert [one.result for one in found] == [KILLED, SURVIVED, UNJUDGED, UNJUDGED]
    assert found[0].test == "tests/test_total.py::test_of_some[0]"
    assert (found[1].files, found[1].reached) == (2, 2)
    assert "occurs 0 times" in found[2].problem
    assert "nothing_like_it" in found[3].problem
    assert {path: path.read_bytes() for path in sorted(project.rglob("*.*"))} == before
    assert "| last-one-counts-alone | `tests/test_total.py::test_of_some[0]` |" in as_markdown(found)


def test_the_test_that_a_fault_names_runs_first(project: Path) -> None:
    last = project / "tests" / "test_zero.py"
    last.write_text("from tcverify.sums import total\n\ndef test_of_many():\n    assert total([1, 2, 3]) == 6\n")
    wrong = fault("last-one-counts-alone", "found += one", "found = one")
    (nearest,) = judge_all([wrong], root=project)
    (known,) = judge_all([replace(wrong, test="tests/test_zero.py::test_of_many")], root=project)
    assert (nearest.result, nearest.test) == (KILLED, "tests/test_total.py::test_of_some[0]")
    assert (known.result, known.test, known.files) == (KILLED, "tests/test_zero.py::test_of_many", 0)


@pytest.mark.parametrize(
    "stale",
    [
        "tests/test_total.py::test_of_none",  # passes
        "tests/test_late.py::test_never_run",  # is left out
        "tests/test_total.py::test_that_is_gone",
        "tests/test_gone.py::test_of_some",
    ],
)
def test_a_named_test_that_shows_nothing_any_more_is_no_obstacle(project: Path, stale: str) -> None:
    wrong = fault("last-one-counts-alone", "found += one", "found = one")
    (found,) = judge_all([replace(wrong, test=stale)], root=project)
    assert (found.result, found.test) == (KILLED, "tests/test_total.py::test_of_some[0]")


def test_a_test_that_fails_without_any_fault_shows_nothing(project: Path) -> None:
    with (project / "tests" / "test_total.py").open("a") as tests:
        tests.write("\ndef test_wrong():\n    assert total([1]) == 2\n")
    (found,) = judge_all([fault("another-order", "for one in numbers", "for one in reversed(numbers)")], root=project)
    assert found.result == UNJUDGED
    assert "also fails without it: tests/test_total.py::test_wrong" in found.problem


def test_time_ends_what_would_never_end(project: Path) -> None:
    (found,) = judge_all([fault("for-ever", "found += one", "while True: pass")], root=project, limit=3)
    assert found.result == OVERDUE
    assert "3 s were over" in found.problem


def test_a_sample_depends_on_the_seed_alone() -> None:
    first, again, other = (chosen(FAULTS, [], 10, seed) for seed in ("ab12", "ab12", "cd34"))
    assert len(first) == 10
    assert first == again != other
    assert chosen(FAULTS, [FAULTS[3].name], None, "0") == [FAULTS[3]]
    with pytest.raises(SystemExit, match="no fault is named nothing"):
        chosen(FAULTS, ["nothing"], None, "0")
