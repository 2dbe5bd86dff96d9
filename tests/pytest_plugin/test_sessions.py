"""Whole runs of pytest: collection, workers, options, interrupts, and what the plugin costs those who do not use it."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tcverify.cases.counterexample import read_counterexample
from tcverify.pytest_plugin.running import item_seed
from tests import warm
from tests.pytest_plugin.conftest import COMMAND, ROOT, Once, Ran, environment, finish, run, start, write

# ---------------------------------------------------------------------------------------------------------- no cost

UNUSED = """
import sys

def test_nothing_is_imported(request):
    assert request.config.pluginmanager.get_plugin("tcverify") or "tcverify.pytest_plugin" in sys.modules
    assert not {"torch", "tcverify.verification.verifier", "tcverify.campaign"} & set(sys.modules)
"""


def test_who_does_not_use_the_plugin_does_not_import_torch(tmp_path: Path) -> None:
    write(tmp_path, {"test_it.py": UNUSED})
    command = (*COMMAND, "-p", "no:hypothesispytest", "--tcverify-confirm", "none")
    ran = finish(warm.interpreter(*command, cwd=tmp_path, env=environment()))
    assert ran.code == 0, ran.out
    assert "tcverify =" not in ran.out


# -------------------------------------------------------------------------------------------------------- collection

REFUSED = {
    "test_bare.py": ("@tcverify.verifies\ndef test_it(verdict): ...", "is used without parentheses"),
    "test_twice.py": (
        "@tcverify.verifies('identity')\n@tcverify.verifies('identity')\ndef test_it(verdict): ...",
        "decorates one function twice",
    ),
    "test_async.py": ("@tcverify.verifies('identity')\nasync def test_it(verdict): ...", "decorates an async function"),
    "test_class.py": (
        "@tcverify.verifies('identity')\nclass TestIt:\n    def test_it(self, verdict): ...",
        "decorates a class",
    ),
    "test_alone.py": (
        "@tcverify.verifies('identity', world_sizes=(1,))\ndef test_it(verdict): ...",
        "a program needs at least 2 ranks, not 1\n  hint: with fewer there are no collectives to verify",
    ),
}


@pytest.fixture(scope="module")
def refused(once: Once) -> Ran:
    files = {name: f"import tcverify\n\n{text}\n" for name, (text, _) in REFUSED.items()}
    files["test_good.py"] = "import tcverify\n\n@tcverify.verifies('identity', shards=2)\ndef test_it(verdict): ...\n"

    def make(directory: Path) -> list[Ran]:
        write(directory, files)
        return [run(directory, "--collect-only", "--continue-on-collection-errors")]

    return once("refused", make)[1][0]


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_sense_is_an_error_of_the_collection(refused: Ran, name: str) -> None:
    assert f"ERROR collecting {name}" in refused.out
    assert REFUSED[name][1] in refused.out


def test_errors_of_the_collection_have_no_traceback(refused: Ran) -> None:
    assert refused.code not in (0, 3)
    assert "Traceback" not in refused.out
    assert "During handling" not in refused.out
    assert "pytest_plugin" not in refused.out


def test_items_can_be_listed(refused: Ran) -> None:
    listed = re.findall(r"<Function (test_it\[.*\])>", refused.out)
    assert listed == [f"test_it[identity-{size}ranks-{shard}/2]" for size in (2, 3, 4) for shard in (0, 1)]


# ----------------------------------------------------------------------------------------------- workers, and options

SHARDED = """
import tcverify
from passes import drops
from tcverify.program import program_id
from tcverify.strategies import transformer_programs

SEEN = []


class Notes:
    contract = tcverify.Contract(identity=True)

    def __call__(self, gm):
        pass


def noted(mesh, world_size):
    def note(program):
        SEEN.append(program_id(program))
        return program

    return transformer_programs(world_size=world_size).map(note)


@tcverify.verifies(Notes(), programs=noted, world_sizes=(2,), shards=2, confirm="none", max_examples=10)
def test_drawn(verdict, record_property):
    record_property("drawn", " ".join(SEEN))
    SEEN.clear()


