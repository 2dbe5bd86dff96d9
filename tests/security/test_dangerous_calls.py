"""Where the code could run text, load objects, start programs or ask the wall clock: every place is here, with its reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Names that run what they are given, or could, wherever they come from.
RUNS = frozenset(
    {
        "eval", "exec", "compile", "__import__", "importlib.import_module", "pickle", "marshal", "shelve", "dill", "cloudpickle",
        "torch.load", "torch.jit.load", "torch.export.load", "yaml", "yaml.load", "runpy", "code", "os.system", "os.popen",
        "os.exec", "os.spawn", "subprocess", "pty", "ctypes", "ctypes.CDLL", "spec_from_file_location", "exec_module", "recv",
        "shell",
    }
)  # fmt: skip

#: What of them is used: (file, name) -> reason.
ALLOWED = {
    ("tcverify/__init__.py", "importlib.import_module"): "a public name comes from the module of ours that has it",
    ("tcverify/__main__.py", "exec"): "an empty text, for what Python remembers of the last one",
    ("tcverify/registry/registry.py", "importlib.import_module"): "constant references to modules of ours",
    ("tcverify/pytorch/subjects.py", "importlib.import_module"): "a constant: torch, for its version",
    (
        "tcverify/registry/references.py",
        "importlib.import_module",
    ): "the user names the pass: the code that is to be verified",
    ("tcverify/registry/references.py", "spec_from_file_location"): "the same, named by its file",
    ("tcverify/registry/references.py", "exec_module"): "the same",
    ("tcverify/application/guarded.py", "importlib.import_module"): "a constant list of torch's modules",
    (
        "tcverify/capturing/compile_artifacts.py",
        "importlib.import_module",
    ): "the modules of torch that a graph of torch.compile's names: some define ops",
    ("tcverify/capturing/processes.py", "importlib.import_module"): "a constant list of torch's modules",
    ("tcverify/system/fork_server.py", "importlib.import_module"): "a constant list of modules of ours and of torch",
    (
        "tcverify/ops/dialects/c10d_functional.py",
        "importlib.import_module",
    ): "a constant: a module of torch that registers ops",
    (
        "tcverify/application/apply.py",
        "compile",
    ): "code that FX made of a graph is parsed, in the pass's process, and not run",
    (
        "tcverify/application/coverage/reachable.py",
        "compile",
    ): "the source of the pass's own module is parsed for its lines, and not run",
    (
        "tcverify/execution/process_group/torchrun_keeper.py",
        "subprocess",
    ): "tcverify itself, started by its keeper with the user's arguments, no shell",
    (
        "tcverify/pytorch/base.py",
        "importlib.import_module",
    ): "the module of torch that a subject of the table names",
    (
        "tcverify/pytorch/scripts.py",
        "subprocess",
    ): "scripts of this repository, or made of a case: names are identifiers, literals numbers and quoted texts; no shell",
    ("tcverify/system/processes.py", "ctypes"): "prctl of the C library, with constants",
    ("tcverify/system/processes.py", "ctypes.CDLL"): "the same",
    ("tcverify/execution/process_group/messages.py", "ctypes"): "the bytes of a storage of ours are read",
    ("tcverify/execution/arena.py", "ctypes"): "the bytes of a storage of ours are written",
    (
        "tcverify/capturing/processes.py",
        "torch.export.load",
    ): "a .pt2 that the user names, in a process of its own; torch reads it",
}

#: Attributes of the standard library and of torch that read a clock which can be set, and what they are for.
WALL_CLOCK = frozenset(
    {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "date.today", "time.ctime"}
)
TIMESTAMPS = {
    ("tcverify/report/ndjson.py", "datetime.now"): "the time of an event, for people",
    ("tcverify/report/junit.py", "datetime.now"): "the timestamp of a suite, for people",
}


def sources() -> Iterator[Path]:
    yield from sorted((ROOT / "tcverify").rglob("*.py"))
    yield from sorted((ROOT / "strategies").rglob("*.py"))


def _false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def dotted(node: ast.expr) -> str:
    """The name of what is called, as far as it is one: "torch.load", or "…read" of what is no name."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "…"


def uses(text: str, names: frozenset[str]) -> set[str]:
    """Which of these names a module calls or imports; a keyword counts where it is not False."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        said: list[str] = []
        if isinstance(node, ast.Import):
            said = [alias.name for alias in node.names] + [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            said = [module, *(f"{module}.{alias.name}" for alias in node.names), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            last = name.rpartition(".")[2]
            # `re.compile` and `torch.compile` are other functions; a builtin has no dot
            said = [name, *(s for s in (".".join(name.split(".")[-2:]), last) if s not in ("compile", "eval", "exec"))]
            said += [k.arg for k in node.keywords if k.arg == "shell" and not _false(k.value)]
            if last == "recv" and name.count("."):
                said.append("recv")
        found |= names & set(said)
    return found


@pytest.fixture(scope="module")
def found() -> set[tuple[str, str]]:
    """What each file of the project uses."""
    return {
        (str(path.relative_to(ROOT)), name)
        for path in sources()
        if "tcverify/strategies" not in str(path)
        for name in uses(path.read_text(encoding="utf-8"), RUNS | WALL_CLOCK)
    }


def test_nothing_runs_what_it_reads_but_what_is_listed(found: set[tuple[str, str]]) -> None:
    assert {(path, name) for path, name in found if name in RUNS} == set(ALLOWED)


def test_no_limit_is_on_a_clock_that_can_be_set(found: set[tuple[str, str]]) -> None:
    assert {(path, name) for path, name in found if name in WALL_CLOCK} == set(TIMESTAMPS)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import pickle", {"pickle"}),
        ("from pickle import loads", {"pickle"}),
        ("import subprocess as s", {"subprocess"}),
        ("from subprocess import run\nrun('ls', shell=True)", {"subprocess", "shell"}),
        ("import torch\ntorch.load('x')", {"torch.load"}),
        ("from torch import load\nload('x')", {"torch.load"}),
        ("import os\nos.system('ls')", {"os.system"}),
        ("eval('1')\nexec('1')\ncompile('1', '', 'eval')", {"eval", "exec", "compile"}),
        ("import builtins\nbuiltins.exec('1')", set()),  # ruff's S102 and S307 see these
        ("connection.recv()", {"recv"}),  # unpickles; recv_bytes does not
        ("connection.recv_bytes()\nre.compile('x')\nmodel.eval()", set()),
    ],
)
def test_what_is_looked_for_is_seen(text: str, names: set[str]) -> None:
    assert uses(text, RUNS) == names


@pytest.mark.parametrize("text", ["import time\ntime.time()", "from datetime import datetime\ndatetime.now()"])
def test_clocks_are_seen(text: str) -> None:
    assert uses(text, WALL_CLOCK)
    assert not uses("import time\ntime.monotonic()\ntime.perf_counter()", WALL_CLOCK)
