"""The options for many processes and machines, as users meet them. What workers do is in tests/faults and tests/pytorch."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.cli.conftest import only_case, run_here, says

ONE = [
    "--strategy",
    "one",
    "--world-size",
    "2",
    "--confirm",
    "none",
    "--max-examples",
    "2",
    "--shrink-time",
    "1",
    "--seed",
    "1",
]


def test_a_corpus_brings_findings_back_and_damage_in_it_is_named(place: Path, tmp_path: Path) -> None:
    options = [*ONE, "--corpus", str(tmp_path / "corpus"), "--report-dir", str(tmp_path / "reports")]
    assert run_here("run", "mine.py:drops_reduction", *options).code == 1
    first = only_case(tmp_path / "reports")
    paths = sorted((tmp_path / "corpus").iterdir())
    assert paths
    again = run_here("run", "mine.py:drops_reduction", *options[:-1], str(tmp_path / "again"), columns=None)
    assert again.code == 1
    assert f"{len(paths)} case" in again.out
    assert only_case(tmp_path / "again") == first
    for path in paths:
        path.write_text("damaged")
    (tmp_path / "corpus" / "notes.txt").write_text("mine")
    last = run_here("run", "mine.py:drops_reduction", *options, columns=None)
    assert last.code == 1
    for name in (paths[0].name, "notes.txt"):
        assert f"{name} is " in last.out
    assert "skipped" in last.out
    assert "cases first" not in last.out


def test_a_corpus_of_cases_that_pass_is_no_reason_to_pass(place: Path, tmp_path: Path) -> None:
    """The pass that was sound is unsound now: what the corpus holds says so."""
    options = [*ONE, "--corpus", str(tmp_path / "corpus"), "--report-dir", str(tmp_path / "reports")]
    assert run_here("run", "sequence_parallel", *options).code == 0
    assert "refuted" in run_here("run", "mine.py:drops_reduction", *options).out


def test_a_corpus_that_cannot_be_is_said(place: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    outcome = run_here("run", "identity", *ONE, "--corpus", str(tmp_path / "file" / "corpus"))
    says(outcome, 2, "cannot be used", "choose another path with --corpus")


def test_without_ray_it_is_said_how_to_get_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "ray" else found(name, *rest))
    says(run_here("run", "identity", *ONE, "--ray"), 2, "ray is not installed", "pip install 'tcverify[ray]'")


def test_a_worker_serves_what_has_process_groups(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TCVERIFY_TORCHRUN"):
        monkeypatch.delenv(name, raising=False)
    says(run_here("worker", "doctor"), 2, "cannot serve 'doctor'")
    says(run_here("worker", "run", "identity"), 2, "torchrun has not started this", "tcverify worker run")
    outcome = run_here("run", "identity", *ONE[:4], "--confirm", "torchrun", "--max-examples", "1")
    says(outcome, 2, "there is no torchrun here")


def test_what_workers_cannot_do_is_said(place: Path) -> None:
    says(
        run_here("run", "identity", *ONE, "--workers", "2", "--bisect"),
        2,
        "workers do not bisect",
        "replay ID --bisect",
    )
