"""The exhibits in reports/gallery: well-formed, still refuted on the mutant, passed on the sound pass, and well explained.

`python benchmarks/gallery.py` prints what the reports name first; with --write it makes the cases anew.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tcverify.cases.counterexample import Counterexample, case_id, read_counterexample
from tcverify.report.script import to_script
from tests.mutants.exhibit_list import EXHIBITS
from tests.mutants.exhibits import GALLERY, Exhibit, first_bad_node, hidden, judge, make_case
from tests.mutants.exhibits_of_values import HIDDEN

ROOT = GALLERY.parents[1]

#: Kinds of finding that a lowering to streams can show.
STREAMS = {"race", "unordered-collectives", "anchor-mismatch", "stream-conflict", "wrong-schedule", "no-gain"}

#: Least share of the exhibits with a planted node whose report names it first.
LEAST_NAMED = 1.0


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # the passes are found from here


def case_of(exhibit: Exhibit) -> Counterexample:
    return read_counterexample(GALLERY / exhibit.slug / "counterexample.json")


def about(exhibit: Exhibit) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GALLERY / exhibit.slug / "about.json").read_text())
    return found


exhibits = pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: exhibit.slug)


def test_every_exhibit_has_a_folder_and_every_folder_an_exhibit() -> None:
    slugs = [exhibit.slug for exhibit in EXHIBITS]
    assert len(set(slugs)) == len(slugs)
    assert sorted(path.name for path in GALLERY.iterdir()) == sorted(slugs)


def test_the_gallery_is_broad() -> None:
    cases = [case_of(exhibit) for exhibit in EXHIBITS]
    assert {case.finding.check for case in cases} >= {"equivalence", "collectives", "metadata", "structure", "purity"}
    assert {case.finding.kind for case in cases} >= STREAMS
    assert {case.finding.data.get("kind") for case in cases if case.finding.kind == "race"} == {"RAW", "WAR", "output"}
    assert any("+" in case.facts.name for case in cases)
    assert max(case.program.size for case in cases) <= 12


@exhibits
def test_a_folder_is_well_formed(exhibit: Exhibit) -> None:
    folder, case, said = GALLERY / exhibit.slug, case_of(exhibit), about(exhibit)
    assert {path.name for path in folder.iterdir()} == {"counterexample.json", "repro.py", "about.json"}
    assert case.id == case_id(case.program, case.facts, case.finding.kind)
    assert (case.facts.target, case.finding.kind, dict(case.facts.options)) == (
        exhibit.mutant,
        exhibit.kind,
        exhibit.options,
    )
    assert (folder / "repro.py").read_text() == to_script(case)
    assert said.keys() == {"title", "class", "what", "planted", "seen_in"}
    assert (said["title"], said["class"], said["what"]) == (exhibit.title, exhibit.family, exhibit.what)
    if case.rewritten is not None:
        assert set(said["planted"]) <= {node.name for graph in case.rewritten.graphs for node in graph.nodes}
    else:
        assert all(name == "output" or f"%{name} :" in case.listing for name in said["planted"])
    assert not case.shrink_cut


@exhibits
def test_the_mutant_is_refuted_again(exhibit: Exhibit) -> None:
    case = case_of(exhibit)
    finding = exhibit.finding(judge(exhibit, exhibit.subject(), case.program))
    assert finding is not None
    assert finding.title == case.finding.title


@exhibits
def test_the_sound_pass_passes(exhibit: Exhibit) -> None:
    verdict = judge(exhibit, exhibit.sound_subject(), case_of(exhibit).program)
    assert verdict.status == "passed", (verdict.findings, verdict.doubts)


@pytest.mark.parametrize("exhibit", HIDDEN, ids=lambda exhibit: exhibit.slug)
def test_float64_does_not_show_what_rounding_hides(exhibit: Exhibit) -> None:
    assert exhibit.domain != "float64"
    assert hidden(exhibit, exhibit.subject(), case_of(exhibit).program)


def test_the_exact_domain_finds_five_defects_that_float64_misses() -> None:
    assert sum(exhibit.domain == "exact" for exhibit in HIDDEN) >= 5


def test_reports_name_the_planted_node_first() -> None:
    planted = {exhibit.slug: about(exhibit)["planted"] for exhibit in EXHIBITS}
    first = {exhibit.slug: first_bad_node(case_of(exhibit)) for exhibit in EXHIBITS if planted[exhibit.slug]}
    missed = [slug for slug, node in first.items() if node not in planted[slug]]
    assert len(first) - len(missed) >= LEAST_NAMED * len(first), missed


def test_a_case_can_be_made_anew() -> None:
    """Of an exhibit with a program of its own: what strategies draw may change, and cases stay as they are."""
    exhibit = next(one for one in EXHIBITS if one.slug == "results-share-storage")
    made = make_case(exhibit)
    assert made is not None
    assert (made.case.id, made.planted) == (case_of(exhibit).id, about(exhibit)["planted"])
