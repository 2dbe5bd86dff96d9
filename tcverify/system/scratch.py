"""Directories for files that are not needed after a run: logs, rendezvous files, temporary files of passes and torch.

A process that starts others has one such directory, which only its user can read. It holds a lock on it (flock),
which the system releases however the process ends, and which shows whether the directory is still in use:

- a process that ends removes its directory;
- if it is killed, the fork server does so (see `fork_server`), which ends after it, and so are those of its children;
- if that was killed as well, the next run of the same user does.

A child process has its own directory inside, for temporary files: it is often killed, and its files are
removed when its end is noticed.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from multiprocessing.util import Finalize
from pathlib import Path
from typing import BinaryIO

from tcverify.errors import UsageError

#: Prefix of the names of the directories.
PREFIX = "tcverify."

#: Environment variable with the owner's directory, for a fork server.
VARIABLE = "TCVERIFY_DIRECTORY"

#: Environment variable with the original directory for temporary files, for a process whose own are removed with the run.
LASTING = "TCVERIFY_LASTING"

#: Longest path in which the socket of a fork server can be created: socket names are limited to 107 bytes.
_LONGEST = 107 - len("/tcverify.12345678/pymp-12345678/listener-12345678")

#: After all other exit handlers of multiprocessing, which removes its own files here.
_LAST = -1000


@dataclass(frozen=True, slots=True)
class _Own:
    path: str
    process: int
    lock: int  # held as long as it is open


def directory() -> str:
    """Return the directory of this process; created on first use, which also removes directories of crashed runs.

    Raises:
        UsageError: there is no space for one.
    """
    if not os.path.isdir(_of(os.getpid()).path):  # it was deleted
        _of.cache_clear()
    return _of(os.getpid()).path


@cache
def _of(process: int) -> _Own:
    """The directory of this process: a forked copy of the process gets a new one."""
    with _room():
        root = _root()
        remove_left(root)
        return _make(root, process)


def new_directory(kind: str) -> str:
    """Create a directory in that of this process, and return its path. Raises as `directory` does."""
    place = directory()
    with _room():
        return tempfile.mkdtemp(prefix=f"{kind}-", dir=place)


def new_log(kind: str) -> tuple[BinaryIO, str]:
    """Create a file in the directory of this process for another one to write to; return it, opened for reading, and its path.

    Raises:
        UsageError: there is no space for it.
    """
    place = directory()
    with _room():
        descriptor, path = tempfile.mkstemp(prefix=f"{kind}-", suffix=".log", dir=place)
        return open(descriptor, "rb"), path


@contextlib.contextmanager
def _room() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"temporary files cannot be created: {error}", "free disk space, or set TMPDIR to another directory"
        ) from None


def remove_left(root: str) -> None:
    """Remove directories of killed processes of this user."""
    for path in Path(root).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.getuid():
                remove_unused(str(path))


def remove_unused(path: str, patience: float = 0.0) -> None:
    """Remove a directory that `directory` has created, unless its owner is alive.

    Args:
        patience: seconds to wait for an owner that is about to end: a process closes its files one by one.
    """
    deadline = time.monotonic() + patience
    with contextlib.suppress(OSError):  # it is gone
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            while not _held(lock):
                if time.monotonic() >= deadline:
                    return
                time.sleep(0.05)
            _remove(path)
        finally:
            os.close(lock)


def _held(lock: int) -> bool:
    """Lock a directory; returns whether no other process holds the lock. Raises OSError if files cannot be locked."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def variables() -> dict[str, str]:
    """Environment variables for a process that keeps its temporary files in the directory of this one."""
    return {"TMPDIR": directory(), LASTING: lasting_directory(), "TORCHINDUCTOR_CACHE_DIR": _inductor_cache()}


@contextlib.contextmanager
def set_environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Set these environment variables for processes that are started inside the block."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def serve_scratch() -> Iterator[None]:
    """A fork server that is started inside the block keeps its files in the directory of this process, and removes it
    in the end."""
    path, place = directory(), tempfile.tempdir
    with set_environment({**variables(), VARIABLE: path}):
        tempfile.tempdir = path  # by which multiprocessing makes the socket of the server
        try:
            yield
        finally:
            tempfile.tempdir = place


def child_directory(path: str, process: int) -> str:
    """The directory of a child process, within that of its parent."""
    return os.path.join(path, str(process))


def move_in(path: str) -> None:
    """Keep temporary files of this process in a directory from now on. If it cannot be created, nothing changes.

    Its parent directory is not created again: it may have been removed because its owner was killed.
    """
    with contextlib.suppress(OSError):
        os.mkdir(path, mode=0o700)
    if os.path.isdir(path):
        os.environ["TMPDIR"] = tempfile.tempdir = path


def clear(process: int, *, owner: bool = False) -> None:
    """Remove the files of a child process that has ended.

    Args:
        owner: whether it may have started processes. Where paths are long, its own directory is not within ours but beside it.
    """
    with contextlib.suppress(UsageError):  # the directory may have been removed already
        ours = _of(os.getpid()).path
        shutil.rmtree(child_directory(ours, process), ignore_errors=True)
        if owner:
            remove_left(os.path.dirname(ours))


def lasting_directory() -> str:
    """Where temporary files belong that outlive the run."""
    return os.environ.get(LASTING) or tempfile.gettempdir()


def _root() -> str:
    """The parent of the directories: that of temporary files, unless names of sockets would be too long there."""
    places = [tempfile.gettempdir(), lasting_directory(), "/tmp"]
    return next((one for one in places if len(os.fsencode(one)) <= _LONGEST and os.access(one, os.W_OK)), places[0])


def _make(root: str, process: int) -> _Own:
    while True:
        path = tempfile.mkdtemp(prefix=PREFIX, dir=root)
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            if _ours(lock) and os.path.isdir(path):
                Finalize(None, _remove, args=(path,), exitpriority=_LAST)
                return _Own(path, process, lock)
            os.close(lock)  # another process has removed it in the moment before it was locked


def _ours(lock: int) -> bool:
    """Whether a new directory is ours: also if files cannot be locked, since then no process removes it."""
    try:
        return _held(lock)
    except OSError:
        return True


def _remove(path: str) -> None:
    """Remove a directory, in which a process that is about to end may still create a file."""
    for _ in range(20):
        shutil.rmtree(path, ignore_errors=True)
        if not os.path.lexists(path):
            return
        time.sleep(0.05)


def _inductor_cache() -> str:
    """Where torch caches what Inductor compiles, for all processes of a user: not removed with a run."""
    try:
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (KeyError, OSError):  # it has no name
        user = str(os.getuid())
    return os.environ.get("TORCHINDUCTOR_CACHE_DIR") or os.path.join(lasting_directory(), f"torchinductor_{user}")


__all__ = [
    "PREFIX",
    "VARIABLE",
    "child_directory",
    "clear",
    "directory",
    "lasting_directory",
    "move_in",
    "new_directory",
    "new_log",
    "remove_left",
    "remove_unused",
    "serve_scratch",
    "set_environment",
    "variables",
]
