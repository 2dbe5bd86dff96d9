"""Processes come from a fork server: one for each PYTHONHASHSEED, which a process that is forked cannot change."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection

import pytest

from tcverify.processes import end_process, start_process, start_server


def hashes(connection: Connection) -> None:
    """Tell what the hash of a string is, and who has forked this process."""
    connection.send_bytes(f"{hash('tcverify')} {os.getppid()}".encode())
    connection.recv_bytes()


def ask(hash_seed: int | None) -> tuple[int, int]:
    process, connection = start_process(hashes, hash_seed=hash_seed)
    try:
        said, server = map(int, connection.recv_bytes().decode().split())
    finally:
        end_process(process)
        connection.close()
    return said, server


def test_strings_are_hashed_in_another_order_where_that_is_asked_for() -> None:
    usual, server = ask(None)
    other, other_server = ask(7)
    assert (usual != other, server != other_server) == (True, True)
    assert ask(7) == (other, other_server)
    assert ask(None) == (usual, server)


@pytest.mark.parametrize("hash_seed", [None, 7])
def test_a_server_that_has_died_is_started_again(hash_seed: int | None) -> None:
    said, server = ask(hash_seed)
    os.kill(server, signal.SIGKILL)
    os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)
    again, new = ask(hash_seed)
    assert new != server
    assert hash_seed is None or again == said


def test_what_is_started_ahead_is_what_forks() -> None:
    start_server(8)
    start_server(8)
    assert ask(8)[1] == ask(8)[1]
