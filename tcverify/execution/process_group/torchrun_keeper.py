"""The processes that torchrun starts: keepers, one per rank. The first one also runs a command of tcverify.

A rank that dies ends its group, but never its keeper: the next group has new ranks. Messages to and from a rank pass through
two threads per group, which have separate connections to the store.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from tcverify.errors import TcverifyError, UsageError
from tcverify.execution.process_group import worker
from tcverify.execution.process_group.processes import how_it_ended
from tcverify.execution.process_group.torchrun import VARIABLE, Channel, Store, StoreAddress
from tcverify.system import end_process, scratch, start_process

#: Seconds of one wait. Waiting threads are notified of the end, so this is effectively unbounded.
PATIENCE_SECONDS = 3600.0

#: Seconds that the first keeper, whose process may host the store, waits for the others to notice the end.
PARTING_SECONDS = 30.0


def run_keeper(command: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """Serve as the keeper of a rank until the run ends. The first keeper runs `tcverify COMMAND` and ends with it.

    Returns:
        The exit code: of the command, and 0 for the other keepers.

    Raises:
        UsageError: torchrun has not started this process.
        ExecutorError: its store does not answer.
    """
    try:
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    except (KeyError, ValueError):
        raise UsageError("torchrun has not started this", "start it as torchrun … -m tcverify worker run …") from None
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    place = StoreAddress(host, port, f"tcverify/{environment.get('TORCHELASTIC_RUN_ID', '')}/{attempt}", size)
    has_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = place.connect(master=rank == 0 and not has_agent)
    if rank != 0:
        return serve_keeper(place, rank, store, None)
    given = [*command, "--confirm", "torchrun"] if "--confirm" not in command else list(command)
    with subprocess.Popen(
        [sys.executable, "-m", "tcverify", *given], env={**environment, VARIABLE: place.dumps()}
    ) as beside:
        return serve_keeper(place, rank, store, beside)


def serve_keeper(place: StoreAddress, rank: int, store: Store, beside: subprocess.Popen[bytes] | None) -> int:
    """Serve as a keeper until the run ends, that is until the command `beside` the first one ends; return the exit code.

    SIGTERM, with which torchrun ends its processes, interrupts the command, which then saves its findings.
    """
    events: queue.Queue[dict[str, Any]] = queue.Queue()  # so that signals, too, are attended to at once
    threading.Thread(target=_receive, args=(Channel(place.connect(), f"keeper/{rank}"), events), daemon=True).start()
    if beside is not None:
        threading.Thread(target=_watch, args=(beside, store, place.world_size, events), daemon=True).start()
        signal.signal(signal.SIGTERM, lambda number, frame: beside.send_signal(signal.SIGINT))
        signal.signal(signal.SIGINT, lambda number, frame: beside.send_signal(signal.SIGINT))
    ranks: dict[int, _Rank] = {}
    try:
        while True:
            order = events.get()
            if "gone" in order:
                print(f"tcverify worker: the store of torchrun is gone: {order['gone']}", file=sys.stderr)
                return 1
            if "exit" in order:
                break
            _obey(order, place, rank, ranks)
    finally:
        for one in ranks.values():
            one.end()
        if beside is not None and beside.poll() is None:
            beside.kill()
    _part(store, rank, place.world_size)
    return beside.wait() if beside is not None else 0


def _receive(orders: Channel, events: queue.Queue[dict[str, Any]]) -> None:
    """Pass on the orders for this keeper, the last of which is to exit."""
    order: dict[str, Any] = {}
    try:
        while "exit" not in order:
            text = orders.get(PATIENCE_SECONDS)
            if text is not None:
                order = json.loads(text)
                events.put(order)
    except RuntimeError as error:  # of the store
        events.put({"gone": str(error)})


def _watch(beside: subprocess.Popen[bytes], store: Store, world_size: int, events: queue.Queue[dict[str, Any]]) -> None:
    """Have all keepers exit when the command has ended."""
    beside.wait()
    try:
        for rank in range(world_size):
            Channel(store, f"keeper/{rank}").put(b'{"exit": true}')
    except RuntimeError as error:
        events.put({"gone": str(error)})


def _obey(order: Mapping[str, Any], place: StoreAddress, rank: int, ranks: dict[int, _Rank]) -> None:
    if "end" in order:
        ended = ranks.pop(order["end"], None)
        if ended is not None:
            ended.end()
        return
    number = order["start"]
    with contextlib.suppress(OSError):
        os.chdir(order["directory"])
    ranks[number] = _Rank(place, number, rank, order)


def _part(store: Store, rank: int, size: int) -> None:
    """Say goodbye; the first keeper waits for all others, as far as they live."""
    with contextlib.suppress(RuntimeError):
        deadline = time.monotonic() + PARTING_SECONDS
        gone = store.add("gone", 1)
        while rank == 0 and gone < size and time.monotonic() < deadline:
            time.sleep(0.05)
            gone = store.add("gone", 0)


class _Rank:
    """One rank of one group: its process, and the threads that relay its messages."""

    def __init__(self, place: StoreAddress, number: int, rank: int, order: Mapping[str, Any]) -> None:
        self._rank = rank
        self._ended = threading.Event()
        self._directory = scratch.new_directory("rank")
        rendezvous = place.host, place.port, f"{place.prefix}/group/{number}/ranks"
        arguments = rank, order["world_size"], order["device"], self._directory, None, order["extensions"], rendezvous
        self._process, self._connection = start_process(worker.main, arguments, name=f"rank{rank}")
        self._place, self._told = place, f"group/{number}/told/{rank}"
        told, said = (Channel(place.connect(), name) for name in (self._told, f"group/{number}/said"))
        self._threads = [
            threading.Thread(target=self._tell, args=(told,), daemon=True),
            threading.Thread(target=self._listen, args=(said, self._process, self._connection), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Kill the rank and release everything."""
        self._ended.set()
        with contextlib.suppress(RuntimeError, TcverifyError):
            Channel(self._place.connect(), self._told).put(b"")  # wakes the thread
        end_process(self._process)
        for thread in self._threads:
            thread.join(10)
        self._connection.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _tell(self, told: Channel) -> None:
        with contextlib.suppress(OSError, RuntimeError, TcverifyError):
            while not self._ended.is_set():
                message = told.get(PATIENCE_SECONDS)
                if message:
                    self._connection.send_bytes(message)

    def _listen(self, said: Channel, process: BaseProcess, connection: Connection) -> None:
        head = json.dumps({"rank": self._rank}).encode()
        with contextlib.suppress(RuntimeError):
            try:
                while True:
                    said.put(head + b"\n" + connection.recv_bytes())
            except (EOFError, OSError):
                if not self._ended.is_set():
                    how = how_it_ended(process, os.path.join(self._directory, f"rank{self._rank}.log"))
                    said.put(json.dumps({"rank": self._rank, "lost": how}).encode() + b"\n")


__all__ = ["run_keeper"]
