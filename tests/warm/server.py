"""Imports what commands import, then forks a process for each of them."""

from __future__ import annotations

import array
import atexit
import contextlib
import gc
import importlib
import json
import multiprocessing.process
import multiprocessing.util
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NoReturn

from _pytest.assertion.rewrite import AssertionRewritingHook

ROOT = Path(__file__).parents[2]

#: What commands import.
MODULES = (
    "tcverify.cli.main",
    "tcverify.cli.running",
    "tcverify.replay",
    "tcverify.report.html",
    "tcverify.passes",
    "tcverify.cli.template",
    "tcverify.pytest_plugin.running",
    "hypothesis",
    "pytest",
    "torch._dynamo",
    "torch.fx.experimental.symbolic_shapes",
)


# -------------------------------------------------------------------------------------------------------------- forking


def serve(address: str, owner: socket.socket) -> dict[str, Any]:
    """Fork a process for every request until the owner has ended. Returns in those processes alone: what to run."""
    woken, wakes = os.pipe()
    for end in (woken, wakes):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(64)
    running: dict[int, socket.socket] = {}
    selector = selectors.DefaultSelector()
    for source in (owner, listener, woken):
        selector.register(source, selectors.EVENT_READ)
    owner.sendall(b"ready")
    while True:
        for key, _ in selector.select():
            if key.fileobj is owner:
                _end(running)
            elif key.fileobj == woken:
                os.read(woken, 4096)
                _tell(running, selector)
            elif key.fileobj is listener:
                connection, _ = listener.accept()
                request, files = _read(connection)
                pid = os.fork()
                if pid == 0:
                    selector.close()
                    for one in (owner, listener, connection, *running.values()):
                        one.close()  # here: when they are collected, others have their numbers
                    _leave(files)
                    return request
                for file in files:
                    os.close(file)
                running[pid] = connection
                selector.register(connection, selectors.EVENT_READ, pid)
                connection.send(json.dumps({"pid": pid}).encode())
            elif key.data in running:  # whoever asked for it has gone
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(key.data, signal.SIGKILL)
                selector.unregister(running.pop(key.data))


def _end(running: Mapping[int, socket.socket]) -> NoReturn:
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    os._exit(0)


def _tell(running: dict[int, socket.socket], selector: selectors.BaseSelector) -> None:
    """Tell who asked how their processes have ended."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            connection = running.pop(pid, None)
            if connection is not None:
                selector.unregister(connection)
                with contextlib.suppress(OSError):
                    connection.send(json.dumps({"code": os.waitstatus_to_exitcode(status)}).encode())
                connection.close()


def _read(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A request, and the files of the process."""
    files = array.array("i")
    _, ancillary, _, _ = connection.recvmsg(64, socket.CMSG_SPACE(4 * files.itemsize))
    for _, _, data in ancillary:
        files.frombytes(data)
    body, *rest = files
    with open(body, "rb") as file:
        file.seek(0)
        request: dict[str, Any] = json.load(file)
    return request, rest


def _leave(files: Sequence[int]) -> None:
    """Let go, in a new process, of what is the server's."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, (file, name) in enumerate(zip(files, ("stdin", "stdout", "stderr"), strict=True)):
        os.dup2(file, number)
        stream = open(number, "w" if number else "r", closefd=False)  # noqa: SIM115 - for as long as the process
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.closerange(3, 1 << 16)
    sys.stderr.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]


# -------------------------------------------------------------------------------------------------------------- running


def execute(request: Mapping[str, Any], path: Sequence[str]) -> None:
    """Do what `python ARGUMENTS` does.

    Args:
        path: where modules are looked for after what the request says.
    """
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # what it was when multiprocessing was imported
    multiprocessing.util.spawnv_passfds = _copied
    first, *rest = request["arguments"]
    beside = {"-c": "", "-m": os.getcwd()}.get(first, str(Path(first).resolve().parent))
    sys.path[:] = [beside, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *path]
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(sys.modules["__main__"]))  # noqa: S102 - a command of a test
    elif first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")


_spawned = multiprocessing.util.spawnv_passfds
_HASH_SEED = os.environ.get("PYTHONHASHSEED")


def _copied(path: bytes, arguments: Sequence[Any], files: Sequence[int]) -> int:
    """Where multiprocessing would start an interpreter, fork this process: it has imported the same.

    Not where that is to hash otherwise, nor where this process has threads, whose locks a copy would find locked; one that
    waits for the parent's end holds none.
    """
    code, *rest = map(str, arguments[arguments.index("-c") + 1 :])
    starts = code.startswith("from multiprocessing.forkserver ") or (
        code.startswith("from multiprocessing.spawn ") and sys.version_info < (3, 12)  # later ones wait for ever
    )
    idle = 1 + sum(thread.name == "watches the parent" for thread in threading.enumerate())
    if not starts or os.environ.get("PYTHONHASHSEED") != _HASH_SEED or len(os.listdir("/proc/self/task")) > idle:
        return _spawned(path, arguments, files)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later warn of any thread
        pid = os.fork()
    if pid:
        return pid
    ended = 1
    try:
        atexit._clear()
        low = 3
        for file in sorted(files):
            os.closerange(low, file)
            low = file + 1
        os.closerange(low, 1 << 16)
        resource_tracker._resource_tracker.__init__()  # type: ignore[misc]  # the files of this one are closed
        sys.argv = ["-c", *rest]
        exec(code, {"__name__": "__main__"})  # noqa: S102 - multiprocessing's own line
        ended = 0
    except SystemExit as error:
        ended = error.code if isinstance(error.code, int) else 0
    except BaseException:  # noqa: BLE001 - the interpreter would tell it, too
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(ended)


def main(address: str, owner: str) -> None:
    path = [entry for entry in sys.path if Path(entry).resolve() != ROOT]
    # else pytest says of every plugin that it cannot rewrite its assertions
    AssertionRewritingHook._warn_already_imported = lambda self, name: None  # type: ignore[method-assign]
    gc.disable()
    for name in MODULES:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    request = serve(address, socket.socket(fileno=int(owner)))
    atexit.register(gc.unfreeze)  # what is never looked at libraries call leaked, when the interpreter ends
    execute(request, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
