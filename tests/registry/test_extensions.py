"""Extensions: what is registered takes part, in every process; what makes no sense is refused with the place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from tcverify.checks import _OWN, CHECKS, Evidence, register_check
from tcverify.cli import running
from tcverify.errors import UsageError
from tcverify.execution import EXECUTORS, Lockstep, executors, make_executor, register_executor, start_executor
from tcverify.program import KINDS, Finding, Mesh, Note
from tcverify.registry import extensions
from tcverify.registry.extensions import load_extension, loaded_extensions
from tcverify.strategies import STRATEGIES, programs_of, register_strategy, transformer_programs
from tcverify.verification.verifier import verify
from tests.cli.conftest import reduce_add_norm, run_apart, run_here, says
from tests.pytest_plugin.conftest import run

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.fixture(autouse=True)
def registries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything that a test registers is gone after it."""
    modules = set(sys.modules)
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = [(d, dict(d)) for d in (CHECKS, KINDS, STRATEGIES, EXECUTORS)]
    own = set(_OWN)
    monkeypatch.setattr(extensions, "_LOADED", [])
    yield
    for now, before in kept:
        now.clear()
        now.update(before)
    _OWN.clear()
    _OWN.update(own)
    for name in [name for name in sys.modules if name.startswith("tcverify_pass_") and name not in modules]:
        del sys.modules[name]


# --------------------------------------------------------------------------------------------------------- loading


def test_an_extension_is_imported_once_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "import pathlib\npathlib.Path(f'ran{len(list(pathlib.Path().glob(\"ran*\")))}').touch()\n"
    )
    assert load_extension("mine.py") is load_extension(str(tmp_path / "mine.py"))
    assert len(list(tmp_path.glob("ran*"))) == 1
    assert loaded_extensions() == (str(tmp_path / "mine.py"),)


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("nope.py", "extension 'nope.py': there is no file"),
        ("no_such_module", "extension 'no_such_module': there is no module 'no_such_module'"),
        ("mine.py:thing", "'mine.py:thing' is not an extension"),
        ("", "'' is not an extension"),
        ("broken.py", "ZeroDivisionError: division by zero ("),
    ],
)
def test_what_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str, words: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text("1 / 0\n")
    with pytest.raises(UsageError) as caught:
        load_extension(reference)
    assert words in caught.value.message
    assert loaded_extensions() == ()


NEW_OP = """\
import torch
from tcverify import Op, register_dialect

@torch.library.custom_op("late::half", mutates_args=())
def half(x: torch.Tensor) -> torch.Tensor:
    return x / 2

half.register_fake(torch.empty_like)
register_dialect("late", [Op("late::half", lambda x: x / 2)])
"""

LATE = """\
from tcverify import InputSpec, Mesh, ProcessGroupPool, load_extension, spmd_program

mesh, x = Mesh.grid({"tp": 2}), InputSpec("x", (4,))
with ProcessGroupPool(2) as pool:
    pool.run(spmd_program(mesh, [x], lambda b: b.call("aten::neg", b.input("x"))))
    before = pool.pids
    load_extension("new_op.py")
    run = pool.run(spmd_program(mesh, [x], lambda b: b.call("late::half", b.input("x"))))
    assert run.finished, run.why
    assert not set(pool.pids) & set(before)
    again = pool.pids
    pool.run(spmd_program(mesh, [x], lambda b: b.call("late::half", b.input("x"))))
    assert pool.pids == again
    print("done")
"""


def test_ranks_that_lack_an_extension_are_started_anew(tmp_path: Path) -> None:
    (tmp_path / "new_op.py").write_text(NEW_OP)
    (tmp_path / "late.py").write_text(LATE)
    outcome = run_apart("late.py", cwd=tmp_path)
    assert outcome.out == "done\n", outcome.err


