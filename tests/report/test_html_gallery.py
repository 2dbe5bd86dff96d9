"""The page of several counterexamples, and the file that says what each of them is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tcverify.cases.counterexample import write_counterexample
from tcverify.cli.main import main
from tcverify.errors import ProgramError
from tcverify.report.html.gallery import make_gallery, read_about, to_gallery
from tests.report.test_html import HOSTILE, Reader
from tests.support.html_cases import case

ABOUT = {
    "title": "A sum is lost",
    "class": "dropped collective",
    "what": "The sum over ranks is dropped.",
    "planted": ["add_1"],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three cases: one that is described rightly, one whose defect is elsewhere, one that is not described."""
    tell(write_counterexample(case("wrong-value", 3), tmp_path), ABOUT)
    tell(
        write_counterexample(case("deadlock"), tmp_path),
        ABOUT | {"title": "Orders differ", "class": "order", "planted": ["y"]},
    )
    write_counterexample(case("pass-raised"), tmp_path)
    return tmp_path


def tell(path: Path, about: Any) -> None:
    (path.parent / "about.json").write_text(json.dumps(about))


def paths(folder: Path) -> Sequence[Path]:
    return sorted(folder.glob("*/counterexample.json"))


def test_cases_stand_in_their_classes(folder: Path) -> None:
    found = make_gallery(paths(folder), folder)
    titles = {group: [e.about.title for e in exhibits] for group, exhibits in found.groups}
    assert titles == {
        "dropped collective": ["A sum is lost"],
        "order": ["Orders differ"],
        "pass-raised": ["pass-raised in mine"],
    }
    assert found.summary == (
        "3 cases in 3 classes; the report names the planted node in 1 of the 2 cases with a known location"
    )


def test_the_page_says_what_is_wrong_and_how_to_see_it_again(folder: Path) -> None:
    page = Reader(to_gallery(paths(folder), folder))
    for text in (
        "The sum over ranks is dropped.",
        "a partial sum of the original's 'all_reduce_1'",
        "✓ The report names the planted node: add_1",
        "✗ The report does not name the planted node: y",
        f"tcverify replay {case('deadlock').id} --report-dir {folder}",
    ):
        assert text in page.text
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(set(ids)) == len(ids)
    flagged = [a for tag, a in page.tags if tag == "g" and "flagged" in str(a.get("class"))]
    assert len(flagged) == 3  # the sum's, and one on each of two ranks that wait for each other


def test_only_reports_that_exist_are_linked(folder: Path) -> None:
    found = case("deadlock")
    (folder / found.id / "report.html").write_text("")
    page = Reader(to_gallery(paths(folder), folder))
    links = [a["href"] for tag, a in page.tags if tag == "a" and not str(a["href"]).startswith("#")]
    assert links == [f"{found.id}/report.html"]


def test_what_others_wrote_stays_text(tmp_path: Path) -> None:
    path = write_counterexample(case("wrong-value"), tmp_path)
    tell(path, {key: HOSTILE for key in ("title", "class", "what")} | {"planted": [HOSTILE], "seen_in": [HOSTILE]})
    page = Reader(to_gallery([path], tmp_path))
    assert not {"img"} & {tag for tag, _ in page.tags}
    assert page.text.count("<img src=x onerror=alert(1)>") >= 5


def test_a_case_without_a_description_describes_itself(tmp_path: Path) -> None:
    assert read_about(tmp_path) is None


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        (json.dumps({**ABOUT, "plantd": []}), "has unknown keys: 'plantd'"),
        (json.dumps({k: v for k, v in ABOUT.items() if k != "what"}), '"what" is missing or not a string'),
        (json.dumps({**ABOUT, "title": 3}), '"title" is missing or not a string'),
        (json.dumps({**ABOUT, "class": "  "}), '"class" is missing or not a string'),
        (json.dumps({**ABOUT, "planted": "add"}), '"planted" is not a list of strings'),
        (json.dumps({**ABOUT, "seen_in": [1]}), '"seen_in" is not a list of strings'),
        (" " * 70_000, "at most 65536 are read"),
    ],
)
def test_a_malformed_description_is_named(tmp_path: Path, about: str, message: str) -> None:
    (tmp_path / "about.json").write_text(about)
    with pytest.raises(ProgramError) as raised:
        read_about(tmp_path)
    assert message in str(raised.value)
    assert str(tmp_path / "about.json") in str(raised.value)


def test_the_command_line_shows_a_folder_as_one_page(folder: Path) -> None:
    outcome = CliRunner().invoke(main, ["show", str(folder), "--format", "html"])
    assert outcome.exit_code == 0, outcome.output
    assert outcome.output == to_gallery(paths(folder), folder) + "\n"


def test_the_command_line_names_a_malformed_description(folder: Path) -> None:
    tell(paths(folder)[0], [])
    outcome = CliRunner().invoke(main, ["show", str(folder), "--format", "html"])
    assert outcome.exit_code == 2
    assert "about.json is not a JSON object" in outcome.output


def test_a_folder_with_one_case_is_the_page_of_that_case(folder: Path) -> None:
    for path in paths(folder)[1:]:
        shutil.rmtree(path.parent)
    outcome = CliRunner().invoke(main, ["show", str(folder), "--format", "html"])
    assert "Defects of passes" not in outcome.output
    assert "What is wrong" in outcome.output
