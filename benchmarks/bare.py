"""The bare collectives of pairs of programs, carried out by processes that do nothing else.

A separate module, which the processes import: they cannot import from the running script.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import torch

from tcverify.execution import Lockstep
from tcverify.execution.process_group import worker
from tcverify.execution.process_group.messages import decode_collective, encode_collective
from tcverify.ops.distributed import perform
from tcverify.program import Program
from tcverify.system import end_process, start_process


def rank_main(connection: Any, rank: int, world_size: int, directory: str, core: int | None) -> None:
    """A rank that does nothing but collectives."""
    worker._join(rank, world_size, "cpu", directory, core, None)
    calls = [decode_collective(data) for data in json.loads(connection.recv_bytes())]
    ready: dict[Any, torch.Tensor] = {}
    for call in calls:
        ready.setdefault((call.shape, call.dtype), torch.ones(call.shape, dtype=call.dtype))
    connection.send_bytes(b"ready")
    with torch.no_grad():
        while connection.recv_bytes() == b"go":
            for call in calls:
                perform(call, ready[call.shape, call.dtype])
            connection.send_bytes(b"done")
    os._exit(0)


class Bare:
    """Processes that carry out the collectives of pairs, and nothing else."""

    def __init__(self, drawn: Sequence[tuple[Program, Program]], world_size: int, core: int | None) -> None:
        self._pairs = len(drawn)
        self._directory = tempfile.TemporaryDirectory()
        arguments = world_size, self._directory.name, core
        self._ranks = [start_process(rank_main, (rank, *arguments)) for rank in range(world_size)]
        runs = [run for pair in drawn for run in map(Lockstep().run, pair)]
        for rank, (_, connection) in enumerate(self._ranks):
            calls = [encode_collective(call.collective) for run in runs for call in run.ranks[rank].calls]
            connection.send_bytes(json.dumps(calls).encode())
        self.collectives = sum(len(run.ranks[0].calls) for run in runs) / len(drawn)
        self._receive(b"ready")

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process, _ in self._ranks]

    def run(self) -> int:
        for _, connection in self._ranks:
            connection.send_bytes(b"go")
        self._receive(b"done")
        return self._pairs

    def _receive(self, what: bytes) -> None:
        for _, connection in self._ranks:
            if connection.recv_bytes() != what:
                raise RuntimeError("a rank says something else")

    def close(self) -> None:
        for process, _ in self._ranks:
            end_process(process)
        self._directory.cleanup()
