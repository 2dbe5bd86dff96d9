"""The living processes of one process group, seen from their parent: starting, talking to, watching and killing them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import torch
import torch.distributed as dist

from tcverify.errors import ExecutorError, UsageError
from tcverify.execution.process_group import worker
from tcverify.execution.process_group.messages import Reply, decode_reply
from tcverify.execution.process_group.worker import DeviceType, backend_of
from tcverify.registry.extensions import extensions_here, list_extension_state
from tcverify.system import end_process, limit_blocking, scratch, start_process

#: Seconds until every rank has joined. The first group of a process waits for a new interpreter that imports torch.
START_SECONDS = 120.0


class RankLost(Exception):
    """A rank process has ended.

    Attributes:
        how: how it ended, e.g. "died of SIGKILL".
    """

    def __init__(self, rank: int, how: str) -> None:
        super().__init__(f"rank {rank} {how}")
        self.rank = rank
        self.how = how


class RankGroupProtocol(Protocol):
    """The living ranks of one group, wherever they are. See `RankGroup`."""

    extensions: tuple[str, ...]

    @property
    def pids(self) -> list[int]:
        """The process ids of the ranks that run on this machine, in rank order."""
        ...

    def send(self, rank: int, message: bytes) -> None:
        """Send a message to a rank."""
        ...

    def receive(self, deadline: float) -> tuple[int, Reply] | None:
        """Return the next reply and its rank."""
        ...

    def lost(self, seconds: float) -> RankLost | None:
        """Return a rank that ends within this many seconds."""
        ...

    def kill(self) -> None:
        """End all ranks."""
        ...


@dataclass(slots=True)
class _Rank:
    process: BaseProcess
    connection: Connection


class RankGroup:
    """The processes of one group, in rank order. After any failure in it, kill it: it cannot be repaired.

    Args:
        timeout: seconds that one read from or write to a rank may take.

    Raises:
        ExecutorError: the group cannot be started.
        UsageError: there is no space for its directory.
    """

    def __init__(self, world_size: int, device: DeviceType, core: int | None, timeout: float) -> None:
        _check_backend(device, world_size)
        self.directory = scratch.new_directory("group")
        self.extensions = list_extension_state()
        self._ranks: list[_Rank] = []
        # Also when the owner forgets the group, and at interpreter exit.
        self._kill = weakref.finalize(self, _end, self._ranks, self.directory, os.getpid())
        try:
            for rank in range(world_size):
                arguments = rank, world_size, device, self.directory, core, extensions_here()
                self._ranks.append(_Rank(*start_process(worker.main, arguments, name=f"rank{rank}")))
                limit_blocking(self._ranks[-1].connection, timeout)
            self._wait_until_ready()
        except (OSError, EOFError) as error:
            self.kill()
            raise ExecutorError(f"the processes of the group cannot be started: {error}") from error
        except UsageError as error:  # of this moment, perhaps: the next program asks again
            self.kill()
            raise ExecutorError(f"the processes of the group cannot be started: {error.message}", error.hint) from None
        except BaseException:
            self.kill()
            raise

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        missing = set(range(len(self._ranks)))
        while missing:
            try:
                rank = self._next(deadline)
                if rank is None:
                    raise ExecutorError(f"{name_ranks(missing)} did not join the process group in {START_SECONDS:g} s")
                message = json.loads(self._receive(rank))
            except RankLost as lost:
                raise ExecutorError(f"rank {lost.rank} {lost.how} while the process group was being set up") from None
            if "failed" in message:
                raise ExecutorError(f"rank {rank} cannot join the process group: {message['failed']}")
            missing.discard(rank)

    # ------------------------------------------------------------------------------------------------------- messages

    def send(self, rank: int, message: bytes) -> None:
        """Send a message to a rank.

        Raises:
            RankLost: the rank has ended.
            TimeoutError: the rank takes nothing.
        """
        try:
            self._ranks[rank].connection.send_bytes(message)
        except BlockingIOError:
            raise TimeoutError from None
        except OSError:
            raise RankLost(rank, self._how(rank)) from None

    def receive(self, deadline: float) -> tuple[int, Reply] | None:
        """Return the next reply and its rank, or None when there is none before `deadline` (monotonic clock).

        Raises:
            RankLost: a rank has ended, and everything that it said before has been received.
        """
        rank = self._next(deadline)
        if rank is None:
            return None
        try:
            data: dict[str, Any] = json.loads(self._receive(rank))
            return rank, decode_reply(rank, data, self._receive(rank) if "storages" in data else b"")
        except TimeoutError:
            return None

    def lost(self, seconds: float) -> RankLost | None:
        """Return a rank that ends within this many seconds."""
        ended = wait([r.process.sentinel for r in self._ranks], seconds)
        for rank, one in enumerate(self._ranks):
            if one.process.sentinel in ended:
                return RankLost(rank, self._how(rank))
        return None

    def _next(self, deadline: float) -> int | None:
        """Return a rank that has said something."""
        by_connection = {r.connection: rank for rank, r in enumerate(self._ranks)}
        by_sentinel = {r.process.sentinel: rank for rank, r in enumerate(self._ranks)}
        ready = wait([*by_connection, *by_sentinel], max(0.0, deadline - time.monotonic()))
        for item in ready:  # what a rank said before it ended comes first
            if isinstance(item, Connection):
                return by_connection[item]
        for item in ready:
            if isinstance(item, int):
                raise RankLost(by_sentinel[item], self._how(by_sentinel[item]))
        return None

    def _receive(self, rank: int) -> bytes:
        try:
            return self._ranks[rank].connection.recv_bytes()
        except BlockingIOError:
            raise TimeoutError from None
        except (EOFError, OSError):
            raise RankLost(rank, self._how(rank)) from None

    # ---------------------------------------------------------------------------------------------------------- ending

    @property
    def pids(self) -> list[int]:
        """The process ids, in rank order."""
        return [r.process.pid or 0 for r in self._ranks]

    def kill(self) -> None:
        """Kill all ranks and remove the group's directory. Harmless when already done."""
        self._kill()

    def _how(self, rank: int) -> str:
        return how_it_ended(self._ranks[rank].process, os.path.join(self.directory, f"rank{rank}.log"))


