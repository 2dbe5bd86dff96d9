"""Starts the processes of tcverify: ranks, and workers that apply passes."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import multiprocessing
import multiprocessing.forkserver
import os
import resource
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from io import BufferedWriter, FileIO, TextIOWrapper
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tcverify.errors import UsageError
from tcverify.system import scratch

_PR_SET_PDEATHSIG = 1  # of prctl

#: What torch imports when graphs and fake tensors are first used (2 s): imported before the time limit of a pass starts.
LAZY_MODULES = ("torch._dynamo", "torch.fx.experimental.symbolic_shapes")


#: The fork servers of the process that started this one: by PYTHONHASHSEED of their children, the address of the socket.
#: None means that of this process.
_inherited: dict[int | None, str] = {}


def start_server(hash_seed: int | None = None) -> None:
    """Start a fork server, unless it runs. It imports torch and tcverify for 2 s; then it forks in 30 ms.

    A process from `start_process` shares the servers of its parent.

    Args:
        hash_seed: PYTHONHASHSEED of its children, which a forked process cannot change.

    Raises:
        UsageError: there is no space for temporary files, or no process can be started.
    """
    _server(hash_seed).ensure_running()


class _SharedServer(multiprocessing.forkserver.ForkServer):
    """A fork server that the parent has started.

    Args:
        address: of its socket.
    """

    def __init__(self, address: str) -> None:
        super().__init__()
        self._forkserver_address = address
        self._forkserver_alive_fd = os.open(os.devnull, os.O_WRONLY)  # its child closes it

    def ensure_running(self) -> None:
        """It runs, or has ended for good: only the parent starts it again."""


@cache
def _servers(process: int) -> dict[int | None, _ForkServer]:
    """The fork servers of this process: by PYTHONHASHSEED of their children."""
    return {}


def _server(hash_seed: int | None) -> _ForkServer:
    """The one for children with this PYTHONHASHSEED."""
    servers = _servers(os.getpid())
    if hash_seed not in servers:
        servers[hash_seed] = _ForkServer(hash_seed)
    return servers[hash_seed]


class _ForkServer:
    """A fork server separate from multiprocessing's own, which belongs to the user and may import anything.

    Args:
        hash_seed: None means that of this process, if any.
    """

    def __init__(self, hash_seed: int | None) -> None:
        self.changes = {} if hash_seed is None else {"PYTHONHASHSEED": str(hash_seed)}
        self._own: Any = multiprocessing.forkserver.ForkServer()
        self._own.set_forkserver_preload(["tcverify.system.fork_server"])
        self._shared: Any = _SharedServer(_inherited[hash_seed]) if hash_seed in _inherited else None

    @property
    def address(self) -> str | None:
        """Of its socket; None if it has not started."""
        address: str | None = (self._shared or self._own)._forkserver_address
        return address

    def ensure_running(self) -> None:
        """Start it unless it is running. multiprocessing would do so later, and in another directory."""
        if self._shared is not None:
            return
        with (
            _could_start(),
            interrupts_kept_off(),
            main_hidden(),
            scratch.serve_scratch(),
            scratch.set_environment(self.changes),
        ):
            self._own.ensure_running()

    @contextlib.contextmanager
    def asked(self) -> Iterator[None]:
        """Processes of the context that are started inside the block are forked by this server."""
        usual = multiprocessing.forkserver.connect_to_new_process
        multiprocessing.forkserver.connect_to_new_process = self._connect
        try:
            yield
        finally:
            multiprocessing.forkserver.connect_to_new_process = usual

    def _connect(self, fds: Sequence[int]) -> Any:
        if self._shared is not None:
            try:
                return self._shared.connect_to_new_process(fds)
            except (ConnectionRefusedError, FileNotFoundError):  # it has ended
                self._shared = None
                self.ensure_running()
        return self._own.connect_to_new_process(fds)


def start_process(
    target: Callable[..., None],
    arguments: tuple[Any, ...] = (),
    *,
    name: str | None = None,
    hash_seed: int | None = None,
    alone: bool = True,
) -> tuple[BaseProcess, Connection]:
    """Start `target(connection, *arguments)` in a new process that dies with this one, and has its environment.

    Args:
        target: a function of a module.
        hash_seed: PYTHONHASHSEED of the process; costs a fork server of its own.
        alone: whether it starts no processes itself. Its parent must end one that does.

    Returns:
        The process and our end of the connection.

    Raises:
        UsageError: there is no space for temporary files, or no process can be started.
    """
    context, server = multiprocessing.get_context("forkserver"), _server(hash_seed)
    server.ensure_running()
    running = {seed: one.address for seed, one in _servers(os.getpid()).items() if one.address is not None}
    start = _Start(
        target, scratch.directory(), {**os.environ, **scratch.variables(), **server.changes},
        {**running, None: running[hash_seed]},
    )  # fmt: skip
    with _could_start(), interrupts_kept_off(), main_hidden(), server.asked():
        ours, theirs = context.Pipe()
        with theirs:
            process = context.Process(target=_run, args=(start, theirs, *arguments), name=name, daemon=alone)
            process.start()
    return process, ours


@contextlib.contextmanager
def _could_start() -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError) as error:
        why = "what it is forked from has ended" if isinstance(error, EOFError) else error
        hint = "see that there is memory, and room for processes and open files (ulimit -a)"
        raise UsageError(f"a process cannot be started: {why}", hint) from None


@dataclass(frozen=True)
class _Start:
    """How a process starts.

    Attributes:
        directory: of its parent.
        servers: to share, see `_inherited`.
    """

    target: Callable[..., None]
    directory: str
    environment: dict[str, str]
    servers: dict[int | None, str]


def _run(start: _Start, *arguments: Any) -> None:
    for name in os.environ.keys() - start.environment.keys():
        del os.environ[name]
    os.environ.update(start.environment)
    _inherited.update(start.servers)
    scratch.move_in(scratch.child_directory(start.directory, os.getpid()))
    # A separate process group, so that processes started by foreign code in it can be ended with it.
    os.setpgid(0, 0)
    resource.setrlimit(
        resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1])
    )  # crashes leave no core file
    _die_with_parent()
    start.target(*arguments)


class _Said(FileIO):
    """A file that never raises: if the disk is full, output is lost and the writer continues."""

    def write(self, data: Any) -> int:
        with contextlib.suppress(OSError):
            return super().write(data) or 0
        return len(memoryview(data).cast("B"))


def log_to(path: str, *, nameless: bool = True) -> None:
    """Redirect the output of this process (standard output and error, and crash reports) to a file.

    Args:
        nameless: unlink it: the parent of this process has it open, and nothing is left behind, however both end.
    """
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    if nameless:
        os.unlink(path)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    for name, number in (("stdout", 1), ("stderr", 2)):
        file = BufferedWriter(_Said(number, "w", closefd=False))
        setattr(sys, name, TextIOWrapper(file, errors="backslashreplace", line_buffering=True))
    faulthandler.enable(file=2)


def end_process(process: BaseProcess) -> None:
    """Kill a process from `start_process` and its children, wait for its end, and remove its files."""
    if process.pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, or has no process group yet
            os.killpg(process.pid, signal.SIGKILL)
        if process.is_alive():
            process.kill()
        process.join()
        scratch.clear(process.pid, owner=not process.daemon)


def _die_with_parent() -> None:
    """Kill this process and its group when its parent or the fork server has ended, whatever they are doing.

    The system does so. Where it cannot (F_SETSIG is Linux's), a thread does so when the parent has ended, unless the process
    is stopped or a call holds the interpreter lock.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    with contextlib.suppress(OSError, AttributeError, TypeError):
        server: Any = multiprocessing.forkserver._forkserver
        os.close(server._forkserver_alive_fd)  # else the server waits for us, and never ends
        server._forkserver_alive_fd = None
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    with contextlib.suppress(OSError, AttributeError):
        _signal_at_end(parent.sentinel)

    def watch(sentinel: int) -> None:
        wait([sentinel])
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, args=(parent.sentinel,), name="watches the parent", daemon=True).start()


