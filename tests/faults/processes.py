"""Looks at processes and waits for what they do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0


def wait_until(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Wait for something that is to happen."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def descendants(pid: int) -> set[int]:
    """All processes that a process has started, and those that they have."""
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        try:
            tasks = Path(f"/proc/{parent}/task").iterdir()
            new = {int(child) for task in tasks for child in (task / "children").read_text().split()}
        except OSError:
            continue
        found |= new
        waiting += new
    return found


def left(place: Path) -> list[Path]:
    """What of ours lies in the place for temporary files: what torch keeps there for the next runs does not count."""
    return [path for path in place.iterdir() if path.name.startswith(("tcverify", "pymp-"))]
