"""Runs pytest with the plugin in processes of their own."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TypeAlias

import pytest

from tests import warm

ROOT = Path(__file__).parents[2]

#: The plugin is named only where installing tcverify has not made pytest load it by itself.
_LOADED = any(point.value == "tcverify.pytest_plugin" for point in entry_points(group="pytest11"))
COMMAND = ["-m", "pytest", *([] if _LOADED else ["-p", "tcverify.pytest_plugin"])]


@dataclass(frozen=True)
class Ran:
    """What a run of pytest did."""

    code: int
    out: str

    def section(self, title: str) -> str:
        """The part of the output that stands under a line such as "=== title ==="."""
        _, _, rest = self.out.partition(f"= {title} =")
        body = rest.partition("\n")[2]
        lines = []
        for line in body.splitlines():
            if line.startswith("====") or line.startswith("!!!!"):
                break
            lines.append(line)
        return "\n".join(lines)


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "FORCE_COLOR", "CI"))}
    return {**kept, "COLUMNS": "80", "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}


def start(directory: Path, *arguments: str, **variables: str) -> warm.Started:
    """Start pytest in a directory, in a process group of its own."""
    return warm.start(*COMMAND, *arguments, cwd=directory, env={**environment(), **variables}, stderr=subprocess.STDOUT)


def finish(process: warm.Started) -> Ran:
    return Ran(*warm.finish(process)[:2])


def run(directory: Path, *arguments: str, **variables: str) -> Ran:
    """Run pytest in a directory."""
    return finish(start(directory, *arguments, **variables))


def write(directory: Path, files: dict[str, str]) -> None:
    """Make a directory that holds files and is the root of its tests."""
    for name, text in {"pytest.ini": "[pytest]\n", **files}.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)


#: Runs of pytest in a directory of their own that happen once, whatever number of workers asks for them.
Once: TypeAlias = Callable[[str, Callable[[Path], list[Ran]]], tuple[Path, list[Ran]]]


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """Makes runs that several tests look at: `once(name, make)` gives the directory and what `make(directory)` returned."""
    base = tmp_path_factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # the workers' common directory

    def get(name: str, make: Callable[[Path], list[Ran]]) -> tuple[Path, list[Ran]]:
        directory = root / name
        directory.mkdir(exist_ok=True)
        result = root / f"{name}.json"
        with open(root / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not result.exists():
                result.write_text(json.dumps([[ran.code, ran.out] for ran in make(directory)]))
        return directory, [Ran(*ran) for ran in json.loads(result.read_text())]

    return get
