"""`tcverify explain`, and the terms that it knows."""

from __future__ import annotations

import pytest

from tcverify.program import KINDS
from tcverify.registry.glossary import GLOSSARY, explained, terms, terms_in
from tests.cli.conftest import run_here


@pytest.mark.parametrize("word", ["near miss", "near-miss", "Near Miss", "near misses"])
def test_a_term_is_explained_in_any_form(word: str) -> None:
    outcome = run_here("explain", *word.split())
    assert (outcome.code, " ".join(outcome.out.split())) == (0, f"{word}: {GLOSSARY['near miss']}")


def test_a_kind_of_finding_is_explained() -> None:
    assert run_here("explain", "deadlock").out == f"deadlock: {KINDS['deadlock']}\n"


def test_without_a_term_all_are_listed() -> None:
    lines = run_here("explain").out.splitlines()
    assert {*GLOSSARY, *KINDS} <= set(lines)
    assert sum(not line.startswith(" ") for line in lines) == len({*GLOSSARY, *KINDS})


@pytest.mark.parametrize(("word", "hint"), [("lockstp", "did you mean 'lockstep'?"), ("qqq", "lists all terms")])
def test_an_unknown_term_is_refused(word: str, hint: str) -> None:
    outcome = run_here("explain", word)
    assert outcome.code == 2
    assert f"there is no term '{word}'" in outcome.err
    assert hint in outcome.err


def test_terms_are_found_in_texts_as_whole_words() -> None:
    assert [term for term, _ in terms_in(["two divergences", "in Lockstep", "the awaited result"])] == [
        "divergence",
        "lockstep",
    ]
    assert terms_in(["nothing of this"]) == ()
    assert all(explained(term) for term in terms())
