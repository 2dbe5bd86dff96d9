"""Where files lie that nobody needs after a run: logs, rendezvous files, whatever passes and torch write beside them.

A process that starts others has one directory for all of that, which only its user can read. It holds a lock on it (flock),
which the system releases however the process ends, and by which everybody sees whether the directory is still in use:

- a process that ends removes its directory;
- of one that is killed, the fork server does it (see `fork_server`), which ends after it;
- where that was killed as well, the next run of the same user does.

A process that is started has a directory of its own inside of it, as the place for temporary files: it is often killed, and what
it leaves there goes when its end is noticed.
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

#: What the names of the directories begin with.
PREFIX = "tcverify."

#: Tells a fork server which directory is that of its owner.
VARIABLE = "TCVERIFY_DIRECTORY"

#: Tells a process, whose temporary files go with the run, where others would be.
LASTING = "TCVERIFY_LASTING"

#: Longest path below which the socket of a fork server can have its name, which is 107 bytes at most.
_LONGEST = 107 - len("/tcverify.12345678/pymp-12345678/listener-12345678")

#: After all others of multiprocessing, which removes files of its own here.
_LAST = -1000


@dataclass(frozen=True, slots=True)
class _Own:
    path: str
    process: int
    lock: int  # held for as long as it is open


def directory() -> str:
    """Return the directory of this process; made when it is first needed, as is the time to remove what others have left.

    Raises:
        UsageError: there is no room for one.
    """
    if not os.path.isdir(_of(os.getpid()).path):  # somebody has tidied up
        _of.cache_clear()
    return _of(os.getpid()).path


@cache
def _of(process: int) -> _Own:
    """The directory of a process, this one: a forked copy of it gets one of its own."""
    with _room():
        root = _root()
        remove_left(root)
        return _make(root, process)


def new_directory(kind: str) -> str:
    """Make a directory in that of this process, and return its path. Raises as `directory` does."""
    place = directory()
    with _room():
        return tempfile.mkdtemp(prefix=f"{kind}-", dir=place)


def new_log(kind: str) -> tuple[BinaryIO, str]:
    """Make a file in the directory of this process for another one to write to; return it, to be read, and its path.

    Raises:
        UsageError: there is no room for it.
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
    """Remove what killed processes of this user have left below a directory."""
    for path in Path(root).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.getuid():
                remove_unused(str(path))


def remove_unused(path: str, patience: float = 0.0) -> None:
    """Remove a directory that `directory` has made, unless its owner lives.

    Args:
        patience: seconds to wait for an owner that is about to end: a process lets go of one file after the other.
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
    """Hold a directory; whether nobody else does. Raises OSError where files cannot be locked, so that nobody can tell."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def variables() -> dict[str, str]:
    """Environment variables by which a process keeps its temporary files in the directory of this one."""
    return {"TMPDIR": directory(), LASTING: lasting_directory(), "TORCHINDUCTOR_CACHE_DIR": _inductor_cache()}


@contextlib.contextmanager
def set_environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Let processes that are started inside have these environment variables."""
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
    """A fork server that is started inside keeps its files in the directory of this process, and removes it in the end."""
    path, place = directory(), tempfile.tempdir
    with set_environment({**variables(), VARIABLE: path}):
        tempfile.tempdir = path  # by which multiprocessing makes the socket of the server
        try:
            yield
        finally:
            tempfile.tempdir = place


def child_directory(path: str, process: int) -> str:
    """The directory that a process has for itself, in that of the one that has started it."""
    return os.path.join(path, str(process))


def move_in(path: str) -> None:
    """Keep temporary files of this process in a directory from now on. Where it cannot be made nothing changes.

    What it lies in is not made again: it may have been removed, because its owner has been killed.
    """
    with contextlib.suppress(OSError):
        os.mkdir(path, mode=0o700)
    if os.path.isdir(path):
        os.environ["TMPDIR"] = tempfile.tempdir = path


def clear(process: int) -> None:
    """Remove what a process that has ended, and that this one had started, has left in its place."""
    with contextlib.suppress(UsageError):  # not `directory`: it may have been removed, and nothing else be left to do
        shutil.rmtree(child_directory(_of(os.getpid()).path, process), ignore_errors=True)


def lasting_directory() -> str:
    """Where temporary files belong that are to outlive the run."""
    return os.environ.get(LASTING) or tempfile.gettempdir()


def _root() -> str:
    """Where directories are made: where temporary files belong, unless the names of sockets would be too long there."""
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
            os.close(lock)  # somebody has taken it for one that was left, in the moment before it was locked


def _ours(lock: int) -> bool:
    """Whether a new directory is ours: as well where files cannot be locked, and nobody removes it therefore."""
    try:
        return _held(lock)
    except OSError:
        return True


def _remove(path: str) -> None:
    """Remove a directory, in which a process that is about to end may still make a file."""
    for _ in range(20):
        shutil.rmtree(path, ignore_errors=True)
        if not os.path.lexists(path):
            return
        time.sleep(0.05)


def _inductor_cache() -> str:
    """Where torch keeps what Inductor compiles, for all processes of a user: not among what goes with a run."""
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
