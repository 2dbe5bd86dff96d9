"""Runs the command line, in this process or in one of its own, and compares whole outputs with files.

`TCVERIFY_UPDATE_SNAPSHOTS=1 pytest tests/cli` writes the files anew; look at the difference before you keep them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import strategies as st

import tcverify.cli.commands.run  # noqa: F401 - its help lists strategies: those before `pin` adds one
from tcverify.cli import main, running
from tcverify.program import PARTIAL, GraphBuilder, InputSpec, Mesh, Program, Recipe, spmd_program
from tcverify.registry.strategies import STRATEGIES
from tests import warm

ROOT = Path(__file__).parents[2]
SNAPSHOTS = Path(__file__).parent / "snapshots"

#: Passes as a user writes them, in a file that the project has never seen.
FOREIGN = '''\
import os
import signal
import time

import torch.fx as fx


def reductions(gm):
    return [n for n in gm.graph.nodes if n.op == "call_function" and "all_reduce" in str(n.target)]


def does_nothing(gm):
    return gm


class DropsReduction:
    """Works in place, returns None."""

    def __call__(self, gm):
        for node in reductions(gm):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
        gm.recompile()


drops_reduction = DropsReduction()


def drops_reduction_in_a_copy(gm):
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    copy = fx.GraphModule(gm, graph)
    DropsReduction()(copy)
    return copy


def drops_reduction_with_inputs(gm, example_inputs):
    assert len(example_inputs) == len([n for n in gm.graph.nodes if n.op == "placeholder"])
    DropsReduction()(gm)
    return gm


def helper(node):
    raise ValueError(f"no [bold]idea[/bold] \\x1b[31mwhat\\x1b[0m {node.name} is\\n``` is")


def raises(gm):
    for node in reductions(gm):
        helper(node)


def returns_nonsense(gm):
    return 42 if reductions(gm) else gm


def hangs(gm):
    while reductions(gm):
        time.sleep(0.01)


def exits(gm):
    if reductions(gm):
        print("last words", flush=True)
        os._exit(7)


def is_killed(gm):
    if reductions(gm):
        os.kill(os.getpid(), signal.SIGKILL)


def touches_and_hangs(gm):
    """Where there is something to do, says that it runs, then takes its time."""
    if reductions(gm):
        with open("running", "a") as file:
            file.write("again ")
        time.sleep(60)
'''


@dataclass(frozen=True)
class Outcome:
    """What a command did."""

    code: int
    out: str
    err: str


def run_here(*arguments: str, columns: int | None = 80) -> Outcome:
    """Run the command line in this process, from the current directory."""
    variables = {"COLUMNS": str(columns) if columns else None, "NO_COLOR": "1"}
    result = CliRunner().invoke(main.main, list(arguments), env=variables, prog_name="tcverify")
    return Outcome(result.exit_code, result.stdout, result.stderr)


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FORCE_COLOR", "PYTEST"))}
    return {**kept, "COLUMNS": "80", "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}


def start(*command: str, cwd: Path, stdout: int | None = None) -> warm.Started:
    """Start a command in a process group of its own."""
    return warm.start(*command, cwd=cwd, env=environment(), stdout=stdout)


def finish(process: warm.Started) -> Outcome:
    """Wait for a command to end."""
    return Outcome(*warm.finish(process))


def run_apart(*command: str, cwd: Path) -> Outcome:
    """Run a command in a process of its own."""
    return finish(start(*command, cwd=cwd))


def normalise(text: str, *directories: Path) -> str:
    """Replace what differs from run to run and from machine to machine."""
    for directory in directories:
        text = text.replace(str(directory), "DIR")
    for pattern, replacement in (
        (r"(?<=[ /])[0-9a-f]{8}(?=[/ .\n])", "00000000"),
        (r"\d+\.\d s, \d+ programs?/s", "1.0 s, 10 programs/s"),
        (r"(?m)^time: .*(\n    .*)*", "time: …"),
        (r"torch \d\S*, python \d\S*", "torch X, python X"),
        (r"[\d.e+]+ times the\s+rounding\s+error", "1e9 times the rounding error"),
        (r"(?m)^ *[~^]+ *\n", ""),
        (r",\s+by\s+the\s+programs\s+that\s+were\s+traced", ""),  # before Python 3.12
        (r"(?m)^((?:tcverify|torch|python|hypothesis|platform|cores|cuda)  +)\S.*$", r"\1…"),
    ):
        text = re.sub(pattern, replacement, text)
    return text


@pytest.fixture
def snapshot() -> Callable[[str, str], None]:
    """Compares a text with tests/cli/snapshots/NAME.txt."""

    def compare(name: str, text: str) -> None:
        path = SNAPSHOTS / f"{name}.txt"
        if os.environ.get("TCVERIFY_UPDATE_SNAPSHOTS") == "1":
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"there is no {path.name}; TCVERIFY_UPDATE_SNAPSHOTS=1 writes it"
        assert text == path.read_text(encoding="utf-8"), "TCVERIFY_UPDATE_SNAPSHOTS=1 writes the new output"

    return compare


def reduce_add_norm() -> Program:
    """all_reduce → add_rms_norm with a replicated residual, and a reader of the sum: what P1 rewrites."""
    x = InputSpec("x", (4, 8), placements=(("tp", PARTIAL),))
    inputs = [x, InputSpec("residual", (4, 8)), InputSpec("gain", (8,), recipe=Recipe("norm_weight"))]

    def build(b: GraphBuilder) -> object:
        x, residual, gain = b.input("x"), b.input("residual"), b.input("gain")
        total = b.call("tensor_cast::all_reduce", x, b.rank, b.group("tp"))
        return b.call("tensor_cast::add_rms_norm", total, residual, gain, 1e-6)

    return spmd_program(Mesh.grid({"tp": 2}), inputs, build, seed=1)


def pin(patch: pytest.MonkeyPatch, directory: Path) -> None:
    """Work in `directory`, with a strategy "one" that draws one program, and FOREIGN in mine.py."""
    patch.chdir(directory)
    patch.setitem(STRATEGIES, "one", lambda mesh, world_size: st.just(reduce_add_norm()))
    patch.setattr(running, "set_hypothesis_home_dir", lambda path: None)
    (directory / "mine.py").write_text(FOREIGN)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory for all tests of a module, prepared by `pin`."""
    directory = tmp_path_factory.mktemp("place")
    with pytest.MonkeyPatch.context() as patch:
        pin(patch, directory)
        yield directory


def only_case(reports: Path) -> str:
    """The id of the one counterexample in a directory."""
    (folder,) = [path for path in reports.iterdir() if path.is_dir()]
    return folder.name


def says(outcome: Outcome, code: int, *texts: str) -> None:
    """Assert the exit code and what standard error says, without a traceback."""
    assert outcome.code == code, (outcome.out, outcome.err)
    assert "Traceback" not in outcome.out + outcome.err
    flat = " ".join(outcome.err.split())
    for text in texts:
        assert text in flat, outcome.err
