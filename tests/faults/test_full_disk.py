"""What becomes of runs where the disk is full: a small one, which is filled."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.processes import ROOT

MOUNT = "mount -t tmpfs -o size=2m none"


@pytest.fixture
def disk(place: Path) -> Path:
    """Where a small disk can be mounted."""
    if shutil.which("unshare") is None:
        pytest.skip("there is no `unshare` here, by which a process gets mounts of its own")
    command = ["unshare", "-Urm", "sh", "-c", f"{MOUNT} {place}"]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if tried.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {tried.stderr.strip()}")
    return place


def on(disk: Path, *arguments: object) -> list[dict[str, Any]]:
    """What `full_disk` says of its runs."""
    python = shlex.join([sys.executable, "-m", "tests.faults.full_disk", str(disk), *map(str, arguments)])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(disk)}
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", f"{MOUNT} {disk} && exec {python}"],
        env=environment, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.fault(
    "the disk fills while a run writes (state, events, counterexample, reports, corpus)",
    "what is found is told; the run ends with code 2 and names the file where the state or the counterexample cannot be "
    "written, goes on and says so where reports or the corpus cannot; each file is whole or missing",
)
def test_a_run_on_a_disk_that_fills(disk: Path) -> None:
    rooms = [0, 4096, 8192, 16384, 20480, 28672, 53248, 114688, 1 << 20]
    runs = on(disk, *rooms)
    assert len(runs) == len(rooms)
    assert [run["damaged"] for run in runs] == [[]] * len(rooms)
    for run in runs:
        assert run["end"] == "refuted" or run["end"].endswith("cannot be written: No space left on device")
    assert runs[0]["end"].startswith("UsageError")
    assert [run["found"] for run in runs[4:]] == [["pass-raised"]] * len(runs[4:])
    assert any(run["end"].startswith("UsageError") and run["found"] for run in runs)
    assert any(run["end"] == "refuted" and "No space left" in str(run["told"]) for run in runs)
    assert runs[-1]["end"] == "refuted"
    assert "No space left" not in str(runs[-1]["told"])


@pytest.mark.slow
@pytest.mark.fault(
    "the disk of temporary files is full when ranks or the process of a pass start",
    "ranks: `executor-failed`, and new ones when there is room; what a pass prints is lost, and not held against it",
)
def test_processes_that_start_on_a_full_disk(disk: Path) -> None:
    (said,) = on(disk)
    assert said["inside"]
    assert (
        "cannot join the process group" in said["ranks"] or "while the process group was being set up" in said["ranks"]
    )
    assert (said["pass"], said["then"]) == ("passed", True)


def test_output_that_cannot_be_written_is_an_error_of_one_line(tmp_path: Path) -> None:
    """Here /dev/full takes the place of a file on a full disk."""
    command = [sys.executable, "-m", "tcverify", "passes"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=full, stderr=subprocess.PIPE,
            text=True, timeout=250, check=False,
        )  # fmt: skip
    assert done.stderr.splitlines() == [
        "Error: the output cannot be written: No space left on device",
        "  hint: is the disk full?",
    ]
    assert done.returncode == 2
