"""Passes that the project has never seen, whatever they do: the run comes to its end and says what is wrong with them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import run_apart, run_here

#: For each pass of `conftest.FOREIGN`, the kind of finding.
KINDS = {
    "DropsReduction": "wrong-value",
    "drops_reduction": "wrong-value",
    "drops_reduction_in_a_copy": "wrong-value",
    "drops_reduction_with_inputs": "wrong-value",
    "raises": "pass-raised",
    "returns_nonsense": "malformed-graph",
    "hangs": "pass-timeout",
    "exits": "pass-died",
    "is_killed": "pass-died",
}

#: Options of runs whose strategies are found, or named.
ONE_SIZE = ["--world-size", "2", "--confirm", "none", "--seed", "3", "--max-examples", "100"]

#: Few for the one that costs its time-out each time.
PROGRAMS = {"hangs": 4}

#: Of blocking collectives, for the one that one collective kills; an asynchronous one keeps its wait.
STRATEGIES = {"is_killed": "structured"}


@dataclass(frozen=True)
class Ran:
    """A run of one pass, and its smallest counterexample of the expected kind. There may be others."""

    reports: Path
    code: int
    out: str
    kind: str

    @property
    def case(self) -> dict[str, Any]:
        cases = [json.loads(path.read_text()) for path in self.reports.glob("*/counterexample.json")]
        found = [case for case in cases if case["finding"]["kind"] == self.kind]
        return dict(min(found, key=lambda case: (len(json.dumps(case["program"])), case["id"])))

    @property
    def id(self) -> str:
        return str(self.case["id"])


@pytest.fixture(scope="module")
def ran(place: Path) -> Callable[[str], Ran]:
    """Runs a foreign pass; each once."""
    known: dict[str, Ran] = {}

    def run(name: str) -> Ran:
        if name not in known:
            outcome = run_here(
                "run", f"mine.py:{name}", "--strategy", STRATEGIES.get(name, "mixed"), "--world-size", "2", "--confirm", "none",
                "--seed", "3",
                "--max-examples", str(PROGRAMS.get(name, 12)), "--pass-timeout", "1",
                "--shrink-time", "2" if name == "hangs" else "30",
                "--report-dir", f"reports-{name}", "--contract", "metadata=false",
            )  # fmt: skip
            assert outcome.err == ""
            known[name] = Ran(place / f"reports-{name}", outcome.code, outcome.out, KINDS[name])
        return known[name]

    return run


@pytest.mark.parametrize("name", KINDS)
def test_the_run_goes_on_to_its_end(ran: Callable[[str], Ran], name: str) -> None:
    found = ran(name)
    assert found.code == 1
    assert f"refuted: {PROGRAMS.get(name, 12)} programs (" in found.out
    assert "all programs drawn" in found.out


@pytest.mark.parametrize("name", KINDS)
def test_the_finding_is_of_the_right_kind(ran: Callable[[str], Ran], name: str) -> None:
    assert f"\n  {KINDS[name]}: " in ran(name).out
    assert ran(name).case["pass"]["target"] == f"mine.py:{name}"


@pytest.mark.parametrize("name", KINDS)
def test_the_report_is_there(ran: Callable[[str], Ran], name: str) -> None:
    found = ran(name)
    assert sorted(path.name for path in (found.reports / found.id).iterdir()) == [
        "counterexample.json",
        "report.html",
        "repro.py",
    ]
    compile((found.reports / found.id / "repro.py").read_text(), "repro.py", "exec")


@pytest.mark.parametrize("name", KINDS)
def test_replay_shows_the_same_finding(ran: Callable[[str], Ran], name: str) -> None:
    found = ran(name)
    outcome = run_here("replay", found.id, "--report-dir", found.reports.name, "--confirm", "none")
    assert outcome.code == 1
    assert outcome.out.startswith(f"x FAILED {found.id} ")
    assert f": {KINDS[name]}: " in " ".join(outcome.out.split())


@pytest.mark.parametrize("name", ["raises", "drops_reduction_with_inputs"])
def test_the_script_shows_the_same_finding(ran: Callable[[str], Ran], place: Path, name: str) -> None:
    found = ran(name)
    outcome = run_apart(f"{found.reports.name}/{found.id}/repro.py", cwd=place)
    assert (outcome.code, outcome.err) == (1, "")
    assert f"\n{KINDS[name]}: " in outcome.out


def test_programs_are_shrunk(ran: Callable[[str], Ran]) -> None:
    assert "; 1 node, shrunk from" in ran("drops_reduction").out
    assert "; 1 node, shrunk from" in ran("is_killed").out


def test_shrinking_a_pass_that_hangs_ends_and_says_so(ran: Callable[[str], Ran]) -> None:
    assert ran("hangs").case["shrink_cut"] is True
    assert "(until the time limit)" in " ".join(ran("hangs").out.split())


def test_of_a_traceback_only_the_frames_of_the_pass_are_shown(ran: Callable[[str], Ran], place: Path) -> None:
    out = ran("raises").out
    assert f'File "{place}/mine.py", line' in out
    assert "applying.py" not in out


def test_of_a_pass_that_hangs_the_frame_is_shown(ran: Callable[[str], Ran], place: Path) -> None:
    out = ran("hangs").out
    assert f'File "{place}/mine.py", line' in out
    assert "guard.py" not in out


def test_the_last_words_of_a_pass_that_dies_are_shown(ran: Callable[[str], Ran]) -> None:
    assert "exit code 7" in ran("exits").out
    assert "  last words\n" in ran("exits").out
    assert "signal SIGKILL" in ran("is_killed").out


def test_what_a_pass_says_does_not_reach_the_terminal_raw(ran: Callable[[str], Ran]) -> None:
    assert "no [bold]idea[/bold] \\x1b[31mwhat\\x1b[0m" in ran("raises").out
    assert "\x1b" not in ran("raises").out


def test_a_file_outside_is_found_by_its_path(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = run_here("run", f"{place}/mine.py:raises", "--strategy", "one", "--world-size", "2", "--confirm", "none")
    assert "pass-raised: the pass raised" in outcome.out


def test_earlier_failures_come_first_in_the_next_run(place: Path) -> None:
    run = [
        "run",
        "mine.py:raises",
        "--strategy",
        "mixed",
        "--world-size",
        "2",
        "--confirm",
        "none",
        "--report-dir",
        "twice",
    ]
    run_here(*run, "--max-examples", "5", "--seed", "1")
    again = run_here(*run, "--max-examples", "1", "--seed", "2")
    assert "seed 2, 1 earlier failure first\n" in again.out
    assert "refuted: 1 program (" in again.out


# ------------------------------------------------------------------------------------- programs that nobody has asked for

SINKS = """
import torch


