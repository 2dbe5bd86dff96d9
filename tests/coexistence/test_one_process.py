"""The library and tcverify in one process, in every order, by every way to register ops. Each scenario is a process."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.coexistence.standin import STYLES

ROOT = Path(__file__).parents[2]

SCENARIOS = (
    *(f"library_first:{style}" for style in STYLES),
    "library_later:custom_op",
    "library_last:custom_op",
    "library_last:def",
    "library_last:fragment",
)
ORDERS = [s for s in SCENARIOS if s not in ("library_last:def", "library_last:fragment")]


@cache
def played(*scenarios: str) -> dict[str, dict[str, Any]]:
    """What each scenario saw; without arguments, of `SCENARIOS`."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.coexistence.scenarios", *(scenarios or SCENARIOS)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    facts = [json.loads(line) for line in ran.stdout.splitlines()]
    return {f["scenario"]: f for f in facts}


@pytest.mark.parametrize("scenario", ORDERS)
def test_lockstep_computes_what_the_ops_mean(scenario: str) -> None:
    facts = played()[scenario]
    assert "error" not in facts, facts["traceback"]
    assert facts["right"] is True


@pytest.mark.parametrize("scenario", ORDERS)
def test_graphs_hold_the_ops_that_the_library_has_defined(scenario: str) -> None:
    assert played()[scenario]["current"] is True


@pytest.mark.parametrize("scenario", ORDERS)
def test_a_sound_pass_over_the_librarys_ops_passes_and_fires(scenario: str) -> None:
    assert played()[scenario]["sound"] == ["passed", True, []]


@pytest.mark.parametrize("scenario", ORDERS)
def test_a_defect_over_the_librarys_ops_is_refuted(scenario: str) -> None:
    assert played()[scenario]["defect"] == ["refuted", ["wrong-value"]]


@pytest.mark.parametrize("scenario", [s for s in ORDERS if not s.startswith("library_last")])
def test_the_librarys_own_kernels_stay_as_they_are(scenario: str) -> None:
    facts = played()[scenario]
    assert facts["after"] == facts["before"]
    assert facts["after"]["cpu"] == ("NotImplementedError" if scenario.endswith(":meta") else [7.0, 7.0])


def test_a_later_custom_op_replaces_ours_as_torch_lets_it() -> None:
    facts = played()["library_last:custom_op"]
    assert facts["after"] == {"cpu": [7.0, 7.0], "meta": [2]}
    assert facts["again"]["sound"] == ["passed", True, []]


def test_a_module_made_before_calls_the_later_definition() -> None:
    facts = played()["library_last:custom_op"]
    assert facts["called"] == [7.0]
    assert (facts["own"], facts["stale"]) == (2, 0)  # the graph holds the op objects of before


@pytest.mark.parametrize("style", ["def", "fragment"])
def test_other_kinds_of_later_definition_are_refused_by_torch(style: str) -> None:
    assert "same name and overload name multiple times" in played()[f"library_last:{style}"]["error"]


def test_process_groups_compute_what_the_librarys_ops_mean() -> None:
    facts = played("gloo")["gloo"]
    assert facts["sound"] == ["passed", ["lockstep", "gloo"], []]
    assert facts["defect"] == ["refuted", ["lockstep", "gloo"], ["wrong-value"]]