def test_a_rank_that_cannot_load_an_extension_says_so(tmp_path: Path) -> None:
    (tmp_path / "new_op.py").write_text(f"import os\nif os.getpid() != {{}}: raise OSError('no licence')\n{NEW_OP}")
    text = LATE.replace('load_extension("new_op.py")', 'write(); load_extension("new_op.py")')
    define = (
        "import os, pathlib\ndef write():\n    p = pathlib.Path('new_op.py')\n"
        "    p.write_text(p.read_text().format(os.getpid()))\n"
    )
    (tmp_path / "late.py").write_text(define + text)
    outcome = run_apart("late.py", cwd=tmp_path)
    assert outcome.code == 1
    assert "cannot join the process group: UsageError: extension" in outcome.err
    assert "no licence" in outcome.err


# ---------------------------------------------------------------------------------------------------------- dialects


def test_an_op_that_only_the_pass_knows_is_no_defect_of_the_pass(tmp_path: Path) -> None:
    command = ("-m", "tcverify", "run", f"{EXAMPLES}/own_dialect.py:fuse_norm", "--world-size", "2")
    drawn = ("--strategy", "structured", "--seed", "1", "--max-examples", "10")
    alone = run_apart(*command, *drawn, "--confirm", "none", cwd=tmp_path)
    assert alone.code == 1
    assert "0 refuted, 6 inconclusive" in alone.out
    assert "name the module that registers it with --extension" in " ".join(alone.out.split())
    (tmp_path / "pyproject.toml").write_text(f'[tool.tcverify]\nextension = ["{EXAMPLES}/own_dialect.py"]\n')
    known = run_apart(*command, *drawn, cwd=tmp_path)  # on gloo: the ranks know the op as well
    assert known.code == 0, known.out + known.err
    assert "10 programs (10 passed, 0 refuted, 0 inconclusive)" in known.out
    assert "6 changed by the pass" in known.out


def test_a_counterexample_with_an_own_op_is_shown_and_replayed_with_its_extension(tmp_path: Path) -> None:
    wrong = (
        (EXAMPLES / "own_dialect.py").read_text().replace("mean(-1, keepdim=True) + eps", "mean(-1, keepdim=True) + 1")
    )
    (tmp_path / "wrong.py").write_text(wrong)
    command = ("-m", "tcverify", "run", "-x", "wrong.py:fuse_norm", "--world-size", "2", "--confirm", "none")
    extension = ("--extension", "wrong.py")
    found = run_apart(*command, "--strategy", "structured", "--seed", "1", *extension, cwd=tmp_path)
    assert found.code == 1
    assert "wrong-value" in found.out
    case = next(path.name for path in (tmp_path / "reports").iterdir())
    says(run_apart("-m", "tcverify", "show", case, cwd=tmp_path), 2, "mylib::all_reduce_rms_norm", "--extension")
    assert "wrong-value" in run_apart("-m", "tcverify", "show", case, *extension, cwd=tmp_path).out
    again = run_apart("-m", "tcverify", "replay", case, "--confirm", "none", *extension, cwd=tmp_path)
    assert (again.code, "x FAILED" in again.out) == (1, True)
    script = run_apart(f"reports/{case}/repro.py", cwd=tmp_path)  # loads the extension by itself
    assert (script.code, "wrong-value" in script.out) == (1, True), script.err


# ------------------------------------------------------------------------------------------------------------ checks


def no_norm(evidence: Evidence) -> list[Finding]:
    found = [n.name for g in evidence.pair.original.graphs for n in g.nodes if "norm" in n.name]
    return [Finding("norm", "no-norm", f"'{found[0]}' is a norm", node=found[0])] if found else []


def test_a_registered_check_runs_and_its_kind_has_words() -> None:
    assert verify(lambda gm: gm, reduce_add_norm()).status == "passed"
    register_check("no-norm", no_norm, {"norm": "there is a norm"})
    verdict = verify(lambda gm: gm, reduce_add_norm())
    assert [f.kind for f in verdict.findings] == ["norm"]
    assert KINDS["norm"] == "there is a norm"
    assert verify(lambda gm: gm, reduce_add_norm(), checks=["structure"]).status == "passed"
    register_check("no-norm", lambda evidence: [])  # registered again, it replaces the first
    assert verify(lambda gm: gm, reduce_add_norm()).status == "passed"