def how_it_ended(process: BaseProcess, log: str) -> str:
    """How a rank's process ended: "died of SIGKILL", or its exit code and the last lines of its log."""
    process.join(5)
    code = process.exitcode
    if code is None:
        return "closed its connection"
    how = f"died of {_signal_name(-code)}" if code < 0 else f"exited with code {code}"
    if code != -signal.SIGKILL and (output := _last_words(log)):
        how += f" (its last words: {output})"
    return how


def _last_words(log: str) -> str:
    try:
        with open(log, errors="replace") as file:
            lines = [line.strip() for line in file if line.strip()]
    except OSError:
        return ""
    fatal = next((i for i, line in enumerate(lines) if line.startswith("Fatal Python error")), len(lines))
    return " | ".join(lines[fatal : fatal + 8] or lines[-8:])[:1000]


def _end(ranks: list[_Rank], directory: str, owner: int) -> None:
    if os.getpid() != owner:  # a forked copy of the owner must not take the group down with it
        return
    for one in ranks:
        end_process(one.process)
        one.connection.close()
    shutil.rmtree(directory, ignore_errors=True)


def _check_backend(device: DeviceType, world_size: int) -> None:
    backend = backend_of(device, world_size)
    if not dist.is_available() or not dist.is_backend_available(backend):
        raise ExecutorError(f"this torch is built without {backend}", "install one that has it, or stay in lockstep")
    if device == "cuda" and not torch.cuda.is_available():
        raise ExecutorError("there is no CUDA device", "use gloo, which runs on the CPU")


def choose_core(core: int | None) -> int | None:
    """Return the CPU core for all ranks of a gloo group; see `ProcessGroupPool`. None where cores cannot be chosen."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    usable = sorted(os.sched_getaffinity(0))
    if core is None:
        worker = os.environ.get("TCVERIFY_WORKER") or os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
        return usable[(int(worker) if worker.isdigit() else 0) % len(usable)]
    if core not in usable:
        raise UsageError(f"core {core} is not one that this process may use", f"use one of {usable}")
    return core


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def name_ranks(ranks: Iterable[int]) -> str:
    """ "rank 1", "ranks 0 and 2"."""
    names = [str(rank) for rank in sorted(ranks)]
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names[:-1])} and {names[-1]}"
