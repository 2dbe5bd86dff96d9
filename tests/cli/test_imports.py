"""What the command line imports: nothing that takes long, until a verb has work to do and its arguments are right."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tcverify.application.loading import importable_target
from tcverify.cli import main as cli
from tcverify.registry.checks import CHECKS
from tcverify.registry.executors import EXECUTORS
from tcverify.registry.passes import BUILTIN
from tcverify.registry.registry import Registry
from tcverify.registry.strategies import ALONE, STRATEGIES
from tcverify.strategies import DECODERS

ROOT = Path(__file__).parents[2]

#: What takes long to import, or brings much else.
HEAVY = (
    "torch",
    "hypothesis",
    "networkx",
    "rich",
    "jinja2",
    "asyncio",
    "ctypes.util",
    "tcverify.cli.running",
    "tcverify.program",
)

#: Most modules that an answer needs, those of the interpreter's start among them: 235 on Python 3.11.
MOST = 290

#: Runs commands one after the other in one interpreter, as `python -m tcverify` does, and tells after each what there is then.
SCRIPT = """
import contextlib, gc, io, json, os, sys
told = []
for arguments, variables in json.loads(sys.argv[1]):
    sys.argv[:] = ["tcverify", *arguments]
    os.environ.update(variables)
    out, code = io.TextIOWrapper(io.BytesIO(), write_through=True), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            from tcverify.__main__ import main
            main()
        except SystemExit as end:
            code = end.code
    for name in variables:
        del os.environ[name]
    from tcverify.system import processes
    servers = len(processes._servers(os.getpid()))
    told.append([code, out.buffer.getvalue().decode(), sorted(sys.modules), servers, gc.isenabled()])
print(json.dumps(told))
"""


@dataclass(frozen=True)
class Told:
    """What a command said, and what there was after it: modules, fork servers, and whether garbage was collected."""

    code: int
    text: str
    modules: frozenset[str]
    servers: int
    collecting: bool


def after(*commands: tuple[Sequence[str], Mapping[str, str]], cwd: Path) -> list[Told]:
    """Run commands in one fresh interpreter."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{SCRIPT}", json.dumps(commands)],
        check=False, capture_output=True, text=True, cwd=cwd,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return [Told(code or 0, text, frozenset(modules), *rest) for code, text, modules, *rest in json.loads(ran.stdout)]


HELP = [["--version"], ["--help"], *([name, "--help"] for name in cli.COMMANDS)]
WRONG = [
    ["runn"],
    ["run", "--nonsense"],
    ["run", "sequence_paralel"],
    ["run", "identity+nope"],
    ["run", "torch:nope"],
    ["run", "mine.py"],
    ["run", "--strategy", "mixd"],
    ["run", "--strategy", "dtensor,fsdp"],
    ["run", "--checks", "purty"],
    ["run", "--report", "pdf"],
    ["run", "--fail-on", "rain"],
    ["run", "--confirm", "mpi"],
    ["run", "--domain", "reals"],
    ["run", "--world-size", "1"],
    ["run", "--mesh", "tp=2,tp=2"],
    ["run", "--max-time", "soon"],
    ["run", "--max-examples", "0"],
    ["run", "--contract", "idempotent"],
    ["run", "--pass-option", "colour"],
    ["run", "--baseline", "none.json"],
    ["check", "--pass", "nope", "program.json"],
    ["check", "--pass", "identity", "--group", "3=?", "program.json"],
    ["check", "program.json"],
    ["worker", "show"],
    ["replay", "--confirm", "mpi"],
    ["show", "--format", "pdf"],
]


def completion(*words: str) -> tuple[Sequence[str], Mapping[str, str]]:
    """What bash asks for when the last of the words is to be completed."""
    line = " ".join(["tcverify", *words])
    return [], {"_TCVERIFY_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words))}


COMPLETED = {
    ("run", "sequence_p"): ["sequence_parallel"],
    ("run", "identity+sequence_p"): ["identity+sequence_parallel"],
    ("run", "torch:bucket_all_g"): ["torch:bucket_all_gather"],
    ("run", "--strategy", "near"): ["near-miss"],
    ("run", "--strategy", "fsdp,near"): ["fsdp,near-miss"],
    ("run", "--checks", "purity,equ"): ["purity,equivalence"],
    ("run", "--report", "nd"): ["ndjson"],
    ("replay", "--confirm", "gl"): ["gloo"],
    ("check", "--pass", "multis"): ["multistream"],
    ("run", "mine.p"): ["mine.p"],  # left to the shell, which knows files
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], Told]:
    """What each of the commands above comes to, in one interpreter: what one of them imports, all after it have."""
    asked = [(command, {}) for command in (*HELP, *WRONG)] + [completion(*words) for words in COMPLETED]
    names = [*map(tuple, HELP), *map(tuple, WRONG), *COMPLETED]
    return dict(zip(names, after(*asked, cwd=tmp_path_factory.mktemp("empty")), strict=True))


