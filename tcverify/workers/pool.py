"""Workers on this machine: processes that do slices, and that are started again when they die."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType

from tcverify.application.guarded import LOAD_TIMEOUT, MESSAGE_TIMEOUT
from tcverify.campaign import Statistics
from tcverify.system import end_process, limit_blocking, start_process
from tcverify.workers.slices import SliceOutcome
from tcverify.workers.worker import Worker

#: Times that a slice is begun: a worker may die for reasons that have nothing to do with it, but hardly twice.
ATTEMPTS = 2

#: Seconds in which a worker begins with a slice: it may have to import torch and the pass, which also another process of it does.
BEGIN_SECONDS = 3 * LOAD_TIMEOUT

#: Seconds in which a worker that is told to end answers with what it has.
END_SECONDS = 60.0

#: Seconds of one wait. More does not count as silence: this process was stopped, and so perhaps was the worker.
STEP = 1.0


@dataclass(eq=False)
class _Process:
    """A worker.

    Attributes:
        slice: what it does: number, text, and how often it has been begun.
        silent: seconds for which it has said nothing.
        patience: seconds for which that is normal; a worker says so itself with all that it says, see `longest_silence`.
    """

    process: BaseProcess
    connection: Connection
    slice: tuple[int, str, int] | None = None
    silent: float = 0.0
    patience: float = BEGIN_SECONDS


class LocalCrew:
    """So many workers on this machine. They start when they are needed.

    Args:
        tell: is told in one line when a worker has died, or is killed since it says nothing any more.
    """

    def __init__(self, size: int, tell: Callable[[str], None]) -> None:
        self._size = size
        self._tell = tell
        self._workers: list[_Process | None] = [None] * size
        self._refused: list[int] = []  # slices that no worker lives long enough to take
        self._ending = False

    def __enter__(self) -> LocalCrew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def size(self) -> int:
        """See `Crew.size`."""
        return self._size

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that run."""
        return [one.process.pid or 0 for one in self._workers if one is not None]

    def submit(self, number: int, text: str) -> None:
        """See `Crew.submit`."""
        self._ending = False
        self._begin(number, text, 1)

    def next(self) -> tuple[int, str | None]:
        """See `Crew.next`."""
        while True:
            if self._refused:
                return self._refused.pop(), None
            busy = {one.connection: one for one in self._workers if one is not None and one.slice is not None}
            before = time.monotonic()
            ready = wait(list(busy), STEP)
            waited = min(time.monotonic() - before, STEP)
            for connection, worker in busy.items():
                if worker.slice is None:
                    continue
                number = worker.slice[0]
                if connection in ready:
                    worker.silent = 0.0
                    try:
                        answer = worker.connection.recv_bytes().decode()
                    except (EOFError, OSError):
                        if not self._again(worker, self._bury(worker)):
                            return number, None
                        continue
                    if answer.startswith("{"):
                        worker.slice = None
                        return number, answer
                    worker.patience = float(answer)
                    continue
                worker.silent += waited
                patience = END_SECONDS if self._ending else worker.patience
                if worker.silent > patience:
                    self._bury(worker)
                    if not self._again(worker, f"was silent for {patience:.0f} s and was killed"):
                        return number, None

    def _again(self, worker: _Process, how: str) -> bool:
        """Have another worker do what one was at that has ended, if that may be; whether it does."""
        number, text, attempt = worker.slice or (0, "", 0)
        again = attempt < ATTEMPTS and not self._ending
        what = "its slice is repeated" if again else "its slice is abandoned"
        self._tell(f"a worker {how}; {what}")
        if again:
            self._begin(number, text, attempt + 1)
        return again

    def interrupt(self) -> None:
        """See `Crew.interrupt`."""
        self._ending = True
        for one in self._workers:
            if one is not None:
                one.silent = 0.0
        for one in self._workers:
            if one is not None and one.slice is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one.process.pid or 0, signal.SIGUSR1)

    def close(self) -> None:
        """Kill the workers. What they have started ends with them."""
        for one in self._workers:
            if one is not None:
                self._bury(one)

    def _begin(self, number: int, text: str, attempt: int) -> None:
        place = next(i for i, one in enumerate(self._workers) if one is None or one.slice is None)
        for _ in range(ATTEMPTS):
            worker = self._workers[place]
            if worker is None:
                process, connection = start_process(serve_worker, (place,), name=f"worker{place}", alone=False)
                limit_blocking(connection, MESSAGE_TIMEOUT)
                worker = self._workers[place] = _Process(process, connection)
            worker.slice, worker.silent, worker.patience = (number, text, attempt), 0.0, BEGIN_SECONDS
            try:
                worker.connection.send_bytes(text.encode())
            except OSError:  # it died while it had nothing to do
                how = self._bury(worker)
            else:
                return
        self._tell(f"a worker {how} before it took a slice; the slice is abandoned")
        self._refused.append(number)

    def _bury(self, worker: _Process) -> str:
        """End a worker, which may have ended already; return what became of it."""
        worker.process.join(0.2)
        code = worker.process.exitcode
        end_process(worker.process)
        worker.connection.close()
        self._workers[self._workers.index(worker)] = None
        if code is None:
            return "closed its connection"
        return f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def serve_worker(connection: Connection, place: int) -> None:
    """What runs in a worker: does slices until the driver is gone.

    Args:
        place: of the worker in its crew; the ranks of its process groups run on a core of their own, as far as there are enough.
    """
    os.environ["TCVERIFY_WORKER"] = str(place)
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # blocked: Ctrl-C is the driver's business, which sends SIGUSR1
    busy = interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        handler = signal.getsignal(signal.SIGINT)
        if busy and callable(handler):
            handler(signal.SIGINT, frame)

    def beat(patience: float) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # half a message would be taken for another
        try:
            connection.send_bytes(str(patience).encode())
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    signal.signal(signal.SIGUSR1, interrupt)
    with Worker() as worker, contextlib.suppress(EOFError, OSError):
        while True:
            text = connection.recv_bytes().decode()
            busy = True
            answer = (
                worker.work(text, beat=beat)
                if not interrupted
                else SliceOutcome(Statistics(), stop="interrupted").dumps()
            )
            busy = False
            connection.send_bytes(answer.encode())


__all__ = ["ATTEMPTS", "LocalCrew", "serve_worker"]