def test_a_check_that_only_notes_changes_no_verdict() -> None:
    register_check("noting", lambda evidence: [Note("seen", "it was seen")])
    verdict = verify(lambda gm: gm, reduce_add_norm())
    assert (verdict.status, [note.reason for note in verdict.notes]) == ("passed", ["seen"])


@pytest.mark.parametrize(
    ("check", "words"),
    [
        (lambda evidence: 1 / 0, "check 'mine' fails: ZeroDivisionError"),
        (lambda evidence: None, "check 'mine' fails: TypeError"),
        (lambda: [], "check 'mine' fails: TypeError"),
        (lambda evidence: ["no finding"], "check 'mine' returned 'no finding', which is not a finding"),
    ],
)
def test_a_check_that_does_not_work_is_an_error_of_the_users(check: Any, words: str) -> None:
    register_check("mine", check)
    with pytest.raises(UsageError) as caught:
        verify(lambda gm: gm, reduce_add_norm())
    assert words in caught.value.message
    assert caught.value.hint is not None


@pytest.mark.parametrize(
    ("register", "words"),
    [
        (lambda: register_check("equivalence", no_norm), "'equivalence' is a built-in check"),
        (lambda: register_check("a,b", no_norm), "'a,b' cannot name a check"),
        (lambda: register_check("mine", 3), "check 'mine' is a int, which cannot be called"),  # type: ignore[arg-type]
        (lambda: register_check("mine", no_norm, {"deadlock": "x"}), "the kind 'deadlock' exists already"),
        (lambda: register_strategy("mixed", transformer_programs), "'mixed' is a built-in strategy"),
        (lambda: register_strategy("1", transformer_programs), "'1' cannot name a strategy"),
        (lambda: register_strategy("mine", transformer_programs()), "which cannot be called"),  # type: ignore[arg-type]
        (lambda: register_executor("gloo", lambda size: Lockstep()), "'gloo' is a built-in executor"),
        (lambda: register_executor("none", lambda size: Lockstep()), "'none' is a built-in executor"),
        (lambda: register_executor("mine", Lockstep()), "which cannot be called"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_registered(register: Callable[[], None], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        register()
    assert words in caught.value.message


# -------------------------------------------------------------------------------------------------------- strategies


def test_a_registered_strategy_is_held_to_its_size() -> None:
    programs = st.just(reduce_add_norm())  # of 2 ranks, whatever is asked for
    register_strategy("two", lambda mesh=None, world_size=None: programs)
    assert _first(programs_of("two", world_size=2)).world_size == 2
    assert _first(programs_of("two", Mesh.grid({"x": 2}))).world_size == 2
    with pytest.raises(UsageError, match="of 2 ranks, where one of 3 was asked for"):
        _first(programs_of("two", world_size=3))


def test_a_registered_strategy_that_makes_none() -> None:
    register_strategy("text", lambda mesh=None, world_size=None: "programs")
    with pytest.raises(UsageError, match="which is not a strategy"):
        programs_of("text", world_size=2)
    register_strategy("deaf", lambda: st.just(reduce_add_norm()))
    with pytest.raises(UsageError, match="cannot be called: TypeError"):
        programs_of("deaf", world_size=2)
    register_strategy("numbers", lambda mesh=None, world_size=None: st.integers())
    with pytest.raises(UsageError, match="drew a int"):
        _first(programs_of("numbers", world_size=2))


def _first(strategy: st.SearchStrategy[Any]) -> Any:
    from hypothesis import HealthCheck, given, settings

    drawn: list[Any] = []

    @settings(max_examples=1, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def draw(value: Any) -> None:
        drawn.append(value)

    draw()
    return drawn[0]


# --------------------------------------------------------------------------------------------------------- executors


class Counting(Lockstep):
    """Lockstep under another name, that counts."""

    name = "counting"
    started = closed = compared = 0

    def start(self) -> None:
        Counting.started += 1

    def close(self) -> None:
        Counting.closed += 1

    def start_comparison(self, *arguments: Any) -> Any:
        Counting.compared += 1
        return super().start_comparison(*arguments)


def test_a_registered_executor_confirms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    register_executor("counting", lambda world_size: Counting())
    with executors("counting") as made:
        executor = made(2)
        assert executor is made(2)
        assert executor is not None
        start_executor(executor)
        verdict = verify(lambda gm: gm, reduce_add_norm(), confirm=executor)
    assert verdict.executors == ["lockstep", "counting"]
    assert (Counting.started, Counting.compared, Counting.closed) == (1, 1, 1)


def test_none_gives_no_executor() -> None:
    with executors("none") as made:
        assert made(2) is None


def test_what_makes_no_executor() -> None:
    register_executor("text", lambda world_size: "gloo")  # type: ignore[arg-type, return-value]
    with pytest.raises(UsageError, match="executor 'text' is a str without name, run, compare, start_comparison"):
        make_executor("text", 2)


# ------------------------------------------------------------------------------------------------- the command line


def test_references_on_the_command_line(tmp_path: Path) -> None:
    strategy = ("--strategy", f"{EXAMPLES}/own_strategy.py:linear_layers")
    checks = ("--checks", f"structure,{EXAMPLES}/own_check.py:no_more_collectives")
    executor = ("--extension", f"{EXAMPLES}/own_executor.py", "--confirm", "recording")
    command = ("-m", "tcverify", "run", "identity", "--world-size", "2", "--max-examples", "3")
    outcome = run_apart(*command, *strategy, *checks, *executor, cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    assert "3 passed" in outcome.out
    assert len(list((tmp_path / "programs").glob("*-before.json"))) == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--strategy", "own_strategy.py:linear_layer"], "own_strategy.py has no strategy 'linear_layer'"),
        (["--checks", "own_check.py:no_more"], "own_check.py has no check 'no_more'"),
        (["--checks", "own_check.py:Finding,nope"], "there is no check 'nope'"),
        (["--extension", "own_chek.py"], "extension 'own_chek.py': there is no file"),
        (["--confirm", "recording"], "'recording' is not one of 'gloo', 'cuda', 'nccl', 'torchrun', 'none'"),
    ],
)
def test_references_that_lead_nowhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.setattr(running, "STATE_DIR", tmp_path)
    says(run_here("run", "identity", *arguments), 2, words)


def test_a_configuration_whose_extension_is_no_list(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.tcverify]\nextension = 3\n")
    outcome = run_apart("-m", "tcverify", "run", "identity", cwd=tmp_path)
    says(outcome, 2, "extension is not a list", 'write extension = ["mycompiler.ops"]')


def test_pytest_loads_the_extensions_of_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        f'[tool.tcverify]\nextension = ["{EXAMPLES}/own_executor.py", "own.py"]\n[tool.pytest.ini_options]\n'
    )
    (tmp_path / "own.py").write_text((EXAMPLES / "own_strategy.py").read_text())
    (tmp_path / "test_it.py").write_text(
        "import tcverify\n\n"
        "@tcverify.verifies('identity', programs='linear-layers', confirm='recording', world_sizes=[2], max_examples=2)\n"
        "def test_it(verdict):\n    assert verdict.programs == 2\n"
    )
    ran = run(tmp_path, "-q", "-p", "no:cacheprovider")
    assert ran.code == 0, ran.out
    assert list((tmp_path / "programs").glob("*-before.json"))
    ran = run(tmp_path, "-q", "--tcverify-confirm", "mpi")
    assert ran.code == 2
    assert "there is no confirm 'mpi'" in ran.out
    assert "Traceback" not in ran.out
