"""Files that are there whole or not at all, and what the writers of others have left that died before they were.

What is not whole yet bears the name of its writer: the machine, as disks may be shared, and the process.
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
    """Write a file so that it is there whole or not at all.

    Args:
        hint: what to do when it cannot be written.

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
    """Remove from a directory what writers that died have left of files that `write_atomically` was to write there."""
    with contextlib.suppress(OSError):  # no such directory, or not ours: nothing depends on it
        for path in directory.glob(f".*{_UNFINISHED}"):
            if not is_alive(path.name.removesuffix(_UNFINISHED).rpartition(".")[2]):
                path.unlink(missing_ok=True)


def writer() -> str:
    """What this process is called in names of files: `machine-pid`, of letters, digits and one dash."""
    return f"{_machine()}-{os.getpid()}"


def is_alive(name: str) -> bool:
    """Whether the writer of that name may live: of this machine's processes we can see it, of others' we cannot."""
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
    """A file as it is called from here, where it lies below; else from its package on."""
    path = Path(file)
    if path.is_relative_to(Path.cwd()):
        return os.path.relpath(file)
    top = path.parent
    while (top / "__init__.py").is_file() and top != top.parent:
        top = top.parent
    return os.path.relpath(file, top)


__all__ = ["is_alive", "remove_unfinished", "source_name", "write_atomically", "writer"]
