"""The workers of a Ray cluster: each slice is a task, which Ray retries once if a worker or its machine dies."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError, TaskCancelledError

from tcverify.errors import UsageError
from tcverify.ray.address import LOCAL
from tcverify.ray.pools import ray_executors
from tcverify.workers import Worker

#: Time limit for a cluster to answer, in seconds.
CONNECT_SECONDS = 20.0

#: Number of times that Ray retries a task whose worker died.
RETRIES = 1


class RayCrew:
    """The workers of a Ray cluster. Machines may join and leave it; unfinished work of those that leave is done elsewhere.

    Args:
        address, size, tell: see `ray_crew`.

    Raises:
        UsageError: there is no such cluster.
    """

    def __init__(self, address: str, size: int | None, tell: Callable[[str], None]) -> None:
        self._size = size
        self._tell = tell
        self._numbers: dict[Any, int] = {}  # of the slices in progress, by the reference of their outcome
        self._mine = not ray.is_initialized()
        if self._mine:
            _connect(address, size)
        self._work = ray.remote(max_retries=RETRIES, num_cpus=1)(work)

    def __enter__(self) -> RayCrew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def size(self) -> int:
        """Desired number of slices in progress."""
        here = int(ray.cluster_resources().get("CPU", 0))
        return max(1, here if self._size is None else min(self._size, here))

    def submit(self, number: int, text: str) -> None:
        """See `Crew.submit`."""
        self._numbers[self._work.remote(text)] = number

    def next(self) -> tuple[int, str | None]:
        """See `Crew.next`."""
        (ready,), _ = ray.wait(list(self._numbers), num_returns=1)
        number = self._numbers.pop(ready)
        try:
            answer: str = ray.get(ready)
        except TaskCancelledError:
            return number, None
        except RayError as error:
            self._tell(f"a worker of Ray died in slice {number}, and another one again: {type(error).__name__}")
            return number, None
        return number, answer

    def interrupt(self) -> None:
        """See `Crew.interrupt`."""
        for reference in self._numbers:
            ray.cancel(reference)

    def close(self) -> None:
        """Leave the cluster; one of this machine alone ends."""
        with contextlib.suppress(RayError):
            for reference in self._numbers:
                ray.cancel(reference, force=True)
        self._numbers.clear()
        if self._mine:
            ray.shutdown()


def _connect(address: str, size: int | None) -> None:
    """Join a cluster, or start one on the loopback interface."""
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error", "configure_logging": True}
    try:
        if address == LOCAL:
            cores = size if size is not None else len(os.sched_getaffinity(0))
            ray.init(address=LOCAL, num_cpus=cores, include_dashboard=False, _node_ip_address="127.0.0.1", **quiet)
        else:
            host, _, port = address.rpartition(":")
            if host and port.isdecimal() and "/" not in host:  # ray itself would search for it for minutes
                socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
            ray.init(address=address, **quiet)
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise UsageError(
            f"--ray {address}: {type(error).__name__}: {first}",
            "give the address that `ray start --head` has told, or --ray local for a cluster of this machine",
        ) from error


def work(text: str) -> str:
    """The task: processes a slice and returns its outcome. Resources that it needs stay in the process for the next one."""
    if not _WORKERS:
        _WORKERS.append(Worker(ray_executors).__enter__())
        _attend_to_cancellation()
    part = json.loads(text)
    begun = os.path.isdir(part["report_dir"])  # which a worker makes; told where machines share it
    again = [f"slice {part['number']} is done again: the worker that was at it died, or its machine left"]
    return _WORKERS[0].work(text, *(again if begun else ()))


def _attend_to_cancellation() -> None:
    """Make sure that a cancelled task ends at once, also while it waits for a pass or a process group.

    Ray cancels as if Ctrl-C were pressed, but without a signal: a process blocked in a system call does
    not notice. So a thread sends it an otherwise unused signal.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGURG, lambda number, frame: None)
    main = threading.main_thread().ident or 0

    def watch() -> None:
        while seen := os.read(reader, 64):
            if signal.SIGINT in seen:
                signal.pthread_kill(main, signal.SIGURG)

    threading.Thread(target=watch, name="watches for cancellation", daemon=True).start()


#: The worker of this process, if it exists.
_WORKERS: list[Worker] = []


__all__ = ["RETRIES", "RayCrew", "work"]
