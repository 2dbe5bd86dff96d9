"""Atomic writes of files, and removal of incomplete files of crashed writers.

The name of an incomplete file contains its writer: the machine, as disks may be shared, and the process.
"""

from __future__ import annotations

import contextlib
import os
import platform
import tempfile
from pathlib import Path

from tcverify.errors import UsageError

_UNFINISHED = ".new"


def write_atomically(path: Path, text: str, hint: str = "choose another path with --report-dir") -> None:
    """Write a file atomically.

    Args:
        hint: what to do if it cannot be written.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        suffix = f".{writer()}{_UNFINISHED}"
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=suffix)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}", hint) from None


def remove_unfinished(directory: Path) -> None:
    """Remove from a directory incomplete files that crashed writers left in `write_atomically`."""
    with contextlib.suppress(OSError):  # no such directory, or not ours: harmless
        for path in directory.glob(f".*{_UNFINISHED}"):
            if not is_alive(path.name.removesuffix(_UNFINISHED).rpartition(".")[2]):
                path.unlink(missing_ok=True)


def writer() -> str:
    """The name of this process in file names: `machine-pid`, of letters, digits and one dash."""
    return f"{_machine()}-{os.getpid()}"


def is_alive(name: str) -> bool:
    """Whether the writer of that name may be alive: known for processes of this machine only."""
    machine, _, number = name.rpartition("-")
    if machine not in (_machine(), ""):
        return True
    if not number.isdecimal():
        return False
    try:
        os.kill(int(number), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _machine() -> str:
    return "".join(c for c in platform.node() if c.isascii() and c.isalnum())[:40] or "here"


def source_name(file: str) -> str:
    """A file relative to the current directory, if it is below that; else from its package on."""
    path = Path(file)
    if path.is_relative_to(Path.cwd()):
        return os.path.relpath(file)
    top = path.parent
    while (top / "__init__.py").is_file() and top != top.parent:
        top = top.parent
    return os.path.relpath(file, top)


__all__ = ["is_alive", "remove_unfinished", "source_name", "write_atomically", "writer"]