def _signal_at_end(pipe: int) -> None:
    """Have the system kill this process and its group when the other end of a pipe is closed, see fcntl(2): F_SETSIG."""
    fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)


@contextlib.contextmanager
def interrupts_kept_off() -> Iterator[None]:
    """Child processes never see Ctrl-C, which a terminal sends to the whole group: only this process handles it.

    They inherit the blocked signal. This process receives it once they have started.
    """
    resource_tracker.ensure_running()  # it would unblock the signal at its start
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def limit_blocking(connection: Connection, seconds: float) -> None:
    """Set a time limit for a single read or write, which then raises BlockingIOError: a peer may stop in mid-message."""
    interval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6) or 1)
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)


def limit_memory(more: int) -> None:
    """Limit the growth of this process's memory in bytes; allocations beyond it fail."""
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = _memory("VmData") + more
    if limits[0] == resource.RLIM_INFINITY or wanted < limits[0]:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_DATA, (wanted, limits[1]))


def machine_memory() -> int:
    """Return the machine's memory in bytes, or the limit of the container."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # there is no limit
            found = min(found, int(Path(limit).read_text()))
    return found


def resident_bytes() -> int:
    """Return the memory of this process, without pages shared with files."""
    return _memory("RssAnon")


def _memory(field: str) -> int:
    """A line of /proc/self/status, in bytes; 0 if missing."""
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) << 10
    return 0


@contextlib.contextmanager
def main_hidden() -> Iterator[None]:
    """Keep multiprocessing from running the caller's script again in every child.

    The children need nothing from it, and a script without `if __name__ == "__main__"` would start children of its own
    there. multiprocessing finds the script by these two attributes and takes their absence for an interactive session.
    """
    main = sys.modules["__main__"]
    hidden: dict[str, Any] = {name: main.__dict__[name] for name in ("__file__", "__spec__") if name in main.__dict__}
    try:
        main.__dict__.pop("__file__", None)
        main.__dict__["__spec__"] = None
        yield
    finally:
        main.__dict__.pop("__spec__", None)
        main.__dict__.update(hidden)