def sink_waits(gm):
    \"\"\"Moves waits down to what reads them, past whatever writes into operands.\"\"\"
    place = {node: number for number, node in enumerate(gm.graph.nodes)}
    for node in list(gm.graph.nodes):
        readers = sorted(node.users, key=place.__getitem__)
        if node.target is torch.ops._c10d_functional.wait_tensor.default and readers[:1] and readers[0].op != "output":
            readers[0].prepend(node)
    gm.recompile()
"""


def test_a_pass_on_asynchronous_collectives_gets_programs_that_have_them(place: Path) -> None:
    (place / "sinks.py").write_text(SINKS)
    more = ["--checks", "order", "--report-dir", "sunk", "--report", "ndjson"]
    outcome = run_here("run", "-x", "sinks.py:sink_waits", *ONE_SIZE, "--seed", "5", *more)
    assert outcome.code == 1
    out = " ".join(outcome.out.split())
    assert re.match(
        r"strategies: mixed, functional, [a-z0-9, -]* \(changed most by sink_waits\) sink_waits on 2 ranks", out
    )
    assert "may still read it" in out
    events = map(json.loads, (place / "sunk" / "events.ndjson").read_text().splitlines())
    (strategy,) = (event["strategy"] for event in events if event["event"] == "campaign-started")
    names = strategy.split(",")
    assert f"strategies: {', '.join(names[:5])} and {len(names) - 5} more (changed" in out


def test_what_a_pass_is_tried_on_and_hangs_on_is_verified_first(place: Path) -> None:
    limits = ["--pass-timeout", "1", "--shrink-time", "0"]
    outcome = run_here("run", "-x", "mine.py:hangs", *ONE_SIZE, *limits, "--report-dir", "slow")
    assert "1 case first" in " ".join(outcome.out.split())
    assert "pass-timeout: " in outcome.out


def test_replay_shows_what_the_pass_prints(place: Path) -> None:
    (place / "loud.py").write_text(SINKS)
    run_here("run", "-x", "loud.py:sink_waits", *ONE_SIZE, "--seed", "5", "--checks", "order", "--report-dir", "loud")
    (case,) = (path.parent.name for path in (place / "loud").glob("*/counterexample.json"))
    replayed = ["replay", case, "--report-dir", "loud", "--confirm", "none"]
    assert "has printed" not in run_here(*replayed).out
    (place / "loud.py").write_text(
        SINKS.replace("    place = {", "    print('\x1b[31mhere:', len(gm.graph.nodes), 'nodes')\n    place = {")
    )
    out = run_here(*replayed).out
    assert re.search(r"output of the pass, on all ranks:\n    [^\x1b]*here: \d+ nodes\n", out)


def test_several_strategies_are_named(place: Path) -> None:
    strategies = ["--strategy", "wild, moe,functional"]
    assert (
        run_here("run", "mine.py:does_nothing", *strategies, *ONE_SIZE, "--report-dir", "none").code == 1
    )  # it changed nothing
    refused = run_here("run", "mine.py:does_nothing", "--strategy", "wild,dtensor", *ONE_SIZE)
    assert refused.code == 2
    assert "'dtensor' cannot be drawn from together with others" in refused.err


@pytest.mark.parametrize("name", ["identity", "mine.py:does_nothing"])
def test_what_cannot_be_drawn_is_refused_before_anything_runs(place: Path, name: str) -> None:
    refused = run_here("run", name, "--world-size", "2,8", "--confirm", "none", "--max-examples", "1")
    assert refused.code == 2
    assert "no meshes are listed for world size 8" in refused.err
    assert "on 2 ranks" not in refused.out
