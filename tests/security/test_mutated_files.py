"""Files of others, changed at random: each is read as what it says, or refused with one error that says where."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tcverify.cases.counterexample import decode_counterexample, find_counterexamples, write_counterexample
from tcverify.errors import ProgramError, UsageError
from tests.security import inputs
from tests.security.mutation import HOSTILE_TEXTS, mutated

NAMES = ("program", "counterexample", "baseline")

#: Smaller ones are shown sooner; what they are made of is the same.
SEEDS = {name: sorted(inputs.seeds(name), key=lambda data: len(json.dumps(data)))[:12] for name in NAMES}

#: Examples per reader: those that show a counterexample in every form take longest.
EXAMPLES = {"program": 200, "counterexample": 40, "baseline": 100}


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_is_nearly_right(name: str, tmp_path: Path) -> None:
    read = inputs.readers(tmp_path / "given.json")[name]
    outcomes = []

    @settings(max_examples=EXAMPLES[name], deadline=None, database=None, derandomize=True)
    @given(st.integers(0, len(SEEDS[name]) - 1), st.integers(0, 2**32))
    def one(number: int, seed: int) -> None:
        data = mutated(SEEDS[name][number], random.Random(seed))
        outcomes.append(read(json.dumps(data).encode()))

    one()
    assert set(outcomes) == {True, False}  # some are read, some are refused


@pytest.mark.parametrize("name", NAMES)
def test_the_files_themselves_are_read(name: str, tmp_path: Path) -> None:
    assert inputs.readers(tmp_path / "given.json")[name](json.dumps(SEEDS[name][0]).encode())


def _texts(data: Any, change: Any) -> list[tuple[Any, Any]]:
    """The places of free texts in a counterexample: not those of its program, which are checked when it is read."""
    places = []
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        if key in ("program", "rewritten", "format", "id", "domain", "contract"):
            continue
        if isinstance(value, (dict, list)):
            places += _texts(value, change)
        elif isinstance(value, str):
            places.append((data, key))
    return places


@pytest.mark.parametrize("text", HOSTILE_TEXTS, ids=range(len(HOSTILE_TEXTS)))
def test_texts_that_act_are_shown_in_every_form(text: str) -> None:
    """Every free text of a counterexample at once; what each form may hold is tested where the form is."""
    data = json.loads(json.dumps(SEEDS["counterexample"][0]))
    for parent, key in _texts(data, text):
        parent[key] = text
    assert inputs.counterexample(json.dumps(data).encode())


@pytest.mark.parametrize(
    "name", ["../../../x", "/tmp/abcdef", "..", "a/b", "ABCDEF01", "abcdef0", "abcdef012", "abcdef0\n", ""]
)
def test_an_id_is_no_path(name: str) -> None:
    data = {**SEEDS["counterexample"][0], "id": name}
    with pytest.raises(ProgramError, match="is not an id"):
        decode_counterexample(data, "given.json")


def test_what_is_looked_up_is_no_path_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some" / "where").mkdir(parents=True)
    monkeypatch.chdir(
        tmp_path / "some" / "where"
    )  # what lies around the current directory is the user's, and may be meant
    case = decode_counterexample(SEEDS["counterexample"][0], "given.json")
    path = write_counterexample(case, tmp_path / "reports")
    assert find_counterexamples(case.id[:4], tmp_path / "reports") == [path]
    for name in ("..", f"../reports/{case.id}", "*", "?" * 8, f"{case.id[:4]}*", "\x00", "~"):
        with pytest.raises(UsageError):
            find_counterexamples(name, tmp_path / "reports")
