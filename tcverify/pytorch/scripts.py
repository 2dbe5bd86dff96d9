"""Runs a script of torch alone: in a process of its own, where nothing of tcverify or of its caller's settings can be seen."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple


class ScriptRun(NamedTuple):
    """How a script ended.

    Attributes:
        code: its exit code; None if it was stopped because its time was over.
        out, errors: what it has printed.
    """

    code: int | None
    out: str
    errors: str


def run_alone(script: Path, place: Path, seconds: float, cache: Path) -> ScriptRun:
    """Run a script, and end whatever processes it leaves behind.

    Args:
        place: its current directory, where temporary files go, too.
        cache: where Inductor keeps compiled C++ headers, which take most of a minute; scripts may share it.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHONPATH", "TORCH"))}
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(place)}
    process = subprocess.Popen(
        [sys.executable, str(script.resolve())], cwd=place, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
        env={**kept, **own, "TORCHINDUCTOR_CACHE_DIR": str(cache)},
    )  # fmt: skip
    try:
        out, errors = process.communicate(timeout=seconds)
        return ScriptRun(process.returncode, out, errors)
    except subprocess.TimeoutExpired:
        _kill_session(process)
        return ScriptRun(None, *process.communicate())
    finally:
        _kill_session(process)
        process.wait()


def _kill_session(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


__all__ = ["ScriptRun", "run_alone"]
