"""Starts the processes that tcverify works with: ranks, and workers that apply passes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any

#: What torch imports when graphs and fake tensors are first used (2 s): better before the clock of a pass runs.
LAZY_MODULES = ("torch._dynamo", "torch.fx.experimental.symbolic_shapes")


def forkserver() -> ForkServerContext:
    """Return the context that forks processes from a server which has torch and tcverify imported: 30 ms a process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tcverify.verifier", *LAZY_MODULES])
    return context


def start_process(
    target: Callable[..., None],
    arguments: tuple[Any, ...] = (),
    *,
    name: str | None = None,
    hash_seed: int | None = None,
    alone: bool = True,
) -> tuple[BaseProcess, Connection]:
    """Start `target(connection, *arguments)` in a new process that dies with this one.

    Args:
        target: a function of a module.
        hash_seed: PYTHONHASHSEED of the process; costs a new interpreter.
        alone: whether it starts no processes of its own. One that does is to be ended by who starts it.

    Returns:
        The process and our end of the connection.
    """
    context: ForkServerContext | SpawnContext = (
        forkserver() if hash_seed is None else multiprocessing.get_context("spawn")
    )
    ours, theirs = context.Pipe()
    with interrupts_kept_off(), main_hidden(), _environment("PYTHONHASHSEED", hash_seed):
        process = context.Process(target=_run, args=(target, theirs, *arguments), name=name, daemon=alone)
        process.start()
    theirs.close()
    return process, ours


def _run(target: Callable[..., None], *arguments: Any) -> None:
    die_with_parent()
    target(*arguments)


def die_with_parent(last: Callable[[], None] = lambda: None) -> None:
    """End this process when its parent has ended, whatever this process is doing.

    Args:
        last: what remains to be done then, since nobody else is left to do it.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel

    def watch() -> None:
        wait([sentinel])
        last()
        os._exit(1)

    threading.Thread(target=watch, name="watches the parent", daemon=True).start()


@contextlib.contextmanager
def interrupts_kept_off() -> Iterator[None]:
    """Processes started here never see Ctrl-C, which a terminal sends to everybody: it is this process's business alone.

    They inherit the blocked signal. For this process it is only put off until they have started.
    """
    resource_tracker.ensure_running()  # it would unblock the signal when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def limit(connection: Connection, seconds: float) -> None:
    """Let one read or write take so long at most; it then raises BlockingIOError. Against processes that stop in mid-message."""
    interval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6) or 1)
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)


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


@contextlib.contextmanager
def _environment(name: str, value: int | None) -> Iterator[None]:
    if value is None:
        yield
        return
    before = os.environ.get(name)
    os.environ[name] = str(value)
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
