"""Programs that refuted a pass in earlier runs: the first to be tried in the next one."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from tcverify.application import PassFacts
from tcverify.cases.counterexample import FILE_NAME, Counterexample, read_counterexample, write_counterexample
from tcverify.errors import TcverifyError

#: Failures of one pass on one mesh that are kept; beyond them the oldest go.
LIMIT = 32


class Failures:
    """The earlier failures of one pass on one mesh: a directory of counterexamples.

    Args:
        state_dir: `failures/<pass>-<mesh>/` below it is used.
    """

    def __init__(self, state_dir: Path, facts: PassFacts, mesh: str) -> None:
        name = facts.target or facts.name
        readable = "".join(c if c.isascii() and c.isalnum() else "-" for c in f"{name}-{mesh}")[-80:]
        exact = hashlib.sha256(f"{name} {mesh}".encode(errors="backslashreplace")).hexdigest()[:8]
        self.directory = state_dir / "failures" / f"{readable}-{exact}"

    def __iter__(self) -> Iterator[Counterexample]:
        """Yield them, the newest first. What cannot be read any more is dropped."""
        for path in self._paths():
            try:
                yield read_counterexample(path)
            except TcverifyError:
                shutil.rmtree(path.parent, ignore_errors=True)

    def __len__(self) -> int:
        return len(self._paths())

    def add(self, case: Counterexample) -> None:
        """Remember a failure. That it cannot be written is no reason to end a run."""
        with contextlib.suppress(TcverifyError):
            write_counterexample(case, self.directory)
        for path in self._paths()[LIMIT:]:
            shutil.rmtree(path.parent, ignore_errors=True)

    def discard(self, case: Counterexample) -> None:
        """Forget a failure that is gone."""
        shutil.rmtree(self.directory / case.id, ignore_errors=True)

    def _paths(self) -> list[Path]:
        def age(path: Path) -> tuple[int, str]:
            return -path.stat().st_mtime_ns, path.parent.name

        try:
            return sorted(self.directory.glob(f"*/{FILE_NAME}"), key=age)
        except OSError:
            return []


__all__ = ["Failures"]
