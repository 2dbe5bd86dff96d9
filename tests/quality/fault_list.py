"""The planted faults: what they are, and how they are put into a copy of the project and taken out again.

`tests/quality/planted/AREA.toml` lists them. Each replaces text that occurs exactly once in one file, and may name the
test that shows it.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).parent / "planted"


class DoesNotApply(Exception):
    """The text that a fault replaces is not there, or not only once."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A small mistake.

    Attributes:
        area: the part of the project that it is in, as its list is named.
        name: unique among all.
        file: relative to the root of the project.
        why: what becomes wrong.
        old, new: the text that is replaced, and what takes its place.
        test: that is known to show it, such as `tests/unit/test_sums.py::test_total`; empty where none is named.
    """

    area: str
    name: str
    file: str
    why: str
    old: str
    new: str
    test: str = ""

    def apply(self, text: str) -> str:
        """Return the text of the file with the mistake. Raises `DoesNotApply`."""
        times = text.count(self.old)
        if times != 1:
            raise DoesNotApply(f"{self.name}: what it replaces occurs {times} times in {self.file}")
        return text.replace(self.old, self.new)

    @contextmanager
    def planted(self, root: Path) -> Iterator[None]:
        """The project at `root` with the mistake. Raises `DoesNotApply`."""
        path = root / self.file
        before, times = path.read_bytes(), path.stat()
        path.write_text(self.apply(before.decode()), encoding="utf-8")
        # Bytecode goes by the time and the size of its source: every plant has a time of its own, in whole seconds.
        os.utime(path, (times.st_atime, int(times.st_mtime) + next(_PLANTS)))
        try:
            yield
        finally:
            path.write_bytes(before)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


_PLANTS = itertools.count(10)


def read_faults(folder: Path = FOLDER) -> list[Fault]:
    """Return all planted faults, by area."""
    return [
        Fault(
            path.stem,
            **{key: row[key].strip("\n") for key in ("name", "file", "why", "old", "new")},
            test=row.get("test", ""),
        )
        for path in sorted(folder.glob("*.toml"))
        for row in tomllib.loads(path.read_text(encoding="utf-8"))["fault"]
    ]