@pytest.mark.parametrize("command", HELP, ids=" ".join)
def test_help_imports_nothing_that_takes_long(told: dict[tuple[str, ...], Told], command: list[str]) -> None:
    found = told[tuple(command)]
    assert (found.code, found.servers) == (0, 0)
    assert found.text.startswith(("Usage: tcverify", "tcverify, version"))
    assert found.modules.isdisjoint(HEAVY)
    assert len(found.modules) <= MOST


@pytest.mark.parametrize("command", WRONG, ids=" ".join)
def test_what_is_wrong_is_said_before_anything_is_imported_or_started(
    told: dict[tuple[str, ...], Told], command: list[str]
) -> None:
    found = told[tuple(command)]
    assert (found.code, found.servers) == (2, 0), found.text
    assert "Error" in found.text or "error" in found.text
    assert found.modules.isdisjoint(HEAVY)
    assert len(found.modules) <= MOST


@pytest.mark.parametrize("words", COMPLETED, ids=" ".join)
def test_names_are_completed_in_the_shell(told: dict[tuple[str, ...], Told], words: tuple[str, ...]) -> None:
    found = told[words]
    assert [line.partition(",")[2] for line in found.text.splitlines()] == COMPLETED[words]
    assert found.modules.isdisjoint(HEAVY)
    assert found.servers == 0


def test_passes_are_listed_without_torch(tmp_path: Path) -> None:
    (found,) = after((["passes"], {}), cwd=tmp_path)
    assert found.code == 0
    assert "torch:bucket_all_gather" in found.text
    assert found.modules.isdisjoint({*HEAVY} - {"rich"})
    assert len(found.modules) <= MOST + 80


def test_what_takes_long_is_imported_when_it_is_needed(tmp_path: Path) -> None:
    (found,) = after((["show", "nothing"], {}), cwd=tmp_path)
    assert found.code == 2
    assert {"torch", "tcverify.report.terminal"} <= found.modules
    assert found.servers == 0  # it starts no processes
    assert found.collecting  # garbage, which is put off for imports


def test_help_and_completions_load_no_extensions(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.tcverify]\nextension = ["mine.py"]\n')
    (tmp_path / "mine.py").write_text("raise ValueError('loaded')\n")
    asked = [(["run", "--help"], {}), completion("run", "sequence_p"), (["run", "--strategy", "mixd"], {})]
    shown, completed, loaded = after(*asked, cwd=tmp_path)
    assert (shown.code, completed.code) == (0, 0)
    assert completed.text == "plain,sequence_parallel\n"
    assert completed.servers == 0
    assert "ValueError: loaded" in loaded.text  # it may register what is named
    assert loaded.code == 2


# ------------------------------------------------------------------------------------------------------- registries


@pytest.mark.parametrize("registry", [BUILTIN, CHECKS, EXECUTORS, STRATEGIES], ids=lambda one: next(iter(one)))
def test_every_name_stands_for_something(registry: Registry[object]) -> None:
    assert all(callable(registry[name]) for name in registry.references)


@pytest.mark.parametrize("name", BUILTIN)
def test_the_reference_of_a_pass_is_that_by_which_it_is_loaded(name: str) -> None:
    assert importable_target(BUILTIN[name]) == BUILTIN.references[name]


def test_only_what_is_made_of_bytes_is_drawn_from_together() -> None:
    assert {*STRATEGIES.references} - {*ALONE} == {*DECODERS}


def test_a_registry_is_a_dictionary_that_imports_late() -> None:
    registry: Registry[object] = Registry({"lists": "no_such_module_at_all:nothing", "path": "pathlib:Path"})
    assert list(registry) == ["lists", "path"]
    assert "lists" in registry
    assert registry["path"] is Path
    with pytest.raises(ModuleNotFoundError):
        registry["lists"]
    registry["mine"] = len
    del registry["lists"]
    assert dict(registry) == {"path": Path, "mine": len}
    assert list(registry.references) == ["lists", "path"]
    assert repr(registry) == "Registry(path, mine)"
    registry.clear()
    assert not registry
    assert registry.get("path") is None
