"""Commands in processes of their own that need not import torch again: a server that has imported it forks them.

`start` is for tests as `subprocess.Popen([sys.executable, ...])` is, and `run` as `subprocess.run` is. What they start is a real
process, in a session of its own, with the arguments, environment, directory and files that it was given, and it ends as an
interpreter ends. Only two things differ: what it would import is imported already, and the fork servers that it starts are
copies of it. Tests of what is imported, and when, start an interpreter instead; so does every test where TCVERIFY_TESTS_COLD is
set, as it is every night.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, TypeAlias

from tests.warm import client

ROOT = Path(__file__).parents[2]

#: Where this is set, every command imports for itself, as it does for a user.
COLD = "TCVERIFY_TESTS_COLD"


class Process:
    """A command under way, with the names of `subprocess.Popen`.

    Attributes:
        pid: of the process, which leads a session and a process group.
        returncode: None until it has ended, and been asked about.
    """

    def __init__(self, connection: socket.socket, out: IO[bytes] | None, err: IO[bytes] | None) -> None:
        self._connection = connection
        self._out, self._err = out, err
        self.pid = client.receive(connection, "pid")
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The return code, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self.returncode = client.receive(self._connection, "code")
            except (BlockingIOError, TimeoutError):
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0) from None
            self._connection.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end; return what it has written, as far as nobody else was to read that."""
        self.wait(timeout)
        return _taken(self._out), _taken(self._err)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


#: A command under way.
Started: TypeAlias = Process | subprocess.Popen[str]


def _taken(file: IO[bytes] | None) -> str:
    """What a file holds, once."""
    if file is None or file.closed:
        return ""
    with file:
        file.seek(0)
        return file.read().decode(errors="backslashreplace")


def start(
    *arguments: str, cwd: Path, env: Mapping[str, str], stdout: int | None = None, stderr: int | None = None
) -> Started:
    """Start `python ARGUMENTS`.

    Args:
        arguments: -m MODULE …, -c CODE …, or FILE ….
        stdout, stderr: a file; for stderr also `subprocess.STDOUT`. None: kept for `communicate`.
    """
    if COLD in os.environ or (arguments[0].startswith("-") and arguments[0] not in ("-m", "-c")):
        return interpreter(*arguments, cwd=cwd, env=env, stdout=stdout, stderr=stderr)
    out = tempfile.TemporaryFile() if stdout is None else None  # noqa: SIM115 - open for as long as the process
    err = tempfile.TemporaryFile() if stderr is None else None  # noqa: SIM115
    first = out.fileno() if out is not None else stdout
    assert first is not None
    second = err.fileno() if err is not None else first if stderr in (None, subprocess.STDOUT) else stderr
    with open(os.devnull) as nothing:
        connection = client.ask(_server(), arguments, str(cwd), env, (nothing.fileno(), first, second))
    return Process(connection, out, err)


def finish(process: Started, seconds: float = 240) -> tuple[int, str, str]:
    """Wait for a command to end, and return its code, output and errors.

    Raises:
        subprocess.TimeoutExpired: it takes longer; it and its process group are killed.
    """
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    assert process.returncode is not None
    return process.returncode, out or "", err or ""


def run(
    *arguments: str, cwd: Path, env: Mapping[str, str], stderr: int | None = None, seconds: float = 240
) -> tuple[int, str, str]:
    """Run `python ARGUMENTS` to its end. Arguments as of `start`; returns and raises as `finish` does."""
    return finish(start(*arguments, cwd=cwd, env=env, stderr=stderr), seconds)


def interpreter(
    *arguments: str, cwd: Path, env: Mapping[str, str], stdout: int | None = None, stderr: int | None = None
) -> subprocess.Popen[str]:
    """Start an interpreter, which imports for itself. Arguments as of `start`."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if stdout is None else stdout,
        stderr=subprocess.PIPE if stderr is None else stderr,
        text=True,
        errors="backslashreplace",
        start_new_session=True,
    )


def executables(directory: Path, commands: Mapping[str, Sequence[str]]) -> None:
    """Write executables for shells: `NAME MORE` runs `python ARGUMENTS MORE`."""
    for name, arguments in commands.items():
        through = f'-I -S "{client.__file__}" "{_server()}"' if COLD not in os.environ else ""
        quoted = " ".join(f"'{argument}'" for argument in arguments)
        (directory / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {through} {quoted} "$@"\n')
        (directory / name).chmod(0o755)


@cache
def _server() -> str:
    """The address of the server of this process, with which it ends."""
    directory = tempfile.mkdtemp(prefix="warm-", dir="/tmp")  # a socket's name is short
    address = f"{directory}/socket"
    ours, theirs = socket.socketpair()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.warm.server", address, str(theirs.fileno())],
        cwd=ROOT, env={**kept, "PYTHONPATH": str(ROOT)}, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
    )  # fmt: skip
    theirs.close()
    assert ours.recv(16) == b"ready", "the server of commands has not started"

    def end() -> None:
        ours.close()
        server.wait()
        with contextlib.suppress(OSError):
            os.unlink(address)
            os.rmdir(directory)

    atexit.register(end)
    return address


__all__ = ["COLD", "Process", "Started", "executables", "finish", "interpreter", "run", "start"]
