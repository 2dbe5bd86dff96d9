"""Runs the tests that are nearest to a change, by the imports between them, until the time is over.

    python -m tests.quick [--since REV] [--files N] [--seconds S] [OPTIONS OF PYTEST]

What is left of them when the time is over is reported as skipped.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.conftest import UNTIL
from tests.quality.nearest import nearest

ROOT = Path(__file__).parents[1]


def changed(since: str, root: Path = ROOT) -> list[Path]:
    """Return the files that differ from a revision, and those that git does not know; ignored ones aside.

    Raises:
        SystemExit: git knows no such revision, or no repository here.
    """
    found: list[str] = []
    for command in (
        ["diff", "--name-only", "--no-renames", "-z", since, "--"],
        ["ls-files", "--others", "--exclude-standard", "-z"],
    ):
        said = subprocess.run(["git", *command], cwd=root, capture_output=True, text=True, check=False)
        if said.returncode:
            raise SystemExit(f"git {command[0]}: {said.stderr.strip()}")
        found += filter(None, said.stdout.split("\0"))
    return [root / name for name in dict.fromkeys(found)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--since", default="HEAD", metavar="REV", help="what counts as changed; default: what is not committed"
    )
    parser.add_argument("--files", type=int, default=30, help="how many files of tests at most; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=55.0, help="after which no test begins; default: %(default)s")
    known, options = parser.parse_known_args()
    paths = changed(known.since)
    reached = nearest(paths)
    if not reached:
        print(f"{len(paths)} files differ from {known.since}; no test reaches them")
        return 0
    files = reached[: known.files]
    which = "which run" if len(files) == len(reached) else f"of which the {len(files)} nearest run"
    print(
        f"{len(paths)} files differ from {known.since}; {len(reached)} files of tests reach them, {which}", flush=True
    )
    # load, not worksteal: the nearest first
    command = [sys.executable, "-m", "pytest", "-n", "auto", "--dist", "load", "-q", *options, *map(str, files)]
    environment = {**os.environ, UNTIL: str(time.monotonic() + known.seconds)}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