@tcverify.verifies(drops, world_sizes=(2,), max_examples=10, shrink_time=1.0)
def test_planted(verdict): ...
"""

PASSES = """
def drops(gm):
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and "all_reduce.default" in str(node.target):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
"""


def drawn(directory: Path, name: str) -> list[str]:
    """The programs that each shard drew."""
    return re.findall(r'name="drawn" value="([^"]*)"', (directory / name).read_text())


def test_workers_draw_other_programs_and_the_controller_tells_of_all(tmp_path: Path) -> None:
    write(tmp_path, {"test_it.py": SHARDED, "passes.py": PASSES})
    (tmp_path / "pyproject.toml").write_text('[tool.tcverify]\nreport-dir = "findings"\nworld-size = "2"\n')
    ran = run(tmp_path, "-n", "2", "--junitxml=out.xml", "--tcverify-seed", "5")
    assert ran.code == 1, ran.out
    section = ran.section("tcverify")
    for shard in ("0/2", "1/2"):
        nodeid = f"test_it.py::test_drawn[Notes-2ranks-{shard}]"
        line = rf"passed: {re.escape(nodeid)}\n  10 programs, changed 0 %; seed {item_seed(nodeid, 5)}\n"
        assert re.search(line, section), section
    one, other = (set(programs.split()) for programs in drawn(tmp_path, "out.xml"))
    assert len(one) >= 8
    assert len(one & other) <= 2  # Hypothesis begins with the smallest program
    assert "found by equivalence in lockstep and gloo" in ran.out
    told = re.search(r"(?m)^([0-9a-f]{8}) drops: wrong-value   tcverify replay (\S+) --report-dir findings$", section)
    assert told, section
    assert told[1] == told[2]
    case = read_counterexample(tmp_path / "findings" / told[1] / "counterexample.json")
    assert case.executors == ("lockstep", "gloo")


@pytest.mark.parametrize(
    ("ini", "arguments", "message"),
    [
        ("tcverify_confirm = mpi", (), "there is no confirm 'mpi'"),
        ("", ("--tcverify-seed", "x"), "invalid _seed value: 'x'"),
    ],
)
def test_options_that_do_not_exist_are_refused(
    tmp_path: Path, ini: str, arguments: tuple[str, ...], message: str
) -> None:
    write(tmp_path, {"test_it.py": "import tcverify\n\n@tcverify.verifies('identity')\ndef test_it(verdict): ...\n"})
    (tmp_path / "pytest.ini").write_text(f"[pytest]\n{ini}\n")
    ran = run(tmp_path, *arguments)
    assert ran.code in (2, 4), ran.out
    assert message in ran.out
    assert "Traceback" not in ran.out


# --------------------------------------------------------------------------------------------------------- interrupts

LONG = """
import tcverify
from passes import drops

class Slow:
    def __call__(self, gm):
        drops(gm)
        open("running", "a").close()

@tcverify.verifies(Slow(), world_sizes=(2,), max_examples=1_000_000, confirm="none", shrink_time=0.0)
def test_it(verdict): ...
"""


def test_an_interrupt_keeps_what_was_found(tmp_path: Path) -> None:
    write(tmp_path, {"test_it.py": LONG, "passes.py": PASSES})
    process = start(tmp_path)
    while not list(tmp_path.glob("reports/*/report.html")):
        assert process.poll() is None
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    ran = finish(process)
    assert ran.code == 2, ran.out
    case = next(path.name for path in (tmp_path / "reports").iterdir())
    assert re.search(rf"(?m)^{case} Slow: ", ran.section("tcverify"))
    assert not list(tmp_path.glob(".tcverify/items/*/in-flight*"))


DIES = """
import os
import tcverify

class Dies:
    def __call__(self, gm):
        os._exit(9)

@tcverify.verifies(Dies(), world_sizes=(2,), confirm="none")
def test_it(verdict): ...
"""


def test_the_program_on_which_a_run_died_is_kept_and_failures_are_forgotten_when_told(tmp_path: Path) -> None:
    write(tmp_path, {"test_it.py": DIES})
    assert run(tmp_path).code == 9
    (state,) = (tmp_path / ".tcverify" / "items").iterdir()
    (state / "failures").mkdir()
    ran = run(tmp_path, "--ignore=test_it.py", "--cache-clear")
    assert not (state / "failures").exists()
    (kept,) = (tmp_path / "reports").glob("crashed-*.json")
    assert "a run died while verifying a program" in ran.out
    assert read_counterexample(kept).finding.kind == "run-died"


# ------------------------------------------------------------------------------------------------------- the example


def test_the_example_of_the_documentation_passes() -> None:
    example = ("docs/test_sequence_parallel.py", "-k", "2ranks")
    ran = run(ROOT, *example, "-q", "--tcverify-confirm", "none", "-p", "no:cacheprovider")
    assert ran.code == 0, ran.out
    assert "1 passed" in ran.out
    assert "= tcverify =" not in ran.out  # -q tells of failures alone
